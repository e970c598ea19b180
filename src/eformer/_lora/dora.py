"""`DoraArray`: an adapter whose columns have lengths of their own (DoRA); and the handlers that keep it low-rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import aux_field, implicit, materialize, register
from eformer._formats.activations.array import ActivationArray
from eformer._formats.arguments import is_storage
from eformer._formats.blocks import wide
from eformer._formats.wrapped import Wrapped, multiply, register_product

from .array import LoraArray, labels


@dataclasses.dataclass
class DoraArray(Wrapped):
    """`magnitude * v / ‖v‖`, where `v = w + scale * (a · b)` is a `LoraArray`, and lengths are those of its columns.

    A column is what makes one output: all values along the inputs. Invariants: the outputs are the right axes of `v`,
    or the left ones if not `columns`; `magnitude` and `squares`, the squared lengths of the columns of `w`, are
    (batch..., outputs...). Gradients flow to `a`, `b` and `magnitude`; the length is taken as a constant, as the paper
    and `peft` do. It is computed of `squares`, `a · w` and the factors, so `w` stays packed.

    >>> v = LoraArray(jnp.array([[3.0, 0.0], [4.0, 2.0]]), jnp.ones((2, 1)), jnp.zeros((1, 2)))
    >>> DoraArray.over(v).magnitude.tolist()
    [5.0, 2.0]
    """

    v: Any
    magnitude: Any
    squares: Any
    columns: bool = aux_field(default=True)

    def __post_init__(self) -> None:
        if is_storage(self.magnitude, self.squares):
            shape = output_shape(self.v, self.columns)
            if not tuple(self.magnitude.shape) == tuple(self.squares.shape) == shape:
                raise ValueError(
                    f"magnitude and squares of shapes {tuple(self.magnitude.shape)} and {tuple(self.squares.shape)} do "
                    f"not fit an adapter of shape {tuple(self.v.shape)} with columns={self.columns}: expected {shape}."
                )
        super().__post_init__()

    @classmethod
    def over(cls, v: LoraArray, columns: bool = True, magnitude: Any = None) -> DoraArray:
        """An adapter with the lengths that the columns of its weight have, or with others."""
        dense = materialize(v.w).astype(wide(v.w.dtype))
        squares = jnp.sum(jnp.square(dense), axis=_inputs(v, columns))
        return cls(v, jnp.sqrt(squares) if magnitude is None else magnitude, squares, columns)

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Axes in front of the left ones are batch axes of everything stored."""
        return self.v.core_ndim

    @property
    def format(self) -> str:
        return f"{self.v.format} + dora"

    def beside(self) -> dict[str, list[int]]:
        """Lengths have the axes of the outputs."""
        inputs = _inputs(self.v, self.columns)
        outputs = [axis for axis in range(self.v.ndim) if axis not in inputs]
        return {"magnitude": outputs, "squares": outputs}

    def uncut(self) -> range:
        """Columns are whole."""
        return range(self.ndim - self.core_ndim, self.ndim)

    def ratio(self) -> jax.Array:
        """`magnitude / ‖v‖`, (batch..., outputs...): what the columns of `v` are multiplied by. 0 / 0 is 0."""
        dtype = wide(self.magnitude.dtype)
        length = lax.stop_gradient(jnp.sqrt(jnp.maximum(self._squares(dtype), 0)))
        return self.magnitude.astype(dtype) / jnp.where(length == 0, 1, length)

    def _squares(self, dtype: Any) -> jax.Array:
        """The squared lengths of the columns of `v`: ‖w‖² + 2 s (a · w) · b + s² (a · b)², column by column."""
        q = self.v if self.columns else implicit(_swapped)(self.v)
        batch, n, r, s = q.ndim - q.left - q.right, q.ndim, q.ndim, q.ndim + 1
        a, b = q.a.astype(dtype), q.b.astype(dtype)
        lead, left, right = (list(range(*ends)) for ends in ((0, batch), (batch, batch + q.left), (batch + q.left, n)))
        factor = jnp.moveaxis(a, -1, batch)  # (batch..., rank, left...)
        numbers = ((tuple(range(batch + 1, batch + 1 + q.left)), tuple(left)), (tuple(lead), tuple(lead)))

        def product(x: Any, w: Any) -> Any:
            return lax.dot_general(x, lax.convert_element_type(w, dtype), numbers)

        low = implicit(product)(factor, _unrounded(q.frozen()))
        cross = jnp.einsum(low.astype(dtype), [*lead, r, *right], b, [*lead, r, *right], [*lead, *right])
        gram = jnp.einsum(a, [*lead, *left, r], a, [*lead, *left, s], [*lead, r, s])
        own = jnp.einsum(gram, [*lead, r, s], b, [*lead, r, *right], b, [*lead, s, *right], [*lead, *right])
        return self.squares.astype(dtype) + 2 * q.scale * cross + q.scale**2 * own

    def materialize(self) -> jax.Array:
        """The dense array, computed in f32 at least and rounded once to the dtype of `w`."""
        base, update = materialize(self.v.frozen()), self.v.update()
        dtype = wide(base.dtype, update.dtype)
        ratio = self._spread(self.ratio().astype(dtype))
        return ((base.astype(dtype) + update.astype(dtype)) * ratio).astype(self.v.dtype)

    def _spread(self, outputs: jax.Array) -> jax.Array:
        """Values for the outputs, to be multiplied with something of the shape of `v`."""
        return lax.expand_dims(outputs, _inputs(self.v, self.columns))

    def _storage(self) -> str:
        if not is_storage(self.magnitude, self.v.a, self.v.b):
            raise TypeError("its factors were taken out by `split_trainable`")
        return f"{self.format}, {self.nbytes:,} bytes"


