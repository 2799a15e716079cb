"""One leaf as one record of NumPy's `.npy` format, and the index of an `.eqx` file.

`.npy` does not support JAX's small floats and integers, nor typed PRNG keys. Such a
leaf is stored under a structured dtype whose only field has the leaf's dtype as its
name (`float8_e4m3fn`, `key<threefry2x32>`). So `numpy.load` can read it, and the header
names the dtype. `bfloat16` is stored as raw two-byte values, as by `numpy.save`. Nothing
is ever pickled.

The index is the last record of a file that the library opened itself. It names the leaves
before it, with the checksum and the end of each. It ends with its own length, so that it
can be found before the other records are read.
"""

import ast
import dataclasses
import functools
import io
import json
import math
import re
import struct
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .._compat.arrays import Put, putter
from .._errors import LeafError
from .._tree.arrays import is_typed_key, key_impl, with_key
from .._tree.filters import is_array_or_struct, is_number
from .._tree.nodes import path_str, with_article
from .checksums import checksum, is_intact
from .files import foreign, read_some, read_up_to, whole, write_all
from .format import NUMBERS, are_bools, in_numpy, is_loadable, is_savable, number_type
from .placement import narrowed, narrows_to, not_in_jax, sharding_for

MAGIC: Final = b"\x93NUMPY"
# NumPy's own limit: parsing a longer text from an untrusted file may crash Python.
_MAX_HEADER: Final = 10_000
# Below this size in bytes, the overhead of a record takes longer than its data.
_SMALL: Final = 1 << 16


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a record, which is read before its data."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Writing a record


def write_record(file: Any, array: np.ndarray) -> None:
    """Writes the same bytes as `numpy.save`; for small arrays five times as fast.

    **Raises:**

    `ValueError` for a dtype that would not be read as the same one; nothing is written.
    """
    is_small = array.nbytes < _SMALL
    header = _header_bytes(array.dtype, array.shape, array.flags.fnc)
    if header is None or not (is_small or array.flags.forc):
        np.save(whole(file), array, allow_pickle=False)
    elif is_small:
        write_all(file, header + array.tobytes("F" if array.flags.fnc else "C"))
    else:
        # Without a copy, and an error of `numpy.save` does not say that a disk is full.
        write_all(file, header)
        write_all(file, array.reshape(-1, order="A").view(np.uint8))


@functools.lru_cache(maxsize=1024)
def _header_bytes(dtype: Any, shape: Any, fortran_order: bool) -> bytes | None:
    """The header of a record; `None` if it needs a version of `.npy` other than 1.0."""
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    fields = {"descr": descr, "fortran_order": fortran_order, "shape": shape}
    text = repr(fields).encode()
    # NumPy pads the text a little.
    is_long = len(text) > _MAX_HEADER - 200
    if is_long or _parse_header(text, "utf-8").dtype != dtype:
        raise ValueError(f"the `.npy` format cannot store the dtype {dtype!s:.200}")
    try:
        np.lib.format.write_array_header_1_0(file, fields)
    except ValueError:  # too long, or not encodable as latin1
        return None
    return file.getvalue()


# Reading a record


def read_header(file: Any) -> Header:
    """Reads the header of the next record.

    **Raises:**

    `EOFError` if the file ends, `ValueError` if no record of plain data starts here.
    """
    start = read_up_to(file, len(MAGIC) + 2)
    if not start:
        raise EOFError("the file ends here")
    if not start.startswith(MAGIC[: len(start)]):
        # A safetensors file starts with the length of its header, in 8 bytes.
        fix = ". `load` reads safetensors files" * (start[4:] == bytes(4) != start[:4])
        if text := foreign(start):
            fix = f". The file {text}"
        raise ValueError(f"expected the start of a `.npy` record, found {start!r}{fix}")
    if len(start) < len(MAGIC) + 2:
        raise _cut()
    version = start[-2]
    if version not in (1, 2, 3):
        raise ValueError(f"the record has the unknown `.npy` version {version}")
    layout = struct.Struct("<H" if version == 1 else "<I")
    (size,) = layout.unpack(_read_exactly(file, layout.size))
    if size > _MAX_HEADER:
        raise ValueError(
            f"the header of the record claims {size} bytes, which is too much"
        )
    text = _read_exactly(file, size)
    try:
        return _parse_header(text, "utf-8" if version == 3 else "latin1")
    except Exception as error:  # a damaged header may raise any error
        raise ValueError(f"the header of the record is damaged: {error}") from error


