"""The sum of an array is that of its shards, and changes with its content."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from equinox_like._io import checksums
from equinox_like._io.checksums import Part, own_parts, sum_of_parts

DTYPES = (
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "float16", "bfloat16", "float32", "complex64", "int64"),
    *("float64", "complex128", "float8_e3m4", "float8_e4m3fn", "float8_e5m2"),
)


def sum_of(x):
    return sum_of_parts(own_parts(x))


def defined_sum(array):
    """The definition, from one flat array of all words."""
    if "int2" in array.dtype.name or "int4" in array.dtype.name:
        words = array.astype(np.int64).ravel().view(np.uint64)
    else:
        data = np.ascontiguousarray(array).reshape(-1)
        words = data.view(f"u{min(array.itemsize, 4)}").astype(np.uint64)
    return int((words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum())


def random_array(dtype, shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape) * 9
    return np.asarray(values).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (4, 8)])
def test_sum_is_that_of_words_by_their_places(dtype, shape):
    array = random_array(dtype, shape)
    expected = defined_sum(array)
    assert sum_of(array) == expected
    with jax.enable_x64(True):
        assert sum_of(jnp.asarray(array)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "complex64"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shards_and_their_order_do_not_matter(dtype, axis_type):
    array = random_array(dtype, (4, 8, 6))
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    specs = (
        P(),
        P("x"),
        P("y", "x"),
        P(None, ("x", "y")),
        P(None, None, "x"),
        P("x", None, "y"),
    )
    for spec in specs:
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        parts = own_parts(placed)
        assert len(parts) == math.prod(
            mesh.shape[axis] for axis in jax.tree.leaves(tuple(spec))
        )
        assert sum(sum_of_parts([part]) for part in parts) % 2**64 == defined_sum(array)
        assert sum_of_parts(reversed(parts)) == defined_sum(array)


@given(data=st.data())
def test_each_part_is_summed_by_the_places_of_its_words(data):
    """Whatever axes are split, joined, and cut into blocks."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(["int4", "int8", "float16", "int32", "float64"]))
    whole = random_array(dtype, shape, data.draw(st.integers(0, 9)))
    bounds = [
        sorted((data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n))))
        for n in shape
    ]
    index = tuple(slice(low, max(high, low + 1)) for low, high in bounds)
    alone = np.zeros_like(whole)
    alone[index] = whole[index]
    part = Part(whole[index], whole.shape, tuple(i.start for i in index))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_WORDS", data.draw(st.integers(1, 64)))
        patch.setattr(checksums, "_RUN", data.draw(st.integers(1, 64)))
        assert sum_of_parts([part]) == defined_sum(alone)


def test_place_beyond_32_bits_counts():
    part = np.array([[1, 0], [0, 2]], np.int32)
    shape, start = (1 << 20, 1 << 20), ((1 << 20) - 2, (1 << 20) - 2)
    last = (1 << 40) - 1
    expected = (2 * (last - 1 - (1 << 20)) + 1) + 2 * (2 * last + 1)
    assert sum_of_parts([Part(part, shape, start)]) == expected


def test_order_in_memory_does_not_matter():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for same in np.asfortranarray(array), array[:, ::-1].copy()[:, ::-1]:
        assert sum_of(same) == sum_of(array)
    assert sum_of(array.T) != sum_of(array)


@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["uint8", "float16", "int32", "float64", "complex128"]),
    data=st.data(),
)
def test_one_or_two_flipped_bits_change_it(size, seed, dtype, data):
    raw = np.random.default_rng(seed).integers(0, 256, size * 16, np.uint8)
    flipped = raw.copy()
    positions = st.integers(0, 8 * raw.size - 1)
    for position in data.draw(st.sets(positions, min_size=1, max_size=2)):
        flipped[position // 8] ^= 1 << position % 8
    assert sum_of(flipped.view(dtype)) != sum_of(raw.view(dtype))


@given(st.data())
def test_values_in_other_places_change_it(data):
    array = np.arange(1000, dtype=np.float32)
    size = data.draw(st.integers(1, 100))
    first = data.draw(st.integers(0, 999 - 2 * size))
    second = data.draw(st.integers(first + size, 999 - size))
    moved = array.copy()
    moved[first : first + size] = array[second : second + size]
    moved[second : second + size] = array[first : first + size]
    zeroed = array.copy()
    zeroed[first + 1 : first + 1 + size] = 0
    assert len(set(map(sum_of, (array, moved, zeroed)))) == 3


def split_array():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    make = lambda: 2 * jnp.arange(1 << 16, dtype="f4")  # noqa: E731
    return jax.jit(make, out_shardings=NamedSharding(mesh, P("x")))()


@pytest.mark.parametrize("place", ["host", "device"])
def test_parts_keep_their_values_when_the_array_is_donated(place, monkeypatch):
    monkeypatch.setattr(checksums, "_is_on_host", lambda x: place == "host")
    array = split_array()
    expected = defined_sum(np.arange(1 << 16, dtype="f4") * 2)
    parts = own_parts(array)
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    array.delete()  # while NumPy has its memory, donating it is passed over
    assert after[0] == 1 and sum_of_parts(parts) == expected


def test_nothing_is_kept_of_the_array_afterwards():
    array = jax.block_until_ready(split_array())
    pointers = [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
    sum_of(array)
    # Memory that NumPy holds is not used again by a donation.
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert [
        s.data.unsafe_buffer_pointer() for s in after.addressable_shards
    ] == pointers


def test_parts_are_views_without_a_compilation():
    array = split_array()
    events = []
    listen = lambda name, *_, **__: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        parts = own_parts(array)
        sum_of_parts(parts)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not any("compile" in name or "trace" in name for name in events)
    addresses = [part.data.ctypes.data for part in parts]
    assert addresses == [
        s.data.unsafe_buffer_pointer() for s in array.addressable_shards
    ]
