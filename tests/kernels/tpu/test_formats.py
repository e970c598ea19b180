"""Every format of the table, in small and large blocks, with offsets and scales of bytes."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from eformer._kernels import tpu
from eformer._kernels.formats import FORMATS as TABLE
from eformer._kernels.tpu import _decode

from ..cases import (
    FORMATS,
    FORMS,
    INTEGERS,
    MORE,
    NIBBLES,
    OFFSETS,
    Case,
    make_case,
    relative_error,
    with_byte_scales,
    with_offset,
)
from .calls import LIMIT, check, interpreted, problem, random_x

pytestmark = pytest.mark.usefixtures("small_blocks")
TAKEN = [fmt for fmt in MORE if fmt in tpu.TAKES]
USUAL = {("int4", "dot"), ("fp8_e4m3_block", "axpy"), ("fp8_e5m2", "dot"), ("int8_block", "axpy")}
EVERY = [
    pytest.param(fmt, form, marks=() if (fmt, form) in USUAL else pytest.mark.thorough)
    for fmt in TAKEN
    for form in FORMS
]


@pytest.mark.parametrize(("fmt", "form"), EVERY)
def test_products(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Ragged along every axis; less than a register of words, blocks of many registers."""
    calls = []
    for rows, cols, m, block, dtype in ((136, 600, 3, 32, np.float32), (40, 70, 1, 256, jnp.bfloat16)):
        case = make_case(rng, fmt, rows, cols, block=block)
        calls.append((case, form, random_x(rng, case, form, m, dtype)))
    check(calls)


@pytest.mark.thorough
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("fmt", [fmt for fmt in ("nf4", *TAKEN) if TABLE[fmt].blocked])
def test_block_sizes(fmt: str, block: int, rng: np.random.Generator) -> None:
    calls = []
    for form, cols in (("dot", 330), ("axpy", 1040)):
        case = make_case(rng, fmt, 40, cols, block=block)
        calls.append((case, form, random_x(rng, case, form, 2)))
    check(calls)


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, marks=() if fmt == "int4" else pytest.mark.thorough) for fmt in INTEGERS if fmt in TAKEN]
)
def test_offsets(fmt: str, kind: str, rng: np.random.Generator) -> None:
    """Less than a register of words in a block, and more; several matrices."""
    calls = []
    for form, block, batch in (("dot", 32, ()), ("axpy", 128, (2,))):
        case = with_offset(rng, make_case(rng, fmt, 130, 200, block=block, batch=batch), kind)
        calls.append((case, form, random_x(rng, case, form, 3)))
    check(calls)


@pytest.mark.parametrize(
    ("fmt", "kind", "block"),
    [
        ("fp4", "e8m0", 32),
        pytest.param("fp4", "e4m3", 16, marks=pytest.mark.thorough),
        pytest.param("fp8_e5m2_block", "e8m0", 32, marks=pytest.mark.thorough),
    ],
)
def test_scales_of_bytes(fmt: str, kind: str, block: int, rng: np.random.Generator) -> None:
    case = with_byte_scales(rng, make_case(rng, fmt, 130, 200, block=block), kind)
    x = random_x(rng, case, "dot", 2)
    calls = [(case, "dot", x), (case, "axpy", random_x(rng, case, "axpy", 2))]
    check(calls)
    if kind == "e8m0":  # a scale that is NaN concerns its row, and its block of columns
        case.scale[7, 3] = 255
        dot, axpy = interpreted(calls)
        np.testing.assert_array_equal(np.isnan(dot).any(0), np.arange(130) == 7)
        np.testing.assert_array_equal(np.isnan(axpy).any(0), np.arange(200) // 32 == 3)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3_block", "fp8_e5m2_block"])
def test_every_bit_pattern_of_fp8(fmt: str) -> None:
    """The bits of what `ml_dtypes` says, those of NaNs aside, wherever in a word a byte is."""
    every, row = np.arange(256, dtype=np.uint8), TABLE[fmt]
    if row.blocked:
        bytes_of = np.tile(every[:, None], (4, 128))  # byte i of 4 n, in all lanes
        words = np.ascontiguousarray(bytes_of.reshape(-1, 4, 128).transpose(0, 2, 1)).view(np.int32)[..., 0]
        ones = jnp.ones((words.shape[0] // 8, 128), jnp.float32)
        planes = list(_decode.word_planes(row, jnp.asarray(words), ones, permute=True))
        found = np.stack([np.asarray(plane)[:64, 0] for plane in planes], axis=-1).reshape(-1)
    else:
        (plane,) = _decode.byte_planes(row, jnp.asarray(every[None].view(np.int8), jnp.int32))
        found = np.asarray(plane)[0]
    wanted = every.view(row.bits_of).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(found.view(np.int32)[known], wanted.view(np.int32)[known])


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, marks=() if fmt == "iq4_nl" else pytest.mark.thorough) for fmt in ("nf4", *NIBBLES)]
)
def test_chips_with_permutes_and_without(fmt: str, permute: bool, rng: np.random.Generator) -> None:
    calls = []
    for form, block in (("dot", 32), ("axpy", 64)):
        case = make_case(rng, fmt, 40, 192, block=block)
        calls.append((case, form, random_x(rng, case, form, 2)))
    check(calls, permute=permute)


