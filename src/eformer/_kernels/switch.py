"""Native kernels on and off for a piece of a program."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from eformer import _settings

_nf4: contextvars.ContextVar[bool] = contextvars.ContextVar("eformer_nf4_use_kernel", default=True)


@contextlib.contextmanager
def nf4_use_kernel(value: bool) -> Iterator[None]:
    """Let NF4 arrays use native kernels (CPU, CUDA, TPU), or not, inside a `with` block, also one left by an exception.

    Like every setting of JAX it is read when a program is traced: a jitted function that has been compiled before stays
    as it is. `True` undoes an enclosing `False`; it does not overrule `EFORMER_KERNELS=0`.

    >>> with nf4_use_kernel(False):
    ...     enabled("nf4"), enabled("int8") == _settings.kernels_enabled()
    (False, True)
    """
    if not isinstance(value, bool):
        raise TypeError(f"nf4_use_kernel takes True or False, got {value!r}.")
    token = _nf4.set(value)
    try:
        yield
    finally:
        _nf4.reset(token)


def enabled(fmt: str) -> bool:
    """May products of this format use native kernels here?"""
    return refusal(fmt) is None


def refusal(fmt: str) -> str | None:
    """Why they may not."""
    if not _settings.kernels_enabled():
        return "native kernels are turned off (EFORMER_KERNELS)"
    return "native kernels are turned off (nf4_use_kernel)" if fmt == "nf4" and not _nf4.get() else None


def state() -> tuple[bool, bool]:
    """All a compiled operation may have depended on: part of the key it is remembered by."""
    return _settings.kernels_enabled(), _nf4.get()
