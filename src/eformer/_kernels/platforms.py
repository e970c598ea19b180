"""The name of the platform programs are compiled for when nothing else is said."""

from __future__ import annotations

import jax


def default_platform() -> str:
    """One of "cpu", "tpu", "cuda" or "rocm", as lowering rules name them; JAX calls the last two "gpu"."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
