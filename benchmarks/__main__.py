"""`python -m benchmarks`: runs all benchmarks; `--only NAME` runs one of them."""

import argparse
import platform

import jax

from . import (
    checkpoints,
    checks,
    convolutions,
    dispatch,
    eager,
    flax_networks,
    generation,
    gpu,
    imports,
    layers,
    layouts,
    libraries,
    loops,
    losses,
    memory,
    modules,
    networks,
    quantised,
    saving,
    sharded,
    training,
    trees,
)
from ._models import peer

SUBJECTS = {
    "dispatch": dispatch.run,
    "modes": dispatch.run_modes,
    "stages": dispatch.run_stages,
    "layout": dispatch.run_layout,
    "methods": dispatch.run_methods,
    "networks": networks.run,
    "flax": flax_networks.run,
    "training": training.run,
    "asynchrony": dispatch.run_asynchrony,
    "trees": trees.run,
    "modules": modules.run,
    "construction": modules.run_construction,
    "eager": eager.run,
    "layers": layers.run,
    "convolutions": convolutions.run,
    "checks": checks.run,
    "generation": generation.run,
    "loops": loops.run,
    "losses": losses.run,
    "libraries": libraries.run,
    "quantised": quantised.run,
    "saving": saving.run,
    "checkpoints": checkpoints.run,
    "imports": imports.run,
    "memory": memory.run,
    "sharded": sharded.run,
    "layouts": layouts.run,
    "gpu": gpu.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=SUBJECTS, action="append")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}, "
        f"{jax.default_backend()}; Equinox: "
        + (f"{peer.__version__}" if peer else "not installed")
    )
    print("Ratios to the first column: median (10 % - 90 % of rounds).")
    for name in options.only or SUBJECTS:
        SUBJECTS[name](7 if options.quick else 40)


main()
