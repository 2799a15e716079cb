"""What the tests of the layers share."""

import warnings

import jax
import numpy as np
import pytest

import equinox_like as eqx


@pytest.fixture(autouse=True)
def many_shapes():
    """Tests of a file share compiled functions, which so get arrays of many shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eqx.RetraceWarning)
        yield


@pytest.fixture
def k0():
    """The key of the contract's check values."""
    return jax.random.PRNGKey(0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict():
    """JAX without implicit promotion, of dtypes or of ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def draw():
    """Draws an array in NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)
    return lambda *shape: jax.device_put(rng.normal(size=shape))


@pytest.fixture
def build(draw):
    """Builds a layer of arrays from its constructor, without its initial draws."""

    def build(cls, *args, **kwargs):
        structs = eqx.filter_eval_shape(
            lambda key: cls(*args, **kwargs, key=key), jax.random.key(0)
        )
        return jax.tree.map(
            lambda s: (
                jax.device_put(np.asarray(draw(*s.shape)).astype(s.dtype))
                if hasattr(s, "dtype")
                else s
            ),
            structs,
        )

    return build
