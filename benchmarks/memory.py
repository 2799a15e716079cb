"""Memory leaks: resident memory of a process that compiles many functions.

One process creates functions, calls each once and drops it. Another calls one function
with ever new static values. Both compile at each call. Memory that keeps growing with
the number of calls is a leak. JAX's own caches grow too, up to a limit.
"""

import subprocess
import sys

from ._models import LIBRARIES

_HEAD = """
import gc, sys
import jax, jax.numpy as jnp

def resident():
    gc.collect()
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

def report(points, step):
    step(-1)
    done = 0
    for point in points:
        for i in range(done, point):
            step(i)
        done = point
        print(resident(), len(jax.live_arrays()), flush=True)

x = jnp.ones(())
points = [int(p) for p in sys.argv[1:]]
"""
_JITS = {
    "jax.jit": "jit = jax.jit; static = {'static_argnums': 1}",
    "ours": "import equinox_like as eqx; jit = eqx.filter_jit; static = {}",
    "Equinox": "import equinox as eqx; jit = eqx.filter_jit; static = {}",
}
_CLOSURES = """
def step(i):
    captured = jnp.full(10_000, i, jnp.float32)
    jit(lambda x: x + captured[0])(x)
report(points, step)
"""
_STATICS = """
f = jit(lambda x, n: x + n, **static)
report(points, lambda i: f(x, i))
"""
_WORK = (
    ("closures made and dropped", _CLOSURES, 2_000),
    ("static values", _STATICS, 10_000),
)


def run(rounds: int) -> None:
    if not sys.platform.startswith("linux"):
        print("\nMemory: needs Linux's /proc")
        return
    fewer = 1 if rounds >= 40 else 10
    for title, code, number in _WORK:
        points = [number * part // (5 * fewer) for part in range(6)]
        print(f"\nResident memory in MB, and live arrays: {title}")
        print(f"{'':12}" + "".join(f"{point:>16}" for point in points))
        for name in ("jax.jit", *LIBRARIES):
            found = _measured(_HEAD + _JITS[name] + code, points)
            cells = (f"{float(mb):.0f} ({arrays})" for mb, arrays in found)
            print(f"{name:12}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def _measured(code: str, points: list[int]) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, points)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split() for line in done.stdout.splitlines()]
