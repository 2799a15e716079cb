"""What Orbax saves of a tree, and the tree that is made of what it reads.

The arrays are one flat dictionary with their paths as keys. The metadata describe all
leaves. A file of each process has the sums of its shards. See `equinox_like/orbax.py`; this
file is imported by that one only, since it needs Orbax.
"""

import json
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
import tensorstore  # comes with Orbax
from jax.experimental.multihost_utils import process_allgather

from .._compat.arrays import putter, weakly_typed
from .._compat.tracing import Tracer
from .._errors import LeafError
from .._tree.arrays import describe_array, is_deleted, is_typed_key, is_weak, with_key
from .._tree.cycles import check_no_cycle
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import listed, plain_path
from .._tree.paths import matches_above, near_paths
from .checksums import Part, in_threads, own_parts, sum_of_parts
from .faults import OTHER_SUM, Faults, Wanted, by_container, is_unicode
from .format import as_numpy_or_number, is_savable, number_type
from .placement import (
    HOMELESS,
    WIDE,
    is_homeless,
    is_spread,
    is_struct_of,
    narrowed,
    not_in_jax,
    shardings_for,
)

# The key of our entry in Orbax's custom metadata, and the version of its format.
_OWN: Final = "equinox_like"
_VERSION: Final = 3
# The database of Orbax has keys of up to 64 KiB, and the path is a part of them.
_MAX_NAME: Final = 60_000
# Saved if there are no arrays, since Orbax refuses to save an empty dictionary.
_FILLER: Final = "<no arrays>"
# How the files with the sums are called; the number of the process follows.
_SUMS: Final = "equinox_like.sums."


def check_savable(tree: Any) -> None:
    """Raises `LeafError` for a leaf that cannot be saved, or a path that occurs twice."""
    check_no_cycle("tree", tree)
    names: set[str] = set()
    for path, leaf in jtu.tree_leaves_with_path(tree):
        name = plain_path(path)
        if name in names:
            raise LeafError(f"Two leaves have the path `{name}`.", path)
        names.add(name)
        if not is_unicode(name) or len(name.encode()) > _MAX_NAME:
            text = f"The path {name[:80]!r} is not Unicode, or too long for Orbax."
            raise LeafError(text, path)
        try:
            problem = _why_unsavable(leaf) if is_savable(leaf) else None
            if problem is None:
                json.dumps(_description(leaf))
        except (TypeError, ValueError) as error:  # no values, or thousands of digits
            raise LeafError(f"`{name}` cannot be saved: {error}.", path) from None
        if problem is not None:
            raise LeafError(f"`{name}` ({describe_array(leaf)}) {problem}.", path)


def as_pytree_save(tree: Any) -> Any:
    """Orbax's own argument that saves the arrays and the metadata of a tree."""
    arrays: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    for path, leaf in jtu.tree_leaves_with_path(tree):
        name = plain_path(path)
        leaves[name] = _description(leaf)
        if is_spread(leaf):
            leaves[name]["devices"] = len(leaf.sharding.device_set)
        if is_array(leaf) and leaf.size:  # Orbax cannot save empty arrays
            arrays[name] = _stored(leaf)
    text = json.dumps(leaves)
    own = {"version": _VERSION, "leaves": text, "sum": _crc(f"{_VERSION} {text}")}
    return ocp.args.PyTreeSave(
        arrays or {_FILLER: np.zeros((), np.int8)}, custom_metadata={_OWN: own}
    )


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


# By name, the sum of an array and its number of elements, or those of a part.
_Sums = dict[str, tuple[int, int]]


def start_sums(arrays: dict[str, Any]) -> "Future[_Sums]":
    """Sums up what this process has of `arrays`, in a thread.

    The arrays may be donated or deleted meanwhile.
    """
    if jax.process_index() > 0:  # the first process writes the arrays of NumPy
        arrays = {n: x for n, x in arrays.items() if isinstance(x, jax.Array)}
    own = {name: own_parts(x) for name, x in arrays.items()}
    pool = ThreadPoolExecutor(1)
    sums = pool.submit(_sums, {name: parts for name, parts in own.items() if parts})
    pool.shutdown(wait=False)
    return sums


def _sums(own: dict[str, list[Part]]) -> _Sums:
    return {
        name: (sum_of_parts(parts), sum(part.data.size for part in parts))
        for name, parts in own.items()
    }


