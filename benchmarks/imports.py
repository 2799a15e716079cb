"""The time of `import equinox_like` after JAX and jaxtyping, in new processes."""

import os
import subprocess
import sys
import tempfile

from ._measure import Row, show, spread
from ._models import LIBRARIES

_CODE = """
import time, jax, jaxtyping
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""
_MODULES = {"ours": "equinox_like", "Equinox": "equinox"}


def run(rounds: int) -> None:
    times: dict[str, list[float]] = {key: [] for key in LIBRARIES}
    with tempfile.TemporaryDirectory() as cache:
        # Keep compiled bytecode, as on a user's machine.
        kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        for i in range(max(3, rounds // 4) + 1):
            for key in LIBRARIES:
                seconds = _seconds_to_import(_MODULES[key], os.environ | kept)
                if i:  # the first import compiles to bytecode
                    times[key].append(seconds)
    goals = {"ours": "15 ms"}
    show(
        "Import, beyond jax and jaxtyping",
        [
            Row(key, "time", spread(found), {}, goals.get(key, ""))
            for key, found in times.items()
        ],
    )


def _seconds_to_import(module: str, environment: dict[str, str]) -> float:
    # Measured within the process, whose start takes a second and varies by over 15 ms.
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout)
