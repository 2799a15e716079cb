"""Trees on devices: `filter_shard`, `filter_device_put`, and whether processes agree."""

from typing import Any, TypeVar
from zlib import crc32

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from .._compat.tracing import at_top_level
from .._core.base import frames_hidden
from .._core.describe import describe
from .._core.sharding import check_fits, constrain, is_sharding
from .._errors import DonationError
from .._io.checksums import own_parts, sum_of_parts
from .._jit.donation import delete_array
from .._tree.arrays import buffer_pointers, describe_array, is_concrete, is_deleted
from .._tree.copies import copy_array
from .._tree.deleted import fate_of
from .._tree.filters import is_array
from .._tree.match import spread
from .._tree.nodes import path_str

_Tree = TypeVar("_Tree")


@frames_hidden
def filter_shard(x: _Tree, device_or_shardings: Any) -> _Tree:
    """Shards the arrays of a tree, or moves them to a device.

    **Arguments:**

    - `x`: any pytree. NumPy arrays become JAX arrays; everything else is passed on.
    - `device_or_shardings`: a device, a sharding, a `PartitionSpec` for the mesh in use, or
        a prefix tree of these.

    Within `jax.jit` this is a constraint on the sharding of the arrays. For the
    explicit axes of a mesh it is a `jax.sharding.reshard`. Within `jax.shard_map` it
    concerns the axes that are not manual. A constraint moves nothing between memories,
    such as `memory_kind="pinned_host"`: use [`equinox_like.filter_device_put`][].

    **Returns:**

    The tree with the same values.

    **Raises:**

    `ValueError` if there is no sharding for an array, or none that fits its shape, if it
    names another memory than that of a traced array, or if several processes pass
    different values;
    [`equinox_like.DonationError`][] if an array was deleted before; `TypeError` for
    a NumPy array of a dtype that JAX does not have, such as text. Each names its path.

    The result shares arrays with `x`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        from jax.sharding import PartitionSpec

        mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        with jax.set_mesh(mesh):
            model = eqx.filter_shard(model, PartitionSpec())  # a copy on each device
        assert model.weight.sharding.is_fully_replicated
        ```
    """

    def shard(name: str, x: Any, spec: Any) -> Any:
        _check_not_deleted("filter_shard", name, x)
        spec = _fitting("device_or_shardings", name, x, spec)
        if at_top_level():
            return jax.device_put(x, spec)
        return constrain("device_or_shardings", name, jnp.asarray(x), spec)

    return _placed("device_or_shardings", "x", x, device_or_shardings, shard)


def filter_device_put(
    tree: _Tree,
    device: Any = None,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
) -> _Tree:
    """`jax.device_put` for any tree, with strict rules for `donate` and `may_alias`.

    **Arguments:**

    - `tree`: any pytree. NumPy arrays become JAX arrays; everything else is passed on.
    - `device`: a device, a sharding, a `PartitionSpec` for the mesh in use, a
        `jax.memory.Space`, which keeps the sharding, a prefix tree of these, or `None` to
        leave an array where it is.
        Within `jax.jit` too, arrays are moved and split; only `"unpinned_host"`, and
        PRNG keys on the host that are split over a mesh, are refused there.
    - `donate`: whether the JAX arrays of `tree` are deleted. An array whose memory NumPy
        holds stays alive.
    - `may_alias`: whether the result may share memory with `tree`. By default it may if
        nothing is donated.

    **Returns:**

    The tree with the same values.

    **Raises:**

    `ValueError` if both `donate` and `may_alias` are true, if arrays are donated while they
    are traced, or if a sharding does not fit an array. [`equinox_like.DonationError`][] if
    an array was deleted before; `TypeError` for a NumPy array of a dtype that JAX does not
    have, such as text. Each names the path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import numpy as np

        batch = {"x": np.ones((2, 3)), "name": "first"}
        moved = eqx.filter_device_put(batch, jax.devices()[0], may_alias=False)
        batch["x"][:] = 0
        assert moved["x"].sum() == 6 and moved["name"] == "first"
        ```
    """
    if donate and may_alias:
        raise ValueError(
            "`filter_device_put`: a donated array is deleted, so `donate` and "
            "`may_alias` cannot both be true."
        )
    if donate and not at_top_level():
        raise ValueError(
            "`filter_device_put`: nothing can be donated under a transformation of JAX, "
            "such as `jax.jit` or `jax.grad`. Leave out `donate=True`."
        )
    shares = not donate if may_alias is None else may_alias

    def put(name: str, x: Any, spec: Any) -> Any:
        _check_not_deleted("filter_device_put", name, x)
        if not shares and not isinstance(x, jax.Array):
            x = np.array(x)
        if spec is None or isinstance(spec, jax.memory.Space):
            out = jax.device_put(x, spec)
        else:
            spec = _fitting("device", name, x, spec)
            out = jax.device_put(x, spec)
            if not at_top_level():
                # JAX moves it between memories, and ignores the automatic axes.
                out = constrain("device", name, out, spec)
        if shares or not is_concrete(x) or not is_concrete(out):
            return out
        overlap = not set(buffer_pointers(x)).isdisjoint(buffer_pointers(out))
        return copy_array(out) if overlap else out

    out = _placed("device", "tree", tree, device, put)
    if donate:
        # At the end, because a tree may hold an array twice. JAX's own `donate` is not
        # used: it leaves most arrays alive, and deletes too much of typed PRNG keys.
        for x in filter(is_concrete, jtu.tree_leaves(tree)):
            delete_array(x)
    return out


