"""What a quantized matrix product is: the static description every layer of the kernels shares.

D is the decoded matrix of R rows and C columns, stored row by row with the blocked (packed) axis last.

    dot form:   y = x @ D.T    x (..., M, C) -> y (..., M, R)
    axpy form:  y = x @ D      x (..., M, R) -> y (..., M, C)

Storage of D, any number of leading batch axes in front of every array:

    nf4       codes uint8 (R, ceil(C/block), block/2), first element in the high nibble; scale (R, ceil(C/block))
    int8      codes int8  (R, C);                       scale (R or 1, C or 1)
    ternary   codes uint8 (R, ceil(C/4)), two bits each, value = code - 1, first element in the high bits; scale or None
    binary    codes uint8 (R, ceil(C/8)), one bit each, 1 is +1, 0 is -1, first element in the high bit; scale or None
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

Form = Literal["dot", "axpy"]
FORMATS = ("nf4", "int8", "ternary", "binary")
FORMS = ("dot", "axpy")
PREFERENCES = ("auto", "native", "xla", "reference")
# Values packed into one stored element.
PER_CODE = {"nf4": 2, "int8": 1, "ternary": 4, "binary": 8}


class Options(TypedDict, total=False):
    """The keyword arguments of every product; `spec_of` has their defaults."""

    fmt: Required[str]
    form: Required[str]
    cols: Required[int]
    block: int | None
    out_dtype: Any
    precision: Any
    preference: str


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static parameters of the primitive. Hashable; shapes come from the operands."""

    fmt: str
    form: str
    cols: int
    block: int | None
    out_dtype: np.dtype
    precision: Any
    preference: str

    @property
    def transposed(self) -> str:
        """The form whose product is the gradient of this one with respect to x."""
        return "axpy" if self.form == "dot" else "dot"

    @property
    def core_ndim(self) -> int:
        """Axes of `codes` that are not batch axes."""
        return core_ndim(self.fmt)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product with its sizes: all that choosing an implementation may depend on."""

    spec: Spec
    platform: str
    batch: tuple[int, ...]
    m: int
    rows: int
    x_dtype: np.dtype
    scale_shape: tuple[int, ...] | None
    scale_dtype: np.dtype | None

    @property
    def cols(self) -> int:
        return self.spec.cols

    @property
    def preference(self) -> str:
        return self.spec.preference

    @property
    def fmt(self) -> str:
        return self.spec.fmt

    @property
    def compute_dtype(self) -> np.dtype:
        """What the product accumulates in: float32, or float64 when either end is."""
        wide = np.dtype(np.float64)
        return wide if wide in (self.x_dtype, self.spec.out_dtype) else np.dtype(np.float32)

    def has_at_most(self, rows: int) -> bool:
        """Has x so few rows? Not where their number is a symbol, in a program exported for any of them."""
        return isinstance(self.m, int) and self.m <= rows

    def single(self) -> Problem:
        """The same problem without its batch axes."""
        return dataclasses.replace(self, batch=())

    def with_out_dtype(self, dtype: Any) -> Problem:
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, out_dtype=np.dtype(dtype)))


def problem_of(spec: Spec, platform: str, x: Any, codes: Any, scale: Any) -> Problem:
    """Join static parameters and operands (arrays or avals)."""
    batch = tuple(codes.shape[: codes.ndim - spec.core_ndim])
    return Problem(
        spec=spec,
        platform=platform,
        batch=batch,
        m=x.shape[-2] if batch else math.prod(x.shape[:-1]),
        rows=codes.shape[len(batch)],
        x_dtype=np.dtype(x.dtype),
        scale_shape=None if scale is None else tuple(scale.shape[len(batch) :]),
        scale_dtype=None if scale is None else np.dtype(scale.dtype),
    )


def as_operands(x: Any, codes: Any, scale: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    return jnp.asarray(x), jnp.asarray(codes), None if scale is None else jnp.asarray(scale)


def spec_of(
    x: Any,
    codes: Any,
    scale: Any,
    *,
    fmt: str,
    form: str,
    cols: int,
    block: int | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    preference: str = "auto",
) -> Spec:
    """Check the options of a product against the storage. The result has the dtype of x unless `out_dtype` is given."""
    check_names(fmt, form, preference)
    block = check_storage(fmt, codes, scale, cols, block)
    if out_dtype is None:
        out_dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(x.dtype, jnp.float32)
    precision = tuple(precision) if isinstance(precision, list) else precision
    return Spec(fmt, form, cols, block, np.dtype(out_dtype), precision, preference)


def core_ndim(fmt: str) -> int:
    return 3 if fmt == "nf4" else 2


def out_shape(spec: Spec, x: Any, codes: Any) -> tuple[int, ...]:
    batch = codes.ndim - spec.core_ndim
    return (*x.shape[:-1], codes.shape[batch] if spec.form == "dot" else spec.cols)


def padded_cols(spec: Spec, codes: Any) -> int:
    """Columns the storage holds, padding included."""
    return codes.shape[-1] * PER_CODE[spec.fmt] * (codes.shape[-2] if spec.fmt == "nf4" else 1)


def check_names(fmt: str, form: str, preference: str) -> None:
    for what, value, allowed in (("fmt", fmt, FORMATS), ("form", form, FORMS), ("preference", preference, PREFERENCES)):
        if value not in allowed:
            raise ValueError(f"{what}={value!r} is unknown; allowed values are {', '.join(map(repr, allowed))}.")


def check_storage(fmt: str, codes: Any, scale: Any, cols: int, block: int | None) -> int | None:
    """Check codes and scale against the layout of the format; return the block size."""
    dtype = np.dtype(np.int8 if fmt == "int8" else np.uint8)
    core = core_ndim(fmt)
    if codes.dtype != dtype or codes.ndim < core:
        raise ValueError(
            f"{fmt} codes must be {dtype} of rank {core} or more, got {codes.dtype}{list(codes.shape)}; "
            f"use the encoder of the format."
        )
    if not (isinstance(cols, int) and cols >= 0):
        raise ValueError(f"cols must be a non-negative integer (the true number of columns), got {cols=!r}.")
    if fmt == "nf4":
        return _check_nf4(codes, scale, cols, block)
    if block is not None:
        raise ValueError(f"block={block} was given for {fmt}, which has no blocks; leave block out.")
    stored = math.ceil(cols / PER_CODE[fmt])
    if codes.shape[-1] != stored:
        raise ValueError(f"{fmt} codes of {cols} columns end in an axis of {stored}, got {list(codes.shape)}.")
    if scale is None and fmt == "int8":
        raise ValueError("int8 needs a scale of shape (rows or 1, cols or 1), got None.")
    if scale is not None:
        _check_scale(fmt, scale, codes.shape[:-2], (codes.shape[-2], cols))
    return None


def _check_nf4(codes: Any, scale: Any, cols: int, block: int | None) -> int:
    found = 2 * codes.shape[-1]
    if found == 0 or (block is not None and block != found):
        raise ValueError(f"nf4 codes {list(codes.shape)} hold blocks of {found} values, but {block=}.")
    blocks = math.ceil(cols / found)
    if codes.shape[-2] != blocks:
        raise ValueError(
            f"nf4 codes of {cols} columns in blocks of {found} need {blocks} blocks, got {codes.shape[-2]}."
        )
    if scale is None or tuple(scale.shape[-2:]) != tuple(codes.shape[-3:-1]) or scale.ndim < 2:
        got = None if scale is None else list(scale.shape)
        raise ValueError(f"nf4 needs one absmax per block, shape {list(codes.shape[:-1])}, got {got}.")
    _check_scale("nf4", scale, codes.shape[:-3], codes.shape[-3:-1])
    return found


def _check_scale(fmt: str, scale: Any, batch: tuple[int, ...], full: tuple[int, ...]) -> None:
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"the scale of {fmt} must be floating, got {scale.dtype}; convert it with astype.")
    core = tuple(scale.shape[-2:])
    fits = len(core) == 2 and all(s in (1, f) for s, f in zip(core, full, strict=True))
    if not fits or tuple(scale.shape[:-2]) not in ((), tuple(batch)):
        raise ValueError(
            f"the scale of {fmt} has shape {list(scale.shape)}; allowed are (rows or 1, cols or 1) with rows, cols = "
            f"{full}, behind the batch axes {tuple(batch)} of the codes or none."
        )


def check_x(spec: Spec, x: Any, codes: Any) -> None:
    """Check that x contracts with the decoded matrix."""
    if not (jnp.issubdtype(x.dtype, jnp.inexact) or jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
        raise TypeError(f"x must be numeric, got {x.dtype}.")
    batch = codes.shape[: codes.ndim - spec.core_ndim]
    rows = codes.shape[len(batch)]
    want = spec.cols if spec.form == "dot" else rows
    if x.ndim < 1 or x.shape[-1] != want:
        raise ValueError(
            f"x of shape {list(x.shape)} does not contract with D of {rows} rows and {spec.cols} columns: in the "
            f"{spec.form} form its last axis must be {want}."
        )
    if batch and (x.ndim != len(batch) + 2 or tuple(x.shape[:-2]) != tuple(batch)):
        raise ValueError(
            f"the codes have batch axes {tuple(batch)}, so x must be {(*batch, 'M', want)}, got {list(x.shape)}; "
            "use vmap to map over one of them only."
        )