def write_sums(directory: Any, sums: _Sums) -> None:
    """Writes the file of this process, after Orbax has written the arrays."""
    if sums:  # otherwise Orbax may not have waited for the directory
        text = json.dumps(sums)
        path = directory / f"{_SUMS}{jax.process_index()}"
        path.write_text(f"{_crc(text)} {text}")


def _stored(leaf: Any) -> Any:
    """The array that Orbax writes for this leaf."""
    if is_typed_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        # A copy, since the user may modify the array while Orbax is saving it.
        return np.array(leaf, leaf.dtype.newbyteorder("="))
    where = leaf.sharding
    is_copied = leaf.is_fully_replicated and not leaf.is_fully_addressable
    if is_copied and len(where.addressable_devices) == 1:
        # If `device_put` made these copies, JAX raises an error for their shards.
        part = [leaf.addressable_data(0)]
        return jax.make_array_from_single_device_arrays(leaf.shape, where, part)
    return leaf


def _why_unsavable(leaf: Any) -> str | None:
    if not is_array(leaf):
        return None
    if isinstance(leaf, np.ma.MaskedArray):
        return "is a masked array, which would lose its mask"
    if isinstance(leaf, Tracer):
        return "is traced, and has no values: save outside of `jit`"
    if is_deleted(leaf):
        return "was donated or deleted"
    count = jax.process_count()
    if isinstance(leaf, jax.Array) and leaf.size and count > 1:
        owners = len({x.process_index for x in leaf.devices()})
        if owners < count:  # Orbax would find it while it writes
            return (
                f"is on the devices of {owners} of {count} processes. Put it on those of "
                "all, by `filter_shard(tree, NamedSharding(mesh, PartitionSpec()))`"
            )
    if not is_typed_key(leaf) and not _is_storable(np.dtype(leaf.dtype).name):
        return "is of a dtype that Orbax does not store: save it as another one"
    return None


def _is_storable(dtype: str) -> bool:
    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return dtype != "object"


def _description(leaf: Any) -> dict[str, Any]:
    """The entry of a leaf in the metadata."""
    if is_typed_key(leaf) and isinstance(leaf, jax.Array):
        return {"array": describe_array(leaf), "key": str(jax.random.key_impl(leaf))}
    if is_array_or_struct(leaf):
        more = {"weak_type": True} if is_weak(leaf) else {}
        if isinstance(leaf, jax.Array) and leaf.dtype.name in WIDE:
            more["jax"] = True
        return {"array": describe_array(leaf), **more}
    if is_savable(leaf):
        kind = number_type(leaf)
        parts = [leaf.real, leaf.imag] if kind is complex else kind(leaf)
        return {"number": kind.__name__, "value": parts}
    if isinstance(leaf, str | bytes):
        return {"static": repr(leaf)}
    # Without the module, which differs if a script is later imported as a module.
    name = getattr(leaf, "__qualname__", None) or getattr(leaf, "__name__", None)
    return {"static": str(name or type(leaf).__qualname__)}


# Restoring


def restored(arrays: Any, directory: Any, like: Any, shardings: Any, at: Any) -> Any:
    """The tree that the handler `arrays` reads, by the arguments of `Restore`."""
    items, treedef = jtu.tree_flatten_with_path(like)
    where = shardings_for(like, shardings)
    saved = _saved_leaves(arrays, directory)
    names = [plain_path(path) for path, _ in items]
    chosen = _chosen(names, at)
    wanted = {
        i: Wanted(path, names[i], names[i], leaf, where[i], saved.get(names[i]))
        for i, (path, leaf) in enumerate(items)
        if chosen[i]
    }
    for i, (path, leaf) in enumerate(items):
        if i not in wanted and isinstance(leaf, jax.ShapeDtypeStruct):
            raise LeafError(
                f"`at` does not match `{names[i]}`, and `like` has a ShapeDtypeStruct "
                "there, without values. Put an array there, or add the path to `at`.",
                path,
            )
    _check_as_saved(directory, list(wanted.values()), saved, at is None)
    read = _read(arrays, directory, list(wanted.values()))
    leaves = [
        _leaf(wanted[i], read) if i in wanted else leaf
        for i, (_, leaf) in enumerate(items)
    ]
    return treedef.unflatten(leaves)


