"""`tree_serialise_leaves` and `tree_deserialise_leaves`: the leaves of a tree in a file.

A file has the `.npy` records of the leaves (`records.py`), one after the other in JAX's
order. If the library itself opens the file, a last record names the leaves. The file is
written under another name and then renamed, so that a killed process leaves either the
old file or the new one.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np

from .._compat.arrays import Put, putter
from .._errors import LeafError
from .._tree.cycles import check_no_cycle
from .._tree.deleted import deleted_named
from .._tree.match import flatten_up_to
from .._tree.nodes import describe_node, listed, path_str, plain_path
from .._tree.require import check_not_class
from .._typing import FilePath, Readable, Writable
from .faults import OTHER_SUM, Path, by_container, error_at, hint_of_names, other_prefix
from .files import content_of, is_file, opened, replacing, whole, with_suffix
from .format import is_loadable
from .placement import HOMELESS, is_homeless, is_spread
from .records import (
    FileIndex,
    RecordMismatch,
    bytes_remaining,
    check_alike,
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    find_index,
    index_record,
    read_index,
    read_leaf,
)

_Tree = TypeVar("_Tree")

_SHOWN = 5


@deleted_named
def tree_serialise_leaves(
    path_or_file: FilePath | Writable,
    pytree: Any,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Saves the leaves of a tree to a file.

    A file given by its path is replaced atomically: if the process is killed, the path
    holds the old file or the new one. Other hard links keep the old file. Pipes and
    devices, such as `/dev/stdout`, are written to directly.

    **Arguments:**

    - `path_or_file`: a path, to which `.eqx` is appended if it has no suffix; or a binary
        file open for writing, which is left open, so that it can take several trees.
    - `pytree`: any pytree.
    - `filter_spec`: a function `(file, leaf) -> None` that writes a leaf, or a prefix tree
        of such functions; by default [`equinox_like.default_serialise_filter_spec`][]. If
        a function writes nothing for an array or a number, the file can be loaded into a
        tree without that leaf, and paths are not compared.
    - `is_leaf`: further nodes to treat as leaves, which the function gets whole.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, if a leaf cannot be written:
    for example because it is a tracer or a `jax.ShapeDtypeStruct`, or holds Python
    objects. `OSError` if the file cannot be written, for example because the disk is full,
    or if it is in non-blocking mode and would have to wait. `ValueError` if
    `filter_spec` is not a prefix of `pytree`. `TypeError` if `pytree` is a class
    in place of an instance.

    !!! example

        ```python
        import io
        import equinox_like as eqx
        import jax.numpy as jnp

        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, {"w": jnp.arange(3.0), "name": "first"})
        file.seek(0)
        like = {"w": jnp.zeros(3), "name": "second"}
        loaded = eqx.tree_deserialise_leaves(file, like)
        assert loaded["w"][2] == 2.0 and loaded["name"] == "second"
        ```
    """
    if filter_spec is default_serialise_filter_spec:
        check_not_class(pytree, "pytree")
    items, _ = _assign(filter_spec, pytree, is_leaf, "pytree")
    if is_file(path_or_file, "write"):
        file = whole(path_or_file)
        for spec, path, leaf in items:
            _write_leaf(file, spec, path, leaf)
        return
    with replacing(with_suffix(path_or_file, ".eqx")) as file:
        written: list[tuple[str, int, bool]] = []
        end, is_selection = 0, False
        for spec, path, leaf in items:
            _write_leaf(file, spec, path, leaf)
            start, end = end, file.tell()
            if end != start:
                written.append((path_str(path), end, is_spread(leaf)))
            elif is_loadable(leaf):
                is_selection = True
        file.flush()
        with open(file.name, "rb") as to_read:
            content = content_of(to_read)
        file.write(index_record(written, is_selection, content))