def _inputs(v: LoraArray, columns: bool) -> tuple[int, ...]:
    """The axes of `v` that are summed over in a product."""
    batch = v.ndim - v.left - v.right
    return tuple(range(batch, batch + v.left)) if columns else tuple(range(batch + v.left, v.ndim))


def _unrounded(w: Any) -> Any:
    """The weight itself, where its products would round what it is multiplied with."""
    rounds = lambda part: isinstance(part, ActivationArray)  # noqa: E731
    return jax.tree.map(lambda part: part.w if rounds(part) else part, w, is_leaf=rounds)


def output_shape(v: LoraArray, columns: bool) -> tuple[int, ...]:
    return tuple(n for axis, n in enumerate(v.shape) if axis not in _inputs(v, columns))


def _swapped(v: Any) -> Any:
    """With left and right axes exchanged."""
    return lax.transpose(v, _exchange(v))


def _exchange(v: Any) -> list[int]:
    held = v.value if hasattr(v, "value") else v
    axes, batch = list(range(held.ndim)), held.ndim - held.left - held.right
    return [*axes[:batch], *axes[batch + held.left :], *axes[batch : batch + held.left]]


# -- handlers: products over the inputs, transposes, dtypes; others materialize it -------------------------------------


@register_product
def product(primitive: Any, x: jax.Array, q: DoraArray, q_first: bool, params: dict[str, Any]) -> Any:
    """A product over the inputs has the outputs, which are stretched; one over outputs stretches x before."""
    if params.get("out_sharding") is not None:
        return NotImplemented
    x_labels, _, _, out = labels(x.ndim, q.v, q_first, params["dimension_numbers"])
    axes = q.beside()["magnitude"]
    if not jnp.issubdtype(jnp.promote_types(x.dtype, q.dtype), jnp.inexact):
        return NotImplemented

    if all(axis in out for axis in axes):
        return _stretched(multiply(primitive, x, q.v, q_first, params), out, q.ratio(), axes)
    if all(axis in x_labels for axis in axes):
        return multiply(primitive, _stretched(x, x_labels, q.ratio(), axes), q.v, q_first, params)
    return NotImplemented


def _stretched(x: Any, names: list[int], ratio: jax.Array, axes: list[int]) -> jax.Array:
    """`x` times what belongs to some of its axes, in f32 at least, in the dtype of x."""
    dtype = wide(x.dtype)
    return jnp.einsum(x.astype(dtype), names, ratio.astype(dtype), axes, names).astype(x.dtype)


@register("transpose")
def transpose(q: DoraArray, *, permutation: Any, **params: Any) -> Any:
    """Exact where left and right axes keep their order, and stay or change places."""
    turned = list(permutation) == _exchange(q.v)
    if not turned and list(permutation) != list(range(q.ndim)):
        return NotImplemented
    return dataclasses.replace(q, v=implicit(_swapped)(q.v), columns=not q.columns) if turned else q