class _NoDescriptionError(LeafError, ValueError):
    """Another program saved the checkpoint, or what shows that we did is damaged."""


def _saved_leaves(arrays: Any, directory: Any) -> dict[str, dict[str, Any]]:
    try:
        own = (arrays.metadata(directory).custom_metadata or {}).get(_OWN)
    except Exception as error:
        if not directory.exists():
            raise
        text = f"The metadata of {directory} cannot be read: {_first_line(error)}"
        raise LeafError(text) from error
    if not isinstance(own, dict):
        raise _NoDescriptionError(
            f"{directory} was not saved by `equinox_like.orbax.Save`, or is damaged: it "
            "has no description of its leaves. Restore it with "
            "`orbax.checkpoint.args.PyTreeRestore`."
        )
    version, text, total = (own.get(name) for name in ("version", "leaves", "sum"))
    if total != _crc(f"{version} {text}") or version != _VERSION:
        raise LeafError(
            f"{directory} is damaged, or was saved by another version of `equinox_like`: "
            "the description of its leaves does not match its checksum and version."
        )
    return json.loads(str(text))


def _chosen(names: list[str], at: Any) -> list[bool]:
    if at is None:
        return [True] * len(names)
    flags = [[matches_above(pattern, name) for name in names] for pattern in at]
    for pattern, matched in zip(at, flags, strict=True):
        if not any(matched):
            raise ValueError(
                f"The pattern {pattern!r} matches no leaf of `like`. The leaves are "
                f"{listed(names, 5)}.{near_paths([pattern], names)}"
            )
    return [any(each) for each in zip(*flags, strict=True)]


def _check_as_saved(
    directory: Any, wanted: list[Wanted], saved: dict[str, Any], is_whole: bool
) -> None:
    faults = Faults(str(directory), "the checkpoint")

    def problem_of(leaf: Wanted) -> str | None:
        found, wanted = _shown(leaf.saved), _shown(_description(leaf.like))
        if found != wanted and not _is_narrowed(leaf):
            return faults.mismatch(found, wanted)
        if "devices" in leaf.saved and is_homeless(leaf.like, leaf.sharding):
            return HOMELESS

    if not is_whole:
        saved = {leaf.name: leaf.saved for leaf in wanted if leaf.name in saved}
    faults.compare(wanted, saved, problem_of)
    call = "manager.restore(step, args=eqx.orbax.Restore({}))"
    fix = by_container(faults.moved, call)
    faults.raise_any(fix or "Pass `at` to restore a part." if is_whole else "")


def _is_narrowed(leaf: Wanted) -> bool:
    """Whether it is the struct of 32 bits that JAX makes of a NumPy array of 64."""
    found = leaf.saved.get("array", "")
    return "jax" not in leaf.saved and is_struct_of(leaf.like, found)


def _shown(description: dict[str, Any]) -> str:
    if "number" in description:
        return f"a Python {description['number']}"
    return description.get("array") or description["static"]


def _read(arrays: Any, directory: Any, wanted: list[Wanted]) -> dict[str, Any]:
    wanted = [x for x in wanted if is_array_or_struct(x.like) and x.like.size]
    if not wanted:
        return {}
    unread: dict[str, str | None] = {}
    try:
        read = _read_together(arrays, directory, wanted)
    except Exception:
        read = {}
        unread = {x.name: _why_unread(arrays, directory, x, read) for x in wanted}
    saved = _saved_sums(directory)

    def check(leaf: Wanted) -> tuple[int, str | None]:
        problem = unread.get(leaf.name)
        return (0, problem) if problem else _compared(leaf, read[leaf.name], saved)

    checked = in_threads(check, wanted)
    totals = np.array([(rest, problem is not None) for rest, problem in checked], "u8")
    if jax.process_count() > 1:  # so that all of them raise the same error
        words = totals.view("u4")  # JAX may lack integers of 64 bits
        totals = process_allgather(words).view("u8").sum(0)
    faults = Faults(str(directory), "the checkpoint")
    for leaf, (_, problem), (rest, count) in zip(wanted, checked, totals, strict=True):
        if rest or count:
            other = "another process found that" if count else OTHER_SUM
            faults.note(leaf, f"is damaged: {problem or other}")
    faults.raise_any()
    return read


