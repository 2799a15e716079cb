"""Runs the models of `tests/nn/peer_models` with Equinox, and with the import changed.

Prints how far apart the results are, and what Equinox gives, which is what
`tests/nn/test_peer_models.py` records. Needs Equinox. Names of models may be given.
"""

import os
import sys
import types
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np

FOLDER = Path(__file__).parents[1] / "tests" / "nn" / "peer_models"


def results(name: str, library: str) -> np.ndarray:
    source = (FOLDER / f"{name}.py").read_text()
    source = source.replace("import equinox as eqx", f"import {library} as eqx")
    module = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    leaves = jax.tree.leaves(module.run(jax.random.PRNGKey(0)))
    return np.concatenate([np.ravel(leaf).astype(float) for leaf in leaves])


def main() -> None:
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.py")):
        theirs, ours = results(name, "equinox"), results(name, "equinox_like")
        difference = np.abs(theirs - ours) / np.maximum(1, np.abs(theirs))
        print(f"# largest difference: {difference.max():.1e}")
        print(f"{name!r}: {[round(float(x), 6) for x in theirs]},", flush=True)


main()
