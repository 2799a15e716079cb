"""`save` and `load`: a tree as a safetensors file, by the paths of its leaves.

The file describes its own content, and other programs can read it. Its data start at a
multiple of 64 bytes, and tensors are sorted by alignment, largest first. So on the CPU,
JAX can use most of them in the mapped file, without a copy.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu

from .._compat.arrays import weakly_typed
from .._tree.cycles import check_no_cycle
from .._tree.deleted import deleted_named
from .._tree.nodes import describe_node, plain_path
from .._tree.require import check_not_callable, check_not_class
from .._typing import FilePath, Readable, Writable
from .faults import OTHER_SUM, Faults, Wanted, error_at, is_unicode, renamer
from .files import is_file, is_path, with_suffix
from .format import (
    METADATA,
    RESERVED,
    Named,
    encode_tensor,
    is_loadable,
    is_savable,
    what_is_wrong,
)
from .placement import HOMELESS, is_homeless, local_ranges, put_like, shardings_for
from .shards import INDEX, SUFFIX, open_file, write, write_shards

_Tree = TypeVar("_Tree")


@deleted_named
def save(
    path_or_file: FilePath | Writable,
    tree: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
    max_shard_size: int | None = None,
) -> None:
    """Saves the arrays and numbers of a tree to a safetensors file, by their paths.

    A file given by its path is replaced atomically: if the process is killed, the path
    holds the old file or the new one. The name of each tensor is the path of its leaf as
    in code, `layers[0].weight`, so that other programs find it. A leaf that occurs twice
    is saved twice.

    **Arguments:**

    - `path_or_file`: a path, to which `.safetensors` is appended if it has no suffix; or
        a binary file open for writing, such as an `io.BytesIO` or what `fsspec.open` opens
        in cloud storage. Nothing may follow in that file: to put several trees into one,
        save a dictionary of them.
    - `tree`: any pytree. JAX and NumPy arrays of any dtype of numbers, typed PRNG keys,
        NumPy scalars and Python `bool`, `int`, `float` and `complex` are saved; other
        leaves are not.
    - `metadata`: a dictionary of strings to keep in the file beside the tree;
        [`equinox_like.load_metadata`][] reads them. They must be valid Unicode.
    - `durable`: whether to wait until all data are on the disk, so that a file given by
        its path survives a power failure. It may take ten times as long.
    - `max_shard_size`: saves to several files instead, with at most so many bytes of
        tensors in each, and to an index of them, which other programs read, too:
        `model.safetensors.index.json`. Pass its path to `load`. The path is that of the
        index, or without `.index.json`. A larger tensor has a file of its own. The index
        is replaced atomically; then the files of the old one are deleted.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, for a leaf that cannot be saved: a
    traced array, one with parts on other hosts, an array of Python objects. `OSError` if
    the file cannot be written, for example because the disk is full. `TypeError` if `tree`
    is a class or a function in place of a tree. `ValueError` if an open file is in another
    mode, or is to be `durable` or an index, for a `max_shard_size` that is not a positive
    integer, and for metadata and names that the format cannot hold. `FileExistsError` if
    an index would stand beside a single file. An old file is not replaced then.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        eqx.save("model", model, metadata={"trained": "yes"})

        like = eqx.nn.Linear(3, 2, key=jax.random.key(1))
        assert eqx.tree_equal(eqx.load("model", like), model)
        assert eqx.load_metadata("model") == {"trained": "yes"}
        ```
    """
    check_not_callable(tree, "tree")
    check_no_cycle("tree", tree)
    texts = _check_metadata(metadata)
    place = _located(path_or_file, "wb")
    if durable and not is_path(place):
        raise ValueError(
            "`durable=True` needs a path. An open file is on the disk after "
            "`file.flush()` and `os.fsync(file.fileno())`."
        )
    _check_shard_size(max_shard_size, place)
    tensors = _encode(tree)
    if max_shard_size is None:
        write(place, texts, tensors, durable)
    else:
        write_shards(place, texts, tensors, durable, max_shard_size)


def load(
    path_or_file: FilePath | Readable,
    like: _Tree,
    *,
    strict: bool = True,
    verify: bool = True,
    shardings: Any = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> _Tree:
    """Loads what [`equinox_like.save`][] saved, into a tree like it.

    Leaves are found by their paths. One error lists all leaves that are missing, left
    over or of another shape or dtype; then nothing is loaded. No code from the file is
    run.

    On the CPU the file is mapped into memory, and most JAX arrays use the mapped memory
    without a copy: the operating system reads their values from the disk when they are
    first used. So do not write into a file that was loaded, as `cp` onto it does, or take
    a [`equinox_like.tree_copy`][]. Saving to the same path is safe, because it makes a
    new file.

    **Arguments:**

    - `path_or_file`: a path as for `save`, or a binary file open for reading, whose rest
        is copied to a temporary file. Any safetensors file whose names are the paths of
        `like` can be read, and so can the path of an index, `*.safetensors.index.json`,
        of several files in the same folder.
    - `like`: a tree with the structure, dtypes and shapes of what was saved. Its leaves may
        be `jax.ShapeDtypeStruct`s, for JAX arrays; whatever is not saved is taken from it.
        An array is placed where the array of `like` is committed, or as the struct says;
        a struct on the explicit axes of a mesh needs `jax.set_mesh`.
    - `strict`: if `False`, leaves that the file does not have are taken from `like`, and
        leaves that only the file has are ignored. Other shapes and dtypes remain errors,
        and so does a file that has none of the leaves.
    - `verify`: whether to compare the data with their checksums. `False` is faster, and
        data that are not used are then not read at all. If an array is sharded over
        several processes, each process reads and checks only the pieces of 1 MiB that
        contain its own shards, or without `verify` only the shards.
    - `shardings`: a device, a sharding, or a prefix tree of these, such as
        [`equinox_like.Layout.shardings`][] makes of `like`. It takes precedence over where
        the arrays of `like` are. Where it is `None`, `like` decides. An array that was
        saved from several devices needs one or the other, if there are several devices.
    - `rename`: from a path in `like`, such as `"layers[0].weight"`, to the path in the
        file: a dictionary of those that differ, or a function for all.

    **Returns:**

    A tree of the structure of `like`.

    **Raises:**

    `FileNotFoundError`; `LeafError`, a `RuntimeError` with attribute `path`, which
    lists all differences, or names an array that a sharding does not fit;
    `RuntimeError` if the file is damaged, or of a newer version. `ValueError` if
    `shardings` is not a prefix of `like`, or a key of `rename` is not a path in `like`.
    `ImportError` without the package `safetensors`, which comes with
    `pip install safetensors`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        def make(key):
            return eqx.nn.MLP(3, 2, 8, 1, key=key)

        model = make(jax.random.key(0))
        eqx.save("model", model)
        # The structure of the model, without arrays that would be thrown away.
        like = eqx.filter_eval_shape(make, jax.random.key(0))
        assert eqx.tree_equal(eqx.load("model", like), model)
        ```
    """
    check_not_class(like, "like")
    check_no_cycle("like", like)
    file = open_file(_located(path_or_file, "rb"))
    items, treedef = jtu.tree_flatten_with_path(like)
    where = shardings_for(like, shardings)
    faults = Faults(file.path, "the file")
    there = renamer(rename, like, "like", plain_path)
    wanted = {
        i: Wanted(
            path,
            own := plain_path(path),
            name := there(own),
            leaf,
            where[i],
            file.tensors.get(name),
        )
        for i, (path, leaf) in enumerate(items)
        if is_loadable(leaf)
    }

    def problem_of(leaf: Wanted) -> str | None:
        tensor = leaf.saved
        if problem := what_is_wrong(tensor, leaf.like):
            is_unknown = tensor.leaf_dtype is None
            why = "; `load` does not know this dtype" * is_unknown
            return faults.mismatch(str(tensor), problem) + why
        if "devices" in tensor.kind and is_homeless(leaf.like, leaf.sharding):
            return HOMELESS
        ranges = local_ranges(tensor.leaf_shape, leaf.sharding)
        is_damaged = verify and not file.is_intact(leaf.name, ranges)
        return f"is damaged: {OTHER_SUM}" if is_damaged else None

    faults.compare(list(wanted.values()), file.tensors, problem_of, strict)
    faults.raise_any(faults.fix_by_options(strict))
    read = {i: leaf for i, leaf in wanted.items() if leaf.saved}
    leaves = [leaf for _, leaf in items]
    for i, leaf in read.items():
        try:
            leaves[i] = file.read(leaf.name, leaf.like)
        except (OverflowError, ValueError) as error:
            raise error_at(leaf.path, f"it has {error}.") from None
    leaves = put_like(items, leaves, where)
    for i, leaf in read.items():
        if leaf.saved.is_weak and isinstance(leaves[i], jax.Array):
            leaves[i] = weakly_typed(leaves[i])
    return treedef.unflatten(leaves)


def load_metadata(path_or_file: FilePath | Readable) -> dict[str, str]:
    """The strings that were given to [`equinox_like.save`][] beside the tree.

    **Arguments:**

    - `path_or_file`: as for `load`; any safetensors file, or an index. An open file is read
        to its end.

    **Raises:**

    The errors of [`equinox_like.load`][] about the file.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        eqx.save("weights", {"w": jnp.ones(2)}, metadata={"step": "100"})
        assert eqx.load_metadata("weights") == {"step": "100"}
        ```
    """
    return open_file(_located(path_or_file, "rb")).metadata


def _located(path_or_file: Any, mode: str) -> Any:
    """The path, with a suffix; or the file, if it is open in this mode."""
    does, can = ("write", "writable") if mode == "wb" else ("read", "readable")
    if not is_file(path_or_file, does):
        return with_suffix(path_or_file, SUFFIX)
    allows = getattr(path_or_file, can, lambda: True)
    if isinstance(path_or_file, io.TextIOBase) or not allows():
        raise ValueError(f"`path_or_file` must be a file open in the mode {mode!r}.")
    return path_or_file


def _check_shard_size(size: Any, place: Any) -> None:
    is_of_index = is_path(place) and place.endswith(INDEX)
    if size is None and is_of_index:
        raise ValueError(f"A path that ends with `{INDEX}` needs `max_shard_size=`.")
    if size is not None and not (is_path(place) and type(size) is int and size > 0):
        raise ValueError(
            "`max_shard_size` must be a number of bytes, such as `5 * 10**9`, and needs a "
            f"path; got {size!r}."
        )


def _encode(tree: Any) -> list[Named]:
    items = jtu.tree_flatten_with_path(tree)[0]
    tensors, seen = [], {METADATA}
    for path, leaf in items:
        name = plain_path(path)
        try:
            if is_savable(leaf):
                if not is_unicode(name):
                    raise ValueError("its name is not valid Unicode: rename it")
                if name in seen:
                    raise ValueError(
                        "another leaf, or the metadata, has the same name: rename it"
                    )
                tensors.append((name, *encode_tensor(leaf)))
                seen.add(name)
        except Exception as error:
            raise error_at(path, f"{str(error).rstrip('.')}.") from error
    return tensors


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(
            "`metadata` must be a dictionary from strings to strings; got "
            f"{describe_node(metadata)}."
        )
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"`metadata` must map strings to strings, but {key!r} is mapped to "
                f"{value!r}. Convert other values to text, for example with "
                "`json.dumps`."
            )
        if not is_unicode(key + value):
            raise ValueError(
                f"`metadata` must be valid Unicode, but {key!r} is mapped to {value!r}. "
                "Convert such text, which `os.fsdecode` makes, with `json.dumps`."
            )
    for taken in RESERVED & metadata.keys():
        raise ValueError(
            f"`metadata` cannot have the key {taken!r}, which the file format reserves."
        )
    return metadata
