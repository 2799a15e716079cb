"""Programs in processes of their own: several devices each, several together."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def start(script: Path, *options, devices: int) -> subprocess.Popen:
    """Starts Python on a script, with so many CPU devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, options)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 300) -> str:
    """What it printed, once it has ended well."""
    try:
        out, error = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, f"{process.returncode}: {out}\n{error}"
    return out


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(script: Path, *options, processes: int, devices: int) -> list[str]:
    """Runs a script in several processes at once.

    The script's first arguments are the coordinator's address, the number of processes, and
    the number of its own process.
    """
    address = f"127.0.0.1:{free_port()}"
    started = [
        start(script, address, processes, i, *options, devices=devices)
        for i in range(processes)
    ]
    return [finish(process) for process in started]
