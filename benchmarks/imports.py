"""What `import equinox_like` adds to importing JAX and jaxtyping, in new processes."""

import os
import subprocess
import sys
import tempfile

import numpy as np

from ._models import LIBRARIES

_CODE = """
import time, jax, jaxtyping
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""
_MODULES = {"ours": "equinox_like", "peer": "equinox"}


def run(rounds: int) -> None:
    # As on a user's machine, where compiled bytecode is kept.
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": tempfile.mkdtemp(),
    }
    times = {key: [] for key in LIBRARIES}
    for i in range(max(3, rounds // 4) + 1):
        for key in LIBRARIES:
            code = _CODE.format(module=_MODULES[key])
            out = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            )
            if i:  # the first one may have to compile to bytecode
                times[key].append(float(out.stdout))
    print("\nImport, beyond jax and jaxtyping (goal: 15 ms)")
    for key, found in times.items():
        low, middle, high = np.percentile(found, [10, 50, 90]) * 1e3
        print(f"{key:34}{middle:.1f} ms ({low:.1f}-{high:.1f})")
