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

PEERS = "Equinox", "ours"


def run(rounds: int) -> None:
    calls, compiling = measure(rounds)
    if calls:
        show("Libraries: a call, until the result is there", calls)
        show("Libraries: CPU time to trace and compile", compiling)


def measure(rounds: int) -> tuple[list[Row], list[Row]]:
    """The rows of calls, and those of compilation, for the libraries that are there."""
    needed = {name: ["equinox", *name.partition(":")[0].split()] for name in JOBS}
    missing = {x for names in needed.values() for x in names if not is_installed(x)}
    if missing:
        print(f"\nLibraries: not installed: {', '.join(sorted(missing))}")
    names = [name for name in JOBS if not missing.intersection(needed[name])]
    workers = {key: _Worker(key) for key in PEERS if names}
    calls, compiling = [], []
    for name in names:
        # Not counted, since it also loads modules and fills caches.
        compiled = {key: [w.ask(f"compile {name}")] for key, w in workers.items()}
        for _ in range(max(3, rounds // 8)):
            for key, worker in workers.items():
                compiled[key].append(worker.ask(f"compile {name}"))
        compiling.append(_row(name, {key: x[1:] for key, x in compiled.items()}))
        taken: dict[str, list[float]] = {key: [] for key in PEERS}
        for _ in range(rounds):
            for key, worker in workers.items():
                taken[key].append(worker.ask(f"run {name}"))
        calls.append(_row(name, taken))
    for worker in workers.values():
        worker.process.terminate()
    return calls, compiling


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _table(rounds: int) -> None:
    """Prints the table of docs/ecosystem.md."""
    print("| | a call with Equinox | with equinox_like | to trace and compile |")
    print("| --- | --- | --- | --- |")
    for call, compiled in zip(*measure(rounds), strict=True):
        ratios = (f"{row.ratios['ours'][0]:.2f}" for row in (call, compiled))
        time = f"{1e6 * call.seconds[0]:,.0f} us"
        print(f"| {call.name} | {time} | {' | '.join(ratios)} |")


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


def _flow(eqx: Any) -> Any:
    import jax
    import jax.numpy as jnp
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    base = Normal(jnp.zeros(2))
    flow = coupling_flow(jax.random.key(0), base_dist=base, flow_layers=4, nn_width=32)
    data = jax.random.normal(jax.random.key(1), (100, 2))
    return lambda flow, data: -flow.log_prob(data).mean(), (flow, data)


def _low_rank(eqx: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import quax
    from quax.examples import lora

    mlp = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    model = lora.loraify(mlp, rank=2, key=jax.random.key(1))
    return lambda model, x: quax.quaxify(model)(x).sum(), (model, jnp.ones(32))


def _mixture(eqx: Any) -> Any:
    import jax.numpy as jnp
    from distreqx import distributions

    parts = eqx.filter_vmap(distributions.Normal)(jnp.arange(3.0), jnp.ones(3))
    weights = distributions.Categorical(probs=jnp.ones(3) / 3)
    mixture = distributions.MixtureSameFamily(weights, parts)
    return lambda mixture, x: mixture.log_prob(x), (mixture, jnp.asarray(0.3))


def _expression(eqx: Any) -> Any:
    import jax.numpy as jnp
    import sympy
    import sympy2jax

    x, y = sympy.symbols("x y")
    model = sympy2jax.SymbolicModule([x**2 * y + 1.5, sympy.sin(x) * sympy.exp(-y)])
    return lambda model, x: sum(model(x=x, y=2 * x)), (model, jnp.asarray(0.5))


# The libraries that a job needs stand before the colon.
JOBS: dict[str, Callable[[Any], Any]] = {
    "diffrax: `Tsit5`": lambda eqx: _solve(eqx, "Tsit5"),
    "diffrax: its gradient": _gradient(lambda eqx: _solve(eqx, "Tsit5")),
    "diffrax: `Kvaerno5`, which is implicit": lambda eqx: _solve(eqx, "Kvaerno5"),
    "diffrax: gradient of `Kvaerno5`": _gradient(lambda eqx: _solve(eqx, "Kvaerno5")),
    "diffrax: a stochastic equation by `Euler`": lambda eqx: _solve(eqx, "Euler", 0.02),
    "diffrax: gradient of that equation": _gradient(lambda e: _solve(e, "Euler", 0.02)),
    "optimistix: `LevenbergMarquardt`": _fit,
    "lineax: `GMRES`": _linear,
    "lineax: its gradient": _gradient(_linear),
    "flowjax: density of a coupling flow": _flow,
    "flowjax: its gradient": _gradient(_flow),
    "quax: a perceptron with LoRA": _low_rank,
    "quax: its gradient": _gradient(_low_rank),
    "distreqx: density of a mixture": _mixture,
    "distreqx: its gradient": _gradient(_mixture),
    "sympy2jax: two expressions": _expression,
    "sympy2jax: their gradient": _gradient(_expression),
}


if __name__ == "__main__":
    if sys.argv[1] == "table":
        _table(40)
    else:
        _serve(sys.argv[1])
