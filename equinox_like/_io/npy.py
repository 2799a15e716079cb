"""Records of NumPy's `.npy` format: an array with a header; nothing is ever pickled."""

import ast
import dataclasses
import functools
import io
import math
import struct
from typing import Any, Final

import numpy as np

from .files import foreign, read_some, read_up_to, whole, write_all

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


def are_bools(data: np.ndarray) -> bool:
    """Whether these bytes are 0 or 1. JAX does not check this: it would treat 2 as
    neither true nor false."""
    return not (data > 1).any()


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
