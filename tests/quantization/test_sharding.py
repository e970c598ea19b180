"""Quantized arrays split over eight devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import Array8B, ArrayNF4, ShardingError, quantize

from .contract import check, dense, normal, seeded

KINDS = ("nf4", "int8", "ternary", "binary")
K, N = 256, 64
OPTIONS = {"nf4": {"block_size": 32}}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))


def made(kind: str, w: jax.Array, **options):
    return quantize(w, dtype=kind, **OPTIONS.get(kind, {}), **options)


def weights(*key) -> jax.Array:
    return normal(seeded(*key), K, N)


def local_share(q) -> float:
    """The part of the stored bytes one device holds."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(q)) / q.nbytes


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(None, ("a", "b"))])
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_keeps_the_sharding(kind: str, spec: P, mesh) -> None:
    w = weights(kind)
    q = made(kind, jax.device_put(w, NamedSharding(mesh, spec)))
    assert q.is_sharded
    assert q.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    devices = 4 if "b" not in str(spec) else 8
    assert local_share(q) <= 1.5 / devices
    # A scale that is summed across devices may differ in its last bit.
    np.testing.assert_allclose(q.materialize(), made(kind, w).materialize(), rtol=5e-7 if "nary" in kind else 0)
    assert q.materialize().sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_documented_methods(kind: str, mesh) -> None:
    q = made(kind, weights(kind))
    assert not q.is_sharded
    want = np.asarray(dense(q))
    for split in (
        q.with_sharding(NamedSharding(mesh, P(None, "a"))),
        q.reshard(NamedSharding(mesh, P(None, "a"))),
        q.with_mesh_and_axis((mesh, P(None, "a"))),
        q.with_mesh_and_axis((mesh, (None, "a"))),
        q.with_mesh_and_axis((mesh, [None, "a"])),
    ):
        assert type(split) is type(q)
        assert split.is_sharded
        assert local_share(split) <= 0.3
        np.testing.assert_array_equal(dense(split), want)
    assert local_share(q.with_mesh_and_axis((mesh, "a"))) <= 0.4
    everywhere = q.with_mesh_and_axis((mesh, None))
    assert everywhere.is_sharded
    assert local_share(everywhere) == 1
    assert not split.with_sharding(None).is_sharded
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(dense(q.with_sharding(P(None, "b"))), want)


@pytest.mark.parametrize("kind", KINDS)
def test_moved_arrays_keep_their_sharding(kind: str, mesh) -> None:
    q = made(kind, weights(kind)).with_sharding(NamedSharding(mesh, P("b", "a")))
    assert q.T.sharding.spec == P("a", "b")
    assert implicit(lambda q: q[None])(q).sharding.spec == P(None, "b", "a")
    check(q.T, dense(q).T)


PLACEMENTS = {"columns": (P(None, "a"), P()), "rows": (P("a"), P(None, "a")), "both": (P("a", "b"), P(None, "a"))}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_product_leaves_the_codes_where_they_are(kind: str, axis: int, placement: str, mesh) -> None:
    q_spec, x_spec = PLACEMENTS[placement]
    q = made(kind, weights(kind), axis=axis)
    if kind == "nf4" and axis == -1:
        q = ArrayNF4.quantize(weights(kind), 16, axis=-1)
    split = q.with_sharding(NamedSharding(mesh, q_spec))
    x = jax.device_put(normal(seeded("x"), 16, K), NamedSharding(mesh, x_spec))
    product = jax.jit(implicit(jnp.matmul))
    y = product(x, split)
    check(y, x @ dense(q))
    text = product.lower(x, split).compile().as_text()
    assert not re.search(r"[us]8\[[^=]*\] (all-gather|all-to-all|collective-permute)", text)
    assert "all-gather" not in text
    if q_spec[-1] is not None and len(q_spec) == 2:
        assert y.sharding.spec[-1] == q_spec[1]


