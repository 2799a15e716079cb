"""The quick way to make JAX arrays agrees with the public one."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equinox_like._compat import put

DTYPES = (
    "bool int32 uint8 int4 float16 bfloat16 float32 float8_e4m3fn complex64".split()
)


@pytest.fixture(params=["in use", "without the private name"])
def make(request):
    if request.param == "in use":
        return put.putter
    return lambda **options: put.find(object(), **options)


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
    assert put.find(client, copy=copy)(np.ones(3, np.float32)).tolist() == [1, 1, 1]


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
