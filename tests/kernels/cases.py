"""Random packed matrices for the tests of the compute layer, encoded by numpy alone.

Each case knows its dense matrix in float64, so that nothing is compared with code under test.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import ml_dtypes
import numpy as np

from eformer._kernels import qmatmul
from eformer._kernels.parameters import Problem, product_problem

FORMATS = ("nf4", "int8", "ternary", "binary")
NIBBLES = ("int4", "iq4_nl", "fp4")
BITS = ("int2", "int3", "int5", "int6")
BLOCKED = (*NIBBLES, *BITS, "int8_block", "fp8_e4m3_block", "fp8_e5m2_block")
MORE = (*BLOCKED, "fp8_e4m3", "fp8_e5m2")
INTEGERS = (*BITS, "int4", "int8_block")  # formats with offsets
OFFSETS = ("zero", "bias")
FORMS = ("dot", "axpy")
SCALES = {"nf4": ("block",), "int8": ("row", "column", "full", "one")}
SCALES |= {**dict.fromkeys(BLOCKED, ("block",)), "fp8_e4m3": ("row", "full"), "fp8_e5m2": ("row", "column")}
SCALES |= dict.fromkeys(("ternary", "binary"), ("row", "column", "full", "one", "none"))

_NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
_IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _values_of_codes(fmt: str) -> np.ndarray:
    """What every code stands for, in float64, by the definition of the format."""
    if fmt.startswith("fp8"):
        kind = ml_dtypes.float8_e4m3fn if "e4m3" in fmt else ml_dtypes.float8_e5m2
        return np.arange(256, dtype=np.uint8).view(kind).astype(np.float64)
    if fmt.startswith("int"):
        bits = int(fmt.removeprefix("int").removesuffix("_block"))
        return np.arange(2**bits) - 2.0 ** (bits - 1)
    return np.array({"nf4": _NF4, "iq4_nl": _IQ4_NL, "fp4": _FP4}[fmt], np.float64)


@dataclasses.dataclass(frozen=True)
class Case:
    """A packed matrix (or a batch of them), and what it stands for."""

    fmt: str
    cols: int
    codes: np.ndarray
    scale: Any
    dense: np.ndarray  # float64, (batch..., rows, cols)
    offset: Any = None
    factor: Any = None

    def product(self, x: Any, form: str = "dot", *, codes: Any = None, scale: Any = None, **options: Any) -> Any:
        codes = self.codes if codes is None else codes
        scale = self.scale if scale is None else scale
        options.setdefault("offset", self.offset)
        options.setdefault("factor", self.factor)
        return qmatmul(x, codes, scale, fmt=self.fmt, form=form, cols=self.cols, **options)

    def problem(self, m: int, form: str) -> Problem:
        x = jax.ShapeDtypeStruct((m, self.dense.shape[-1 if form == "dot" else -2]), np.float32)
        return product_problem(x, self.codes, self.scale, "cpu", fmt=self.fmt, form=form, cols=self.cols)

    def expected(self, x: Any, form: str = "dot") -> np.ndarray:
        wide = np.asarray(x, np.float64)
        return wide @ (self.dense.swapaxes(-1, -2) if form == "dot" else self.dense)


def make_case(
    rng: np.random.Generator,
    fmt: str,
    rows: int,
    cols: int,
    *,
    block: int = 64,
    scale: str | None = None,
    batch: tuple[int, ...] = (),
    scale_dtype: Any = np.float32,
) -> Case:
    if fmt == "nf4" or fmt in BLOCKED:
        return _in_blocks(rng, fmt, rows, cols, block, batch, scale_dtype)
    if fmt == "int8":
        codes = rng.integers(-127, 128, (*batch, rows, cols)).astype(np.int8)
        values = codes.astype(np.float64)
    elif fmt.startswith("fp8"):
        known = _values_of_codes(fmt)
        codes = rng.choice(np.flatnonzero(np.isfinite(known)), (*batch, rows, cols)).astype(np.uint8)
        values = known[codes]
    else:
        codes, values = _packed(rng, fmt, rows, cols, batch)
    factors = _scale(rng, scale or "row", rows, cols, batch, scale_dtype)
    dense = values if factors is None else values * factors.astype(np.float64)
    return Case(fmt, cols, codes, factors, dense)


def _in_blocks(
    rng: np.random.Generator, fmt: str, rows: int, cols: int, block: int, batch: tuple[int, ...], dtype: Any
) -> Case:
    blocks, known = math.ceil(cols / block), _values_of_codes(fmt)
    numbers = rng.choice(np.flatnonzero(np.isfinite(known)), (*batch, rows, blocks * block))
    numbers[..., cols:] = np.nanargmin(np.abs(known))  # padding decodes to zero
    absmax = rng.uniform(0.5, 2.0, (*batch, rows, blocks)).astype(dtype)
    dense = (known[numbers] * np.repeat(absmax.astype(np.float64), block, axis=-1))[..., :cols]
    bits = len(known).bit_length() - 1
    if fmt == "int8_block":
        codes = (numbers - 128).astype(np.int8)
    else:
        each = np.unpackbits(numbers.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
        codes = np.packbits(each.reshape(*numbers.shape[:-1], bits * numbers.shape[-1]), axis=-1)
    return Case(fmt, cols, codes.reshape(*batch, rows, blocks, block * bits // 8), absmax, dense)


def _packed(rng: np.random.Generator, fmt: str, rows: int, cols: int, batch: tuple[int, ...]) -> tuple[Any, Any]:
    count, bits = (4, 2) if fmt == "ternary" else (8, 1)
    groups = math.ceil(cols / count)
    raw = rng.integers(0, 3 if fmt == "ternary" else 2, (*batch, rows, groups, count))
    codes = (raw << (np.arange(count - 1, -1, -1) * bits)).sum(-1).astype(np.uint8)
    values = raw.reshape(*batch, rows, groups * count)[..., :cols].astype(np.float64)
    return codes, values - 1 if fmt == "ternary" else 2 * values - 1


def _scale(rng: np.random.Generator, kind: str, rows: int, cols: int, batch: tuple[int, ...], dtype: Any) -> Any:
    if kind == "none":
        return None
    shape = {"row": (rows, 1), "column": (1, cols), "full": (rows, cols), "one": (1, 1)}[kind]
    return rng.uniform(0.5, 2.0, (*batch, *shape)).astype(dtype)


def with_offset(rng: np.random.Generator, case: Case, kind: str, dtype: Any = np.float32) -> Case:
    """The same codes and scales with zero points (bytes) or biases: (code - zero) * scale, or code * scale + bias."""
    codes = len(_values_of_codes(case.fmt))
    block = math.prod(case.codes.shape[-2:]) * 8 // (codes.bit_length() - 1) // case.scale.shape[-1]
    scale = case.scale.astype(np.float64)
    if kind == "zero":
        offset = rng.integers(0, codes, scale.shape).astype(np.uint8)
        more = (codes // 2 - offset.astype(np.float64)) * scale
    else:
        offset = (rng.standard_normal(scale.shape) * codes / 4).astype(dtype)
        more = codes // 2 * scale + offset.astype(np.float64)
    dense = case.dense + np.repeat(more, block, axis=-1)[..., : case.cols]
    return dataclasses.replace(case, offset=offset, dense=dense)


def with_byte_scales(rng: np.random.Generator, case: Case, kind: str) -> Case:
    """The same codes with scales of bytes, "e8m0" or "e4m3", the latter with a factor for each matrix."""
    batch, blocks = case.codes.shape[:-3], case.scale.shape[-1]
    values = case.dense / _in_columns(case, case.scale.astype(np.float64), blocks)
    factor = None
    if kind == "e8m0":
        scale = rng.integers(117, 138, case.scale.shape).astype(np.uint8)
        numbers = 2.0 ** (scale.astype(np.float64) - 127)
    else:
        scale = rng.integers(0, 127, case.scale.shape).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        factor = rng.uniform(0.5, 2.0, (*batch, 1, 1)).astype(np.float32)
        numbers = (scale.astype(np.float32) * factor).astype(np.float64)
    return dataclasses.replace(case, scale=scale, factor=factor, dense=values * _in_columns(case, numbers, blocks))


def _in_columns(case: Case, numbers: np.ndarray, blocks: int) -> np.ndarray:
    """One number for every column, given those of blocks."""
    bits = 8 if case.fmt.endswith("_block") else int(case.fmt[3]) if case.fmt.startswith("int") else 4
    block = math.prod(case.codes.shape[-2:]) * 8 // bits // blocks
    return np.repeat(numbers, block, axis=-1)[..., : case.cols]


def relative_error(found: Any, expected: Any) -> float:
    """Largest deviation, relative to the largest expected value."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    if expected.size == 0:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    return float(np.abs(found.astype(wide) - expected).max() / max(np.abs(expected).max(), 1e-30))