def read_data(file: Any, header: Header) -> np.ndarray:
    """Reads the data that follow `header`, under the stored dtype."""
    size = header.nbytes
    if size >= _SMALL:  # check the length first; not worth its time for small data
        remaining = bytes_remaining(file)
        if remaining is not None and remaining < size:
            raise EOFError(
                f"the file is cut: the record needs {size} bytes, and {remaining} are left"
            )
    data = np.empty(size, np.uint8)
    view = data.data
    while view:
        # In pieces, so that a stream of unknown length need not return all at once.
        piece = read_some(file, min(len(view), 1 << 26))
        if not piece:
            raise _cut()
        view[: len(piece)] = piece
        view = view[len(piece) :]
    order = "F" if header.fortran_order else "C"
    array = np.ndarray(header.shape, header.dtype, data.data, order=order)
    if array.dtype == np.bool_ and not are_bools(data):
        raise ValueError("the data are damaged: a bool is neither 0 nor 1")
    return array


def bytes_remaining(file: Any) -> int | None:
    """The number of bytes that are left to read; `None` if that is not known."""
    try:
        here = file.tell()
        end = file.seek(0, io.SEEK_END)
        file.seek(here)
    except (AttributeError, OSError, ValueError):
        return None
    return None if end is None else end - here


@functools.lru_cache(maxsize=1024)
def _parse_header(text: bytes, encoding: str) -> Header:
    fields = ast.literal_eval(text.decode(encoding))
    if set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("it must have descr, fortran_order and shape")
    shape = fields["shape"]
    if type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is not a shape")
    # Equinox writes this for float8_e5m2, and NumPy cannot parse it.
    descr: Any = "V1" if fields["descr"] in ("<f1", "|f1") else fields["descr"]
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise ValueError("it announces Python objects, which are never unpickled")
    return Header(shape, dtype, bool(fields["fortran_order"]))


def _read_exactly(file: Any, size: int) -> bytes:
    data = read_up_to(file, size)
    if len(data) < size:
        raise _cut()
    return data


def _cut() -> EOFError:
    return EOFError("the file is cut in the middle of a record")


# A leaf as a record

_KEY_PREFIX: Final = "key<"


def default_serialise_filter_spec(f: Any, x: Any) -> None:
    """Writes `x` as one `.npy` record if it is an array or a number, else nothing.

    `numpy.load` reads the record. A Python `int` or `float` is stored with 64 bits, a
    `complex` with 128, and a typed PRNG key as its data together with the name of its
    implementation.

    **Arguments:**

    - `f`: a binary file, open for writing.
    - `x`: a leaf. JAX and NumPy arrays of any dtype without Python objects, NumPy scalars
        and Python `bool`, `int`, `float` and `complex` are written.

    **Raises:**

    `TypeError` for an array of Python objects, a masked array, a
    `jax.ShapeDtypeStruct`, and an integer beyond 64 bits. `ValueError` for a dtype that
    could not be read again.

    !!! example

        ```python
        import io

        import equinox_like as eqx
        import jax.numpy as jnp

        # Arrays in half precision, everything else as usual.
        def as_float16(f, x):
            x = x.astype(jnp.float16) if eqx.is_inexact_array(x) else x
            eqx.default_serialise_filter_spec(f, x)

        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, [jnp.ones(2), 3], as_float16)
        file.seek(0)
        like = [jnp.zeros(2, jnp.float16), 0]
        assert eqx.tree_deserialise_leaves(file, like)[1] == 3
        ```
    """
    if is_savable(x):
        write_record(f, encode(x))


def default_deserialise_filter_spec(f: Any, x: Any) -> Any:
    """Reads a leaf like `x` that [`equinox_like.default_serialise_filter_spec`][] wrote.

    The type of `x` decides, not the one that was saved: a saved NumPy array can be loaded
    as a JAX array, and the other way round. Without 64-bit mode, 64-bit data become a JAX
    array of 32 bits.

    **Arguments:**

    - `f`: a binary file, open for reading.
    - `x`: a leaf of the tree to load into; a `jax.ShapeDtypeStruct` stands for a JAX array.
        A JAX array is placed where `x` is committed, or as the struct says.

    **Returns:**

    The leaf from the file. If `x` is neither array nor number, nothing is read, and `x`
    itself is returned.

    **Raises:**

    [`equinox_like.LeafError`][] if the record does not fit `x` exactly; another exception
    if it is damaged. [`equinox_like.tree_deserialise_leaves`][] adds the path of the leaf.

    !!! example

        ```python
        import io

        import equinox_like as eqx
        import jax.numpy as jnp

        # Read everything, but keep the strings of `like`.
        def read(f, x):
            return x if isinstance(x, str) else eqx.default_deserialise_filter_spec(f, x)

        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, [jnp.ones(2), "old"])
        file.seek(0)
        x, name = eqx.tree_deserialise_leaves(file, [jnp.zeros(2), "new"], read)
        assert x.tolist() == [1, 1] and name == "new"
        ```
    """
    try:
        return read_leaf(f, x, putter(copy=True)) if is_loadable(x) else x
    except RecordMismatch as error:
        raise LeafError(f"The record {str(error).replace('`like`', '`x`')}.") from None


