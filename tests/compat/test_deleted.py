import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like._compat.deleted import (
    MAY_CRASH,
    delete_rest,
    is_array_deleted,
    may_be_donated,
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
        delete_rest(x)
        assert is_array_deleted(x) and view.tolist() == values
        with pytest.raises(eqx.DonationError, match=r"`model` .* has been deleted"):
            eqx.filter_jit(lambda model: model + 1, donate="arrays")(x)
        with pytest.raises(eqx.DonationError, match=r"`pytree`.* donated to"):
            eqx.tree_copy(x)
        if not MAY_CRASH:
            assert x.is_deleted()
            with pytest.raises(RuntimeError, match="deleted"):
                np.asarray(x)


def test_key_is_deleted():
    x = sharded(jax.random.split(jax.random.key(0), 8), P("d"))
    delete_rest(x)
    assert is_array_deleted(x)


def sharded(x, spec):
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=axis_types)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))


def test_array_without_the_private_method_is_left_as_it_is():
    class Array:
        pass

    delete_rest(Array())
