"""Modules, methods and Partials as functions of JAX's own transformations."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import equinox_like as eqx


class Cell(eqx.Module):
    weight: jax.Array
    scales: list

    def __call__(self, x):
        return jnp.tanh(self.weight * x) * self.scales[0]

    def step(self, carry, x):
        return self(carry) + x, carry

    def body(self, i, x):
        return self(x)

    def is_small(self, x):
        return jnp.sum(x) < 4 * jnp.sum(jnp.abs(self.weight))

    def grow(self, x):
        return x + jnp.abs(self.weight) + 1

    def join(self, a, b):
        return a + b


def make(weight=1.5, scale=0.5):
    return Cell(jnp.full(2, weight), [jnp.asarray(scale)])


def forms(cell):
    """The same function as a Module, a method, a Partial, and around each other."""
    return {
        "Module": cell,
        "method": eqx.Partial(Cell.__call__, cell),
        "special method": cell.__call__,
        "bound": cell.grow,
        "Partial": eqx.Partial(lambda cell, x: cell(x), cell),
        "filter_jit": eqx.filter_jit(cell),
        "nested": eqx.nn.Sequential([eqx.nn.Lambda(cell)]),
    }


X = jnp.asarray([0.3, -0.7])
XS = jnp.stack([X, 2 * X, -X])
KINDS = list(forms(make()))

TRANSFORMATIONS = {
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: jax.lax.cond(x.sum() > 0, f, jnp.negative, x),
    "switch": lambda f, x: jax.lax.switch(0, [f, f], x),
    "map": lambda f, x: jax.lax.map(f, x[None])[0],
    "vmap": lambda f, x: jax.vmap(f)(x[None])[0],
    "jit of vmap": lambda f, x: jax.jit(jax.vmap(f))(x[None])[0],
    "checkpoint of jit": lambda f, x: jax.checkpoint(jax.jit(f))(x),
    "jit in jit": lambda f, x: jax.jit(lambda x: jax.jit(f)(x))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[0],
}

# Those that call the function, whatever the values are.
SAME = [name for name in TRANSFORMATIONS if name != "cond"]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_are_those_of_a_plain_function(kind, name):
    transformed = TRANSFORMATIONS[name]

    def through(cell, x):
        return transformed(forms(cell)[kind], x).sum()

    def plain(cell, x):
        f = forms(cell)[kind]
        return transformed(lambda x: f(x), x).sum()

    grad = eqx.filter_value_and_grad(lambda args, f: f(*args))
    value, grads = grad((make(), X), through)
    expected, expected_grads = grad((make(), X), plain)
    assert value == expected
    assert eqx.tree_equal(grads, expected_grads)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_methods_are_bodies_of_loops(is_jitted):
    def run(cell, x):
        carry, ys = jax.lax.scan(cell.step, x, XS)
        carry = jax.lax.fori_loop(0, 3, cell.body, carry)
        total = jax.lax.associative_scan(cell.join, XS)
        return carry.sum() + ys.sum() + total.sum()

    def plain(cell, x):
        carry, ys = jax.lax.scan(lambda c, x: cell.step(c, x), x, XS)
        carry = jax.lax.fori_loop(0, 3, lambda i, c: cell.body(i, c), carry)
        total = jax.lax.associative_scan(lambda a, b: cell.join(a, b), XS)
        return carry.sum() + ys.sum() + total.sum()

    wrap = eqx.filter_jit if is_jitted else lambda f: f
    values = [wrap(eqx.filter_value_and_grad(f))(make(), X) for f in (run, plain)]
    assert eqx.tree_equal(*values)
    mapped = [
        eqx.filter_vmap(eqx.filter_grad(f), in_axes=(None, 0))(make(), XS)
        for f in (run, plain)
    ]
    assert eqx.tree_equal(*mapped)


def test_while_loop_callback_export_and_pmap():
    cell = make()
    expected = cell(X)
    grown = jax.lax.while_loop(cell.is_small, cell.grow, jnp.zeros(2))
    assert grown.tolist() == [7.5, 7.5]
    called = jax.jit(lambda x: jax.pure_callback(cell, x, x))(X)
    assert np.allclose(called, expected)
    exported = jax.export.export(jax.jit(cell))(X)
    assert np.allclose(exported.call(X), expected)
    assert np.allclose(jax.pmap(cell)(X[None])[0], expected)


def test_solver_takes_a_module_and_differentiates_it():
    class Residual(eqx.Module):
        offset: jax.Array

        def __call__(self, x):
            return x + self.offset

    def solve(f):
        return jax.lax.custom_root(f, 0.0, lambda f, x: x - f(x), lambda g, y: y)

    residual = Residual(jnp.asarray(-2.0))
    assert solve(residual) == 2
    assert eqx.filter_grad(solve)(residual).offset == -1


@pytest.mark.parametrize("get", [lambda c: c, lambda c: c.grow, eqx.Partial])
def test_one_trace_for_the_same_arrays_and_all_is_freed(get):
    traces = []

    class Counted(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            traces.append(self)
            return self.weight * x

        grow = __call__

    model = Counted(jnp.ones(2))
    held_by_the_user = [get(model) for _ in range(3)]
    for f in held_by_the_user:
        jax.jit(f)(X)
    assert len(traces) == 1
    jax.jit(get(jax.tree.map(jnp.copy, model)))(X)
    assert len(traces) == 2
    held = weakref.ref(model)
    gone = weakref.ref(model.weight)
    traces.clear()
    gc.collect()
    del model, held_by_the_user, f
    gc.collect()
    assert held() is None and gone() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda run, model: run(model, X),
        lambda run, model: run(x=X, model=model),
        lambda run, model: run.lower(model, X),
        lambda run, model: run.lower(x=X, model=model),
        lambda run, model: run.trace(model, X),
        lambda run, model: run.eval_shape(model, X),
        lambda run, model: jax.jit(lambda x: run(model, x))(X),
        lambda run, model: jax.vmap(lambda x: run(model, x))(X),
        lambda run, model: jax.grad(lambda x: run(model, x).sum())(X),
    ],
    ids="call keyword lower lower-keyword trace shape in-jit in-vmap in-grad".split(),
)
def test_model_as_a_static_argument_is_an_error(call):
    run = jax.jit(lambda model, x: model(x), static_argnames="model")
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        call(run, make())


def test_hash_of_a_model_is_an_error():
    message = "Its leaf `weight` is float32[2], and arrays have no hash"
    with pytest.raises(TypeError, match=re.escape(message)):
        {make(): 1}


def test_equality_and_hash():
    cell = make()
    assert cell.grow == cell.grow and hash(cell.grow) == hash(cell.grow)
    assert cell.grow != cell.__call__ and cell.grow != make(2.0).grow
    same = make()
    assert cell.grow == same.grow and hash(cell.grow) != hash(same.grow)
    assert eqx.Partial(max, 1) == eqx.Partial(max, 1.0)
    assert hash(eqx.Partial(max, 1)) == hash(eqx.Partial(max, 1.0))
    nan = Cell(jnp.asarray(jnp.nan), [])
    assert nan == jax.tree.map(lambda x: x, nan)
    assert nan != Cell(jnp.asarray(jnp.nan), [])


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(SAME), min_size=1, max_size=3),
    st.sampled_from(KINDS),
    st.booleans(),
)
def test_transformations_in_each_other(names, kind, is_mapped):
    def chain(f):
        for name in names:
            f = lambda x, f=f, g=TRANSFORMATIONS[name]: g(f, x)  # noqa: E731
        return f

    def through(cell, x):
        return chain(forms(cell)[kind])(x).sum()

    def plain(cell, x):
        return forms(cell)[kind](x).sum()

    def run(f):
        grad = eqx.filter_grad(lambda cell: f(cell, X))
        if is_mapped:
            return eqx.filter_vmap(grad)(jax.tree.map(lambda w: w[None], make()))
        return grad(make())

    assert eqx.tree_equal(run(through), run(plain), rtol=1e-5, atol=1e-6)
