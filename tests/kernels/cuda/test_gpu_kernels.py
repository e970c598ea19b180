"""Every CUDA kernel against the dense product in float64, on random inputs. Runs with EFORMER_TEST_PLATFORM=cuda."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cuda, explain, qgather, qragged_dot
from eformer._kernels.cuda import _wide, tuning, ways
from eformer._kernels.parameters import product_problem

from ..cases import SCALES, Case, make_case
from .test_selection import DECODED, FORMATS, IN_BLOCKS

pytestmark = pytest.mark.gpu

# Relative error in the norm: 16-bit operands and results. A float32 x is multiplied in two parts, so only the rounded
# codebook of nf4 is left, or the TF32 of a product that is decoded first. Scales along the columns make an x of bf16.
LIMITS = {jnp.bfloat16: 3e-3, jnp.float16: 3e-3, jnp.float32: 3e-3}
EXACT = 1e-3
# Rows, columns, M: whole blocks and stages, and everything ragged.
SIZES = (
    (128, 4096, 1), (130, 1024, 1), (64, 2048, 2), (48, 96, 3), (129, 1088, 5), (16, 512, 8), (301, 777, 9),
    (257, 2049, 16), (33, 513, 17), (256, 1536, 31), (17, 5000, 33), (112, 1024, 64), (3, 40, 2), (4096, 4096, 16),
    # What the wide kernel takes: edges of its tiles of rows, columns and x, and splits of the depth.
    (520, 1152, 50), (200, 2176, 100), (136, 640, 129), (264, 1408, 200), (640, 1280, 300),
    (1032, 2048, 64), (72, 128, 20),
)  # fmt: skip
BLOCKS = (64, 64, 32, 96, 128, 512, 64, 64, 32, 128, 96, 64, 32, 64, 64, 128, 64, 192, 256, 64, 64)


@pytest.fixture(autouse=True, scope="session")
def library() -> None:
    reason = cuda.loaded().reason
    if reason is not None:
        pytest.fail(f"{reason}; build them with `make cuda`, or name a library in EFORMER_CUDA_LIBRARY")


def error(found: Any, expected: np.ndarray) -> float:
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def cases(rng: np.random.Generator, fmt: str) -> list[Case]:
    made = []
    for i, (rows, cols, _) in enumerate(SIZES):
        scale = SCALES[fmt][i % len(SCALES[fmt])]
        dtype = (np.float32, jnp.bfloat16, np.float32, np.float16)[i % 4]
        options = {"block": BLOCKS[i]} if fmt in IN_BLOCKS else {"scale": scale}
        made.append(make_case(rng, fmt, rows, cols, scale_dtype=dtype, **options))
    return made


def run_all(cases: list[Case], xs: list[Any], form: str, **options: Any) -> list[Any]:
    """All products in one compiled program."""

    def program(xs: list[Any], storage: list[Any]) -> list[Any]:
        return [
            case.product(x, form, codes=codes, scale=scale, **options)
            for case, x, (codes, scale) in zip(cases, xs, storage, strict=True)
        ]

    return jax.jit(program)(xs, [(jnp.asarray(c.codes), c.scale) for c in cases])


@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, form: str) -> None:
    rng = np.random.default_rng(FORMATS.index(fmt) + 10 * (form == "axpy"))
    made = cases(rng, fmt)
    for dtype, limit in LIMITS.items():
        if fmt == "fp8_e5m2" and dtype == jnp.float16:
            continue  # it does not hold the values times their scales
        xs = [jnp.asarray(rng.standard_normal((m, cols if form == "dot" else rows)), dtype) for rows, cols, m in SIZES]
        ys = run_all(made, xs, form)
        for case, x, y, size in zip(made, xs, ys, SIZES, strict=True):
            assert y.dtype == x.dtype
            bound = EXACT if dtype == jnp.float32 and fmt not in IN_BLOCKS else limit
            assert error(y, case.expected(np.asarray(x, np.float64), form)) <= bound, (dtype, size)


@pytest.mark.parametrize("fmt", DECODED)
def test_formats_that_are_decoded(fmt: str) -> None:
    """Looked-up rows bit for bit; products with many rows, and with few where there is a kernel for them."""
    rng = np.random.default_rng(40 + DECODED.index(fmt))
    for block, dtype in ((16, np.float32), (64, jnp.bfloat16), (128, np.float32)):
        case = make_case(rng, fmt, 70, 392, block=block, scale_dtype=dtype)
        at = jnp.asarray(rng.integers(0, 70, 33))
        for out in LIMITS:
            rows = qgather(case.codes, case.scale, at, fmt=fmt, cols=392, dtype=out)
            with np.errstate(over="ignore"):  # of e5m2 in float16
                expected = case.dense[np.asarray(at)].astype(np.float32).astype(out)
            np.testing.assert_array_equal(np.asarray(rows, np.float32), expected.astype(np.float32))
    few = (1, 3, 8, 12, 16) if fmt in tuning.BYTE_BLOCKS else ()
    for m, form in ((40, "dot"), (300, "axpy"), *((m, "dot") for m in few)):
        case = make_case(rng, fmt, 136, 2048, block=32 if m % 2 else 128)
        x = jnp.asarray(rng.standard_normal((m, 2048 if form == "dot" else 136)), jnp.bfloat16)
        how = {"fmt": fmt, "form": form, "cols": 2048}
        assert explain(product_problem(x, case.codes, case.scale, "cuda", **how)).name == "native_cuda"
        assert error(case.product(x, form), case.expected(np.asarray(x, np.float64), form)) <= LIMITS[jnp.bfloat16]


@pytest.mark.parametrize("fmt", FORMATS)
def test_batched_and_large(fmt: str) -> None:
    rng = np.random.default_rng(20 + FORMATS.index(fmt))
    options = {} if fmt in IN_BLOCKS else {"scale": "row"}
    stack = make_case(rng, fmt, 96, 640, batch=(2, 3), **options)
    x = jnp.asarray(rng.standard_normal((2, 3, 7, 640)), jnp.bfloat16)
    wide = jnp.asarray(rng.standard_normal((2, 3, 70, 640)), jnp.bfloat16)
    large = make_case(rng, fmt, 512, 1024, **options)
    many = jnp.asarray(rng.standard_normal((700, 1024)), jnp.bfloat16)
    ys = run_all([stack, stack, large], [x, wide, many], "dot", out_dtype=jnp.float32)
    for case, value, y in zip((stack, stack, large), (x, wide, many), ys, strict=True):
        assert y.dtype == jnp.float32
        assert error(y, case.expected(np.asarray(value, np.float64))) <= 3e-3


def chosen(cut: _wide.Cut, *_: Any) -> _wide.Cut:
    return cut


def test_every_shape_of_the_wide_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cuts give the same product, whatever the table prefers."""
    rng = np.random.default_rng(25)
    for fmt, form in itertools.product(FORMATS, ("dot", "axpy")):
        options = {} if fmt in IN_BLOCKS else {"scale": "row" if form == "dot" else "column"}
        case, kind = make_case(rng, fmt, 648, 2432, **options), _wide.Kind(fmt, form)
        x = jnp.asarray(rng.standard_normal((75, 2432 if form == "dot" else 648)), jnp.bfloat16)
        expected = case.expected(np.asarray(x, np.float64), form)
        found = []
        for (width, outs), splits in itertools.product(_wide.costs_of(kind), (1, 2, 3, 4)):
            monkeypatch.setattr(_wide, "cut", functools.partial(chosen, _wide.Cut(width, outs, splits)))
            jax.clear_caches()  # equal products share a program
            found.append(jax.jit(functools.partial(case.product, form=form)).lower(x).compile()(x))
        assert len(found) == 4 * len(_wide.costs_of(kind))
        for y in found:
            assert error(y, expected) <= 3e-3, (fmt, form)


