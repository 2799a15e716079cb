"""The same arrays in nested dicts, in our Modules, and in Equinox's."""

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import equinox_like as eqx


def find_peer() -> ModuleType | None:
    try:
        return importlib.import_module("equinox")
    except ImportError:
        return None


peer = find_peer()
LIBRARIES: dict[str, Any] = {"ours": eqx} | ({"Equinox": peer} if peer else {})
SIZES = (4, 40, 400, 2000)


def nested_dict(leaves: int, shape: tuple[int, ...] = (3,)) -> dict[str, Any]:
    return {
        f"layer{i}": {"weight": jnp.ones(shape), "bias": jnp.zeros(shape)}
        for i in range(leaves // 2)
    }


def make_classes(library: Any) -> tuple[type, type, type]:
    """Three classes: a layer with two arrays and two static sizes, a layer with only
    two arrays, and a net with an activation function."""

    class Layer(library.Module):
        weight: jax.Array
        bias: jax.Array
        in_size: int = library.field(static=True, default=3)
        out_size: int = library.field(static=True, default=3)

    class PlainLayer(library.Module):
        weight: jax.Array
        bias: jax.Array

    class Net(library.Module):
        layers: list
        activation: Any = jax.nn.relu

    return Layer, PlainLayer, Net


CLASSES = {name: make_classes(library) for name, library in LIBRARIES.items()}


def net(name: str, tree: dict[str, Any], sizes: bool = True) -> Any:
    """The arrays of `tree` as a Module of the library of this name."""
    sized_class, plain_class, net_class = CLASSES[name]
    layer_class = sized_class if sizes else plain_class
    return net_class([layer_class(**layer) for layer in tree.values()])


def bare(net: Any) -> Any:
    """The net without its activation function, so that `jax.jit` accepts it."""
    return eqx.tree_at(lambda net: net.activation, net, None)


def fresh(tree: Any) -> Any:
    """A copy of the tree with new arrays, for donation."""
    return jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, tree)
