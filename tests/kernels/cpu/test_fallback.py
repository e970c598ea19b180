"""Without usable kernels the next implementation takes over, and says so once."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cpu, explain, native
from eformer._kernels.parameters import Problem, product_problem
from eformer._record import recorder
from eformer.errors import KernelFallbackWarning
from eformer.ops.quantization import QuantizationConfig, quantize

from ..cases import make_case, relative_error

RNG = np.random.default_rng(11)
CASE = make_case(RNG, "nf4", 256, 512)
X = RNG.standard_normal((3, 512)).astype(np.float32)


def choice(platform: str = "cpu", x_dtype=jnp.float32, **options):
    x = jax.ShapeDtypeStruct((3, 512), x_dtype)
    given = {"fmt": "nf4", "form": "dot", "cols": 512, **options}
    return explain(product_problem(x, CASE.codes, CASE.scale, platform, **given))


def why_not(**options) -> str:
    return dict(choice(**options).rejected)["native_cpu"]


def test_the_kernel_is_chosen_and_the_reason_given() -> None:
    assert choice().name == "native_cpu"
    assert choice().reason == "quickest implementation for nf4 on cpu"
    assert choice(preference="native").reason == "preference='native'"
    assert {"xla", "reference"} <= set(dict(choice().rejected))


def test_what_is_refused_is_refused_with_a_reason() -> None:
    assert "not on tpu" in why_not(platform="tpu")
    assert "float64" in why_not(out_dtype=np.float64)
    assert "x is float64" in why_not(x_dtype=np.float64, preference="native")
    assert "algorithm" in why_not(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    assert "ranked after xla" in why_not(preference="xla")
    for preference in ("xla", "reference"):
        assert choice(preference=preference).name == preference


def test_lookups_for_which_xla_is_quicker() -> None:
    lookup = Problem("binary", "lookup", 1024, None, np.dtype(np.float32), m=9999, rows=50)
    assert "XLA is quicker" in str(cpu.refuses_gather(lookup))
    assert cpu.refuses_gather(dataclasses.replace(lookup, m=1)) is None


def test_the_environment_turns_kernels_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for value in ("1", "0", "1"):
        monkeypatch.setenv("EFORMER_KERNELS", value)
        with recorder() as events:
            y = CASE.product(X)
        names.append(events[0].name)
        assert relative_error(y, CASE.expected(X)) < 3e-6
    assert names == ["native_cpu", "xla", "native_cpu"]
    monkeypatch.setenv("EFORMER_KERNELS", "0")
    assert "EFORMER_KERNELS" in why_not()


def test_the_environment_reaches_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager product is a program of its own: one compiled with kernels is not used once they are off."""
    case = make_case(RNG, "int8", 128, 384)
    for value, present in (("1", True), ("0", False)):
        monkeypatch.setenv("EFORMER_KERNELS", value)
        text = jax.jit(lambda x, c, s: case.product(x, codes=c, scale=s)).lower(X[:, :384], case.codes, case.scale)
        assert ("eformer_cpu_qmatmul" in text.as_text()) == present


def test_use_kernel_false_takes_the_tiled_path() -> None:
    w = quantize(jnp.asarray(RNG.standard_normal((512, 256)), jnp.float32), QuantizationConfig(use_kernel=False))
    with recorder() as events:
        X @ w
    assert [e.name for e in events] == ["xla"]


def broken(tmp_path, kind: str) -> native.Library:
    """Descriptions of libraries that cannot be used."""
    if kind == "other version":
        return dataclasses.replace(cpu.LIBRARY, abi=999)
    if kind == "missing function":
        return dataclasses.replace(cpu.LIBRARY, abi_symbol="eformer_no_such_function")
    return dataclasses.replace(cpu.LIBRARY, targets=(("eformer_test_target", "EformerNoSuchHandler"),))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other version", r"has version \d+ of the kernel interface and this eformer needs version 999"),
        ("missing function", "eformer_no_such_function"),
        ("missing handler", "EformerNoSuchHandler"),
    ],
)
def test_a_library_that_cannot_be_used_is_warned_about_once(kind: str, message: str, tmp_path) -> None:
    library = broken(tmp_path, kind)
    with pytest.warns(KernelFallbackWarning, match=message) as caught:
        loaded = native.load(library)
    assert len(caught) == 1
    assert "tiled XLA path" in str(caught[0].message)
    assert str(cpu.loaded().path) in str(caught[0].message)
    assert loaded.handle is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load(library) is loaded


def test_a_file_that_is_no_library(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libeformer_cpu.so"
    path.write_text("not a library")
    monkeypatch.setenv("EFORMER_CPU_LIBRARY", str(path))
    with pytest.warns(KernelFallbackWarning, match="libeformer_cpu.so cannot be used"):
        assert choice().name == "xla"
    assert "cannot be used" in why_not()
    monkeypatch.undo()
    assert choice().name == "native_cpu"


def test_no_library_is_mentioned_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFORMER_CPU_LIBRARY", raising=False)
    library = dataclasses.replace(cpu.LIBRARY, filename="libeformer_none.so")
    with caplog.at_level(logging.WARNING, logger="eformer"):
        assert native.load(library).reason == "this installation has no native CPU kernels"
        native.load(library)
    (record,) = caplog.records
    assert "tiled XLA path" in record.getMessage()
    assert "C++ compiler" in record.getMessage()


def test_a_program_runs_on_without_the_library(tmp_path) -> None:
    """A fresh process, the library named in the environment does not exist: one warning, the right result."""
    program = (
        "import jax.numpy as jnp\n"
        "from eformer.ops.quantization import quantize\n"
        "w = quantize(jnp.eye(256), dtype='int8')\n"
        "for m in (1, 2, 3): assert abs((jnp.ones((m, 256)) @ w) - 1).max() < 1e-6\n"
        "print('right')\n"
    )
    missing = str(tmp_path / "nowhere.so")
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "EFORMER_CPU_LIBRARY": missing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "right"
    assert result.stderr.count("KernelFallbackWarning") == 1
    assert missing in result.stderr
