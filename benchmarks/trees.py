"""Flattening and unflattening of Modules and nested dicts; and tree functions."""

from functools import partial
from typing import Any

import jax

from ._measure import Contenders, compare, show
from ._models import LIBRARIES, SIZES, nested_dict, net


def run(rounds: int) -> None:
    for sizes in (True, False):
        rows = []
        for size in SIZES:
            tree = nested_dict(size)
            trees: dict[str, Any] = {"dicts": tree}
            trees |= {key: net(key, tree, sizes) for key in LIBRARIES}
            flatten = {key: partial(jax.tree.flatten, t) for key, t in trees.items()}
            unflatten = {
                key: partial(jax.tree.unflatten, treedef, leaves)
                for key, (leaves, treedef) in (
                    (key, jax.tree.flatten(t)) for key, t in trees.items()
                )
            }
            for name, contenders, goal in (
                ("flatten", flatten, "1.25x"),
                ("unflatten", unflatten, "3.3x"),
            ):
                row = f"{name}, {size} leaves"
                rows.append(compare(row, contenders, goal=goal, rounds=rounds))
        layers = "two arrays and two static sizes" if sizes else "two arrays"
        show(f"Trees: layers of {layers}, against dicts of two", rows)
    run_functions(rounds)


def run_functions(rounds: int) -> None:
    """Each function, compared with one flatten and unflatten of our Modules.

    Equinox's functions run on its own Modules.
    """
    rows = []
    for size in SIZES[:3]:
        trees = {key: net(key, nested_dict(size)) for key in LIBRARIES}
        for name, goal, prepare in (
            ("partition", "4x", _partition),
            ("partition by a tree", "", _partition_by_a_tree),
            ("combine", "4x", _combine),
            ("tree_at, one leaf", "5x", _tree_at),
        ):
            contenders: Contenders = {"round trip": partial(_round_trip, trees["ours"])}
            for key, library in LIBRARIES.items():
                contenders[key] = prepare(library, trees[key])
            row = f"{name}, {size} leaves"
            rows.append(compare(row, contenders, goal=goal, rounds=rounds))
    show("Trees: against a flatten and an unflatten of the same Modules", rows)


def _round_trip(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, leaves)


def _partition(library: Any, tree: Any) -> Any:
    return partial(library.partition, tree, library.is_array)


def _partition_by_a_tree(library: Any, tree: Any) -> Any:
    return partial(library.partition, tree, jax.tree.map(library.is_array, tree))


def _combine(library: Any, tree: Any) -> Any:
    return partial(library.combine, *library.partition(tree, library.is_array))


def _tree_at(library: Any, tree: Any) -> Any:
    return partial(library.tree_at, lambda m: m.layers[0].weight, tree, 1.0)
