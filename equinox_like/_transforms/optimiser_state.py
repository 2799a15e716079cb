"""Which arrays of a tree are its parameters, and how the state of their optimiser is split.

An array of the state belongs to the parameter with whose path its own path ends.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._module.module import Module
from .._tree.arrays import describe_array
from .._tree.nodes import Nodes, plain_path


def parameters_of(tree: Any, follow: Any, otherwise: Any) -> Any:
    """The parameters in a tree that may have the state of their optimiser too.

    `follow` is the parameters, or a function from `tree` to them. If it is `None` they are
    the first part of the tree like which there is one in the state, a named tuple; else the
    only Module; else `otherwise`.
    """
    if follow is not None:
        is_function = callable(follow) and jtu.all_leaves([follow])
        return follow(tree) if is_function else follow

    def is_module(x: Any) -> bool:
        return isinstance(x, Module)

    states = _outermost(_is_state, tree)
    kinds = {_kind(x) for state in states for x in Nodes(state, is_leaf=is_module).all}

    def is_copied(x: Any) -> bool:
        return _kind(x) is not None and _kind(x) in kinds

    def outside(is_wanted: Callable[[Any], bool]) -> list[Any]:
        found = _outermost(lambda x: _is_state(x) or is_wanted(x), tree)
        return [x for x in found if is_wanted(x)]

    if found := outside(is_copied):
        return found[0]
    modules = outside(is_module)
    return modules[0] if len(modules) == 1 else otherwise


def _is_state(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _kind(x: Any) -> Any:
    """What parameters and their copies in a state have in common; `None` for other nodes.

    The arrays of a copy may have other shapes, and be fewer.
    """
    if isinstance(x, Module):
        return type(x)
    if type(x) is dict:
        return (dict, *x) if x else None
    if type(x) in (list, tuple):
        kinds = tuple(map(_kind, x))
        return (type(x), *kinds) if kinds and None not in kinds else None
    return None


def _outermost(is_wanted: Callable[[Any], bool], tree: Any) -> list[Any]:
    return [x for x in jtu.tree_leaves(tree, is_leaf=is_wanted) if is_wanted(x)]


class Owner(NamedTuple):
    """The parameter that an array of a state belongs to, and where it is below that."""

    path: tuple[Any, ...]
    array: Any
    below: tuple[Any, ...]

    @property
    def name(self) -> str:
        return plain_path(self.path)


def owner_of(path: tuple[Any, ...], params: dict[Any, Any]) -> Owner | None:
    """The owner of the array at `path`. `params`: from the paths of parameters to them.

    An attribute is not below a parameter: in `[0].count`, `[0]` is part of an optimiser.
    """
    for stop in range(len(path), 0, -1):
        below = path[stop:]
        if any(isinstance(key, jtu.GetAttrKey) for key in below):
            return None
        for start in range(stop):
            if path[start:stop] in params:
                return Owner(path[start:stop], params[path[start:stop]], below)
    return None


def following(
    option: str, spec: PartitionSpec, owner: Owner, path: tuple[Any, ...], x: Any
) -> PartitionSpec:
    """The spec of `x`, in the state of an optimiser, if that of its parameter is `spec`.

    Raises `ValueError` if the shapes do not tell it.
    """
    like, shape, name = owner.array.shape, x.shape, plain_path(path)
    parts = (*spec, *[None] * (len(like) - len(spec)))
    extra = max(len(shape) - len(like), 0)
    # A list in place of a parameter has an array for each axis: in `optax.sm3` a vector,
    # in Shampoo a matrix.
    for axis, size in enumerate(like):
        if owner.below == (jtu.SequenceKey(axis),) and {*shape} == {size}:
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
    # Where the state begins is another path in another tree.
    named = [i for i, key in enumerate(path) if isinstance(key, jtu.GetAttrKey)]
    pattern = "**" + jtu.keystr(path[named[0] if named else 0 :])
    raise ValueError(
        f"`{option}` gives {spec} for `{owner.name}` ({describe_array(owner.array)}). The "
        f"shapes do not tell how `{name}` ({describe_array(x)}) follows it. Put a rule for "
        f"that first. To replicate it: `({pattern!r}, PartitionSpec())`."
    )
