"""Errors name what JAX does not convert, and callables without a signature work."""

import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx


class Quantity:
    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


X = jnp.ones(3)


def total(tree):
    return jnp.sum(jnp.add(tree["a"], tree["b"]))


def tree():
    return {"a": Quantity(X), "b": X}


CALLS = {
    "filter_jit": lambda: eqx.filter_jit(total)(tree()),
    "donate": lambda: eqx.filter_jit(total, donate="all")(
        {"a": Quantity(X), "b": X + 0}
    ),
    "lower": lambda: eqx.filter_jit(total).lower(tree()),
    "eval_shape": lambda: eqx.filter_jit(total).eval_shape(tree()),
    "filter_vmap": lambda: eqx.filter_vmap(total)(tree()),
    "filter_grad": lambda: eqx.filter_grad(total)(tree()),
    "filter_value_and_grad": lambda: eqx.filter_value_and_grad(total)(tree()),
    "filter_jacfwd": lambda: eqx.filter_jacfwd(total)(tree()),
    "filter_jacrev": lambda: eqx.filter_jacrev(total)(tree()),
    "filter_hessian": lambda: eqx.filter_hessian(total)(tree()),
    "filter_checkpoint": lambda: eqx.filter_checkpoint(total)(tree()),
    "filter_make_jaxpr": lambda: eqx.filter_make_jaxpr(total)(tree()),
    "filter_jit(filter_grad)": lambda: eqx.filter_jit(eqx.filter_grad(total))(tree()),
}


@pytest.mark.parametrize("call", CALLS)
def test_object_with_jax_array_is_told_by_its_path(call):
    with pytest.raises(ValueError) as caught:
        CALLS[call]()
    text = str(caught.value)
    assert "['a']` is a Quantity, which has a method `__jax_array__`" in text
    assert "['a'])`" in text and "`jnp.asarray(" in text and "Triggering" not in text


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda: eqx.filter_vjp(total, tree()), "primals[0]['a']"),
        (lambda: eqx.filter_linearize(total, tree()), "primals[0]['a']"),
        (lambda: eqx.filter_eval_shape(total, tree()), "args[0]['a']"),
        (
            lambda: eqx.filter_scan(lambda c, x: (c, total(c)), tree(), None, length=2),
            "init['a']",
        ),
        (
            lambda: eqx.filter_cond(
                Quantity(jnp.array(True)), lambda: 1.0, lambda: 2.0
            ),
            "pred",
        ),
    ],
)
def test_functions_that_call_another_one_tell_it_too(call, path):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert f"`{path}` is a Quantity" in str(caught.value)


@pytest.mark.parametrize(
    "transform", [eqx.filter_jit, eqx.filter_vmap, eqx.filter_checkpoint]
)
def test_array_of_such_objects_is_told(transform):
    objects = np.array([Quantity(X), Quantity(X)], dtype=object)
    with pytest.raises(TypeError) as caught:
        transform(lambda m: m["a"])({"a": objects})
    assert "`m['a'][0]` is a Quantity" in str(caught.value)


def test_method_and_model_are_told():
    class Model(eqx.Module):
        scale: Quantity

        @eqx.filter_jit
        def step(self, x):
            return jnp.multiply(self.scale, x)

        def __call__(self, x):
            return jnp.multiply(self.scale, x)

    for call in (Model(Quantity(X)).step, eqx.filter_jit(lambda m, x: m(x))):
        args = (X,) if call.__name__ == "step" else (Model(Quantity(X)), X)
        with pytest.raises(ValueError, match=r"`(self|m)\.scale` is a Quantity"):
            call(*args)


def test_other_errors_stay_as_they_are():
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        eqx.filter_jit(lambda q: q * 2)(Quantity(X))
    with pytest.raises(ValueError, match="mine"):
        eqx.filter_jit(lambda q: fail())(Quantity(X))
    outside = Quantity(X)
    with pytest.raises(ValueError, match="Triggering __jax_array__"):
        eqx.filter_jit(lambda x: jnp.add(x, outside))(X)


def fail():
    raise ValueError("mine")


BUILTINS = [
    (max, (1, 2)),
    (min, (2, 1)),
    (getattr, (1, "real")),
    (functools.partial(max, 1), (2,)),
    (math.hypot, (3.0, 4.0)),
    (operator.itemgetter(0), ([X],)),
    (operator.add, (X, X)),
    (np.add, (np.ones(2), 1)),
]


@pytest.mark.parametrize(("fun", "args"), BUILTINS)
@pytest.mark.parametrize(
    "transform",
    [
        eqx.filter_jit,
        functools.partial(eqx.filter_jit, donate="all-except-first"),
        functools.partial(eqx.filter_jit, donate="all"),
        eqx.filter_checkpoint,
    ],
)
def test_callables_without_a_signature_are_transformed(transform, fun, args):
    args = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, args)
    try:
        expected = fun(*args)
        expected = jax.tree.map(
            lambda x: np.array(x) if eqx.is_array(x) else x, expected
        )
        out = transform(fun)(*args)
    except jax.errors.TracerArrayConversionError:
        return  # a function of NumPy
    assert eqx.tree_equal(out, expected)


@pytest.mark.parametrize("fun", [max, getattr, functools.partial(max, 1)])
def test_every_transformation_wraps_a_callable_without_a_signature(fun):
    for transform in (
        eqx.filter_vmap,
        eqx.filter_pmap,
        eqx.filter_grad,
        eqx.filter_jacrev,
        eqx.filter_custom_jvp,
        eqx.filter_custom_vjp,
        eqx.filter_make_jaxpr,
    ):
        transform(fun)
    with pytest.raises(TypeError, match="has no parameter `lengths`"):
        eqx.bucketed(fun, {})
    with pytest.raises(ValueError, match="donate"):
        eqx.filter_jit(fun, donate=("model",))


def test_traced_values_in_a_builtin_are_refused_by_jax():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        eqx.filter_jit(max)(jnp.asarray(1.0), jnp.asarray(2.0))


@pytest.mark.parametrize("cls", [dict, int, range, slice, type])
def test_class_without_a_signature_is_refused_with_the_fix(cls):
    fix = f"has no signature: pass `lambda *args: {cls.__name__}(*args)`."
    with pytest.raises(ValueError, match=re.escape(fix)):
        eqx.filter_jit(cls)
