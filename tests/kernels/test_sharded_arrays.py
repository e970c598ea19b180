"""Arrays on several devices: what quantizing, lookups, explicit meshes and shard_map make devices say to each other."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._kernels import qgather, qmatmul, qragged_dot
from eformer.jaximus import implicit, materialization_policy, materialize
from eformer.ops.quantization import ArrayNF4, ShardingError, quantize

from .cases import FORMATS, make_case, relative_error
from .hlo_cases import (
    BLOCK,
    COLLECTIVES,
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
    mesh_of,
    put,
    seeded,
)


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
        table = put(mesh, case, ids.reshape(4, 4), Row(P("b", "a"), P(), None))
        several, text = compiled(lambda i, c, s: qgather(c, s, i, fmt="nf4", cols=COLS), *table)
        assert jax.typeof(several).sharding.spec == P("b", "a", None)
        assert collectives(text) == Counter()
        grad = jax.jit(jax.grad(lambda x, c, s: case.product(x, codes=c, scale=s).sum()))(*operands)
    assert relative_error(y, by_groups(x, stack.dense.swapaxes(1, 2))) < 3e-6
    assert relative_error(found, case.dense[ids]) < 1e-6
    assert relative_error(several, case.dense[ids.reshape(4, 4)]) < 1e-6
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
