"""`repr` of what a tree_map makes of an array: it is no array any more, and can still be printed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer.ops.quantization import LoraArray, quantize


@pytest.mark.parametrize(
    ("f", "shown"),
    [
        (jnp.shape, "weight=(64, 32)"),
        (lambda a: a.ndim > 1, "weight=True"),
        (lambda a: None, "weight=None"),
        (lambda a: a.dtype, "weight=dtype('int8')"),
        (lambda a: "x", "weight='x'"),
    ],
)
def test_parts_are_shown(f, shown: str):
    q = quantize(jnp.ones((64, 32)), dtype="int8")
    assert shown in repr(jax.tree.map(f, q))


@pytest.mark.parametrize("options", [{"dtype": "nf4"}, {"dtype": "nf4", "double_quant": True}, {"dtype": "ternary"}])
@pytest.mark.parametrize("f", [jnp.shape, jnp.sum, lambda a: a.ndim > 1, lambda a: None])
def test_every_format(options, f):
    q = quantize(jnp.ones((64, 32)), **options)
    adapted = LoraArray(q, jnp.ones((64, 2)), jnp.ones((2, 32)))
    name = type(q).__name__
    assert repr(jax.tree.map(f, q)).startswith(f"{name}(")
    assert f"w={name}(" in repr(jax.tree.map(f, adapted))