@pytest.mark.parametrize(
    ("fmt", "form", "kind"),
    [("int4", "dot", "zero"), pytest.param("fp8_e4m3_block", "axpy", None, marks=pytest.mark.thorough)],
)
def test_groups(fmt: str, form: str, kind: str | None, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 136, 200, batch=(3,), block=32)
    case = case if kind is None else with_offset(rng, case, kind)
    x = jnp.asarray(rng.standard_normal((20, 200 if form == "dot" else 136)), jnp.float32)
    static = problem(case, form, x)
    named = {} if kind is None else {"offset": case.offset}
    y = jax.jit(lambda *o, **named: tpu.qragged(static, *o, **named, interpret=True))(
        x, case.codes, jnp.array([3, 0, 15]), case.scale, **named
    )
    matrices = case.dense.swapaxes(-1, -2) if form == "dot" else case.dense
    wide = np.asarray(x, np.float64)
    wanted = np.concatenate([wide[:3] @ matrices[0], wide[3:18] @ matrices[2], 0 * wide[18:] @ matrices[0]])
    assert relative_error(y, wanted) < LIMIT


@pytest.mark.parametrize(
    "fmt", [pytest.param(f, marks=() if f in ("nf4", "int3", "int8") else pytest.mark.thorough) for f in TABLE]
)
def test_lookups(fmt: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several steps, fewer rows than a tile; every row is what is stored, NaN and infinity included."""
    monkeypatch.setattr("eformer._kernels.tpu._lookup.MOST", 128)
    for rows, cols, block in ((300, 200, 32), (20, 700, 64)):
        plain = make_case(rng, fmt, rows, cols, block=block)
        cases = [plain]
        if fmt in INTEGERS:
            cases += [with_offset(rng, plain, kind) for kind in OFFSETS]
        if fmt == "fp4":
            cases += [with_byte_scales(rng, plain, kind) for kind in ("e8m0", "e4m3")]
        if TABLE[fmt].bits_of is not None:
            codes = rng.integers(0, 256, plain.codes.shape).astype(np.uint8)  # NaN elsewhere stays there
            codes[[0, rows - 1]] = plain.codes[[0, rows - 1]]
            cases = [Case(fmt, cols, codes, plain.scale, plain.dense)]
        indices = np.array([rows - 1, 0, rows - 1])
        for case in cases:
            table = SimpleNamespace(fmt=fmt, cols=cols, rows=rows, out_dtype=np.dtype(np.float32))
            named = {n: v for n in ("offset", "factor") if (v := getattr(case, n)) is not None}
            lookup = jax.jit(
                lambda codes, i, scale, t=table, **named: tpu.qgather(
                    t, codes, i, scale, **named, interpret=pltpu.InterpretParams(uninitialized_memory="nan")
                )
            )
            found = lookup(case.codes, indices, case.scale, **named)
            assert relative_error(found, case.dense[indices]) < 2e-7


def test_what_is_refused() -> None:
    rng = np.random.default_rng(0)

    def refusal(fmt: str, block: int) -> str | None:
        case = make_case(rng, fmt, 16, 96, block=block)
        return tpu.refuses_operands(problem(case, "dot", jax.ShapeDtypeStruct((2, 96), np.float32)))

    assert set(TABLE) - set(tpu.TAKES) == {"int3", "int5", "int6"}
    assert refusal("int3", 64) == "it has no kernels for int3"
    assert refusal("nf4", 48) == "blocks of 48 values; of nf4 it takes 8, 16, 32 and multiples of 64"
    assert refusal("int8_block", 48) == "blocks of 48 values; of int8_block it takes 4, 8, 16 and multiples of 32"
    assert [refusal(fmt, block) for fmt in ("int4", "int2", "fp8_e4m3_block") for block in (16, 32, 64)] == [None] * 9
    assert set(FORMATS) <= set(tpu.TAKES)
