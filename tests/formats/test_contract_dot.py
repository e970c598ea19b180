"""`dot_general` with any dimension numbers, and the products built on it."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer._formats.floating.array import ArrayFloat
from eformer.jaximus import explain, implicit, materialization_policy
from eformer.ops.quantization import Array8B, ArrayNF4, QuantizationType, matmul_bf16_int8_weight_only

from .contract import EVERY, FAST, FEW, FORMATS, check, dense, make, normal, seeded

SIZES = (1, 3, 5, 10)


@st.composite
def dots(draw):
    """Shapes and dimension numbers of a product that exists."""
    n_batch, n_contract = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    n_left, n_right = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    hypothesis.assume(n_batch + n_contract + n_left >= 1)
    sizes = st.sampled_from(SIZES)
    common = [draw(sizes) for _ in range(n_batch + n_contract)]
    left = common + [draw(sizes) for _ in range(n_left)]
    right = common + [draw(sizes) for _ in range(n_right)]
    at_left, at_right = draw(st.permutations(range(len(left)))), draw(st.permutations(range(len(right))))
    # axis i of the list sits at position at[i]
    shapes = [[0] * len(left), [0] * len(right)]
    for shape, at, values in ((shapes[0], at_left, left), (shapes[1], at_right, right)):
        for position, size in zip(at, values, strict=True):
            shape[position] = size
    both = [(tuple(at[:n_batch]), tuple(at[n_batch : n_batch + n_contract])) for at in (at_left, at_right)]
    (lb, lc), (rb, rc) = both
    return shapes, ((lc, rc), (lb, rb)), draw(st.booleans())


@pytest.mark.parametrize("name", ["nf4-double", "nf4-32-last", "int8-matrix", "ternary"])
@hypothesis.settings(max_examples=10, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True)
@hypothesis.given(case=dots())
def test_any_dimension_numbers(name: str, case) -> None:
    (left, right), ((lc, rc), (lb, rb)), swap = case
    rng = seeded(name, left, right)
    q, x = make(name, rng, *left), normal(rng, *right)
    numbers = ((rc, lc), (rb, lb)) if swap else ((lc, rc), (lb, rb))

    def f(q, x):
        return lax.dot_general(*((x, q) if swap else (q, x)), numbers, precision="highest")

    # One program for both: compiling takes most of the time here.
    check(*jax.jit(lambda q, x: (implicit(f)(q, x), f(q.materialize(), x)), compiler_options=FAST)(q, x))


@pytest.mark.parametrize("other", ["same", "nf4", "int8", "ternary"])
@pytest.mark.parametrize("name", ["nf4", "int8-columns", "binary-last-tensor"])
def test_both_quantized(name: str, other: str) -> None:
    rng = seeded(name, other)
    p, q = make(name, rng, 6, 40), make(name if other == "same" else other, rng, 40, 9)

    def f(p, q):
        return [p @ q, jnp.einsum("mk,kn->nm", p, q), jnp.tensordot(q, p, ((0,), (1,)))]

    check(jax.jit(implicit(f), compiler_options=FAST)(p, q), f(dense(p), dense(q)))


@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["nf4", "int8", "ternary"])
def test_result_dtypes_follow_jax(name: str, dtype, out) -> None:
    rng = seeded(name)
    q = make(name, rng, 40, 8, dtype=dtype)
    for x in (normal(rng, 2, 40), normal(rng, 2, 40, dtype=jnp.bfloat16), jnp.ones((2, 40), jnp.int32)):
        for f in (
            lambda x, q: x @ q,
            lambda x, q: lax.dot(x.astype(q.dtype), q, preferred_element_type=out),
            lambda x, q: jnp.einsum("mk,kn->mn", x, q, preferred_element_type=out),
        ):
            found = jax.eval_shape(implicit(f), x, q)
            wanted = jax.eval_shape(f, x, jax.ShapeDtypeStruct(q.shape, q.dtype))
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_sums_over_two_axes_stay_accurate_in_bf16() -> None:
    """Partial sums over the second contracted axis are not rounded to the result's dtype on the way."""
    rng = seeded("heads")
    q = ArrayNF4.quantize(normal(rng, 32, 64, 16, dtype=jnp.bfloat16), 64)
    x = normal(rng, 4, 32, 64, dtype=jnp.bfloat16)
    y = jnp.einsum("mhk,hkn->mn", x, q)
    exact = jnp.einsum("mhk,hkn->mn", x.astype(jnp.float32), q.astype(jnp.float32).materialize())
    assert y.dtype == jnp.bfloat16
    assert jnp.abs(y.astype(jnp.float32) - exact).max() <= 2**-8 * jnp.abs(exact).max()


