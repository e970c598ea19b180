"""Choosing the CUDA kernels, and doing without them, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._kernels import cuda, explain, native, qgather, qragged_dot
from eformer._kernels import formats as table
from eformer._kernels.cuda import _wide, tuning
from eformer._kernels.native import BF16, F32
from eformer._kernels.parameters import Problem, product_problem

from ..cases import NIBBLES, OFFSETS, make_case, with_offset

FORMATS, IN_BLOCKS = cuda.LIMITS.formats, ("nf4", *NIBBLES)
DECODED = tuple(fmt for fmt in table.FORMATS if fmt not in FORMATS)
RNG = np.random.default_rng(5)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the library were there; lowering needs no more."""
    monkeypatch.setattr(cuda, "loaded", lambda: native.Loaded(Path("libeformer_cuda.so"), None, None))


def choice(fmt: str = "nf4", m: int = 2, dtype: Any = jnp.bfloat16, block: int = 64, **options: Any) -> Any:
    storage = {"block": block} if fmt in IN_BLOCKS else {}
    case = make_case(RNG, fmt, 256, 512, **storage)
    x = jax.ShapeDtypeStruct((m, 512), dtype)
    given = {"fmt": fmt, "cols": 512, "form": "dot", **options}
    return explain(product_problem(x, case.codes, case.scale, "cuda", **given))


