"""filter_grad and filter_vmap outside of jit, compared with jax.grad and jax.vmap."""

from functools import partial
from typing import Any

import jax

from ._measure import compare, show
from ._models import LIBRARIES, nested_dict


def loss(tree: Any) -> jax.Array:
    return sum(x.sum() for x in jax.tree.leaves(tree))  # pyright: ignore[reportReturnType]


def add_one(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, tree)


def run(rounds: int) -> None:
    rows = []
    for size in (4, 40, 400):
        tree, batch = nested_dict(size), nested_dict(size, (5, 3))
        gradients: dict[str, Any] = {"jax": partial(jax.grad(loss), tree)}
        maps: dict[str, Any] = {"jax": partial(jax.vmap(add_one), batch)}
        for key, library in LIBRARIES.items():
            gradients[key] = partial(library.filter_grad(loss), tree)
            maps[key] = partial(library.filter_vmap(add_one), batch)
        some = max(3, rounds // 4)
        rows.append(compare(f"grad, {size} leaves", gradients, rounds=some))
        rows.append(compare(f"vmap, {size} leaves", maps, rounds=some))
    show("Eager transformations", rows)
