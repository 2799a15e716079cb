"""Where the arrays that were read go: onto a device, or onto each its own shard."""

import math
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from .._compat.put import putter
from .._errors import LeafError
from .._tree.arrays import describe_array
from .._tree.match import spread
from .._tree.paths import plain_path


def shardings_for(like: Any, shardings: Any) -> list[Sharding | None]:
    """For each leaf of `like` the sharding of what takes its place: what the prefix tree
    `shardings` says, or else that of `like`; `None` for the default device.

    **Raises:**

    `LeafError` if `shardings` has something else, or a sharding that does not fit.
    """
    said = (spec for _, spec in spread(shardings, like, "shardings", "like"))
    return [
        _sharding_for(path, leaf, spec)
        for (path, leaf), spec in zip(
            jtu.tree_leaves_with_path(like), said, strict=True
        )
    ]


def _sharding_for(path: tuple[Any, ...], leaf: Any, spec: Any) -> Sharding | None:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    if spec is None:
        is_free = isinstance(leaf, jax.Array) and not leaf.committed
        return None if is_free else leaf.sharding
    name = f"`{plain_path(path)}` ({describe_array(leaf)})"
    if not isinstance(spec, Sharding):
        raise LeafError(
            f"`shardings` gives {spec!r} for {name}: it must be a "
            "`jax.sharding.Sharding`, such as `equinox_like.shardings` makes from "
            "rules.",
            path,
        )
    try:
        spec.shard_shape(leaf.shape)
    except ValueError as error:
        problem = f"`shardings` gives {spec} for {name}, which does not fit: {error}"
        raise LeafError(problem, path) from None
    return spec


def local_ranges(
    shape: tuple[int, ...], sharding: Sharding | None
) -> list[tuple[int, int]] | None:
    """Which elements of an array, in its flat order, this process has in shards: for each
    shard from its first element to its last. `None` where it has all of them."""
    if sharding is None or sharding.is_fully_addressable or 0 in shape:
        return None
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = set()
    indices = sharding.addressable_devices_indices_map(shape).values()
    for index in filter(None, indices):  # none of them is None, whatever its type says
        bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
        first = sum(low * n for (low, _), n in zip(bounds, strides, strict=True))
        last = sum((high - 1) * n for (_, high), n in zip(bounds, strides, strict=True))
        ranges.add((first, last + 1))
    return sorted(ranges)


def put_like(
    like: list[Any], leaves: list[Any], shardings: list[Sharding | None]
) -> list[Any]:
    """Converts the arrays that were read to JAX arrays, where `like` has one.

    On the CPU without a copy, where the data are aligned.
    """
    put = putter(copy=False)
    placed = []
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        is_wanted = isinstance(like[i], jax.Array | jax.ShapeDtypeStruct)
        if not is_wanted or leaf is like[i]:
            continue
        if sharding is None:
            leaves[i] = put(leaf) if isinstance(leaf, np.ndarray) else leaf
        elif not sharding.is_fully_addressable:
            # `device_put` would read all of it, to compare it with other processes.
            leaves[i] = jax.make_array_from_callback(
                leaf.shape, sharding, leaf.__getitem__
            )
        else:
            placed.append(i)
    # All at once.
    arrays = jax.device_put([leaves[i] for i in placed], [shardings[i] for i in placed])
    for i, array in zip(placed, arrays, strict=True):
        leaves[i] = array
    return leaves
