"""What the GPU benchmarks share: random storage, and timing of many products inside one compiled program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PER_BYTE = {"nf4": 2, "int8": 1, "ternary": 4, "binary": 8, "int4": 2, "fp4": 2, "fp8_e4m3": 1}
IN_BLOCKS = ("nf4", "int4", "fp4")
BLOCK = 64


def storage(key: Any, fmt: str, rows: int, cols: int) -> tuple[jax.Array, jax.Array]:
    """Random codes and scales of a matrix in the dot form."""
    if fmt in IN_BLOCKS:
        blocks = -(-cols // BLOCK)
        scale = jax.random.uniform(key, (rows, blocks)) + 0.5
        return jax.random.bits(key, (rows, blocks, BLOCK // 2), jnp.uint8), scale
    bits = jax.random.bits(key, (rows, -(-cols // PER_BYTE[fmt])), jnp.uint8)
    if fmt == "int8":
        bits = jax.lax.bitcast_convert_type(bits, jnp.int8)
    if fmt == "fp8_e4m3":
        bits = bits & jnp.uint8(0xBF)  # no NaN
    if fmt == "ternary":
        bits = bits & jnp.uint8(0x55)  # codes 0 and 1
    return bits, jax.random.uniform(key, (rows, 1)) + 0.5


def code_bytes(fmt: str, rows: int, cols: int) -> int:
    return rows * cols // PER_BYTE[fmt] + 4 * rows * (cols // BLOCK if fmt in IN_BLOCKS else 1)


def corner_of(ys: list[jax.Array]) -> jax.Array:
    """A few values of every product, so that none is dropped and little has to be returned."""
    return sum((y[0, :8].astype(jnp.float32) for y in ys), start=jnp.zeros(8))


def microseconds(function: Callable[..., Any], *args: Any, calls: int = 10, rounds: int = 7) -> float:
    """Median time of one call, the device kept busy.

    A result is dropped before the next call: it then gets the same memory again. Otherwise XLA changes the addresses in
    its CUDA graph for every call, on the host, and small products are timed by that (up to 3 us each).
    """
    result = None
    for _ in range(3):
        result = function(*args)
    jax.block_until_ready(result)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = None
            result = function(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return sorted(times)[rounds // 2] * 1e6
