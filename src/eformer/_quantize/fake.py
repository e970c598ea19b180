"""Training with quantized values (QAT): the same leaves as `quantize_tree`, simulated, with a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core import ste

from .config import QuantizationConfig, quantize_stack
from .paths import open_tree
from .plan import MIN_SIZE, SKIP, plan
from .rules import Choice

Schedule = Callable[[Any], jax.Array]


def fake_quantize_tree(
    params: Any,
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
    strength: Any = 1.0,
) -> Any:
    """`dequantize_tree(quantize_tree(params, ...))`, bit for bit, differentiated as the identity.

    Call it on the trained parameters inside the loss. `strength` blends: 0 gives the parameters themselves, 1 their
    quantized values; a schedule such as `quant_delay` makes it grow with the step.

    >>> params = {"kernel": jnp.linspace(-1.0, 1.0, 4096).reshape(64, 64)}
    >>> len(jnp.unique(fake_quantize_tree(params)["kernel"][:, 0])), len(jnp.unique(params["kernel"][:, 0]))
    (16, 64)
    """
    tree = open_tree(params)
    planned = plan(tree.leaves, rules, default=default, min_size=min_size, skip=skip)
    planned.warn()
    results = []
    for decision in planned.decisions:
        value = decision.leaf.value
        if decision.config is not None:
            real = dataclasses.replace(decision.config, simulate=False)
            value = _blend(value, real, decision.role.batch, jnp.asarray(strength, jnp.float32))
        results.append(value)
    return tree.rebuild(results)


@ste
def _blend(value: Any, config: QuantizationConfig, batch: int, strength: jax.Array) -> Any:
    dense = quantize_stack(value, config, batch).materialize()
    # Not `value + 1 * (dense - value)`: at full strength the values are those of the quantized model, to the bit.
    mixed = (1 - strength) * value + strength * dense
    return jnp.where(strength >= 1, dense, mixed.astype(dense.dtype))


def quant_delay(delay: int, ramp: int = 0) -> Schedule:
    """A schedule for `fake_quantize_tree(strength=...)`: 0 for `delay` steps, then linearly to 1 within `ramp` steps.

    Training starts dense and meets the quantized values once the weights have settled.

    >>> schedule = quant_delay(2, ramp=2)
    >>> [float(schedule(step)) for step in range(6)]
    [0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    """
    for name, value in (("delay", delay), ("ramp", ramp)):
        if value < 0:
            raise ValueError(f"{name}={value} is not allowed; give a number of steps, 0 or more.")

    def schedule(step: Any) -> jax.Array:
        begun = jnp.asarray(step, jnp.float32) - delay + 1
        return jnp.clip(begun / max(ramp, 1), 0.0, 1.0)

    return schedule
