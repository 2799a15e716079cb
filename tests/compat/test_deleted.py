import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from equinox_like._compat.deleted import delete_whole, may_be_donated

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


def sharded(spec):
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=axis_types)
    x = jax.random.split(jax.random.key(0), 8) if spec is None else jnp.ones(8)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec or P("d")))


@pytest.mark.parametrize("spec", [P(), P("d"), None], ids=["whole", "split", "keys"])
@pytest.mark.parametrize("is_held", [True, False])
def test_array_of_which_jax_deleted_a_part_is_deleted_whole(spec, is_held):
    for _ in range(2):
        x = sharded(spec)
        first = x if spec is None else x.addressable_shards[0].data
        view = np.asarray(first) if is_held and spec is not None else None
        jax.jit(jax.lax.optimization_barrier, donate_argnums=0)(x)
        shape, sharding = x.shape, x.sharding
        delete_whole(x)
        assert x.is_deleted() and x.shape == shape and x.sharding == sharding
        with pytest.raises(RuntimeError, match="deleted"):
            jax.block_until_ready(jax.jit(lambda x: x[::-1])(x))
        assert view is None or view.tolist() == first.tolist()


def test_array_without_the_private_methods_is_left_as_it_is():
    class Array:
        pass

    delete_whole(Array())
