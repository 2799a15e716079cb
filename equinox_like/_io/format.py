"""The safetensors file of a tree: the header that `save` writes, and `File` to read it.

https://github.com/huggingface/safetensors describes the format: the length of the
header in 8 bytes, the header in JSON, the data. The `safetensors` package validates a
file before we read it.
"""

import functools
import json
import math
import os
import struct
import zlib
from typing import Any, Final

import numpy as np

from .checksums import checksum, is_intact
from .files import content_of, foreign, opened
from .npy import are_bools
from .tensors import Tensor, decode_tensor

METADATA: Final = "__metadata__"
# The key of our own entry in the metadata, and the version of its format.
_OWN: Final = "equinox_like"
_VERSION: Final = 1
# The key of the checksum of the header, which our own entry is part of.
_OWN_SUM: Final = "equinox_like_sum"
RESERVED: Final = frozenset({_OWN, _OWN_SUM})
_ALIGNMENT: Final = 64
# The `safetensors` package reads no header that is longer.
_MAX_HEADER: Final = 100_000_000


def alignment(size: int) -> int:
    """The greatest power of two, up to 64, that divides `size`; 0 for a size of 0."""
    return min(size & -size, _ALIGNMENT)


Named = tuple[str, Tensor, np.ndarray]  # with the bytes of the tensor


def header(texts: dict[str, str], tensors: list[Named]) -> bytes:
    """The bytes before the data of `tensors`, which follow in this order."""
    # Built as text: many small objects would trigger garbage collection.
    entries, kinds, end = [], [], 0
    for name, tensor, data in tensors:
        start, end = end, end + data.nbytes
        quoted = json.dumps(name)
        entries.append(
            f'{quoted}:{{"dtype":"{tensor.dtype}","shape":{_shape_text(tensor.shape)},'
            f'"data_offsets":[{start},{end}]}}'
        )
        kinds.append(f"{quoted}:{_kind_text(tensor, data)}")
    listed = f"{{{','.join(entries)}}}"
    own = f'{{"version":{_VERSION},"leaves":{{{",".join(kinds)}}}}}'
    metadata = {**texts, _OWN: own, _OWN_SUM: _header_sum(texts, own, listed)}
    head = _json({METADATA: metadata}).encode()
    if entries:
        head = head[:-1] + b"," + listed.encode()[1:]
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    if len(head) > _MAX_HEADER:
        raise ValueError(
            f"The header of the file would have {len(head):,} bytes, and safetensors "
            f"allows {_MAX_HEADER:,}. It has the metadata, of {len(str(texts)):,} "
            f"characters, and the names of {len(tensors):,} leaves: save large metadata "
            "as an array of bytes in the tree, and a tree of so many leaves in parts."
        )
    return struct.pack("<Q", len(head)) + head


@functools.lru_cache(maxsize=1024)
def _shape_text(shape: tuple[int, ...]) -> str:
    return _json(shape)


def _kind_text(tensor: Tensor, data: np.ndarray) -> str:
    sums = checksum(data)
    return _json(tensor.kind | {"sum": sums}) if tensor.kind else f'{{"sum":"{sums}"}}'