@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_ragged_dot(name: str, transposed: bool, axis: int) -> None:
    if FORMATS[name].axis is None and axis != -1:
        axis = -2
    rng = seeded(name, axis)
    w = normal(rng, 4, 40, 8)
    q = make(name, rng, 4, 40, 8) if FORMATS[name].kind is Array8B else _along(name, w, axis)
    x, sizes = normal(rng, 11, 8 if transposed else 40), jnp.asarray([3, 0, 6, 1])

    def f(x, q, sizes):
        if not transposed:
            return lax.ragged_dot(x, q, sizes)
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
        )
        return lax.ragged_dot_general(x, q, sizes, numbers)

    check(implicit(f)(x, q, sizes), f(x, dense(q), sizes))


def _along(name: str, w: jax.Array, axis: int):
    from eformer.ops.quantization import Array1B, ArrayInt

    if name.startswith("nf4"):
        return ArrayNF4.quantize(w, 16, axis=axis, double_quant="double" in name)
    if name.startswith("int4"):
        return ArrayInt.quantize(w, 4, 16, axis=axis, symmetric="zero" not in name)
    if FORMATS[name].kind is ArrayFloat:
        return ArrayFloat.quantize(w, name.split("-")[0], axis=axis)
    if name == "codes":
        return Array1B.quantize(jnp.sign(w), axis=axis)
    return Array1B.from_float(w, name.split("-")[0], axis=axis)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", FEW)
def test_convolution(name: str) -> None:
    rng = seeded(name)
    kernel, image = make(name, rng, 3, 3, 4, 10), normal(rng, 2, 7, 8, 4)
    options = {"window_strides": (1, 2), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def f(image, kernel):
        return lax.conv_general_dilated(image, kernel, **options)

    check(implicit(f)(image, kernel), f(image, dense(kernel)))


@pytest.mark.parametrize("name", EVERY)
def test_products_dispatch(name: str) -> None:
    """Under the strictest policy a product on either side runs on the codes, and says with which kernel."""
    rng = seeded(name)
    q, x, y = make(name, rng, 40, 24), normal(rng, 3, 40), normal(rng, 24, 2)
    with materialization_policy("error"):
        report = explain(lambda: (x @ q, q @ y, implicit(_einsum)(x, q), implicit(jax.jit(jnp.dot))(x, q)))()
    assert not report.materializations
    assert len(report.kernels) == 4
    check(report.result[0], x @ dense(q))


def _einsum(x: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.einsum("mk,kn->nm", x, q)


@pytest.mark.parametrize("scale_shape", [(1, 6), (8, 1), (8, 6), (1, 1), (6,), ()])
def test_documented_weight_only_product(scale_shape) -> None:
    rng = seeded(scale_shape)
    x, scale = normal(rng, 2, 3, 8, dtype=jnp.bfloat16), jnp.abs(normal(rng, *scale_shape))
    w = jnp.asarray(rng.integers(-127, 128, (8, 6)), jnp.int8)
    y = matmul_bf16_int8_weight_only(x, w, scale)
    assert (y.dtype, y.shape) == (jnp.bfloat16, (2, 3, 6))
    check(y.astype(jnp.float32), x.astype(jnp.float32) @ (w * scale), tolerance=2**-7)


def test_empty_products() -> None:
    with materialization_policy("error"):
        for name in FEW:
            q, empty = make(name, seeded(name), 40, 8), jnp.zeros((0, 40))
            assert (empty @ q).shape == (0, 8)
            assert (q.T @ empty.T).shape == (8, 0)
            assert jax.grad(lambda x, q=q: (x @ q).sum())(empty).shape == (0, 40)
            none = FORMATS[name].make(jnp.zeros((40, 0)))
            assert (jnp.ones((3, 40)) @ none).shape == (3, 0)
            nothing = FORMATS[name].make(jnp.zeros((0, 8)))
            np.testing.assert_array_equal(jnp.ones((3, 0)) @ nothing, np.zeros((3, 8)))
            experts = make(name, seeded(name), 3, 40, 8)
            assert implicit(lax.ragged_dot)(empty, experts, jnp.zeros(3, jnp.int32)).shape == (0, 8)


def test_every_name_has_an_array_in_the_contract() -> None:
    """The other families take their names from the enumeration itself; the contract lists layouts."""
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert {jax.eval_shape(row.make, w).format for row in FORMATS.values()} == {str(name) for name in QuantizationType}
