"""What devices say to each other: every operation, split in every way, read from the compiled program.

One program holds all formats and the gradient of each. Its collectives must be the ones listed here and no others: sums
of results where the contracted axis is split, nothing otherwise. So codes and scales never move.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import zlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit, materialization_policy, materialize
from eformer.ops.quantization import ArrayNF4, ShardingError, quantize
from eformer.ops.quantization._kernels import qgather, qmatmul, qragged_dot
from eformer.ops.quantization._kernels.switch import is_kernel_available

from .kernel_cases import FORMATS, Case, make_case, relative_error

ROWS, COLS, M, BLOCK, GROUPS = 32, 128, 16, 16, 4
SIZES = np.array([5, 0, 7, 3], np.int32)
OPTIONS: dict[str, Any] = {"nf4": {"block_size": BLOCK}}
COLLECTIVES = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


def collectives(text: str) -> Counter[str]:
    """How many of each kind, and a check that no codes are among what they move."""
    found: Counter[str] = Counter()
    for moved, kind in COLLECTIVES.findall(text):
        assert not re.search(r"\b[us]8\[", moved), f"{kind} moves codes: {moved}"
        found[kind] += len(re.findall(r"\w+\[[\d,]*\]", moved)) if kind == "all-reduce" else 1
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """Specs of x, of the stored codes and of the result (None: as it comes), and the collectives of each form.

    A form lists those of the product, then those of its gradient with respect to x.
    """

    x: P
    codes: P
    out: P | None
    dot: tuple[str, str] = ("", "")
    axpy: tuple[str, str] = ("", "")


SUM, SCATTER = "all-reduce", "reduce-scatter"
PRODUCTS = {
    "rows of x": Row(P("a"), P(), None),
    "rows of D": Row(P(), P("a"), None, dot=("", SUM), axpy=(SUM, "")),
    "columns of D": Row(P(), P(None, "a"), None, dot=(SUM, ""), axpy=("", SUM)),
    "rows and columns": Row(P(), P("a", "b"), None, dot=(SUM, SUM), axpy=(SUM, SUM)),
    "x and rows": Row(P("b"), P("a"), None, dot=("", SUM), axpy=(SUM, "")),
    "both axes on rows": Row(P(), P(("a", "b")), None, dot=("", SUM), axpy=(SUM, "")),
    "contracted axis of x": Row(P(None, "a"), P(), None, dot=(SUM, ""), axpy=(SUM, "")),
    "result in parts of rows": Row(P(), P("a", "b"), P("b", "a"), dot=(SCATTER, "")),
    "result in parts of columns": Row(P(), P(None, "a"), P(None, "a"), dot=(SCATTER, "")),
}


def seeded(*key: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def put(mesh: jax.sharding.Mesh, case: Case, x: np.ndarray, row: Row) -> list[jax.Array]:
    """x, codes and scale; an axis of a scale that serves all is not split."""
    along = (*row.codes, *[None] * (case.codes.ndim - len(row.codes)))
    sizes = case.scale.shape
    scale_spec = P(*(axis if size > 1 else None for axis, size in zip(along, sizes, strict=False)))
    placed = ((x, row.x), (case.codes, row.codes), (case.scale, scale_spec))
    return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in placed]


def expected_counts(lists: tuple[str, ...]) -> Counter[str]:
    return Counter({kind: n * len(FORMATS) for kind, n in Counter(filter(None, lists)).items()})


def compiled(function: Any, *operands: Any) -> tuple[Any, str]:
    """The results of a program and its text."""
    made = jax.jit(function).lower(*operands).compile()
    return made(*operands), made.as_text()


@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, form: str) -> None:
    row, mesh, rng = PRODUCTS[name], mesh_of(), seeded(name, form)
    if row.out is not None and form == "axpy":
        row = dataclasses.replace(row, codes=P(*row.codes[::-1]) if row.codes[0] else P("a"), axpy=row.dot)
    width, out = (COLS, ROWS) if form == "dot" else (ROWS, COLS)
    x, ct = (rng.standard_normal((M, size)).astype(np.float32) for size in (width, out))
    cases = {fmt: make_case(rng, fmt, ROWS, COLS, block=BLOCK) for fmt in FORMATS}
    operands = {fmt: put(mesh, case, x, row) for fmt, case in cases.items()}
    in_parts = row.out is not None

    def run(operands: Any, ct: Any) -> Any:
        results = {}
        for fmt, (x, codes, scale) in operands.items():
            y, back = jax.vjp(lambda x, c=codes, s=scale, f=cases[fmt]: f.product(x, form, codes=c, scale=s), x)
            y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, row.out)) if in_parts else y
            results[fmt] = y, None if in_parts else back(ct)[0]
        return results

    results, text = compiled(run, operands, ct)
    for fmt, (y, x_bar) in results.items():
        dense = cases[fmt].dense if form == "axpy" else cases[fmt].dense.T
        assert relative_error(y, x @ dense) < 3e-6
        assert x_bar is None or relative_error(x_bar, ct @ dense.T) < 3e-6
        assert not in_parts or y.sharding.spec == row.out
    assert collectives(text) == expected_counts(row.dot if form == "dot" else row.axpy)
    assert ("eformer_cpu_qmatmul" in text) == is_kernel_available()  # every device uses its own kernel


def test_batches_of_matrices() -> None:
    """Experts in a batch: nothing is said; split along the contracted axis too, one sum."""
    mesh, rng = mesh_of(), seeded("batch")
    for codes, kinds in ((P("a"), ""), (P("a", "b"), ""), (P("a", None, "b"), SUM)):
        row = Row(P("a"), codes, None)
        cases = {fmt: make_case(rng, fmt, ROWS, COLS, block=BLOCK, batch=(4,)) for fmt in FORMATS}
        x = rng.standard_normal((4, M, COLS)).astype(np.float32)
        operands = {fmt: put(mesh, case, x, row) for fmt, case in cases.items()}
        run = lambda o, cases=cases: {f: cases[f].product(x, codes=c, scale=s) for f, (x, c, s) in o.items()}  # noqa: E731
        results, text = compiled(run, operands)
        for fmt, y in results.items():
            assert relative_error(y, cases[fmt].expected(x)) < 3e-6
            assert y.sharding.spec[0] == "a"
        assert collectives(text) == expected_counts((kinds,))


# Codes are (experts, rows, columns). A device computes the rows of its own experts, so those split need one sum.
GROUPED = {
    "rows of x": Row(P("a"), P(), None),
    "experts": Row(P(), P("a"), None, dot=(SUM, SUM), axpy=(SUM, SUM)),
    "experts, result in parts": Row(P(), P("a"), P("a"), dot=(SCATTER, ""), axpy=(SCATTER, "")),
    "rows of D": Row(P("b"), P(None, "a"), None, dot=("", SUM), axpy=(SUM, "")),
    "columns of D": Row(P(), P(None, None, "a"), None, dot=(SUM, ""), axpy=("", SUM)),
    "experts and rows": Row(P(), P("a", "b"), None, dot=(SUM, SUM), axpy=(SUM, SUM)),
}


@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize("name", GROUPED)
def test_groups(name: str, form: str) -> None:
    row, mesh, rng = GROUPED[name], mesh_of(), seeded(name, form)
    width, out = (COLS, ROWS) if form == "dot" else (ROWS, COLS)
    x, ct = (rng.standard_normal((M, size)).astype(np.float32) for size in (width, out))
    cases = {fmt: make_case(rng, fmt, ROWS, COLS, block=BLOCK, batch=(GROUPS,)) for fmt in FORMATS}
    operands = {fmt: put(mesh, case, x, row) for fmt, case in cases.items()}

    def run(operands: Any, ct: Any, sizes: Any) -> Any:
        results = {}
        for fmt, (x, codes, scale) in operands.items():
            options: Any = {"fmt": fmt, "form": form, "cols": COLS}
            y, back = jax.vjp(lambda x, c=codes, s=scale, o=options: qragged_dot(x, c, s, sizes, **o), x)
            if row.out is not None:
                results[fmt] = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, row.out)), None
            else:
                results[fmt] = y, back(ct)[0]
        return results

    results, text = compiled(run, operands, ct, SIZES)
    for fmt, (y, x_bar) in results.items():
        dense = cases[fmt].dense if form == "axpy" else cases[fmt].dense.swapaxes(1, 2)
        assert relative_error(y, by_groups(x, dense)) < 3e-6
        assert x_bar is None or relative_error(x_bar, by_groups(ct, dense.swapaxes(1, 2))) < 3e-6
    assert collectives(text) == expected_counts(row.dot if form == "dot" else row.axpy)
    assert ("eformer_cpu_ragged" in text) == is_kernel_available()


def by_groups(x: np.ndarray, dense: np.ndarray) -> np.ndarray:
    owner = np.repeat(np.arange(GROUPS), SIZES)
    y = np.zeros((len(x), dense.shape[2]))
    for i, g in enumerate(owner):
        y[i] = x[i] @ dense[g]
    return y


LOOKUPS = {
    "indices": (P("a"), P(), None, ""),
    "columns": (P(), P(None, "a"), None, ""),
    "rows": (P(), P("a"), None, SUM),
    "indices and rows": (P("b"), P("a"), None, SUM),
    "rows and columns": (P(), P("a", "b"), None, SUM),
    "rows, result in parts": (P(), P("a"), P(None, "a"), SCATTER),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name: str) -> None:
    (ids_spec, codes_spec, out, kind), mesh, rng = LOOKUPS[name], mesh_of(), seeded(name)
    cases = {fmt: make_case(rng, fmt, ROWS, COLS, block=BLOCK) for fmt in FORMATS}
    ids = rng.integers(-ROWS, ROWS, 24).astype(np.int32)
    row = Row(ids_spec, codes_spec, None)
    operands = {fmt: put(mesh, case, ids, row) for fmt, case in cases.items()}

    def run(operands: Any) -> Any:
        results = {
            fmt: qgather(codes, scale, ids, fmt=fmt, cols=COLS, preference="native")
            for fmt, (ids, codes, scale) in operands.items()
        }
        return results if out is None else jax.lax.with_sharding_constraint(results, NamedSharding(mesh, out))

    results, text = compiled(run, operands)
    for fmt, rows in results.items():
        assert relative_error(rows, cases[fmt].dense[ids]) < 1e-6
    assert collectives(text) == expected_counts((kind,))
    assert ("eformer_cpu_gather" in text) == is_kernel_available()


def test_ragged_storage_and_few_experts() -> None:
    """Columns that fill no group, sizes the mesh does not divide, indices of other types: right, whatever must move."""
    mesh, rng = mesh_of(), seeded("ragged")
    x = rng.standard_normal((6, 30)).astype(np.float32)
    ids = np.array([2, 61, 0], np.uint8)

    def run(operands: Any) -> Any:
        groups, tables = {}, {}
        for fmt, (x, codes, scale) in operands.items():
            groups[fmt] = qragged_dot(x, codes, scale, np.array([1, 5, 0]), fmt=fmt, form="dot", cols=30)
            tables[fmt] = qgather(codes[0], scale[0], ids, fmt=fmt, cols=30)
        return groups, tables

    cases = {fmt: make_case(rng, fmt, 62, 30, block=BLOCK, batch=(3,)) for fmt in FORMATS}
    operands = {fmt: put(mesh, case, x, Row(P("b"), P(None, "b"), None)) for fmt, case in cases.items()}
    groups, tables = jax.jit(run)(operands)
    for fmt, case in cases.items():
        want = np.concatenate([x[:1] @ case.dense[0].T, x[1:] @ case.dense[1].T])
        assert relative_error(groups[fmt], want) < 3e-6
        assert relative_error(tables[fmt], case.dense[0][ids]) < 1e-6


SEQUENCES = {
    "sequences": (P("b", "a"), P(), None, ""),
    "tokens and columns": (P(None, "a"), P(None, "b"), None, ""),
    "rows, result in parts of tokens": (P("b", None, "a"), P("a"), P("b", "a"), SCATTER),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_axes_of_rows(name: str) -> None:
    """x of sequences and tokens: each axis splits by itself, whatever the format."""
    (x_spec, w_spec, out, kind), mesh, rng = SEQUENCES[name], mesh_of(), seeded(name)
    w = jnp.asarray(rng.standard_normal((COLS, 64)), jnp.float32)
    x = rng.standard_normal((4, 8, COLS)).astype(np.float32)
    weights = {kind: quantize(w, dtype=kind, axis=-2, **OPTIONS.get(kind, {})) for kind in FORMATS}
    weights["along"] = quantize(w, dtype="nf4", axis=-1, block_size=BLOCK)
    split = {name: q.with_sharding(NamedSharding(mesh, w_spec)) for name, q in weights.items()}

    def run(x: Any, weights: Any) -> Any:
        products = {name: implicit(jnp.matmul)(x, q) for name, q in weights.items()}
        return products if out is None else jax.lax.with_sharding_constraint(products, NamedSharding(mesh, out))

    with materialization_policy("error"):
        found, text = compiled(run, jax.device_put(x, NamedSharding(mesh, x_spec)), split)
    for name, y in found.items():
        assert relative_error(y, x @ np.asarray(weights[name].materialize(), np.float64)) < 3e-6
    assert collectives(text) == Counter({kind: len(weights)} if kind else {})
    mapped = jax.vmap(implicit(jnp.matmul), in_axes=(0, None))(x, weights["nf4"])
    assert relative_error(mapped, x @ np.asarray(weights["nf4"].materialize(), np.float64)) < 3e-6


# -- arrays ------------------------------------------------------------------------------------------------------------


def moved(text: str) -> list[tuple[str, int]]:
    """Kind and number of values of everything that is moved."""
    found = []
    for what, kind in COLLECTIVES.findall(text):
        for dims in re.findall(r"\[([\d,]*)\]", what):
            found.append((kind, math.prod(int(n) for n in dims.split(",") if n)))
    return found


def test_quantizing() -> None:
    """Every device encodes its own part. NF4 needs nothing from the others, the rest at most a number per channel."""
    mesh = mesh_of()
    w = jnp.asarray(seeded("encode").standard_normal((COLS, 64)), jnp.float32)
    encode = {kind: functools.partial(quantize, dtype=kind, **OPTIONS.get(kind, {})) for kind in FORMATS}
    expected = {kind: np.asarray(run(w).materialize()) for kind, run in encode.items()}
    for spec in (P("a"), P(None, "a"), P("a", "b")):
        split = jax.device_put(w, NamedSharding(mesh, spec))
        found, text = compiled(lambda w: {kind: run(w) for kind, run in encode.items()}, split)
        for kind, q in found.items():
            np.testing.assert_allclose(q.materialize(), expected[kind], rtol=5e-7 if "nary" in kind else 0)
        assert all(op == SUM and size <= COLS for op, size in moved(text)), (spec, moved(text))
    assert not moved(compiled(encode["nf4"], split)[1])


def test_rows_of_arrays() -> None:
    """A table split along its rows: the packed rows that were asked for are summed, and the table stays where it is."""
    mesh, rng = mesh_of(), seeded("rows")
    w = jnp.asarray(rng.standard_normal((64, COLS)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 64, 6), jnp.int32)
    look = implicit(lambda q, ids: materialize(jnp.take(q, ids, axis=0)))
    tables = {kind: quantize(w, dtype=kind, axis=-1, **OPTIONS.get(kind, {})) for kind in FORMATS}
    for spec, sums in ((P("a"), True), (P(None, "a"), False), (P("a", "b"), True)):
        split = {kind: q.with_sharding(NamedSharding(mesh, spec)) for kind, q in tables.items()}
        with materialization_policy("allow"):
            found, text = compiled(lambda tables, ids: {kind: look(q, ids) for kind, q in tables.items()}, split, ids)
        for kind, rows in found.items():
            np.testing.assert_array_equal(rows, np.asarray(tables[kind].materialize())[np.asarray(ids)])
        assert bool(moved(text)) == sums
        assert all(op == SUM and size <= 6 * COLS for op, size in moved(text)), (spec, moved(text))


# -- explicit meshes and shard_map -------------------------------------------------------------------------------------


def test_explicit_meshes() -> None:
    """The type of the result says how it is split, and `out_sharding` asks for a reduce-scatter."""
    mesh, rng = mesh_of(AxisType.Explicit), seeded("explicit")
    case = make_case(rng, "nf4", ROWS, COLS, block=BLOCK)
    stack = make_case(rng, "int8", ROWS, COLS, batch=(GROUPS,))
    x, ids = rng.standard_normal((M, COLS)).astype(np.float32), np.arange(0, 32, 2)
    rows = (
        (P("b"), P("a"), None, P("b", "a"), ""), (P(), P(None, "a"), None, P(None, None), SUM),
        (P(None, "a"), P(None, "a"), P("a", None), P("a", None), SCATTER),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        for x_spec, codes_spec, out, spec, kind in rows:
            operands = put(mesh, case, x, Row(x_spec, codes_spec, None))
            product = lambda x, c, s, out=out: case.product(x, codes=c, scale=s, out_sharding=out)  # noqa: E731
            y, text = compiled(product, *operands)
            assert jax.typeof(y).sharding.spec == spec
            assert relative_error(y, case.expected(x)) < 3e-6
            assert collectives(text) == Counter(filter(None, [kind]))
        moved = (put(mesh, stack, x, Row(P("b"), P("a"), None)), put(mesh, case, ids, Row(P("b"), P("a"), None)))
        (y, found), text = compiled(
            lambda a, b: (
                qragged_dot(a[0], a[1], a[2], SIZES, fmt="int8", form="dot", cols=COLS),
                qgather(b[1], b[2], b[0], fmt="nf4", cols=COLS),
            ),
            *moved,
        )
        assert (jax.typeof(y).sharding.spec, jax.typeof(found).sharding.spec) == (P("b", None), P("b", None))
        assert collectives(text) == Counter({SUM: 2})
        grad = jax.jit(jax.grad(lambda x, c, s: case.product(x, codes=c, scale=s).sum()))(*operands)
    assert relative_error(y, by_groups(x, stack.dense.swapaxes(1, 2))) < 3e-6
    assert relative_error(found, case.dense[ids]) < 1e-6
    assert relative_error(grad, np.broadcast_to(case.dense.sum(0), x.shape)) < 1e-5


def test_matmul_of_arrays_on_explicit_meshes() -> None:
    mesh, rng = mesh_of(AxisType.Explicit), seeded("arrays")
    w = jnp.asarray(rng.standard_normal((COLS, ROWS)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, M // 2, COLS)), jnp.float32)
    for q in (ArrayNF4.quantize(w, BLOCK), quantize(w, dtype="int8")):
        want = np.asarray(x @ q.materialize())
        with jax.set_mesh(mesh), materialization_policy("error"):
            split = q.with_sharding(NamedSharding(mesh, P("a", "b")))
            flat = jax.device_put(x.reshape(M, COLS), NamedSharding(mesh, P(None, "a")))
            y, text = compiled(implicit(lambda x, q: jnp.matmul(x, q, out_sharding=P("a", "b"))), flat, split)
            assert collectives(text) == Counter({SCATTER: 1})
            assert jax.typeof(y).sharding.spec == P("a", "b")
            batched = jax.jit(implicit(lambda x, q: jnp.matmul(x, q, out_sharding=P(None, "a", "b"))))
            z = batched(jax.device_put(x, NamedSharding(mesh, P())), split)
            assert jax.typeof(z).sharding.spec == P(None, "a", "b")
        assert max(relative_error(y, want.reshape(M, ROWS)), relative_error(z, want)) < 3e-6


def test_shard_map() -> None:
    """Bodies work on what their device holds; the only collective is the one they ask for."""
    mesh, rng = mesh_of(), seeded("shard_map")
    case, stack = (make_case(rng, "nf4", ROWS, COLS, block=BLOCK, batch=batch) for batch in ((), (GROUPS,)))
    x, ids = rng.standard_normal((M, COLS)).astype(np.float32), np.arange(0, 32, 2)
    options: Any = {"fmt": "nf4", "form": "dot", "cols": COLS // 4}

    def body(x: Any, codes: Any, scale: Any, many: Any, scales: Any, ids: Any) -> Any:
        y = qmatmul(x, codes, scale, **options)
        z = qragged_dot(x, many, scales, jnp.asarray(SIZES), **options)
        return (
            jax.lax.psum(y, "a"),
            jax.lax.psum_scatter(z, "a", tiled=True),
            qgather(codes, scale, ids, fmt="nf4", cols=COLS // 4),
        )

    specs = (P(None, "a"), P(None, "a"), P(None, "a"), P(None, None, "a"), P(None, None, "a"), P("b"))
    split = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P("a"), P("b", "a")))
    (y, z, found), text = compiled(split, x, case.codes, case.scale, stack.codes, stack.scale, ids)
    assert collectives(text) == Counter({SUM: 1, SCATTER: 1})
    assert relative_error(y, case.expected(x)) < 3e-6
    assert relative_error(z, by_groups(x, stack.dense.swapaxes(1, 2))) < 3e-6
    assert relative_error(found, case.dense[ids]) < 1e-6


@pytest.mark.parametrize("kind", FORMATS)
def test_specs_that_do_not_fit(kind: str) -> None:
    """A block is never cut; the message says what would fit."""
    mesh, options = mesh_of(), {"nf4": {"block_size": 64}}
    q = quantize(jnp.asarray(seeded(kind).standard_normal((128, 24)), jnp.float32), dtype=kind, **options.get(kind, {}))
    if kind == "nf4":
        with pytest.raises(ShardingError, match=r"cut a block of 64 .*block size of 32 fits"):
            q.with_sharding(NamedSharding(mesh, P("a")))
    elif kind != "int8":
        unit = {"ternary": 4, "binary": 8}[kind]
        narrow = quantize(jnp.ones((unit * 6, 8)), dtype=kind)
        with pytest.raises(ShardingError, match=rf"cut a block of {unit} .*split another axis"):
            narrow.with_sharding(NamedSharding(mesh, P(("a", "b"))))
    with pytest.raises(ShardingError, match=r"only 2 axes"):
        q.with_sharding(NamedSharding(mesh, P(None, None, "a")))
    with pytest.raises(ShardingError, match=r"24 entries, not a multiple of 8|not a multiple of 8"):
        quantize(jnp.ones((128, 12)), dtype=kind).with_sharding(NamedSharding(mesh, P(None, ("a", "b"))))
