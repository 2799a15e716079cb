"""The checksum of a leaf's data: the CRC-32, computed by several threads if large."""

import zlib
from collections.abc import Iterable

import numpy as np

_PIECE = 1 << 20
# The number of characters of a CRC-32 as text.
_WIDTH = 8


def checksum(data: np.ndarray) -> str:
    """The checksum of `data`, a 1D array of `uint8`, as a text of 8 characters.

    For up to 1 MiB it is the CRC-32. For more, it is the CRC-32 of the checksums of all
    pieces of 1 MiB, as little-endian 32-bit integers.
    """
    return checksum_and_pieces(data)[0]


def checksum_and_pieces(data: np.ndarray) -> tuple[str, str]:
    """The checksum of `data`, and the CRC-32s of its pieces of 1 MiB as one text.

    With the second, a part of the data can be checked without the rest. For up to 1 MiB
    both are the same.
    """
    sums = _crcs([data[i : i + _PIECE] for i in range(0, data.nbytes or 1, _PIECE)])
    whole = sums[0] if len(sums) == 1 else zlib.crc32(np.array(sums, "<u4").tobytes())
    return _text(whole), "".join(map(_text, sums))


def has_pieces(
    data: np.ndarray, expected: str, ranges: Iterable[tuple[int, int]]
) -> bool:
    """Whether each piece of `data` that overlaps one of `ranges` has its CRC-32 in
    `expected`. The other pieces are not read."""
    wanted = sorted(
        {i for start, end in ranges for i in range(start // _PIECE, -(-end // _PIECE))}
    )
    sums = _crcs([data[i * _PIECE : (i + 1) * _PIECE] for i in wanted])
    return all(
        expected[i * _WIDTH : (i + 1) * _WIDTH] == _text(found)
        for i, found in zip(wanted, sums, strict=True)
    )


def _crcs(pieces: list[np.ndarray]) -> list[int]:
    buffers = [piece.data for piece in pieces]
    if len(buffers) > 1:
        try:
            # At interpreter shutdown, neither this can be imported nor a thread started.
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor() as pool:  # `crc32` releases Python's lock
                return list(pool.map(zlib.crc32, buffers))
        except RuntimeError:
            pass
    return list(map(zlib.crc32, buffers))


def _text(crc: int) -> str:
    return f"{crc:0{_WIDTH}x}"
