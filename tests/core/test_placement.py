"""Shardings of the logical array become shardings of its children."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit

from .toys import Block8, Plain, assert_dispatched, assert_same, forget


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def spec_of(a):
    return tuple(a.sharding.spec) + (None,) * (a.ndim - len(a.sharding.spec))


def test_device_put_moves_the_storage(mesh, q, w):
    out = implicit(lambda q: jax.device_put(q, NamedSharding(mesh, P(None, "y"))))(q)
    assert isinstance(out, Block8)
    assert spec_of(out.codes) == spec_of(out.scale) == (None, "y")
    assert out.devices() == set(jax.devices())
    assert_same(out, w)
    replicated = implicit(lambda q: jax.device_put(q, NamedSharding(mesh, P())))(q)
    assert isinstance(replicated, Block8)
    device = jax.devices()[3]
    for target in (device, SingleDeviceSharding(device)):
        moved = implicit(lambda q, t=target: jax.device_put(q, t))(q)
        assert moved.devices() == {device}
        assert_same(moved, w)
    assert jax.device_put(q, device).devices() == {device}


def test_device_put_that_would_cut_a_block_is_dense(mesh, q, w):
    out = implicit(lambda q: jax.device_put(q, NamedSharding(mesh, P("x", None))))(q)
    assert isinstance(out, jax.Array)
    assert spec_of(out) == ("x", None)
    assert_same(out, w)


def test_sharding_constraints(mesh, q, w, x):
    def f(x, w):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "y")))
        return x @ w

    forget()
    out = jax.jit(implicit(f))(x, q)
    also = implicit(jax.jit(f))(x, q)
    assert_dispatched()
    assert_same(out, x @ w)
    assert_same(also, x @ w)
    cut = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P("x", None))) * 2  # noqa: E731
    assert_same(jax.jit(implicit(cut))(q), 2 * w)


def test_in_and_out_shardings_of_an_inner_jit(mesh, q, w, x):
    rows, columns = NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P(None, "y"))
    f = jax.jit(lambda x, w: x @ w, in_shardings=(rows, columns), out_shardings=NamedSharding(mesh, P("x", "y")))
    forget()
    out = implicit(f)(x, q)
    assert_dispatched()
    assert spec_of(out) == ("x", "y")
    assert_same(out, x @ w)
    cut = jax.jit(lambda x, w: x @ w, in_shardings=(None, rows))
    assert_same(implicit(cut)(x, q), x @ w)
    dense_out = jax.jit(lambda w: w, out_shardings=columns)
    assert spec_of(implicit(dense_out)(q)) == (None, "y")


def test_shardings_of_implicit_arguments_of_an_outer_jit(mesh, q, w, x):
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, P(None, "y")), q)
    placed = jax.device_put(q, shardings)
    f = jax.jit(implicit(lambda x, w: (x @ w, w)), in_shardings=(None, shardings), out_shardings=(None, shardings))
    y, out = f(x, placed)
    assert_same(y, x @ w)
    assert spec_of(out.scale) == (None, "y")
    assert_same(placed @ jnp.eye(8), w)


def test_children_sharded_on_an_explicit_mesh(key):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        values = jax.device_put(jax.random.normal(key, (8, 4)), P("x", None))
        q = Plain(values, jax.device_put(jnp.full((8, 4), 2.0), P("x", None)))
        assert jax.typeof(q).sharding.spec == P("x", None)
        for f in (implicit(jnp.sin), jax.jit(implicit(jnp.sin)), implicit(jax.jit(jnp.sin)), jax.jit(jnp.sin), jnp.sin):
            out = f(q)
            assert jax.typeof(out).sharding.spec == P("x", None)
            assert_same(out, jnp.sin(2 * values), rtol=1e-4)
        assert_same(q @ jnp.ones((4, 2)), 2 * values @ jnp.ones((4, 2)))
        moved = implicit(lambda q: jax.sharding.reshard(q, P(None, None)))(q)
        assert_same(moved, 2 * values)
        g = jax.grad(lambda q: implicit(jnp.sin)(q).sum())(q)
        assert_same(g.values, 2 * jnp.cos(2 * values))


def test_a_mesh_set_inside_implicit(mesh, q, w, x):
    with implicit:
        with jax.set_mesh(mesh):
            assert jax.sharding.get_mesh() == mesh
            assert_same(jax.jit(lambda q: x @ jax.lax.with_sharding_constraint(q, P(None, "y")))(q), x @ w)
        for transformed in (jax.jit, jax.vmap, lambda f: jax.jit(implicit(f))):
            with pytest.raises(ValueError, match=r"outside of `jax\.jit`"):
                transformed(lambda x: jax.set_mesh(mesh))(x)
    with implicit(lambda: jax.set_mesh(mesh))():
        assert jax.sharding.get_mesh() == mesh


def test_the_devices_of_a_pmap_inside_implicit(x, q, w):
    mapped = jax.pmap(lambda x: x @ q, devices=jax.devices()[::-1])
    rows = jnp.stack([x] * 8)
    placed = jax.device_put(rows, NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), P("x")))
    with implicit:
        out = mapped(placed)
    assert out.sharding.device_set == set(jax.devices())
    assert [s.device for s in sorted(out.addressable_shards, key=lambda s: s.index[0].start)] == jax.devices()[::-1]
    assert_same(out, rows @ w)


def test_eight_devices_hold_the_parts(mesh, q, x):
    placed = implicit(lambda q: jax.device_put(q, NamedSharding(mesh, P(None, "y"))))(q)
    assert placed.nbytes == q.nbytes
    assert {s.data.shape for s in placed.codes.addressable_shards} == {(16, 4)}
    out = x @ placed
    assert_same(out, x @ q)