def _header_sum(texts: dict[str, str], own: str | None, listed: str) -> str:
    return f"{zlib.crc32(f'{_json(texts)}{own}{listed}'.encode()):08x}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class File:
    """A validated safetensors file, mapped into memory."""

    def __init__(self, path_or_file: Any):
        name = getattr(path_or_file, "name", path_or_file)
        is_named = isinstance(name, str)
        self.path = name if is_named else f"the {type(path_or_file).__name__}"
        with opened(path_or_file) as file:
            _require_sound(self.path, file)
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            content = content_of(file)
        # Each tensor is checked below: the file may have changed since its validation.
        self.data = content[8 + size :]
        self.data.flags.writeable = False
        self.metadata: dict[str, str] = header.pop(METADATA, None) or {}
        own = self.metadata.pop(_OWN, None)
        own_sum = self.metadata.pop(_OWN_SUM, None)
        self.entries = header
        self.kinds: dict[str, dict[str, Any]] = self._kinds(own, own_sum)
        self.tensors = {name: self._tensor(name) for name in header}

    def read(self, name: str, like: Any) -> Any:
        return decode_tensor(self.tensors[name], self._bytes(name), like)

    def is_intact(self, name: str, ranges: list[tuple[int, int]] | None = None) -> bool:
        """Whether the data of a tensor match their checksum.

        With `ranges` of elements, only the pieces with these elements are read.
        """
        data, tensor = self._bytes(name), self.tensors[name]
        sums = self.kinds.get(name, {}).get("sum")
        if sums is None:
            return tensor.leaf_dtype != np.bool_ or are_bools(data)
        if ranges is not None:
            width = data.nbytes // math.prod(tensor.leaf_shape)
            ranges = [(width * start, width * end) for start, end in ranges]
        return is_intact(data, sums, ranges)

    def _bytes(self, name: str) -> np.ndarray:
        start, end = self.entries[name]["data_offsets"]
        return self.data[start:end]

    def _kinds(self, own: str | None, own_sum: str | None) -> dict[str, Any]:
        """Our own metadata of the tensors; empty if another program wrote the file."""
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
                f"{self.path} was saved in version {version!r} of the format; this "
                f"`equinox_like` reads version {_VERSION}. Install a newer "
                "`equinox_like`."
            )
        found = _header_sum(self.metadata, own, _json(self.entries))
        if found != own_sum or not _is_table_of_texts(kinds):
            raise self._damage("its description of the tensors is inconsistent")
        return kinds

    def _tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = Tensor(entry["dtype"], tuple(entry["shape"]), self.kinds.get(name, {}))
        start, end = entry["data_offsets"]
        if not tensor.fits(end - start):
            raise self._damage(
                f"the data of `{name}` do not fit the dtype and shape given in the file"
            )
        return tensor

    def _damage(self, problem: str) -> RuntimeError:
        return RuntimeError(f"{self.path} is damaged: {problem}.")


def _is_table_of_texts(kinds: Any) -> bool:
    return isinstance(kinds, dict) and all(
        isinstance(kind, dict) and all(isinstance(x, str) for x in kind.values())
        for kind in kinds.values()
    )


def _require_sound(path: str, file: Any) -> None:
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "Loading a safetensors file needs the package `safetensors`: "
            "`pip install safetensors`."
        ) from None
    try:
        with safetensors.safe_open(file.name, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        start = file.read(1 << 16)
        if text := foreign(start):
            problem = f". It {text}."
        else:
            problem = f", or is damaged: {error}.{_other_size(start[:8], file)}"
        if not start and file.name != path:  # not opened here, by its path
            problem += " An open file may need `file.seek(0)` first."
        raise RuntimeError(f"{path} is not a safetensors file{problem}") from error


def _other_size(start: bytes, file: Any) -> str:
    """What to do if the file is shorter or longer than its header says, else nothing."""
    size = os.fstat(file.fileno()).st_size - 8
    length = int.from_bytes(start, "little")
    file.seek(8)
    try:
        entries = json.loads(file.read(min(length, _MAX_HEADER)))
        entries.pop(METADATA, None)
        ends = (entry["data_offsets"][1] for entry in entries.values())
        behind = size - length - max(ends, default=0)
    except Exception:  # what is damaged may raise any error
        return ""
    if behind < 0:
        return f" The file is cut: its last {-behind} bytes are missing."
    return (
        f" {behind} bytes follow the tree that starts the file. `save` needs the rest of "
        "an open file for itself: save several trees as one, `{'a': a, 'b': b}`, each to "
        "a file of its own, or by `tree_serialise_leaves`, one after the other."
    ) * (behind > 0)