def read_leaf(f: Any, x: Any, put: Put) -> Any:
    """As `default_deserialise_filter_spec`, with `put` to make JAX arrays."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        if problem := not_in_jax(x.dtype):
            raise RecordMismatch(f"has {problem}")
        sharding = sharding_for((), x, None)
        if is_typed_key(x):
            array = _read_key(f, x)
        else:
            array = put(_read_array(f, x.shape, x.dtype, narrow=True))
        return array if sharding is None else jax.device_put(array, sharding)
    if isinstance(x, np.ndarray):
        return _read_array(f, x.shape, x.dtype)
    return _read_number(f, x) if is_number(x) or isinstance(x, np.generic) else x


class RecordMismatch(Exception):
    """A record does not fit the leaf that it would replace. Users get a `LeafError`."""


def encode(leaf: Any) -> np.ndarray:
    """`leaf` as an array of a dtype that `.npy` supports."""
    if is_typed_key(leaf):
        data = np.ascontiguousarray(in_numpy(jax.random.key_data(leaf)))
        name = f"{_KEY_PREFIX}{jax.random.key_impl(leaf)}>"
        dtype = np.dtype([(name, data.dtype, data.shape[leaf.ndim :])])
        return data.reshape(-1).view(dtype).reshape(leaf.shape)
    array = in_numpy(leaf)
    if array.dtype.hasobject:
        raise TypeError(
            f"{with_article(type(leaf).__name__)} that NumPy can hold only as Python "
            f"objects (dtype {array.dtype}) cannot be saved"
        )
    return array.view(stored_dtype(array.dtype))


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype under which arrays of `dtype` are written."""
    if not _is_extension(dtype):
        return dtype
    if dtype.name == "bfloat16":
        return np.dtype("V2")
    return np.dtype([(dtype.name, f"V{dtype.itemsize}")])


def is_stored_as(dtype: np.dtype, stored: np.dtype) -> bool:
    """Whether data of the dtype `stored` in a file may be an array of `dtype`."""
    if stored == stored_dtype(dtype):
        return True
    # Equinox stores all one-byte dtypes as `V1`.
    return _is_extension(dtype) and stored == np.dtype(f"V{dtype.itemsize}")


def stored_name(dtype: np.dtype) -> str:
    """The name of the dtype of the leaf that is stored under `dtype`."""
    if dtype.names is not None and len(dtype.names) == 1:
        return dtype.names[0]
    return {"V2": "bfloat16 (or raw two-byte values)"}.get(dtype.str[1:], str(dtype))


def _is_extension(dtype: np.dtype) -> bool:
    # NumPy sets this to 2 for a dtype that another package has registered.
    return dtype.isbuiltin == 2


# Reading a record into a leaf


def check_alike(leaf: Any, like: Any) -> None:
    """Raises `RecordMismatch` unless type, shape and dtype of `leaf` match `like`."""
    is_alike, name = type(leaf) is type(like), type(like).__name__
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        is_alike, name = isinstance(leaf, jax.Array), "jax.Array"
    elif isinstance(like, np.ndarray):
        is_alike, name = isinstance(leaf, np.ndarray), "numpy.ndarray"
    if not is_alike:
        raise _mismatch("type", type(leaf).__name__, name)
    if is_array_or_struct(like) and not isinstance(like, np.generic):
        for what in ("shape", "dtype"):
            if getattr(leaf, what) != getattr(like, what):
                raise _mismatch(what, getattr(leaf, what), getattr(like, what))


def _mismatch(what: str, found: Any, wanted: Any) -> RecordMismatch:
    return RecordMismatch(f"has {what} {found} in the file, but {wanted} in `like`")


def _read_fitting_header(file: Any, shape: tuple[int, ...]) -> Header:
    header = read_header(file)
    if header.shape != shape:
        raise _mismatch("shape", header.shape, shape)
    return header


def _read_array(file: Any, shape: tuple[int, ...], dtype: Any, narrow: bool = False):
    header = _read_fitting_header(file, shape)
    if is_stored_as(dtype, header.dtype):
        return read_data(file, header).view(dtype)
    name = header.dtype.name  # without the byte order
    if narrow and (name == dtype.name or narrows_to(name, dtype)):
        try:
            return narrowed(read_data(file, header), dtype)
        except OverflowError as error:
            raise RecordMismatch(f"has {error}") from None
    raise _mismatch("dtype", stored_name(header.dtype), dtype)


