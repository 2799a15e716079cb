"""filter_grad and filter_value_and_grad: the inexact arrays of the first argument."""

import dataclasses
import functools
import inspect
from typing import Any, ClassVar

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import trees

import equinox_like as eqx


class Model(eqx.Module):
    weight: Any
    activation: Any = jnp.tanh

    def __call__(self, x):
        return self.activation(self.weight * x)

    @eqx.filter_grad
    def slope(self, x):
        return self(x).sum()

    @eqx.filter_value_and_grad(has_aux=True)
    def slope_with_aux(self, x):
        return self(x).sum(), "aux"

    @eqx.filter_grad(has_aux=True)
    def slope_alone_with_aux(self, x):
        return self(x).sum(), "aux"


def total(tree):
    return sum(
        (jnp.sum(x.astype(jnp.float32) ** 2).real for x in inexact(tree)), jnp.zeros(())
    )


def inexact(tree):
    return [x for x in jtu.tree_leaves(tree) if eqx.is_inexact_array(x)]


@settings(max_examples=40)
@given(trees())
def test_gradient_has_the_structure_of_the_inexact_arrays(tree):
    if not inexact(tree):
        with pytest.raises(TypeError, match="nothing to differentiate"):
            eqx.filter_grad(total)(tree)
        return
    value, gradient = eqx.filter_value_and_grad(total)(tree)
    expected = eqx.filter(tree, eqx.is_inexact_array)
    assert jtu.tree_structure(gradient) == jtu.tree_structure(expected)
    assert jnp.allclose(value, total(tree))
    for g, x in zip(inexact(gradient), inexact(expected), strict=True):
        assert g.dtype == x.dtype and jnp.allclose(g, 2 * jnp.asarray(x))
    updated = eqx.apply_updates(tree, gradient)
    assert jtu.tree_structure(updated) == jtu.tree_structure(tree)


@pytest.mark.parametrize("wrap", [functools.partial, lambda f: lambda x: f(x)])
def test_gradient_of_a_function_around_a_model_is_refused_with_the_fix(wrap, key):
    model = eqx.nn.Linear(2, 2, key=key)
    message = (
        "nothing to differentiate.*not look inside functions.*`equinox_like.Partial`"
    )
    with pytest.raises(TypeError, match=message):
        eqx.filter_grad(lambda f: f(jnp.ones(2)).sum())(wrap(model))


def test_gradient_of_an_object_that_is_no_pytree_is_refused_with_the_fix():
    @dataclasses.dataclass
    class Params:
        weight: Any

    message = "are Params.*Params is not a pytree.*: derive the class from `Module`"
    for weight in (
        jnp.ones(2),
        {"layers": [eqx.nn.Embedding(weight=jnp.ones((1, 2)))]},
    ):
        with pytest.raises(TypeError, match=message):
            eqx.filter_grad(lambda p: 0.0)({"a": Params(weight)})
    with pytest.raises(TypeError, match=r"as in `jnp\.asarray"):
        eqx.filter_grad(lambda p: p["a"].weight)({"a": Params(2.0)})


@settings(max_examples=20)
@given(st.integers(1, 3), st.booleans())
def test_agrees_with_jax_on_plain_arrays(size, jit):
    def f(params, x):
        return jnp.sum(jnp.sin(params["a"] * x) + params["b"][0])

    wrap = eqx.filter_jit if jit else lambda g: g
    params = {"a": jnp.arange(size, dtype=float), "b": [jnp.ones(size)]}
    x = jnp.linspace(0, 1, size)
    ours = wrap(eqx.filter_value_and_grad(f))(params, x)
    assert eqx.tree_equal(ours, jax.value_and_grad(f)(params, x), rtol=1e-6)
    assert eqx.tree_equal(wrap(eqx.filter_grad(f))(params, x), ours[1])


def test_gradient_agrees_with_a_float64_finite_difference():
    with jax.enable_x64(True):
        x, h = jnp.asarray(0.3), 1e-6
        f = Model(jnp.asarray(1.7))
        gradient = eqx.filter_grad(lambda m: m(x))(f).weight
        numeric = (Model(1.7 + h)(x) - Model(1.7 - h)(x)) / (2 * h)
        assert abs(gradient - numeric) < 1e-9


