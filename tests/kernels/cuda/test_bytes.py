"""Products that round x to 8 bits in CUDA kernels: which are taken, and that they are what the definition says."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._kernels import cuda, explain, native, qmatmul
from eformer._kernels.cuda import _bytes, _wide
from eformer._kernels.matmul import IN_STACK
from eformer._kernels.parameters import parameters_of, product_problem

from .test_selection import lowered

RNG = np.random.default_rng(11)
ROUNDED = tuple(_bytes.ROUNDED.items())
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
# M, K, N: tiles with edges, odd depths (in the axpy form alone), splits, several tiles of rows of x.
SIZES = (
    (1, 256, 128), (5, 272, 144), (16, 4096, 512), (17, 1040, 1008), (64, 512, 384), (100, 2048, 304), (129, 640, 528),
    (256, 4096, 640), (300, 1152, 768), (700, 384, 2048),
)  # fmt: skip


def make(fmt: str, form: str, m: int, k: int, n: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any, Any]:
    """Rows of all kinds: of zeros, with NaN, with an infinity, tiny, huge, with an outlier."""
    x = RNG.standard_normal((m, k)).astype(np.float32)
    if m > 16:
        x[0], x[1, 3], x[2, 5], x[6, 0] = 0, np.nan, np.inf, 1e4
        x[3] *= 1e-38 if dtype == jnp.float32 else 1e-5
        x[4] *= 1e3 if dtype == jnp.float16 else 1e30
        x[5] = np.abs(x[5])
    shape = (n, k) if form == "dot" else (k, n)
    codes = RNG.integers(-127, 128, shape).astype(np.int8)
    if fmt != "int8":
        codes = codes.view(np.uint8) & np.uint8(0xBF)  # no NaN
    scale = (RNG.random((n, 1) if form == "dot" else (1, n)) + 0.5).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(codes), jnp.asarray(scale)


def product(fmt: str, form: str, x: Any, codes: Any, scale: Any, **options: Any) -> Any:
    """By a kernel, also where XLA is quicker."""
    given: Any = {"activations": _bytes.ROUNDED[fmt], "preference": "native"} | options
    return qmatmul(x, codes, scale, fmt=fmt, form=form, cols=codes.shape[1], **given)


def defined(
    fmt: str, form: str, x: Any, codes: Any, scale: Any, given: Any = None, *, small_first: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """What the definition gives in float32, and the sum of magnitudes that rounding errors are measured by.

    `small_first`: small factors of x are multiplied with sums before the scale is, as plain JAX does it.
    """
    x, most = np.asarray(x, np.float32), LARGEST[_bytes.ROUNDED[fmt]]
    largest = np.abs(x).max(-1)
    with np.errstate(all="ignore"):
        factor = np.maximum(largest / most, np.float32(2.0**-126)) if given is None else np.asarray(given)
        factor = np.where(np.isfinite(largest), factor, np.float32(np.nan))
        quotients = np.clip(x / factor[:, None], -most, most)
    if fmt == "int8":
        small, w = np.nan_to_num(np.rint(quotients)).astype(np.float64), np.asarray(codes, np.float64)
    else:
        small = np.nan_to_num(quotients.astype(jnp.float8_e4m3fn).astype(np.float64))
        w = np.asarray(codes).view(jnp.float8_e4m3fn).astype(np.float64)
    w = w.T if form == "dot" else w
    factors = factor[:, None] * np.asarray(scale).reshape(1, -1)
    sums = small @ w  # integers: exact
    # The matrix unit treats numbers below the normal ones like the smallest of these.
    magnitude = np.maximum(np.abs(small), 2.0**-6) @ np.maximum(np.abs(w), 2.0**-6)
    y = sums.astype(np.float32) * factors
    if small_first:
        with np.errstate(all="ignore"):
            by_parts = sums.astype(np.float32) * factor[:, None] * np.asarray(scale).reshape(1, -1)
        y = np.where(factor[:, None] < 2.0**-64, by_parts, y)
    return y, magnitude * np.abs(factors)


def assert_defined(fmt: str, y: Any, expected: np.ndarray, magnitude: Any, what: Any) -> None:
    """INT8 is exact; of e4m3, whose sums keep fewer bits, the error is bounded by the sum of magnitudes."""
    if fmt == "int8":
        assert_same(y, expected, what)
        return
    found, limits = np.asarray(y, np.float64), jnp.finfo(y.dtype)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    finite = np.isfinite(found) & ~np.isnan(expected)
    bound = 2.0**-9 * magnitude + float(limits.eps) * np.abs(expected) + float(limits.tiny)
    assert (np.abs(found - expected) <= bound)[finite].all(), what


def assert_same(found: Any, expected: np.ndarray, what: Any = "") -> None:
    """Bit for bit, in the type of what was found; NaN equals NaN."""
    with np.errstate(over="ignore"):
        rounded = expected.astype(found.dtype).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found, np.float32), rounded, err_msg=str(what))


def cuts_of(k: int) -> list[_bytes.Cut]:
    splits = (1, 2, 3, 4) if k >= 1024 else (1,)
    return [_bytes.Cut(width, parts) for width in _bytes.COSTS for parts in splits]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize(("fmt", "activations"), ROUNDED)
def test_products_are_those_of_the_definition(
    fmt: str, activations: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8: bit for bit, whatever the cut. e4m3: the matrix unit keeps 13 bits of sums, and a stage has 8 of these."""
    for i, (m, k, n) in enumerate(SIZES):
        dtype = (jnp.bfloat16, jnp.float32, jnp.float16)[i % 3]
        k = k - 3 if form == "axpy" and i % 2 else k
        operands = make(fmt, form, m, k, n, dtype)
        expected, magnitude = defined(fmt, form, *operands)
        for cut in [None, *cuts_of(k)]:
            with monkeypatch.context() as patch:
                if cut is not None:
                    patch.setattr(_bytes, "cut", lambda *sizes, cut=cut: cut)
                    jax.clear_caches()  # equal products share a program
                y = jax.jit(lambda *operands: product(fmt, form, *operands)).lower(*operands).compile()(*operands)
            assert y.dtype == dtype
            assert_defined(fmt, y, expected, magnitude, (m, k, n, cut))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["dot", "axpy"])
