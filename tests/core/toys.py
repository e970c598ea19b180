"""Toy implicit arrays that keep a diary, and the few helpers the black-box tests share.

`Plain`, `Transposed` and `Const` show how little a type has to declare. `Block8`, `Lora` and `FlatCodes` write every
dispatch and every materialization into `DIARY`. They declare their shape and dtype, so nobody ever needs to evaluate
`materialize` for its shape alone: each entry is a real event.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from eformer._core import trace
from eformer.jaximus import ImplicitArray, aux_field, materialize, register


@dataclasses.dataclass
class Doubled(ImplicitArray):
    """The least there is: handlers are registered for subclasses of it."""

    values: jax.Array

    def materialize(self):
        return self.values * 2


class Event(NamedTuple):
    kind: str  # "materialize", "dot" or "mul"
    name: str  # the class it happened to
    shape: tuple[int, ...]


DIARY: list[Event] = []


# Functions of JAX that are compiled as a whole: `x @ w` is a jitted `jnp.matmul`.
COMPILED_WHOLE = [
    function
    for module in (jnp, jnp.linalg, jnp.fft, jax.nn, jax.lax, jax.scipy.special, jax.scipy.linalg)
    for function in vars(module).values()
    if hasattr(function, "clear_cache")
]


def forget() -> None:
    """Empty the diary, and what JAX has traced of its own functions: handlers run while tracing, and a cached trace
    would run none. `jax.clear_caches` would do, but then every operation is compiled anew.
    """
    for function in COMPILED_WHOLE:
        function.clear_cache()
    trace._jitted.cache_clear()
    DIARY.clear()


def dots() -> list[Event]:
    return [event for event in DIARY if event.kind == "dot"]


def materializations() -> list[Event]:
    return [event for event in DIARY if event.kind == "materialize"]


def assert_dispatched() -> None:
    """A dot handler ran and nothing was made dense."""
    assert dots(), f"no handler ran: {DIARY}"
    assert not materializations(), f"made dense: {materializations()}"


def assert_no_stack(layers: int) -> None:
    """Nothing with a leading axis of `layers` in front of a matrix was made dense."""
    stacks = [event for event in materializations() if len(event.shape) == 3 and event.shape[0] == layers]
    assert not stacks, f"whole stacks made dense: {stacks}"


def _is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def dense(x: Any) -> np.ndarray:
    return np.asarray(materialize(x) if _is_implicit(x) else x)


def assert_same(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Equal trees, shapes and dtypes; integers and booleans exactly, floats with `atol` times the largest value."""
    actual_leaves, actual_tree = jax.tree.flatten(actual, is_leaf=_is_implicit)
    expected_leaves, expected_tree = jax.tree.flatten(expected, is_leaf=_is_implicit)
    assert actual_tree == expected_tree
    for a, e in zip(actual_leaves, expected_leaves, strict=True):
        if not hasattr(e, "dtype"):  # a dtype, a Python number, a tuple of axes
            assert a == e
            continue
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = dense(a), dense(e)
        assert a.shape == e.shape, f"shape {a.shape}, expected {e.shape}"
        assert a.dtype == e.dtype, f"dtype {a.dtype}, expected {e.dtype}"
        if not jnp.issubdtype(e.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, e)
            continue
        wide = np.complex128 if jnp.issubdtype(e.dtype, jnp.complexfloating) else np.float64
        a, e = a.astype(wide), e.astype(wide)
        finite = np.abs(e[np.isfinite(e)])
        size = max(1.0, float(finite.max())) if finite.size else 1.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * size, equal_nan=True)


@dataclasses.dataclass
class Plain(ImplicitArray):
    """`values * factor`, with no handler at all and nothing declared."""

    values: jax.Array
    factor: jax.Array

    def materialize(self) -> jax.Array:
        return self.values * self.factor


@dataclasses.dataclass
class Transposed(ImplicitArray):
    """`stored.T * factor`. A square one cannot be sliced by looking at shapes: a row of storage is a column."""

    stored: jax.Array
    factor: jax.Array

    def materialize(self) -> jax.Array:
        return self.stored.T * self.factor


@dataclasses.dataclass
class Const(ImplicitArray):
    """One number repeated: no child, so shape and dtype come from the caller."""

    value: float = aux_field()

    def materialize(self) -> jax.Array:
        return jnp.full(self.shape, self.value, self.dtype)


