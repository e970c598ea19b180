"""Quantizing arrays that are split over devices, and double-quantized NF4 on them, on automatic and explicit meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.errors import ShardingError
from eformer.jaximus import implicit
from eformer.ops.quantization import Array1B, ArrayNF4, quantize
from eformer.ops.quantization.implicit_array_1bit import straight_through_1bit
from eformer.ops.quantization.implicit_array_nf4 import straight_through_nf4

from .contract import check, dense, normal, seeded

SPECS = [P("t", "u"), P(None, "t"), P(("t", "u"))]
# 64 values over eight devices are fewer than XLA likes to add up at once.
WAYS = {
    f"{kind} {scale} {axis}": (
        lambda w, kind=kind, scale=scale, axis=axis: Array1B.from_float(w, kind, axis=axis, scale=scale),
        lambda w, kind=kind, scale=scale, axis=axis: straight_through_1bit(w, kind, axis=axis, scale=scale),
    )
    for kind in ("ternary", "binary")
    for scale in ("channel", "tensor")
    for axis in (-2, -1)
}
for _axis in (-2, -1):
    WAYS[f"nf4 double {_axis}"] = (
        lambda w, axis=_axis: ArrayNF4.quantize(w, 8, axis=axis, double_quant=True),
        lambda w, axis=_axis: straight_through_nf4(w, 8, axis=axis, double_quant=True),
    )
FEW = ("ternary channel -2", "ternary tensor -1", "binary channel -1", "nf4 double -2")
EVERY = [name if name in FEW else pytest.param(name, marks=pytest.mark.thorough) for name in WAYS]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("way", EVERY)
def test_quantizing_what_is_split(way: str, kind: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("t", "u"), (kind, kind))
    w = normal(seeded(way), 64, 64)
    make, through = WAYS[way]
    want = np.asarray(make(w).materialize())
    with jax.set_mesh(mesh):
        for spec in SPECS:
            split = jax.device_put(w, NamedSharding(mesh, spec))
            for found in (make(split), *jax.jit(lambda w: (make(w), through(w)))(split)):
                # A scale that is summed across devices may differ in its last bits.
                np.testing.assert_allclose(np.asarray(dense(found)), want, rtol=1e-6, err_msg=str(spec))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_blocks_of_128_by_128_of_what_is_split(kind: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("t", "u"), (kind, kind))
    w = normal(seeded("tiles"), 512, 1000)
    make = lambda w: quantize(w, dtype="fp8", block_size=128)  # noqa: E731
    want = dense(make(w))
    with jax.set_mesh(mesh):
        for spec in (P("t"), P(None, "u"), P("t", "u")):
            split = jax.device_put(w, NamedSharding(mesh, spec))
            for found in (make(split), jax.jit(make)(split)):
                np.testing.assert_array_equal(dense(found), want, err_msg=str(spec))


@pytest.mark.parametrize("kind", ["nf4", "int4", "binary"])
def test_a_split_that_cuts_a_block_of_an_explicit_mesh_is_named(kind: str) -> None:
    mesh = jax.make_mesh((8,), ("t",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(normal(seeded(kind), 512, 64), NamedSharding(mesh, P(None, "t")))
        for make in (quantize, jax.jit(quantize, static_argnames=("dtype", "axis"))):
            with pytest.raises(
                ShardingError, match=rf"P\(None, 't'\) cannot be quantized to {kind} along axis -1.*reshard"
            ):
                make(w, dtype=kind, axis=-1)
        whole = quantize(jax.sharding.reshard(w, P("t", None)), dtype=kind, axis=-1)
    np.testing.assert_array_equal(dense(whole), dense(quantize(np.asarray(w), dtype=kind, axis=-1)))


@pytest.mark.parametrize("block", [64, 16])
@pytest.mark.parametrize("double", [False, True])
def test_x_split_finer_than_the_blocks(block: int, double: bool) -> None:
    mesh = jax.make_mesh((8,), ("t",), (AxisType.Auto,))
    q, x = ArrayNF4.quantize(normal(seeded(block), 256, 64), block, double_quant=double), normal(seeded("x"), 8, 256)
    split = jax.device_put(x, NamedSharding(mesh, P(None, "t")))
    wanted = NamedSharding(mesh, P(None, "t"))

    def both(x, q):
        y = x @ (q * 2.0)  # the scale is computed in the program, so XLA chooses how to split it
        return y, jax.lax.with_sharding_constraint(y @ q.T, wanted)

    check(
        [split @ q, *jax.jit(both)(split, q)],
        [x @ dense(q), *jax.jit(lambda x, w: (x @ (w * 2), x @ (w * 2) @ w.T))(x, dense(q))],
    )


@pytest.mark.parametrize("kind", ["nf4", "nf4 double", "ternary", "int8"])
def test_rows_where_columns_are_split_explicitly(kind: str) -> None:
    mesh = jax.make_mesh((8,), ("t",), (AxisType.Explicit,))
    fmt, *double = kind.split()
    q = quantize(normal(seeded(kind), 256, 64), dtype=fmt, **({"double_quant": True} if double else {}))
    split, ids = q.with_sharding(NamedSharding(mesh, P(None, "t"))), jnp.array([0, 3])
    want = np.asarray(dense(q))[np.asarray(ids)]
    np.testing.assert_array_equal(np.asarray(dense(split[ids])), want)
    found = jax.jit(implicit(lambda q, i: q[i]))(split, ids)
    np.testing.assert_array_equal(np.asarray(dense(found)), want)
    assert jax.typeof(dense(found)).sharding.spec == P(None, "t")


@pytest.mark.parametrize("kind", ["nf4", "int8", "ternary", "binary"])
def test_shapes_of_arrays_of_more_than_two_billion_values(kind: str) -> None:
    huge = jax.ShapeDtypeStruct((1 << 16, (1 << 16) + 64), jnp.bfloat16)
    q = jax.eval_shape(lambda w: quantize(w, dtype=kind), huge)
    assert q.shape == huge.shape
    assert q.bits_per_weight < 9
