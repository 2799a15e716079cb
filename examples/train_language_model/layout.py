"""How the model lies on the devices: a name for each axis of its weights, and a mesh."""

import jax
import numpy as np

import equinox_like as eqx

RULES = [
    ("**.embedding.weight", "vocab embed"),
    ("**.query_proj.weight", "heads embed"),
    ("**.key_proj.weight", "heads embed"),
    ("**.value_proj.weight", "heads embed"),
    ("**.output_proj.weight", "embed heads"),
    ("**.mlp.layers[0].weight", "hidden embed"),
    ("**.mlp.layers[0].bias", "hidden"),
    ("**.mlp.layers[1].weight", "embed hidden"),
]
TENSOR = {"vocab": "model", "heads": "model", "hidden": "model"}


def make_layout(mesh: str) -> eqx.Layout:
    """Of a mesh such as `"data=4,model=2"`. Between the devices of `data` a weight is kept
    in parts, and gathered when it is used; those of `model` compute with their part."""
    params = {"embed": "data", **TENSOR}
    return eqx.Layout(mesh, RULES, params=params, compute={"batch": "data", **TENSOR})


def own_rows(batch: np.ndarray) -> np.ndarray:
    """The rows of this process, of those of all processes."""
    number = len(batch) // jax.process_count()
    return batch[jax.process_index() * number :][:number]
