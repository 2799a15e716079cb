"""The last record of a file, which names the leaves before it.

It also has the checksum and the end of each leaf. It ends with its own length, so that
it can be found before the other records are read.
"""

import io
import json
import re
from typing import Any, Final, NamedTuple

import numpy as np

from .._tree.nodes import path_str
from .checksum import checksum
from .npy import read_data, read_header, write_record


class Structure(NamedTuple):
    """The content of the last record: a description of the leaves in the file."""

    names: list[Any]
    sums: list[Any]
    # The position after each leaf.
    ends: list[Any]
    # Whether a custom function has skipped leaves that have data.
    is_selection: bool
    # The numbers of the leaves that were arrays on several devices.
    spread: list[Any]


_UNKNOWN: Final = Structure([], [], [], False, [])
_STRUCTURE_END: Final = re.compile(rb', "record_bytes": +(\d+)}$')


def structure_record(
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


def find_structure(file: Any) -> Structure | None:
    """The last record of the file, or `None`. Leaves the file at its start."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - 64))
    found = _STRUCTURE_END.search(file.read())
    structure = None
    if found is not None and int(found[1]) <= end:
        file.seek(end - int(found[1]))
        structure = read_structure(file)
    file.seek(0)
    return structure


def read_structure(file: Any) -> Structure | None:
    start = file.tell()
    try:
        header = read_header(file)
        if header.shape == () and header.dtype.kind == "S":
            return _as_structure(json.loads(read_data(file, header).item()))
    except (AttributeError, EOFError, KeyError, RecursionError, TypeError, ValueError):
        pass
    file.seek(start)
    return None


def _as_structure(found: Any) -> Structure:
    """**Raises:** `KeyError` or `TypeError` if `found` is not such a description."""
    names, sums, ends, spread = (found[x] for x in ("leaves", "sums", "ends", "spread"))
    for items, kind in (names, str), (sums, str), (ends, int), (spread, int):
        if type(items) is not list or not all(type(x) is kind for x in items):
            raise TypeError
    if not len(names) == len(sums) == len(ends):
        raise TypeError
    return Structure(names, sums, ends, found["selection"] is True, spread)


class Records:
    """Compares the records that are read with the names and checksums in the file."""

    def __init__(self, saved: Structure | None, content: np.ndarray):
        self.names, self._sums, self._ends, self.are_selection, spread = (
            saved or _UNKNOWN
        )
        self._spread = set(spread)
        self._is_known = saved is not None
        self._content = content
        self._next = 0

    def is_next(self, path: tuple[Any, ...]) -> bool:
        if not self._is_known:
            return True
        left = self._next < len(self.names)
        return left and self.names[self._next] == path_str(path)

    @property
    def is_next_spread(self) -> bool:
        """Whether the next leaf was an array on several devices."""
        return self._next in self._spread

    def are_intact(self, end: int) -> bool:
        """Whether the next records, up to `end`, match their checksums."""
        while self._next < len(self._ends) and self._ends[self._next] <= end:
            index, self._next = self._next, self._next + 1
            start = self._ends[index - 1] if index else 0
            if checksum(self._content[start : self._ends[index]]) != self._sums[index]:
                return False
        return True