@pytest.mark.parametrize(
    ("dtype", "out"), [(jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32), (jnp.float32, None)]
)
def test_every_shape_of_the_wide_kernel_in_other_types(dtype: Any, out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows of x than a tile has, positive ones; matrices that end within tiles and scales of blocks."""
    rng = np.random.default_rng(26)
    for fmt, form in itertools.product(("nf4", "int4", "int8", "fp8_e4m3", "ternary", "binary"), ("dot", "axpy")):
        options = {"block": 128} if fmt in IN_BLOCKS else {"scale": "row" if form == "dot" else "column"}
        case = make_case(rng, fmt, 520, 1152, **options)
        x = jnp.asarray(np.abs(rng.standard_normal((270, 1152 if form == "dot" else 520))) / 8, dtype)
        expected = case.expected(np.asarray(x, np.float64), form)
        kind = _wide.Kind(fmt, form, sums=fmt in IN_BLOCKS and jnp.float32 in (dtype, out))
        for (width, outs), splits in itertools.product(_wide.costs_of(kind), (1, 3)):
            if width <= 64:
                continue
            monkeypatch.setattr(_wide, "cut", functools.partial(chosen, _wide.Cut(width, outs, splits)))
            monkeypatch.setattr(ways, "chosen", lambda problem: "wide")
            jax.clear_caches()  # equal products share a program
            program = jax.jit(functools.partial(case.product, form=form, out_dtype=out)).lower(x)
            assert "@eformer_cuda_wide" in program.as_text()
            y = program.compile()(x)
            bound = EXACT if jnp.float32 in (dtype, out) else LIMITS[dtype]
            assert error(y, expected) <= bound, (fmt, form, width, outs, splits)
    jax.clear_caches()


def test_transforms() -> None:
    """jit, grad, vmap and scan over stacked layers give what the dense matrix gives."""
    rng = np.random.default_rng(31)
    case = make_case(rng, "nf4", 256, 512)
    x = jnp.asarray(rng.standard_normal((4, 512)), jnp.float32)
    codes, absmax = jnp.asarray(case.codes), jnp.asarray(case.scale)

    def loss(x: Any) -> Any:
        return (case.product(x, codes=codes, scale=absmax) ** 2).sum()

    wide = np.asarray(x, np.float64)
    gradient = 2 * (wide @ case.dense.T) @ case.dense
    assert error(jax.jit(jax.grad(loss))(x), gradient) <= 3e-3
    mapped = jax.jit(jax.vmap(lambda v: case.product(v, codes=codes, scale=absmax)))(x)
    assert error(mapped, wide @ case.dense.T) <= 3e-3

    layers = make_case(rng, "nf4", 512, 512, batch=(5,))

    def layer(h: Any, one: Any) -> Any:
        h = layers.product(h, codes=one[0], scale=one[1])
        return h / jnp.abs(h).max(), None

    h, _ = jax.jit(lambda x, *stack: jax.lax.scan(layer, x, stack))(x, jnp.asarray(layers.codes), layers.scale)
    expected = wide
    for dense in layers.dense:
        expected = expected @ dense.T
        expected = expected / np.abs(expected).max()
    assert error(h, expected) <= 5e-3


def test_replayed_programs() -> None:
    """A program of several products becomes a CUDA graph; its replays must see new inputs."""
    rng = np.random.default_rng(32)
    made = [make_case(rng, "nf4", 192 + 16 * i, 1024) for i in range(8)]
    storage = [(jnp.asarray(c.codes), jnp.asarray(c.scale)) for c in made]

    @jax.jit
    def program(x: Any, storage: Any) -> Any:
        return [c.product(x, codes=q, scale=s) for c, (q, s) in zip(made, storage, strict=True)]

    for m in range(6):
        x = jnp.asarray(rng.standard_normal((3, 1024)) * (m + 1), jnp.bfloat16)
        for case, y in zip(made, program(x, storage), strict=True):
            assert error(y, case.expected(np.asarray(x, np.float64))) <= 3e-3


def test_storage_that_is_not_aligned() -> None:
    """Slices of stacked odd-sized storage begin anywhere."""
    rng = np.random.default_rng(33)
    stack = make_case(rng, "int8", 37, 211, batch=(3,), scale="row")
    x = jnp.asarray(rng.standard_normal((3, 4, 211)), jnp.bfloat16)

    @jax.jit
    def second(x: Any, codes: Any, scale: Any, i: Any) -> Any:
        return stack.product(x[i], codes=codes[i], scale=scale[i])

    for i in range(3):
        y = second(x, jnp.asarray(stack.codes), jnp.asarray(stack.scale), i)
        assert error(y, np.asarray(x[i], np.float64) @ stack.dense[i].T) <= 3e-3


@pytest.mark.parametrize("fmt", FORMATS)
def test_gather_and_ragged(fmt: str) -> None:
    rng = np.random.default_rng(40 + FORMATS.index(fmt))
    options = {} if fmt in IN_BLOCKS else {"scale": "row"}
    table = make_case(rng, fmt, 1000, 333, **options)
    indices = rng.integers(0, 1000, 57)
    how = {"fmt": fmt, "block": 64 if fmt in IN_BLOCKS else None}
    for dtype, limit in ((jnp.float32, 1e-6), (jnp.bfloat16, 3e-3)):
        lookup = jax.jit(functools.partial(qgather, cols=333, dtype=dtype, **how))
        rows = lookup(jnp.asarray(table.codes), table.scale, indices)
        assert error(rows, table.dense[indices]) <= limit

    experts = make_case(rng, fmt, 80, 320, batch=(5,), **options)
    sizes = np.array([3, 0, 20, 1, 5])
    x = jnp.asarray(rng.standard_normal((32, 320)), jnp.bfloat16)  # three rows belong to nobody
    product = jax.jit(functools.partial(qragged_dot, form="dot", cols=320, **how))
    y = product(x, jnp.asarray(experts.codes), experts.scale, sizes)
    expected, start = np.zeros((32, 80)), 0
    for size, dense in zip(sizes, experts.dense, strict=True):
        expected[start : start + size] = np.asarray(x[start : start + size], np.float64) @ dense.T
        start += size
    assert error(y, expected) <= 3e-3
    assert not np.asarray(y[start:], np.float32).any()


def test_the_kernel_is_chosen_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(np.random.default_rng(50), "nf4", 256, 512)
    x = jnp.ones((2, 512), jnp.bfloat16)
    problem = product_problem(x, case.codes, case.scale, "cuda", fmt="nf4", form="dot", cols=512)
    assert explain(problem).name == "native_cuda"
    assert "eformer_cuda_qmatmul" in jax.jit(case.product).lower(x).as_text()
    monkeypatch.setenv("EFORMER_KERNELS", "0")
    assert explain(problem).name == "xla"
    assert "eformer_cuda" not in jax.jit(lambda x: case.product(x)).lower(x).as_text()