def test_everything_else_is_passed_through_untouched():
    marker, seen = object(), []

    def f(x, *args, **kwargs):
        seen.append((x["i"], args, kwargs))
        return x["w"].sum()

    gradient = eqx.filter_grad(f)({"w": jnp.ones(2), "i": 3}, marker, key="text")
    assert gradient["i"] is None and seen == [(3, (marker,), {"key": "text"})]


@pytest.mark.parametrize("wrap", [lambda g: g, eqx.filter_jit])
def test_aux_may_be_anything(wrap):
    marker = {1, 2}

    def f(x):
        return x.sum(), {"marker": marker, "fn": jnp.tanh, "array": x * 2, "none": None}

    gradient, aux = wrap(eqx.filter_grad(f, has_aux=True))(jnp.ones(2))
    assert gradient.tolist() == [1, 1]
    assert aux["marker"] is marker and aux["fn"] is jnp.tanh
    assert aux["array"].tolist() == [2, 2] and aux["none"] is None
    (value, _), _ = wrap(eqx.filter_value_and_grad(f, has_aux=True))(jnp.ones(2))
    assert value == 2.0


def test_methods_are_differentiated_with_respect_to_self():
    model = Model(jnp.ones(2))
    gradient = model.slope(0.5)
    assert isinstance(gradient, Model) and gradient.activation is None
    assert jnp.allclose(gradient.weight, 0.5 * (1 - jnp.tanh(0.5) ** 2))
    alone, aux = model.slope_alone_with_aux(0.5)
    assert aux == "aux"
    (_, aux), again = model.slope_with_aux(0.5)
    assert eqx.tree_equal(alone, again)
    assert aux == "aux" and eqx.tree_equal(again, gradient)


def test_nests_with_itself_and_with_jax():
    def f(x):
        return jnp.sum(x**3)

    x = jnp.asarray(2.0)
    assert eqx.filter_grad(eqx.filter_grad(f))(x) == 12.0
    assert jax.grad(eqx.filter_grad(f))(x) == eqx.filter_grad(jax.grad(f))(x) == 12.0
    assert jax.vmap(eqx.filter_grad(f))(jnp.arange(3.0)).tolist() == [0, 3, 12]
    assert jax.jit(eqx.filter_grad(f))(x) == 12.0
    assert eqx.filter_grad(jax.checkpoint(f))(x) == 12.0


class Weighted(eqx.Module):
    scale: Any

    def __call__(self, x, *, offset=0.0):
        return jnp.sum(self.scale * x) + offset

    def method(self, x, *, offset=0.0):
        return self(x, offset=offset)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, *, offset=0.0: jnp.sum(3.0 * x) + offset,
        functools.partial(lambda a, x, *, offset=0.0: jnp.sum(a * x) + offset, 3.0),
        Weighted(jnp.asarray(3.0)),
        Weighted(3.0).method,
        Weighted(3.0).__call__,
        eqx.Partial(lambda a, x, *, offset=0.0: jnp.sum(a * x) + offset, 3.0),
        eqx.filter_jit(lambda x, *, offset=0.0: jnp.sum(3.0 * x) + offset),
    ],
    ids=["lambda", "partial", "module", "method", "dunder", "Partial", "filter_jit"],
)
@pytest.mark.parametrize("disabled", [False, True])
def test_everything_that_can_be_called_can_be_differentiated(fun, disabled):
    with jax.disable_jit(disabled):
        value, gradient = eqx.filter_value_and_grad(fun)(jnp.ones(2), offset=1.0)
        assert value == 7.0 and gradient.tolist() == [3, 3]
        batched = eqx.filter_vmap(fun)(jnp.ones((4, 2)))
        assert batched.tolist() == [6, 6, 6, 6]


def test_numpy_arrays_are_differentiated():
    gradient = eqx.filter_grad(jnp.sum)(np.ones(2, np.float32))
    assert isinstance(gradient, jax.Array) and gradient.tolist() == [1, 1]


