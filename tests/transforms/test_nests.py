"""Laws on derivatives, through nests of transformations that must not change them."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from nests import (
    FORWARD,
    REVERSE,
    agree,
    in_float64,
    inexact,
    like,
    mix,
    mixed_trees,
    nests,
    same_statics,
)

import equinox_like as eqx

few = settings(max_examples=20)


def same_but_for_floats(a, b):
    """`same_statics`, and the values of keys and of arrays of integers and bools."""

    def others(tree):
        arrays = eqx.filter(tree, eqx.is_array)
        return eqx.filter(arrays, eqx.is_inexact_array, inverse=True)

    # JAX returns an array of NumPy as one of its own, with 32 bits.
    return same_statics(a, b) and eqx.tree_equal(
        others(a), others(b), typematch=False, check_dtype=False
    )


@few
@given(mixed_trees(), nests(FORWARD))
def test_jvp(tree, nest):
    tangent = like(tree)
    out, out_tangent = eqx.filter_jvp(nest(mix), (tree,), (tangent,))
    assert agree(out, in_float64(lambda f, x: f(x), tree))
    reference = in_float64(lambda f, x, t: jax.jvp(f, (x,), (t,))[1], tree, tangent)
    assert agree(out_tangent, reference)
    expected = eqx.filter(tree, eqx.is_inexact_array)
    assert jtu.tree_structure(out_tangent) == jtu.tree_structure(expected)


@few
@given(mixed_trees(), nests(FORWARD))
def test_linearize_is_jvp(tree, nest):
    out, f_jvp = eqx.filter_linearize(nest(mix), tree)
    for seed in range(2):
        tangent = like(tree, seed)
        out_again, expected = eqx.filter_jvp(mix, (tree,), (tangent,))
        both = jax.device_get((f_jvp(tangent), expected))
        assert eqx.tree_equal(*both, rtol=1e-4, atol=1e-5)
    assert agree(out, [np.asarray(x) for x in inexact(out_again)])


@few
@given(mixed_trees(), nests(REVERSE))
def test_vjp(tree, nest):
    out, pullback = eqx.filter_vjp(nest(mix), tree)
    cotangent = like(out)
    (gradient,) = pullback(cotangent)
    reference = in_float64(lambda f, x, ct: jax.vjp(f, x)[1](ct), tree, cotangent)
    assert agree(gradient, reference)
    expected = eqx.filter(tree, eqx.is_inexact_array)
    assert jtu.tree_structure(gradient) == jtu.tree_structure(expected)


@few
@given(mixed_trees(), nests(FORWARD))
def test_jvp_and_vjp_are_transposes(tree, nest):
    tangent = like(tree, 1)
    out, out_tangent = eqx.filter_jvp(nest(mix), (tree,), (tangent,))
    cotangent = like(out, 2)
    (gradient,) = eqx.filter_vjp(nest(mix), tree)[1](cotangent)

    def inner(a, b):
        pairs = zip(inexact(a), inexact(b), strict=True)
        return sum(np.vdot(x, y) for x, y in pairs)

    forward, backward = inner(cotangent, out_tangent), inner(gradient, tangent)
    assert abs(forward - backward) < 1e-4 * (1 + abs(forward))


@few
@given(mixed_trees(), nests(REVERSE))
def test_gradient(tree, nest):
    def loss(f, x):
        return sum(jnp.sum(y) for y in inexact(f(x)))

    gradient = eqx.filter_grad(lambda x: loss(nest(mix), x))(tree)
    assert agree(gradient, in_float64(lambda f, x: jax.grad(loss, 1)(f, x), tree))


@settings(max_examples=8)
@given(mixed_trees(3), nests(FORWARD))
def test_jacobians_both_ways(tree, nest):
    def f(x):
        return inexact(nest(mix)(x))

    reference = in_float64(lambda f, x: jax.jacrev(f)(x), tree)
    for jacobian in (eqx.filter_jacfwd(f)(tree), eqx.filter_jacrev(f)(tree)):
        assert agree(jacobian, reference)


@settings(max_examples=8)
@given(mixed_trees(), nests(REVERSE))
def test_derivatives_commute_with_jit(tree, nest):
    f, tangent = nest(mix), like(tree)

    def derivatives(tree, cotangent):
        out, pullback = eqx.filter_vjp(f, tree)
        return out, pullback(cotangent)

    eager, jitted = (
        derivatives(tree, tangent),
        eqx.filter_jit(derivatives)(tree, tangent),
    )
    assert agree(jitted, [np.asarray(x) for x in inexact(eager)])
    assert same_but_for_floats(eager, jitted)


@pytest.mark.parametrize("outer", [eqx.filter_jvp, eqx.filter_vjp], ids=["jvp", "vjp"])
def test_second_derivatives(outer):
    x = jnp.asarray(0.3)
    expected = jax.hessian(mix)(x)
    assert np.allclose(eqx.filter_hessian(mix)(x), expected, rtol=1e-5)
    for inner in (
        lambda x: eqx.filter_jvp(mix, (x,), (1.0,))[1],
        lambda x: eqx.filter_vjp(mix, x)[1](1.0)[0],
        lambda x: eqx.filter_linearize(mix, x)[1](1.0),
        lambda x: eqx.filter_grad(mix)(x),
        lambda x: eqx.filter_jacfwd(mix)(x),
        lambda x: eqx.filter_jacrev(mix)(x),
    ):
        if outer is eqx.filter_jvp:
            found = eqx.filter_jvp(inner, (x,), (1.0,))[1]
        else:
            (found,) = eqx.filter_vjp(inner, x)[1](1.0)
        assert np.allclose(found, expected, rtol=1e-5)
