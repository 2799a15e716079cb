"""Networks of layers cost no more than the same in plain `jax.numpy`, as XLA counts it."""

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path

import jax
import pytest

import equinox_like as eqx

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def networks():
    """Those of the benchmark, which is no part of what is installed."""
    spec = importlib.util.spec_from_file_location(
        "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    yield importlib.import_module("benchmarks.layers").networks()
    for name in [name for name in sys.modules if name.startswith("benchmarks")]:
        del sys.modules[name]


def costs(function, model, x, kind):
    arrays, static = eqx.partition(model, eqx.is_array)

    def forward(arrays, x):
        return jax.vmap(partial(function, eqx.combine(arrays, static)))(x)

    if kind == "forward":
        program = forward
    else:
        program = jax.value_and_grad(lambda a, x: (forward(a, x) ** 2).sum())
    found = jax.jit(program).lower(arrays, x).compile().cost_analysis()
    return found["flops"], found["bytes accessed"]


@pytest.mark.parametrize("kind", ["forward", "gradient"])
@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer block", "GRU, 256 steps"])
def test_operations_and_bytes_are_those_of_plain_jax(networks, name, kind):
    make, call, plain, x = networks[name]
    model = make(eqx)
    ours, theirs = (costs(f, model, x, kind) for f in (call, plain))
    # 0.1 % for what another version of XLA may merge in another way.
    assert all(a <= 1.001 * b for a, b in zip(ours, theirs, strict=True))