def lowered(function: Any, *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("present")
def test_every_format_is_taken() -> None:
    for fmt in FORMATS:
        for form in ("dot", "axpy"):
            for m in (1, 64, 1000):
                assert choice(fmt, m, form=form).name == "native_cuda"


@pytest.mark.usefixtures("present")
def test_what_is_refused_is_refused_with_a_reason() -> None:
    refused = {
        "takes multiples of 32": choice(block=48),
        "x is float64": choice(dtype=np.float64),
        "names an algorithm": choice(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32),
    }
    for reason, found in refused.items():
        assert found.name == "xla"
        assert reason in dict(found.rejected)["native_cuda"]
    assert choice(preference="xla").name == "xla"


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("fmt", FORMATS)
def test_lowering_calls_the_kernel(fmt: str) -> None:
    case = make_case(RNG, fmt, 256, 512, **({} if fmt in IN_BLOCKS else {"scale": "row"}))
    few, many = jnp.ones((4, 512), jnp.bfloat16), jnp.ones((1500, 512), jnp.bfloat16)
    some = jnp.ones((500, 512), jnp.bfloat16)
    text = lowered(case.product, few)
    assert text.count("@eformer_cuda_qmatmul") == 1
    assert f"fmt = {table.FORMATS[fmt].number} : i64" in text
    assert "dot_general" not in text
    text = lowered(case.product, many)
    assert text.count("@eformer_cuda_dequant") == 1
    assert "dot_general" in text
    text = lowered(case.product, some)
    assert text.count("@eformer_cuda_wide") == 1
    assert "axpy = 0 : i64" in text
    assert "dot_general" not in text
    text = lowered(jax.grad(lambda x: case.product(x).sum()), few)
    assert text.count("@eformer_cuda_wide") == 1, "the backward product is the other form"
    assert "axpy = 1 : i64" in text


@pytest.mark.usefixtures("present")
def test_formats_without_a_fused_kernel_are_decoded() -> None:
    """Many rows: first; rows of a table: those asked for. Few rows are for XLA."""
    many = jnp.ones((40, 512), jnp.bfloat16)
    for fmt in DECODED:
        case = make_case(RNG, fmt, 64, 512)
        looked_up = lowered(lambda i, c=case: qgather(c.codes, c.scale, i, fmt=c.fmt, cols=512), jnp.arange(3))
        assert "@eformer_cuda_gather" in looked_up
        if fmt in tuning.BYTE_BLOCKS:
            continue
        assert lowered(case.product, many).count("@eformer_cuda_dequant") == 1
        odd = choice(fmt, 4)
        assert odd.name == "xla"
        assert f"no kernel for {fmt} with 16 rows or fewer" in dict(odd.rejected)["native_cuda"]


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("fmt", tuning.BYTE_BLOCKS)
def test_blocks_of_bytes(fmt: str) -> None:
    """Up to 16 rows, more, so many that decoding first is quicker; the other form; what neither kernel takes."""
    case = make_case(RNG, fmt, 512, 512, block=128)
    calls = {("dot", 1): "qmatmul", ("dot", 16): "qmatmul", ("dot", 17): "wide", ("dot", 1000): "wide"}
    calls |= {("axpy", 1): "wide", ("axpy", 16): "wide", ("axpy", 300): "wide", ("dot", 5000): "dequant"}
    for (form, m), target in calls.items():
        text = lowered(lambda x, form=form: case.product(x, form), jnp.ones((m, 512), jnp.bfloat16))
        assert re.findall(r"@eformer_cuda_(\w+)", text) == [target], (form, m)
        assert ("dot_general" in text) == (target == "dequant")
    for dtype in (jnp.float16, jnp.float32):
        assert "@eformer_cuda_dequant" in lowered(case.product, jnp.ones((40, 512), dtype))
    odd = make_case(RNG, fmt, 512, 512, block=48)
    assert "@eformer_cuda_dequant" in lowered(odd.product, jnp.ones((40, 512), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((4, 512), jnp.bfloat16)
    found = explain(product_problem(x, odd.codes, odd.scale, "cuda", fmt=fmt, form="dot", cols=512))
    assert found.name == "xla"
    assert f"no kernel for {fmt} with 16 rows or fewer" in dict(found.rejected)["native_cuda"]


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("here", ["8.0", "8.6", "8.9", "", "9.0", "12.0"])
def test_blocks_of_bytes_have_their_kernel_from_hopper_on(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has no other one for few rows of them."""
    monkeypatch.setattr(tuning, "capability", lambda: here)
    fits = here in ("9.0", "12.0")
    assert [tuning.is_skinny(fmt, 4, 512) for fmt in ("nf4", *tuning.BYTE_BLOCKS)] == [fits] * 3
    x = jax.ShapeDtypeStruct((4, 512), jnp.bfloat16)
    case = make_case(RNG, "int8_block", 512, 512, block=128)
    found = explain(product_problem(x, case.codes, case.scale, "cuda", fmt=case.fmt, form="dot", cols=512))
    assert found.name == ("native_cuda" if fits else "xla")


def test_the_costs_of_what_the_tables_were_not_fitted_to() -> None:
    """Blocks of bytes and offsets leave products to decoding first with fewer rows of x than what they resemble."""
    shape: Any = {"rows": 4096, "cols": 14336, "x_dtype": BF16, "form": "axpy", "out_dtype": BF16}

    def most(fmt: str, offset: Any = None) -> int:
        blocks: Any = {"block": None} if fmt == "int8" else {"block": 64}
        made = Problem(fmt, **shape, **blocks, offset=offset)
        return max(m for m in range(128, 4097, 128) if _wide.takes(made.replace(m=m)))

    assert most("int8") > most("int8_block") >= 256
    assert most("int4") > most("int4", np.dtype(np.uint8)) >= 256


def operands(text: str) -> list[str]:
    """Types of what the one custom call gets."""
    (call,) = re.findall(r"custom_call @eformer_cuda_\w+\(.*?: \((.*?)\) ->", text)
    return re.findall(r"tensor<(.*?)>", call)


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("kind", OFFSETS)
def test_offsets_are_an_operand(kind: str) -> None:
    """One call and no second product; zero points stay bytes, biases what they are."""
    stored = "ui8" if kind == "zero" else "f16"
    case = with_offset(RNG, make_case(RNG, "int4", 256, 512), kind, np.float16)
    calls = {("dot", 1): "qmatmul", ("dot", 16): "qmatmul", ("dot", 64): "wide", ("axpy", 1): "wide"}
    calls |= {("axpy", 300): "wide", ("dot", 5000): "dequant"}
    for (form, m), target in calls.items():
        x = jnp.ones((m, 512 if form == "dot" else 256), jnp.bfloat16)
        text = lowered(lambda x, form=form: case.product(x, form), x)
        assert re.findall(r"@eformer_cuda_(\w+)", text) == [target], (form, m)
        assert text.count("dot_general") == (target == "dequant")
        assert f"1x256x8x{stored}" in operands(text)
    experts = with_offset(RNG, make_case(RNG, "int4", 64, 512, batch=(4,)), kind, np.float16)
    how: Any = {"fmt": "int4", "cols": 512}
    given = (jnp.ones((9, 512), jnp.bfloat16), experts.codes, experts.scale, jnp.array([2, 3, 0, 4]))
    text = lowered(lambda *given: qragged_dot(*given, form="dot", offset=experts.offset, **how), *given)
    assert "@eformer_cuda_ragged" in text
    assert f"4x64x8x{stored}" in operands(text)
    text = lowered(lambda i: qgather(case.codes, case.scale, i, offset=case.offset, **how), jnp.arange(3))
    assert "@eformer_cuda_gather" in text
    assert f"1x256x8x{stored}" in operands(text)


@pytest.mark.usefixtures("present")
def test_offsets_of_other_blocks_and_types() -> None:
    """Short blocks of biases, results of float32, other integers: what takes them, and that nothing is added behind."""
    x = jnp.ones((40, 512), jnp.bfloat16)
    short = {kind: with_offset(RNG, make_case(RNG, "int4", 256, 512, block=32), kind) for kind in OFFSETS}
    assert "@eformer_cuda_wide" in lowered(short["zero"].product, x)
    assert "@eformer_cuda_dequant" in lowered(short["bias"].product, x)  # float32 shares a scale among 64 at least
    assert "@eformer_cuda_qmatmul" in lowered(short["bias"].product, x[:16])
    long = with_offset(RNG, make_case(RNG, "int4", 256, 512), "zero")
    assert "@eformer_cuda_wide" in lowered(lambda x: long.product(x, out_dtype=jnp.float32), x)
    bytes_ = with_offset(RNG, make_case(RNG, "int8_block", 256, 512, block=32), "zero")
    assert "@eformer_cuda_qmatmul" in lowered(bytes_.product, x[:8])
    for case in (bytes_, with_offset(RNG, make_case(RNG, "int3", 256, 512), "bias")):
        text = lowered(case.product, x)
        assert text.count("@eformer_cuda_dequant") == text.count("dot_general") == 1
    wide = dataclasses.replace(long, offset=jnp.zeros(long.scale.shape, np.float32))
    assert operands(lowered(wide.product, x)).count("1x256x8xf32") == 2
    few = with_offset(RNG, make_case(RNG, "int8_block", 256, 896, block=128), "zero")  # rows of 7 bytes
    how: Any = {"fmt": "int8_block", "form": "dot", "cols": 896, "offset": few.offset}
    found = explain(product_problem(jnp.ones((4, 896), jnp.bfloat16), few.codes, few.scale, "cuda", **how))
    assert found.name == "xla"
    assert "a product of its own" in found.reason


@pytest.mark.usefixtures("present")
def test_what_the_wide_kernel_leaves_to_others() -> None:
    """Rows that are no multiple of 16 bytes, short blocks, scales both ways, chips without its instruction."""
    x = jnp.ones((40, 520), jnp.bfloat16)
    odd = {"int8": {"scale": "row"}, "ternary": {"scale": "row"}, "nf4": {"block": 96}}
    for fmt, options in odd.items():
        assert "@eformer_cuda_wide" not in lowered(make_case(RNG, fmt, 64, 520, **options).product, x)
    x = jnp.ones((40, 512), jnp.bfloat16)
    text = lowered(make_case(RNG, "int8", 64, 512, scale="full").product, x)
    assert "@eformer_cuda_wide" not in text
    case = make_case(RNG, "int8", 64, 512, scale="column")
    assert "@eformer_cuda_wide" in lowered(case.product, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wide, "has_wgmma", lambda: False)
        assert "@eformer_cuda_wide" not in lowered(make_case(RNG, "int8", 64, 512, scale="row").product, x)


def test_the_cut_of_the_wide_kernel() -> None:
    """The measured best on an H200, one block per multiprocessor where there is work for all."""
    best = {
        (64, 14336, 4096): (64, 128, 1), (64, 4096, 4096): (64, 64, 2), (64, 4096, 14336): (64, 64, 2),
        (64, 8192, 8192): (64, 128, 2), (64, 28672, 8192): (64, 128, 1), (256, 14336, 4096): (256, 128, 1),
        (256, 4096, 4096): (128, 64, 1), (256, 4096, 14336): (128, 64, 1), (256, 8192, 8192): (256, 128, 2),
        (256, 2880, 2880): (256, 128, 4), (128, 4096, 4096): (128, 64, 2), (128, 4096, 14336): (128, 64, 2),
    }  # fmt: skip
    assert {sizes: _wide.cut(_wide.Kind("nf4", "dot"), 1, *sizes)[:3] for sizes in best} == best
    other = {
        ("nf4", 128, 4096, 4096): (128, 64, 2), ("nf4", 256, 4096, 4096): (128, 64, 1),
        ("nf4", 128, 4096, 14336): (128, 64, 2), ("nf4", 256, 14336, 4096): (256, 128, 1),
        ("int8", 128, 4096, 4096): (128, 64, 2), ("int8", 256, 4096, 4096): (128, 128, 2),
        ("int8", 128, 14336, 4096): (128, 128, 1), ("int8", 256, 14336, 4096): (256, 128, 1),
        ("ternary", 128, 4096, 4096): (128, 64, 2), ("binary", 128, 4096, 4096): (128, 128, 3),
    }  # fmt: skip
    assert {key: _wide.cut(_wide.Kind(key[0], "axpy"), 1, *key[1:])[:3] for key in other} == other
    sizes = itertools.product(FORMATS, ("dot", "axpy"), (1, 33, 100, 1024), (8, 4096), (8, 4096))
    for fmt, form, m, outs, deep in sizes:
        kind = _wide.Kind(fmt, form)
        width, block, splits, *_ = _wide.cut(kind, 2, m, outs, deep)
        assert (width, block) in _wide.costs_of(kind)
        assert width >= min(m, 128)
        assert 1 <= splits <= max(deep // 512, 1)


def test_the_tiles_of_the_wide_kernel() -> None:
    """As in csrc/cuda/wide_launch.cuh: offsets, sums of two bfloat16 and single bits have fewer."""

    def tiles(dtype: Any = BF16, offset: Any = None, **how: Any) -> set[tuple[int, int]]:
        shape: Any = {"form": "axpy", "rows": 512, "cols": 512, "m": 100, "x_dtype": BF16, "block": None}
        made = Problem(**shape | how, out_dtype=dtype, offset=offset)
        return {tile for tile in _wide.costs_of(_wide.kind_of(made)) if tile[0] > 64}

    some = {(128, 128), (128, 256)}
    whole, nibbles = some | {(128, 64), (256, 128)}, {"fmt": "int4", "block": 64}
    assert tiles(fmt="int8") == tiles(fmt="fp8_e4m3_block", block=64) == tiles(**nibbles) == whole
    assert tiles(fmt="int8", dtype=F32) == whole
    assert tiles(fmt="ternary") == some | {(128, 64)}
    assert tiles(fmt="binary") == tiles(**nibbles, dtype=F32) == some
    assert tiles(**nibbles, offset=np.dtype(np.uint8)) == some | {(256, 128)}


@pytest.mark.usefixtures("present")
def test_lowering_of_groups() -> None:
    experts = make_case(RNG, "nf4", 64, 512, batch=(4,))
    x, sizes = jnp.ones((9, 512), jnp.bfloat16), jnp.array([2, 3, 0, 4])
    text = lowered(
        lambda x, q, s, g: qragged_dot(x, q, s, g, fmt="nf4", form="dot", cols=512),
        x, jnp.asarray(experts.codes), jnp.asarray(experts.scale), sizes,
    )  # fmt: skip
    assert text.count("@eformer_cuda_ragged") == 1


def test_a_missing_library_is_mentioned_once_and_the_tiled_path_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native._load.cache_clear()
    monkeypatch.delenv("EFORMER_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(native, "find", lambda library: None)
    with caplog.at_level(logging.WARNING, logger="eformer"):
        found = [choice(m=m) for m in (1, 2, 3)]
    native._load.cache_clear()
    assert {c.name for c in found} == {"xla"}
    assert "no native CUDA kernels" in dict(found[0].rejected)["native_cuda"]
    assert sum("no native CUDA kernels" in record.getMessage() for record in caplog.records) == 1


def test_a_library_that_is_none_is_warned_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libeformer_cuda.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("EFORMER_CUDA_LIBRARY", str(broken))
    with pytest.warns(UserWarning, match="CUDA kernels in .* cannot be used"):
        assert choice().name == "xla"


def test_an_installed_library_has_the_right_interface() -> None:
    path = native.find(cuda.LIBRARY)
    if path is not None:
        assert native._checked(cuda.LIBRARY, path) is not None


def test_the_cut_fills_the_chip() -> None:
    """Tiles and splits are within what the kernels take, and leave no multiprocessor idle where work allows."""
    assert tuning.cut("nf4", 1, 1, 14336, 4096) == (7, 1)
    for fmt in FORMATS:
        for m in (1, 8, 16, 32, 64):
            for rows, cols in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (17, 100)):
                tiles, splits = tuning.cut(fmt, 1, m, rows, cols)
                assert 1 <= tiles <= tuning.MOST_TILES
                assert 1 <= splits <= 8
                chunks = -(-m // (8 * tuning.columns_of(fmt, m)))
                blocks = -(-rows // (16 * tiles)) * splits * chunks
                if rows * splits >= 16 * 132:
                    assert blocks >= 112


@pytest.mark.usefixtures("present")
def test_one_row_of_float32_is_left_to_xla() -> None:
    for options in ({"dtype": jnp.float32}, {"out_dtype": jnp.float32}):
        found = choice(m=1, **options)
        assert found.name == "xla"
        assert "one row in float32" in dict(found.rejected)["native_cuda"]
        assert choice(m=2, **options).name == "native_cuda"


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("m", [1, 40, 2000])
def test_scanned_layers_are_handed_over_as_a_stack(m: int) -> None:
    """The codes that a kernel gets are those of all layers, and its last operand is the number of one."""
    layers = [ef.quantize(jnp.asarray(RNG.standard_normal((512, 512)), jnp.bfloat16), dtype="nf4") for _ in range(3)]
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)

    @ef.implicit
    def scanned(x: jax.Array, stack: Any) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    text = lowered(scanned, jnp.ones((m, 512), jnp.bfloat16), stack)
    (call,) = re.findall(r"custom_call @eformer_cuda_\w+\(.*", text)
    assert "tensor<3x512x8x32xui8>" in call
    assert "tensor<i32>" in call