def test_what_is_left_to_xla_is_int8_bit_for_bit(form: str) -> None:
    for i, (m, k, n) in enumerate(SIZES):
        operands = make("int8", form, m, k, n, (jnp.bfloat16, jnp.float32, jnp.float16)[i % 3])
        y = jax.jit(functools.partial(product, "int8", form, preference="xla"))(*operands)
        assert_same(y, defined("int8", form, *operands, small_first=True)[0], (m, k, n))


@pytest.mark.gpu
def test_scales_that_are_given_stacks_and_transformations() -> None:
    x, codes, scale = make("int8", "axpy", 40, 512, 256)
    given = (RNG.random(40) * 0.05 + 0.005).astype(np.float32)
    y = jax.jit(functools.partial(product, "int8", "axpy"))(x, codes, scale, x_scale=jnp.asarray(given))
    assert_same(y, defined("int8", "axpy", x, codes, scale, given)[0])

    parts = [make("int8", "dot", 24, 320, 208) for _ in range(3)]
    stack = [jnp.stack(part) for part in zip(*parts, strict=True)]
    mapped = jax.jit(jax.vmap(functools.partial(product, "int8", "dot")))(*stack)
    for one, part in zip(mapped, parts, strict=True):
        assert_same(one, defined("int8", "dot", *part)[0])

    def layer(_: None, part: Any) -> Any:
        return None, product("int8", "dot", *part)

    scanned = jax.jit(lambda *stack: jax.lax.scan(layer, None, stack)[1])(*stack)
    assert_same(scanned, np.asarray(mapped, np.float32))


