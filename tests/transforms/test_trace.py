"""filter_eval_shape, filter_make_jaxpr and the cached form of the first."""

import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from nests import Scale
from strategies import same, trees

import equinox_like as eqx
from equinox_like._transforms import trace
from equinox_like._transforms.trace import cached_filter_eval_shape


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@settings(max_examples=30)
@given(trees())
def test_shapes_are_those_of_the_value(tree):
    def f(tree):
        return jtu.tree_map(lambda x: jnp.stack([x, x]) if eqx.is_array(x) else x, tree)

    shapes, value = eqx.filter_eval_shape(f, tree), f(tree)
    expected = jtu.tree_map(lambda x: struct(x) if eqx.is_array(x) else x, value)
    assert jtu.tree_structure(shapes) == jtu.tree_structure(expected)
    for a, b in zip(jtu.tree_leaves(shapes), jtu.tree_leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) if eqx.is_array(b) else True
        assert same(a, b) or hasattr(b, "shape")
    _, arrays, static = eqx.filter_make_jaxpr(f)(tree)
    again = eqx.combine(arrays, static)
    assert jtu.tree_structure(again) == jtu.tree_structure(shapes)


def test_nothing_runs_and_python_numbers_are_concrete():
    def f(x, n):
        assert isinstance(x, jax.core.Tracer) and n == 3
        return x * n, n, jax.ShapeDtypeStruct((7,), jnp.int8)

    x = jax.ShapeDtypeStruct((10**9, 10**9), jnp.float32)
    out = eqx.filter_eval_shape(f, x, 3)
    assert out == (x, 3, jax.ShapeDtypeStruct((7,), jnp.int8))


def test_weak_types_are_kept():
    weak, strong = jnp.asarray(1.0), jnp.ones(())
    out = eqx.filter_eval_shape(lambda x, y: (x, y, 2 * x, x * y), weak, strong)
    assert [x.weak_type for x in out] == [True, False, True, False]
    again = eqx.filter_eval_shape(lambda x: x, out[0])
    assert again.weak_type


def test_the_context_counts():
    assert eqx.filter_eval_shape(lambda: jnp.ones(())).dtype == jnp.float32
    with jax.enable_x64(True):
        assert eqx.filter_eval_shape(lambda: jnp.ones(())).dtype == jnp.float64


def test_keyword_may_be_named_fun():
    out = eqx.filter_eval_shape(lambda *, fun: fun, fun=jnp.ones(2))
    assert out.shape == (2,)


def test_callable_pytrees_and_keys_are_abstract_too():
    out = eqx.filter_eval_shape(Scale(struct(jnp.ones(2))), jnp.ones(2))
    assert out.shape == (2,)
    skeleton = eqx.filter_eval_shape(eqx.nn.Linear, 2, 3, key=jax.random.key(0))
    assert isinstance(skeleton, eqx.nn.Linear) and skeleton.weight.shape == (3, 2)
    key = eqx.filter_eval_shape(jax.random.split, jax.random.key(0))
    assert key.shape == (2,)


def test_jaxpr_takes_arrays_in_order_and_holds_what_is_closed_over():
    y = jnp.arange(2.0)

    def f(tree, n, *, last):
        return {"out": tree["x"] * n + y * last + y, "n": n, "last": last}

    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    make = eqx.filter_make_jaxpr(f)
    jaxpr, arrays, static = make({"x": x}, 3, last=jnp.asarray(2.0))
    assert [v.aval.shape for v in jaxpr.jaxpr.invars] == [(2,), ()]
    assert len(jaxpr.consts) == 1 and jaxpr.consts[0] is y
    assert static == {"out": None, "n": 3, "last": None}
    assert arrays["n"] is None and arrays["out"].shape == (2,)
    assert (
        make.__name__ == "f" and list(inspect.signature(make).parameters)[-1] == "last"
    )
    jaxpr, _, _ = eqx.filter_make_jaxpr(Scale(y))(x)
    assert jaxpr.consts[0] is y


