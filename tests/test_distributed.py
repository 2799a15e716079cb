"""The example of several processes, with two of them, agrees with one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "data_parallel.py"


def start(devices, *options):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *map(str, options)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        out, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, error
    return out


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_agree_with_one(tmp_path):
    alone, together = tmp_path / "one.npz", tmp_path / "two.npz"
    printed = finish(start(1, "--steps", 5, "--out", alone))
    assert "process 0 of 1, 1 of 1 devices" in printed
    address = f"127.0.0.1:{free_port()}"
    common = ("--steps", 5, "--coordinator", address, "--processes", 2)
    processes = [start(2, *common, "--process", i, "--out", together) for i in range(2)]
    outputs = [finish(process) for process in processes]
    for i, out in enumerate(outputs):
        assert f"process {i} of 2, 2 of 4 devices" in out
    losses = [float(out.split("loss")[1]) for out in (*outputs, printed)]
    assert losses[0] == losses[1] and abs(losses[0] - losses[2]) < 1e-5
    with np.load(alone) as one, np.load(together) as two:
        assert one.files == two.files and len(one.files) == 12
        for name in one.files:
            assert np.allclose(one[name], two[name], rtol=1e-5, atol=1e-6)
