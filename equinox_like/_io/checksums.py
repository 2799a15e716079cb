"""The checksums of bytes in a file, and of an array however it is sharded.

The first has the CRC-32 of each piece of 1 MiB, so that several threads can compute it, and
a part of the data can be checked without the rest. The second is the sum, modulo 2**64, of
all words of up to 4 bytes, the word with index i times 2 i + 1. So the sums of the shards
add up to that of the array. It changes with each change of one word, since the factors are
odd, and with each flip of two bits.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._tree.arrays import without_key

_T = TypeVar("_T")
_R = TypeVar("_R")

_PIECE: Final = 1 << 20
# The number of characters of a CRC-32 as text.
_WIDTH: Final = 8


def checksum(data: np.ndarray, numbers: Iterable[int] | None = None) -> str:
    """The CRC-32 of each piece of 1 MiB of `data`, a 1D array of `uint8`, as one text.

    `numbers`: of the pieces to read, in place of all.
    """
    if numbers is None:
        numbers = range(max(1, -(-data.nbytes // _PIECE)))
    pieces = [data[i * _PIECE : (i + 1) * _PIECE].data for i in numbers]
    crcs = in_threads(zlib.crc32, pieces)  # which releases Python's lock
    return "".join(f"{crc:0{_WIDTH}x}" for crc in crcs)


def is_intact(
    data: np.ndarray, sums: str, ranges: Iterable[tuple[int, int]] | None = None
) -> bool:
    """Whether `data` have the checksum `sums`.

    With `ranges` of bytes, only the pieces that overlap one of them are read.
    """
    if ranges is None:
        return checksum(data) == sums
    numbers = sorted(
        {i for start, end in ranges for i in range(start // _PIECE, -(-end // _PIECE))}
    )
    wanted = "".join(sums[i * _WIDTH : (i + 1) * _WIDTH] for i in numbers)
    return checksum(data, numbers) == wanted


def in_threads(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """`list(map(function, items))`, computed by several threads."""
    if len(items) > 1:
        try:
            # At interpreter shutdown, neither this can be imported nor a thread started.
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor() as pool:
                return list(pool.map(function, items))
        except RuntimeError:
            pass
    return list(map(function, items))


# The number of words that are widened to 8 bytes at once, 2 MB: with fewer, calls of
# NumPy take much of the time; more would not fit into a CPU's cache.
_WORDS: Final = 1 << 18
# Shorter axes at the end are joined, as NumPy takes long to sum over many short rows.
_RUN: Final = 1 << 8


class Part(NamedTuple):
    """A part of an array, in host memory or on its way there."""

    data: Any
    shape: tuple[int, ...]  # of the whole array
    start: tuple[int, ...]  # the index of the first element


def own_parts(x: Any) -> list[Part]:
    """The shards of an array that this process sums up; a NumPy array is one part.

    Each element is in one shard of one process. The parts keep their values if the array is
    donated or deleted afterwards.
    """
    if not isinstance(x, jax.Array):
        return [Part(x, x.shape, (0,) * x.ndim)]
    x = without_key(x)
    return [
        Part(_on_host(s.data), x.shape, tuple(i.start or 0 for i in s.index))
        for s in x.addressable_shards
        if s.replica_id == 0
    ]


def _on_host(x: jax.Array) -> Any:
    if _is_on_host(x):
        return np.asarray(x)  # no copy; it keeps the buffer alive
    # `np.asarray` would wait, and `x` would keep the copy.
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def _is_on_host(x: jax.Array) -> bool:
    kind = x.sharding.memory_kind or ""
    return "host" in kind or next(iter(x.devices())).platform == "cpu"


def sum_of_parts(parts: Iterable[Part]) -> int:
    """The sum of the words of these parts of an array."""
    return sum(map(_sum_of_part, parts)) % (1 << 64)


def _sum_of_part(part: Part) -> int:
    words = _words(np.asarray(part.data, order="C"))
    shape = (*part.shape, words.shape[-1])
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(i * step for i, step in zip(part.start, steps, strict=False))
    # From the last axis that is split or long enough, the words are one run.
    lengths = zip(words.shape, shape, steps, strict=True)
    kept = [n != whole or n * step >= _RUN for n, whole, step in lengths]
    axis = max((i for i, is_kept in enumerate(kept) if is_kept), default=0)
    runs = words.reshape(*words.shape[:axis], -1)
    return sum(_sum_of_block(*x) for x in _blocks(runs, first, (*steps[:axis], 1)))


def _words(data: np.ndarray) -> np.ndarray:
    data = data.reshape(*data.shape, 1)
    if data.dtype.kind == "V" and jnp.issubdtype(data.dtype, jnp.integer):
        return data  # int4 and the like: the upper bits of a byte are of no account
    return data.view(f"u{min(data.itemsize, 4)}")


_Block = tuple[np.ndarray, int, tuple[int, ...]]


def _blocks(words: np.ndarray, first: int, steps: tuple[int, ...]) -> Iterator[_Block]:
    """Small blocks, with the index of the first word, and the step of each axis."""
    half = len(words) // 2
    if words.size <= _WORDS:
        yield words, first, steps
    elif half:
        yield from _blocks(words[:half], first, steps)
        yield from _blocks(words[half:], first + half * steps[0], steps)
    else:
        yield from _blocks(words[0], first, steps[1:])


def _sum_of_block(words: np.ndarray, first: int, steps: tuple[int, ...]) -> int:
    # The index of a word is a sum over the axes, so no array of indices is needed.
    words, moment = words.astype(np.uint64), 0
    for step in steps:
        rows = words.sum(tuple(range(1, words.ndim)))
        moment += step * int((rows * np.arange(rows.size, dtype=np.uint64)).sum())
        words = words.sum(0)
    return 2 * moment + (2 * first + 1) * int(words)
