"""Every library of native kernels: their state, and what exported programs need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from eformer import _settings, _table

from . import cpu, cuda, native, tpu
from .formats import FORMATS, one_of
from .matmul import PRODUCT
from .parameters import product_problem
from .select import choose, default_platform, nf4_use_kernel

LIBRARIES = (cpu.LIBRARY, cuda.LIBRARY)
COLUMNS = ("platform", "state", "instructions", "file")
# What names the instruction set or architecture that is used on this machine.
INSTRUCTIONS: dict[str, Callable[[], str]] = {
    "cpu": cpu.isa_name,
    "cuda": lambda: f"compute capability {jax.local_devices(backend='cuda')[0].compute_capability}",
    "tpu": tpu.chip_kind,
}
# Why the kernels of a platform do not run here.
REFUSES: dict[str, Callable[[str], str | None]] = {
    "cpu": cpu.refuses_machine,
    "cuda": cuda.refuses_machine,
    "tpu": tpu.refuses_platform,
}


def is_kernel_available(fmt: str = "nf4") -> bool:
    """Is there a native kernel for products with arrays of this format on the default device? Starts the backend.

    >>> is_kernel_available() in (True, False)
    True
    """
    one_of("fmt", fmt, FORMATS)
    row = FORMATS[fmt]
    x, scale = jax.ShapeDtypeStruct((2, 64), jnp.float32), jax.ShapeDtypeStruct((128, 1), jnp.float32)
    codes = jax.ShapeDtypeStruct(row.stored_shape(128, 64, 64), row.code_dtype)
    options = {"fmt": fmt, "form": "dot", "cols": 64, "preference": "native"}
    with nf4_use_kernel(True):
        problem = product_problem(x, codes, scale, default_platform(), **options)
        return choose(PRODUCT.candidates, problem)[0].kind == "native"


def load_kernels() -> list[dict[str, Any]]:
    """Load all native kernels now instead of at their first use, and return the state of each library.

    A program that was exported with native kernels in it needs this before it is called in another process.

    >>> [kernels["backend"] for kernels in load_kernels()]
    ['cpu', 'cuda']
    """
    return [_state(library.backend, library) for library in LIBRARIES]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The state of the kernels of every platform. Prints as a table; `states` has the same as data."""

    states: tuple[dict[str, Any], ...]

    def rows(self) -> list[list[str]]:
        """The cells of the table."""
        return [
            [str(state[key] or "-") for key in ("backend", "state", "instructions", "path")] for state in self.states
        ]

    def __str__(self) -> str:
        return "\n".join(_table.lines(COLUMNS, self.rows()))

    __repr__ = __str__


def kernels() -> Kernels:
    """Load the native kernels of every platform now, and say which run here and why the others do not.

    `python -m eformer doctor` also checks their results and times them.

    >>> [state["backend"] for state in kernels().states]
    ['cpu', 'cuda', 'tpu']
    """
    return Kernels((*load_kernels(), _state("tpu", None)))


def _state(backend: str, library: native.Library | None) -> dict[str, Any]:
    """The state of the kernels of a platform. Those of the TPU need no library: Pallas compiles them."""
    found: dict[str, Any] = {"backend": backend, "path": None, "instructions": None}
    if not _settings.kernels_enabled():
        return {**found, "state": "turned off (EFORMER_KERNELS)"}
    try:
        jax.local_devices(backend=backend)
    except RuntimeError:
        return {**found, "state": "no such device"}
    state, why = "compiled by Pallas" if library is None else "loaded", REFUSES[backend](backend)
    if library is not None:
        path = native.load(library).path
        found["path"] = None if path is None else str(path)
    if why is None or library is None:
        found["instructions"] = INSTRUCTIONS[backend]()
    return {**found, "state": why or state}


def export_checks() -> list[export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to export a program with native kernels.

    >>> export_checks()[0] == export.DisabledSafetyCheck.custom_call("eformer_cpu_qmatmul")
    True
    """
    names = [name for library in LIBRARIES for name, _ in library.targets]
    return [export.DisabledSafetyCheck.custom_call(name) for name in names]
