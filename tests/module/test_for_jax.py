"""Methods, Partials and transformed functions as functions of JAX's own transformations.

A Module with arrays is data, and an error as such a function."""

import gc
import itertools
import math
import re
import threading
import weakref
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.extend.core import jaxpr_as_fun
from strategies import CONFUSABLE, CONTAINERS

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
    """The same function as a method, a Partial, and around each other."""
    return {
        "method": eqx.Partial(Cell.__call__, cell),
        "special method": cell.__call__,
        "bound": cell.grow,
        "Partial": eqx.Partial(lambda cell, x: cell(x), cell),
        "filter_jit": eqx.filter_jit(cell),
        "filter_checkpoint": eqx.filter_checkpoint(cell.__call__),
        "mixed": eqx.nn.mixed(cell, "params=f32,compute=f32,output=f32").grow,
        "nested": eqx.nn.Sequential([eqx.nn.Lambda(cell)]).__call__,
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
    called = jax.jit(lambda x: jax.pure_callback(cell.__call__, x, x))(X)
    assert np.allclose(called, expected)
    exported = jax.export.export(jax.jit(cell.__call__))(X)
    assert np.allclose(exported.call(X), expected)
    assert np.allclose(jax.pmap(cell.__call__)(X[None])[0], expected)


def test_solver_takes_a_method_and_differentiates_its_module():
    class Residual(eqx.Module):
        offset: jax.Array

        def __call__(self, x):
            return x + self.offset

    def solve(f):
        return jax.lax.custom_root(f, 0.0, lambda f, x: x - f(x), lambda g, y: y)

    residual = Residual(jnp.asarray(-2.0))
    assert solve(residual.__call__) == 2
    gradient = eqx.filter_grad(lambda residual: solve(residual.__call__))(residual)
    assert gradient.offset == -1


@pytest.mark.parametrize(
    "get",
    [lambda c: c.__call__, lambda c: c.grow, eqx.Partial, eqx.filter_vmap],
    ids=["special method", "method", "Partial", "filter_vmap"],
)
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


HASHED = {
    **{name: TRANSFORMATIONS[name] for name in ("jit", "checkpoint", "cond", "switch")},
    "jit in jit": TRANSFORMATIONS["jit in jit"],
    "scan": lambda f, x: jax.lax.scan(f, x, XS),
    "while_loop": lambda f, x: jax.lax.while_loop(lambda x: x.sum() > 0, f, x),
    "lower": lambda f, x: jax.jit(f).lower(x),
    "export": lambda f, x: jax.export.export(jax.jit(f))(x),
    "custom_root": lambda f, x: jax.lax.custom_root(f, x, lambda f, x: x, max),
    "hash": lambda f, x: hash(f),
    "key of a dictionary": lambda f, x: {f: x},
}
FIX = "pass `model.__call__`, or use `filter_jit`, or the filtered function of the same"


@pytest.mark.parametrize("name", HASHED)
def test_model_as_a_function_is_an_error_that_says_what_to_pass(name):
    message = "Its leaf `weight` is float32[2], and arrays have no hash. "
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        HASHED[name](make(), X)
    assert FIX in str(caught.value)


class Listed(eqx.Module):
    scales: Any = ()

    def __call__(self, x):
        return x


class Configuration(eqx.Module):
    rates: Any


def test_error_without_arrays_says_what_to_pass_too():
    for model in (Listed([1.0]), Listed(Listed([1.0])), Listed((Listed({}),))):
        with pytest.raises(TypeError, match=r"unhashable type: '\w+', in a ") as caught:
            jax.jit(model)(X)
        assert str(caught.value).count(FIX) == 1
    for data in (Configuration([1.0]), Configuration(jnp.ones(2))):
        with pytest.raises(TypeError, match="unhashable") as caught:
            hash(data)
        assert "__call__" not in str(caught.value)


def test_functions_that_transformations_return_have_a_hash():
    cell = make()
    _, pushforward = eqx.filter_linearize(cell, X)
    _, pullback = eqx.filter_vjp(cell, X)
    captured = eqx.capture(eqx.nn.Sequential([eqx.nn.Lambda(cell)]), "layers[0]")
    for f in (
        pushforward,
        pullback,
        eqx.filter_closure_convert(cell, X),
        captured,
    ):
        assert hash(f) == hash(jax.tree.map(lambda x: x, f))
        assert eqx.tree_equal(jax.jit(f)(X), f(X), rtol=1e-6)
        assert eqx.tree_equal(jax.checkpoint(f)(X), f(X), rtol=1e-6)


def test_functions_that_only_call_a_model_take_it():
    cell = make()
    expected = cell(X)
    assert jnp.allclose(jax.vmap(cell)(X[None])[0], expected)
    assert jnp.allclose(jax.jit(jax.vmap(cell))(X[None])[0], expected)
    assert jnp.allclose(jax.lax.map(cell, X[None])[0], expected)
    assert jax.grad(lambda x: cell(x).sum())(X).shape == X.shape
    assert jnp.allclose(jax.linearize(cell, X)[0], expected)
    assert jax.eval_shape(cell, X).shape == X.shape


def test_equality_and_hash():
    cell, same = make(), make()
    assert cell.grow == cell.grow and hash(cell.grow) == hash(cell.grow)
    assert cell.grow != cell.__call__ and cell.grow != cell.body
    assert cell.grow != same.grow
    for wrap in (eqx.Partial, eqx.filter_jit, eqx.filter_grad):
        one, other = wrap(cell), wrap(jax.tree.map(lambda x: x, cell))
        assert one == other and hash(one) == hash(other)
        assert (one == wrap(same)) is False
    assert eqx.filter_jit(max) != eqx.filter_vmap(max)
    assert eqx.filter_vmap(max) != eqx.filter_vmap(max, in_axes=1)
    nan = Cell(jnp.asarray(jnp.nan), [])
    assert nan == jax.tree.map(lambda x: x, nan)
    assert nan != Cell(jnp.asarray(jnp.nan), [])


def test_arrays_of_numpy_count_by_identity_and_its_scalars_by_value():
    array = np.ones(2)
    assert eqx.Partial(max, array) == eqx.Partial(max, array)
    assert eqx.Partial(max, array) != eqx.Partial(max, array.copy())
    one, same = eqx.Partial(max, np.float32(2)), eqx.Partial(max, np.float32(2))
    assert one == same and hash(one) == hash(same)
    assert one != eqx.Partial(max, np.float64(2)) and one != eqx.Partial(max, 2.0)


def test_order_of_keywords_and_dictionaries_counts():
    def weigh(x, table=None, **keywords):
        return sum(x * 10**i * v for i, v in enumerate((table or keywords).values()))

    for one, other in (
        (eqx.Partial(weigh, a=1, b=2), eqx.Partial(weigh, b=2, a=1)),
        (
            eqx.Partial(weigh, table={0: 1, 1: 2}),
            eqx.Partial(weigh, table={1: 2, 0: 1}),
        ),
    ):
        assert one != other
        assert jax.jit(one)(1.0) == 21 and jax.jit(other)(1.0) == 12


def computed(value, x):
    """Something that depends on the value and its type, at any depth, and so does its
    dtype."""
    code = zlib.crc32(f"{type(value)}{value!r}".encode()) % 2**20
    return x + code if code % 2 else (x + code).astype(jnp.int32)


class Holds(eqx.Module):
    leaf: Any
    array: Any = None
    static: Any = eqx.field(static=True, default=None)

    def __call__(self, x):
        return computed((self.leaf, self.static), x)

    method = __call__

    @eqx.filter_jit
    def compiled(self, x):
        return self.method(x)


# From a value and an array, which several callables share.
CALLABLES = {
    "Partial": lambda v, a: eqx.Partial(computed, v),
    "Partial with an array": lambda v, a: eqx.Partial(of_pair, (v, a)),
    "keyword": lambda v, a: eqx.Partial(of_keyword, value=v),
    "Partial of a method": lambda v, a: eqx.Partial(Holds(v, a).method),
    "method": lambda v, a: Holds(v, a).method,
    "method, static field": lambda v, a: Holds(0, a, v).method,
    "special method": lambda v, a: Holds(v, a).__call__,
    "compiled method": lambda v, a: Holds(v, a).compiled,
    "transformed model": lambda v, a: eqx.filter_checkpoint(Holds(v, a)),
    "transformed Partial": lambda v, a: eqx.filter_jit(eqx.Partial(computed, v)),
    "Module": lambda v, a: Holds(v),
    "Module, static field": lambda v, a: Holds(0, None, v),
}


# What `filter_jit` takes and keeps is tested in `tests/jit`.
NOT_COMPILED = [
    k for k in CALLABLES if k not in ("compiled method", "transformed Partial")
]


def of_pair(pair, x):
    return computed(pair[0], x)


def of_keyword(x, *, value):
    return computed(value, x)


# Each gives what the callable returns.
THROUGH = {
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: jax.lax.cond(True, f, f, x),
    "switch": lambda f, x: jax.lax.switch(jnp.asarray(1), [f, f], x),
    "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, jax.jit(f)(x)), 0, x[None])[1][
        0
    ],
    "fori_loop": lambda f, x: jax.lax.fori_loop(
        0, 1, lambda *_: jax.jit(f)(x), 0 * f(x)
    ),
    "jit of vmap": lambda f, x: jax.jit(jax.vmap(f))(x[None])[0],
    "vmap of jit": lambda f, x: jax.vmap(jax.jit(f))(x[None])[0],
    "derivative of jit": lambda f, x: jax.linearize(jax.jit(f), x)[0],
    "make_jaxpr": lambda f, x: jaxpr_as_fun(jax.make_jaxpr(f)(x))(x)[0],
    "export": lambda f, x: jax.export.export(jax.jit(f))(x).call(x),
    "custom_jvp": lambda f, x: with_rules(jax.custom_jvp(f), f)(x),
    "custom_vjp": lambda f, x: with_rules(jax.custom_vjp(f), f)(x),
    "pure_callback": lambda f, x: jax.jit(
        lambda x: jax.pure_callback(f, jax.eval_shape(f, x), x)
    )(x),
}


