"""filter_vjp: cotangents in, cotangents out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

ONE = jnp.asarray(1.0)


class Scale(eqx.Module):
    factor: Any
    activation: Any = jnp.tanh


def test_agrees_with_jax_on_plain_arrays():
    def f(x, y):
        return {"a": jnp.sin(x) * y["b"]}

    primals = jnp.linspace(0, 1, 3), {"b": jnp.ones(3)}
    cotangent = {"a": jnp.arange(3.0)}
    (out, pullback), (expected, theirs) = (
        eqx.filter_vjp(f, *primals),
        jax.vjp(f, *primals),
    )
    assert eqx.tree_equal(out, expected)
    assert eqx.tree_equal(pullback(cotangent), theirs(cotangent))


def test_anything_goes_in_and_comes_out():
    marker = object()

    def f(model, n, flag):
        return {"y": model.factor**n, "marker": marker, "n": n, "flag": flag}

    out, pullback = eqx.filter_vjp(f, Scale(jnp.asarray(3.0)), 2, jnp.asarray(True))
    assert out["y"] == 9.0 and out["marker"] is marker and out["n"] == 2 and out["flag"]
    cotangent = {"y": ONE, "marker": None, "n": None, "flag": None}
    gradient, n, flag = pullback(cotangent)
    assert isinstance(gradient, Scale) and gradient.factor == 6.0
    assert gradient.activation is None and n is None and flag is None


def test_aux_may_be_anything():
    def f(x):
        return x**2, {"fn": jnp.tanh, "double": 2 * x, "name": "aux"}

    out, pullback, aux = eqx.filter_vjp(f, jnp.asarray(3.0), has_aux=True)
    assert out == 9.0 and pullback(ONE) == (6.0,)
    assert aux["fn"] is jnp.tanh and aux["double"] == 6.0 and aux["name"] == "aux"
    with pytest.raises(TypeError, match="pair"):
        eqx.filter_vjp(lambda x: x, ONE, has_aux=True)


def test_pullback_is_a_pytree_that_can_be_called_many_times():
    calls = []

    def f(x):
        calls.append(1)
        return x**2, "text"

    @eqx.filter_jit
    def forward(x):
        return eqx.filter_vjp(f, x)

    _, pullback = forward(jnp.asarray(3.0))
    assert pullback((ONE, None)) == pullback((ONE, None)) == (6.0,)
    backward = eqx.filter_jit(lambda pullback, ct: pullback((ct, None)))
    assert backward(pullback, 2 * ONE) == (12.0,)
    assert len(calls) == 1 and repr(pullback) == "<vjp of f>"


def test_no_dependence_is_zero():
    _, pullback = eqx.filter_vjp(lambda x, y: x, ONE, jnp.ones(2))
    assert pullback(ONE)[1].tolist() == [0, 0]


def test_nothing_to_differentiate_gives_none():
    out, pullback = eqx.filter_vjp(lambda n: (n, ONE), 3)
    assert out == (3, 1.0) and pullback((None, ONE)) == (None,)


@pytest.mark.parametrize(
    ("cotangent", "message"),
    [
        ([ONE, None], "structure"),
        ((None, None), r"`cotangent\[0\]` is `None`.*zeros"),
        ((ONE, 2.0), r"`cotangent\[1\]`.*must be `None`"),
        ((jnp.ones(2), None), r"`cotangent\[0\]` has shape \(2,\)"),
        ((jnp.asarray(1), None), r"`cotangent\[0\]` has dtype int32"),
        (("text", None), r"`cotangent\[0\]` is a str"),
    ],
    ids=["structure", "none", "static", "shape", "dtype", "foreign"],
)
def test_cotangents_that_do_not_fit_are_named(cotangent, message):
    _, pullback = eqx.filter_vjp(lambda x: (x, 2.0), ONE)
    with pytest.raises(ValueError, match=message):
        pullback(cotangent)


def test_keywords_cannot_be_given():
    with pytest.raises(TypeError):
        eqx.filter_vjp(lambda x, y: x, ONE, y=ONE)


def test_can_be_mapped():
    def f(x):
        out, pullback = eqx.filter_vjp(lambda x: (x**2, "text"), x)
        return out[0], pullback((ONE, None))[0]

    out, gradient = eqx.filter_vmap(f)(jnp.arange(3.0))
    assert out.tolist() == [0, 1, 4] and gradient.tolist() == [0, 2, 4]


def test_float0_is_taken_for_none():
    _, pullback = eqx.filter_vjp(lambda x: (x.astype("int32"), 2 * x), jnp.ones(2))
    zero = np.zeros(2, jax.dtypes.float0)
    assert pullback((zero, jnp.ones(2)))[0].tolist() == [2, 2]
