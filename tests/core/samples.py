"""The arrays the capability tests share: one matrix and one stack of four, implicit and dense."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .toys import Block8, Lora, dense

LAYERS = 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(0, 8, 32)
W = normal(1, 32, 32) / 4
Q = Block8.quantize(W)
D = dense(Q)
STACK = Block8.quantize(normal(2, LAYERS, 32, 32) / 4)
STACK_D = dense(STACK)
A, B = normal(3, 32, 4) / 4, normal(4, 4, 32) / 4
LORA = Lora(Q, A, B)
LORA_D = D + np.asarray(A @ B)

XD = np.asarray(X) @ D  # the product nearly every test wants
GRAD = np.ones((8, 32), np.float32) @ D.T  # of its sum, with respect to X


def tanh_chain(x: np.ndarray, matrices) -> np.ndarray:
    """`tanh(x @ w)` repeated, in NumPy."""
    for w in matrices:
        x = np.tanh(np.asarray(x) @ w)
    return x
