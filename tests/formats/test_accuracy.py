"""How much every format loses on normal weights: not more than promised, not less than theory allows."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from eformer.ops.quantization import ArrayNF4, quantize


@functools.cache
def weights() -> jax.Array:
    return jax.random.normal(jax.random.key(20), (4096, 4096))


@functools.cache
def error(kind: str, **options) -> float:
    """Relative error in the Frobenius norm."""
    w = weights()
    return float(jnp.linalg.norm(quantize(w, dtype=kind, **options).materialize() - w) / jnp.linalg.norm(w))


# format: (promised, what no quantizer of that many levels can beat on N(0, 1))
BOUNDS = {
    "int8": (0.012, 0.005),  # uniform steps of max / 127 with max about 3.5 to 4.5: step / sqrt(12)
    "nf4": (0.095, math.sqrt(0.006)),  # 16 levels, scaled per block of 64
    "ternary": (0.46, math.sqrt(0.1902)),  # Lloyd-Max with three levels
    "binary": (0.61, math.sqrt(1 - 2 / math.pi) - 1e-3),  # two levels: exactly 0.6028
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_error_of_normal_weights(kind: str) -> None:
    promised, floor = BOUNDS[kind]
    assert floor <= error(kind) <= promised


def test_int8_error_is_that_of_uniform_rounding() -> None:
    step = jnp.abs(weights()).max(-1) / 127
    expected = float(jnp.sqrt((step**2).mean() / 12))
    assert abs(error("int8") / expected - 1) < 0.01


def test_smaller_blocks_lose_less() -> None:
    """And double quantization costs little."""
    w = weights()[:1024, :1024]

    def loss(**options) -> float:
        return float(jnp.linalg.norm(ArrayNF4.quantize(w, **options).materialize() - w) / jnp.linalg.norm(w))

    losses = [loss(block_size=b) for b in (16, 64, 256, 1024)]
    assert losses == sorted(losses)
    assert 1.0 <= loss(double_quant=True) / loss() < 1.01


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int8", 8.01), ("ternary", 2.01), ("binary", 1.01)])
def test_bits_per_weight(kind: str, bits: float) -> None:
    q = quantize(weights()[:, :256].T.reshape(256, 4096), dtype=kind, axis=-1)
    assert q.bits_per_weight <= bits
    assert q.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(q))
