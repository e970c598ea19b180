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

from .contract import EVERY_KIND, check, dense, normal, seeded

K, N = 256, 128
OPTIONS = {kind: {"block_size": 32} for kind in ("nf4", "int2", "int3", "int4", "int5", "int6")}


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
@pytest.mark.parametrize("kind", EVERY_KIND)
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


@pytest.mark.parametrize("options", [{}, {"activations": "int8"}], ids=["alone", "wrapped"])
def test_constraints_are_remembered(options, mesh) -> None:
    q, to = made("int4", weights("constraint"), **options), NamedSharding(mesh, P(None, "a"))
    constrain = lambda q: jax.lax.with_sharding_constraint(q, to)  # noqa: E731
    put = implicit(lambda q: jax.device_put(q, to))
    for place in (jax.jit(implicit(constrain)), implicit(jax.jit(constrain)), put):
        assert place(q).sharding == to
        assert local_share(place(q)) <= 0.3
    free = NamedSharding(mesh, P(P.UNCONSTRAINED, "a"))
    assert jax.jit(implicit(lambda q: jax.lax.with_sharding_constraint(q, free)))(q).sharding is None
    # A loop and a branch still have one type.
    loop = implicit(lambda q: jax.lax.scan(lambda c, _: (constrain(c), None), q, None, length=2)[0])
    branch = implicit(lambda q: jax.lax.cond(True, constrain, lambda q: q, q))
    with materialization_policy("error"):
        assert {type(jax.jit(f)(q)) for f in (loop, branch)} == {type(q)}


@pytest.mark.parametrize("kind", EVERY_KIND)
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


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_moved_arrays_keep_their_sharding(kind: str, mesh) -> None:
    q = made(kind, weights(kind)).with_sharding(NamedSharding(mesh, P("b", "a")))
    assert q.T.sharding.spec == P("a", "b")
    assert implicit(lambda q: q[None])(q).sharding.spec == P(None, "b", "a")
    check(q.T, dense(q).T)


ACTIVATIONS = {"set_mesh": jax.set_mesh, "with": lambda mesh: mesh}


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("activate", ACTIVATIONS)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_bare_spec_takes_the_active_mesh(kind: str, activate: str, mesh) -> None:
    q = made(kind, weights(kind))
    want = np.asarray(dense(q))
    wanted = NamedSharding(mesh, P(None, "a"))
    with ACTIVATIONS[activate](mesh):
        split = {
            "eager": q.with_sharding(P(None, "a")),
            "jit": jax.jit(lambda q: q.with_sharding(P(None, "a")))(q),
            "constant": jax.jit(lambda: q.with_sharding(P(None, "a")))(),
        }
        inside = jax.jit(lambda q: q.with_sharding(P(None, "a")).materialize())(q)
    assert inside.sharding.is_equivalent_to(wanted, 2)
    for made_by, one in split.items():  # used where no mesh is active any more
        assert isinstance(one.sharding, NamedSharding), made_by
        assert one.is_sharded, made_by
        assert one.T.sharding.spec == P("a", None), made_by
        assert local_share(one) <= 0.3, made_by
        again = one.with_sharding(one.sharding)
        assert again.sharding == wanted, made_by
        for held in (one.materialize(), again.materialize(), jax.jit(lambda q: q.materialize())(one)):
            assert held.sharding.is_equivalent_to(wanted, 2), made_by
            np.testing.assert_array_equal(held, want)


def test_a_trace_serves_meshes_with_other_devices(mesh) -> None:
    turned = jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    q = made("nf4", weights("turned"))
    split = jax.jit(lambda q: q.with_sharding(P(None, "a")))
    for one in (mesh, turned):
        with jax.set_mesh(one):
            assert split(q).materialize().sharding == NamedSharding(one, P(None, "a"))
    lost = q.replaced(sharding=None)
    with pytest.raises(ShardingError, match=r"mesh without devices.*set_mesh"):
        lost.with_sharding(NamedSharding(mesh.abstract_mesh, P(None, "a")))


