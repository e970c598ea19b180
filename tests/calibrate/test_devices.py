"""Calibration on eight devices finds what it finds on one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._calibrate import calibrate

L, T, K, N = 2, 16, 8, 12


def model(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return lax.scan(layer, x, params["layers"])[0] @ params["head"]


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(3)
    shapes = {"up": (L, K, N), "down": (L, N, K)}
    layers = {name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for name, shape in shapes.items()}
    params = {"layers": layers, "head": jnp.asarray(rng.standard_normal((K, N)), jnp.float32)}
    return params, [jnp.asarray(rng.standard_normal((T, K)), jnp.float32) for _ in range(2)]


@pytest.fixture(scope="module")
def expected(given):
    return calibrate(model, *given)


def same(found, expected):
    assert list(found) == list(expected)
    for path, one in expected.items():
        for a, b in zip(found[path].uses, one.uses, strict=True):
            assert (a.axes, a.stack) == (b.axes, b.stack)
            for part in ("moment", "diagonal", "absmax", "count"):
                np.testing.assert_allclose(getattr(a, part), getattr(b, part), rtol=1e-5, atol=1e-5, err_msg=path)


def mesh(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def placed(tree, specs, on):
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(on, s)), tree, specs)


SPECS = {"layers": {"up": P(None, None, "model"), "down": P(None, "model", None)}, "head": P("model", None)}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit_on_a_mesh(given, expected, kind):
    params, batches = given
    on = mesh(kind)
    with jax.set_mesh(on):
        specs = SPECS if kind == AxisType.Auto else jax.tree.map(lambda _: P(), params)
        found = calibrate(model, placed(params, specs, on), [placed(x, P("data"), on) for x in batches])
    same(found, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(given, expected, check_vma):
    """Tensor parallel: rows of `down` and `head` are split, and so are the channels they are multiplied with."""
    params, batches = given
    on = mesh(AxisType.Auto)

    def local(params, x):
        def layer(x, w):
            return x + lax.psum(jnp.tanh(x @ w["up"]) @ w["down"], "model"), None

        x = lax.scan(layer, x, params["layers"])[0]
        size = K // 2
        mine = lax.dynamic_slice_in_dim(x, lax.axis_index("model") * size, size, axis=1)
        return lax.psum(mine @ params["head"], "model")

    forward = jax.shard_map(
        local, mesh=on, in_specs=(SPECS, P("data")), out_specs=P("data"), check_vma=check_vma
    )  # fmt: skip
    np.testing.assert_allclose(forward(params, batches[0]), model(params, batches[0]), rtol=1e-4, atol=1e-4)
    same(calibrate(forward, params, batches), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_and_layers_on_different_devices(check_vma):
    rng = np.random.default_rng(4)
    w = jnp.asarray(rng.standard_normal((8, K, N)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((8, T, K)), jnp.float32)
    on = mesh(AxisType.Auto)
    plain = calibrate(lambda p, x: jnp.einsum("etk,ekn->etn", x, p), w, [x])
    options = {"mesh": on, "in_specs": (P("data"), P("data", "model")), "out_specs": P("data", "model")}
    mapped = jax.shard_map(lambda p, x: jnp.einsum("etk,ekn->etn", x, p), check_vma=check_vma, **options)
    same(calibrate(mapped, w, [x]), plain)
    scanned = jax.shard_map(lambda p, x: lax.map(lambda one: one[0] @ one[1], (x, p)), check_vma=check_vma, **options)
    same(calibrate(scanned, w, [x]), plain)
