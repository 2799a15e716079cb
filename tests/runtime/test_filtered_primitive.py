import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import equinox_like as eqx
from equinox_like import internal as eqxi

KEY = jax.random.key(0)


def make():
    """`(model(x), label)`, in which the model is a Linear, and only `x` differentiated."""
    prim = Primitive("apply")
    prim.multiple_results = True

    @eqxi.filter_primitive_def
    def impl(model, x, label):
        assert isinstance(label, str)
        return {"y": model.weight @ x, "label": label, "none": None}

    @eqxi.filter_primitive_def
    def abstract_eval(model, x, label):
        assert isinstance(x, jax.core.ShapedArray)
        y = jax.ShapeDtypeStruct((model.weight.shape[0],), x.dtype)
        return {"y": y, "label": label, "none": None}

    @eqxi.filter_primitive_jvp
    def jvp(primals, tangents):
        model, x, label = primals
        t_model, t_x, t_label = tangents
        assert t_label is None
        out = eqxi.filter_primitive_bind(prim, model, x, label)
        tangent = None
        if t_x is not None:
            tangent = eqxi.filter_primitive_bind(prim, model, t_x, label)["y"]
        if t_model.weight is not None:
            more = t_model.weight @ x
            tangent = more if tangent is None else tangent + more
        return out, {"y": tangent, "label": None, "none": None}

    @eqxi.filter_primitive_transpose(materialise_zeros=True)
    def transpose(inputs, cotangents):
        model, x, _ = inputs
        assert isinstance(x, ad.UndefinedPrimal) and cotangents["label"] is None
        return None, model.weight.T @ cotangents["y"], None

    @eqxi.filter_primitive_batching
    def batch(inputs, axes):
        model, x, label = inputs
        model_axes, x_axis, label_axis = axes
        assert model_axes.weight is None and label_axis is None
        y = jax.vmap(lambda x: model.weight @ x, x_axis)(x)
        out = {"y": y, "label": label, "none": None}
        return out, {"y": 0, "label": None, "none": None}

    prim.def_impl(impl)
    prim.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose
    batching.primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(impl, multiple_results=True))
    return prim


PRIM = make()
MODEL = eqx.nn.Linear(2, 3, use_bias=False, key=KEY)
X = jnp.asarray([1.0, -2.0])


def apply(model, x):
    return eqxi.filter_primitive_bind(PRIM, model, x, "name")


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_output_may_hold_anything(wrap):
    for x in (X, np.asarray(X)):
        out = wrap(apply)(MODEL, x)
        np.testing.assert_allclose(out["y"], MODEL(X), rtol=1e-6)
        assert out["label"] == "name" and out["none"] is None


def test_it_is_differentiated_with_none_for_symbolic_zeros():
    def ours(model, x):
        return (apply(model, x)["y"] ** 2).sum()

    def plain(model, x):
        return (model(x) ** 2).sum()

    gradients = [jax.jit(jax.grad(f, 1))(MODEL, X) for f in (ours, plain)]
    np.testing.assert_allclose(*gradients, rtol=1e-6)
    tangent = jax.tree.map(jnp.ones_like, MODEL)
    pushed = [
        jax.jvp(lambda m, f=f: f(m, X), (MODEL,), (tangent,))[1] for f in (ours, plain)
    ]
    np.testing.assert_allclose(*pushed, rtol=1e-6)


@pytest.mark.parametrize("materialise_zeros", [False, True])
def test_transposition_gets_none_or_zeros_for_symbolic_zeros(materialise_zeros):
    prim, seen = Primitive("twice"), []
    prim.multiple_results = True

    @eqxi.filter_primitive_def
    def impl(x):
        return x, 2 * x

    @eqxi.filter_primitive_transpose(materialise_zeros=materialise_zeros)
    def transpose(inputs, cotangents):
        seen.append(cotangents)
        return (2 * cotangents[1],)

    prim.def_impl(impl)
    prim.def_abstract_eval(eqxi.filter_primitive_def(lambda x: (x, x)))
    ad.primitive_transposes[prim] = transpose
    f = jax.linear_transpose(lambda x: eqxi.filter_primitive_bind(prim, x)[1], X)
    assert f(X)[0].tolist() == [2, -4]
    ((first, second),) = seen
    assert second is X
    assert first.tolist() == [0, 0] if materialise_zeros else first is None


def test_it_is_batched():
    xs = jnp.stack([X, 2 * X, 3 * X], axis=1)
    out = jax.vmap(lambda x: apply(MODEL, x)["y"], 1)(xs)
    np.testing.assert_allclose(out, jax.vmap(MODEL, 1)(xs), rtol=1e-6)
    grad = jax.grad(lambda xs: jax.vmap(lambda x: apply(MODEL, x)["y"], 1)(xs).sum())
    expected = jax.grad(lambda xs: jax.vmap(MODEL, 1)(xs).sum())(xs)
    np.testing.assert_allclose(grad(xs), expected, rtol=1e-6)


def test_jaxpr_among_the_arguments_is_visible_in_the_equation():
    prim = Primitive("run")
    prim.multiple_results = True

    @eqxi.filter_primitive_def
    def run(program, x):
        return jax.extend.core.jaxpr_as_fun(program)(x)

    prim.def_impl(run)
    prim.def_abstract_eval(eqxi.filter_primitive_def(lambda program, x: [x]))
    inner = jax.make_jaxpr(jnp.sin)(1.0)
    jaxpr = jax.make_jaxpr(lambda x: eqxi.filter_primitive_bind(prim, inner, x))(1.0)
    (equation,) = jaxpr.jaxpr.eqns
    assert any(
        inner is x
        for param in equation.params.values()
        if isinstance(param, tuple)
        for x in param
    )


def test_rules_that_disagree_are_refused_by_path():
    prim = Primitive("odd")
    prim.multiple_results = True
    prim.def_abstract_eval(eqxi.filter_primitive_def(lambda x: {"a": x, "b": 1}))
    other = eqxi.filter_primitive_def(lambda x: {"a": x, "b": True})
    prim.def_impl(other)
    jaxpr = jax.make_jaxpr(lambda x: eqxi.filter_primitive_bind(prim, x)["a"])(1.0)
    with pytest.raises(ValueError, match=r"out\['b'\]"):
        jax.extend.core.jaxpr_as_fun(jaxpr)(1.0)


def test_primitive_must_have_several_results():
    with pytest.raises(AssertionError):
        eqxi.filter_primitive_bind(Primitive("single"), X)
