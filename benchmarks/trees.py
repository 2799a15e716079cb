"""Flattening and unflattening Modules beside nested dicts."""

from functools import partial
from typing import Any

import jax

from ._measure import compare, show
from ._models import LIBRARIES, SIZES, nested_dict, net


def run(rounds: int) -> None:
    rows = []
    for size in SIZES:
        tree = nested_dict(size)
        trees: dict[str, Any] = {"dicts": tree}
        trees |= {key: net(key, tree) for key in LIBRARIES}
        flatten = {key: partial(jax.tree.flatten, t) for key, t in trees.items()}
        rows.append(compare(f"flatten, {size} leaves", flatten, rounds=rounds))
        unflatten = {}
        for key, t in trees.items():
            leaves, treedef = jax.tree.flatten(t)
            unflatten[key] = partial(jax.tree.unflatten, treedef, leaves)
        rows.append(compare(f"unflatten, {size} leaves", unflatten, rounds=rounds))
    show("Trees: layers of two arrays and two static sizes, against dicts of two", rows)