RESHAPES = [
    ((K, N, 1), P("a", "b", None)),
    ((1, K, N), P(None, "a", "b")),
    ((1, K, 1, N), P(None, "a", None, "b")),
]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_reshape_keeps_the_sharding(kind: str, mesh) -> None:
    """Axes that go on alone keep their split, and so does the first of those that are merged or divided."""
    q = made(kind, weights(kind)).with_sharding(NamedSharding(mesh, P("a", "b")))
    for shape, spec in RESHAPES:
        moved = q.reshape(*shape)
        assert moved.sharding == NamedSharding(mesh, spec), shape
        assert local_share(moved) == local_share(q)
        held = moved.materialize()
        assert held.sharding.is_equivalent_to(moved.sharding, len(shape))
        np.testing.assert_array_equal(held, np.asarray(dense(q)).reshape(shape))
    layers = made(kind, normal(seeded(kind, "layers"), 8, 4, 64, 6))
    for spec, shape, want in [
        (P("a", None, "b"), (32, 64, 6), P("a", "b", None)),
        (P(None, "a", "b"), (32, 64, 6), P(None, "b", None)),
        (P(None, "a"), (32, 64, 6), None),
        (P("a"), (4, 2, 4, 64, 6), P("a", None, None, None, None)),
        (P("a"), (2, 4, 4, 64, 6), None),
        (P(), (32, 64, 6), P(None, None, None)),
    ]:
        split = layers.with_sharding(NamedSharding(mesh, spec))
        moved = split.reshape(*shape)
        assert moved.sharding == (None if want is None else NamedSharding(mesh, want)), (spec, shape)
        np.testing.assert_array_equal(moved.materialize(), np.asarray(dense(layers)).reshape(shape))


PLACEMENTS = {"columns": (P(None, "a"), P()), "rows": (P("a"), P(None, "a")), "both": (P("a", "b"), P(None, "a"))}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kind", EVERY_KIND)
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
@pytest.mark.parametrize("kind", EVERY_KIND)
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


@pytest.mark.parametrize("kind", EVERY_KIND)
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


@pytest.mark.parametrize("kind", EVERY_KIND)
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
    for wrong in (mesh, (mesh,), (mesh, "a", "b"), ("a", mesh)):
        with pytest.raises(TypeError, match=r"pair \(mesh, axis\), got .*Pass for example \(mesh, PartitionSpec"):
            q.with_mesh_and_axis(wrong)
    for wrong in (5, (None, 5), ["a", ["b"]]):
        with pytest.raises(TypeError, match=r"allowed are None.*mesh has \('a', 'b'\); pass for example") as err:
            q.with_mesh_and_axis((mesh, wrong))
        assert str(err.value).startswith(repr(wrong))


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


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_explicit_mesh(kind: str) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    w, x = weights(kind), normal(seeded("x"), 8, K)
    want = x @ dense(made(kind, w))
    with jax.set_mesh(mesh):
        q = made(kind, jax.device_put(w, NamedSharding(mesh, P(None, "a"))))
        y = jax.jit(implicit(jnp.matmul))(jax.device_put(x, NamedSharding(mesh, P("b"))), q)
        bare = jax.jit(lambda q: q.with_sharding(P("a")))(made(kind, w))
    assert y.sharding.spec == P("b", "a")
    assert bare.materialize().sharding == NamedSharding(mesh, P("a", None))  # where no mesh is active
    check(np.asarray(y), np.asarray(want))


@pytest.mark.parametrize("spec", [P(None, "a"), P("a", None)])
@pytest.mark.parametrize(
    ("kind", "options"), [("nf4", {}), ("int8", {}), ("ternary", {}), ("int4", {"activations": "int8"})]
)
def test_explicit_axes_are_left_and_changed_in_packed_form(kind: str, options, spec: P) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    whole, rows = made(kind, weights(kind, "explicit"), **options), jnp.array([[3, 0], [255, 7]])
    x = normal(seeded("explicit"), 8, K)
    with jax.set_mesh(mesh), materialization_policy("error"):
        q = implicit(lambda q: jax.device_put(q, NamedSharding(mesh, spec)))(whole)
        picked = jax.jit(implicit(lambda q: q.at[rows].get(out_sharding=P("b"))))(q)
        check(picked, whole.materialize()[rows])
        assert jax.typeof(picked).sharding.spec == P("b", None, None)
        multiply = jax.sharding.auto_axes(lambda x, q: x @ q, out_sharding=P("b", None))
        check(jax.jit(implicit(multiply))(x, q), x @ whole)
        for to in (P(None, None), NamedSharding(mesh, P(None, None))):
            move = implicit(lambda q, to=to: jax.sharding.reshard(q, to))
            for moved in (move(q), jax.jit(move)(q)):
                assert type(moved) is type(q)
                assert local_share(moved) == 1
                check(x @ moved, x @ whole)
