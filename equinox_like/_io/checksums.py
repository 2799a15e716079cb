"""The checksums of bytes in a file, and of an array however it is sharded.

The first has the CRC-32 of each piece of 1 MiB, so that several threads can compute it, and
a part of the data can be checked without the rest. The second is the sum, over all
elements, of a mix of their bits and their position, so that each device can sum up its own
shard. It changes with each change of one element, and with other changes except for one in
2**32."""

import zlib
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._tree.arrays import without_key

_PIECE: Final = 1 << 20
# The number of characters of a CRC-32 as text.
_WIDTH: Final = 8


def checksum(data: np.ndarray, numbers: Iterable[int] | None = None) -> str:
    """The CRC-32 of each piece of 1 MiB of `data`, a 1D array of `uint8`, as one text.

    `numbers`: of the pieces to read, in place of all.
    """
    if numbers is None:
        numbers = range(max(1, -(-data.nbytes // _PIECE)))
    crcs = _crcs([data[i * _PIECE : (i + 1) * _PIECE].data for i in numbers])
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


def _crcs(pieces: list[memoryview]) -> list[int]:
    if len(pieces) > 1:
        try:
            # At interpreter shutdown, neither this can be imported nor a thread started.
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor() as pool:  # `crc32` releases Python's lock
                return list(pool.map(zlib.crc32, pieces))
        except RuntimeError:
            pass
    return list(map(zlib.crc32, pieces))


# The mesh in use may lack the devices of an array.
_NO_MESH: Final = Mesh(np.empty((), object), ())
# Below this size in bytes, compiling a program takes longer than copying the array.
_SMALL: Final = 1 << 22
_WORDS: Final = 1 << 16


def content_sums(arrays: Iterable[Any]) -> list[str]:
    """The checksum of each array, of JAX or NumPy, as a text of 8 characters.

    Arrays with shards on other hosts need the same call in all processes.
    """
    return [f"{int(total):08x}" for total in jax.device_get(list(map(_sum, arrays)))]


def _sum(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return sum_on_host(x)
    x = without_key(x)
    is_on_host = next(iter(x.devices())).platform == "cpu"
    is_on_host |= "host" in (x.sharding.memory_kind or "")
    if x.is_fully_addressable and (is_on_host or x.nbytes < _SMALL):
        # Without the cache of the array, which would keep its memory from being donated.
        part = x.addressable_data(0) if x.is_fully_replicated else x
        return sum_on_host(jax.device_get(part))
    with jax.set_mesh(_NO_MESH):
        total = sum_on_devices(x)
    # On CPUs, programs of several processes that run at once wait for each other forever.
    return total.block_until_ready() if is_on_host else total


@jax.jit
def sum_on_devices(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype != np.bool_:
        x = jax.lax.bitcast_convert_type(x, f"uint{min(_bits(x.dtype), 32)}")
    words, place = x.astype(np.uint32), jnp.uint32(0)
    for axis, n in enumerate(words.shape):
        index = jax.lax.broadcasted_iota(np.uint32, words.shape, axis)
        place = place * jnp.uint32(n % (1 << 32)) + index
    return jnp.sum(_mixed(words ^ _mixed(place)), dtype=np.uint32)


def sum_on_host(x: np.ndarray) -> int:
    data = np.ascontiguousarray(x).reshape(-1)
    words = data.view(f"u{min(x.dtype.itemsize, 4)}")
    # The upper bits of a byte with fewer are of no account.
    mask = np.uint32((1 << (32 if x.dtype.itemsize > 1 else _bits(x.dtype))) - 1)
    total = 0
    for start in range(0, words.size, _WORDS):
        piece = words[start : start + _WORDS].astype(np.uint32) & mask
        place = np.arange(start, start + piece.size).astype(np.uint32)
        total += int(_mixed(piece ^ _mixed(place)).sum(dtype=np.uint32))
    return total % (1 << 32)


def _bits(dtype: Any) -> int:
    if dtype == np.bool_:
        return 8
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return info(dtype).bits


def _mixed(x: Any) -> Any:
    """A permutation of the integers of 32 bits that scatters them (MurmurHash3's)."""
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