def with_rules(custom, f):
    if isinstance(custom, jax.custom_jvp):
        custom.defjvp(lambda primals, tangents: (f(*primals), f(*primals)))
    else:
        custom.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return jax.jit(custom)


ARRAY = jnp.ones(2)
WITH_A_HASH = "tuple", "frozenset", "namedtuple", "dataclass", "class of attrs"
WITHOUT = "list", "dict value", "dict key", "Module", "static field"


def check_apart(make, through, values):
    fs = [make(v, ARRAY) for v in values]
    x = jnp.arange(2.0)
    for f in (*fs, *fs):  # all of them stay alive
        expected, found = f(x), through(f, x)
        assert found.dtype == expected.dtype and (found == expected).all()


@pytest.mark.parametrize("kind", CALLABLES)
def test_confusable_values_share_no_program(kind):
    check_apart(CALLABLES[kind], THROUGH["jit"], [0.0, -0.0, 2, 2.0, np.float32(2)])
    check_apart(CALLABLES[kind], THROUGH["checkpoint"], [1, True, 1.0, math.nan])


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(NOT_COMPILED),
    st.sampled_from(list(THROUGH)),
    st.lists(st.sampled_from([*WITH_A_HASH, *WITHOUT]), max_size=3),
    st.sampled_from(CONFUSABLE),
    st.sampled_from(CONFUSABLE),
)
def test_callables_that_compute_something_else_share_no_program(
    kind, transformation, containers, one, other
):
    if kind.startswith("Module"):
        containers = [name for name in containers if name in WITH_A_HASH]
    elif "frozenset" in containers or "dict key" in containers:
        containers = containers[:1]

    def within(x):
        for name in containers:
            x = CONTAINERS[name](x)
        return x

    check_apart(CALLABLES[kind], THROUGH[transformation], [within(one), within(other)])


