"""What `import equinox_like` adds to importing JAX and jaxtyping, in new processes."""

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
        # As on a user's machine, where compiled bytecode is kept.
        kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        for i in range(max(3, rounds // 4) + 1):
            for key in LIBRARIES:
                seconds = _seconds_to_import(_MODULES[key], os.environ | kept)
                if i:  # the first time, all is compiled to bytecode
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
    # Taken within the process: its start takes a second, which varies by more than 15 ms.
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout)
