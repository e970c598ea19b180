"""Gradients with respect to scales, of products that ask for them: against float64, and in little memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import qmatmul, qragged_dot, scale_gradient
from eformer.errors import QuantizedGradientError

from .cases import FORMATS, FORMS, MORE, SCALES, Case, make_case, relative_error
from .test_memory import storage, temp_bytes

ROWS, COLS = 40, 72
OFTEN = ("nf4", "int8", "int3", "ternary")


def expected(case: Case, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The sum of codes times left.T @ right over whatever shares a scale, for one matrix."""
    change = left.astype(np.float64).T @ right.astype(np.float64)
    scale = np.asarray(case.scale, np.float64)
    if case.codes.ndim == 3:  # in blocks
        block = case.codes.shape[-1] * case.codes.itemsize * 8 // bits(case.fmt)
        spread = np.repeat(scale, block, axis=-1)[..., : case.cols]
        products = np.zeros((change.shape[0], scale.shape[-1] * block))
        products[:, : case.cols] = change * case.dense / spread
        return products.reshape(*scale.shape, block).sum(-1)
    products = change * case.dense / scale
    shared = tuple(i for i in range(2) if scale.shape[i] == 1)
    return products.sum(shared, keepdims=True)


def bits(fmt: str) -> int:
    known = {"nf4": 4, "iq4_nl": 4, "fp4": 4}
    return known.get(fmt) or (8 if "fp8" in fmt else int(fmt.removeprefix("int").removesuffix("_block")))


@pytest.mark.parametrize(
    "fmt", [pytest.param(f, marks=[] if f in OFTEN else [pytest.mark.thorough]) for f in (*FORMATS, *MORE)]
)
def test_values(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(len(fmt))
    for kind in SCALES[fmt]:
        if kind == "none":
            continue
        case = make_case(rng, fmt, ROWS, COLS, block=32, scale=kind)
        for form, panel in (("dot", 1 << 20), ("axpy", 12 * 4 * COLS)):  # one panel, and several that do not divide
            monkeypatch.setattr(scale_gradient, "_PANEL_BYTES", panel)
            x = rng.standard_normal((2, 3, COLS if form == "dot" else ROWS)).astype(np.float32)
            g = rng.standard_normal((2, 3, ROWS if form == "dot" else COLS)).astype(np.float32)

            def loss(scale: Any, case=case, x=x, g=g, form=form) -> Any:
                return jnp.sum(case.product(x, form, scale=scale, by_scale=True) * g)

            left, right = (g, x) if form == "dot" else (x, g)
            wanted = expected(case, left.reshape(6, -1), right.reshape(6, -1))
            found = jax.grad(loss)(jnp.asarray(case.scale))
            assert relative_error(found, wanted) < 1e-5, (kind, form)
            moved = jnp.asarray(rng.standard_normal(case.scale.shape), jnp.float32)
            along = jax.jvp(loss, (jnp.asarray(case.scale),), (moved,))[1]
            assert float(along) == pytest.approx(float(np.sum(wanted * np.asarray(moved))), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("fmt", ["nf4", "int8"])
def test_stacks_maps_and_second_derivatives(fmt: str) -> None:
    rng = np.random.default_rng(3)
    case = make_case(rng, fmt, ROWS, COLS, block=32, batch=(3,))
    x = rng.standard_normal((3, 5, COLS)).astype(np.float32) / 100
    dense = jnp.asarray(case.dense, jnp.float32)
    ratio = jnp.ones(case.scale.shape[0])

    def packed(x: Any, factor: Any) -> Any:
        scale = jnp.asarray(case.scale) * factor[:, None, None]
        return jnp.sin(case.product(x, scale=scale, by_scale=True)).sum()

    def plain(x: Any, factor: Any) -> Any:
        return jnp.sin(jnp.einsum("bmk,bnk->bmn", x, dense * factor[:, None, None])).sum()

    one, two = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, ratio) for f in (packed, plain))
    for a, b in zip(one, two, strict=True):
        assert relative_error(a, b) < 1e-4
    by_map = jax.vmap(
        lambda x, c, s: jax.grad(
            lambda s: jnp.sin(qmatmul(x, c, s, fmt=fmt, form="dot", cols=COLS, by_scale=True)).sum()
        )(s)
    )
    whole = jax.grad(lambda s: jnp.sin(case.product(x, scale=s, by_scale=True)).sum())(jnp.asarray(case.scale))
    assert relative_error(by_map(x, case.codes, case.scale), whole) < 1e-5
    second = [jax.grad(lambda f, g=g: jax.grad(g, argnums=1)(x, f).sum())(ratio) for g in (packed, plain)]
    assert relative_error(*second) < 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_groups(form: str) -> None:
    rng = np.random.default_rng(4)
    case = make_case(rng, "nf4", ROWS, COLS, block=32, batch=(4,))
    sizes = np.array([3, 0, 6, 1])
    x = rng.standard_normal((12, COLS if form == "dot" else ROWS)).astype(np.float32)
    g = rng.standard_normal((12, ROWS if form == "dot" else COLS)).astype(np.float32)

    def loss(scale: Any) -> Any:
        options = {"fmt": "nf4", "form": form, "cols": COLS, "by_scale": True}
        return jnp.sum(qragged_dot(x, case.codes, scale, sizes, **options) * g)

    found = jax.jit(jax.grad(loss))(jnp.asarray(case.scale))
    ends = np.cumsum(sizes)
    for i, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        rows = slice(end - size, end)
        left, right = (g[rows], x[rows]) if form == "dot" else (x[rows], g[rows])
        one = Case(case.fmt, COLS, case.codes[i], case.scale[i], case.dense[i])
        wanted = expected(one, left, right)
        assert np.abs(np.asarray(found[i]) - wanted).max() <= 1e-4 * max(np.abs(wanted).max(), 1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_dense_matrix_is_formed(fmt: str, form: str) -> None:
    rows, cols = 4096, 4096
    x = jax.ShapeDtypeStruct((4, cols), jnp.float32)

    def gradient(x, c, s):
        product = lambda s: qmatmul(x, c, s, fmt=fmt, form=form, cols=cols, by_scale=True)  # noqa: E731
        return jax.grad(lambda s: jnp.sin(product(s)).sum())(s)

    assert temp_bytes(gradient, x, *storage(fmt, rows, cols)) < rows * cols * 4 / 3


def test_without_by_scale_it_is_refused() -> None:
    case = make_case(np.random.default_rng(5), "nf4", 8, 64)
    with pytest.raises(QuantizedGradientError, match="scale of a quantized nf4"):
        jax.grad(lambda s: case.product(np.ones((2, 64), np.float32), scale=s).sum())(jnp.asarray(case.scale))
