"""What all quantized arrays share: immutability, a logical dtype, sharding, and moving storage instead of values.

The storage of every format is a few *parts*. A part keeps the free (not blocked) logical axes in front, in order, and
the blocked axis, if the format has one, as `tail` axes at the end. A free axis of a part has the logical size, or size
1 where one entry serves the whole axis (a scale). That is all the shape operations need to know.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from eformer._core import ImplicitArray
from eformer._core.fields import layout
from eformer._kernels.formats import FORMATS

from . import arguments as _arguments
from . import sharding as _sharding
from . import turned
from .blocks import common, wide
from .gradients import FactoredScale, frozen, refusal

P = TypeVar("P", bound="Packed")
Q = TypeVar("Q", bound="QuantizedArray")
Sharding = NamedSharding | PartitionSpec | None


def same_scales(*arrays: Any) -> bool:
    """Do these arrays, all of which have scales, store them in one way? Shapes of arrays will do."""
    fields = [(getattr(a, a.scale_part.field).dtype, [getattr(a, p.field) is None for p in a.parts]) for a in arrays]
    return all(dtype == fields[0][0] and sum(absent) == sum(fields[0][1]) for dtype, absent in fields)


def _numbers(q: Any) -> list[Any]:
    """How everything beside the codes is stored; of shapes, too, as those that a program is traced with."""
    return [[(a.shape, a.dtype) for a in jax.tree.leaves(getattr(q, part.field))] for part in q.parts[1:]]


def only_signs(factor: Any) -> bool:
    return isinstance(factor, np.ndarray) and bool(np.all(np.abs(factor) == 1))


def times(numbers: jax.Array, factor: Any) -> jax.Array:
    dtype = numbers.dtype if only_signs(factor) else common(numbers.dtype, factor.dtype)
    return numbers.astype(dtype) * factor.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Part:
    """One stored array: its field, how many trailing axes hold the blocked axis, and how many values one step holds."""

    field: str
    tail: int = 0
    unit: int = 1
    is_scale: bool = False


class Packed(ImplicitArray, frozen=True):
    """What quantized arrays and those around them answer alike. They have a `format`, a `sharding`, `with_sharding`."""

    sharding: Any = None

    def dequantize(self) -> jax.Array:
        """The dense array; another name for `materialize`."""
        return self.materialize()

    @property
    def bits_per_weight(self) -> float:
        """Bits held per logical value, scales and padding included."""
        return 8 * self.nbytes / max(self.size, 1)

    def _storage(self) -> str:
        return f"{self.format}, {self.bits_per_weight:.2f} bits per weight"  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def is_sharded(self) -> bool:
        """Does this array carry a sharding?"""
        return self.sharding is not None

    def with_sharding(self: P, sharding: Any) -> P:
        raise NotImplementedError

    def reshard(self: P, sharding: Sharding) -> P:
        """Another name for `with_sharding`."""
        return self.with_sharding(sharding)


class QuantizedArray(Packed, frozen=True):
    """Base of the quantized arrays: storage in parts, a logical dtype that is lazy, and a sharding to keep.

    A format is a dataclass derived from this. It gives `format`, its name, `parts`, the codes first, and `materialize`,
    which decodes with `frozen_scale()` and returns the values in the dtype `self.dtype`. It has these static fields
    (`aux_field`): `axis`, the axis along which values are packed, counted from the end; `pad`, how many values at the
    end of it exist in storage only; and `sharding`. A format that packs nothing has `blocked: ClassVar[None] = None`
    instead of the first two.

    In return it gets shape operations, slices, factors, lookups and products that leave the codes as they are,
    gradients with respect to the other operand, sharding, files (`serialization.register_type`) and reports.
    """

    # The class has no fields of its own: dataclass fields of a base would come before the documented ones.
    format: ClassVar[str]
    parts: ClassVar[tuple[Part, ...]]
    pad: int = 0
    sharding: Any = None
    use_kernel: bool = True
    kernel_block: int | None = None
    kernel_offset: Any = None  # zero points (uint8) or biases of integers in blocks, laid out as the scale
    kernel_factor: Any = None  # what multiplies all scales of a matrix, where kernels get these as they are stored
    kernel_offset_is_exact: bool = True  # or are values decoded with it rounded otherwise than by `materialize`?
    # Does every block bring its own scale, so that blocks of different arrays may follow each other?
    blocks_carry_scales: ClassVar[bool] = False
    compiles_products: ClassVar[bool] = True
    nan_scale: float = float("nan")
    _remembers: ClassVar[Any] = (False, True)

    @property
    def knows_more(self) -> bool:
        return turned.before(self) is not None

    @property
    def kernel_format(self) -> str | None:
        """The row of the table of kernel formats that codes and scale follow; None for a format that is not there."""
        return self.format if self.format in FORMATS else None

    @property
    def blocked(self) -> Any:
        """The logical axis, counted from the end, along which values are packed; None if the format packs none."""
        if hasattr(self, "axis"):
            axis = self.axis  # pyright: ignore[reportAttributeAccessIssue]
            return -1 if axis is None else axis
        raise NotImplementedError(
            f"{type(self).__name__} does not say along which axis it packs values. Give it a field `axis`, counted "
            "from the end, or `blocked: ClassVar[None] = None` if it packs none."
        )

    def compute_shape(self) -> tuple[int, ...]:
        """The free axes of the codes, which are the first part, and the blocked axis without its padding."""
        codes = self.parts[0]
        shape = list(getattr(self, codes.field).shape)
        if self.blocked is None:
            return tuple(shape)
        front = len(shape) - codes.tail
        free, size = shape[:front], shape[front] * codes.unit - self.pad
        free.insert(front + 1 + self.blocked, size)
        return tuple(free)

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Axes in front of the blocked one are axes of every part, so they are batch axes."""
        return 0 if self.blocked is None else -self.blocked

    def stores_axis_in_place(self, axis: int, ndim: int) -> bool:
        """Free axes keep their places up to the blocked one, which is moved behind them."""
        return self.blocked is None or axis < ndim + self.blocked

    def part(self, part: Part) -> Any:
        """The stored array of a part, dense (a compressed absmax is expanded); None if it is absent."""
        array, codes = getattr(self, part.field), getattr(self, self.parts[0].field)
        stored = None if self.kernel_format is None else FORMATS[self.kernel_format].code_dtype
        if stored is not None and getattr(codes, "dtype", stored) != stored:
            raise TypeError(
                f"the codes of this {type(self).__name__} of shape {self.shape} are {codes.dtype} instead of {stored}: "
                "jax.tree.map and optimizers go into the array and change what it stores. Stop at it with "
                "eformer.jaximus.tree_map_with_implicit; w.astype(dtype) changes the dtype of its values."
            )
        return array.expanded() if hasattr(array, "expanded") else array

    @property
    def scale_part(self) -> Part:
        return next(p for p in self.parts if p.is_scale)

    @property
    def has_scale(self) -> bool:
        return any(p.is_scale and getattr(self, p.field) is not None for p in self.parts)

    def frozen_scale(self) -> Any:
        """The scale to decode with: whoever differentiates with respect to it is told what to do instead."""
        scale = self.part(self.scale_part)
        return scale if self.carries_factor else frozen(scale, self.format)

    @classmethod
    def tangent_error(cls) -> Exception:
        return refusal(cls.__name__)

    @property
    def carries_factor(self) -> bool:
        """Was the scale multiplied by a value of the program being traced, so that it may be differentiated?"""
        return any(p.is_scale and isinstance(getattr(self, p.field), FactoredScale) for p in self.parts)

    def with_factor(self: Q, scale: jax.Array, **changes: Any) -> Q:
        """A copy with a scale that may be differentiated."""
        return self.replaced(**{self.scale_part.field: FactoredScale(scale)}, **changes)

    def with_plain_scale(self: Q) -> Q:
        """The same values with the scale that they would have after a factor of one: f32 or wider, and expanded."""
        if self.carries_factor or not self.has_scale:
            return self
        scale = self.part(self.scale_part)
        return self.replaced(**{self.scale_part.field: scale.astype(wide(scale.dtype))})

    def stored_like(self: Q, other: Any) -> Q:
        """A factor changes the type of the scale; where a loop or a branch has one, the others get one too.

        The sharding that is remembered is that of `other`.
        """
        if not isinstance(other, QuantizedArray):
            return self
        made = self if self.sharding == other.sharding else self.replaced(sharding=other.sharding)
        if not (made.has_scale and other.has_scale):
            return made
        made = made if _numbers(made) == _numbers(other) else made.with_plain_scale()
        return made.with_factor(made.frozen_scale()) if other.carries_factor and not made.carries_factor else made

    def replaced(self: Q, **changes: Any) -> Q:
        """A copy with some fields (or `dtype`) changed: nothing is decoded, checked or quantized again."""
        fields = layout(type(self))
        copy = object.__new__(type(self))
        state = copy.__dict__
        for name in (*fields.children, *fields.aux):
            state[name] = changes.pop(name) if name in changes else getattr(self, name)
        state["_dtype"] = changes.pop("dtype", self.dtype)
        state["_shape"] = state["_ranks"] = None
        state["_settled"] = state["_sealed"] = True
        if changes:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(changes)}.")
        return copy

    def moved(self: Q, parts: dict[str, Any], blocked: int | None, **more: Any) -> Q:
        """A copy with moved storage whose blocked axis is now `blocked`."""
        if blocked is None:
            more.pop("pad", None)
        else:
            more["axis"] = blocked
        return self.replaced(**parts, **more)

    def static_layout(self) -> tuple[Any, ...]:
        """What two arrays must agree on to be joined part by part: the packed axis, and the format's own settings."""
        apart = ("axis", "pad", "sharding", "use_kernel")
        return (self.blocked, *(getattr(self, name) for name in layout(type(self)).aux if name not in apart))

    def kernel_operands(self) -> tuple[jax.Array, Any]:
        return self.part(self.parts[0]), self.part(self.scale_part)

    def scaled(self: Q, factor: jax.Array, dtype: Any, *, traced: bool = False) -> Q:
        """A copy with the scale multiplied by `factor`, which has one axis per axis of the scale part.

        In f32 or wider, since the product of two numbers of a narrow scale need not be one; a change of sign is exact.
        Only a factor that is `traced` can be differentiated.
        """
        made = self if only_signs(factor) else self.with_plain_scale()
        scale = made.frozen_scale() if traced or self.carries_factor else made.part(self.scale_part)
        scale = times(scale, factor)
        if traced or self.carries_factor:
            return made.with_factor(scale, dtype=dtype)
        return made.replaced(**{self.scale_part.field: scale}, dtype=dtype)

    def _become(self, made: QuantizedArray) -> None:
        """While under construction: become what the values that were given were quantized to."""
        _arguments.check_declared_shape(self, made)
        made = made if self.sharding is None else made.with_sharding(self.sharding)
        self.__dict__.update(made.replaced(use_kernel=self.use_kernel).__dict__)

    def _default_dtype(self, dtype: Any) -> None:
        """While under construction: the logical dtype, unless one was declared."""
        if self.__dict__.get("_dtype") is None:
            self.dtype = dtype

    def child_specs(self, spec: PartitionSpec) -> Any:
        """One PartitionSpec per stored array for a PartitionSpec of the logical array."""
        return _sharding.child_specs(self, spec)

    def with_sharding(self: Q, sharding: Sharding) -> Q:
        """A copy whose storage is split over devices as `sharding` splits the logical array.

        Codes and scales are split together. A split that would cut a block in two is refused.
        """
        return _sharding.place(self, sharding)

    def with_mesh_and_axis(self: Q, mesh_and_axis: tuple[Any, Any]) -> Q:
        """`with_sharding` from a mesh and an axis specification: None, a PartitionSpec, a tuple or list, or a name."""
        return self.with_sharding(_sharding.from_mesh_and_axis(mesh_and_axis))

    def constrained(self, dense: jax.Array) -> jax.Array:
        """The dense array with the sharding this one carries."""
        return _sharding.constrain(dense, self.sharding)
