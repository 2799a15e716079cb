"""Makes JAX arrays of those that were read, with their dtypes and on their devices.

Without `jax_enable_x64` JAX has no arrays of 64 bits, and converts those of NumPy. So a
template from `filter_eval_shape` has 32 bits where the saved model has an array of NumPy
with 64. A JAX array of 64 bits is not narrowed: the template lacks `jax_enable_x64`."""

import math
from typing import Any, Final

import jax
import jax.tree_util as jtu
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from .._compat.arrays import putter
from .._compat.tracing import Tracer
from .._errors import LeafError
from .._tree.arrays import describe_array, is_concrete
from .._tree.match import spread
from .._tree.nodes import plain_path

# The dtypes that JAX has with `jax_enable_x64` only; `complex128` has parts of 64 bits.
WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
_FIX: Final = "set `jax_enable_x64`, or use a template that has a NumPy array there"


def narrows_to(name: str, dtype: Any) -> bool:
    """Whether JAX converts NumPy's arrays of the dtype `name` to the narrower `dtype`."""
    return name in WIDE and name != dtype.name == canonicalize_dtype(name).name


def is_struct_of(like: Any, stored: str) -> bool:
    """Whether `like` is the struct that JAX makes of an array of NumPy, of whose 64 bits it
    keeps 32. `stored` describes that array, as `describe_array` does."""
    name, _, shape = stored.partition("[")
    is_alike = isinstance(like, jax.ShapeDtypeStruct) and narrows_to(name, like.dtype)
    return is_alike and describe_array(like).endswith(f"[{shape}")


def not_in_jax(dtype: Any) -> str | None:
    """A description of a dtype of 64 bits that JAX would convert now, else `None`."""
    if dtype.name not in WIDE or canonicalize_dtype(dtype) == dtype:
        return None
    return f"the dtype {dtype}, which JAX does not support now: {_FIX}"


def narrowed(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in a narrower dtype, or in the native byte order.

    **Raises:**

    `OverflowError` for an integer that does not fit; JAX would change it.
    """
    with np.errstate(over="ignore"):
        new = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(new, array):
        raise OverflowError(
            f"integers in the file that {new.dtype} cannot hold: {_FIX}"
        )
    return new


def shardings_for(like: Any, shardings: Any) -> list[Sharding | None]:
    """The sharding of the new array for each leaf of `like`. It is that in the prefix
    tree `shardings`, or else that of the leaf; `None` stands for the default device.

    **Raises:**

    `LeafError` if a leaf of `shardings` is neither a sharding nor a device, or does not
    fit, or is on an abstract mesh that is not in use.
    """
    specs = spread(shardings, like, "shardings", "like")
    items = zip(jtu.tree_leaves_with_path(like), specs, strict=True)
    return [sharding_for(path, leaf, spec) for (path, leaf), (_, spec) in items]


HOMELESS: Final = (
    "was saved from several devices, and nothing says where to place it now: pass "
    "`shardings`, such as `equinox_like.Layout(mesh, rules).shardings(like)` or "
    "`jax.devices()[0]`, or give the structs of `like` a `sharding`"
)


def is_spread(leaf: Any) -> bool:
    """Whether a leaf is an array on several devices, sharded or replicated."""
    return is_concrete(leaf) and len(leaf.sharding.device_set) > 1


def is_homeless(like: Any, sharding: Sharding | None) -> bool:
    """Whether nothing says on which of several devices an array shall be.

    An array that was saved from several devices is then an error: on one of them, it
    might not fit, or be slow without a word. An array in `like` says where, even if it is
    on the default device.
    """
    is_struct = isinstance(like, jax.ShapeDtypeStruct)
    return is_struct and sharding is None and jax.device_count() > 1


def sharding_for(path: tuple[Any, ...], leaf: Any, spec: Any) -> Sharding | None:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    name = f"`{plain_path(path)}` ({describe_array(leaf)})"
    if spec is None:
        # A traced array is not on a device.
        is_free = isinstance(leaf, jax.Array) and (
            isinstance(leaf, Tracer) or not leaf.committed
        )
        return None if is_free else _on_devices(path, name, leaf.sharding)
    if isinstance(spec, jax.Device):
        spec = SingleDeviceSharding(spec)
    if not isinstance(spec, Sharding):
        raise LeafError(
            f"`shardings` gives {spec!r} for {name}: it must be a device, or a "
            "`jax.sharding.Sharding`, such as `equinox_like.Layout.shardings` "
            "makes from rules.",
            path,
        )
    try:
        # JAX raises an `IndexError` without the reason, or only when it places the array.
        if isinstance(spec, NamedSharding) and len(spec.spec) > leaf.ndim:
            raise ValueError("its spec has more entries than the array has dimensions.")
        spec.shard_shape(leaf.shape)
    except ValueError as error:
        problem = f"`shardings` gives {spec} for {name}, which does not fit: {error}"
        raise LeafError(problem, path) from None
    return _on_devices(path, name, spec)


def _on_devices(path: Any, name: str, sharding: Sharding | None) -> Sharding | None:
    """`sharding` with the mesh in use, if it is on that mesh without its devices, as the
    shardings that `jax.eval_shape` returns on explicit axes are."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.abstract_mesh != sharding.mesh:
        raise LeafError(
            f"{name} is to be placed on a mesh that does not name its devices: "
            f"{sharding}. Load under `jax.set_mesh(mesh)`, or give `shardings`.",
            path,
        )
    return NamedSharding(mesh, sharding.spec)


def local_ranges(
    shape: tuple[int, ...], sharding: Sharding | None
) -> list[tuple[int, int]] | None:
    """The ranges of elements, in flat order, that contain this process's shards of an
    array: one range for each shard. `None` if the process has all elements."""
    if sharding is None or sharding.is_fully_addressable or 0 in shape:
        return None
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = set()
    indices = sharding.addressable_devices_indices_map(shape).values()
    for index in filter(None, indices):  # no index is `None`, but its type allows it
        bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
        first = sum(low * n for (low, _), n in zip(bounds, strides, strict=True))
        last = sum((high - 1) * n for (_, high), n in zip(bounds, strides, strict=True))
        ranges.add((first, last + 1))
    return sorted(ranges)


def put_like(
    items: list[Any], leaves: list[Any], shardings: list[Sharding | None]
) -> list[Any]:
    """Converts the arrays that were read to JAX arrays, if `like` has a JAX array.

    `items` are the paths and leaves of `like`. On the CPU, aligned data are not copied.

    **Raises:**

    `LeafError` for a dtype of 64 bits that JAX does not have now.
    """
    put = putter(copy=False)
    placed = []
    for i, ((path, like), sharding) in enumerate(zip(items, shardings, strict=True)):
        leaf = leaves[i]
        is_wanted = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
        if not is_wanted or leaf is like:
            continue
        if isinstance(leaf, np.ndarray) and (problem := not_in_jax(leaf.dtype)):
            raise LeafError(f"`{plain_path(path)}` has {problem}.", path)
        if sharding is None:
            leaves[i] = put(leaf) if isinstance(leaf, np.ndarray) else leaf
        elif not sharding.is_fully_addressable:
            # `device_put` would read the whole array, to compare it between processes.
            read = leaf.__getitem__
            leaves[i] = jax.make_array_from_callback(leaf.shape, sharding, read)
        else:
            placed.append(i)
    # In one call, which is faster.
    arrays = jax.device_put([leaves[i] for i in placed], [shardings[i] for i in placed])
    for i, array in zip(placed, arrays, strict=True):
        leaves[i] = array
    return leaves
