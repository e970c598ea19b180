"""Compiled programs hold no dense matrix."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import qmatmul

from .cases import FORMATS, FORMS


def storage(fmt: str, rows: int, cols: int, batch: tuple[int, ...] = ()):
    """Abstract codes and scale; nothing is computed in these tests."""
    if fmt == "nf4":
        shapes = (*batch, rows, cols // 64, 32), (*batch, rows, cols // 64)
    else:
        shapes = (*batch, rows, cols // {"int8": 1, "ternary": 4, "binary": 8}[fmt]), (*batch, rows, 1)
    return (
        jax.ShapeDtypeStruct(shapes[0], jnp.int8 if fmt == "int8" else jnp.uint8),
        jax.ShapeDtypeStruct(shapes[1], jnp.float32),
    )


def temp_bytes(function, *operands) -> int:
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_small_m_forms_no_dense_matrix(fmt: str, form: str, m: int) -> None:
    rows, cols = 4096, 4096
    operands = jax.ShapeDtypeStruct((m, cols), jnp.float32), *storage(fmt, rows, cols)
    for preference in ("auto", "xla"):
        product = functools.partial(qmatmul, fmt=fmt, form=form, cols=cols, preference=preference)
        compiled = jax.jit(product).lower(*operands).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < rows * cols * 4 / 4
        assert "xla_cpu_small_call" not in compiled.as_text(), "XLA runs the loop over panels on one thread"


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradient_forms_no_dense_matrix(fmt: str) -> None:
    rows, cols = 4096, 4096
    x = jax.ShapeDtypeStruct((4, cols), jnp.float32)

    def gradient(x, c, s):
        return jax.grad(lambda x: jnp.sin(qmatmul(x, c, s, fmt=fmt, form="dot", cols=cols)).sum())(x)

    assert temp_bytes(gradient, x, *storage(fmt, rows, cols)) < rows * cols * 4 / 4


def test_layers_and_batches_do_not_add_up() -> None:
    """A scan over layers and a batch of matrices take as much memory as one."""
    size = 1024
    x = jax.ShapeDtypeStruct((4, size), jnp.float32)

    def layers(x, c, s):
        return jax.lax.scan(lambda x, w: (qmatmul(x, *w, fmt="nf4", form="dot", cols=size), None), x, (c, s))[0]

    def batch(x, c, s):
        return jax.vmap(lambda c, s: qmatmul(x, c, s, fmt="nf4", form="dot", cols=size))(c, s).sum(0)

    for program, slack in ((layers, 1 << 14), (batch, 32 * 4 * size * 4 * 3)):
        few, many = (temp_bytes(program, x, *storage("nf4", size, size, (n,))) for n in (2, 32))
        assert many <= few + slack


def test_equal_products_share_one_computation() -> None:
    x = np.ones((2, 1024), np.float32)

    def stack(x, c, s):
        for _ in range(6):
            x = qmatmul(x, c, s, fmt="int8", form="dot", cols=1024)
        return x

    text = jax.jit(stack).lower(x, *storage("int8", 1024, 1024)).as_text()
    assert text.count("call @eformer_qmatmul(") == 6
    assert text.count("func private @eformer_qmatmul") == 1
