"""What an operation on a stored matrix is: the static parameters of a primitive, and the problem they make with sizes.

    dot form:   y = x @ D.T    x (..., M, C) -> y (..., M, R)
    axpy form:  y = x @ D      x (..., M, R) -> y (..., M, C)

`formats` has how D is stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Required, Self, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from .formats import FORMATS, Format, check_storage, one_of

FORMS = ("dot", "axpy")
PREFERENCES = ("auto", "native", "xla", "reference")
ACTIVATIONS = {"int8": 127, "fp8": 448}  # what x may be rounded to, and the code of the largest value of a row


_ALLOWED = {"preference": PREFERENCES, **dict.fromkeys(("activations", "backward"), (None, *ACTIVATIONS))}


class Options(TypedDict, total=False):
    """The keyword arguments of every product; `Parameters` has their defaults."""

    fmt: Required[str]
    form: Required[str]
    cols: Required[int]
    block: int | None
    out_dtype: Any
    precision: Any
    preference: str
    activations: str | None
    backward: str | None
    by_scale: bool


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The static parameters of a primitive. Hashable; shapes come from the operands.

    `form` is "dot" or "axpy" for products, else the name of what is done: "lookup", "encode". `activations` says what x
    is rounded to before a product, `backward` what the gradient of its result is rounded to (see `activations.py`).
    `by_scale` says that the scale may be differentiated. `offset` is the type of an operand of that name, if there is
    one: uint8 for zero points, floating for biases (see `formats`); `factored` says that there is one called factor.
    """

    fmt: str
    form: str
    cols: int
    block: int | None
    out_dtype: np.dtype
    precision: Any = None
    preference: str = "auto"
    activations: str | None = None
    backward: str | None = None
    by_scale: bool = False
    offset: np.dtype | None = None
    factored: bool = False

    @property
    def format(self) -> Format:
        return FORMATS[self.fmt]

    @property
    def extras(self) -> tuple[str, ...]:
        """The operands behind the scale that belong to it."""
        return ("factor",) if self.factored else () if self.offset is None else ("offset",)

    def apart(self, numbers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The operands from the scale on: the scale and its extras, and the scale of x, as far as they exist."""
        count = 1 + len(self.extras)
        return list(numbers[:count]), list(numbers[count:])

    def common(self) -> dict[str, Any]:
        """The fields that parameters and problems have in common."""
        return {name: getattr(self, name) for name in _COMMON}

    def linear(self) -> Parameters:
        """The product that is the derivative of this one: straight through the rounding of x."""
        return self if self.activations is None else dataclasses.replace(self, activations=None)

    def without_offset(self, dtype: Any) -> Self:
        """The same with symmetric codes, and a result of another dtype."""
        return dataclasses.replace(self, offset=None, out_dtype=np.dtype(dtype))

    def transposed(self, dtype: Any) -> Parameters:
        """The product that is the gradient of this one with respect to x."""
        form = "axpy" if self.form == "dot" else "dot"
        return dataclasses.replace(self, form=form, out_dtype=np.dtype(dtype), activations=self.backward, backward=None)


_F32 = np.dtype(np.float32)
_COMMON = tuple(field.name for field in dataclasses.fields(Parameters))


@dataclasses.dataclass(frozen=True)
class Problem(Parameters):
    """One operation with its sizes: all that choosing an implementation may depend on.

    `m` is the number of rows of x, or of rows looked up.
    """

    platform: str = "cpu"
    batch: tuple[int, ...] = ()
    m: int = 1
    rows: int = 1
    x_dtype: np.dtype = _F32
    scale_shape: tuple[int, ...] | None = None
    scale_dtype: np.dtype | None = None

    def __str__(self) -> str:
        stack = "".join(f"{n} × " for n in self.batch)
        x = self.x_dtype if self.activations is None else f"{self.x_dtype} rounded to {self.activations}"
        return f"{self.m} rows of {x} with {self.fmt} {stack}{self.rows} × {self.cols}, {self.form}"

    @property
    def parameters(self) -> Parameters:
        return Parameters(**self.common())

    @property
    def compute_dtype(self) -> np.dtype:
        """What a product accumulates in: float32, or float64 when either end is."""
        wide = np.dtype(np.float64)
        return wide if wide in (self.x_dtype, self.out_dtype) else np.dtype(np.float32)

    @property
    def outs(self) -> int:
        """Results of one row of x."""
        return self.rows if self.form == "dot" else self.cols

    @property
    def deep(self) -> int:
        """How many products are summed up for each."""
        return self.cols if self.form == "dot" else self.rows

    @property
    def is_empty(self) -> bool:
        return 0 in (*self.batch, self.m, self.rows, self.cols)

    @property
    def stores_scale(self) -> bool:
        """Is the scale something else than an array of numbers to multiply with: bytes, or with a factor?"""
        return self.factored or (self.scale_dtype is not None and self.scale_dtype.itemsize == 1)

    def with_float_scale(self) -> Problem:
        """The same with the scale that `formats.float_scale` makes."""
        return self.replace(scale_dtype=_F32, factored=False)

    @property
    def scaled_both_ways(self) -> bool:
        """Is there a factor for every value? One for rows or for columns can be kept out of the decoded matrix."""
        return not self.format.blocked and self.scale_shape is not None and 1 not in self.scale_shape

    @property
    def scales_results_only(self) -> bool:
        """Is a factor common to all that is summed up, so that codes are multiplied and the sum is scaled?"""
        contracted = 1 if self.form == "dot" else 0
        return not self.format.blocked and (self.scale_shape is None or self.scale_shape[contracted] == 1)

    def has_at_most(self, rows: int) -> bool:
        """Has x so few rows? Not where their number is a symbol, in a program exported for any of them."""
        return isinstance(self.m, int) and self.m <= rows

    def symmetric(self) -> Problem:
        """The problem without its offset, in the dtype in which what that adds is added."""
        return self.without_offset(self.compute_dtype)

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


def problem_of(parameters: Parameters, platform: str, x: Any, codes: Any, scale: Any = None, *rest: Any) -> Problem:
    """The product of these operands (arrays or types)."""
    del rest  # an offset has the shape of the scale, a factor one number
    batch = parameters.format.batch_of(codes)
    return Problem(
        **parameters.common(),
        platform=platform,
        batch=batch,
        m=x.shape[-2] if batch else math.prod(x.shape[:-1]),
        rows=codes.shape[len(batch)],
        x_dtype=np.dtype(x.dtype),
        scale_shape=None if scale is None else tuple(scale.shape[len(batch) :]),
        scale_dtype=None if scale is None else np.dtype(scale.dtype),
    )


def as_operands(*operands: Any) -> list[Any]:
    """Arrays; None stays None."""
    return [o if o is None or isinstance(o, jax.Array) else jnp.asarray(o) for o in operands]


def parameters_of(
    x: Any, codes: Any, scale: Any, offset: Any = None, factor: Any = None,
    *, fmt: str, form: str, cols: int, block: int | None = None, **options: Any,
) -> Parameters:  # fmt: skip
    """Check the options of a product against the storage. The result has the dtype of x unless `out_dtype` is given."""
    one_of("fmt", fmt, FORMATS)
    one_of("form", form, FORMS)
    for name, allowed in _ALLOWED.items():
        one_of(name, options.get(name, allowed[0]), allowed)
    block = check_storage(fmt, codes, scale, cols, block, offset, factor)
    out = options.pop("out_dtype", None)
    if isinstance(options.get("precision"), list):
        options["precision"] = tuple(options["precision"])
    kind = None if offset is None else np.dtype(offset.dtype)
    how = {**options, "offset": kind, "factored": factor is not None}
    return Parameters(fmt, form, cols, block, np.dtype(result_dtype(x) if out is None else out), **how)


def result_dtype(x: Any) -> Any:
    """That of x, unless x has integers."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(x.dtype, jnp.float32)


def product_problem(
    x: Any, codes: Any, scale: Any, platform: str, *, offset: Any = None, factor: Any = None, **options: Any
) -> Problem:
    """The problem that `qmatmul` makes of these arguments on a platform."""
    return problem_of(parameters_of(x, codes, scale, offset, factor, **options), platform, x, codes, scale)


def out_shape(parameters: Parameters, x: Any, codes: Any) -> tuple[int, ...]:
    batch = codes.ndim - parameters.format.core_ndim
    return (*x.shape[:-1], codes.shape[batch] if parameters.form == "dot" else parameters.cols)


def check_x(parameters: Parameters, x: Any, codes: Any) -> None:
    if not (jnp.issubdtype(x.dtype, jnp.inexact) or jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
        raise TypeError(f"x must be numeric, got {x.dtype}.")
    if parameters.activations is not None and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is {x.dtype}, and activations={parameters.activations!r} rounds rows of floating values; convert x "
            "with astype, or multiply with a weight that was quantized without `activations`."
        )
    batch = parameters.format.batch_of(codes)
    rows = codes.shape[len(batch)]
    want = parameters.cols if parameters.form == "dot" else rows
    if x.ndim < 1 or x.shape[-1] != want:
        raise ValueError(
            f"x of shape {list(x.shape)} does not contract with D of {rows} rows and {parameters.cols} columns: in the "
            f"{parameters.form} form its last axis must be {want}."
        )
    if batch and (x.ndim != len(batch) + 2 or tuple(x.shape[:-2]) != batch):
        raise ValueError(
            f"the codes have batch axes {batch}, so x must be {(*batch, 'M', want)}, got {list(x.shape)}; "
            "use vmap to map over one of them only."
        )
