"""One leaf as one record of NumPy's `.npy` format, and back; nothing is ever pickled.

`.npy` knows neither JAX's small floats and integers nor typed PRNG keys. Such a leaf is
stored under a structured dtype whose only field bears its name (`float8_e4m3fn`,
`key<threefry2x32>`), so that `numpy.load` still reads it and the header says what it is.
`bfloat16` is stored as raw two-byte values, as it has always been.
"""

import ast
import dataclasses
import io
import math
import struct
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

_MAGIC: Final = b"\x93NUMPY"
# NumPy's own limit: parsing longer text from a foreign file may exhaust the interpreter.
_MAX_HEADER: Final = 10_000
_KEY_PREFIX: Final = "key<"


class RecordMismatch(Exception):
    """A record holds something else than the leaf that it is to be loaded into."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a record says about its data, read before any of the data is."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_record(file: Any, leaf: Any) -> None:
    """Writes an array, NumPy scalar or Python number as one record."""
    np.save(file, encode(leaf), allow_pickle=False)


def encode(leaf: Any) -> np.ndarray:
    """`leaf` as an array of a dtype that `.npy` can name."""
    if is_typed_key(leaf):
        data = np.ascontiguousarray(jax.random.key_data(leaf))
        name = f"{_KEY_PREFIX}{jax.random.key_impl(leaf)}>"
        dtype = np.dtype([(name, data.dtype, data.shape[leaf.ndim :])])
        return np.frombuffer(data, dtype).reshape(leaf.shape)
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise TypeError(
            f"a {type(leaf).__name__} that NumPy can hold only as Python objects (dtype "
            f"{array.dtype}) cannot be saved"
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
    # Equinox writes all one-byte dtypes alike.
    return _is_extension(dtype) and stored == np.dtype(f"V{dtype.itemsize}")


def describe(dtype: np.dtype) -> str:
    """The name of what is stored under `dtype`."""
    if dtype.names is not None and len(dtype.names) == 1:
        return dtype.names[0]
    return {"V2": "bfloat16 (or raw two-byte values)"}.get(dtype.str[1:], str(dtype))


def key_impl_of(dtype: np.dtype) -> str | None:
    """The PRNG implementation whose keys are stored under `dtype`."""
    name = describe(dtype)
    return name[len(_KEY_PREFIX) : -1] if name.startswith(_KEY_PREFIX) else None


def is_typed_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _is_extension(dtype: np.dtype) -> bool:
    # 2 is NumPy's mark of a dtype that another package has registered.
    return dtype.isbuiltin == 2


# Reading


def read_header(file: Any) -> Header:
    """Reads the header of the next record.

    **Raises:**

    `EOFError` if the file ends, `ValueError` if no record of plain data starts here.
    """
    start = file.read(len(_MAGIC) + 2)
    if not start:
        raise EOFError("the file ends here")
    if not start.startswith(_MAGIC[: len(start)]):
        raise ValueError(f"no `.npy` record starts here, but {start!r}")
    if len(start) < len(_MAGIC) + 2:
        raise _cut()
    size_format = "<H" if start[-2] == 1 else "<I"
    (size,) = struct.unpack(size_format, _read_exactly(file, struct.calcsize(size_format)))
    if size > _MAX_HEADER:
        raise ValueError(f"the header of the record claims {size} bytes, which is too much")
    text = _read_exactly(file, size)
    try:
        return _parse_header(text.decode("utf-8" if start[-2] == 3 else "latin1"))
    except (KeyError, SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the header of the record is damaged: {error}") from error


def read_data(file: Any, header: Header) -> np.ndarray:
    """Reads the data that follow `header`, under the stored dtype."""
    size = header.nbytes
    remaining = bytes_remaining(file)
    if remaining is not None and remaining < size:
        raise EOFError(
            f"the file is cut: the record needs {size} bytes, and {remaining} are left"
        )
    data = np.empty(size, np.uint8)
    view = memoryview(data)
    while view:
        # In pieces, so that a stream of unknown length is not asked for all at once.
        piece = file.read(min(len(view), 1 << 26))
        if not piece:
            raise _cut()
        view[: len(piece)] = piece
        view = view[len(piece) :]
    order = "F" if header.fortran_order else "C"
    return np.ndarray(header.shape, header.dtype, data, order=order)


def bytes_remaining(file: Any) -> int | None:
    """How much can still be read from `file`; `None` if it cannot tell."""
    try:
        here = file.tell()
        end = file.seek(0, io.SEEK_END)
        file.seek(here)
    except (AttributeError, OSError, ValueError):
        return None
    return None if end is None else end - here


def _parse_header(text: str) -> Header:
    fields = ast.literal_eval(text)
    if set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("it must have descr, fortran_order and shape")
    shape = fields["shape"]
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is no shape")
    # Equinox's name for float8_e5m2, which NumPy does not understand.
    descr = "V1" if fields["descr"] in ("<f1", "|f1") else fields["descr"]
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise ValueError("it announces Python objects, which are never unpickled")
    return Header(shape, dtype, bool(fields["fortran_order"]))


def _read_exactly(file: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = file.read(size - len(data))
        if not piece:
            raise _cut()
        data += piece
    return data


def _cut() -> EOFError:
    return EOFError("the file is cut in the middle of a record")
