"""Trees of this library in the checkpoints of Orbax: arguments for its `CheckpointManager`.

    manager.save(step, args=orbax.Save(model))
    model = manager.restore(step, args=orbax.Restore(model))

Orbax writes and reads the arrays as one flat dictionary with their paths as keys: in
parallel, in the background, and each process its own shards. What Orbax cannot store as
an array (which leaf is a typed key, Python numbers, static leaves) is in the metadata
that it saves with the arrays.

Needs the package `orbax-checkpoint`: `pip install orbax-checkpoint`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._compat.put import putter as _putter
from ._compat.tracer import Tracer as _Tracer
from ._compat.weak_type import weakly_typed as _weakly_typed
from ._errors import LeafError as _LeafError
from ._io.faults import Faults as _Faults
from ._io.narrow import narrowed as _narrowed, narrows_to as _narrows_to
from ._io.placement import shardings_for as _shardings_for
from ._io.tensors import is_savable as _is_savable, number_type as _number_type
from ._tree.arrays import (
    describe_array as _describe_array,
    is_deleted as _is_deleted,
    is_typed_key as _is_typed_key,
    is_weak as _is_weak,
)
from ._tree.filters import (
    is_array as _is_array,
    is_array_or_struct as _is_array_or_struct,
)
from ._tree.glob import (
    check_patterns as _check_patterns,
    matches_above as _matches_above,
)
from ._tree.nodes import describe_node as _described
from ._tree.paths import plain_path as _plain_path
from ._tree.require import (
    refuse_callable_leaf as _refuse_callable_leaf,
    refuse_class as _refuse_class,
)

try:
    import orbax.checkpoint as _ocp
except ImportError:
    raise ImportError(
        "`equinox_like.orbax` needs the package `orbax-checkpoint`: "
        "`pip install orbax-checkpoint`."
    ) from None

__all__ = ["Restore", "Save", "TreeHandler"]

# The key of our entry in Orbax's custom metadata, and the version of its format.
_OWN: Final = "equinox_like"
_VERSION: Final = 1
# Saved if there are no arrays, since Orbax refuses to save an empty dictionary.
_FILLER: Final = "<no arrays>"


class TreeHandler(_ocp.AsyncCheckpointHandler):
    """Orbax's handler for [`equinox_like.orbax.Save`][] and
    [`equinox_like.orbax.Restore`][]. Orbax finds it by the class of these arguments.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import orbax.checkpoint as ocp
        from equinox_like import orbax
        from etils import epath

        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        checkpointer = ocp.AsyncCheckpointer(orbax.TreeHandler())
        path = epath.Path("checkpoint").resolve()
        checkpointer.save(path, args=orbax.Save(model))
        checkpointer.wait_until_finished()
        again = checkpointer.restore(path, args=orbax.Restore(model))
        assert eqx.tree_equal(again, model)
        checkpointer.close()
        ```
    """

    def __init__(self, arrays: Any = None):
        """**Arguments:**

        - `arrays`: an `orbax.checkpoint.PyTreeCheckpointHandler` to write and read the
            arrays with; by default a new one.
        """
        self._arrays = _ocp.PyTreeCheckpointHandler() if arrays is None else arrays

    async def async_save(self, directory: Any, args: "Save") -> Any:
        """Copies the arrays to the host, and returns futures of their being written."""
        _require(args, Save, "save")
        return await self._arrays.async_save(directory, args=_as_pytree_save(args.tree))

    def save(self, directory: Any, args: "Save") -> None:
        """Saves, and waits until all is written."""
        _require(args, Save, "save")
        self._arrays.save(directory, args=_as_pytree_save(args.tree))

    def restore(self, directory: Any, args: "Restore") -> Any:
        """**Returns:** a tree of the structure of `args.like`."""
        _require(args, Restore, "restore")
        return _restored(self._arrays, directory, args)

    def metadata(self, directory: Any) -> Any:
        """What Orbax knows of the arrays, by their paths."""
        return self._arrays.metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Called by Orbax when all processes have written their parts."""
        self._arrays.finalize(directory)

    def close(self) -> None:
        """Called by Orbax at the end."""
        self._arrays.close()


@_ocp.args.register_with_handler(TreeHandler, for_save=True)
@dataclasses.dataclass
class Save(_ocp.args.CheckpointArgs):
    """Saves any tree, by `manager.save(step, args=Save(tree))`.

    It may be part of `orbax.checkpoint.args.Composite`, beside other arguments.

    **Attributes:**

    - `tree`: any pytree: a model, a State, the state of an optimiser, a tuple of these. JAX
        and NumPy arrays, sharded or not, typed PRNG keys and Python numbers are saved, by
        their paths. Of other leaves, such as functions and strings, the name is saved, for
        `Restore` to compare.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, before anything is written, if
    an array is traced or was deleted, is a `jax.ShapeDtypeStruct` or a masked array, or
    is of a dtype that Orbax does not store. `TypeError` if `tree` is a class or a function
    in place of a tree.

    !!! example

        ```python
        import pathlib
        import equinox_like as eqx
        import jax
        import orbax.checkpoint as ocp
        from equinox_like import orbax

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        with ocp.CheckpointManager(pathlib.Path("steps").resolve()) as manager:
            manager.save(1, args=orbax.Save(model))
            manager.wait_until_finished()
            again = manager.restore(1, args=orbax.Restore(model))
        assert eqx.tree_equal(again, model)
        ```
    """

    tree: Any

    def __post_init__(self) -> None:
        _refuse_callable_leaf(self.tree, "tree")
        # A later error would leave a partly written step in Orbax's folder.
        names: set[str] = set()
        for path, leaf in jtu.tree_leaves_with_path(self.tree):
            name = _plain_path(path)
            if name in names:
                raise _LeafError(f"Two leaves have the path `{name}`.", path)
            names.add(name)
            _refuse_unsavable(path, name, leaf)


@_ocp.args.register_with_handler(TreeHandler, for_restore=True)
@dataclasses.dataclass
class Restore(_ocp.args.CheckpointArgs):
    """Restores what [`equinox_like.orbax.Save`][] saved, into a tree like it.

    One error lists all leaves that are missing, left over, or of another shape, dtype or
    name. It is raised before an array is read.

    **Attributes:**

    - `like`: a tree with the structure, shapes and dtypes of what was saved. Its leaves may
        be `jax.ShapeDtypeStruct`s, as [`equinox_like.filter_eval_shape`][] makes them.
    - `shardings`: a sharding for each array, or a prefix tree of shardings, such as
        [`equinox_like.shardings`][] makes of `like`. The mesh may differ from that of
        the saved arrays. Where it is `None`, arrays go where those of `like` are.
    - `at`: a pattern for paths, or a sequence of patterns: only nodes that match are
        read, with all that is below them. Other leaves come from `like`.

    **Raises:**

    `TypeError` if `like` is a class in place of an instance. `LeafError`, a `RuntimeError`
    with attribute `path`, while restoring. `ValueError` if a pattern matches nothing, or if
    the checkpoint was not saved by `Save`.
    """

    like: Any
    shardings: Any = None
    at: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        _refuse_class(self.like, "like")
        if self.at is not None:
            several = isinstance(self.at, Iterable) and not isinstance(self.at, str)
            patterns: list[Any] = list(self.at) if several else [self.at]
            _check_patterns(patterns, "at")
            if not patterns:
                raise ValueError(
                    "`at` must have a pattern: without one, nothing is read."
                )
            self.at = patterns


def _require(args: Any, kind: type, method: str) -> None:
    if not isinstance(args, kind):
        raise TypeError(
            f"`{method}` takes `equinox_like.orbax.{kind.__name__}`; got "
            f"{_described(args)}."
        )


# Saving


def _as_pytree_save(tree: Any) -> Any:
    arrays: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    for path, leaf in jtu.tree_leaves_with_path(tree):
        name = _plain_path(path)
        leaves[name] = _description(leaf)
        if _is_array(leaf) and leaf.size:  # Orbax cannot save empty arrays
            arrays[name] = _stored(leaf)
    return _ocp.args.PyTreeSave(
        arrays or {_FILLER: np.zeros((), np.int8)},
        custom_metadata={_OWN: {"version": _VERSION, "leaves": leaves}},
    )


def _stored(leaf: Any) -> Any:
    """The array that Orbax writes for this leaf."""
    if _is_typed_key(leaf):
        return jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        return leaf
    # A copy, since the user may modify the array while Orbax is saving it.
    return np.array(leaf, leaf.dtype.newbyteorder("="))


def _refuse_unsavable(path: tuple[Any, ...], name: str, leaf: Any) -> None:
    if not _is_array_or_struct(leaf):
        return
    problem = None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        problem = "is a ShapeDtypeStruct, and has no values to save"
    elif isinstance(leaf, np.ma.MaskedArray):
        problem = "is a masked array, which would lose its mask"
    elif isinstance(leaf, _Tracer):
        problem = "is traced, and has no values: save outside of `jit`"
    elif _is_deleted(leaf):
        problem = "was donated or deleted"
    elif not _is_typed_key(leaf) and not _is_storable(np.dtype(leaf.dtype).name):
        problem = "is of a dtype that Orbax does not store: save it as another one"
    if problem is not None:
        raise _LeafError(f"`{name}` ({_describe_array(leaf)}) {problem}.", path)


def _is_storable(dtype: str) -> bool:
    import tensorstore  # comes with Orbax

    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return dtype != "object"


def _description(leaf: Any) -> dict[str, Any]:
    """The entry of a leaf in the metadata."""
    if _is_typed_key(leaf) and isinstance(leaf, jax.Array):
        return {
            "array": _describe_array(leaf),
            "key": str(jax.random.key_impl(leaf)),
        }
    if _is_array_or_struct(leaf):
        weak = {"weak_type": True} if _is_weak(leaf) else {}
        return {"array": _describe_array(leaf), **weak}
    if _is_savable(leaf):
        kind = _number_type(leaf)
        parts = [leaf.real, leaf.imag] if kind is complex else kind(leaf)
        return {"number": kind.__name__, "value": parts}
    return {"static": _name_of(leaf)}


def _name_of(leaf: Any) -> str:
    if isinstance(leaf, str | bytes):
        return repr(leaf)
    # Without the module, which differs if a script is later imported as a module.
    name = getattr(leaf, "__qualname__", None) or getattr(leaf, "__name__", None)
    return str(name or type(leaf).__qualname__)


# Restoring


class _Wanted(NamedTuple):
    """A leaf of `like` to read from the checkpoint."""

    name: str
    path: tuple[Any, ...]
    like: Any
    sharding: Any
    is_narrowed: bool


def _restored(arrays: Any, directory: Any, args: Restore) -> Any:
    items, treedef = jtu.tree_flatten_with_path(args.like)
    where = _shardings_for(args.like, args.shardings)
    saved = _saved_leaves(arrays, directory)
    names = [_plain_path(path) for path, _ in items]
    chosen = _chosen(names, args.at)
    _refuse_differences(directory, items, chosen, saved, args.at is None)
    wanted = {
        i: _Wanted(names[i], path, leaf, where[i], _is_narrowed(saved[names[i]], leaf))
        for i, (path, leaf) in enumerate(items)
        if chosen[i]
    }
    read = _read(arrays, directory, list(wanted.values()))
    leaves = [
        _leaf(wanted[i], saved[names[i]], read) if i in wanted else leaf
        for i, (_, leaf) in enumerate(items)
    ]
    return treedef.unflatten(leaves)


def _saved_leaves(arrays: Any, directory: Any) -> dict[str, dict[str, Any]]:
    own = (arrays.metadata(directory).custom_metadata or {}).get(_OWN)
    if own is None:
        raise ValueError(
            f"{directory} was not saved by `equinox_like.orbax.Save`: it has no "
            "description of its leaves. Restore it with "
            "`orbax.checkpoint.args.PyTreeRestore`."
        )
    if own["version"] != _VERSION:
        raise ValueError(
            f"{directory} was saved in version {own['version']!r} of the format; this "
            f"`equinox_like.orbax` reads version {_VERSION}. Install a newer "
            "`equinox_like`."
        )
    return own["leaves"]


def _chosen(names: list[str], at: Iterable[str] | None) -> list[bool]:
    if at is None:
        return [True] * len(names)
    patterns = list(at)
    flags = [[_matches_above(pattern, name) for name in names] for pattern in patterns]
    for pattern, matched in zip(patterns, flags, strict=True):
        if not any(matched):
            raise ValueError(f"The pattern {pattern!r} matches no leaf of `like`.")
    return [any(each) for each in zip(*flags, strict=True)]


def _refuse_differences(
    directory: Any,
    items: list[tuple[Any, Any]],
    chosen: list[bool],
    saved: dict[str, dict[str, Any]],
    is_whole: bool,
) -> None:
    faults = _Faults(str(directory), "the checkpoint")
    names = [_plain_path(path) for path, _ in items]
    for (path, leaf), name, is_wanted in zip(items, names, chosen, strict=True):
        if not is_wanted:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise _LeafError(
                    f"`{name}` is a ShapeDtypeStruct, and `at` does not match it: it has "
                    "no values to keep.",
                    path,
                )
        elif name not in saved:
            faults.missing(path, name)
        else:
            found, wanted = _shown(saved[name]), _shown(_description(leaf))
            if found != wanted and not _is_narrowed(saved[name], leaf):
                faults.mismatch(path, name, found, wanted)
    if is_whole:
        known = set(names)
        faults.left_over(name for name in saved if name not in known)
    faults.raise_any()


def _is_narrowed(saved: dict[str, Any], like: Any) -> bool:
    """Whether `like` is the struct of 32 bits that JAX makes of a NumPy array of 64."""
    name, _, shape = saved.get("array", "").partition("[")
    if not isinstance(like, jax.ShapeDtypeStruct):
        return False
    return _narrows_to(name, like.dtype) and _describe_array(like).endswith(f"[{shape}")


def _shown(description: dict[str, Any]) -> str:
    if "number" in description:
        return f"a Python {description['number']}"
    return description.get("array") or description["static"]


def _read(arrays: Any, directory: Any, wanted: list[_Wanted]) -> dict[str, Any]:
    args = {
        each.name: _restore_args(each)
        for each in wanted
        if _is_array_or_struct(each.like) and each.like.size
    }
    if not args:
        return {}
    restore = _ocp.args.PyTreeRestore(
        dict.fromkeys(args, 0), restore_args=args, partial_restore=True
    )
    return arrays.restore(directory, args=restore)


def _restore_args(wanted: _Wanted) -> Any:
    # Orbax would commit an array without a sharding to one device.
    if (
        isinstance(wanted.like, np.ndarray | np.generic)
        or wanted.sharding is None
        or wanted.is_narrowed
    ):
        return _ocp.RestoreArgs(restore_type=np.ndarray)
    return _ocp.ArrayRestoreArgs(sharding=wanted.sharding)


def _leaf(wanted: _Wanted, saved: dict[str, Any], read: dict[str, Any]) -> Any:
    like = wanted.like
    if "number" in saved:
        value = saved["value"]
        return type(like)(complex(*value) if saved["number"] == "complex" else value)
    if "array" not in saved:
        return like
    if isinstance(like, np.ndarray | np.generic):
        array = np.empty_like(like)
        if like.size:
            array = np.asarray(read[wanted.name], like.dtype)
        return array if isinstance(like, np.ndarray) else like.dtype.type(array[()])
    if not like.size:
        return jax.device_put(jnp.empty(like.shape, like.dtype), wanted.sharding)
    array = read[wanted.name]
    if wanted.is_narrowed:
        try:
            array = _narrowed(array, like.dtype)
        except OverflowError as error:
            raise _LeafError(f"`{wanted.name}` has {error}.", wanted.path) from None
    if isinstance(array, np.ndarray):
        put = _putter(copy=True)
        is_free = wanted.sharding is None
        array = put(array) if is_free else jax.device_put(array, wanted.sharding)
    if "key" in saved:
        return jax.random.wrap_key_data(array, impl=saved["key"])
    return _weakly_typed(array) if "weak_type" in saved else array
