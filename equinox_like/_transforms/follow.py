"""How the state of an optimiser is split, from the shardings of the parameters."""

import itertools
import math
from typing import Any

import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._tree.arrays import describe_array
from .._tree.filters import is_array_or_struct
from .._tree.nodes import plain_path

FOLLOW = " If it is in the state of an optimiser, pass the parameters: `follow=params`."


def owners_of(tree: Any, follow: Any) -> dict[Any, tuple[str, Any]]:
    """From the key path of a parameter to its name and itself.

    `follow`: the parameters, or a function from `tree` to them. A parameter that is in
    `tree` has the name that it has there.
    """
    params = follow(tree) if callable(follow) and jtu.all_leaves([follow]) else follow
    paths = {id(x): path for path, x in jtu.tree_leaves_with_path(tree)}
    return {
        path: (plain_path(paths.get(id(x), path)), x)
        for path, x in jtu.tree_leaves_with_path(params)
        if is_array_or_struct(x)
    }


def owner_of(path: tuple[Any, ...], owners: dict[Any, tuple[str, Any]]) -> Any:
    """The name of the parameter that `path` belongs to, the parameter, and the rest of
    `path` below its own; or `None`.

    An attribute is not below a parameter: in `[0].count`, `[0]` is part of an optimiser.
    """
    for stop in range(len(path), 0, -1):
        below = path[stop:]
        if any(isinstance(key, jtu.GetAttrKey) for key in below):
            return None
        for start in range(stop):
            if path[start:stop] in owners:
                return *owners[path[start:stop]], below
    return None


def following(
    option: str, spec: PartitionSpec, owner: tuple[str, Any, Any], name: str, x: Any
) -> PartitionSpec:
    """The spec of `x`, in the state of an optimiser, if that of its parameter is `spec`.

    Raises `ValueError` if the shapes do not tell it.
    """
    like, shape, below = owner[1].shape, x.shape, owner[2]
    parts = (*spec, *[None] * (len(like) - len(spec)))
    extra = max(len(shape) - len(like), 0)
    # A list in place of a parameter has an array for each axis: in `optax.sm3` a vector,
    # in Shampoo a matrix.
    for axis, size in enumerate(like):
        if below == (jtu.SequenceKey(axis),) and {*shape} == {size}:
            return PartitionSpec(parts[axis], *[None] * (len(shape) - 1))
    if shape == like:
        return spec
    if math.prod(shape) == 1:
        return PartitionSpec()
    # `optax.adafactor` has means over the largest axis, and over the second largest one.
    order = sorted(range(len(like)), key=lambda i: like[i])
    lost = order[-1:] * (".v_row" in name) + order[-2:-1] * (".v_col" in name)
    found = {
        PartitionSpec(*[None] * extra, *(parts[i] for i in axes))
        for axes in itertools.combinations(range(len(like)), len(shape) - extra)
        if tuple(like[i] for i in axes) == shape[extra:] and not {*lost} & {*axes}
    }
    if len(found) == 1:
        return found.pop()
    raise ValueError(
        f"`{option}` gives {spec} for `{owner[0]}` ({describe_array(owner[1])}). The "
        f"shapes do not tell how `{name}` ({describe_array(x)}) follows it. Put a rule for "
        f"that first. To replicate it: `({name!r}, PartitionSpec())`."
    )