def test_complex_arrays_are_differentiated():
    z = jnp.asarray(1.0 + 2.0j)
    assert eqx.filter_grad(lambda z: (z * z.conj()).real)(z) == 2 * z.conj()
    assert eqx.filter_grad(lambda z: z**2, holomorphic=True)(z) == 2 * z


class Empty(eqx.Module):
    layers: ClassVar[list] = [jnp.ones(2)]


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (None, "it is None, a tree without leaves"),
        ((), "it is a tuple of length 0, a tree without leaves"),
        ({"a": [None]}, r"it is a dict with the keys \['a'\], a tree without leaves"),
        (Empty(), "it is an Empty, a tree without leaves"),
    ],
)
@pytest.mark.parametrize(
    "transform",
    [
        eqx.filter_grad,
        eqx.filter_value_and_grad,
        functools.partial(eqx.filter_grad, wrt=True),
        lambda f: eqx.filter_jit(eqx.filter_grad(f)),
    ],
)
def test_argument_without_leaves_is_an_error_that_tells_it(transform, x, found):
    def loss(x):
        return jnp.zeros(())

    with pytest.raises(
        TypeError, match=f"`loss` has nothing to differentiate: {found}"
    ):
        transform(loss)(x)


@pytest.mark.parametrize(
    ("x", "seen"),
    [(2.0, "float"), (jnp.arange(2), "leaves are int32"), ([True, "a"], "bool, str")],
    ids=["float", "ints", "mixed"],
)
def test_nothing_to_differentiate_is_an_error_that_says_what_is_there(x, seen):
    def loss(x):
        return 1.0

    with pytest.raises(TypeError, match=f"`loss`.*{seen}.*asarray"):
        eqx.filter_grad(loss)(x)


@settings(max_examples=20)
@given(trees(), st.booleans())
def test_wrt_narrows_what_is_differentiated(tree, everything):
    tree = (tree, {"w": jnp.ones(2), "v": jnp.ones(3)})
    wrt = (everything, {"w": lambda x: True, "v": False})
    gradient = eqx.filter_grad(total, wrt=wrt)(tree)
    expected = eqx.filter(eqx.filter(tree, wrt), eqx.is_inexact_array)
    assert jtu.tree_structure(gradient) == jtu.tree_structure(expected)
    assert gradient[1]["w"].tolist() == [2, 2] and gradient[1]["v"] is None


def test_wrt_may_be_a_decorators_option_and_a_single_callable():
    @eqx.filter_value_and_grad(has_aux=True, wrt=lambda x: x.ndim == 2)
    def f(params):
        return params["w"].sum() + params["b"].sum(), "aux"

    (value, aux), gradient = f({"w": jnp.ones((1, 2)), "b": jnp.ones(2)})
    assert value == 4.0 and aux == "aux" and gradient["b"] is None
    assert gradient["w"].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "transform", [eqx.filter_jacfwd, eqx.filter_jacrev, eqx.filter_hessian]
)
def test_jacobian_of_a_module_without_leaves_is_an_error(transform):
    with pytest.raises(TypeError, match="it is an Empty, a tree without leaves"):
        transform(lambda x: jnp.ones(2))(Empty())


