"""`LoraArray`: a frozen weight and a low-rank update that can be trained; and the handlers that keep it low-rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import aux_field, materialize, register
from eformer._core.trace import is_implicit
from eformer._formats.arguments import is_storage
from eformer._formats.blocks import common, wide
from eformer._formats.lookup import without_whole_axes
from eformer._formats.wrapped import Axes, Wrapped, axes_of, is_plain_ragged, on_weight, redo, register_product


@dataclasses.dataclass
class LoraArray(Wrapped):
    """`w + scale * (a · b)`, over any `w`: dense, quantized, or another implicit array.

    Invariants: `w` is (batch..., left axes..., right axes...), `a` is (batch..., left axes..., rank) and `b` is
    (batch..., rank, right axes...); `left` and `right` count those axes. Gradients flow to `a` and `b` only.
    `dropout` is a note for training: see `lora_dropout`.

    >>> q = LoraArray(jnp.ones((3, 2)), jnp.ones((3, 1)), jnp.ones((1, 2)), scale=0.5)
    >>> jnp.ones(3) @ q
    Array([4.5, 4.5], dtype=float32)
    """

    w: Any
    a: Any
    b: Any
    scale: float = aux_field(default=1.0)
    left: int = aux_field(default=1)
    right: int = aux_field(default=1)
    dropout: float = aux_field(default=0.0)

    def __post_init__(self) -> None:
        self.scale, self.dropout = float(self.scale), float(self.dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not allowed; give a share of at least 0 and less than 1.")
        if is_storage(self.w, self.a, self.b):
            check_shapes(self)
        super().__post_init__()

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Axes in front of the left ones are batch axes of all three."""
        return self.left + self.right

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def format(self) -> str:
        """The format of `w`, and the rank."""
        base = (getattr(self.w, "format", None) or type(self.w).__name__) if is_implicit(self.w) else self.w.dtype.name
        return f"{base} + lora {self.rank}" if is_storage(self.a) else f"{base} + lora"

    def beside(self) -> dict[str, Axes]:
        """Factors have the axes they share with `w`, and the rank."""
        axes, left, right = list(range(self.w.ndim)), self.w.ndim - self.core_ndim, self.w.ndim - self.right
        return {"a": [*axes[:right], None], "b": [*axes[:left], None, *axes[right:]]}

    def frozen(self) -> Any:
        """`w`, through which no gradient flows."""
        return jax.tree.map(lax.stop_gradient, self.w)

    def dropped(self, x: jax.Array) -> jax.Array:
        """What the factors are given of the other operand of a product."""
        return x

    def update(self) -> jax.Array:
        """`scale * (a · b)`, dense, in the dtype of the factors."""
        batch = self.w.ndim - self.left - self.right
        axes, rank = list(range(self.w.ndim)), self.w.ndim
        left, right = axes[: batch + self.left], [*axes[:batch], rank, *axes[batch + self.left :]]
        return self.scale * jnp.einsum(self.a, [*left, rank], self.b, right, axes)

    def materialize(self) -> jax.Array:
        """The dense array, summed in f32 at least and rounded once to the dtype of `w`."""
        return _sum(self.frozen(), self.update())

    def _storage(self) -> str:
        if not is_storage(self.a, self.b):
            raise TypeError("its factors were taken out by `split_trainable`")
        return f"{self.format}, {self.nbytes:,} bytes"


def check_shapes(q: LoraArray) -> None:
    """Raise where the parts of an adapter do not fit each other."""
    batch = q.w.ndim - q.left - q.right
    if q.left < 1 or q.right < 1 or batch < 0:
        raise ValueError(
            f"left={q.left} and right={q.right} do not fit w of shape {tuple(q.w.shape)}: both are at least 1, and "
            "together at most its rank."
        )
    shape, rank = tuple(q.w.shape), q.a.shape[-1] if q.a.ndim else 0
    a, b = (*shape[: batch + q.left], rank), (*shape[:batch], rank, *shape[batch + q.left :])
    if tuple(q.a.shape) != a or tuple(q.b.shape) != b:
        raise ValueError(
            f"factors of shapes {tuple(q.a.shape)} and {tuple(q.b.shape)} do not fit w of shape {shape} with "
            f"left={q.left}, right={q.right}: expected {(*a[:-1], 'rank')} and {(*b[:batch], 'rank', *b[batch + 1 :])}."
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q.w, q.a, q.b)):
        raise TypeError(f"w, a and b must be floating, got {q.w.dtype}, {q.a.dtype} and {q.b.dtype}.")


