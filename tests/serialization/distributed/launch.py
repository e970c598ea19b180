"""Starting the processes of one program on this machine, and waiting for them with a limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(scenario: str, folder: Path, *, started: int = 2, count: int = 2, seconds: float = 240) -> list[str]:
    """What `started` out of `count` processes printed, with their exit codes; raises if they take too long."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        "-m",
        "tests.serialization.distributed.worker",
        scenario,
        port,
        str(count),
    ]
    root = Path(__file__).parents[3]
    outputs = [folder / f"{scenario}-{i}.txt" for i in range(started)]
    running = []
    for index, output in enumerate(outputs):
        with output.open("w") as file:
            arguments = [*command, str(index), str(folder)]
            running.append(
                subprocess.Popen(arguments, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
    limit = time.monotonic() + seconds
    try:
        codes = [process.wait(max(limit - time.monotonic(), 0.1)) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [f"{output.read_text()}\nexit code {code}" for output, code in zip(outputs, codes, strict=True)]
