"""Sets the platform before JAX is imported, and what every test shares."""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
import zlib
from pathlib import Path

PLATFORM = os.environ.get("EFORMER_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = PLATFORM
# Eight fake devices, so that sharding is tested on any machine; and quick compilation, which takes most of the time of
# thousands of small programs (machine code is not optimized; what XLA fuses, and so memory, is as always).
_flags = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # On a busy machine the devices of a collective come late; XLA would end the process after 40 seconds.
    "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
    "--xla_cpu_collective_timeout_seconds=1800",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later releases refuse to start with a flag they dropped
    _flags.append("--xla_cpu_use_fusion_emitters=false")
for _flag in _flags:
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

import hypothesis
import jax
import pytest

# Most of the time of a run goes into compiling the same small programs again, in every worker and after every cleared
# cache: keep them on disk. The folder may be deleted at any time.
jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.dirname(__file__), ".xla_cache", jax.__version__))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same few examples in every run; `make test-all` sets the variable and tries more, other ones each time.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=15, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("thorough" if os.environ.get("EFORMER_TEST_THOROUGH") else "quick")


def pytest_configure(config: pytest.Config) -> None:
    """Let programs go dense without failing; a test that is about the warning uses `pytest.warns`.

    Added here and not in pyproject.toml: pytest imports the category, which imports JAX, and the environment above
    has to be set by then. Later lines win over "error".
    """
    config.addinivalue_line("filterwarnings", "ignore::eformer.errors.MaterializationWarning")
    # Another worker may be writing the file: JAX then compiles the program itself.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning")
    # Hooks of this file are called for the tests of this folder alone, not for the examples of docs/ and src/.
    config.pluginmanager.register(LittleMemory())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _share_cases(items)
    if PLATFORM != "cpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set EFORMER_TEST_PLATFORM=cuda"))


def _share_cases(items: list[pytest.Item]) -> None:
    """Mark cases of a test that has many as thorough: half of four or five, 75 % of up to nine, then 80 to 90 %.

    On newer releases of JAX others are left than on the oldest. So `make test` runs every test on each JAX it runs it
    on, and `make test-all` every case on the oldest JAX; on the newest, every case of tests that depend on JAX, and of
    the others those that are not `of_many`. Without `-m` all run.
    """
    tests: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        by_hand = item.get_closest_marker("thorough") is not None
        tests.setdefault((item.nodeid.partition("[")[0], by_hand), []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()), reverse=jax.__version__.startswith("0.10."))
        parts = next(parts for fewer, parts in ((4, 1), (6, 2), (10, 4), (24, 6), (math.inf, 10)) if len(cases) < fewer)
        for item in cases[-(-len(cases) // parts) :]:
            item.add_marker(pytest.mark.thorough)
            if not item.get_closest_marker("every_release"):
                item.add_marker(pytest.mark.of_many)


# A compiled program takes up to 2 MB, JAX keeps thousands, and the C library keeps what JAX lets go of.
MOST_MEMORY = 1_200_000_000


def memory_in_use() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


class LittleMemory:
    """Drops what JAX has compiled after a test that leaves too much in memory."""

    def pytest_runtest_teardown(self) -> None:
        if memory_in_use() > MOST_MEMORY:
            jax.clear_caches()
            if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> jax.Array:
    """A random key of the test's own: different for every test and parameter, the same in every run."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def leak_check():
    """Fails the test when a tracer outlives its trace. Slow, because it defeats JAX's caches: ask for it by name."""
    with jax.checking_leaks():
        yield
