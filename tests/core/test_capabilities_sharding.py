"""Meshes: shard_map around and inside a scope, sharded children, and kept shardings."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit

from .samples import GRAD, XD, Q, X
from .toys import assert_dispatched, assert_same

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


def product(x, w):
    return x @ w


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out_spec"),
    [(P("m"), P(), P("m")), (P(), P(None, "m"), P(None, "m"))],
    ids=["replicated", "columns by child_specs"],
)
def test_shard_map_inside_dispatches(mesh, x_spec, w_spec, out_spec):
    sharded = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=out_spec)
    assert_same(implicit(lambda x, w: sharded(x, w))(X, Q), XD)
    assert_dispatched()


def test_a_spec_the_children_cannot_follow_is_made_dense(mesh):
    sharded = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "m"), mesh=mesh, in_specs=(P(None, "m"), P("m", None)), out_specs=P()
    )
    assert_same(implicit(lambda x, w: sharded(x, w))(X, Q), XD)


def test_gradient_of_shard_map_under_jit(mesh):
    sharded = jax.shard_map(product, mesh=mesh, in_specs=(P("m"), P()), out_specs=P("m"))
    gradient = jax.jit(jax.grad(lambda x: implicit(lambda x, w: sharded(x, w))(x, Q).sum()))(X)
    assert_same(gradient, GRAD)


def test_shard_map_outside_dispatches(mesh):
    sharded = jax.shard_map(lambda x, w: implicit(product)(x, w), mesh=mesh, in_specs=(P("m"), P()), out_specs=P("m"))
    assert_same(sharded(X, Q), XD)
    assert_dispatched()


def test_inner_jit_keeps_its_output_sharding(mesh):
    sharding = NamedSharding(mesh, P("m"))
    result = implicit(jax.jit(lambda x, w: x @ w, out_shardings=sharding))(X, Q)
    assert_same(result, XD)
    assert result.sharding.is_equivalent_to(sharding, 2)


def test_sharded_children(mesh):
    spread = jax.device_put(Q, NamedSharding(mesh, P(None, "m")))
    assert_same(jax.jit(implicit(lambda x, w: x @ w))(X, spread), XD)
    assert_same(X @ spread, XD)
    assert len(spread.scale.devices()) == 4
    assert_same(np.asarray(spread), np.asarray(Q))
