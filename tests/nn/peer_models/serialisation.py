"""A file with hyperparameters in its first line, and the leaves of a model after it."""

import json
import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    scale: jax.Array
    steps: int

    def __call__(self, x):
        return self.scale * self.mlp(x)


def make(*, width, depth, key):
    mlp = eqx.nn.MLP(2, 1, width, depth, key=key)
    return Model(mlp, jnp.array(2.0, jnp.bfloat16), 0)


def save(path, hyperparameters, model):
    with open(path, "wb") as file:
        file.write((json.dumps(hyperparameters) + "\n").encode())
        eqx.tree_serialise_leaves(file, model)


def load(path):
    with open(path, "rb") as file:
        hyperparameters = json.loads(file.readline().decode())
        like = eqx.filter_eval_shape(make, key=jr.PRNGKey(0), **hyperparameters)
        return eqx.tree_deserialise_leaves(file, like)


def save_halves(file, leaf):
    if eqx.is_inexact_array(leaf):
        leaf = leaf.astype(jnp.float16)
    eqx.default_serialise_filter_spec(file, leaf)


def load_halves(file, leaf):
    if not eqx.is_inexact_array(leaf):
        return eqx.default_deserialise_filter_spec(file, leaf)
    half = eqx.default_deserialise_filter_spec(file, leaf.astype(jnp.float16))
    return half.astype(leaf.dtype)


def run(key):
    hyperparameters = {"width": 8, "depth": 2}
    model = make(key=key, **hyperparameters)
    model = eqx.tree_at(lambda m: m.steps, model, replace=3)
    x = jnp.array([1.0, -2.0])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.eqx"
        save(path, hyperparameters, model)
        loaded = load(path)
        eqx.tree_serialise_leaves(path, model.mlp, filter_spec=save_halves)
        rounded = eqx.tree_deserialise_leaves(path, model.mlp, filter_spec=load_halves)
    return {
        "same": eqx.tree_equal(loaded, model),
        "steps": loaded.steps,
        "out": loaded(x),
        "rounded": rounded(x),
    }
