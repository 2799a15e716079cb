"""filter_jacfwd, filter_jacrev and filter_hessian: trees of trees."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

BOTH = pytest.mark.parametrize("jacobian", [eqx.filter_jacfwd, eqx.filter_jacrev])
ALL = pytest.mark.parametrize(
    "transform", [eqx.filter_jacfwd, eqx.filter_jacrev, eqx.filter_hessian]
)


class Model(eqx.Module):
    weight: Any
    activation: Any = jnp.tanh

    @eqx.filter_jacfwd
    def forward(self, x):
        return self.weight * x

    @eqx.filter_jacrev(has_aux=True)
    def reverse(self, x):
        return self.weight * x, "aux"


@BOTH
def test_agrees_with_jax_on_plain_arrays(jacobian):
    def f(x, y):
        return {"a": jnp.sin(x["u"])[:, None] * y, "b": x["v"]}

    x, y = {"u": jnp.linspace(0, 1, 3), "v": jnp.asarray(2.0)}, jnp.arange(2.0)
    assert eqx.tree_equal(jacobian(f)(x, y), jax.jacrev(f)(x, y), rtol=1e-6)
    assert eqx.tree_equal(
        eqx.filter_jit(jacobian(f))(x, y), jax.jacrev(f)(x, y), rtol=1e-6
    )


@BOTH
def test_structure_of_the_output_is_outside_and_none_is_inside(jacobian):
    model = Model(jnp.arange(2.0))
    jac = jacobian(lambda m, k, *, name: {"y": k * m.weight, "none": None})(
        model, 3, name="keyword"
    )
    assert jac["none"] is None and isinstance(jac["y"], Model)
    assert jac["y"].activation is None and jac["y"].weight.tolist() == [[3, 0], [0, 3]]


@ALL
def test_aux_may_be_anything(transform):
    def f(x):
        return jnp.sum(x**2), {"fn": jnp.tanh, "double": 2 * x, "name": "aux"}

    _, aux = transform(f, has_aux=True)(jnp.ones(2))
    assert aux["fn"] is jnp.tanh and aux["name"] == "aux"
    assert aux["double"].tolist() == [2, 2]
    with pytest.raises(TypeError, match="pair"):
        transform(lambda x: x, has_aux=True)(jnp.ones(2))


def test_hessian_agrees_with_jax_and_finite_differences():
    def f(p):
        return jnp.sum(jnp.sin(p["a"])) * p["b"]

    with jax.enable_x64(True):
        p = {"a": jnp.asarray([0.1, 0.4]), "b": jnp.asarray(1.5)}
        hessian = eqx.filter_hessian(f)(p | {"name": "text"})
        assert hessian["name"] is None and hessian["a"]["name"] is None
        reference = jax.hessian(f)(p)
        assert jnp.allclose(hessian["a"]["b"], reference["a"]["b"])
        h = 1e-5
        up, down = (eqx.filter_grad(f)(p | {"b": p["b"] + s})["a"] for s in (h, -h))
        assert jnp.allclose(hessian["a"]["b"], (up - down) / (2 * h), atol=1e-8)


@ALL
def test_nothing_to_differentiate_is_an_error(transform):
    with pytest.raises(TypeError, match=r"nothing to differentiate.*float.*asarray"):
        transform(lambda x: jnp.ones(2))(2.0)
    with pytest.raises(TypeError, match=r"with keywords only"):
        transform(lambda x: x)(x=jnp.ones(2))


@BOTH
def test_argument_without_leaves_gives_no_columns(jacobian):
    assert jacobian(lambda x: {"a": jnp.ones(2)})(()) == {"a": ()}


@ALL
def test_outputs_must_be_arrays(transform):
    with pytest.raises(TypeError, match=r"`f`.*`output\['b'\]` is a str"):

        def f(x):
            return {"a": x, "b": "text"}

        transform(f)(jnp.ones(2))


@BOTH
def test_outputs_may_be_numbers(jacobian):
    assert jacobian(lambda x: (x, 2.0))(jnp.asarray(1.0)) == (1.0, 0.0)


def test_methods_are_differentiated_with_respect_to_self():
    model = Model(jnp.ones(2))
    assert model.forward(2.0).weight.tolist() == [[2, 0], [0, 2]]
    jac, aux = model.reverse(2.0)
    assert aux == "aux" and jac.weight.tolist() == [[2, 0], [0, 2]]


@ALL
def test_wrapper_has_the_name_and_the_signature(transform):
    def documented(x, y=1):
        """Doc."""

    wrapped = transform(documented)
    assert wrapped.__wrapped__ is documented
    assert wrapped.__name__ == "documented" and wrapped.__doc__ == "Doc."
    assert list(inspect.signature(wrapped).parameters) == ["x", "y"]
    assert "documented" in repr(wrapped)
    assert transform(has_aux=True)(documented).__name__ == "documented"


@ALL
def test_options_are_checked_when_wrapping(transform):
    with pytest.raises(ValueError, match="argnums"):
        transform(jnp.sum, argnums=1)
    with pytest.raises(TypeError, match="unknown"):
        transform(jnp.sum, unknown=1)


def test_complex_functions_are_holomorphic_by_option():
    z = jnp.asarray(1.0 + 2.0j)
    assert eqx.filter_jacfwd(lambda z: z**2, holomorphic=True)(z) == 2 * z
    assert np.allclose(eqx.filter_hessian(lambda z: z**3, holomorphic=True)(z), 6 * z)


def test_messages_of_a_hessian_name_it():
    hessian = eqx.filter_hessian(jnp.sum)
    assert repr(hessian) == "<filter_hessian of sum>"
    with pytest.raises(ValueError, match="`filter_hessian` does not take `argnums`"):
        eqx.filter_hessian(jnp.sum, argnums=1)
    with pytest.raises(TypeError, match="filter_hessian") as caught:
        eqx.filter_hessian(lambda x: "text")(jnp.ones(2))
    assert "filter_jac" not in str(caught.value)


@ALL
def test_output_that_holds_a_key_is_named(transform):
    with pytest.raises(TypeError, match=r"`output\['key'\]` is key<fry>"):
        transform(lambda x: {"key": jax.random.key(0), "x": x})(jnp.ones(2))


@pytest.mark.parametrize("jacobian", [eqx.filter_jacfwd, eqx.filter_jacrev])
def test_outputs_without_a_derivative_have_zeros(jacobian):
    def f(p):
        discrete = {"best": jnp.argmax(p["a"]), "sign": p["a"] > 0, "count": 3}
        return p["a"] * 2, discrete

    p = {"a": jnp.arange(2.0), "b": jnp.ones((2, 3))}
    moving, discrete = jacobian(f)(p)
    assert moving["a"].tolist() == [[2, 0], [0, 2]]
    assert eqx.tree_equal(jacobian(lambda p: f(p)[1])(p), discrete)
    for name, shape in ("best", ()), ("sign", (2,)), ("count", ()):
        dtype = jnp.result_type(f(p)[1][name])
        for key, x in p.items():
            zeros = discrete[name][key]
            assert zeros.shape == (*shape, *x.shape) and zeros.dtype == dtype
            assert not zeros.any()


def test_hessian_of_an_output_without_a_derivative_is_zero():
    second = eqx.filter_hessian(lambda x: (x @ x, jnp.argmax(x)))(jnp.ones(2))
    assert second[0].tolist() == [[2, 0], [0, 2]]
    assert second[1].tolist() == [[0, 0], [0, 0]]
