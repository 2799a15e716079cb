"""A checksum of the data of a leaf: the CRC-32, of large data by several threads."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_PIECE = 1 << 20


def checksum(data: np.ndarray) -> str:
    """A text of 8 characters for `data`, an array of `uint8` in one dimension.

    Up to 1 MiB it is the CRC-32. Beyond, it is the CRC-32 of the checksums of each
    piece of 1 MiB, as little-endian integers of 32 bits.
    """
    if data.nbytes <= _PIECE:
        return f"{zlib.crc32(data.data):08x}"
    pieces = [data[i : i + _PIECE].data for i in range(0, data.nbytes, _PIECE)]
    try:
        with ThreadPoolExecutor() as pool:  # `crc32` does not hold Python's global lock
            sums = list(pool.map(zlib.crc32, pieces))
    except RuntimeError:  # the interpreter ends, and starts no more threads
        sums = list(map(zlib.crc32, pieces))
    return f"{zlib.crc32(np.array(sums, '<u4').tobytes()):08x}"


def has_checksum(data: np.ndarray, expected: str) -> bool:
    """Whether `expected` is the checksum of `data`.

    Files of older versions have 16 characters for data beyond 64 KB: the sum of the
    words of 64 bits, which does not depend on their order.
    """
    if len(expected) == 16:
        return _sum_of_words(data) == expected
    return checksum(data) == expected


def _sum_of_words(data: np.ndarray) -> str:
    whole = data.nbytes // 8 * 8
    words = data[:whole].view("<u8")
    rest = int.from_bytes(data[whole:].tobytes(), "little")
    return f"{(int(words.sum(dtype=np.uint64)) + rest) % (1 << 64):016x}"