@dataclasses.dataclass
class Block8(ImplicitArray):
    """`codes (…, K, N)` int8 and one factor per `block` rows, `scale (…, K / block, N)`."""

    codes: jax.Array
    scale: jax.Array
    block: int = aux_field(default=8)

    core_ndim: ClassVar[int] = 2

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def compute_dtype(self) -> Any:
        return self.scale.dtype

    def materialize(self) -> jax.Array:
        DIARY.append(Event("materialize", "Block8", tuple(self.codes.shape)))
        return self.codes.astype(self.scale.dtype) * jnp.repeat(self.scale, self.block, axis=-2)

    @classmethod
    def quantize(cls, weights: jax.Array, block: int = 8) -> Block8:
        *batch, rows, columns = weights.shape
        block = block if rows % block == 0 else rows
        groups = weights.reshape(*batch, rows // block, block, columns)
        scale = jnp.maximum(jnp.abs(groups).max(-2), 1e-8) / 127
        codes = jnp.round(groups / scale[..., None, :]).astype(jnp.int8)
        return cls(codes.reshape(weights.shape), scale.astype(weights.dtype), block)

    def child_specs(self, spec: PartitionSpec) -> Any:
        axes = tuple(spec) + (None,) * (self.ndim - len(spec))
        if axes[-2] is not None:  # would cut through blocks
            return None
        return jax.tree.map(lambda _: PartitionSpec(*axes), self)


def block8_contract(x: jax.Array, w: Block8, x_axis: int, w_axis: int) -> jax.Array:
    """`x` contracted with a matrix `w`: free axes of `x`, then the free axis of `w`. Never forms the matrix."""
    DIARY.append(Event("dot", "Block8", tuple(w.codes.shape)))
    blocks = w.codes.reshape(w.scale.shape[0], w.block, w.codes.shape[1]).astype(x.dtype)
    scale = w.scale.astype(x.dtype)
    x = jnp.moveaxis(x, x_axis, -1)
    if w_axis == 0:
        x = x.reshape(*x.shape[:-1], *blocks.shape[:2])
        return jnp.einsum("...bk,bkn,bn->...n", x, blocks, scale)
    y = jnp.einsum("...n,bkn,bn->...bk", x, blocks, scale)
    return y.reshape(*y.shape[:-2], w.codes.shape[0])


def block8_dot(x: jax.Array, w: Block8, x_dims: Any, w_dims: Any, w_first: bool, dtype: Any) -> Any:
    """`dot_general` of a matrix or a stack of them, contracting one axis; anything else is left to others."""
    (x_contract, x_batch), (w_contract, w_batch) = x_dims, w_dims
    stacked = w.ndim - 2
    if len(x_contract) != 1 or stacked > 1 or w_contract[0] < stacked or tuple(x_batch) != tuple(w_batch):
        return NotImplemented

    def one(x: jax.Array, w: Block8) -> jax.Array:
        y = block8_contract(x, w, x_contract[0] - len(x_batch), w_contract[0] - stacked)
        return jnp.moveaxis(y, -1, 0) if w_first else y

    if not stacked:
        if w_batch:
            return NotImplemented
        y = one(x, w)
    elif tuple(w_batch) == (0,):
        y = jax.vmap(one)(x, w)
    elif not w_batch:  # the stack is a free axis of `w`: it stands next to the columns
        y = jax.vmap(one, in_axes=(None, 0), out_axes=0 if w_first else x.ndim - 1)(x, w)
    else:
        return NotImplemented
    return y.astype(dtype or jnp.result_type(x.dtype, w.dtype))


@register("dot_general")
def _dense_dot_block8(x: jax.Array, w: Block8, *, dimension_numbers, preferred_element_type=None, **params) -> Any:
    (x_contract, w_contract), (x_batch, w_batch) = dimension_numbers
    return block8_dot(x, w, (x_contract, x_batch), (w_contract, w_batch), False, preferred_element_type)


@register("dot_general")
def _block8_dot_dense(w: Block8, x: jax.Array, *, dimension_numbers, preferred_element_type=None, **params) -> Any:
    (w_contract, x_contract), (w_batch, x_batch) = dimension_numbers
    return block8_dot(x, w, (x_contract, x_batch), (w_contract, w_batch), True, preferred_element_type)


@register("mul")
def _block8_times_scalar(primitive, w: Block8, factor: jax.Array, **params) -> Any:
    """A scalar goes into the scales and the product stays implicit."""
    if factor.ndim or factor.dtype != w.dtype:
        return NotImplemented
    DIARY.append(Event("mul", "Block8", w.shape))
    return dataclasses.replace(w, scale=w.scale * factor)


@register("mul")
def _scalar_times_block8(primitive, factor: jax.Array, w: Block8, **params) -> Any:
    return _block8_times_scalar(primitive, w, factor, **params)


@dataclasses.dataclass
class Lora(ImplicitArray):
    """`base + a @ b` over any base: dense, `Block8`, or another `Lora`."""

    base: Any
    a: jax.Array
    b: jax.Array

    core_ndim: ClassVar[int] = 2

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    def compute_dtype(self) -> Any:
        return self.base.dtype

    def materialize(self) -> jax.Array:
        DIARY.append(Event("materialize", "Lora", tuple(self.base.shape)))
        return materialize(self.base) + self.a @ self.b


@register("dot_general")
def _dense_dot_lora(x: jax.Array, w: Lora, *, dimension_numbers, **params) -> Any:
    (x_contract, w_contract), (x_batch, _) = dimension_numbers
    if x_batch or tuple(w_contract) != (0,) or tuple(x_contract) != (x.ndim - 1,):
        return NotImplemented
    DIARY.append(Event("dot", "Lora", tuple(w.base.shape)))
    return x @ w.base + (x @ w.a) @ w.b


@dataclasses.dataclass
class FlatCodes(ImplicitArray):
    """`codes (…, n)` flattened, one `scale (…)` per array, and the static shape of one array."""

    codes: jax.Array
    scale: jax.Array
    core_shape: tuple[int, ...] = aux_field(default=())

    @property
    def core_ndim(self) -> int:
        return len(self.core_shape)

    def compute_shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], *self.core_shape)

    def compute_dtype(self) -> Any:
        return self.scale.dtype

    def materialize(self) -> jax.Array:
        DIARY.append(Event("materialize", "FlatCodes", tuple(self.shape)))
        return (self.codes.astype(self.scale.dtype) * self.scale[..., None]).reshape(self.shape)

    @classmethod
    def quantize(cls, weights: jax.Array) -> FlatCodes:
        scale = jnp.abs(weights).max() / 7
        return cls(jnp.round(weights / scale).astype(jnp.int8).reshape(-1), scale, tuple(weights.shape))
