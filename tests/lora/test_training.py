"""Real training loops: quantization-aware with a schedule, and adapters on a frozen 4-bit base."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import (
    add_lora,
    dequantize_tree,
    fake_quantize_tree,
    merge,
    merge_lora,
    quant_delay,
    quantize_tree,
    split_trainable,
)

STEPS = 120
FORMATS = {"default": "ternary", "min_size": 0}


def network(key: jax.Array) -> dict[str, Any]:
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "up": {"kernel": jax.random.normal(k1, (16, 64)) / 4, "bias": jnp.zeros(64)},
        "mid": {"kernel": jax.random.normal(k2, (64, 64)) / 8, "bias": jnp.zeros(64)},
        "down": {"kernel": jax.random.normal(k3, (64, 4)) / 8, "bias": jnp.zeros(4)},
    }


def forward(params: Any, x: jax.Array) -> jax.Array:
    for name in ("up", "mid"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["down"]["kernel"] + params["down"]["bias"]


def data(teacher: Any, seed: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(seed), (128, 16))
    return x, forward(teacher, x)


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((forward(params, x) - y) ** 2)


def trained(objective: Any, params: Any, batch: Any, rate: float = 1e-2) -> tuple[Any, list[float]]:
    """STEPS steps of Adam, ever smaller: with full steps ternary codes keep flipping, and the last loss is chance."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, STEPS))

    @jax.jit
    def step(params: Any, state: Any, count: jax.Array) -> Any:
        value, grads = jax.value_and_grad(objective)(params, batch, count)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for count in range(STEPS):
        params, state, value = step(params, state, jnp.asarray(count))
        losses.append(float(value))
    return params, losses


@pytest.fixture(scope="module")
def teacher() -> Any:
    return network(jax.random.key(11))


@pytest.fixture(scope="module")
def student(teacher: Any) -> Any:
    """Trained dense: what is to be quantized."""
    return trained(lambda p, batch, _: loss(p, *batch), network(jax.random.key(12)), data(teacher, 1))[0]


def test_training_with_quantized_values_wins_back_what_rounding_lost(teacher: Any, student: Any):
    batch, held_out = data(teacher, 1), data(teacher, 2)
    rounded = float(loss(fake_quantize_tree(student, **FORMATS), *batch))
    schedule = quant_delay(20, ramp=20)

    def objective(params: Any, batch: Any, step: jax.Array) -> jax.Array:
        return loss(fake_quantize_tree(params, strength=schedule(step), **FORMATS), *batch)

    params, losses = trained(objective, student, batch)
    assert losses[-1] < 0.4 * rounded
    assert losses[0] < 0.2 * rounded  # the schedule starts dense
    final = quantize_tree(params, donate=False, **FORMATS)
    quantized = float(implicit(loss)(final, *batch))
    assert quantized == pytest.approx(float(loss(fake_quantize_tree(params, **FORMATS), *batch)), rel=1e-4)
    assert quantized < 0.4 * rounded
    untrained = quantize_tree(student, donate=False, **FORMATS)
    assert implicit(loss)(final, *held_out) < 0.7 * implicit(loss)(untrained, *held_out)


def test_adapters_learn_a_new_task_on_a_frozen_base(student: Any):
    task = jax.tree.map(lambda w: w + 0.3 * jnp.roll(w, 1), student)
    batch, held_out = data(task, 3), data(task, 4)
    base = quantize_tree(student, donate=False, min_size=0)
    codes = jax.tree.map(np.asarray, base)
    params = add_lora(base, "*kernel", 4, jax.random.key(5), alpha=8)
    factors, frozen = split_trainable(params)
    assert sum(f.size for f in factors.values()) < 0.3 * sum(w.size for w in jax.tree.leaves(student))

    def objective(factors: Any, frozen: Any, batch: Any, _: Any) -> jax.Array:
        return implicit(loss)(merge(factors, frozen), *batch)

    with materialization_policy("error"):
        factors, losses = trained(lambda f, batch, step: objective(f, frozen, batch, step), factors, batch)
    assert losses[-1] < 0.2 * losses[0]
    tuned = merge(factors, frozen)
    assert implicit(loss)(tuned, *held_out) < 0.5 * implicit(loss)(base, *held_out)
    for name in base:
        jax.tree.map(np.testing.assert_array_equal, tuned[name]["kernel"].w, codes[name]["kernel"])
    np.testing.assert_allclose(implicit(loss)(tuned, *batch), loss(dequantize_tree(tuned), *batch), rtol=1e-4)

    evaluate = functools.partial(implicit(loss), x=batch[0], y=batch[1])
    merged, report = merge_lora(tuned)
    assert 0 < report.relative_error < 0.12
    exact, _ = merge_lora(tuned, into="int8")
    assert evaluate(exact) < evaluate(merged)
    assert float(evaluate(exact)) == pytest.approx(losses[-1], rel=0.5)
