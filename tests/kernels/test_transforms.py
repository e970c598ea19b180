"""The product under every transformation of JAX, compared with the same program on the dense matrix."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from .cases import FORMATS, FORMS, make_case, relative_error

ROWS, COLS, M = 24, 72, 3


def pair(rng: np.random.Generator, fmt: str, form: str = "dot"):
    """A quantized product, the dense one, and an x for both; x is small enough for sin to be well conditioned."""
    case = make_case(rng, fmt, ROWS, COLS, block=16)
    matrix = jnp.asarray(case.dense.T if form == "dot" else case.dense, jnp.float32)
    x = rng.standard_normal((M, matrix.shape[0])) * (1e-3 if fmt == "int8" else 0.05)
    quantized = functools.partial(case.product, form=form, preference="xla")
    return quantized, lambda x: x @ matrix, jnp.asarray(x, jnp.float32)


def loss(product):
    return lambda x: jnp.sin(product(x)).sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_gradients(fmt: str, form: str, rng: np.random.Generator) -> None:
    quantized, dense, x = pair(rng, fmt, form)
    expected = jax.grad(loss(dense))(x)
    assert relative_error(jax.grad(loss(quantized))(x), expected) < 5e-6
    assert relative_error(jax.jit(jax.grad(jax.checkpoint(loss(quantized))))(x), expected) < 5e-6
    t = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    for ours, theirs in zip(jax.jvp(quantized, (x,), (t,)), jax.jvp(dense, (x,), (t,)), strict=True):
        assert relative_error(ours, theirs) < 5e-6
    ct = jnp.asarray(rng.standard_normal(dense(x).shape), jnp.float32)
    assert relative_error(jax.vjp(quantized, x)[1](ct)[0], jax.vjp(dense, x)[1](ct)[0]) < 5e-6


def test_second_derivatives(rng: np.random.Generator) -> None:
    quantized, dense, x = pair(rng, "nf4")
    assert relative_error(jax.hessian(loss(quantized))(x[0]), jax.hessian(loss(dense))(x[0])) < 5e-6
    t = jnp.ones_like(x)
    ours, theirs = (jax.jvp(jax.grad(loss(f)), (x,), (t,))[1] for f in (quantized, dense))
    assert relative_error(ours, theirs) < 5e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradient_dtypes(dtype, rng: np.random.Generator) -> None:
    quantized, dense, x = pair(rng, "nf4")
    x = x.astype(dtype)
    gradient = jax.grad(lambda x: quantized(x, out_dtype=jnp.float32).sum())(x)
    assert gradient.dtype == dtype
    assert relative_error(gradient, jax.grad(lambda x: dense(x.astype(jnp.float32)).sum())(x)) < jnp.finfo(dtype).eps


def test_backward_pass_keeps_nothing_dense(rng: np.random.Generator) -> None:
    """What the forward pass hands to the backward pass is packed."""
    case = make_case(rng, "nf4", 512, 512)
    x = jnp.ones((2, 512))
    _, backward = jax.vjp(lambda x: case.product(x, codes=jnp.asarray(case.codes), scale=jnp.asarray(case.scale)), x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(backward) if hasattr(leaf, "nbytes"))
    assert kept <= case.codes.nbytes + case.scale.nbytes + 4 * x.nbytes


@pytest.mark.parametrize("x_axis", [None, 0, 1, 2])
@pytest.mark.parametrize("codes_axis", [None, 0, 1])
@pytest.mark.parametrize("scale_axis", [None, 0, 2])
def test_vmap(x_axis, codes_axis, scale_axis, rng: np.random.Generator) -> None:
    if x_axis is None and codes_axis is None and scale_axis is None:
        return  # nothing to map over
    case = make_case(rng, "ternary", 20, 40, batch=(4,))
    x = rng.standard_normal((4, M, 40)).astype(np.float32)
    raw = {"x": (x, x_axis), "codes": (case.codes, codes_axis), "scale": (case.scale, scale_axis)}
    operands = [np.moveaxis(a, 0, d) if d is not None else a[0] for a, d in raw.values()]
    axes = (x_axis, codes_axis, scale_axis)
    mapped = jax.vmap(lambda x, c, s: case.product(x, codes=c, scale=s, preference="xla"), in_axes=axes)(*operands)

    def pick(array: np.ndarray, axis: int | None) -> np.ndarray:
        return array if axis is not None else np.repeat(array[:1], 4, axis=0)

    values = case.dense / case.scale
    dense = np.round(pick(values, codes_axis)) * pick(case.scale.astype(np.float64), scale_axis)
    assert relative_error(mapped, pick(x, x_axis).astype(np.float64) @ dense.swapaxes(1, 2)) < 3e-6


@pytest.mark.parametrize("fmt", FORMATS)
def test_nested_vmap_and_grad(fmt: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 20, 40, block=8, batch=(2, 3))
    x = (rng.standard_normal((2, 3, M, 40)) * (1e-3 if fmt == "int8" else 0.05)).astype(np.float32)

    def ours(x, codes, scale):
        return jnp.sin(case.product(x, codes=codes, scale=scale, preference="xla")).sum()

    dense = jnp.asarray(case.dense, jnp.float32)
    expected = jax.grad(lambda x: jnp.sin(jnp.einsum("abmc,abrc->abmr", x, dense)).sum())(x)
    assert relative_error(jax.vmap(jax.vmap(jax.grad(ours)))(x, case.codes, case.scale), expected) < 5e-6
    assert relative_error(jax.grad(ours)(x, case.codes, case.scale), expected) < 5e-6


def test_scan_over_layers(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 64, 64, batch=(5,))
    x = rng.standard_normal((2, 64)).astype(np.float32)

    def layers(x, codes, scale):
        def layer(x, weight):
            return jnp.tanh(case.product(x, codes=weight[0], scale=weight[1], preference="xla") / 8), None

        return jax.lax.scan(layer, x, (codes, scale))[0]

    expected = x.astype(np.float64)
    for matrix in case.dense:
        expected = np.tanh(expected @ matrix.T / 8)
    assert relative_error(jax.jit(layers)(x, case.codes, case.scale), expected) < 1e-5
    gradient = jax.jit(jax.grad(lambda x: layers(x, case.codes, case.scale).sum()))(x)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


def test_differentiating_a_program_around_the_weight(rng: np.random.Generator) -> None:
    """Only x carries a tangent: codes and scale may be arguments of the differentiated function."""
    case = make_case(rng, "int8", ROWS, COLS)
    x = jnp.ones((1, COLS))
    gradient = jax.grad(lambda x, c, s: case.product(x, codes=c, scale=s).sum())(x, case.codes, case.scale)
    assert relative_error(gradient, case.dense.sum(0)[None]) < 3e-6


@pytest.mark.parametrize("fmt", FORMATS)
def test_export(fmt: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, ROWS, COLS)
    x = rng.standard_normal((M, COLS)).astype(np.float32)
    product = jax.jit(lambda x, c, s: case.product(x, codes=c, scale=s, preference="xla"))
    exported = export.export(product, platforms=("cpu", "cuda", "tpu"))(x, case.codes, case.scale)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    assert relative_error(exported.call(x, case.codes, case.scale), case.expected(x)) < 3e-6