def _sum(base: Any, update: jax.Array) -> jax.Array:
    dense = materialize(base)
    dtype = wide(dense.dtype, update.dtype)
    return (dense.astype(dtype) + update.astype(dtype)).astype(dense.dtype)


# -- handlers: products, transposes, dtypes, slices, lookups; others materialize it ------------------------------------


@register_product
def product(primitive: Any, x: jax.Array, q: LoraArray, q_first: bool, params: dict[str, Any]) -> Any:
    """x·w + ((x·a)·b) * scale: the factor that holds contracted axes goes first, and `a · b` is never formed."""
    if params.get("out_sharding") is not None:
        return NotImplemented
    base = redo(primitive, params, *((q.frozen(), x) if q_first else (x, q.frozen())))
    if not jnp.issubdtype(base.dtype, jnp.inexact):
        return NotImplemented
    x_labels, first, second, out = labels(x.ndim, q, q_first, params["dimension_numbers"])
    middle = [label for label in dict.fromkeys((*x_labels, *first[1])) if label in {*second[1], *out}]
    dtype = _factor_dtype(x, q)
    precision = params.get("precision")
    if isinstance(precision, tuple) and q_first:
        precision = precision[::-1]
    options = {"precision": precision, "preferred_element_type": wide(dtype)}
    low = jnp.einsum(q.dropped(x).astype(dtype), x_labels, first[0].astype(dtype), first[1], middle, **options)
    low = (low * q.scale).astype(dtype)
    update = jnp.einsum(low, middle, second[0].astype(dtype), second[1], out, **options)
    return base + update.astype(base.dtype)


