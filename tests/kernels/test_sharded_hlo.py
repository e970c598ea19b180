"""What devices say to each other: every operation, split in every way, read from the compiled program.

One program holds all formats and the gradient of each. Its collectives must be the ones listed here and no others: sums
of results where the contracted axis is split, nothing otherwise. So codes and scales never move.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._kernels import qgather, qragged_dot
from eformer._kernels.backends import is_kernel_available
from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import quantize

from .cases import FORMATS, make_case, relative_error
from .hlo_cases import (
    BLOCK,
    COLS,
    GROUPS,
    OPTIONS,
    ROWS,
    SCATTER,
    SIZES,
    SUM,
    M,
    Row,
    by_groups,
    collectives,
    compiled,
    expected_counts,
    mesh_of,
    put,
    seeded,
)

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


LOOKUPS = {
    "indices": (P("a"), P(), None, ""),
    "two axes of indices": (P("b", "a"), P(), None, ""),
    "two axes of indices and rows": (P(None, "b"), P("a"), None, SUM),
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
    ids = rng.integers(-ROWS, ROWS, (6, 4) if len(ids_spec) == 2 else 24).astype(np.int32)
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
