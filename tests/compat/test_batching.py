"""Whether arrays are mapped right now, and that no is said where nothing is known."""

import functools

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat import tracing

X = jnp.arange(4.0)


def asked(transform):
    found = []

    def f(x):
        found.append(tracing.mapped_at_once([1.0, x]))
        return 2 * x

    transform(f)
    return found


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(f)(X),
        lambda f: jax.jit(jax.vmap(f))(X),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(X),
        lambda f: jax.vmap(lambda y: jax.vmap(f)(y))(X[None]),
    ],
)
def test_vmap_within_all_else_is_seen(transform):
    assert all(asked(transform))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f(X),
        lambda f: jax.jit(f)(X),
        lambda f: jax.vmap(jax.grad(f))(X),
        lambda f: jax.vmap(jax.jit(f))(X),
        lambda f: jax.vmap(lambda y: f(X))(X),
        lambda f: jax.vmap(lambda y: jax.vmap(lambda _: f(y))(X))(X),
        lambda f: jax.vmap(f, axis_name="name")(X),
        lambda f: jax.vmap(f, spmd_axis_name="x")(X),
    ],
)
def test_anything_else_is_not(transform):
    assert not any(asked(transform))


def test_no_is_said_where_nothing_is_known():
    assert asked(lambda f: jax.vmap(f)(X)) == [True]
    found = []
    jax.vmap(lambda x: found.append(tracing.mapped_at_once([x], None)) or x)(X)
    assert found == [False]


def test_what_vmap_returned_is_known():
    f = jax.vmap(jnp.sin)
    for g in (f, jax.jit(f), jax.checkpoint(f), functools.wraps(f)(lambda x: f(x))):
        assert tracing.is_vmapped(g)
    for g in (jnp.sin, jax.jit(jnp.sin), jax.checkpoint(jnp.sin), lambda x: f(x), jax):
        assert not tracing.is_vmapped(g)


def test_a_function_of_another_name_is_not_known():
    assert not tracing.is_vmapped(jax.vmap(jnp.sin), name="renamed")


def test_a_variable_without_a_value_is_passed_over():
    def f(x):
        return later(x)

    assert not tracing.is_vmapped(f)
    later = jnp.sin