@pytest.mark.gpu
def test_replayed_programs_see_new_inputs() -> None:
    """Rounding and multiplying overlap inside one call; calls must not."""
    storage = [make("int8", "axpy", 1, 1024, 256 + 128 * i)[1:] for i in range(6)]

    @jax.jit
    def program(x: Any, storage: Any) -> Any:
        return [product("int8", "axpy", x, *part) for part in storage]

    for _ in range(5):
        x = make("int8", "axpy", 20, 1024, 16)[0]
        for y, part in zip(program(x, storage), storage, strict=True):
            assert_same(y, defined("int8", "axpy", x, *part)[0])


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the library were there; lowering needs no more."""
    monkeypatch.setattr(cuda, "loaded", lambda: native.Loaded(Path("libeformer_cuda.so"), None, None))


def choice(
    fmt: str = "int8", activations: str = "int8", form: str = "dot", n: int = 128, scale: Any = None, m: int = 65
) -> Any:
    x, codes, row = make(fmt, form, m, 256, n)
    given = {"fmt": fmt, "form": form, "cols": codes.shape[1], "activations": activations}
    return explain(product_problem(x, codes, row if scale is None else scale, "cuda", **given))


@pytest.mark.usefixtures("present")
def test_what_is_taken_and_what_is_refused() -> None:
    for (fmt, activations), form in itertools.product(ROUNDED, ("dot", "axpy")):
        assert choice(fmt, activations, form).name == "native_cuda"
        assert "@eformer_cuda_bytes" in lowered(functools.partial(product, fmt, form), *make(fmt, form, 9, 128, 64))
    refused = {
        "not int8 with fp8": choice("int8", "fp8"),
        "not fp8_e5m2 with fp8": choice("fp8_e5m2", "fp8"),
        "rows of 120 bytes": choice(form="axpy", n=120),
        "differ along what is summed up": choice(scale=jnp.ones((1, 256))),
    }
    x, blocks = jnp.ones((4, 256), jnp.bfloat16), jnp.zeros((128, 2, 128), jnp.uint8)
    how = {"fmt": "fp8_e4m3_block", "form": "dot", "cols": 256, "activations": "fp8"}
    refused["has scales of blocks"] = explain(product_problem(x, blocks, jnp.ones((128, 2)), "cuda", **how))
    for reason, found in refused.items():
        assert found.name == "xla"
        assert reason in dict(found.rejected)["native_cuda"]


@pytest.mark.usefixtures("present")
def test_what_xla_multiplies_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 rows of x with int8, one matrix; not in a stack, whose entry it would copy."""
    for form, m, n in (("dot", 1, 128), ("dot", 64, 1 << 17), ("axpy", 2, 128), ("axpy", 64, 1 << 16)):
        found = choice(form=form, m=m, n=n)
        assert found.name == "xla", (form, m)
        assert f"quicker with {m} rows" in dict(found.rejected)["native_cuda"]
        assert choice("fp8_e4m3", "fp8", form, m=m).name == "native_cuda"
        x, codes, scale = make("int8", form, m, 256, 128)
        run = functools.partial(product, "int8", form, preference="auto")
        assert "@eformer_cuda_bytes" not in lowered(run, x, codes, scale)
        stacks = [array[None].repeat(2, 0) for array in (codes, scale)]
        given = parameters_of(x, codes, scale, fmt="int8", form=form, cols=codes.shape[1], activations="int8")
        entry = functools.partial(IN_STACK.bind, given)
        assert "@eformer_cuda_bytes" in lowered(entry, x, stacks[0], jnp.int32(1), stacks[1])
        assert "@eformer_cuda_bytes" in lowered(jax.vmap(run), x[None].repeat(2, 0), *stacks)
    for form, m, n in (("dot", 65, 128), ("axpy", 1, 128), ("axpy", 65, 128), ("axpy", 64, (1 << 16) + 16)):
        assert choice(form=form, m=m, n=n).name == "native_cuda", (form, m)
    monkeypatch.setattr(_wide, "has_wgmma", lambda: False)
    assert choice(m=4).name == "native_cuda"


@pytest.mark.usefixtures("present")
def test_products_of_arrays_reach_the_kernel() -> None:
    """Where the scale is one of results: x @ w, and a weight stored with its outputs first."""
    w, x = jnp.ones((256, 384), jnp.bfloat16), jnp.ones((80, 256), jnp.bfloat16)
    products = (
        (ef.quantize(w, dtype="int8", activations="int8"), "mk,kn->mn", 1),
        (ef.quantize(w.T, dtype="int8", axis=-1, activations="int8"), "mk,nk->mn", 0),
        (ef.quantize(w, dtype="fp8", activations="fp8"), "mk,kn->mn", 1),
    )
    for q, subscripts, axpy in products:
        text = lowered(ef.implicit(functools.partial(jnp.einsum, subscripts)), x, q)
        assert text.count("@eformer_cuda_bytes") == 1
        assert f"axpy = {axpy} : i64" in text


def test_the_cut_is_one_the_kernel_has() -> None:
    for m, outs, deep in itertools.product((1, 17, 64, 100, 256, 4096), (16, 4096), (16, 14336)):
        width, splits = _bytes.cut(1, m, outs, deep)
        assert width in _bytes.COSTS
        assert width < 2 * max(m, 64)
        assert 1 <= splits <= max(deep // 512, 1)
    assert _bytes.cut(1, 256, 4096, 14336) == (128, 2), "the measured best on an H200"
    assert _bytes.cut(1, 4096, 4096, 14336) == (256, 1)
