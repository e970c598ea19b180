"""Starting the processes of one program on this machine, and waiting until they end or hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

WORKER = "tests.serialization.distributed.worker"
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processor_seconds(pid: int) -> float:
    """What the process has used so far, 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exit_codes(running: list[subprocess.Popen[bytes]], *, quiet: float) -> list[int]:
    """Wait as long as the processes get on, however slow the machine: only `quiet` seconds of idling are a failure."""
    used, since = 0.0, time.monotonic()
    while None in [process.poll() for process in running]:
        now = sum(processor_seconds(process.pid) for process in running)
        if abs(now - used) > 0.5:  # less is what JAX's heartbeats take
            used, since = now, time.monotonic()
        if time.monotonic() - since > quiet:
            raise TimeoutError(f"the processes have been idle for {quiet:g} seconds")
        time.sleep(0.05)
    return [process.returncode for process in running]


def launch(scenario: str, folder: Path, *, started: int = 2, count: int = 2, quiet: float = 300) -> list[str]:
    """What `started` out of `count` processes printed, with their exit codes; raises if they hang."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    command = [sys.executable, "-W", "error::UserWarning", "-m", WORKER, scenario, port, str(count)]
    root = Path(__file__).parents[3]
    outputs = [folder / f"{scenario}-{i}.txt" for i in range(started)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index, output in enumerate(outputs):
            with output.open("w") as file:
                arguments = [*command, str(index), str(folder)]
                running.append(
                    subprocess.Popen(arguments, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        codes = exit_codes(running, quiet=quiet)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [f"{output.read_text()}\nexit code {code}" for output, code in zip(outputs, codes, strict=True)]