def test_jaxpr_agrees_with_jax_on_plain_arrays():
    def f(x, y):
        return jnp.sin(x) @ y

    args = jnp.ones((2, 3)), jnp.ones(3)
    ours, shape, static = eqx.filter_make_jaxpr(f)(*args)
    theirs = jax.make_jaxpr(f)(*args)
    assert str(ours) == str(theirs) and shape.shape == (2,) and static is None


def test_struct_that_is_returned_is_static():
    returned = jax.ShapeDtypeStruct((1,), jnp.int8)
    _, arrays, static = eqx.filter_make_jaxpr(lambda x: (x, returned))(jnp.ones(2))
    assert arrays[1] is None and static == (None, returned)


@pytest.fixture
def cached():
    eqx.clear_caches()
    yield cached_filter_eval_shape
    eqx.clear_caches()


def test_cache_is_hit_for_equal_shapes_and_strictly_equal_statics(cached):
    traces = []

    def f(x, n):
        traces.append(n)
        return x * n, n

    x = jnp.ones(2)
    for _ in range(2):
        assert cached(f, x, 1)[1] == 1
        assert cached(f, 0 * x, 1)[0].shape == (2,)
        assert cached(f, np.ones(2, np.float32), 1)[0].dtype == jnp.float32
        assert cached(f, np.ones(2), 1)[0].dtype == jnp.float32  # without a warning
    assert traces == [1]
    assert type(cached(f, x, 1.0)[1]) is float
    assert cached(f, x, True)[1] is True
    assert cached(f, jnp.ones(3), 1)[0].shape == (3,)
    assert traces == [1, 1.0, True, 1]
    eqx.clear_caches()
    traces.clear()
    cached(f, x, 1)
    assert traces == [1]


def test_number_of_functions_that_the_cache_keeps_is_bounded(cached, monkeypatch):
    small = functools.lru_cache(2)(trace._jitted.__wrapped__)
    monkeypatch.setattr(trace, "_jitted", small)
    functions = []
    for _ in range(5):
        f = lambda x: x + 1  # noqa: E731
        cached(f, jnp.ones(2))
        functions.append(weakref.ref(f))
    del f
    gc.collect()
    assert [function() is None for function in functions] == [True] * 3 + [False] * 2


def test_cache_knows_the_context(cached):
    def f():
        return jnp.asarray(1.0) * jnp.ones(())

    assert cached(f).dtype == jnp.float32
    with jax.enable_x64(True):
        assert cached(f).dtype == jnp.float64
    assert cached(f).dtype == jnp.float32


def test_statics_of_the_cache_must_be_hashable(cached):
    with pytest.raises(TypeError, match=r"set.*cannot be hashed"):
        cached(lambda x: x, {1, 2})


@pytest.mark.parametrize("name", ["eval_empty", "eval_zero"])
def test_output_is_made_of_arrays_of_the_right_types(name):
    def f(x, key):
        raise_if_computed(x)
        return {"x": x.sum(0), "key": key, "text": "text", "n": None, "mask": x > 0}

    def raise_if_computed(x):
        assert isinstance(x, jax.core.Tracer)

    key = jax.random.key(0)
    out = getattr(eqx.internal, name)(f, jnp.ones((2, 3)), key)
    assert out["x"].shape == (3,) and out["x"].dtype == jnp.float32
    assert out["mask"].shape == (2, 3) and out["mask"].dtype == bool
    assert out["key"].dtype == key.dtype and out["text"] == "text" and out["n"] is None
    if name == "eval_zero":
        assert not out["x"].any() and not out["mask"].any()


def test_filter_eval_shape_keeps_no_static_value_of_its_output_alive():
    class Token:
        pass

    token = Token()
    eqx.filter_eval_shape(lambda x: (x, token), jnp.ones(3))
    watched = weakref.ref(token)
    del token
    gc.collect()
    assert watched() is None
