"""The checksums of saved leaves."""

import subprocess
import sys
import textwrap
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._io.checksums import checksum, is_intact


def data_of(size):
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 1 << 17, (1 << 20) + 3, 3 << 20])
def test_checksum_is_a_crc_that_tells_order(size):
    data = data_of(size)
    pieces = [data[i : i + (1 << 20)] for i in range(0, size, 1 << 20)]
    sums = [f"{zlib.crc32(piece.data):08x}" for piece in pieces]
    assert checksum(data) == ("".join(sums) or "00000000")
    words = data[: size // 8 * 8].reshape(-1, 8)[::-1].ravel()
    assert size < 16 or checksum(words) != checksum(data[: words.size])


def test_only_the_pieces_of_the_ranges_are_checked():
    piece = 1 << 20
    data = data_of(3 * piece + 5)
    sums = checksum(data)
    assert is_intact(data, sums, [(0, 10), (3 * piece, 3 * piece + 5)])
    assert not is_intact(data, sums[:-8], [(3 * piece, 3 * piece + 5)])
    data[piece + 7] ^= 1
    assert not is_intact(data, sums)
    assert is_intact(data, sums, [(0, piece), (2 * piece, 3 * piece)])
    assert not is_intact(data, sums, [(0, piece + 1)])


def test_threads_are_not_needed(monkeypatch):
    def refuse(self, *args):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    data = data_of(3 << 20)
    expected = checksum(data)
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", refuse)
    assert checksum(data) == expected


def test_tree_is_saved_for_the_first_time_when_the_process_exits(tmp_path):
    path = tmp_path / "model.safetensors"
    code = f"""
        import atexit
        import numpy as np
        import equinox_like as eqx

        atexit.register(lambda: eqx.save({str(path)!r}, [np.ones(1 << 20, "u2")]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=True
    )
    assert not done.stderr
    assert eqx.load(path, [np.zeros(1 << 20, "u2")])[0].all()


@pytest.mark.parametrize(
    ("name", "save", "load"),
    [
        ("m.eqx", eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
        ("m.safetensors", eqx.save, eqx.load),
    ],
)
def test_words_in_another_order_are_damage(name, save, load, tmp_path):
    path, x = tmp_path / name, jnp.arange(1 << 17, dtype=jnp.float32)
    save(path, [x])
    data = np.asarray(x).tobytes()
    backwards = np.asarray(x).view("u8")[::-1].tobytes()
    path.write_bytes(path.read_bytes().replace(data, backwards))
    with pytest.raises(eqx.LeafError, match=r"\[0\].*damaged"):
        load(path, [x])
