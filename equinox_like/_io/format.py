"""The safetensors format: a leaf as one tensor, the header of a file, and its reader.

https://github.com/huggingface/safetensors describes the format: the length of the
header in 8 bytes, the header in JSON, the data. The `safetensors` package validates a
file before we read it.

safetensors supports fewer dtypes than JAX, and neither Python numbers nor typed PRNG
keys. Such a leaf is stored as a tensor of a supported dtype, with an entry in the
metadata that describes the leaf.
"""

import functools
import json
import math
import os
import struct
import zlib
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .._compat.tracing import Tracer
from .._tree.arrays import describe_array, describe_type, is_typed_key, with_key
from .._tree.filters import is_array, is_array_or_struct, is_number
from .checksums import checksum, is_intact
from .files import content_of, foreign, opened
from .placement import WIDE, is_spread, is_struct_of, narrowed

# One leaf as one tensor

# The dtypes that all versions of safetensors can read, from our names to theirs.
_BITS: Final = (8, 16, 32, 64)
_NATIVE: Final = {
    "bool": "BOOL",
    **{f"uint{n}": f"U{n}" for n in _BITS},
    **{f"int{n}": f"I{n}" for n in _BITS},
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
# From the names in files to ours. Only newer versions and other programs write the last.
_FROM_NATIVE: Final = {there: here for here, there in _NATIVE.items()} | {
    "C64": "complex64",
    "F4": "float4_e2m1fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
# A byte has two elements, the first in its lower four bits.
_PACKED: Final = "F4"
# The dtypes that NumPy lacks. A name in a file is looked up here, and nowhere else.
_EXTENSIONS: Final = {
    name: np.dtype(value)
    for name, value in vars(ml_dtypes).items()
    if isinstance(value, type) and issubclass(value, np.generic)
}
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}
# The types of Python numbers, and the dtypes that each may be loaded from.
NUMBERS: Final[dict[Any, Any]] = {
    bool: jnp.bool_,
    int: jnp.integer,
    float: jnp.floating,
    complex: jnp.complexfloating,
}


class Tensor(NamedTuple):
    """The description of one tensor in a file.

    `kind` has what safetensors cannot describe: `{"dtype": ...}`, `{"python": ...}`,
    `{"dtype": ..., "key": ...}` with the implementation of a PRNG,
    `{"weak_type": "true"}` for a weak dtype, `{"jax": "true"}` for a JAX array of 64
    bits, or `{"devices": ...}` with their number for an array on several devices.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: dict[str, str]

    @property
    def leaf_dtype(self) -> np.dtype | None:
        """The dtype of the stored array; `None` if this version does not know it."""
        if "key" in self.kind:
            return np.dtype("uint32")
        return _known_dtype(self._dtype_name)

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        # Unsupported dtypes have one more axis, over the parts of an element.
        return self.shape[:-1] if "dtype" in self.kind else self.shape

    @property
    def is_weak(self) -> bool:
        return self.kind.get("weak_type") == "true"

    def fits(self, size: int) -> bool:
        """Whether dtype and shape need `size` bytes. `True` for an unknown dtype."""
        dtype = self.leaf_dtype
        if dtype is None:
            return True
        shape = self.shape if "key" in self.kind else self.leaf_shape
        size *= 2 if self.dtype == _PACKED else 1
        return size == dtype.itemsize * math.prod(shape)

    @property
    def _dtype_name(self) -> str:
        return self.kind.get("dtype") or _FROM_NATIVE.get(self.dtype, self.dtype)

    def __str__(self) -> str:
        if "python" in self.kind:
            return f"a Python {self.kind['python']}"
        return describe_type(self._dtype_name, self.leaf_shape)


def is_savable(leaf: Any) -> bool:
    """Whether a leaf is data, which files hold.

    **Raises:**

    `TypeError` for a `jax.Ref`, and for a `jax.ShapeDtypeStruct`.
    """
    if isinstance(leaf, jax.Ref):
        raise TypeError("a `jax.Ref` cannot be saved: save what it holds, `ref[...]`")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError("a ShapeDtypeStruct has no values to save")
    return is_array(leaf) or is_number(leaf)


def is_loadable(leaf: Any) -> bool:
    """Whether a file has data for this leaf of a template."""
    return is_array_or_struct(leaf) or is_number(leaf)


def number_type(number: Any) -> Any:
    """Which of Python's types of numbers `number` is an instance of."""
    return next(t for t in NUMBERS if isinstance(number, t))


def in_numpy(leaf: Any) -> np.ndarray:
    """The values of an array. **Raises:** `TypeError` if they are not all here."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask")
    try:
        array = np.asarray(leaf)
    except Exception:
        if isinstance(leaf, Tracer):
            raise TypeError(
                "a traced array has no values to save: save outside of `jit`"
            ) from None
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise TypeError(
                "a part of the array is on other hosts. Save by `orbax.Save`. Or call "
                "`filter_shard(tree, NamedSharding(mesh, PartitionSpec()))` in all "
                "processes, which gives each the whole tree, and save that in one"
            ) from None
        raise
    # NumPy takes any byte but 0 for true, JAX and the readers of files only 1.
    if array.dtype == np.bool_:
        return np.asarray(array.view(np.uint8) != 0)
    return array


def are_bools(data: np.ndarray) -> bool:
    """Whether these bytes are 0 or 1. JAX does not check this: it would treat 2 as
    neither true nor false."""
    return not (data > 1).any()


def encode_tensor(leaf: Any) -> tuple[Tensor, np.ndarray]:
    """The description of `leaf`, and its bytes as a 1D array of `uint8`.

    **Raises:**

    `TypeError` for a leaf without data, or with data that cannot be saved.
    """
    kind: dict[str, str] = {}
    if isinstance(leaf, jax.Array):
        if is_spread(leaf):
            kind["devices"] = str(len(leaf.sharding.device_set))
        if is_typed_key(leaf):
            kind["dtype"] = leaf.dtype.name
            kind["key"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        else:
            if leaf.weak_type:
                kind["weak_type"] = "true"
            if leaf.dtype.name in WIDE:
                kind["jax"] = "true"
    elif not isinstance(leaf, (np.ndarray, np.generic)):
        python = number_type(leaf)
        kind = {"python": python.__name__}
        try:
            leaf = np.asarray(leaf, python)
        except OverflowError:
            raise TypeError("the integer needs more than 64 bits") from None
    array = in_numpy(leaf)
    tensor, little = _as_stored(array.dtype, array.shape)
    if not array.flags.c_contiguous or array.dtype != little:
        array = np.asarray(array, little, order="C")
    if kind:
        tensor = tensor._replace(kind=kind | tensor.kind)
    return tensor, array.reshape(-1).view(np.uint8)


@functools.lru_cache(maxsize=1024)
def _as_stored(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[Tensor, np.dtype]:
    """The description of an array with this dtype and shape, and its dtype in the
    format's little-endian byte order."""
    name = dtype.name
    if _known_dtype(name) is None:
        raise TypeError(f"arrays of dtype {dtype} cannot be saved")
    little = dtype.newbyteorder("<")
    if name in _NATIVE:
        return Tensor(_NATIVE[name], shape, {}), little
    # Other dtypes are stored with one more axis, over the parts of an element.
    kind = {"dtype": name}
    if name in _COMPLEX:
        return Tensor(_NATIVE[_COMPLEX[name]], (*shape, 2), kind), little
    return Tensor("U8", (*shape, dtype.itemsize), kind), little


def decode_tensor(tensor: Tensor, data: np.ndarray, like: Any) -> Any:
    """The leaf in `data`, with the type of `like`, which must fit.

    For a JAX array, it returns a NumPy array that shares the memory of `data`, unless the
    array is narrowed.

    **Raises:**

    `OverflowError` for an integer that does not fit the narrower dtype; `ValueError` for
    keys that are not what the file says, as in a hostile file.
    """
    dtype = tensor.leaf_dtype
    assert dtype is not None
    if tensor.dtype == _PACKED:
        data = np.stack([data & 15, data >> 4], axis=-1)
    if "key" in tensor.kind:
        words = jax.device_put(data.view(np.uint32).reshape(tensor.shape).copy())
        try:
            return with_key(words, like)
        except TypeError:  # another number of words
            text = f"keys in the file that are not {like.dtype.name}"
            raise ValueError(text) from None
    array = data.view(dtype.newbyteorder("<")).reshape(tensor.leaf_shape)
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array if array.dtype == like.dtype else narrowed(array, like.dtype)
    return as_numpy_or_number(array, like)


def as_numpy_or_number(array: np.ndarray, like: Any) -> Any:
    """A copy of `array` as an array of NumPy, a scalar of NumPy or a number of Python, as
    `like` is one."""
    if isinstance(like, np.ndarray):
        return np.array(array, like.dtype)
    if isinstance(like, np.generic):
        return like.dtype.type(array[()])
    return type(like)(array.item())


def what_is_wrong(tensor: Tensor, like: Any) -> str | None:
    """A description of `like` if `tensor` does not fit it, else `None`."""
    dtype = tensor.leaf_dtype
    if is_array_or_struct(like):
        wanted = describe_array(like)
        if dtype is None:
            return wanted
        found = str(tensor)
        fits = found == wanted or (
            "jax" not in tensor.kind and is_struct_of(like, found)
        )
        return None if fits else wanted
    python = number_type(like)
    stored = tensor.kind.get("python")
    fits = (
        dtype is not None
        and "key" not in tensor.kind
        and not tensor.leaf_shape
        and (stored is None or stored == python.__name__)
        and jnp.issubdtype(dtype, NUMBERS[python])
    )
    return None if fits else f"a Python {python.__name__}"


@functools.cache
def _known_dtype(name: str) -> np.dtype | None:
    """The dtype with this name, or `None` if it is not a dtype of plain numbers."""
    is_common = name in _NATIVE or name in _COMPLEX
    return jnp.dtype(name) if is_common else _EXTENSIONS.get(name)


# The file

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
    entries, kinds, end = {}, {}, 0
    for name, tensor, data in tensors:
        start, end = end, end + data.nbytes
        offsets = {"data_offsets": (start, end)}
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape} | offsets
        kinds[name] = tensor.kind | {"sum": checksum(data)}
    own = _json({"version": _VERSION, "leaves": kinds})
    own_sum = _header_sum(texts, own, _json(entries))
    metadata = {**texts, _OWN: own, _OWN_SUM: own_sum}
    head = _json({METADATA: metadata, **entries}).encode()
    head += b" " * (-(8 + len(head)) % _ALIGNMENT)
    if len(head) > _MAX_HEADER:
        raise ValueError(
            f"The header of the file would have {len(head):,} bytes, and safetensors "
            f"allows {_MAX_HEADER:,}. It has the metadata, of {len(str(texts)):,} "
            f"characters, and the names of {len(tensors):,} leaves: save large metadata "
            "as an array of bytes in the tree, and a tree of so many leaves in parts."
        )
    return struct.pack("<Q", len(head)) + head


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

    def array(self, name: str) -> np.ndarray:
        """A tensor as an array of NumPy, in the mapped memory; of PRNG keys, their data."""
        tensor = self.tensors[name]
        if tensor.leaf_dtype is None or not self.is_intact(name):
            text = f"`{name}`, {tensor}, is damaged or of an unknown dtype"
            raise RuntimeError(f"{text}, in {self.path}.")
        if "key" in tensor.kind:
            tensor = tensor._replace(kind={})
        like = jax.ShapeDtypeStruct(tensor.leaf_shape, tensor.leaf_dtype)
        return decode_tensor(tensor, self._bytes(name), like)

    def read(self, name: str, like: Any) -> Any:
        return decode_tensor(self.tensors[name], self._bytes(name), like)

    def is_intact(self, name: str, ranges: list[tuple[int, int]] | None = None) -> bool:
        """Whether the data of a tensor match their checksum.

        With `ranges` of elements, only the pieces with these elements are read.
        """
        data, tensor = self._bytes(name), self.tensors[name]
        sums = tensor.kind.get("sum")
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