def test_wrt_that_chooses_nothing_is_an_error():
    with pytest.raises(TypeError, match=r"`total`.*`wrt=False` chooses none"):
        eqx.filter_grad(total, wrt=False)(jnp.ones(2))
    with pytest.raises(TypeError, match="chooses none"):
        eqx.filter_grad(total, wrt={"w": False, "n": True})({"w": jnp.ones(2), "n": 1})
    with pytest.raises(ValueError):
        eqx.filter_grad(total, wrt={"other": True})({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "wrt, text",
    [
        ({"w": {"v": True}}, r"`wrt\['w'\]` is a dict .* `x\['w'\]` is a list"),
        (
            {"w": [1, True]},
            r"leaves of `wrt` must be .* at `wrt\['w'\]\[0\]` there is `1`",
        ),
        (lambda x: x > 0, r"A function of `wrt` returned .* for `x\['w'\]\[0\]`"),
        (lambda x: x.nothing, r"no attribute 'nothing'"),
    ],
    ids=["structure", "leaf", "bools", "error"],
)
def test_errors_about_wrt_name_it_and_the_argument(wrt, text):
    with pytest.raises((ValueError, AttributeError), match=text) as caught:
        eqx.filter_grad(total, wrt=wrt)({"w": [jnp.ones(2), jnp.ones(2)]})
    *others, note = caught.value.__notes__
    assert note == "Here `x` is the first argument of `total`."
    for other in others:
        assert "of `wrt`, called with the leaf `x['w'][0]`" in other


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ref_is_refused_by_its_path(wrap):
    def loss(x):
        return jnp.sum(x["w"]) + jnp.sum(x["r"][0][...])

    def gradient(ref, **options):
        return eqx.filter_grad(loss, **options)({"w": jnp.ones(2), "r": [ref]})

    ref = jax.new_ref(jnp.ones(2))
    with pytest.raises(TypeError, match=r"`loss` holds a `jax.Ref` at `x\['r'\]\[0\]`"):
        wrap(gradient)(ref)
    without = wrap(functools.partial(gradient, wrt={"w": True, "r": False}))
    assert without(ref)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("kwargs", [{}, {"x": jnp.ones(2)}])
def test_first_argument_must_be_passed_by_position(kwargs):
    how = "with keywords only" if kwargs else "without arguments"
    with pytest.raises(
        TypeError, match=rf"^Functions wrapped with `filter_grad`.*{how}"
    ):
        eqx.filter_grad(jnp.sum)(**kwargs)
    with pytest.raises(
        TypeError, match=rf"^Functions wrapped with `filter_jacrev`.*{how}"
    ):
        eqx.filter_jacrev(jnp.sum)(**kwargs)


@pytest.mark.parametrize(
    "out", [jnp.ones(2), jnp.asarray(1)], ids=["vector", "integer"]
)
def test_output_must_be_a_real_scalar(out):
    with pytest.raises(TypeError):
        eqx.filter_grad(lambda x: out)(jnp.ones(2))


def test_pair_without_has_aux_says_so():
    def loss(x):
        return x.sum(), x

    match = r"`loss` returned a tuple of length 2: .* `has_aux=True`"
    with pytest.raises(TypeError, match=match):
        eqx.filter_value_and_grad(loss)(jnp.ones(2))


def test_output_with_aux_must_be_a_pair():
    with pytest.raises(TypeError, match="pair"):
        eqx.filter_grad(lambda x: x.sum(), has_aux=True)(jnp.ones(2))


def test_pair_with_aux_may_be_a_list():
    loss = lambda x: [x.sum(), "aux"]  # noqa: E731
    (value, aux), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(jnp.ones(2))
    assert value == 2 and aux == "aux" and gradient.tolist() == [1, 1]
    assert eqx.filter_jacrev(loss, has_aux=True)(jnp.ones(2))[1] == "aux"
    assert eqx.filter_vjp(loss, jnp.ones(2), has_aux=True)[2] == "aux"


@pytest.mark.parametrize("transform", [eqx.filter_grad, eqx.filter_value_and_grad])
def test_options_are_checked_when_wrapping(transform):
    name = transform.__name__
    with pytest.raises(ValueError, match=f"`{name}` does not take `argnums`"):
        transform(jnp.sum, argnums=1)
    assert transform(jnp.sum, argnums=None)
    with pytest.raises(ValueError, match=f"`{name}` .*`filter_spec`.*deprecated"):
        transform(jnp.sum, filter_spec=True)
    with pytest.raises(TypeError, match="unknown"):
        transform(jnp.sum, unknown=1)
    with pytest.raises(TypeError, match="wraps a function"):
        transform(3)


def test_wrapper_is_a_pytree_with_the_functions_name():
    @eqx.filter_grad
    def documented(x):
        """Doc."""
        return x.sum()

    assert documented.__name__ == "documented" and documented.__doc__ == "Doc."
    assert list(inspect.signature(documented).parameters) == ["x"]
    assert jtu.tree_leaves(documented) == []
    model = Model(jnp.ones(2))
    (leaf,) = inexact(eqx.filter_grad(model))
    assert leaf is model.weight
    assert jax.jit(lambda g, x: g(x))(documented, jnp.ones(2)).tolist() == [1, 1]