def test_equal_callables_share_a_program():
    traces = []

    def counted(value, x):
        traces.append(value)
        return x

    class Model(eqx.Module):
        weight: jax.Array
        rate: float

        def step(self, x):
            return counted(self.rate, x)

        __call__ = step
        compiled = eqx.filter_jit(step)

    model = Model(ARRAY, 0.1)
    for get in (
        lambda: model.step,
        lambda: model.__call__,
        lambda: model.compiled,
        lambda: eqx.filter_checkpoint(model),
        lambda: eqx.Partial(counted, (0.1, np.float32(2), [math.nan], {"a": ARRAY})),
        lambda: eqx.Partial(Model.step, jax.tree.map(lambda x: x, model)),
    ):
        traces.clear()
        same = get(), get(), get()
        for f in same:
            jax.jit(f)(X)
        assert len(traces) == 1
        assert same[0] == same[1] and hash(same[0]) == hash(same[1])


@pytest.mark.parametrize("kind", CALLABLES)
def test_no_comparison_depends_on_the_values_of_arrays(kind):
    def compare(array):
        fs = [CALLABLES[kind](v, array) for v in (2, 2.0, np.float32(2), 0.0, -0.0)]
        for one, other in itertools.product(fs, fs):
            assert (one == other) is (one is other)
        # The functions are constants, so that what they return is known here.
        return array.sum(), [jax.checkpoint(f)(X) for f in fs], [f(X) for f in fs]

    for transform in (jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))):
        _, found, expected = transform(compare)(ARRAY)
        assert eqx.tree_equal(found, expected)


def test_threads_get_the_program_of_their_own_callable():
    wrong = []

    def run(value):
        x = jnp.arange(2.0)
        for kind in ("Partial", "method", "compiled method", "Module"):
            for _ in range(3):
                f = CALLABLES[kind](value, ARRAY)
                expected, found = f(x), jax.jit(f)(x)
                if found.dtype != expected.dtype or (found != expected).any():
                    wrong.append((kind, value))

    values = 2, 2.0, np.float32(2), np.float64(2), 0.0, -0.0, False, True
    threads = [threading.Thread(target=run, args=(v,)) for v in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Leaf:
    """What a weak reference can refer to."""


@pytest.mark.parametrize("name", ["jit", "checkpoint", "cond", "scan", "make_jaxpr"])
@pytest.mark.parametrize("kind", NOT_COMPILED)
def test_nothing_is_kept_alive(kind, name):
    leaf = Leaf()
    f = CALLABLES[kind](leaf, ARRAY)
    kept = [weakref.ref(leaf), weakref.ref(f)]
    gc.collect()
    gc.disable()
    try:
        THROUGH[name](f, X)
        del f, leaf
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


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
