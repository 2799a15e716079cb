"""`nextafter` and `prevbefore`: the next numbers, and their derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equinox_like.internal import nextafter, prevbefore

BOTH = [(nextafter, np.inf), (prevbefore, -np.inf)]
both = pytest.mark.parametrize(("step", "end"), BOTH, ids=["next", "previous"])


@both
@pytest.mark.parametrize("x", [1.0, -1.0, 1e30, -1.5e-30, np.inf, -np.inf])
def test_neighbour_is_that_of_numpy(step, end, x):
    assert step(x) == np.nextafter(np.float32(x), np.float32(end))
    assert step(jnp.full((2, 1), x)).shape == (2, 1)


@both
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2fnuz])
def test_neighbour_in_a_dtype_without_infinity(step, end, dtype):
    largest = np.asarray(np.sign(end) * float(jnp.finfo(dtype).max), dtype)
    for x in (1.0, -1.0, 3.0, -largest, largest):
        x = np.asarray(x, dtype)
        assert np.asarray(step(x)) == np.nextafter(x, largest)


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_neighbour_of_zero_is_the_smallest_normal_number(step, end, dtype):
    tiny = np.sign(end) * float(jnp.finfo(dtype).tiny)
    for zero in (0.0, -0.0):
        out = step(jnp.asarray(zero, dtype))
        assert out.dtype == dtype and float(out) == tiny


@both
def test_neighbour_differs_from_the_number_in_comparisons(step, end):
    for x in (0.0, 1e-40, -1e-40, 1e-38, -3.0, 1e-7):
        x = jnp.float32(x)
        assert (step(x) > x) == (end > 0) and step(x) != x


@both
def test_nan_stays(step, end):
    assert jnp.isnan(step(jnp.nan))


@both
def test_derivative_is_one(step, end):
    for wrap in (lambda f: f, jax.jit):
        assert wrap(jax.grad(lambda x: step(x) ** 2))(3.0) == 2 * step(3.0)
    assert jax.vmap(jax.grad(step))(jnp.arange(3.0)).tolist() == [1, 1, 1]
    assert jax.grad(jax.grad(lambda x: step(x) ** 3))(1.0) == 6 * step(1.0)


@both
@pytest.mark.parametrize(
    "x", [1, True, 1j, jnp.arange(2), jnp.ones((), jnp.float8_e8m0fnu)]
)
def test_other_numbers_are_an_error(step, end, x):
    with pytest.raises(ValueError, match="takes floating-point numbers; got"):
        step(x)
