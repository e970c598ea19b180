"""What the calling frames reveal. Each function says what is lost should JAX rename what it looks for."""

from __future__ import annotations

import sys
from types import FrameType

_OPERATOR_MODULE = "jax._src.numpy.array_methods"
_CONSTRUCTOR_MODULE = "jax._src.numpy.array_constructors"
_CALLED_FOR_OTHERS = ("jax.", "flax.", "haiku.", "equinox.", "optax.")


def read_by_array_operator(depth: int = 2) -> bool:
    """Is an attribute being read by an operator of jax.Array?

    Those ask for `__jax_array__` before they let the other operand have its say, and JAX has no other way to decline.
    Without this question `x @ q` outside a scope could not dispatch. Should JAX move that code, the answer becomes
    False: `x @ q` then materializes instead, and stays right.
    """
    return sys._getframe(depth).f_globals.get("__name__") == _OPERATOR_MODULE


def read_by_array_constructor(depth: int = 2) -> bool:
    """Is an attribute being read by jnp.asarray or jnp.array, that is, was a dense array requested by name?

    Calls by JAX or a framework, on arrays they are given, do not count. Should JAX move that code,
    the answer becomes False: jnp.asarray(q) then warns as any other function does, and stays right.
    """
    frame: FrameType | None = sys._getframe(depth)
    asked = False
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(_CALLED_FOR_OTHERS):
        if name != _CONSTRUCTOR_MODULE:
            return False
        asked, frame = True, frame.f_back
    return asked
