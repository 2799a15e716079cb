"""An array gets a weak dtype, if JAX's primitive has the parameters that we know."""

import types

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat.weak_type import weakly_typed


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.bfloat16])
def test_dtype_becomes_weak(dtype):
    x = jnp.arange(3, dtype=dtype)
    weak = weakly_typed(x)
    assert weak.weak_type and weak.dtype == dtype and weak.tolist() == [0, 1, 2]
    assert not weak.committed
    assert jax.eval_shape(weakly_typed, x).weak_type


def test_with_other_parameters_it_stays_as_it_is(monkeypatch):
    def bind(x):
        raise AssertionError

    other = types.SimpleNamespace(bind=bind)
    monkeypatch.setattr(jax.lax, "convert_element_type_p", other)
    x = jnp.ones(3)
    assert weakly_typed(x) is x
