"""A checksum that takes no longer than reading the data."""

import zlib

import numpy as np


def checksum(data: np.ndarray) -> str:
    """A text that changes with each bit of `data`, an array of `uint8` in one dimension.

    Up to 64 KB the CRC-32. Beyond, the sum of its little-endian words of 64 bits, modulo
    2**64, for which NumPy is ten times as quick.
    """
    if data.nbytes <= 1 << 16:
        return f"{zlib.crc32(data.data):08x}"
    whole = data.nbytes // 8 * 8
    words = data[:whole].view("<u8")
    rest = int.from_bytes(data[whole:].tobytes(), "little")
    return f"{(int(words.sum(dtype=np.uint64)) + rest) % (1 << 64):016x}"
