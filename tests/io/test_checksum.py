"""The checksums of saved leaves, and those that older versions wrote."""

import json
import subprocess
import sys
import textwrap
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._io import format
from equinox_like._io.checksum import checksum


def old_checksum(data):
    """What was written for data beyond 64 KB: a sum of words."""
    if data.nbytes <= 1 << 16:
        return f"{zlib.crc32(data.data):08x}"
    words = data[: data.nbytes // 8 * 8].view("<u8")
    return f"{int(words.sum(dtype=np.uint64)):016x}"


def data_of(size):
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 1 << 17, (1 << 20) + 3, 3 << 20])
def test_checksum_is_a_crc_that_tells_order(size):
    data = data_of(size)
    pieces = [data[i : i + (1 << 20)] for i in range(0, size, 1 << 20)]
    sums = [zlib.crc32(piece.data) for piece in pieces]
    whole = np.array(sums, "<u4").tobytes() if size > 1 << 20 else data.tobytes()
    assert checksum(data) == f"{zlib.crc32(whole):08x}"
    words = data[: size // 8 * 8].reshape(-1, 8)[::-1].ravel()
    assert size < 16 or checksum(words) != checksum(data[: words.size])


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


def test_safetensors_file_of_an_older_version_is_read(monkeypatch, tmp_path):
    tree = [jnp.arange(1 << 15), jnp.arange(3)]
    written = lambda data: (old_checksum(data),) * 2  # noqa: E731
    monkeypatch.setattr(format, "checksum_and_pieces", written)
    path = tmp_path / "old.safetensors"
    eqx.save(path, tree)
    assert eqx.tree_equal(eqx.load(path, tree), tree)
    last = np.asarray(tree[0])[-64:].tobytes()
    path.write_bytes(path.read_bytes().replace(last, bytes(256)))
    with pytest.raises(eqx.LeafError, match=r"\[0\].*damaged"):
        eqx.load(path, tree)


def test_npy_file_of_an_older_version_is_read(tmp_path):
    tree = [jnp.arange(1 << 15), jnp.arange(3)]
    path = tmp_path / "old.eqx"
    with open(path, "wb") as file:
        sums, end = [], 0
        for leaf in tree:
            np.save(file, leaf)
            file.flush()
            data = np.frombuffer(path.read_bytes(), np.uint8)[end:]
            sums, end = [*sums, old_checksum(data)], file.tell()
        start = {"equinox_like": 1, "leaves": ["[0]", "[1]"], "sums": sums}
        # The size of the record stands in it, always as long.
        text = json.dumps(start)[:-1] + f', "record_bytes": {0:>20}}}'
        size = 128 + len(text)
        np.save(file, np.array(text.replace(f"{0:>20}", f"{size:>20}").encode()))
        assert file.tell() == end + size
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(path, tree), tree)
    with pytest.raises(eqx.LeafError, match="structure of the saved tree differs"):
        eqx.tree_deserialise_leaves(path, {"a": tree[0], "b": tree[1]})
    last = np.asarray(tree[0])[-64:].tobytes()
    path.write_bytes(path.read_bytes().replace(last, bytes(256)))
    with pytest.raises(eqx.LeafError, match=r"\[0\].*damaged"):
        eqx.tree_deserialise_leaves(path, tree)
