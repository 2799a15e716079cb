"""Saving a tree by the paths of its leaves, as a safetensors file.

The file says by itself what is in it, and other programs can read it. Its data start at a
multiple of 64 bytes, largest alignment first, so that JAX can use most of them on the CPU
where the file is mapped, without a copy.

https://github.com/huggingface/safetensors describes the format: the length of the header
in 8 bytes, the header in JSON, the data. The `safetensors` package checks a file before
anything else looks at it.
"""

import functools
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import LeafError
from .._tree.paths import plain_path
from .atomic import replacing, with_suffix
from .checksum import checksum, has_checksum
from .placement import put_like, shardings_for
from .records import are_bools
from .tensors import Tensor, decode_tensor, encode_tensor, is_savable, what_is_wrong

_SUFFIX: Final = ".safetensors"
_METADATA: Final = "__metadata__"
# The key of our own entry in the metadata, and the version of what stands there.
_OWN: Final = "equinox_like"
_VERSION: Final = 1
# The sum of the header, beside it, as it cannot hold its own.
_OWN_SUM: Final = "equinox_like_sum"
_ALIGNMENT: Final = 64

_Path = tuple[Any, ...]


def save(
    path: Any,
    tree: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Saves the arrays and numbers of a tree to a safetensors file, by their paths.

    The file is replaced atomically: if the process is killed, the path holds the old
    file or the new one. The name of each tensor is the path of its leaf as in code,
    `layers[0].weight`, so that other programs find it. A leaf that occurs twice is
    saved twice.

    **Arguments:**

    - `path`: the file; `.safetensors` is appended if it has no suffix.
    - `tree`: any pytree. JAX and NumPy arrays of any dtype of numbers, typed PRNG keys,
        NumPy scalars and Python `bool`, `int`, `float` and `complex` are saved; other
        leaves are not.
    - `metadata`: strings to keep in the file beside the tree;
        [`equinox_like.load_metadata`][] reads them.
    - `durable`: whether to wait until all data are on the disk, so that the file
        survives a power failure. It may take ten times as long.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, for a leaf that cannot be saved: a
    traced array, one with parts on other hosts, an array of Python objects.

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
    texts = _check_metadata(metadata)
    tensors = _encode(tree)
    # Largest alignment first: then each one is aligned.
    tensors.sort(key=lambda item: -_alignment(item[2].nbytes))
    # As text at once: small objects by the ten thousand wake up the garbage collector.
    entries, kinds, end = [], [], 0
    for name, tensor, data in tensors:
        start, end = end, end + data.nbytes
        quoted = json.dumps(name)
        entries.append(
            f'{quoted}:{{"dtype":"{tensor.dtype}","shape":{_shape_text(tensor.shape)},'
            f'"data_offsets":[{start},{end}]}}'
        )
        kinds.append(f"{quoted}:{_kind_text(tensor, checksum(data))}")
    header = _header(texts, f"{{{','.join(entries)}}}", f"{{{','.join(kinds)}}}")
    size = len(header) + end
    with replacing(with_suffix(path, _SUFFIX), durable, size) as file:
        file.write(header)
        for _, _, data in tensors:
            file.write(data.data)


def load(
    path: Any,
    like: Any,
    *,
    strict: bool = True,
    verify: bool = True,
    shardings: Any = None,
) -> Any:
    """Loads what [`equinox_like.save`][] saved, into a tree like it.

    Leaves are found by their paths. One error lists all leaves that are missing, left
    over or of another shape or dtype; then nothing is loaded. No code from the file is
    run.

    On the CPU the file is mapped into memory, and most JAX arrays use the mapped memory
    without a copy: the operating system reads their values from the disk when they are
    first used. So do not write into a file that was loaded. Saving to the same path is
    safe, as that makes another file of the same name.

    **Arguments:**

    - `path`: as for `save`. Any safetensors file can be read whose names are the paths of
        `like`.
    - `like`: a tree with the structure, dtypes and shapes of what was saved. Its leaves may
        be `jax.ShapeDtypeStruct`s, for JAX arrays; whatever is not saved is taken from it.
        An array is put where that of `like` is committed to, or where the struct says.
    - `strict`: `False` takes leaves from `like` that the file does not have, and
        ignores what else is in the file. Other shapes and dtypes remain errors.
    - `verify`: whether to compare the data with their checksums. `False` is quicker: then
        data that are not used are not read at all, and of a sharded array each process
        reads only the bytes of its own shards.
    - `shardings`: a sharding for each array, or a prefix tree of shardings, such as
        [`equinox_like.shardings`][] makes of `like`. It takes precedence over where the
        arrays of `like` are. Where it is `None`, `like` decides.

    **Returns:**

    A tree of the structure of `like`.

    **Raises:**

    `FileNotFoundError`; `LeafError`, a `RuntimeError` with attribute `path`, which lists
    all differences, or names an array that a sharding does not fit; `RuntimeError` if the
    file is damaged, or of a newer version. `ValueError` if `shardings` is no prefix of
    `like`. `ImportError` without the package `safetensors`, which comes with
    `pip install safetensors`.
    """
    file = _File(with_suffix(path, _SUFFIX))
    items, treedef = jtu.tree_flatten_with_path(like)
    where = shardings_for(like, shardings)
    faults = Faults(file.path, "the file")
    names = [
        plain_path(key_path) if _is_wanted(leaf) else None for key_path, leaf in items
    ]
    for name, (key_path, leaf) in zip(names, items, strict=True):
        if name is None:
            continue
        tensor = file.tensors.get(name)
        if tensor is None:
            if strict or isinstance(leaf, jax.ShapeDtypeStruct):
                faults.missing(key_path, name)
        elif problem := what_is_wrong(tensor, leaf):
            faults.mismatch(key_path, name, str(tensor), problem)
        elif verify and not file.is_intact(name):
            faults.damaged(key_path, name)
    if strict:
        wanted = set(names)
        faults.left_over(name for name in file.tensors if name not in wanted)
    faults.raise_any()
    leaves = [
        file.read(name, leaf) if name is not None and name in file.tensors else leaf
        for name, (_, leaf) in zip(names, items, strict=True)
    ]
    return treedef.unflatten(put_like([leaf for _, leaf in items], leaves, where))


def load_metadata(path: Any) -> dict[str, str]:
    """The strings that were given to [`equinox_like.save`][] beside the tree.

    **Arguments:**

    - `path`: as for `save`; any safetensors file.

    **Raises:**

    As [`equinox_like.load`][], where it is about the file.
    """
    return _File(with_suffix(path, _SUFFIX)).metadata


class Faults:
    """What keeps a tree from being loaded, collected to be told at once."""

    def __init__(self, source: str, holder: str, target: str = "like"):
        self.source = source
        self.holder = holder
        self.target = target
        self.first: _Path | None = None
        self.lines: list[str] = []
        self.absent: list[str] = []
        self.extra: list[str] = []

    def missing(self, path: _Path, name: str) -> None:
        self._note(path)
        self.absent.append(name)

    def mismatch(self, path: _Path, name: str, found: str, wanted: str) -> None:
        self._note(path)
        self.lines.append(
            f"`{name}` is {found} in {self.holder}, but {wanted} in `{self.target}`"
        )

    def damaged(self, path: _Path, name: str) -> None:
        self._note(path)
        self.lines.append(f"`{name}` is damaged: its data do not have its checksum")

    def left_over(self, names: Iterator[str]) -> None:
        self.extra = sorted(names)

    def raise_any(self) -> None:
        lines = self.lines[:_SHOWN]
        if len(self.lines) > _SHOWN:
            lines.append(f"and {len(self.lines) - _SHOWN} more like these")
        if self.absent:
            lines.append(f"missing in {self.holder}: {_listed(self.absent)}")
        if self.extra:
            lines.append(f"only in {self.holder}: {_listed(self.extra)}")
        if lines:
            raise LeafError(
                f"Cannot load {self.source} into `{self.target}`:\n  "
                + "\n  ".join(lines),
                self.first or (),
            )

    def _note(self, path: _Path) -> None:
        if self.first is None:
            self.first = path


_SHOWN: Final = 20


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


# Writing


def _encode(tree: Any) -> list[tuple[str, Tensor, np.ndarray]]:
    items = jtu.tree_flatten_with_path(tree)[0]
    tensors, seen = [], {_METADATA}
    for path, leaf in items:
        if is_savable(leaf):
            name = plain_path(path)
            try:
                if name in seen:
                    raise ValueError("another leaf, or the metadata, is of this name")
                tensors.append((name, *encode_tensor(leaf)))
            except Exception as error:
                raise _error_at(path, str(error)) from error
            seen.add(name)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            raise _error_at(path, "a ShapeDtypeStruct has no values to save")
    return tensors


def _error_at(path: _Path, problem: str) -> LeafError:
    return LeafError(f"Error at leaf with path {plain_path(path)}: {problem}.", path)


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                "`metadata` maps strings to strings; turn other values into text, by "
                f"`json.dumps` for example: {key!r} is mapped to {value!r}."
            )
    for taken in {_OWN, _OWN_SUM} & metadata.keys():
        raise ValueError(
            f"The key {taken!r} of `metadata` is taken by the format itself."
        )
    return metadata


