import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._compat.keys import stored_as


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_stored_as_their_data(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    assert (stored_as(keys) == jax.random.key_data(keys)).all()
    assert stored_as(keys).sharding == keys.sharding


@pytest.mark.parametrize("x", [jnp.ones(2), np.ones(2)], ids=["jax", "numpy"])
def test_any_other_array_is_itself(x):
    assert stored_as(x) is x


def test_without_the_attribute_keys_are_donated_all_the_same(monkeypatch):
    from equinox_like._jit import donating, specialization

    for module in (donating, specialization):
        monkeypatch.setattr(module, "stored_as", lambda x: x)
    f = eqx.filter_jit(jax.random.split, donate="arrays")
    g = eqx.filter_jit(lambda key, x: (key, x + 1), donate="strict")
    for _ in range(3):
        key, x = jax.random.key(0), jnp.ones(3)
        assert f(key).shape == (2,) and not key.is_deleted()
        g(key, x)
        assert key.is_deleted() and x.is_deleted()
