"""Training with quantized weights: straight-through estimators and low-rank updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer.jaximus import materialization_policy
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayNF4,
    quantize,
    straight_through,
    straight_through_1bit,
    straight_through_8bit,
    straight_through_nf4,
)

from .contract import EVERY_KIND, check, normal, seeded


def options(kind: str) -> dict[str, int]:
    return {"block_size": 16} if kind == "nf4" else {}


def problem(kind: str):
    rng = seeded(kind)
    x, true = normal(rng, 64, 16), normal(rng, 16, 4)
    return x, x @ true, normal(rng, 16, 4)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_quantization_aware_training_learns(kind: str) -> None:
    x, y, w = problem(kind)
    optimizer = optax.adam(3e-2)

    def loss(w):
        return jnp.mean((x @ straight_through(w, dtype=kind, **options(kind)) - y) ** 2)

    @jax.jit
    def step(w, state):
        value, grad = jax.value_and_grad(loss)(w)
        updates, state = optimizer.update(grad, state)
        return optax.apply_updates(w, updates), state, value

    state, first = optimizer.init(w), loss(w)
    for _ in range(60):
        w, state, last = step(w, state)
    assert last < 0.75 * first


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_low_rank_updates_train_next_to_frozen_codes(kind: str) -> None:
    x, y, w = problem(kind)
    q = quantize(w, dtype=kind, **options(kind))
    lora = {"a": normal(seeded("a"), 16, 2) * 0.1, "b": jnp.zeros((2, 4))}

    def loss(lora):
        return jnp.mean((x @ q + x @ lora["a"] @ lora["b"] - y) ** 2)

    with materialization_policy("error"):
        first, grads = jax.jit(jax.value_and_grad(loss))(lora)
    dense = jax.grad(lambda p: jnp.mean((x @ (q.materialize() + p["a"] @ p["b"]) - y) ** 2))(lora)
    check(grads, dense)
    better = jax.tree.map(lambda p, g: p - 0.05 * g, lora, grads)
    assert loss(better) < first


TYPED = {
    "nf4": (straight_through_nf4, lambda w: ArrayNF4.quantize(w)),
    "nf4 block": (lambda w: straight_through_nf4(w, 16), lambda w: ArrayNF4.quantize(w, 16)),
    "8bit": (straight_through_8bit, lambda w: Array8B.quantize(w)),
    "8bit axis": (lambda w: straight_through_8bit(w, axis=0), lambda w: Array8B.quantize(w, axis=0)),
    "1bit": (straight_through_1bit, lambda w: Array1B.from_float(w)),
    "binary": (lambda w: straight_through_1bit(w, "binary"), lambda w: Array1B.from_float(w, "binary")),
    "tensor": (lambda w: straight_through_1bit(w, scale="tensor"), lambda w: Array1B.from_float(w, scale="tensor")),
}


@pytest.mark.parametrize("case", TYPED)
def test_typed_estimators(case: str) -> None:
    through, quantized = TYPED[case]
    w = normal(seeded(case), 24, 6)
    for f in (through, jax.jit(through)):
        np.testing.assert_array_equal(f(w), quantized(w).materialize())
    ct = normal(seeded("ct"), 24, 6)
    np.testing.assert_array_equal(jax.vjp(through, w)[1](ct)[0], ct)


def test_estimators_differ_between_ternary_and_binary() -> None:
    w = normal(seeded("differ"), 24, 6)
    assert (straight_through(w, dtype="ternary") == 0).any()
    assert not (straight_through(w, dtype="binary") == 0).any()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_transformed_estimators(kind: str) -> None:
    ws = normal(seeded(kind), 3, 24, 6)
    grads = jax.vmap(jax.grad(lambda w: (straight_through(w, dtype=kind) ** 2).sum()))(ws)
    np.testing.assert_allclose(grads, 2 * jax.vmap(lambda w: straight_through(w, dtype=kind))(ws), rtol=1e-6)
    rematted = jax.grad(lambda w: (jax.checkpoint(lambda w: straight_through(w, dtype=kind))(w) ** 2).sum())(ws[0])
    np.testing.assert_allclose(rematted, grads[0], rtol=1e-6)
    assert jax.eval_shape(lambda w: straight_through(w, dtype=kind), ws).shape == ws.shape
