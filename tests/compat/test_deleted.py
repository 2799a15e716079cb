import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat.deleted import may_be_donated

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
