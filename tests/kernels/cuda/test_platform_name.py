"""JAX calls CUDA and ROCm devices "gpu"; what is asked about a GPU must get the answer for the right one of them."""

from __future__ import annotations

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from eformer._kernels import cuda, native
from eformer._kernels.select import default_platform
from eformer.jaximus import explain
from eformer.ops.quantization import is_kernel_available, quantize

VERSIONS = {"PJRT C API\ncuda 13000": "cuda", "PJRT C API\nrocm 60300": "rocm"}


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_of_a_gpu(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(client=types.SimpleNamespace(platform_version=version))
    x, w = jnp.ones((4, 128), jnp.bfloat16), quantize(jnp.ones((128, 256)), dtype="nf4")
    monkeypatch.setattr(cuda, "loaded", lambda: native.Loaded(Path("libeformer_cuda.so"), None, None))
    with monkeypatch.context() as pretended:
        pretended.setattr(jax, "default_backend", lambda: "gpu")
        pretended.setattr(jax, "devices", lambda: [device])
        assert default_platform() == VERSIONS[version]
        assert is_kernel_available() == (VERSIONS[version] == "cuda")
        (event,) = explain(lambda x: x @ w)(x).kernels
    assert event.name == ("native_cuda" if VERSIONS[version] == "cuda" else "xla")


def test_other_platforms_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda name=name: name)
        assert default_platform() == name