def tree_deserialise_leaves(
    path_or_file: FilePath | Readable,
    like: _Tree,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _Tree:
    """Loads what [`equinox_like.tree_serialise_leaves`][] saved, into a tree like it.

    It never unpickles anything, so it is safe to load an untrusted file.

    **Arguments:**

    - `path_or_file`: a path, to which `.eqx` is appended if it has no suffix; or a binary
        file open for reading, which is left after the last record that was read.
    - `like`: a tree of the same structure, whose leaves have the types, shapes and dtypes
        of those saved. [`equinox_like.filter_eval_shape`][] makes one without computing. An
        array is placed where that of `like` is committed, or as the struct says.
    - `filter_spec`: a function `(file, leaf of like) -> leaf`, or a prefix tree of such
        functions; by default [`equinox_like.default_deserialise_filter_spec`][]. Where it
        is not the default, paths are not compared.
    - `is_leaf`: nodes of `like` to treat as leaves.

    **Returns:**

    A tree of the structure of `like`. Leaves that are neither arrays nor numbers are those
    of `like`.

    **Raises:**

    `FileNotFoundError` if there is no such file. `LeafError`, a `RuntimeError` with
    attribute `path`, if the file was saved from a tree of another structure, if a leaf has
    another type, shape or dtype, if the file is damaged, or if `like` has a struct without
    a sharding for an array that was on several devices. `RuntimeError` if something
    is left over in a file that is named by its path.

    !!! example

        ```python
        import tempfile
        import equinox_like as eqx
        import jax.numpy as jnp

        with tempfile.TemporaryDirectory() as folder:
            eqx.tree_serialise_leaves(f"{folder}/model", [jnp.arange(3.0), 0.1])
            like = [jnp.zeros(3), 0.0]
            assert eqx.tree_deserialise_leaves(f"{folder}/model", like)[1] == 0.1
        ```
    """
    if filter_spec is default_deserialise_filter_spec:
        check_not_class(like, "like")
    items, rebuild = _assign(filter_spec, like, is_leaf, "like")
    put = putter(copy=True)
    if is_file(path_or_file, "read"):
        file = whole(path_or_file)
        return rebuild([_read_leaf(file, *item, put=put) for item in items])
    path = with_suffix(path_or_file, ".eqx")
    with opened(path) as file:
        saved = find_index(file)
        leaves = list(_read_leaves(file, items, put, saved, content_of(file)))
        _check_at_end(file, items, saved)
    return rebuild(leaves)


# Saving and loading


def _assign(filter_spec: Any, tree: Any, is_leaf: Any, name: str):
    """The function, path and value of each leaf; and a function to rebuild the tree."""
    check_no_cycle(name, tree)
    specs, treedef = jtu.tree_flatten_with_path(filter_spec)
    subtrees = flatten_up_to(treedef, filter_spec, tree, "filter_spec", name)
    items, treedefs = [], []
    for (prefix, spec), subtree in zip(specs, subtrees, strict=True):
        if not callable(spec):
            raise ValueError(
                "The leaves of `filter_spec` must be functions; at "
                f"`{path_str(prefix, 'filter_spec')}` there is {describe_node(spec)}."
            )
        leaves, below = jtu.tree_flatten_with_path(subtree, is_leaf)
        items += [(spec, (*prefix, *path), leaf) for path, leaf in leaves]
        treedefs.append(below)

    def rebuild(leaves: list[Any]) -> Any:
        rest = iter(leaves)
        return treedef.unflatten(
            below.unflatten([next(rest) for _ in range(below.num_leaves)])
            for below in treedefs
        )

    return items, rebuild


# Writing


def _write_leaf(file: Any, spec: Any, path: Path, leaf: Any) -> None:
    try:
        spec(file, leaf)
    except Exception as error:
        if _is_about_file(error):
            raise
        raise error_at(path, _with_mode(error, file, "wb")) from error


def _is_about_file(error: Exception) -> bool:
    """Whether the disk, and not the leaf, is at fault: for example, if it is full."""
    is_of_system = isinstance(error, OSError) and error.filename is None
    return is_of_system and not isinstance(error, io.UnsupportedOperation)


def _with_mode(error: Exception, file: Any, mode: str) -> Any:
    """The error; with the mode to open the file in, if it was opened in another one."""
    is_text = isinstance(file, io.TextIOBase)
    if isinstance(error, io.UnsupportedOperation) or (
        is_text and isinstance(error, TypeError | UnicodeError)
    ):
        return f"{error}. Open the file with the mode {mode!r}."
    return error


# Reading


def _read_leaves(
    file: Any, items: list[Any], put: Put, saved: FileIndex | None, content: np.ndarray
) -> Iterator[Any]:
    """Reads the leaves one by one, and compares them with the saved names and sums."""
    end = file.tell()
    for spec, path, like in items:
        start = end
        is_default = spec is default_deserialise_filter_spec
        try:
            leaf = _read_leaf(file, spec, path, like, put)
        except LeafError as error:
            if saved and is_loadable(like) and not saved.is_next(path):
                raise _other_structure(path, items, saved.names) from error
            raise
        end = file.tell()
        if end != start and saved:
            # A custom function, here or when saving, may have skipped some leaves.
            is_known = is_default and not saved.is_selection
            if is_known and not saved.is_next(path):
                raise _other_structure(path, items, saved.names)
            is_open = is_homeless(like, getattr(like, "sharding", None))
            if is_default and saved.is_next_spread and is_open:
                raise error_at(path, f"it {HOMELESS}.")
            if not saved.are_intact(content, end):
                raise error_at(path, f"it is damaged: {OTHER_SUM}")
        yield leaf


def _read_leaf(file: Any, spec: Any, path: Path, like: Any, put: Put) -> Any:
    try:
        if spec is default_deserialise_filter_spec:
            leaf = read_leaf(file, like, put)  # with one `put` for all leaves
        else:
            leaf = spec(file, like)
        check_alike(leaf, like)
    except RecordMismatch as error:
        raise LeafError(
            f"Deserialised leaf at path {plain_path(path)} {error}. Build `like` in "
            "the same way as the tree that was saved.",
            path,
        ) from None
    except EOFError as error:
        raise error_at(
            path,
            f"{error}. Is the file complete, and was it saved from a tree like `like`?",
        ) from error
    except Exception as error:
        if _is_about_file(error):
            raise
        raise error_at(path, _with_mode(error, file, "rb")) from error
    return leaf


def _check_at_end(file: Any, items: list[Any], saved: FileIndex | None) -> None:
    end = file.tell()
    written = read_index(file)
    if written is None and saved is not None:
        raise RuntimeError(
            f"{bytes_remaining(file)} bytes of the file are left over after all leaves of "
            f"`like` were read. {_differences(items, saved.names)}"
        )
    if rest := bytes_remaining(file):
        raise RuntimeError(
            f"{rest} bytes of the file are left over after the {end} bytes that hold "
            "the leaves of `like`. The file was saved from a larger tree, or "
            "something was appended to it."
        )


def _other_structure(path: Path, items: list[Any], saved: Any) -> LeafError:
    text = "the structure of the saved tree differs from that of `like`. "
    return error_at(path, text + _differences(items, saved))


def _differences(items: list[Any], saved: list[str]) -> str:
    like = [plain_path(path) for _, path, leaf in items if is_loadable(leaf)]
    saved = [name.removeprefix(".") for name in saved]
    both = set(like) & set(saved)
    only_like = [path for path in like if path not in both]
    only_saved = [path for path in saved if path not in both]
    if not only_like and not only_saved:
        return (
            f"The order in the file is {listed(saved, _SHOWN)}; in `like` it is "
            f"{listed(like, _SHOWN)}."
        )
    moved = None if both else other_prefix(only_like, only_saved)
    fix = by_container(moved, "eqx.tree_deserialise_leaves(path, {})")
    return (
        f"Only in the file: {listed(only_saved, _SHOWN)}; only in `like`: "
        f"{listed(only_like, _SHOWN)}. {fix}{hint_of_names(only_like, only_saved)}"
    ).strip()
