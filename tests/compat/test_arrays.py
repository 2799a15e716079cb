"""Single arrays: each way that uses a private name agrees with the way without it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like._compat import arrays as put
from equinox_like._compat.arrays import (
    is_array_deleted,
    may_be_donated,
    record_deleted_part,
    stored_as,
    weakly_typed,
)

ARRAYS = {
    "float": lambda: jnp.ones(3),
    "key": lambda: jax.random.key(0),
    "output": lambda: jax.jit(lambda x: x + 1)(jnp.ones(3)),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_deleted_array_tells_whether_it_was_donated(make):
    donated, deleted = make(), make()
    jax.jit(lambda x: x, donate_argnums=0)(donated)
    deleted.delete()
    assert donated.is_deleted() and may_be_donated(donated)
    assert deleted.is_deleted() and not may_be_donated(deleted)


def test_array_without_a_traceback_is_not_known_to_be_donated():
    assert not may_be_donated(object())


@pytest.mark.parametrize("spec", [P(), P("d")], ids=["whole", "split"])
@pytest.mark.parametrize("part", range(4))
def test_array_of_which_jax_deleted_a_part_is_deleted(spec, part):
    x = sharded(jnp.arange(8.0), spec)
    view = np.asarray(x.addressable_shards[part].data)
    values = view.tolist()
    jax.jit(jax.lax.optimization_barrier, donate_argnums=0)(x)
    for _ in range(2):
        record_deleted_part(x)
        assert is_array_deleted(x) and view.tolist() == values
        with pytest.raises(eqx.DonationError, match=r"`model` .* has been deleted"):
            eqx.filter_jit(lambda model: model + 1, donate="arrays")(x)
        with pytest.raises(eqx.DonationError, match=r"`pytree`.* donated to"):
            eqx.tree_copy(x)


def test_key_is_deleted():
    x = sharded(jax.random.split(jax.random.key(0), 8), P("d"))
    record_deleted_part(x)
    assert is_array_deleted(x)


def sharded(x, spec):
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=axis_types)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_stored_as_their_data(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    assert (stored_as(keys) == jax.random.key_data(keys)).all()
    assert stored_as(keys).sharding == keys.sharding


@pytest.mark.parametrize("x", [jnp.ones(2), np.ones(2)], ids=["jax", "numpy"])
def test_any_other_array_is_itself(x):
    assert stored_as(x) is x


def test_without_the_attribute_keys_are_donated_all_the_same(monkeypatch):
    from equinox_like._jit import donation

    monkeypatch.setattr(donation, "stored_as", lambda x: x)
    f = eqx.filter_jit(jax.random.split, donate="arrays")
    g = eqx.filter_jit(lambda key, x: (key, x + 1), donate="strict")
    for _ in range(3):
        key, x = jax.random.key(0), jnp.ones(3)
        assert f(key).shape == (2,) and not key.is_deleted()
        g(key, x)
        assert key.is_deleted() and x.is_deleted()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.bfloat16])
def test_dtype_becomes_weak(dtype):
    x = jnp.arange(3, dtype=dtype)
    weak = weakly_typed(x)
    assert weak.weak_type and weak.dtype == dtype and weak.tolist() == [0, 1, 2]
    assert not weak.committed
    assert jax.eval_shape(weakly_typed, x).weak_type


DTYPES = (
    "bool int32 uint8 int4 float16 bfloat16 float32 float8_e4m3fn complex64".split()
)


@pytest.fixture(params=["in use", "without the private name"])
def make(request):
    if request.param == "in use":
        return put.putter
    return lambda **options: put.find_put(object(), **options)


def aligned(array):
    """A copy that starts at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_quick_way_is_in_use():
    assert put.putter(copy=False) is not jax.device_put
    assert put.putter(copy=True) is not jnp.array


@pytest.mark.parametrize("copy", [True, False])
def test_other_parameters_lead_to_the_public_way(copy):
    client = types.SimpleNamespace(
        batched_device_put=lambda aval, /: None,
        HostBufferSemantics=types.SimpleNamespace(
            IMMUTABLE_ONLY_DURING_CALL=0, ZERO_COPY=1
        ),
    )
    assert put.find_put(client, copy=copy)(np.ones(3, np.float32)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_that_of_device_put(make, dtype, copy):
    for shape in [(), (3,), (2, 0)]:
        array = np.ones(shape, jnp.dtype(dtype))
        ours, theirs = make(copy=copy)(array), jax.device_put(array)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
        assert ours.aval == theirs.aval and ours.sharding == theirs.sharding
        assert ours.weak_type is theirs.weak_type is False
        assert ours.committed is theirs.committed is False


def test_result_does_not_retrace(make):
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return x + 1

    f(jnp.zeros(3))
    f(make(copy=False)(np.ones(3, np.float32)))
    f(make(copy=True)(np.ones(3, np.float32)))
    assert len(traces) == 1


def test_only_a_copy_is_free_of_the_memory_that_it_was_made_of(make):
    array = aligned(np.zeros(100, np.float32))
    copy = make(copy=True)(array)
    view = make(copy=False)(array)
    assert view.unsafe_buffer_pointer() == array.ctypes.data
    array[:] = 1
    assert not np.asarray(copy).any()


def test_donating_a_view_leaves_the_memory_alone(make):
    array = aligned(np.zeros(1000, np.float32))
    view = make(copy=False)(array)
    out = jax.jit(lambda x: x + 1, donate_argnums=0)(view)
    assert view.is_deleted() and out[0] == 1
    assert not array.any()


def test_default_device_is_honoured(make):
    device = jax.devices()[2]
    with jax.default_device(device):
        assert make(copy=True)(np.ones(2, np.float32)).devices() == {device}
        assert make(copy=False)(np.ones(2, np.float32)).devices() == {device}


def test_64_bits_are_narrowed_as_jax_does(make):
    assert make(copy=True)(np.ones(2)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert make(copy=True)(np.ones(2)).dtype == jnp.float64


def test_under_a_trace_the_public_way_is_taken():
    out = jax.jit(lambda: put.putter(copy=False)(np.ones(2, np.float32)) + 1)()
    assert out[0] == 2


@pytest.mark.parametrize("copy", [True, False])
def test_transfer_guard_allows_it(copy):
    array = aligned(np.zeros(100, np.float32))
    with jax.transfer_guard("disallow"):
        out = put.putter(copy=copy)(array)
    array[:] = 1
    assert bool(np.asarray(out).any()) is not copy
