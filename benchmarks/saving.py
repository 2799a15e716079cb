"""Saving and loading, compared with safetensors' own functions on NumPy arrays.

No contender waits until the data are on the disk. Loaded files were read before, so
they come from the system's memory. With `verify=False`, ours only maps the file.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import equinox_like as eqx

from ._measure import compare, show
from ._models import peer


def run(rounds: int) -> None:
    try:
        from safetensors.numpy import load_file, save_file
    except ImportError:
        print("\nSaving: needs the package safetensors")
        return
    few = max(3, rounds // 8)
    for title, tree in (
        ("1 GB in 16 arrays", _arrays(16, (1 << 24,))),
        ("8192 arrays of 8 numbers", _arrays(8192, (8,))),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = {
                key: str(Path(folder, key))
                for key in ("safetensors", "ours", "ours, .eqx", "Equinox")
            }
            host = {name: np.asarray(x) for name, x in tree.items()}
            saving: dict[str, Any] = {
                "safetensors": partial(save_file, host, path["safetensors"]),
                "ours": partial(eqx.save, path["ours"], tree),
                "ours, .eqx": partial(
                    eqx.tree_serialise_leaves, path["ours, .eqx"], tree
                ),
            }
            loading: dict[str, Any] = {
                "safetensors": lambda p=path["safetensors"]: _put(load_file(p)),
                "ours": partial(eqx.load, path["ours"], tree),
                "ours, verify=False": partial(
                    eqx.load, path["ours"], tree, verify=False
                ),
                "ours, .eqx": partial(
                    eqx.tree_deserialise_leaves, path["ours, .eqx"], tree
                ),
            }
            if peer:
                saving["Equinox"] = partial(
                    peer.tree_serialise_leaves, path["Equinox"], tree
                )
                loading["Equinox"] = partial(
                    peer.tree_deserialise_leaves, path["Equinox"], tree
                )
            goals = {"saving": "peer's", "loading": "0.1 peer's"}
            show(
                f"Saving and loading: {title}",
                [
                    compare(name, contenders, goal=goals[name], rounds=few, repeats=1)
                    for name, contenders in (("saving", saving), ("loading", loading))
                ],
            )


def _arrays(count: int, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    return {f"w{i:04}": jnp.full(shape, i, jnp.float32) for i in range(count)}


def _put(arrays: dict[str, np.ndarray]) -> Any:
    return jax.block_until_ready(jax.device_put(arrays))