def _check_not_deleted(function: str, name: str, x: Any) -> None:
    if is_deleted(x):
        raise DonationError(
            f"`{function}`: `{name}` ({describe_array(x)}) was {fate_of(x)}."
        )


def _placed(option: str, name: str, tree: Any, specs: Any, place: Any) -> Any:
    leaves, treedef = jtu.tree_flatten_with_path(tree)
    chosen = [spec for _, spec in spread(specs, tree, option, name)]

    def place_at(path: Any, x: Any, spec: Any) -> Any:
        try:
            return place(path_str(path, name), x, spec)
        except (TypeError, AssertionError) as e:
            at = f"`{path_str(path, name)}` ({describe_array(x)})"
            if isinstance(e, TypeError):  # a dtype that JAX does not have, such as text
                raise TypeError(f"{at} cannot be placed on a device: {e}") from e
            if jax.process_count() == 1:
                raise
            raise _differs(at) from e  # JAX compares the values

    return treedef.unflatten(
        [
            place_at(path, x, spec) if is_array(x) else x
            for (path, x), spec in zip(leaves, chosen, strict=True)
        ]
    )


def _differs(at: str) -> ValueError:
    return ValueError(
        f"{at} is not the same in all processes. Make a model from the same key in each. "
        "If each has rows of its own, call `jax.make_array_from_process_local_data`."
    )


def _fitting(option: str, name: str, x: Any, spec: Any) -> Any:
    """The sharding to give JAX for the array `x`; raises if `spec` does not fit it."""
    if isinstance(spec, jax.Device):
        return SingleDeviceSharding(spec)
    if not is_sharding(spec):
        raise ValueError(
            f"`{option}` is {spec!r} for `{name}` ({describe_array(x)}): it must be a "
            "device, a sharding or a `PartitionSpec`."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(spec, PartitionSpec) and mesh.empty:
        raise ValueError(
            f"`{option}` gives {spec} for `{name}` ({describe_array(x)}), but no mesh "
            "is in use: call it under `jax.set_mesh(mesh)`, or give "
            "`jax.sharding.NamedSharding(mesh, spec)`."
        )
    check_fits(option, name, spec, x)
    return spec


def check_alike_everywhere(mesh: Mesh, named: dict[str, Any]) -> None:
    """Raises `ValueError` in all processes if these trees differ between processes.

    No process sees those of another, so checksums are gathered: of the structure, of
    static values that have a text, and of the arrays of this process. As JAX does for
    `jax.device_put`, a mesh of some processes is passed over: each may have its own.
    """
    if len({x.process_index for x in mesh.devices.flat}) < jax.process_count():
        return
    texts: dict[str, str] = {}
    for name, tree in named.items():
        texts |= {k: v for k, v in describe(name, tree).items() if isinstance(v, str)}
        for path, x in jtu.tree_leaves_with_path(tree):
            if is_array(x) and getattr(x, "is_fully_addressable", True):
                _check_not_deleted("Layout.init", path_str(path, name), x)
                total = sum_of_parts(own_parts(x))
                texts[path_str(path, name)] = f"{describe_array(x)} {total}"
    sums = np.array([crc32(repr(item).encode()) for item in texts.items()], "uint32")
    size = process_allgather(sums.size).max()
    found = process_allgather(np.pad(sums, (0, size - sums.size)))
    differs = (found != found[0]).any(axis=0)
    if differs.any():
        place = [*texts][min(differs.argmax(), sums.size - 1)]
        raise _differs(f"`{place}`")