def _read_key(file: Any, like: Any) -> jax.Array:
    header = _read_fitting_header(file, like.shape)
    name = stored_name(header.dtype)
    if not name.startswith(_KEY_PREFIX):
        raise _mismatch("dtype", name, like.dtype)
    impl = name[len(_KEY_PREFIX) : -1]
    data = jax.device_put(read_data(file, header)[name])
    if impl == str(key_impl(like.dtype)):
        return with_key(data, like)
    return jax.random.wrap_key_data(data, impl=impl)


def _read_number(file: Any, like: Any) -> Any:
    """A number of Python or NumPy, or a NumPy scalar of another kind, such as a text."""
    header = _read_fitting_header(file, ())
    if isinstance(like, np.generic):
        name = dtype = like.dtype
        convert = lambda stored: stored.astype(dtype)  # noqa: E731
        if is_stored_as(dtype, header.dtype):
            return read_data(file, header).view(dtype)[()]
        if dtype.kind in "SU" and header.dtype.kind == dtype.kind:
            return read_data(file, header)[()]
    else:
        convert = number_type(like)
        dtype, name = np.dtype(convert), convert.__name__
    if not any(
        jnp.issubdtype(header.dtype, kind) and jnp.issubdtype(dtype, kind)
        for kind in NUMBERS.values()
    ):
        raise _mismatch("type", stored_name(header.dtype), name)
    stored = read_data(file, header)[()]
    with np.errstate(all="ignore"):
        value = convert(stored)
    if value != stored and stored == stored:
        raise RecordMismatch(
            f"is {stored!r} in the file, a value that {name} cannot hold"
        )
    return value if isinstance(like, np.generic) else type(like)(value)


class FileIndex:
    """The last record: a description of the leaves in the file, in their order.

    It is compared with the records that are read.
    """

    def __init__(self, found: Any):
        """**Raises:** `KeyError` or `TypeError` if `found` is not such a description."""
        # `_ends` are the positions after each leaf.
        self.names, self._sums, self._ends, spread = (
            found[name] for name in ("leaves", "sums", "ends", "spread")
        )
        kinds = (self.names, str), (self._sums, str), (self._ends, int), (spread, int)
        for items, kind in kinds:
            if type(items) is not list or not all(type(x) is kind for x in items):
                raise TypeError
        if not len(self.names) == len(self._sums) == len(self._ends):
            raise TypeError
        # Whether a custom function has skipped leaves that have data.
        self.is_selection = found["selection"] is True
        # The numbers of the leaves that were arrays on several devices.
        self._spread = set(spread)
        self._next = 0

    def is_next(self, path: tuple[Any, ...]) -> bool:
        left = self._next < len(self.names)
        return left and self.names[self._next] == path_str(path)

    @property
    def is_next_spread(self) -> bool:
        """Whether the next leaf was an array on several devices."""
        return self._next in self._spread

    def are_intact(self, content: np.ndarray, end: int) -> bool:
        """Whether the next records, up to `end`, match their checksums."""
        while self._next < len(self._ends) and self._ends[self._next] <= end:
            index, self._next = self._next, self._next + 1
            start = self._ends[index - 1] if index else 0
            if not is_intact(content[start : self._ends[index]], self._sums[index]):
                return False
        return True


_INDEX_END: Final = re.compile(rb', "record_bytes": +(\d+)}$')


def index_record(
    written: list[tuple[str, int, bool]], is_selection: bool, content: np.ndarray
) -> bytes:
    ends = [end for _, end, _ in written]
    bounds = zip([0, *ends], ends, strict=False)
    described = {
        "equinox_like": 1,
        "leaves": [name for name, _, _ in written],
        "sums": [checksum(content[start:end]) for start, end in bounds],
        "ends": ends,
        "selection": is_selection,
        "spread": [i for i, (_, _, is_spread) in enumerate(written) if is_spread],
    }
    # Text with lone surrogates, too, is read as it is written.
    text = json.dumps(described, ensure_ascii=False)[:-1]

    def record(size: int) -> bytes:
        file = io.BytesIO()
        whole = f'{text}, "record_bytes": {size:>20}}}'
        write_record(file, np.array(whole.encode(errors="surrogatepass")))
        return file.getvalue()

    return record(len(record(0)))


def find_index(file: Any) -> FileIndex | None:
    """The last record of the file, or `None`. Leaves the file at its start."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - 64))
    found = _INDEX_END.search(file.read())
    index = None
    if found is not None and int(found[1]) <= end:
        file.seek(end - int(found[1]))
        index = read_index(file)
    file.seek(0)
    return index


def read_index(file: Any) -> FileIndex | None:
    start = file.tell()
    try:
        header = read_header(file)
        if header.shape == () and header.dtype.kind == "S":
            return FileIndex(json.loads(read_data(file, header).item()))
    except (AttributeError, EOFError, KeyError, RecursionError, TypeError, ValueError):
        pass
    file.seek(start)
    return None
