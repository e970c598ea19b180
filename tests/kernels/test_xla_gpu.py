"""The path for GPUs without the library of kernels, on a machine without a GPU: values, and what programs hold."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from eformer._kernels import cuda, explain, native, xla
from eformer._kernels.parameters import product_problem
from eformer._kernels.xla import gpu

from .cases import FORMATS, FORMS, SCALES, Case, make_case, relative_error

# Rows, columns, NF4 block: what the sums over parts of the rows take, and everything ragged.
SIZES = ((96, 200, 64), (50, 77, 32), (3, 9, 2))
ROWS_OF_X = (1, 2, 3, 5, 300)
# Largest error: sums in float32; 16-bit results, and 16-bit operands where the matrix is decoded first.
LIMITS = {np.dtype(np.float32): 3e-6, np.dtype(jnp.bfloat16): 2e-2, np.dtype(np.float16): 3e-3}


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "loaded", lambda: native.Loaded(None, None, "no native CUDA kernels"))


def product(case: Case, x: Any, form: str, platform: str = "cuda", **options: Any) -> jax.Array:
    codes, scale = jnp.asarray(case.codes), None if case.scale is None else jnp.asarray(case.scale)
    problem = product_problem(x, codes, scale, platform, fmt=case.fmt, form=form, cols=case.cols, **options)
    return xla.qmatmul(problem, x, codes, scale)


def problems(rng: np.random.Generator, fmt: str, form: str) -> Iterator[tuple[Case, Any]]:
    """Every size with every number of rows; kinds of scale and types of x in turn."""
    scales, dtypes = itertools.cycle(SCALES[fmt]), itertools.cycle(LIMITS)
    for (rows, cols, block), m in itertools.product(SIZES, ROWS_OF_X):
        options: dict[str, Any] = {"block": block} if fmt == "nf4" else {"scale": next(scales)}
        case = make_case(rng, fmt, rows, cols, **options)
        yield case, jnp.asarray(rng.standard_normal((m, cols if form == "dot" else rows)), next(dtypes))


def check_all(made: list[tuple[Case, Any]], form: str, platform: str = "cuda") -> None:
    ys = jax.jit(lambda xs: [product(c, x, form, platform) for (c, _), x in zip(made, xs, strict=True)])(
        [x for _, x in made]
    )
    for (case, x), y in zip(made, ys, strict=True):
        assert y.dtype == x.dtype
        assert relative_error(y, case.expected(x, form)) < LIMITS[x.dtype], (case.dense.shape, x.shape, x.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_values(fmt: str, form: str) -> None:
    rng = np.random.default_rng(FORMATS.index(fmt) + 10 * FORMS.index(form))
    check_all(list(problems(rng, fmt, form)), form)


@pytest.mark.thorough
def test_every_scale_in_every_way_of_computing() -> None:
    rng = np.random.default_rng(20)
    for form in FORMS:
        made = []
        for fmt, m in itertools.product(FORMATS[1:], (1, 3, 300)):
            for scale in SCALES[fmt]:
                case = make_case(rng, fmt, 32, 40, scale=scale)
                made.append((case, jnp.asarray(rng.standard_normal((m, 40 if form == "dot" else 32)), jnp.float32)))
        check_all(made, form)


def test_other_platforms_and_types() -> None:
    """AMD's GPUs, float64, another type of result, nothing to multiply."""
    rng = np.random.default_rng(21)
    case = make_case(rng, "binary", 32, 64)
    check_all([(case, jnp.asarray(rng.standard_normal((7, 64)), jnp.float32))], "dot", "rocm")
    for m, form in itertools.product((1, 7), FORMS):
        x = rng.standard_normal((m, 64 if form == "dot" else 32))
        with jax.enable_x64(True):
            y = product(case, jnp.asarray(x, jnp.float64), form)
        assert y.dtype == np.float64
        assert relative_error(y, case.expected(x, form)) < 1e-14
        y = product(case, jnp.asarray(x, jnp.float32), form, out_dtype=jnp.bfloat16)
        assert y.dtype == jnp.bfloat16
        empty = product(case, jnp.zeros((0, x.shape[1])), form)
        assert empty.shape == (0, 32 if form == "dot" else 64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_values_of_float32_results_are_not_rounded_to_16_bits(form: str, dtype: Any) -> None:
    """Where the matrix is decoded first. Codes without their scales are exact: they are multiplied as they are."""
    rng = np.random.default_rng(29)
    for fmt, options in (("nf4", {}), ("int4", {}), ("int8", {"scale": "row"}), ("int8", {"scale": "full"})):
        case = make_case(rng, fmt, 50, 77, **options)
        x = jnp.asarray(rng.standard_normal((12, 77 if form == "dot" else 50)), dtype)
        y = product(case, x, form, out_dtype=jnp.float32)
        assert relative_error(y, case.expected(x, form)) < 3e-6, (fmt, options)
    exact = make_case(rng, "int8", 50, 77, scale="row")
    text = jax.jit(lambda x: product(exact, x, "dot", out_dtype=jnp.float32)).lower(jnp.ones((12, 77), dtype)).as_text()
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    assert re.search(rf"dot_general .*tensor<12x77x{name}>", text)


def test_inside_shard_map() -> None:
    """Values that differ between devices and values that do not meet in one sum."""
    rng = np.random.default_rng(22)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    for form, m in itertools.product(FORMS, (1, 2, 9)):
        case = make_case(rng, "nf4", 32, 64)
        x = jnp.asarray(rng.standard_normal((2 * m, 64 if form == "dot" else 32)), jnp.float32)
        local = jax.shard_map(
            lambda x, form=form, case=case: product(case, x, form),
            mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"),
        )  # fmt: skip
        assert relative_error(jax.jit(local)(x), case.expected(x, form)) < 3e-6


def lowered(function: Any, *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_programs_for_gpus_hold_no_loop(fmt: str, form: str) -> None:
    """Few rows: a sum and no matrix product. More rows: one product of one decoded matrix."""
    case = make_case(np.random.default_rng(23), fmt, 1024, 2048)
    for m in (1, 16, 1000):
        x = jnp.ones((m, 2048 if form == "dot" else 1024), jnp.bfloat16)
        text = lowered(lambda x: case.product(x, form), x)
        assert "while" not in text
        assert text.count("stablehlo.dot_general") == (m > 1)
        assert ("stablehlo.reduce" in text) == (m == 1)
        assert ("xi4>" in text) == (m == 16 and form == "dot" and fmt in ("ternary", "binary"))


@pytest.mark.parametrize("form", FORMS)
def test_a_large_nf4_matrix_is_decoded_in_parts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LARGE", 1)
    rng = np.random.default_rng(27)
    made = []
    for rows, cols, m in ((50, 77, 16), (3, 9, 5), (96, 200, 7), (64, 64, 17)):
        case = make_case(rng, "nf4", rows, cols, block=32)
        made.append((case, jnp.asarray(rng.standard_normal((m, cols if form == "dot" else rows)), jnp.float32)))
    check_all(made, form)
    text = jax.jit(lambda x: product(made[0][0], x, form)).lower(made[0][1]).as_text()
    assert text.count("stablehlo.dot_general") == gpu.PARTS


@pytest.mark.usefixtures("without_library")
def test_backward_passes_and_batches() -> None:
    """The gradient is the other form; a batch of matrices is a loop over them, and over nothing else."""
    case = make_case(np.random.default_rng(24), "nf4", 1024, 2048)
    x = jnp.ones((1, 2048), jnp.bfloat16)
    text = lowered(jax.grad(lambda x: case.product(x).astype(jnp.float32).sum()), x)
    assert "while" not in text
    assert text.count("stablehlo.optimization_barrier") == 1, "the axpy form adds up parts of the rows"
    stack = make_case(np.random.default_rng(25), "nf4", 512, 512, batch=(3,))
    text = lowered(lambda x: stack.product(x), jnp.ones((3, 1, 512), jnp.bfloat16))
    assert text.count("stablehlo.while") == 1


@pytest.mark.usefixtures("without_library")
def test_narrow_matrices_of_a_batch_are_one_product() -> None:
    """Keys and values of many heads: no loop. The values are those of one product after the other."""
    rng = np.random.default_rng(28)
    for fmt, form, m in itertools.product(("int8", "int4"), FORMS, (1, 4, 9)):
        stack = make_case(rng, fmt, 96, 64, batch=(2, 3), **({"scale": "row"} if fmt == "int8" else {"block": 32}))
        x = jnp.asarray(rng.standard_normal((2, 3, m, 64 if form == "dot" else 96)), jnp.float32)
        options: dict[str, Any] = {"fmt": fmt, "form": form, "cols": 64}
        problem = product_problem(x, stack.codes, stack.scale, "cuda", **options)
        assert explain(problem).name == "xla_batch"
        assert explain(problem.replace(cols=512)).name != "xla_batch"
        assert explain(problem.replace(platform="cpu")).name != "xla_batch"
        y = jax.jit(xla.batched_qmatmul, static_argnums=0)(problem, x, stack.codes, stack.scale)
        assert relative_error(y, stack.expected(x, form)) < 3e-6
        text = lowered(lambda x, stack=stack, form=form: stack.product(x, form), x.astype(jnp.bfloat16))
        assert "while" not in text
        assert text.count("stablehlo.dot_general") <= 1


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_a_prompt_are_not_scaled_afterwards(form: str) -> None:
    """Where the result is larger than an int8 matrix, the matrix is scaled: no float32 result goes through memory."""
    rng = np.random.default_rng(31)
    case = make_case(rng, "int8", 96, 64, scale="row" if form == "dot" else "column")
    deep, outs = (64, 96) if form == "dot" else (96, 64)
    for m, scaled in ((deep + 1, True), (deep, False)):
        x = jnp.asarray(rng.standard_normal((m, deep)), jnp.bfloat16)
        run = jax.jit(functools.partial(product, case, form=form))
        y = run(x)
        if scaled:  # the values of `materialize()` in bfloat16
            rounded = np.asarray(jnp.asarray(case.dense, jnp.bfloat16), np.float64)
            expected = np.asarray(x, np.float64) @ (rounded.T if form == "dot" else rounded)
            assert relative_error(y, expected) < 2.5e-3
        assert relative_error(y, case.expected(x, form)) < 5e-3
        text = run.lower(x).as_text()
        assert "while" not in text
        assert text.count("stablehlo.dot_general") == 1
        assert bool(re.search(rf"multiply .*tensor<{m}x{outs}xf32>", text)) != scaled


def test_cpu_programs_are_as_they_were() -> None:
    case = make_case(np.random.default_rng(26), "int8", 8192, 512)
    text = jax.jit(lambda x: case.product(x, preference="xla")).lower(jnp.ones((2, 512))).as_text()
    assert "stablehlo.while" in text
    assert "cpu" not in gpu.PLATFORMS


@pytest.mark.parametrize("fmt", ["ternary", "binary"])
def test_four_bits_are_multiplied_with_16_bit_values_only(fmt: str) -> None:
    """XLA 0.11 gives wrong products of four-bit integers and float32 in the highest precision."""
    case = make_case(np.random.default_rng(27), fmt, 64, 64)
    for dtype, held in ((jnp.bfloat16, True), (jnp.float32, False)):
        text = jax.jit(lambda x: product(case, x, "dot")).lower(jnp.ones((8, 64), dtype)).as_text()
        assert ("xi4>" in text) == held, dtype
