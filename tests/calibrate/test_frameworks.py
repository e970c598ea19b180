"""A model with a scanned stack in every framework: statistics are those of plain numpy on the inputs of every layer."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import eformer as ef

from .references import check

L, T, K, H, N = 3, 7, 8, 12, 5


def captured(up: Any, down: Any, head: Any, x: Any) -> dict[str, np.ndarray]:
    """What each matrix is multiplied with, (layers, tokens, channels), in numpy. Matrices are (in, out)."""
    up, down, x = (np.asarray(a, np.float64) for a in (up, down, x))
    found: dict[str, list[np.ndarray]] = {"up": [], "down": []}
    for first, second in zip(up, down, strict=True):
        found["up"].append(x)
        found["down"].append(np.tanh(x @ first))
        x = x + found["down"][-1] @ second
    return {"up": np.stack(found["up"]), "down": np.stack(found["down"]), "head": x}


@pytest.fixture
def batches() -> list[jax.Array]:
    rng = np.random.default_rng(8)
    return [jnp.asarray(rng.standard_normal((T, K)), jnp.float32) for _ in range(2)]


def compare(stats: Any, paths: dict[str, str], weights: dict[str, Any], batches: Any, axis: int) -> None:
    """`axis`: which of the last two axes is contracted."""
    inputs = [captured(**weights, x=x) for x in batches]
    assert sorted(stats) == sorted(paths.values())
    for name, path in paths.items():
        lead = [] if name == "head" else [0]
        check(stats[path], [found[name] for found in inputs], [axis + len(lead)], lead)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(K, use_bias=False, name="down")(jnp.tanh(nn.Dense(H, name="up")(x))), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(nn.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=L)
        return nn.Dense(N, name="head")(stack(name="layers")(x, None)[0])


def test_linen(batches: list[jax.Array]):
    model = LinenModel()
    params = model.init(jax.random.key(0), batches[0])
    p = params["params"]
    weights = {name: p["layers"][name]["kernel"] for name in ("up", "down")} | {"head": p["head"]["kernel"]}
    paths = {name: f"params/layers/{name}/kernel" for name in ("up", "down")} | {"head": "params/head/kernel"}
    compare(ef.calibrate(model.apply, params, batches), paths, weights, batches, 0)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(K, H, rngs=rngs), nnx.Linear(H, K, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=L)(nnx.vmap(NnxBlock))(rngs)
        self.head = nnx.Linear(K, N, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x: jax.Array, layer: NnxBlock) -> jax.Array:
            return layer(x)

        return self.head(apply(x, self.layers))


def test_nnx(batches: list[jax.Array]):
    """The module itself as parameters, and its state, merged inside."""
    model = NnxModel(nnx.Rngs(0))
    weights = {"up": model.layers.up.kernel[...], "down": model.layers.down.kernel[...], "head": model.head.kernel[...]}
    paths = {"up": "layers/up/kernel", "down": "layers/down/kernel", "head": "head/kernel"}
    compare(ef.calibrate(lambda model, x: model(x), model, batches), paths, weights, batches, 0)
    graph, state = nnx.split(model)
    stats = ef.calibrate(lambda state, x: nnx.merge(graph, state)(x), state, batches)
    compare(stats, paths, weights, batches, 0)


class EqxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(K, H, False, key=first), eqx.nn.Linear(H, K, False, key=second)


class EqxModel(eqx.Module):
    layers: EqxBlock
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        self.layers = eqx.filter_vmap(EqxBlock)(jax.random.split(key, L))
        self.head = eqx.nn.Linear(K, N, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def apply(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            layer = eqx.combine(one, static)
            return x + layer.down(jnp.tanh(layer.up(x))), None

        return self.head(jax.lax.scan(apply, x, arrays)[0])


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["plain", "filter_jit"])
def test_equinox(batches: list[jax.Array], jit: Any):
    model = EqxModel(jax.random.key(0))
    weights = {"up": model.layers.up.weight.mT, "down": model.layers.down.weight.mT, "head": model.head.weight.mT}
    paths = {"up": "layers/up/weight", "down": "layers/down/weight", "head": "head/weight"}
    forward = jit(lambda model, xs: jax.vmap(model)(xs))
    compare(ef.calibrate(forward, model, batches), paths, weights, batches, 1)


def test_haiku(batches: list[jax.Array]):
    def network(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array) -> jax.Array:
            return x + hk.Linear(K, name="down")(jnp.tanh(hk.Linear(H, name="up", with_bias=False)(x)))

        return hk.Linear(N, name="head")(hk.experimental.layer_stack(L, name="layers")(hk.remat(layer))(x))

    model = hk.without_apply_rng(hk.transform(network))
    params = model.init(jax.random.key(0), batches[0])
    found = {name.rsplit("/", 1)[-1]: name for name in params}
    weights = {name: params[found[name]]["w"] for name in ("up", "down", "head")}
    paths = {name: f"{found[name]}/w" for name in weights}
    compare(ef.calibrate(model.apply, params, batches), paths, weights, batches, 0)


def test_plain_functions(batches: list[jax.Array]):
    rng = np.random.default_rng(9)
    shapes = {"up": (L, K, H), "down": (L, H, K), "head": (K, N)}
    weights = {name: jnp.asarray(rng.standard_normal(shape) / 3, jnp.bfloat16) for name, shape in shapes.items()}

    def forward(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (p["up"], p["down"]))[0] @ p["head"]

    compare(ef.calibrate(jax.jit(forward), weights, batches), {n: n for n in weights}, weights, batches, 0)
