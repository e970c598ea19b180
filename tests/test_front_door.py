"""`import eformer as ef`: the names, what importing costs, and `eformer.errors`."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import plum
import pytest

import eformer as ef
from eformer import errors

SRC = Path(ef.__file__).parent
HOMES = ef._HOMES  # pyright: ignore[reportPrivateUsage]
PROMISED = re.findall(
    r"\w+",
    """
    quantize quantize_tree dequantize_tree report straight_through QuantizationConfig QuantizationType ArrayNF4 Array8B
    ArrayInt
    Array1B ImplicitArray QuantizedArray Part aux_field register implicit ste explain materialize
    materialization_policy LoraArray add_lora merge_lora split_trainable merge lora_mask fake_quantize_tree quant_delay
    save load open_lazy load_gguf quantize_file inspect kernels errors
""",
)


@pytest.mark.parametrize("name", sorted({*PROMISED, *HOMES}))
def test_name_is_there_and_listed(name):
    value = getattr(ef, name)
    home = importlib.import_module(HOMES[name])
    assert value is getattr(home, name)
    assert name in dir(ef)
    assert getattr(ef, name) is value


def test_the_type_checker_sees_the_same_names():
    tree = ast.parse(Path(ef.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'eformer' has no attribute 'quantise'"):
        _ = ef.quantise  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(ef, "__wrapped__")


def test_star_and_from_imports_work():
    program = "from eformer import quantize, errors, ArrayNF4\nimport eformer.serialization\nprint(errors.__name__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "eformer.errors"


def test_importing_the_package_loads_nothing_else():
    program = (
        "import sys, eformer\n"
        "dir(eformer)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'numpy', 'plum')"
        " or name.startswith('eformer.')])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


DOORS = ("errors", "models", "jaximus", "serialization", "ops.quantization")
DOORS += ("ops.quantization.functions", "ops.quantization.kernels")


@pytest.mark.parametrize("door", ["", *DOORS])
def test_every_public_name_is_on_a_page_of_the_reference(door):
    module = importlib.import_module(f"eformer.{door}".rstrip("."))
    pages = (Path(__file__).parents[1] / "docs" / "api").rglob("*.md")
    words = set(re.findall(r"\w+", " ".join(page.read_text() for page in pages)))
    ours = {name: getattr(module, name) for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")}
    made = {n for n, x in ours.items() if getattr(x, "__module__", "").startswith("eformer")}
    assert made
    assert made <= words


def test_kernels_says_what_runs():
    found = ef.kernels()
    assert [state["backend"] for state in found.states] == ["cpu", "cuda", "tpu"]
    assert str(found).splitlines()[0].split() == ["platform", "state", "instructions", "file"]
    assert "cpu" in repr(found)


def test_inspect_shows_a_file(tmp_path):
    file = ef.save(
        tmp_path / "m.safetensors",
        {"w": ef.quantize(jnp.ones((64, 32)), dtype="nf4"), "b": jnp.zeros(32)},
        metadata={"from": "here"},
    )
    found = ef.inspect(file)
    assert found.metadata == {"from": "here"}
    assert sorted((t.path, t.format, t.shape, t.nbytes) for t in found.tensors) == [
        ("b", "dense", (32,), 128),
        ("w", "nf4", (64, 32), 1152),
    ]
    assert found.nbytes == 1280
    assert found.formats == {"dense": 128, "nf4": 1152}
    assert re.search(r"w +nf4 +64 × 32 +float32 +1,152", str(found))


def test_quantize_file_reports_as_a_table(tmp_path):
    file = ef.save(tmp_path / "m.safetensors", {"w": jnp.ones((64, 64)), "norm": jnp.ones(64)})
    done = ef.quantize_file(file, tmp_path / "q.safetensors", {"norm": None, "*": "nf4"})
    assert re.search(r"w +nf4 +16,384 +2,304 +role: kernel\n", str(done))
    assert str(done).endswith("q.safetensors: 16,640 bytes to 2,560")


# -- errors ------------------------------------------------------------------------------------------------------------

PUBLIC = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
BUILTIN = {
    "MaterializationWarning": UserWarning,
    "HandlerResultWarning": UserWarning,
    "KernelFallbackWarning": UserWarning,
    "UnusedRuleWarning": UserWarning,
    "CalibrationWarning": UserWarning,
    "PackedTensorsWarning": UserWarning,
    "UninitializedAval": Exception,
    "InvalidImplicitArrayError": TypeError,
    "AvalMismatchError": ValueError,
    "SlicedBelowCoreError": ValueError,
    "MaterializationError": RuntimeError,
    "ForgottenImplicitError": TypeError,
    "AmbiguousHandlerError": plum.AmbiguousLookupError,
    "HandlerResultError": TypeError,
    "HandlerSignatureError": TypeError,
    "UnknownPrimitiveError": ValueError,
    "AlreadyQuantizedError": ValueError,
    "QuantizedGradientError": TypeError,
    "ShardingError": ValueError,
    "ProcessError": RuntimeError,
    "CheckpointError": ValueError,
    "CalibrationError": ValueError,
    "CommandError": Exception,
    "CommandUsageError": errors.CommandError,
}


def test_the_table_is_complete():
    assert set(BUILTIN) | {"EformerError", "EformerWarning"} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_error_has_the_base_and_its_builtin_type(name):
    kind = PUBLIC[name]
    base = errors.EformerWarning if issubclass(kind, Warning) else errors.EformerError
    assert issubclass(kind, base)
    assert issubclass(kind, BUILTIN.get(name, Exception))
    assert kind.__module__ == "eformer.errors"
    assert kind.__doc__


def _exception_classes(tree: ast.AST) -> list[ast.ClassDef]:
    """Classes whose bases look like exceptions or warnings."""
    ending = re.compile(r"(Error|Warning|Exception|Failure|Aval)$")
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ending.search(ast.unparse(base)) for base in node.bases)
    ]


SOURCES = sorted(SRC.rglob("*.py"))


def test_no_other_file_defines_a_public_exception():
    strays = [
        f"{path.relative_to(SRC)}: {node.name}"
        for path in SOURCES
        if path != SRC / "errors.py"
        for node in _exception_classes(ast.parse(path.read_text()))
        if not node.name.startswith("_")  # control flow that never leaves its module
    ]
    assert not strays, f"move these to eformer/errors.py: {strays}"


def test_everything_raised_is_builtin_or_public():
    """`raise X(...)` with a class of this library: X is in `eformer.errors`."""
    known = {*PUBLIC, "Failure", "WrongUse", "FrozenInstanceError"}  # two aliases, and one of the standard library
    unknown = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = ast.unparse(node.exc.func).split(".")[-1]
            if not re.fullmatch(r"[A-Z]\w*", name) or name in known or hasattr(builtins, name):
                continue
            unknown.append(f"{path.relative_to(SRC)}:{node.lineno} raises {name}")
    assert not unknown, unknown


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "eformer.jaximus",
            "AmbiguousHandlerError AvalMismatchError HandlerResultError HandlerResultWarning HandlerSignatureError "
            "InvalidImplicitArrayError MaterializationError MaterializationWarning SlicedBelowCoreError "
            "UninitializedAval UnknownPrimitiveError",
        ),
        ("eformer.jaximus._imus", "UninitializedAval"),
        ("eformer.ops.quantization", "ShardingError"),
        ("eformer.serialization", "CheckpointError ProcessError"),
    ],
)
def test_errors_are_still_where_they_were(module, names):
    for name in names.split():
        assert getattr(importlib.import_module(module), name) is getattr(errors, name)


def test_messages_survive_the_bases():
    assert str(errors.CheckpointError("is short.", file="a", tensor="b", fix="Copy it.")) == (
        "a: tensor 'b': is short. Copy it."
    )
    assert str(errors.AmbiguousHandlerError("two match")) == "two match"
    assert (errors.CommandError.status, errors.CommandUsageError.status) == (1, 2)


def test_integrations_are_imported_when_they_are_used():
    program = (
        "import sys, eformer as ef\n"
        "assert 'nnx' in dir(ef.integrations) and 'flax' not in sys.modules\n"
        "print(ef.integrations.nnx.Dispatching.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "Dispatching"
    with pytest.raises(AttributeError, match="it has equinox, linen, nnx"):
        _ = ef.integrations.torch  # pyright: ignore[reportAttributeAccessIssue]
