"""The shape of the source tree: who may import whom, and what an import may cost."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import core as jax_core
from jax._src import linear_util as jax_linear_util
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import mlir as jax_mlir
from jax.extend.core import ClosedJaxpr

import eformer

SRC = Path(__file__).parents[1] / "src"
FILES = sorted((SRC / "eformer").rglob("*.py"))
# Not rich: plum, which the core needs, imports it.
OPTIONAL = ("flax", "equinox", "haiku", "optax", "orbax", "msgpack", "matplotlib", "torch", "bitsandbytes")
OPTIONAL += ("tokenizers", "jinja2", "transformers")
MAX_LINES = 400


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}

# A module may import its own layer and the ones above it in this table. The longest matching prefix decides;
# "=name" matches that module alone, not what is inside it.
LAYERS: list[tuple[str, ...]] = [
    (
        "eformer.errors",
        "eformer._messages",
        "eformer._settings",
        "eformer._record",
        "eformer._stacks",
        "eformer._table",
        "eformer._jax",
    ),
    ("eformer._core", "eformer._kernels"),
    ("eformer._formats",),
    ("eformer._quantize", "eformer._lora"),
    ("eformer.jaximus", "eformer.ops"),
    ("eformer.serialization", "eformer.integrations", "eformer._calibrate"),
    ("eformer.models",),
    ("eformer.cli",),
    ("=eformer", "=eformer.__main__"),
]
# Rooms that may import less than their layer allows.
ONLY: dict[str, tuple[str, ...]] = {
    "eformer._kernels": (*LAYERS[0], "eformer._kernels"),
    "eformer._core": (*LAYERS[0], "eformer._core"),
}


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def layer(module: str) -> int:
    """Position in LAYERS, -1 for a module nobody has given a place."""
    best, found = "", -1
    for position, rooms in enumerate(LAYERS):
        for room in rooms:
            name = room.removeprefix("=")
            fits = module == name if room.startswith("=") else inside(module, name)
            if fits and len(name) > len(best):
                best, found = name, position
    return found


def imports(module: str, tree: ast.AST, *, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every imported module of `tree` and its line, at any depth, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if is_package else module.split(".")[:-1]
                anchor = ".".join(here[: len(here) - node.level + 1])
                base = f"{anchor}.{base}" if base else anchor
            for alias in node.names:
                # `from package import name` means the module `package.name` where there is one.
                full = f"{base}.{alias.name}"
                yield (full if full in MODULES or full == "jax._src" else base), node.lineno


def imports_of(module: str, path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(), filename=str(path))
    return list(imports(module, tree, is_package=path.name == "__init__.py"))


def private_jax(module: str, source: str, *, is_package: bool = False) -> list[int]:
    """Lines that reach `jax._src`: by import, by attribute, or by a name given to a call such as import_module."""
    tree = ast.parse(source)
    lines = [line for name, line in imports(module, tree, is_package=is_package) if inside(name, "jax._src")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            lines.append(node.lineno)
        elif isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            names = [arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            lines += [node.lineno for name in names if inside(name, "jax._src")]
    return lines


def wrong_way(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None when it may."""
    for room, allowed in ONLY.items():
        if inside(module, room) and not any(inside(target, other) for other in allowed):
            return f"{room} may import only {', '.join(allowed)}"
    if layer(target) > layer(module):
        return f"{target} stands above it: move the shared part down, or pass it in as an argument"
    return None


def test_only_the_compat_module_reaches_private_jax():
    found = [
        f"{path.relative_to(SRC)}:{line}"
        for module, path in MODULES.items()
        if not inside(module, "eformer._jax")
        for line in private_jax(module, path.read_text(), is_package=path.name == "__init__.py")
    ]
    assert not found, f"jax._src is reached outside eformer/_jax: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax import _src",
        "from jax._src import core",
        "def f():\n    from jax._src.core import Trace",
        "import jax\njax._src.core",
        "import importlib\nimportlib.import_module('jax._src.core')",
        "__import__('jax._src')",
    ],
)
def test_every_way_to_private_jax_is_seen(source):
    assert private_jax("eformer._core.trace", source)


