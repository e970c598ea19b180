"""Every environment variable eformer reads, each looked up when it is needed, never at import."""

from __future__ import annotations

import os
from typing import Literal, cast

Policy = Literal["allow", "warn", "error"]
POLICIES: tuple[Policy, ...] = ("allow", "warn", "error")


def materialization_policy() -> Policy:
    """`EFORMER_MATERIALIZE`: what happens when an implicit array has to be materialized (default `warn`)."""
    value = os.environ.get("EFORMER_MATERIALIZE", "warn").strip().lower()
    return checked_policy(value, source="the environment variable EFORMER_MATERIALIZE")


def checked_policy(value: str, *, source: str) -> Policy:
    if value not in POLICIES:
        raise ValueError(f"{source} is {value!r}; allowed values are {', '.join(map(repr, POLICIES))}.")
    return cast(Policy, value)


def kernels_enabled() -> bool:
    """`EFORMER_KERNELS=0` turns every native kernel off."""
    return os.environ.get("EFORMER_KERNELS", "1").strip().lower() not in ("0", "false", "off", "no")


def kernel_library(backend: str) -> str | None:
    """`EFORMER_CPU_LIBRARY` and its like: the shared library of a backend's kernels, instead of the installed one."""
    return os.environ.get(f"EFORMER_{backend.upper()}_LIBRARY") or None


def gpu_table() -> str | None:
    """`EFORMER_GPU_TABLE`: which GPU kernels are the quickest, a file that `eformer tune` has written."""
    return os.environ.get("EFORMER_GPU_TABLE") or None
