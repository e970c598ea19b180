"""Compiled programs hold no dense weight: read off XLA's own account of temporary memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import quantize

from .contract import dense

KINDS = ("nf4", "int8", "ternary", "binary")
SIZE = 4096  # larger than the panels the tiled path decodes at a time
DENSE = SIZE * SIZE * 4


def abstract(kind: str, *shape: int, **options):
    return jax.eval_shape(lambda w: quantize(w, dtype=kind, **options), jax.ShapeDtypeStruct(shape, jnp.float32))


def temp_bytes(f, *args) -> int:
    with materialization_policy("error"):
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_small_products_form_no_dense_weight(kind: str, m: int, axis: int) -> None:
    x = jax.ShapeDtypeStruct((m, SIZE), jnp.float32)
    q = abstract(kind, SIZE, SIZE, axis=axis)
    assert temp_bytes(implicit(jnp.matmul), x, q) < DENSE / 4


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_keeps_no_dense_residual(kind: str) -> None:
    x, q = jax.ShapeDtypeStruct((8, SIZE), jnp.float32), abstract(kind, SIZE, SIZE)
    assert temp_bytes(jax.grad(lambda x, q: jnp.sin(x @ q).sum()), x, q) < DENSE / 4
    residuals = jax.eval_shape(lambda x, q: jax.vjp(lambda x: jnp.sin(x @ q), x)[1], x, q)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals)) < DENSE / 3


@pytest.mark.parametrize("kind", KINDS)
def test_layers_do_not_add_up(kind: str) -> None:
    """Forward and backward through a scan over L layers: only activations grow with L."""
    size, m = 512, 4
    x = jax.ShapeDtypeStruct((m, size), jnp.float32)

    def forward(x, q):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, q)[0]

    def backward(x, q):
        return jax.grad(lambda x: forward(x, q).sum())(x)

    for f, per_layer in ((forward, 0), (backward, 4 * m * size * 4)):
        few, many = (temp_bytes(f, x, abstract(kind, layers, size, size)) for layers in (2, 16))
        assert many - few <= 14 * per_layer + 4096


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("kind", KINDS)
def test_lookup_decodes_rows_only(kind: str, axis: int) -> None:
    table, ids = abstract(kind, 8192, 512, axis=axis), jax.ShapeDtypeStruct((7,), jnp.int32)

    def lookup(table, ids):
        return dense(implicit(lambda t, i: jnp.take(t, i, axis=0))(table, ids))

    used = temp_bytes(lookup, table, ids)
    assert used < 8192 * 512 * 4 / 16


@pytest.mark.parametrize("kind", KINDS)
def test_stored_bytes(kind: str) -> None:
    q = abstract(kind, SIZE, SIZE)
    assert q.nbytes <= DENSE * {"nf4": 4.51, "int8": 8.1, "ternary": 2.1, "binary": 1.1}[kind] / 32
