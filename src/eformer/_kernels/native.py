"""Native kernels: what those of a backend take, as a table, and why they refuse a problem; their shared libraries.

Libraries are found, loaded and registered with XLA at first use, never at import. One that is missing is mentioned
once, one that cannot be used is warned about once. Either way `load` returns the reason, and the next implementation
takes over.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import logging
import math
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer import _messages, _settings, errors
from eformer._jax.avals import result_type

from .parameters import Problem

_log = logging.getLogger("eformer")
_lock = threading.Lock()
F32, BF16, F16 = FLOATS = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Formats, dtypes of x and of results, dtypes of scales, and what blocks must be a multiple of.

    `arithmetic` says how the kernels multiply, whatever algorithm a precision names. `rows_decide` says what depends on
    the number of rows of x, where it has to be known.
    """

    formats: tuple[str, ...]
    floats: tuple[np.dtype, ...] = FLOATS
    scales: tuple[np.dtype, ...] = FLOATS
    block: int = 1
    arithmetic: str = "its own"
    rows_decide: str | None = None

    def refuses_product(self, problem: Problem) -> str | None:
        """Why, whatever the platform; None means that the kernels take it."""
        if self.rows_decide and not isinstance(problem.m, int):
            return f"x has {problem.m} rows, a number that is not known yet, and {self.rows_decide}"
        if problem.is_empty:
            return "nothing to multiply"
        if isinstance(problem.precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
            return f"precision={problem.precision} names an algorithm, and it has {self.arithmetic}"
        return _other_than(self.floats, x=problem.x_dtype) or self.refuses_lookup(problem)

    def refuses_lookup(self, problem: Problem) -> str | None:
        if problem.fmt not in self.formats:
            return f"it has no kernels for {problem.fmt}"
        why = _other_than(self.floats, out=problem.out_dtype) or _other_than(self.scales, scale=problem.scale_dtype)
        if why or not problem.format.blocked or (problem.block or 0) % self.block == 0:
            return why
        return f"blocks of {problem.block} values; it takes multiples of {self.block}"

    def refuses_encoding(self, problem: Problem) -> str | None:
        return _other_than(self.floats, x=problem.x_dtype)


def _other_than(allowed: tuple[np.dtype, ...], **dtypes: Any) -> str | None:
    for what, dtype in dtypes.items():
        if dtype is not None and dtype not in allowed:
            return f"{what} is {dtype}, and it takes {', '.join(t.name for t in allowed)}"
    return None


@dataclasses.dataclass(frozen=True)
class Library:
    """What a library of kernels is called and must contain.

    It is installed into the Python package `package`. `targets` maps names of XLA custom calls to handler symbols;
    `abi_symbol` is a C function that returns `abi`, the version of the handlers, their operands and attributes.
    """

    backend: str
    compiler: str
    package: str
    filename: str
    abi_symbol: str
    abi: int
    targets: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        return self.backend.upper()


def library_of(backend: str, compiler: str, package: str, abi: int, targets: dict[str, str]) -> Library:
    """libeformer_<backend>, by the names all libraries follow: "gather" is the target eformer_<backend>_gather."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    named = tuple((f"eformer_{backend}_{name}", symbol) for name, symbol in targets.items())
    return Library(backend, compiler, package, f"libeformer_{backend}{suffix}", f"eformer_{backend}_abi", abi, named)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A library that is ready (`reason` is None), or why there is none."""

    path: Path | None
    handle: Any
    reason: str | None


def load(library: Library) -> Loaded:
    """Load and register a library once per process. Needs the platform's backend, and starts it if need be."""
    with _lock:
        return _load(library, _settings.kernel_library(library.backend))


@functools.cache
def _load(library: Library, override: str | None) -> Loaded:
    path = Path(override) if override else find(library)
    if path is None:
        _log.warning(_messages.MISSING_KERNELS.format(title=library.title, compiler=library.compiler))
        return Loaded(None, None, f"this installation has no native {library.title} kernels")
    try:
        handle = _checked(library, path)
        _register(library, handle)
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as err:
        cause = str(err).strip().rstrip(".") or type(err).__name__
        message = _messages.BROKEN_KERNELS.format(title=library.title, path=path, cause=cause)
        warnings.warn(message, errors.KernelFallbackWarning, stacklevel=2)
        return Loaded(path, None, f"{path.name} cannot be used: {cause}")
    return Loaded(path, handle, None)


def find(library: Library) -> Path | None:
    """The installed file. An editable install keeps it elsewhere than the sources: the package has several folders."""
    folders = map(Path, importlib.import_module(library.package).__path__)
    return next((folder / library.filename for folder in folders if (folder / library.filename).is_file()), None)


def _checked(library: Library, path: Path) -> Any:
    handle = ctypes.CDLL(str(path))
    abi = getattr(handle, library.abi_symbol)
    abi.restype = ctypes.c_int64
    found = abi()
    if found != library.abi:
        raise OSError(f"it has version {found} of the kernel interface and this eformer needs version {library.abi}")
    return handle


def _register(library: Library, handle: Any) -> None:
    # A handler XLA cannot take raises here only once the backend runs; queued before, it would keep the backend from
    # starting at all. Without the backend there is nothing to register with: a program is lowered for another machine.
    try:
        jax.local_devices(backend=library.backend)
    except RuntimeError:
        return
    platform = "cpu" if library.backend == "cpu" else library.title
    for target, symbol in library.targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, symbol)), platform=platform)


Result = tuple[tuple[int, ...], Any]  # shape and dtype


def call(
    library: Library,
    name: str,
    results: Sequence[Result],
    operands: Sequence[Any],
    in_place: dict[int, int] | None = None,
    /,
    **attributes: float,
) -> Any:
    """The results of a target. A scale that is None is handed over as an array without elements.

    `in_place` says which operand becomes which result.
    """
    load(library)  # registers the targets, if that was not done when the kernels were chosen
    avals = [result_type(shape, dtype, operands[0]) for shape, dtype in results]
    given = [jnp.zeros((0,), jnp.float32) if operand is None else operand for operand in operands]
    target = jax.ffi.ffi_call(f"eformer_{library.backend}_{name}", avals, input_output_aliases=in_place)
    kinds = {int: np.int64, float: np.float32}
    return target(*given, **{name: kinds.get(type(value), np.int64)(value) for name, value in attributes.items()})


def storage_attributes(problem: Problem) -> dict[str, int]:
    return {"fmt": problem.format.number, "cols": problem.cols, "block": problem.block or 0}


def in_one_batch_axis(
    problem: Problem, x: Any, codes: Any, scale: Any, *x_scale: Any, stacked: bool = False
) -> list[Any]:
    """With one axis for all batch axes; that of codes and scales which are stacked counts through the stack."""
    axes = len(problem.batch)
    stored = [_flat(array, axes + stacked) for array in (codes, scale)]
    return [_flat(x, axes), *stored, *(_flat(array, axes) for array in x_scale)]


def offset_in_one_batch_axis(problem: Problem, offset: Any, *, stacked: bool = False) -> Any:
    """Of the offset, like that of the scale; no elements where there is none."""
    return jnp.zeros((0,), jnp.uint8) if offset is None else _flat(offset, len(problem.batch) + stacked)


def _flat(array: Any, axes: int) -> Any:
    return None if array is None else array.reshape(math.prod(array.shape[:axes]), *array.shape[axes:])
