"""Arrays are deleted by a route that is safe beside a thread that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from equinox_like._jit.donation import delete_array

AXES = (jax.sharding.AxisType.Auto,)
MAKE = {
    **{
        name: lambda name=name: jnp.zeros(4).astype(name)
        for name in ("float32", "int32", "bool", "bfloat16", "complex64", "int4")
    },
    "scalar": lambda: jnp.ones(()),
    "weak": lambda: jnp.asarray(1.0),
    "empty": lambda: jnp.ones((0, 3)),
    "key": lambda: jax.random.key(0),
    "device": lambda: jax.device_put(jnp.ones(3), jax.devices()[1]),
    "split": lambda: over_devices(P("d")),
    "whole": lambda: over_devices(P()),
}


def over_devices(spec):
    mesh = jax.make_mesh((4,), ("d",), axis_types=AXES)
    return jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("jit", [True, False])
def test_each_kind_of_array_is_deleted(make, jit):
    x = make()
    with jax.disable_jit(not jit):
        delete_array(x)
        assert x.is_deleted()
        delete_array(x)  # does nothing


def test_array_that_numpy_holds_stays_alive():
    x = jnp.arange(1024.0)
    view = np.asarray(x)
    delete_array(x)
    assert not x.is_deleted() and x[1] == view[1] == 1
    del view


def test_array_that_shares_its_memory_is_deleted_with_it():
    x = jnp.arange(3.0)
    y = jax.device_put(x, x.sharding)
    assert x is not y
    delete_array(x)
    delete_array(y)
    assert x.is_deleted() and y.is_deleted()
