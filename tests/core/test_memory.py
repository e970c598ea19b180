"""Proofs by `memory_analysis`: a stack of layers is never dense, however many layers it has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit

from .toys import Block8, Plain

N = 64
DENSE_LAYER = N * N * 4


def stack_of(layers: int, kind: str):
    codes = jax.ShapeDtypeStruct((layers, N, N), jnp.int8)
    if kind == "handlers":
        return jax.eval_shape(lambda c, s: Block8(c, s), codes, jax.ShapeDtypeStruct((layers, N // 8, N), jnp.float32))
    make = jax.vmap(lambda c, f: Plain(c, f))
    return jax.eval_shape(make, codes, jax.ShapeDtypeStruct((layers, 1, N), jnp.float32))


def forward(x, ws):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0].sum()


def remat_forward(x, ws):
    return jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, ws)[0].sum()


def temp_bytes(f, layers: int, kind: str, rows: int = 2) -> int:
    x = jax.ShapeDtypeStruct((rows, N), jnp.float32)
    return jax.jit(f).lower(x, stack_of(layers, kind)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["handlers", "no handlers"])
@pytest.mark.parametrize(
    "compose",
    [implicit, lambda f: implicit(jax.jit(f)), lambda f: f],
    ids=["implicit", "implicit-jit", "operators alone"],
)
def test_a_scan_needs_the_same_room_for_any_number_of_layers(compose, kind):
    few, many = (temp_bytes(compose(forward), layers, kind) for layers in (4, 32))
    assert abs(many - few) <= 256
    assert many < 4 * DENSE_LAYER


@pytest.mark.parametrize("kind", ["handlers", "no handlers"])
@pytest.mark.parametrize(
    "compose", [lambda f: jax.grad(implicit(f)), lambda f: implicit(jax.grad(f))], ids=["out", "in"]
)
def test_the_gradient_of_a_scan_saves_activations_only(compose, kind):
    few, many = (temp_bytes(compose(remat_forward), layers, kind) for layers in (4, 32))
    activations = 2 * N * 4
    assert many - few <= 28 * activations * 3 + 1024
    assert many - few < DENSE_LAYER * 4  # 28 dense layers would be seven times that


def test_the_dense_stack_is_what_the_proof_would_notice():
    def wasteful(x, ws):
        return forward(x, jnp.asarray(ws.materialize() if hasattr(ws, "materialize") else ws))

    assert temp_bytes(wasteful, 32, "handlers") - temp_bytes(wasteful, 4, "handlers") >= 28 * DENSE_LAYER * 0.9


def test_vmap_over_a_stack_does_not_form_more_than_its_result():
    def f(x, ws):
        return jax.vmap(lambda w: x @ w)(ws).sum()

    layers = 16
    x = jax.ShapeDtypeStruct((2, N), jnp.float32)
    compiled = jax.jit(implicit(f)).lower(x, stack_of(layers, "handlers")).compile()
    assert compiled.memory_analysis().argument_size_in_bytes < layers * DENSE_LAYER / 2
