"""Libraries written for Equinox, with Equinox and with equinox_like in its place.

A process can hold only one of the two, so each has its own, and they take turns. The time
to trace and compile is CPU time, which other load on the machine affects least.
"""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ._measure import Row, show, spread

LIBRARIES = "Equinox", "ours"


def run(rounds: int) -> None:
    needed = "equinox", "diffrax", "optimistix", "lineax"
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"\nLibraries: needs {', '.join(missing)}")
        return
    workers = {key: _Worker(key) for key in LIBRARIES}
    compiling, running = [], []
    for name in JOBS:
        # Not counted, since it also loads modules and fills caches.
        compiled = {key: [w.ask(f"compile {name}")] for key, w in workers.items()}
        for _ in range(max(3, rounds // 8)):
            for key, worker in workers.items():
                compiled[key].append(worker.ask(f"compile {name}"))
        compiling.append(_row(name, {key: x[1:] for key, x in compiled.items()}))
        taken: dict[str, list[float]] = {key: [] for key in LIBRARIES}
        for _ in range(rounds):
            for key, worker in workers.items():
                taken[key].append(worker.ask(f"run {name}"))
        running.append(_row(name, taken))
    for worker in workers.values():
        worker.process.terminate()
    show("Libraries: a call, until the result is there", running)
    show("Libraries: CPU time to trace and compile", compiling)


def _row(name: str, times: dict[str, list[float]]) -> Row:
    base, ours = times["Equinox"], times["ours"]
    ratios = [a / b for a, b in zip(ours, base, strict=True)]
    return Row(name, "Equinox", spread(base), {"ours": spread(ratios)})


class _Worker:
    """A process that answers each line with a number of seconds."""

    def __init__(self, library: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.libraries", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(question, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def _serve(library: str) -> None:
    if library == "ours":
        importlib.import_module("equinox_like.as_equinox")
    eqx = importlib.import_module("equinox")
    import jax

    functions = {}
    for line in sys.stdin:
        what, name = line.strip().split(" ", 1)
        if what == "compile":
            jax.clear_caches()
            fun, args = JOBS[name](eqx)
            functions[name] = eqx.filter_jit(fun), args
            start = time.process_time()
            jax.block_until_ready(functions[name][0](*args))
            print(time.process_time() - start, flush=True)
            continue
        fun, args = functions[name]
        jax.block_until_ready(fun(*args))
        start = time.perf_counter()
        for _ in range(_CALLS):
            jax.block_until_ready(fun(*args))
        print((time.perf_counter() - start) / _CALLS, flush=True)


_CALLS = 20


def _solve(eqx: Any, solver: str, steps: float | None = None) -> Any:
    """A neural differential equation; `steps` is the size of constant steps."""
    import diffrax
    import jax
    import jax.numpy as jnp

    model = eqx.nn.MLP(2, 2, 32, 2, key=jax.random.key(0))
    term = diffrax.ODETerm(lambda t, y, model: model(y))
    control = diffrax.PIDController(rtol=1e-5, atol=1e-5)
    if steps is not None:
        path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (2,), jax.random.key(1))
        noise = diffrax.ControlTerm(lambda t, y, model: 0.1 * jnp.eye(2), path)
        term, control = diffrax.MultiTerm(term, noise), diffrax.ConstantStepSize()

    def solve(model: Any, y: Any) -> Any:
        method = getattr(diffrax, solver)()
        found = diffrax.diffeqsolve(
            term, method, 0, 1, steps or 0.01, y, model, stepsize_controller=control
        )
        return found.ys.sum()

    return solve, (model, jnp.ones(2))


def _gradient(job: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(eqx: Any) -> Any:
        fun, args = job(eqx)
        return eqx.filter_grad(fun), args

    return make


def _fit(eqx: Any) -> Any:
    import jax.numpy as jnp
    import optimistix

    def fit(target: Any) -> Any:
        solver = optimistix.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
        residuals = lambda y, a: (y - a) ** 3 + y - 1  # noqa: E731
        return optimistix.least_squares(residuals, solver, jnp.zeros(3), target).value

    return fit, (jnp.ones(3),)


def _linear(eqx: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import lineax

    def solve(matrix: Any, vector: Any) -> Any:
        operator, method = lineax.MatrixLinearOperator(matrix), lineax.GMRES(1e-5, 1e-5)
        return lineax.linear_solve(operator, vector, method).value.sum()

    noise = jax.random.normal(jax.random.key(3), (20, 20))
    return solve, (3 * jnp.eye(20) + 0.1 * noise, jnp.ones(20))


JOBS: dict[str, Callable[[Any], Any]] = {
    "diffrax, Tsit5": lambda eqx: _solve(eqx, "Tsit5"),
    "its gradient": _gradient(lambda eqx: _solve(eqx, "Tsit5")),
    "diffrax, Kvaerno5": lambda eqx: _solve(eqx, "Kvaerno5"),
    "gradient of that": _gradient(lambda eqx: _solve(eqx, "Kvaerno5")),
    "diffrax, an SDE by Euler": lambda eqx: _solve(eqx, "Euler", 0.02),
    "gradient of the SDE": _gradient(lambda eqx: _solve(eqx, "Euler", 0.02)),
    "optimistix, least squares": _fit,
    "lineax, GMRES": _linear,
    "gradient of GMRES": _gradient(_linear),
}


if __name__ == "__main__":
    _serve(sys.argv[1])
