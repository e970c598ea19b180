"""`ActivationArray`: a quantized weight whose products round the other operand to 8 bits, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core import ImplicitArray, aux_field
from eformer._core.trace import ImplicitTracer
from eformer._kernels.formats import FORMATS, broadcasts, one_of
from eformer._kernels.parameters import ACTIVATIONS

from ..arguments import is_storage
from ..base import QuantizedArray
from ..gradients import refusal
from ..wrapped import Wrapped, redo
from .numbers import FIELDS, follow


def takes(fmt: str | None) -> tuple[str, ...]:
    """What x may be rounded to in products with a format of the kernels; nothing for one they do not know."""
    if fmt is None:
        return ()
    if fmt == "fp4":
        return "int8", "fp8"
    return ("int8",) if FORMATS[fmt].bits_of is None else ("fp8",)


@dataclasses.dataclass
class ActivationArray(Wrapped):
    """A quantized weight `w` whose products round rows of x to 8 bits and multiply the codes of both.

    A row is what is contracted; it has the scale max|x| / 127 (int8) or max|x| / 448 (fp8), unless `x_scale`, a static
    one, is given. Everything else works as for `w`. Derivatives are those of the product with `w` alone: straight
    through the rounding. `backward` rounds the gradient of the result as well, to the nearest, or, with a `seed`,
    stochastically.

    Invariants: `x_scale` (float32) and `seed` (uint32), where there are any, have one axis for every axis of `w`, of
    the same size where it numbers matrices of a stack, else of size 1.

    >>> from eformer import quantize
    >>> quantize(jnp.ones((64, 32)), dtype="int8", activations="int8")
    ActivationArray(float32[64,32], int8 x int8, 8.50 bits per weight)
    """

    w: Any
    x_scale: Any = None
    seed: Any = None
    activations: str = aux_field(default="int8", kw_only=True)
    backward: str | None = aux_field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        one_of("activations", self.activations, ACTIVATIONS)
        one_of("backward", self.backward, (None, *ACTIVATIONS))
        if isinstance(self.w, ImplicitTracer):  # inside of `implicit`
            object.__setattr__(self, "w", self.w.value)
        if is_storage(self.w) and not isinstance(self.w, ImplicitArray):
            raise TypeError(
                f"w is a dense {type(self.w).__name__} of shape {tuple(self.w.shape)}, but must be a quantized array: "
                f'quantize(w, dtype="int8", activations={self.activations!r}) does both.'
            )
        if isinstance(self.w, ActivationArray):
            raise TypeError(f"w is {self.w!r}, whose products round the other operand already; wrap its own `.w`.")
        if isinstance(self.w, QuantizedArray):
            allowed = takes(self.w.kernel_format)
            if self.activations not in allowed:
                raise ValueError(no_product(self.activations, self.w.format, allowed))
        for name in FIELDS:
            value = getattr(self, name)
            if value is None or not is_storage(value) or not hasattr(self.w, "shape"):
                continue
            if not broadcasts(value.shape, self.w.shape):
                raise ValueError(
                    f"{name} of shape {list(value.shape)} does not fit w of shape {list(self.w.shape)}: it has one "
                    "axis for every axis of w, of size 1 or the same size."
                )
        super().__post_init__()

    @property
    def core_ndim(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of `w`; axes in front of which a number serves several matrices belong to it, too."""
        core, shape = self.w.core_ndim, tuple(self.w.shape)
        for number in (self.x_scale, self.seed):
            if core is not None and number is not None:
                shared = [i for i, n in enumerate(number.shape) if n != shape[i]]
                core = max(core, len(shape) - shared[0]) if shared else core
        return core

    @property
    def format(self) -> str:
        """The format of `w`, and what x is rounded to."""
        return f"{getattr(self.w, 'format', type(self.w).__name__)} x {self.activations}"

    def beside(self) -> dict[str, range]:
        return {name: range(self.w.ndim) for name in FIELDS if getattr(self, name) is not None}

    def materialize(self) -> jax.Array:
        """The dense array that `w` stands for."""
        return self.w.materialize()

    def with_key(self, key: jax.Array | None) -> ActivationArray:
        """A copy that rounds gradients (`backward`) stochastically, by this key; None rounds to the nearest again.

        Every matrix of a stack gets numbers of its own. Use a new key at every step.
        """
        if key is None:
            return dataclasses.replace(self, seed=None)
        if self.backward is None:
            raise ValueError('a key is for gradients that are rounded: quantize with backward="int8" or "fp8".')
        lead = self.shape[: max(self.ndim - 2, 0)]
        seed = jax.random.bits(key, (*lead, *[1] * (self.ndim - len(lead))), jnp.uint32)
        return dataclasses.replace(self, seed=seed)

    # -- storage, as it is for w ---------------------------------------------------------------------------------------

    def around(self, weight: Any, **changes: Any) -> Any:
        """The same settings around another weight; a dense one has none."""
        return super().around(weight, **changes) if isinstance(weight, ImplicitArray) else weight

    @classmethod
    def tangent_error(cls) -> Exception:
        return refusal(cls.__name__)

    def _storage(self) -> str:
        static = ", static scale" if self.x_scale is not None else ""
        back = "" if self.backward is None else f", gradient in {self.backward}"
        return f"{self.format}{static}{back}, {self.bits_per_weight:.2f} bits per weight"

    # -- operations other than products --------------------------------------------------------------------------------

    @classmethod
    def default_handler(cls, primitive: Any, *args: Any, params: dict[str, Any] | None = None) -> Any:
        """What the weights themselves do; the result is such an array again where all of them were, and it is one."""
        params = params or {}
        weights = [a.w if isinstance(a, ActivationArray) else a for a in args]
        found = redo(primitive, params, *weights)
        several = isinstance(found, (list, tuple))
        results: list[Any] = list(found) if several else [found]
        if any(isinstance(r, ImplicitArray) for r in results):
            numbers = follow(primitive.name, args, results, params)
            first = next(a for a in args if isinstance(a, ActivationArray))
            results = [
                first.around(r, **kept) if isinstance(r, ImplicitArray) and kept is not None else r
                for r, kept in zip(results, numbers, strict=True)
            ]
        return results if several else results[0]


def no_product(activations: str, fmt: str, allowed: tuple[str, ...]) -> str:
    """What to say of a format that has no product with x rounded so."""
    own = f"{fmt} takes activations={' or '.join(map(repr, allowed))}" if allowed else f"{fmt} takes none"
    return (
        f"activations={activations!r} does not work with {fmt} weights: {own}. Integer formats, nf4, iq4_nl, ternary "
        "and binary take 'int8', fp8 and mxfp8 'fp8', mxfp4 and nvfp4 either."
    )
