"""Every library of native kernels, for those who ask about all of them: `doctor`, and programs that are exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from eformer import _settings, _table

from . import cpu, cuda, native, tpu


@dataclasses.dataclass(frozen=True)
class Backend:
    """A library, and a function that names the instruction set or architecture it will use on this machine."""

    library: native.Library
    instructions: Callable[[], str]


def _architecture() -> str:
    return f"compute capability {jax.local_devices(backend='cuda')[0].compute_capability}"


BACKENDS: tuple[Backend, ...] = (Backend(cpu.LIBRARY, cpu.isa_name), Backend(cuda.LIBRARY, _architecture))


def load_kernels() -> list[dict[str, Any]]:
    """Load all native kernels now instead of at their first use, and say what became of each library.

    A program that was exported with native kernels in it needs this before it is called in another process.

    >>> [kernels["backend"] for kernels in load_kernels()]
    ['cpu', 'cuda']
    """
    return [_state(backend) for backend in BACKENDS]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The state of the kernels of every platform. Prints as a table; `states` has the same as data."""

    states: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        cells = [
            [str(state[key] or "-") for key in ("backend", "state", "instructions", "path")] for state in self.states
        ]
        return "\n".join(_table.lines(("platform", "state", "instructions", "file"), cells))

    __repr__ = __str__


def kernels() -> Kernels:
    """Load the native kernels of every platform now, and say which run here and why the others do not.

    `python -m eformer doctor` also checks their results and times them.

    >>> [state["backend"] for state in kernels().states]
    ['cpu', 'cuda', 'tpu']
    """
    return Kernels((*load_kernels(), tpu.state()))


def _state(backend: Backend) -> dict[str, Any]:
    found: dict[str, Any] = {"backend": backend.library.backend, "path": None, "instructions": None}
    if not _settings.kernels_enabled():
        return {**found, "state": "turned off (EFORMER_KERNELS)"}
    try:
        jax.local_devices(backend=backend.library.backend)
    except RuntimeError:
        return {**found, "state": "there is no such device"}
    loaded = native.load(backend.library)
    found["path"] = None if loaded.path is None else str(loaded.path)
    if loaded.reason is not None:
        return {**found, "state": loaded.reason}
    return {**found, "instructions": backend.instructions(), "state": "loaded"}


def export_checks() -> list[export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` has to be told before it takes a program with native kernels.

    >>> export_checks()[0] == export.DisabledSafetyCheck.custom_call("eformer_cpu_qmatmul")
    True
    """
    names = [name for backend in BACKENDS for name, _ in backend.library.targets]
    return [export.DisabledSafetyCheck.custom_call(name) for name in names]