# Parts of JAX that are public by name but hardly documented: which rooms may import them, beside eformer._jax.
UNDOCUMENTED_IMPORTS: dict[str, tuple[str, ...]] = {
    "jax.extend": (),
    "jax.interpreters": (),
    "jax.core": (),
    "jax.experimental.custom_partitioning": ("eformer._kernels",),
    "jax.experimental.pallas": ("eformer._kernels.tpu",),
}
# Attributes of JAX's tracers, traces, abstract values, primitives and jaxprs that other rooms may touch.
UNDOCUMENTED_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "aval": ("eformer._core", "eformer._kernels"),
    "bind": ("eformer._core", "eformer._kernels"),
    "def_abstract_eval": ("eformer._core", "eformer._kernels"),
    "def_impl": ("eformer._core", "eformer._kernels"),
    "eqns": ("eformer._formats",),
    "full_lower": ("eformer._core",),
    "multiple_results": ("eformer._core", "eformer._kernels"),
    "process_primitive": ("eformer._core",),
    "to_concrete_value": ("eformer._core",),
    "to_tangent_aval": ("eformer._kernels",),
}
# Documented methods of arrays that only concrete ones have, and words that mean something else where we use them.
NOT_OF_JAX = frozenset({"delete", "devices", "is_deleted", "unsafe_buffer_pointer"})
NOT_OF_JAX |= {"backend", "layout", "module", "params", "primitive", "wrap"}


def insides_of_jax() -> frozenset[str]:
    """Names of attributes that the objects of JAX's own machinery have, and arrays and Python's types have not."""
    insides = (
        jax_core.Trace,
        jax_core.Tracer,
        jax_core.ShapedArray,
        jax_core.Primitive,
        jax_core.Jaxpr,
        ClosedJaxpr,
        jax_core.JaxprEqn,
        jax_batching.BatchTracer,
        jax_mlir.LoweringRuleContext,
        jax_mlir.ModuleContext,
        jax_linear_util.WrappedFun,
    )
    everyday = (jax.Array, jax.ShapeDtypeStruct, jax.sharding.NamedSharding, np.ndarray, Path, dict, str, tuple, set)
    names = {name for cls in insides for name in attributes(cls)} - {name for cls in everyday for name in dir(cls)}
    return frozenset(name for name in names if not name.startswith("__")) - NOT_OF_JAX


def attributes(cls: type) -> set[str]:
    fields = [name for base in cls.__mro__ for name in (*vars(base).get("__annotations__", ()), *slots(base))]
    return {*dir(cls), *fields}


def slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def touched(source: str, names: frozenset[str]) -> list[tuple[str, int]]:
    """Attributes of these names, and their lines: read from anything but `self` and modules, or defined for JAX."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            owner = ast.unparse(node.value)
            is_module = owner == "jax" or (owner.startswith("jax.") and owner.replace(".", "").isalpha())
            found += [] if owner == "self" or is_module else [(node.attr, node.lineno)]
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("traces.") for base in node.bases):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in names]
            found += [(m.name, m.lineno) for m in methods]
    return found


def test_undocumented_modules_of_jax_are_imported_by_few():
    wrong = [
        f"{path.relative_to(SRC)}:{line} imports {target}"
        for module, path in MODULES.items()
        if not inside(module, "eformer._jax")
        for target, line in imports_of(module, path)
        for part, rooms in UNDOCUMENTED_IMPORTS.items()
        if inside(target, part) and not any(inside(module, room) for room in rooms)
    ]
    assert not wrong, f"move what these need into eformer/_jax: {wrong}"


def test_other_rooms_touch_only_these_insides_of_jax():
    names = insides_of_jax()
    assert {"_trace", "mat", "module_context", "batch_dim", "bind_with_trace", "aval", "eqns"} <= names
    wrong = [
        f"{path.relative_to(SRC)}:{line} touches .{name}"
        for module, path in MODULES.items()
        if not inside(module, "eformer._jax")
        for name, line in touched(path.read_text(), names)
        if not any(inside(module, room) for room in UNDOCUMENTED_ATTRIBUTES.get(name, ()))
    ]
    assert not wrong, f"move these into eformer/_jax, or rename what is not JAX's: {wrong}"
    used = {
        (name, room)
        for module, path in MODULES.items()
        for name, _ in touched(path.read_text(), names)
        for room in UNDOCUMENTED_ATTRIBUTES.get(name, ())
        if inside(module, room)
    }
    stale = {(name, room) for name, rooms in UNDOCUMENTED_ATTRIBUTES.items() for room in rooms} - used
    assert not stale, f"nobody there touches these any more: take them off the list: {stale}"


def test_new_uses_of_insides_of_jax_are_seen():
    names = insides_of_jax()
    assert touched("def f(x):\n    return x._trace.main", names)
    assert touched(
        "from eformer._jax import traces\nclass T(traces.LayeredTrace):\n    def stage_value(self, x): ...", names
    )
    assert not touched("def f(x):\n    return x.shape, x.dtype, x.sharding.spec, x.at[0].set(1)", names)


def test_every_module_has_a_place():
    homeless = [module for module in MODULES if layer(module) < 0]
    assert not homeless, f"give these modules a layer in LAYERS: {homeless}"


def test_imports_go_one_way():
    wrong = [
        f"{path.relative_to(SRC)}:{line} imports {target}: {why}"
        for module, path in MODULES.items()
        for target, line in imports_of(module, path)
        if inside(target, "eformer") and (why := wrong_way(module, target))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("eformer._core.trace", "eformer.errors", True),
        ("eformer.errors", "eformer._core.trace", False),
        ("eformer._core.trace", "eformer", False),
        ("eformer._core.trace", "eformer._kernels.select", False),
        ("eformer._kernels.select", "eformer.jaximus", False),
        ("eformer._kernels.select", "eformer._record", True),
        ("eformer._formats.nf4.handlers", "eformer._kernels.select", True),
        ("eformer._formats.nf4.array", "eformer.ops.quantization._config", False),
        ("eformer._formats.nf4.array", "eformer.ops.quantization", False),
        ("eformer.ops.quantization._config", "eformer._formats.nf4.array", True),
        ("eformer.ops.quantization._config", "eformer.integrations.flax", False),
        ("eformer.cli.main", "eformer.ops.quantization._config", True),
    ],
)
def test_the_table_says_what_it_should(module, target, allowed):
    assert (wrong_way(module, target) is None) == allowed


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, first and last the same; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as err:
        return err.args[1]
    return []


def test_no_cycle_of_imports():
    """At any depth: an import inside a function hides a cycle, it does not break it."""
    graph = {m: {to for to, _ in imports_of(m, path) if to in MODULES and to != m} for m, path in MODULES.items()}
    cycle = cycle_in(graph)
    assert not cycle, f"{' is imported by '.join(cycle)}: move what they share into a module below both"


def test_a_cycle_is_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert sorted(set(cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}))) == ["a", "b", "c"]


def test_relative_imports_are_resolved():
    tree = ast.parse("from ..errors import X\nfrom . import tree\nfrom .. import _settings")
    found = [name for name, _ in imports("eformer._core.array", tree, is_package=False)]
    assert found == ["eformer.errors", "eformer._core.tree", "eformer._settings"]


def test_import_touches_no_backend_and_no_extra():
    """With a platform that does not exist, the first look at a device raises."""
    optional_rooms = ("eformer.integrations", "eformer.cli", "eformer.__main__")
    names = [module for module in MODULES if not any(inside(module, room) for room in optional_rooms)]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"loaded = [name for name in {OPTIONAL!r} if name in sys.modules]\n"
        "assert not loaded, f'import eformer loaded optional packages: {loaded}'\n"
        "import jax\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('no backend until asked')\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "no backend until asked"


def test_version_is_that_of_the_distribution():
    assert eformer.__version__ == importlib.metadata.version("eformer")


def test_package_is_typed():
    assert (SRC / "eformer" / "py.typed").exists()


@pytest.mark.parametrize("module", MODULES)
def test_file_is_small_enough_to_read(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines < MAX_LINES, f"{MODULES[module].relative_to(SRC)} has {lines} lines: give its second subject a file"
