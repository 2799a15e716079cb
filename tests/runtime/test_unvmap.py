"""`unvmap_all`, `unvmap_any`, `unvmap_max`: what is reduced, and to what."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from equinox_like import internal

REDUCTIONS = [
    (internal.unvmap_all, np.all),
    (internal.unvmap_any, np.any),
    (internal.unvmap_max, np.max),
]
reductions = pytest.mark.parametrize(("reduction", "by_numpy"), REDUCTIONS)


@reductions
@given(values=st.lists(st.integers(-1, 3), min_size=6, max_size=6))
def test_reduction_is_over_the_array_and_every_batch(reduction, by_numpy, values):
    x = jnp.asarray(values).reshape(1, 2, 3)
    expected = by_numpy(np.asarray(values))
    assert reduction(x) == expected
    mapped = jax.vmap(reduction, in_axes=1, out_axes=None)
    assert mapped(x) == expected
    assert jax.vmap(mapped, in_axes=2, out_axes=None)(x) == expected


@reductions
def test_result_is_a_scalar_without_a_batch_axis(reduction, by_numpy):
    def f(x):
        return jax.vmap(lambda x: reduction(x), out_axes=None)(x)

    x = jnp.arange(4)
    for wrap in (lambda f: f, jax.jit):
        out = wrap(f)(x)
        assert out.shape == () and out == by_numpy(x)
    assert (jax.vmap(reduction)(x) == jnp.full(4, by_numpy(x))).all()


@reductions
def test_python_values_are_taken(reduction, by_numpy):
    assert reduction(True) and not reduction(0)


def test_dtypes():
    x = jnp.asarray([1, 2], jnp.uint8)
    assert internal.unvmap_max(x).dtype == jnp.uint8
    assert internal.unvmap_max(jnp.asarray(1.5)) == 1.5
    assert internal.unvmap_any(x).dtype == internal.unvmap_all(x).dtype == bool


def test_empty_arrays():
    empty = jnp.zeros(0)
    assert not internal.unvmap_any(empty)
    assert internal.unvmap_all(empty)
    with pytest.raises(ValueError, match="zero-size array"):
        internal.unvmap_max(empty)


@pytest.mark.parametrize("reduction", [internal.unvmap_all, internal.unvmap_any])
def test_bool_has_no_derivative(reduction):
    gradient = jax.grad(lambda x: jnp.where(reduction(x > 0), x, 0.0) * reduction(x))
    assert gradient(2.0) == 1


def test_maximum_cannot_be_differentiated():
    with pytest.raises(NotImplementedError, match="'unvmap_max'"):
        jax.grad(internal.unvmap_max)(1.0)


@reductions
def test_branch_of_a_cond_stays_one_in_a_batch(reduction, by_numpy):
    def f(x):
        return jax.lax.cond(reduction(x > 0) > 0, jnp.sin, jnp.cos, x)

    text = str(jax.make_jaxpr(jax.vmap(f))(jnp.ones(3)))
    assert "cond[" in text and "select_n" not in text


@pytest.mark.parametrize(
    "reduction", [internal.unvmap_all, internal.unvmap_any, internal.unvmap_max]
)
def test_integer_of_a_function_with_a_rule_of_its_own(reduction):
    """JAX gives it a tangent, which has no content."""

    @jax.custom_vjp
    def double(x):
        return 2 * x, jnp.asarray(3)

    double.defvjp(lambda x: (double(x), None), lambda _, ct: (2 * ct[0],))

    def loss(x):
        y, i = double(x)
        return y * reduction(i)

    scale = int(reduction(3))
    assert jax.jit(jax.grad(loss))(1.0) == 2 * scale
