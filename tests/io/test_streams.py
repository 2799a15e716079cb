"""Files that take or return less than was asked: all goes through, or an error comes.

A law over all writers and readers, and over the number of bytes that go through at once.
"""

import errno
import io
import os
import resource
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from strategies import same, whole_trees

import equinox_like as eqx

TREE = {
    "big": np.arange(20_000.0).reshape(100, 200)[:, ::2],
    "empty": jnp.zeros((0, 2)),
    "half": jnp.ones(3, jnp.bfloat16),
    "key": jax.random.key(7),
    "large": jnp.arange(30_000),
    "rate": 0.5,
}


class Raw(io.RawIOBase):
    """Takes and returns at most `k` bytes at once, as an unbuffered file may."""

    def __init__(self, k: int, content: bytes = b""):
        self.k, self.inner = k, io.BytesIO(content)

    def readable(self):
        return True

    def writable(self):
        return True

    def write(self, data: Any):
        return self.inner.write(bytes(data[: self.k]))

    def readinto(self, buffer: Any):
        data = self.inner.read(min(self.k, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


class Plain:
    """The same, and no class of Python's: it has two methods."""

    def __init__(self, k: int, content: bytes = b""):
        self.k, self.inner = k, io.BytesIO(content)

    def write(self, data: Any):
        return self.inner.write(bytes(data[: self.k]))

    def read(self, size: int):
        return self.inner.read(min(self.k, size))


def serialise_with_numpy(file, tree):
    write = lambda f, x: np.save(f, np.asarray(x)) if is_plain(x) else None  # noqa: E731
    eqx.tree_serialise_leaves(file, tree, write)


def deserialise_with_numpy(file, like):
    def read(f, x):
        if not is_plain(x):
            return x
        # `numpy.load` itself wants to seek.
        start = f.read(8)
        array = np.load(io.BytesIO(start + f.read(120) + f.read(x.nbytes)))
        return array if isinstance(x, np.ndarray) else jnp.asarray(array)

    return eqx.tree_deserialise_leaves(file, like, read)


def is_plain(x):
    is_whole = isinstance(x, jax.Array | np.ndarray)
    return is_whole and x.dtype in (np.float32, np.int32, np.float64)


def serialise_leaf_by_leaf(file, tree):
    for leaf in jax.tree.leaves(tree):
        eqx.default_serialise_filter_spec(file, leaf)


def deserialise_leaf_by_leaf(file, like):
    leaves, treedef = jax.tree.flatten(like)
    new = [eqx.default_deserialise_filter_spec(file, leaf) for leaf in leaves]
    return treedef.unflatten(new)


def save_with_metadata(file, tree):
    eqx.save(file, tree, metadata={"some": "text"})


def load_metadata(file, like):
    assert eqx.load_metadata(file) == {"some": "text"}
    return like


PAIRS = {
    "save": (eqx.save, eqx.load),
    "metadata": (save_with_metadata, load_metadata),
    "serialise": (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
    "own": (serialise_with_numpy, deserialise_with_numpy),
    "leaves": (serialise_leaf_by_leaf, deserialise_leaf_by_leaf),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
@pytest.mark.parametrize("kind", [Raw, Plain])
@given(data=st.data())
def test_all_is_written_and_read_whatever_goes_through_at_once(pair, kind, data):
    write, read = PAIRS[pair]
    tree = data.draw(whole_trees() | st.just(TREE))
    k = data.draw(st.integers(1, 20) | st.integers(100, 100_000))
    if tree is TREE:
        k *= 50
    at_once = io.BytesIO()
    write(at_once, tree)
    file = kind(k)
    write(file, tree)
    content = file.inner.getvalue()
    assert content == at_once.getvalue()
    again = read(kind(k, content), tree)
    assert all(map(same, *map(jax.tree.leaves, (again, tree))))


@pytest.mark.parametrize("pair", ["serialise", "own"])
@given(data=st.data())
def test_end_within_a_leaf_is_an_error_that_names_it(pair, data):
    write, read = PAIRS[pair]
    tree = {"a": jnp.arange(6.0), "b": {"c": jnp.arange(3)}}
    file = io.BytesIO()
    write(file, tree)
    content = file.getvalue()
    size = data.draw(st.integers(0, len(content) - 1))
    k = data.draw(st.integers(1, 50))
    with pytest.raises(eqx.LeafError) as caught:
        read(Raw(k, content[:size]), tree)
    path = "['a']" if size < 128 + 24 else "['b']['c']"
    assert jax.tree_util.keystr(caught.value.path) == path
    assert path in str(caught.value)


@pairs
@given(size=st.integers(1000, 60_000))
def test_full_disk_is_an_error_without_a_buffer_too(tmp_path_factory, pair, size):
    write, _ = PAIRS[pair]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path_factory.mktemp("full") / "m", "wb", buffering=0) as file:
        # The system refuses to write more, as it does on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                write(file, TREE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG


@pairs
@pytest.mark.parametrize("buffering", [0, 1 << 16])
def test_pipe_that_would_have_to_wait_is_an_error(pair, buffering):
    write, read = PAIRS[pair]
    out, into = os.pipe()
    os.set_blocking(into, False)
    os.set_blocking(out, False)
    with open(out, "rb", 0) as reader, open(into, "wb", 0) as writer:
        big = {"x": np.zeros(100_000), **TREE}
        with pytest.raises(BlockingIOError, match=r"would have to wait.*set_blocking"):
            write(writer, big)
        os.read(out, 1 << 20)
    out, into = os.pipe()
    os.set_blocking(out, False)
    with open(out, "rb", buffering) as reader, open(into, "wb", 0) as writer:
        for content in b"", b"\x93NUMPY\x01\x00\x76":
            writer.write(content)
            # A function of a user reads what is there.
            errors = (
                (BlockingIOError, eqx.LeafError) if pair == "own" else BlockingIOError
            )
            with pytest.raises(errors):
                read(reader, TREE)


@pairs
@pytest.mark.parametrize("count", [0, -1, True, 1 << 40, "coroutine"])
def test_count_that_cannot_be_true_is_an_error(pair, count):
    class Odd:
        def write(self, data):
            return count

    with pytest.raises(OSError, match=f"`write` of the file returned {count!r} for"):
        PAIRS[pair][0](Odd(), TREE)


def test_file_that_returns_more_than_was_asked_is_an_error():
    class Odd:
        def read(self, size):
            return bytes(size + 1)

    for _, read in PAIRS.values():
        with pytest.raises(
            OSError, match=r"returned 9 bytes, not 8|bytes, not 1048576"
        ):
            read(Odd(), TREE)