@pytest.mark.parametrize("split", ["columns", "rows"])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_shard_map_bodies_dispatch(kind: str, axis: int, split: str, mesh) -> None:
    q = ArrayNF4.quantize(weights(kind), 16, axis=axis) if kind == "nf4" else made(kind, weights(kind), axis=axis)
    x = normal(seeded("x"), 6, K)
    spec = P(None, "a") if split == "columns" else P("a")

    def body(x, q):
        y = x @ q
        return y if split == "columns" else jax.lax.psum(y, "a")

    x_spec, y_spec = (P(), P(None, "a")) if split == "columns" else (P(None, "a"), P())
    by_storage = jax.shard_map(body, mesh=mesh, in_specs=(x_spec, q.child_specs(spec)), out_specs=y_spec)
    logical = jax.shard_map(body, mesh=mesh, in_specs=(x_spec, spec), out_specs=y_spec)  # one spec, as for dense arrays
    with materialization_policy("error"):
        y = jax.jit(by_storage)(x, q)
        through_implicit = implicit(jax.jit(logical))(x, q)
    check([y, through_implicit], [x @ dense(q)] * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_shard_map_gradient(kind: str, mesh) -> None:
    q, x = made(kind, weights(kind)), normal(seeded("x"), 8, K)

    def loss(x, q):
        mapped = jax.shard_map(
            lambda x, q: x @ q, mesh=mesh, in_specs=(P("b"), q.child_specs(P(None, "a"))), out_specs=P("b", "a")
        )
        return (mapped(x, q) ** 2).sum()

    check(jax.jit(jax.grad(loss))(x, q), jax.grad(lambda x: ((x @ dense(q)) ** 2).sum())(x))


def test_a_block_is_never_cut(mesh) -> None:
    w = weights("cut")
    q = ArrayNF4.quantize(w, 64)
    with pytest.raises(ShardingError, match=r"cut a block of 64.*block size of 32 fits"):
        q.with_sharding(NamedSharding(mesh, P(("a", "b"))))
    with pytest.raises(ShardingError, match="block"):
        ArrayNF4.quantize(jax.device_put(w, NamedSharding(mesh, P(("a", "b")))), 64)
    ragged = quantize(normal(seeded("r"), 100, 8), dtype="ternary")
    with pytest.raises(ShardingError, match="split another axis"):
        ragged.with_sharding(NamedSharding(mesh, P("a")))
    assert issubclass(ShardingError, ValueError)


@pytest.mark.parametrize("kind", KINDS)
def test_shardings_that_do_not_fit(kind: str, mesh) -> None:
    q = made(kind, normal(seeded(kind), K, 6))
    with pytest.raises(ShardingError, match="not a multiple of 4"):
        q.with_sharding(NamedSharding(mesh, P(None, "a")))
    with pytest.raises(ShardingError, match="only 2 axes"):
        q.with_sharding(NamedSharding(mesh, P(None, None, "a")))
    with pytest.raises(ShardingError, match="no mesh is active"):
        q.with_sharding(P("a"))
    with pytest.raises(TypeError, match="NamedSharding"):
        q.with_sharding("a")


def test_ragged_split_says_so_in_child_specs() -> None:
    """A ragged blocked axis has no specs; asking for them must say why, not return None."""
    ragged = ArrayNF4.quantize(normal(seeded("r"), 100, 8), 32)
    with pytest.raises(ShardingError, match="block"):
        ragged.child_specs(P("a"))


@pytest.mark.parametrize("spec", [P(None, "a"), P("a")])
def test_double_quant(spec: P, mesh) -> None:
    q = ArrayNF4.quantize(weights("double"), 16, double_quant=True)
    split = q.with_sharding(NamedSharding(mesh, spec))
    np.testing.assert_array_equal(dense(split), dense(q))
    x = normal(seeded("x"), 4, K)
    check(jax.jit(implicit(jnp.matmul))(x, split), x @ dense(q))
    long = ArrayNF4.quantize(normal(seeded("long"), 64 * 512), 64, double_quant=True)
    np.testing.assert_array_equal(dense(long.with_sharding(NamedSharding(mesh, P(("a", "b"))))), dense(long))


def test_stack_and_scan_of_sharded_layers(mesh) -> None:
    w = normal(seeded("layers"), 3, 64, 64) / 8
    x = normal(seeded("x"), 4, 64)
    for q in (ArrayNF4.quantize(w, 16), Array8B.quantize(w), quantize(w, dtype="ternary")):
        split = q.with_sharding(NamedSharding(mesh, P(None, None, "a")))
        run = jax.jit(lambda x, q: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, q)[0])
        check(run(x, split), run(x, dense(q)))


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_mesh(kind: str) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    w, x = weights(kind), normal(seeded("x"), 8, K)
    want = x @ dense(made(kind, w))
    with jax.set_mesh(mesh):
        q = made(kind, jax.device_put(w, NamedSharding(mesh, P(None, "a"))))
        y = jax.jit(implicit(jnp.matmul))(jax.device_put(x, NamedSharding(mesh, P("b"))), q)
    assert y.sharding.spec == P("b", "a")
    check(np.asarray(y), np.asarray(want))