def _alignment(size: int) -> int:
    """The greatest power of two, up to 64, that divides `size`."""
    return min(size & -size, _ALIGNMENT) if size else _ALIGNMENT


def _header(texts: dict[str, str], entries: str, kinds: str) -> bytes:
    own = f'{{"version":{_VERSION},"leaves":{kinds}}}'
    metadata = {**texts, _OWN: own, _OWN_SUM: _header_sum(texts, own, entries)}
    header = _json({_METADATA: metadata}).encode()
    if len(entries) > len("{}"):
        header = header[:-1] + b"," + entries.encode()[1:]
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


@functools.lru_cache(maxsize=1024)
def _shape_text(shape: tuple[int, ...]) -> str:
    return _json(shape)


def _kind_text(tensor: Tensor, data_sum: str) -> str:
    if not tensor.kind:
        return f'{{"sum":"{data_sum}"}}'
    return _json({**tensor.kind, "sum": data_sum})


def _header_sum(texts: dict[str, str], own: str | None, listed: str) -> str:
    return f"{zlib.crc32(f'{_json(texts)}{own}{listed}'.encode()):08x}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _is_wanted(leaf: Any) -> bool:
    return is_savable(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


# Reading


class _File:
    """A safetensors file that was found to be sound, mapped into memory."""

    def __init__(self, path: str):
        self.path = path
        _require_sound(path)
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            # Private: whoever writes into the memory does not write into the file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Not all of it may be tensors: a file that changed after it was checked.
        self.data = np.frombuffer(mapped, np.uint8)[8 + size :]
        self.data.flags.writeable = False
        self.metadata: dict[str, str] = header.pop(_METADATA, None) or {}
        own = self.metadata.pop(_OWN, None)
        own_sum = self.metadata.pop(_OWN_SUM, None)
        self.entries = header
        self.kinds: dict[str, dict[str, Any]] = self._kinds(own, own_sum)
        self.tensors = {name: self._tensor(name) for name in header}

    def read(self, name: str, like: Any) -> Any:
        return decode_tensor(self.tensors[name], self._bytes(name), like)

    def is_intact(self, name: str) -> bool:
        data = self._bytes(name)
        expected = self.kinds.get(name, {}).get("sum")
        if expected is None:
            return self.tensors[name].leaf_dtype != np.bool_ or are_bools(data)
        return has_checksum(data, expected)

    def _bytes(self, name: str) -> np.ndarray:
        start, end = self.entries[name]["data_offsets"]
        return self.data[start:end]

    def _kinds(self, own: str | None, own_sum: str | None) -> dict[str, Any]:
        """What we said of the tensors, if it was us who wrote the file."""
        if own is None and own_sum is None:
            return {}
        try:
            described = json.loads(own or "")
            version, kinds = described["version"], described["leaves"]
        except (KeyError, RecursionError, TypeError, ValueError):
            version, kinds = _VERSION, {}
            own_sum = None
        if version != _VERSION:
            raise RuntimeError(
                f"{self.path} has version {version!r} of the format of `save`; this "
                f"`equinox_like` reads version {_VERSION}. Install a newer one."
            )
        found = _header_sum(self.metadata, own, _json(self.entries))
        if found != own_sum or not _is_table_of_texts(kinds):
            raise self._damage("what it says of its tensors does not hold together")
        return kinds

    def _tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = Tensor(entry["dtype"], tuple(entry["shape"]), self.kinds.get(name, {}))
        start, end = entry["data_offsets"]
        if not tensor.fits(end - start):
            raise self._damage(f"`{name}` is not what the file says that it is")
        return tensor

    def _damage(self, problem: str) -> RuntimeError:
        return RuntimeError(f"{self.path} is damaged: {problem}.")


def _is_table_of_texts(kinds: Any) -> bool:
    return isinstance(kinds, dict) and all(
        isinstance(kind, dict) and all(isinstance(x, str) for x in kind.values())
        for kind in kinds.values()
    )


def _require_sound(path: str) -> None:
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "Loading a safetensors file needs the package `safetensors`: "
            "`pip install safetensors`."
        ) from None
    if not os.path.isfile(path):
        open(path, "rb").close()  # the error that says why
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise RuntimeError(
            f"{path} is no safetensors file, or is damaged: {error}."
        ) from error