def _factor_dtype(x: jax.Array, q: LoraArray) -> Any:
    """Adapters follow the product: trained in f32, computed in what x and the weight have in common."""
    return common(x.dtype, q.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else q.a.dtype


def labels(x_ndim: int, q: LoraArray, q_first: bool, numbers: Any) -> tuple[Any, Any, Any, Any]:
    """Einsum labels: axis i of w is i, the rank is w.ndim, free axes of x follow.

    Those of x, both factors and theirs (the one that holds contracted axes first), and those of the result.
    """
    (qc, xc), (qb, xb) = axes_of(numbers, q_first)
    rank = q.ndim
    shared = {**dict(zip(xc, qc, strict=True)), **dict(zip(xb, qb, strict=True))}
    x = [shared.get(axis, rank + 1 + axis) for axis in range(x_ndim)]
    x_kept = [label for label in x if label > rank]
    q_kept = [axis for axis in range(q.ndim) if axis not in (*qc, *qb)]
    out = [*qb, *q_kept, *x_kept] if q_first else [*qb, *x_kept, *q_kept]
    beside = q.beside()
    factors = [(x, [rank if axis is None else axis for axis in beside[name]]) for name, x in (("a", q.a), ("b", q.b))]
    right = q.ndim - q.right
    only_right = any(axis >= right for axis in qc) and not any(right - q.left <= axis < right for axis in qc)
    first, second = factors[::-1] if only_right else factors
    return x, first, second, out


@register("ragged_dot_general")
def ragged_dot_general(primitive: Any, x: jax.Array, q: LoraArray, group_sizes: jax.Array, **params: Any) -> Any:
    """Rows of x in groups, each times its own matrix of a stack, with two more ragged products as thin as the rank."""
    if not is_plain_ragged(params, x.ndim, q.ndim) or (q.left, q.right) != (1, 1):
        return NotImplemented
    base = redo(primitive, params, x, q.frozen(), group_sizes)
    if not jnp.issubdtype(base.dtype, jnp.inexact):
        return NotImplemented
    (_, (contracted,)), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    first, second = (q.a, q.b) if contracted == 1 else (q.b.mT, q.a.mT)
    dtype = _factor_dtype(x, q)
    options = {"precision": params.get("precision"), "preferred_element_type": wide(dtype)}
    low = lax.ragged_dot(q.dropped(x).astype(dtype), first.astype(dtype), group_sizes, **options)
    update = lax.ragged_dot((low * q.scale).astype(dtype), second.astype(dtype), group_sizes, **options)
    return base + update.astype(base.dtype)


@register("transpose")
def transpose(q: LoraArray, *, permutation: Any, **params: Any) -> Any:
    """Exact while left and right axes stay together, in either order, behind the batch axes."""
    batch = q.ndim - q.left - q.right
    sides = ["batch" if axis < batch else "left" if axis < batch + q.left else "right" for axis in permutation]
    groups = [side for i, side in enumerate(sides) if i == 0 or sides[i - 1] != side]
    expected = ["batch"] if batch else []
    if groups not in ([*expected, "left", "right"], [*expected, "right", "left"]):
        return NotImplemented
    w = on_weight(lambda w: lax.transpose(w, permutation), q.w)
    lead = [axis for axis in permutation if axis < batch]
    left = [axis for axis in permutation if batch <= axis < batch + q.left]
    right = [axis - q.left + 1 for axis in permutation if axis >= batch + q.left]
    if groups[-1] == "right":
        a = lax.transpose(q.a, [*lead, *left, batch + q.left])
        b = lax.transpose(q.b, [*lead, batch, *right])
        return dataclasses.replace(q, w=w, a=a, b=b)
    a = lax.transpose(q.b, [*lead, *right, batch])
    b = lax.transpose(q.a, [*lead, batch + q.left, *left])
    return dataclasses.replace(q, w=w, a=a, b=b, left=q.right, right=q.left)


@register("slice")
def slice_(q: LoraArray, *, start_indices: Any, limit_indices: Any, strides: Any = None, **params: Any) -> Any:
    """One row or column, dense; other parts are adapters again."""
    cuts = zip(start_indices, limit_indices, strides or (1,) * q.ndim, strict=True)
    sizes = [len(range(*cut)) for cut in cuts]
    if _picked_axis(q, sizes) is None:
        return NotImplemented
    return dynamic_slice(q, *map(jnp.int32, start_indices), slice_sizes=sizes)


@register("gather")
def gather(q: LoraArray, indices: jax.Array, **params: Any) -> Any:
    """Rows (or columns) of the weight, and those of one factor times the other: dense, and only those requested."""
    indices, params = without_whole_axes(q, indices, params)
    numbers, value = params["dimension_numbers"], params.get("fill_value")
    axis = _picked_axis(q, params["slice_sizes"])
    if axis is None or tuple(numbers.start_index_map) != (axis,) or (value is not None and value == value):
        return NotImplemented
    options = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    base = on_weight(lambda w: lax.gather(w, indices, numbers, params["slice_sizes"], **options), q.frozen())
    sizes = (1, q.rank) if axis == 0 else (q.rank, 1)
    rows = lax.gather(q.b if axis else q.a, indices, numbers, sizes, **options)
    kept = numbers.offset_dims[-1] if axis in numbers.collapsed_slice_dims else numbers.offset_dims[1 - axis]
    update = jnp.tensordot(rows, q.a if axis else q.b, ((kept,), (axis,)))
    return _sum(base, q.scale * jnp.moveaxis(update, -1, kept))


@register("dynamic_slice")
def dynamic_slice(q: LoraArray, *starts: jax.Array, slice_sizes: Any, **params: Any) -> Any:
    """One row or column, as `gather`."""
    axis = _picked_axis(q, slice_sizes)
    if axis is None:
        return NotImplemented
    # Bind the operation: the function of that name would count a negative start from the end a second time.
    starts = tuple(jnp.clip(start, 0, n - size) for start, n, size in zip(starts, q.shape, slice_sizes, strict=True))
    base = on_weight(lambda w: lax.dynamic_slice(w, starts, slice_sizes), q.frozen())
    one = lax.dynamic_slice_in_dim(q.b if axis else q.a, starts[axis], 1, axis)
    return _sum(base, q.scale * (q.a @ one if axis else one @ q.b))


def _picked_axis(q: LoraArray, sizes: Sequence[int]) -> int | None:
    """The axis of a matrix along which single entries are requested; the other axis is taken whole."""
    if q.ndim != 2:
        return None
    fits = [axis for axis in (0, 1) if sizes[axis] == 1 and sizes[1 - axis] == q.shape[1 - axis]]
    return fits[0] if fits else None
