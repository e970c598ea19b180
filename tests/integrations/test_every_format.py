"""Layers of every framework, with every format by its name: forward, gradients of inputs and adapters, never dense."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from eformer._core import ImplicitArray
from eformer.integrations import linen
from eformer.integrations.equinox import Dispatching as EquinoxDispatching
from eformer.integrations.nnx import Dispatching as NnxDispatching
from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import QuantizationType, add_lora, dequantize_tree, merge, quantize_tree, split_trainable

from .compare import close

IN, OUT = 64, 48
NAMES = [str(name) for name in QuantizationType]


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(IN)(nn.relu(nn.Dense(OUT)(x)))


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(IN, OUT, rngs=rngs), nnx.Linear(OUT, IN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def haiku_network(x: jax.Array) -> jax.Array:
    return hk.Linear(IN)(jax.nn.relu(hk.Linear(OUT)(x)))


def _linen(name: str, x: jax.Array) -> tuple[Any, Any, Any, Any]:
    model = Dense()
    variables = linen.quantize(model.init(jax.random.key(0), x), name, min_size=0)
    return variables, linen.apply_fn(model), dequantize_tree(variables), model.apply


def _nnx(name: str, x: jax.Array) -> tuple[Any, Any, Any, Any]:
    model = quantize_tree(Mlp(nnx.Rngs(0)), name, min_size=0)
    return model, lambda m, x: NnxDispatching(m)(x), dequantize_tree(model), lambda m, x: m(x)


def _equinox(name: str, x: jax.Array) -> tuple[Any, Any, Any, Any]:
    model = quantize_tree(eqx.nn.MLP(IN, IN, OUT, 1, key=jax.random.key(0)), name, min_size=0)
    return (
        model,
        lambda m, x: jax.vmap(EquinoxDispatching(m))(x),
        dequantize_tree(model),
        lambda m, x: jax.vmap(m)(x),
    )


def _haiku(name: str, x: jax.Array) -> tuple[Any, Any, Any, Any]:
    model = hk.without_apply_rng(hk.transform(haiku_network))
    params = quantize_tree(model.init(jax.random.key(0), x), name, min_size=0)
    return params, implicit(model.apply), dequantize_tree(params), model.apply


FRAMEWORKS = {"linen": _linen, "nnx": _nnx, "equinox": _equinox, "haiku": _haiku}
# One framework for every format in `make test`, another each time.
CASES = [
    pytest.param(framework, name, marks=() if (i + j) % len(FRAMEWORKS) == 0 else pytest.mark.thorough)
    for i, framework in enumerate(FRAMEWORKS)
    for j, name in enumerate(NAMES)
]


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_layers(framework: str, name: str, key: jax.Array):
    x = jax.random.normal(key, (4, IN))
    model, call, dense, plain = FRAMEWORKS[framework](name, x)
    packed = [leaf for leaf in jax.tree.leaves(model, is_leaf=_is_packed) if _is_packed(leaf)]
    assert [leaf.format for leaf in packed] == [name] * 2

    def both(f: Any, model: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: jnp.mean(f(model, x) ** 2)))(x)

    with materialization_policy("error"):
        found = both(call, model)
    close(found, both(plain, dense))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i % 4 == 1 else pytest.mark.thorough) for i, n in enumerate(NAMES)]
)
def test_adapters(name: str, key: jax.Array):
    """LoRA over every format, in a Linen model: gradients of the factors as over the dense weights."""
    x = jax.random.normal(key, (4, IN))
    variables, call, dense, plain = _linen(name, x)

    def gradient(call: Any, params: Any) -> Any:
        trainable, frozen = split_trainable(add_lora(params, "*kernel", 2, jax.random.key(1)), also="*")
        return jax.jit(jax.grad(lambda t: jnp.mean(call({"params": merge(t, frozen)}, x) ** 2)))(trainable)

    with materialization_policy("error"):
        found = gradient(call, variables["params"])
    close(found, gradient(implicit(plain), dense["params"]))


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, ImplicitArray)