def _compared(leaf: Wanted, array: Any, saved: _Sums) -> tuple[int, str | None]:
    """Compares the array that was read with the one that was saved.

    **Returns:** the sum of the parts that this process has, less the saved sum if they
    include the first element: over all processes, these are zero modulo 2**64. And what
    else is wrong.
    """
    expected, size = saved.get(leaf.name, (0, 0))
    problem = _difference(leaf, array)
    if problem is None and size != array.size:
        problem = "a checksum of its data is missing or damaged"
    if problem:
        return 0, problem
    parts = own_parts(array)
    has_first = any(not any(part.start) for part in parts)
    return (sum_of_parts(parts) - has_first * expected) % (1 << 64), None


def _saved_sums(directory: Any) -> _Sums:
    """The sums in the files of all processes, added up."""
    saved: _Sums = {}
    for file in directory.glob(f"{_SUMS}*"):
        crc, _, text = file.read_bytes().decode(errors="replace").partition(" ")
        if crc != _crc(text):
            continue  # as if it were missing
        for name, own in json.loads(text).items():
            total, size = map(sum, zip(own, saved.get(name, (0, 0)), strict=True))
            saved[name] = total, size
    return saved


def _why_unread(arrays: Any, directory: Any, leaf: Wanted, read: Any) -> str | None:
    """Reads one leaf into `read`, or says why that fails."""
    try:
        read |= _read_together(arrays, directory, [leaf])
    except Exception as error:
        return f"it cannot be read: {_first_line(error)}"


def _difference(leaf: Wanted, array: Any) -> str | None:
    """How the kind of the array that was read differs from that which was saved, if so."""
    stored = leaf.saved["array"]
    if "key" in leaf.saved:
        stored = describe_array(jax.eval_shape(jax.random.key_data, leaf.like))
    where = None if _is_narrowed(leaf) else leaf.sharding
    found = describe_array(array) if is_array(array) else type(array).__name__
    is_alike = isinstance(array, np.ndarray if where is None else jax.Array)
    if is_alike and where is not None:
        is_alike = array.sharding.is_equivalent_to(where, array.ndim)
    if is_alike and found == stored:
        return None
    return f"{type(array).__name__} {found} was read, not {stored} on {where}"


def _first_line(error: Exception) -> str:
    """The start of the message, which TensorStore follows by pages of settings."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def _read_together(arrays: Any, directory: Any, wanted: list[Wanted]) -> Any:
    args = {each.name: _restore_args(each) for each in wanted}
    restore = ocp.args.PyTreeRestore(
        dict.fromkeys(args, 0), restore_args=args, partial_restore=True
    )
    read = arrays.restore(directory, args=restore)
    return {name: read[name] for name in args}


def _restore_args(wanted: Wanted) -> Any:
    # Orbax would commit an array without a sharding to one device. One of NumPy has none.
    if wanted.sharding is None or _is_narrowed(wanted):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    like = wanted.like
    if "key" in wanted.saved:
        like = jax.eval_shape(jax.random.key_data, like)
    # Orbax reads faster if it need not look up the shape and the dtype.
    return ocp.ArrayRestoreArgs(
        sharding=wanted.sharding, global_shape=like.shape, dtype=like.dtype
    )


def _leaf(wanted: Wanted, read: dict[str, Any]) -> Any:
    like, saved = wanted.like, wanted.saved
    if "number" in saved:
        value = saved["value"]
        return type(like)(complex(*value) if saved["number"] == "complex" else value)
    if "array" not in saved:
        return like
    if isinstance(like, np.ndarray | np.generic):
        array = read[wanted.name] if like.size else np.empty_like(like)
        return as_numpy_or_number(array, like)
    if problem := not_in_jax(like.dtype):
        raise LeafError(f"`{wanted.name}` has {problem}.", wanted.path)
    if not like.size:
        return jax.device_put(jnp.empty(like.shape, like.dtype), wanted.sharding)
    array = read[wanted.name]
    if _is_narrowed(wanted):
        try:
            array = narrowed(array, like.dtype)
        except OverflowError as error:
            raise LeafError(f"`{wanted.name}` has {error}.", wanted.path) from None
    if isinstance(array, np.ndarray):
        put = putter(copy=True)
        is_free = wanted.sharding is None
        array = put(array) if is_free else jax.device_put(array, wanted.sharding)
    if "key" in saved:
        return with_key(array, like)
    return weakly_typed(array) if "weak_type" in saved else array
