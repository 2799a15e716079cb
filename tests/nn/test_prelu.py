import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equinox_like import nn


def test_negative_numbers_are_scaled_by_the_slope(draw) -> None:
    x = np.asarray(draw(3, 4))
    expected = np.where(x >= 0, x, 0.25 * x)
    np.testing.assert_allclose(nn.PReLU()(x), expected, rtol=1e-6)


def test_slopes_broadcast_with_the_input(strict) -> None:
    slopes = jnp.array([0.0, 0.5, 2.0])
    out = nn.PReLU(slopes)(-jnp.ones((2, 3)))
    assert out.tolist() == [[0, -0.5, -2], [0, -0.5, -2]]


def test_gradient_at_zero_is_one_and_nan_stays() -> None:
    assert jax.grad(nn.PReLU())(0.0) == 1
    assert jnp.isnan(nn.PReLU()(jnp.nan))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_default_slope_keeps_the_dtype_of_the_input(dtype, strict) -> None:
    assert nn.PReLU()(jnp.ones(3, dtype)).dtype == dtype
    assert nn.PReLU().negative_slope.weak_type
    assert nn.PReLU(jnp.float32(0.5))(jnp.ones(3, dtype)).dtype == jnp.float32
    assert nn.PReLU(dtype=dtype).negative_slope.dtype == dtype


def test_it_stands_in_a_sequential(key) -> None:
    assert nn.Sequential([nn.PReLU()])(jnp.asarray(-1.0), key=key) == -0.25
