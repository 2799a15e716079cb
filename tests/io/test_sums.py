"""The checksum of an array is that of its content, however it is sharded."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from equinox_like._io.checksums import content_sums, sum_on_devices, sum_on_host

DTYPES = (
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (4, 8)])
def test_devices_and_host_agree(dtype, shape):
    values = np.random.default_rng(0).normal(size=shape)
    array = np.asarray(values).astype(jnp.dtype(dtype))
    expected = sum_on_host(array)
    assert int(sum_on_devices(jnp.asarray(array))) == expected
    assert content_sums([array, jnp.asarray(array)]) == [f"{expected:08x}"] * 2


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128"])
def test_wide_dtypes_agree_whatever_jax_supports(dtype):
    array = np.random.default_rng(0).normal(size=(3, 4)).astype(dtype)
    expected = content_sums([array])
    with jax.enable_x64(True):
        assert content_sums([jnp.asarray(array)]) == expected
        assert int(sum_on_devices(jnp.asarray(array))) == int(expected[0], 16)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shards_do_not_matter(axis_type):
    array = jnp.arange(4 * 8 * 6.0).reshape(4, 8, 6)
    expected = content_sums([array])
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    for spec in P(), P("x"), P("y", "x"), P(None, ("x", "y")), P(None, None, "x"):
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        assert content_sums([placed]) == expected
        assert int(sum_on_devices(placed)) == int(expected[0], 16)
        with jax.set_mesh(mesh):
            elsewhere = jax.device_put(array, jax.devices()[3])
            assert content_sums([placed, elsewhere]) == expected * 2


def test_order_in_memory_does_not_matter():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for same in np.asfortranarray(array), array[:, ::-1].copy()[:, ::-1]:
        assert content_sums([same]) == content_sums([array])
    assert content_sums([array.T]) != content_sums([array])


@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["uint8", "float16", "int32", "float64"]),
    data=st.data(),
)
def test_each_flipped_bit_changes_it(size, seed, dtype, data):
    raw = np.random.default_rng(seed).integers(0, 256, size * 8, np.uint8)
    array = raw.view(dtype)
    flipped = raw.copy()
    position = data.draw(st.integers(0, 8 * raw.size - 1))
    flipped[position // 8] ^= 1 << position % 8
    assert sum_on_host(flipped.view(dtype)) != sum_on_host(array)


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
    sums = content_sums([array, moved, zeroed])
    assert len(set(sums)) == 3


def test_large_array_is_summed_up_in_pieces():
    array = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    assert sum_on_host(array) == int(sum_on_devices(jnp.asarray(array)))


def test_array_can_be_donated_afterwards():
    array = jax.block_until_ready(jnp.arange(1 << 16) * 2)
    pointer = array.unsafe_buffer_pointer()
    content_sums([array])
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted() and after.unsafe_buffer_pointer() == pointer
