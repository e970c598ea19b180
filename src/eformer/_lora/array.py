"""`LoraArray`: a frozen weight and a low-rank update that can be trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from eformer._core import ImplicitArray, aux_field, materialize
from eformer._formats import sharding as _sharding
from eformer._formats.arguments import is_storage
from eformer._formats.blocks import wide


@dataclasses.dataclass
class LoraArray(ImplicitArray, frozen=True):
    """`w + scale * (a · b)`, over any `w`: dense, quantized, or another implicit array.

    Invariants: `w` is (batch..., left axes..., right axes...), `a` is (batch..., left axes..., rank) and `b` is
    (batch..., rank, right axes...); `left` and `right` count those axes. Gradients flow to `a` and `b` only.

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

    def __post_init__(self) -> None:
        self.scale = float(self.scale)
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
        base = (getattr(self.w, "format", None) or type(self.w).__name__) if _is_implicit(self.w) else self.w.dtype.name
        return f"{base} + lora {self.rank}" if is_storage(self.a) else f"{base} + lora"

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def compute_dtype(self) -> Any:
        return self.w.dtype

    def frozen(self) -> Any:
        """`w`, through which no gradient flows."""
        return jax.tree.map(lax.stop_gradient, self.w)

    def update(self) -> jax.Array:
        """`scale * (a · b)`, dense, in the dtype of the factors."""
        batch = self.w.ndim - self.left - self.right
        axes, rank = list(range(self.w.ndim)), self.w.ndim
        left, right = axes[: batch + self.left], [*axes[:batch], rank, *axes[batch + self.left :]]
        return self.scale * jnp.einsum(self.a, [*left, rank], self.b, right, axes)

    def materialize(self) -> jax.Array:
        """The dense array, summed in f32 at least and rounded once to the dtype of `w`."""
        dense, update = materialize(self.frozen()), self.update()
        dtype = wide(dense.dtype, update.dtype)
        return (dense.astype(dtype) + update.astype(dtype)).astype(dense.dtype)

    # -- sharding ------------------------------------------------------------------------------------------------------

    @property
    def sharding(self) -> Any:
        """The sharding of `w`."""
        return getattr(self.w, "sharding", None)

    def child_specs(self, spec: PartitionSpec) -> Any:
        """One PartitionSpec per stored array: factors are split as the axes they share with `w`, the rank is not."""
        entries = _sharding.full_spec(spec, self.ndim, repr(self))
        middle = len(entries) - self.right
        w = self.w.child_specs(spec) if _is_implicit(self.w) else PartitionSpec(*entries)
        a = PartitionSpec(*entries[:middle], None)
        b = PartitionSpec(*entries[: middle - self.left], None, *entries[middle:])
        return None if w is None else self.tree_unflatten(self.tree_flatten_with_keys()[1], (w, a, b))

    def with_sharding(self, sharding: NamedSharding) -> LoraArray:
        """A copy split over devices as `sharding` splits the logical array."""
        specs = self.child_specs(sharding.spec)
        if _is_implicit(self.w) and not hasattr(self.w, "with_sharding"):
            raise TypeError(f"{self.w!r} cannot be split over devices.")
        w = self.w.with_sharding(sharding) if _is_implicit(self.w) else jax.device_put(self.w, sharding)
        factors = (
            jax.device_put(x, NamedSharding(sharding.mesh, s)) for x, s in ((self.a, specs.a), (self.b, specs.b))
        )
        return self.tree_unflatten(self.tree_flatten_with_keys()[1], (w, *factors))

    def _storage(self) -> str:
        if not is_storage(self.a, self.b):
            raise TypeError("its factors were taken out by `split_trainable`")
        return f"{self.format}, {self.nbytes:,} bytes"


def _is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


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
