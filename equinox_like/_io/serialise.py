"""Saving the leaves of a tree to a file, and loading them into a tree like it.

A file is the `.npy` records of the leaves (`records.py`), one after the other in JAX's
order, and, where the library itself opens the file, one last record that names the leaves.
It is written under another name and then renamed, so that a process which is killed loses
neither the old file nor the new one.
"""

import functools
import io
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu
import numpy as np

from .._compat.put import putter
from .._errors import LeafError
from .._tree.match import flatten_up_to
from .._tree.paths import path_str
from .atomic import replacing, with_suffix
from .checksum import checksum
from .records import (
    RecordMismatch,
    bytes_remaining,
    check_alike,
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    is_data,
    read_data,
    read_header,
    read_leaf,
    write_record,
)

_Path = tuple[Any, ...]


class _Structure(NamedTuple):
    """What a file says at its end: the leaves in it, and what each of them sums up to."""

    names: list[Any]
    sums: list[Any]


def tree_serialise_leaves(
    path_or_file: Any,
    pytree: Any,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Saves the leaves of a tree to a file.

    A file named by its path is replaced in one step, once all is written: even if the
    process is killed, what stands there is the old file or the new one.

    **Arguments:**

    - `path_or_file`: a path, to which `.eqx` is appended if it has no suffix; or a binary
        file open for writing, which is left open, so that it can take several trees.
    - `pytree`: any pytree.
    - `filter_spec`: a function `(file, leaf) -> None` that writes a leaf, or a prefix tree
        of such functions.
    - `is_leaf`: nodes of `pytree` that the function is to get whole.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, if a leaf cannot be written: for
    example because it is a tracer or holds Python objects. `ValueError` if `filter_spec`
    is no prefix of `pytree`.

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
    items, _ = _assign(filter_spec, pytree, is_leaf, "pytree")
    if not _is_path(path_or_file, "write"):
        for spec, path, leaf in items:
            _write_leaf(path_or_file, spec, path, leaf)
        return
    with replacing(with_suffix(path_or_file, ".eqx")) as file:
        written: list[tuple[str, int]] = []
        end = 0
        for spec, path, leaf in items:
            _write_leaf(file, spec, path, leaf)
            start, end = end, file.tell()
            if end != start:
                written.append((path_str(path), end))
        file.flush()
        file.write(_structure_record(written, _Mapped(file.name)))


def tree_deserialise_leaves(
    path_or_file: Any,
    like: Any,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Loads what [`equinox_like.tree_serialise_leaves`][] saved, into a tree like it.

    Nothing is ever unpickled, so a foreign file can do no harm.

    **Arguments:**

    - `path_or_file`: a path, to which `.eqx` is appended if it has no suffix; or a binary
        file open for reading, which is left after the last record that was read.
    - `like`: a tree of the same structure, whose leaves have the types, shapes and dtypes
        of those saved. [`equinox_like.filter_eval_shape`][] makes one without computing.
    - `filter_spec`: a function `(file, leaf of like) -> leaf`, or a prefix tree of such
        functions.
    - `is_leaf`: nodes of `like` that the function is to get whole.

    **Returns:**

    A tree of the structure of `like`. Leaves that are neither arrays nor numbers are those
    of `like`.

    **Raises:**

    `FileNotFoundError` if there is no such file. `LeafError`, a `RuntimeError` with
    attribute `path`, if the file was saved from a tree of another structure, if a leaf has
    another type, shape or dtype, or if the file is damaged. `RuntimeError` if something
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
    items, rebuild = _assign(filter_spec, like, is_leaf, "like")
    items = _sharing_put(items)
    if not _is_path(path_or_file, "read"):
        return rebuild([_read_leaf(path_or_file, *item) for item in items])
    path = with_suffix(path_or_file, ".eqx")
    with open(path, "rb") as file:
        saved = _find_structure(file)
        leaves = list(_read_leaves(file, items, saved, _Mapped(path)))
        _refuse_rest(file, items, saved)
    return rebuild(leaves)


# What both directions share


def _assign(filter_spec: Any, tree: Any, is_leaf: Any, name: str):
    """For each leaf of `tree` its function, path and value; and how to rebuild the tree."""
    specs, treedef = jtu.tree_flatten_with_path(filter_spec)
    subtrees = flatten_up_to(treedef, filter_spec, tree, "filter_spec", name)
    items, treedefs = [], []
    for (prefix, spec), subtree in zip(specs, subtrees, strict=True):
        if not callable(spec):
            raise ValueError(
                "The leaves of `filter_spec` must be functions; at "
                f"`{path_str(prefix, 'filter_spec')}` there is a {type(spec).__name__}."
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


def _is_path(path_or_file: Any, method: str) -> bool:
    if isinstance(path_or_file, str | bytes | os.PathLike):
        return True
    if not hasattr(path_or_file, method):
        raise TypeError(
            "`path_or_file` must be a path, or a binary file with a method "
            f"`{method}`; got {path_or_file!r} of type {type(path_or_file).__name__}."
        )
    return False


def _error_at(path: _Path, problem: Any) -> LeafError:
    return LeafError(f"Error at leaf with path {path_str(path)}: {problem}", path)


# Writing


def _write_leaf(file: Any, spec: Any, path: _Path, leaf: Any) -> None:
    try:
        spec(file, leaf)
    except Exception as error:
        raise _error_at(path, error) from error


# Reading


def _sharing_put(items: list[Any]) -> list[Any]:
    """The same, where what the default function needs for each leaf is made once."""
    read = functools.partial(read_leaf, put=putter(copy=True))
    return [
        (read if spec is default_deserialise_filter_spec else spec, path, like)
        for spec, path, like in items
    ]


def _read_leaves(
    file: Any, items: list[Any], saved: _Structure | None, mapped: "_Mapped"
) -> Iterator[Any]:
    """The leaves, read one by one, and compared with the names and sums that were saved."""
    names, sums = saved or _Structure([], [])
    expected, sums_left = iter(names), iter(sums)

    def is_due(path: _Path) -> bool:
        return saved is None or next(expected, None) == path_str(path)

    end = file.tell()
    for item in items:
        _, path, like = item
        start = end
        try:
            leaf = _read_leaf(file, *item)
        except LeafError as error:
            if is_data(like) and not is_due(path):
                raise _other_structure(path, items, names) from error
            raise
        end = file.tell()
        if end != start:
            if not is_due(path):
                raise _other_structure(path, items, names)
            if next(sums_left, None) not in (None, mapped.checksum(start, end)):
                raise _error_at(path, "it is damaged: it does not have its checksum")
        yield leaf


def _read_leaf(file: Any, spec: Any, path: _Path, like: Any) -> Any:
    try:
        leaf = spec(file, like)
        check_alike(leaf, like)
    except RecordMismatch as error:
        raise LeafError(
            f"Deserialised leaf at path {path_str(path)} {error}. Make `like` as the tree "
            "was made that is in the file.",
            path,
        ) from None
    except EOFError as error:
        raise _error_at(
            path,
            f"{error}. Is the file complete, and was it saved from a tree like `like`?",
        ) from error
    except Exception as error:
        raise _error_at(path, error) from error
    return leaf


# The last record of a file, which names the leaves that were written before it, with a
# checksum of each. It tells its own length at its very end, so that it can be found before
# anything else is read.

_STRUCTURE_END: Final = re.compile(rb', "record_bytes": +(\d+)}$')


def _structure_record(written: list[tuple[str, int]], mapped: "_Mapped") -> bytes:
    starts = [0, *(end for _, end in written)]
    sums = [
        mapped.checksum(start, end)
        for start, (_, end) in zip(starts, written, strict=False)
    ]
    names = [name for name, _ in written]
    text = json.dumps({"equinox_like": 1, "leaves": names, "sums": sums})[:-1]

    def record(size: int) -> bytes:
        file = io.BytesIO()
        whole = f'{text}, "record_bytes": {size:>20}}}'
        write_record(file, np.array(whole.encode()))
        return file.getvalue()

    return record(len(record(0)))


class _Mapped:
    """A file in memory, to look at what is read from it or was written to it."""

    def __init__(self, path: str):
        with open(path, "rb") as file:
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                mapped = b""  # an empty file has no map
        self.data = np.frombuffer(mapped, np.uint8)

    def checksum(self, start: int, end: int) -> str:
        return checksum(self.data[start:end])


def _find_structure(file: Any) -> _Structure | None:
    """What stands at the end of the file, if it has that. Goes back to its start."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - 64))
    found = _STRUCTURE_END.search(file.read())
    structure = None
    if found is not None and int(found[1]) <= end:
        file.seek(end - int(found[1]))
        structure = _read_structure(file)
    file.seek(0)
    return structure


def _read_structure(file: Any) -> _Structure | None:
    start = file.tell()
    try:
        header = read_header(file)
        if header.shape == () and header.dtype.kind == "S":
            found = json.loads(read_data(file, header).item())
            return _Structure(list(found["leaves"]), list(found.get("sums", ())))
    except (AttributeError, EOFError, KeyError, RecursionError, TypeError, ValueError):
        pass
    file.seek(start)
    return None


def _refuse_rest(file: Any, items: list[Any], saved: _Structure | None) -> None:
    end = file.tell()
    written = _read_structure(file)
    if written is None and saved is not None:
        raise RuntimeError(
            f"{bytes_remaining(file)} bytes of the file are left over after all leaves of "
            f"`like` were read. {_differences(items, saved.names)}"
        )
    if rest := bytes_remaining(file):
        raise RuntimeError(
            f"{rest} bytes of the file are left over after the {end} that hold the leaves "
            "of `like`. It was saved from a larger tree, or something was appended to it."
        )


def _other_structure(path: _Path, items: list[Any], saved: Any) -> LeafError:
    return _error_at(
        path,
        "the file was saved from a tree of another structure than `like`. "
        + _differences(items, saved),
    )


def _differences(items: list[Any], saved: list[str]) -> str:
    like = [path_str(path) for _, path, leaf in items if is_data(leaf)]
    both = set(like) & set(saved)
    only_like = [path for path in like if path not in both]
    only_saved = [path for path in saved if path not in both]
    if not only_like and not only_saved:
        return f"The file has the order {_listed(saved)}, `like` has {_listed(like)}."
    return f"Only the file has {_listed(only_saved)}; only `like` has {_listed(only_like)}."


def _listed(paths: list[str]) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:5]) or "nothing"
    return shown + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
