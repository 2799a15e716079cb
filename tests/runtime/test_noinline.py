import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like import internal as eqxi

X = jnp.asarray([0.5, -1.5, 2.0])


class Counted:
    """A function that counts its traces."""

    def __init__(self, fn):
        self.fn = fn
        self.traces = 0

    def __call__(self, *args):
        self.traces += 1
        return self.fn(*args)


def plain(x, y):
    return jnp.sin(x) * y.sum(), x.astype("int32")


TRANSFORMED = {
    "jit": lambda f: f,
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "vmap of both": lambda f: (
        lambda x, y: jax.vmap(jax.vmap(f))(jnp.stack([x, y]), jnp.stack([y, x]))
    ),
    "jvp": lambda f: lambda x, y: jax.jvp(lambda x: f(x, y), (x,), (jnp.cos(x),)),
    "grad": lambda f: jax.grad(lambda x, y: (f(x, y)[0] ** 2).sum(), (0, 1)),
    "hessian": lambda f: jax.hessian(lambda x, y: (f(x, y)[0] ** 2).sum()),
    "grad of grad": lambda f: jax.grad(
        lambda x, y: jax.grad(lambda x: (f(x, y)[0] ** 2).sum())(x).sum()
    ),
    "vmap of grad": lambda f: jax.vmap(
        jax.grad(lambda x, y: (f(x, y)[0] ** 2).sum()), (0, None)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, y: (jax.vmap(f, (0, None))(x, y)[0] ** 2).sum()
    ),
    "jacrev": lambda f: jax.jacrev(lambda x, y: f(x, y)[0]),
    "scan": lambda f: (
        lambda x, y: jax.grad(
            lambda x: jax.lax.scan(lambda c, _: (f(c, y)[0], c), x, length=3)[0].sum()
        )(x)
    ),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_every_transformation_gives_what_the_function_gives(transform, wrap):
    ours, expected = (
        wrap(transform(f))(X, X + 1) for f in (eqxi.noinline(plain), plain)
    )
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_function_may_use_the_name_of_a_vmap(wrap):
    def weighted(x, y):
        return jax.lax.psum(x * y, "i") * jax.lax.axis_index("i")

    def loss(f):
        def of_batch(x):
            return (jax.vmap(f, (0, None), axis_name="i")(x, x) * x[:, None]).sum()

        return wrap(jax.value_and_grad(of_batch))(X)

    ours, expected = loss(eqxi.noinline(weighted)), loss(weighted)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-6)


def test_uses_with_the_same_shapes_share_their_compilation():
    fn = Counted(jnp.sin)

    @jax.jit
    def f(x):
        for _ in range(5):
            x = eqxi.noinline(fn)(x)
        return x

    jax.block_until_ready(f(X))
    assert fn.traces == 2
    jax.block_until_ready(jax.jit(lambda x: eqxi.noinline(fn)(x) + 1)(X))
    assert fn.traces == 2


def test_module_and_output_may_hold_anything():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    wrapped = eqxi.noinline(
        lambda model, x, name: {"y": model(x), "name": name, "z": None}
    )
    out = eqx.filter_jit(wrapped)(model, X, "first")
    np.testing.assert_allclose(out["y"], model(X), rtol=1e-6)
    assert out["name"] == "first" and out["z"] is None

    def loss(f):
        return lambda model: (f(model)(X) ** 2).sum()

    ours = eqx.filter_jit(eqx.filter_grad(loss(eqxi.noinline)))(model)
    expected = eqx.filter_grad(loss(lambda model: model))(model)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_call_without_tracers_calls_the_function():
    seen = []
    eqxi.noinline(lambda x: seen.append(x))(X)
    assert seen[0] is X


def test_large_arrays_pass():
    x = jnp.ones((1000, 1000))
    out = jax.jit(lambda x: eqxi.noinline(lambda x: x @ x)(x).sum())(x)
    assert out == 1e9


class TestAbstractFunction:
    def like(self, arrays, x):
        return x

    def test_functions_take_each_others_place_without_a_retrace(self):
        traces = []

        @eqx.filter_jit
        def apply(fn, x):
            traces.append(1)
            return jax.grad(lambda x: fn(x).sum())(x)

        like = Counted(lambda arrays, x: x)
        double, triple = (
            eqxi.noinline(f, like) for f in (lambda x: 2 * x, lambda x: 3 * x)
        )
        assert apply(double, X).tolist() == [2, 2, 2]
        assert apply(triple, X).tolist() == [3, 3, 3]
        assert len(traces) == 1 and double(X).tolist() == (2 * X).tolist()

    def test_one_function_wrapped_twice_is_equal_to_itself(self):
        like = lambda arrays, x: x  # noqa: E731
        sine, again, cosine = (
            eqxi.noinline(f, like) for f in (jnp.sin, jnp.sin, jnp.cos)
        )
        assert eqx.tree_equal(sine, again) and not eqx.tree_equal(sine, cosine)

    def test_it_gets_the_arrays_of_the_function(self):
        seen = []
        model = eqx.nn.Linear(3, 3, key=jax.random.key(0))

        def like(arrays, x):
            seen.append(arrays)
            return x

        wrapped = eqxi.noinline(model, like)
        out = jax.jit(lambda x: wrapped(x))(X)
        np.testing.assert_allclose(out, model(X), rtol=1e-6)
        assert seen[0].weight.shape == (3, 3)
        assert wrapped.__wrapped__ is like

    def test_result_of_another_shape_is_an_error(self):
        wrapped = eqxi.noinline(lambda x: x[:2], lambda arrays, x: x)
        with pytest.raises(Exception, match="shape"):
            jax.block_until_ready(jax.jit(wrapped)(X))

    def test_function_is_freed_with_what_wraps_it(self):
        def use(call):
            fn = Counted(lambda x: 2 * x)
            wrapped = eqxi.noinline(fn, abstract_fn=lambda arrays, x: x)
            assert call(wrapped).tolist() == [2, 4, 6]
            return weakref.ref(fn)

        fn = use(lambda wrapped: wrapped(jnp.arange(1, 4)))
        gc.collect()
        assert fn() is None
        for call in (
            lambda wrapped: jax.jit(lambda x: wrapped(x))(jnp.arange(1, 4)),
            lambda wrapped: jax.jit(lambda f, x: f(x))(wrapped, jnp.arange(1, 4)),
            lambda wrapped: eqx.filter_jit(lambda f, x: f(x))(
                wrapped, jnp.arange(1, 4)
            ),
        ):
            fn = use(call)
            eqx.clear_caches()
            jax.clear_caches()
            gc.collect()
            assert fn() is None

    def test_function_that_is_wrapped_within_a_program_lives_as_long(self):
        @jax.jit
        def shifted(x):
            for i in range(3):
                x = eqxi.noinline(lambda x, i=i: x + i, lambda arrays, x: x)(x)
            return x

        for _ in range(3):
            gc.collect()
            eqx.clear_caches()
            assert shifted(jnp.zeros(())) == 3

    def test_freed_function_of_a_running_program_is_an_error(self):
        wrapped = eqxi.noinline(lambda x: 2 * x, like := lambda arrays, x: x)
        number = jnp.asarray(wrapped._number)
        other = eqxi.noinline(lambda x: 3 * x, like)
        stale = eqx.tree_at(lambda w: w._number, other, number)
        del wrapped
        eqx.clear_caches()
        gc.collect()
        with pytest.raises(RuntimeError, match="keep what `noinline` returned"):
            stale(X)

    def test_functions_are_not_searched_one_by_one(self):
        compared = []

        class Function:
            def __hash__(self):
                return id(self)

            def __eq__(self, other):
                compared.append(1)
                return self is other

            def __call__(self, x):
                return x

        like = lambda arrays, x: x  # noqa: E731
        wrapped = [eqxi.noinline(Function(), like) for _ in range(100)]
        assert len({int(w._number) for w in wrapped}) == 100
        assert len(compared) < 100  # it was 10,000


def test_cleared_caches_free_the_function():
    def use():
        weights = jnp.ones(7)
        f = jax.jit(eqxi.noinline(lambda x: x * weights[0]))
        assert f(jnp.ones(())) == 1
        return weakref.ref(weights)

    weights = use()
    eqx.clear_caches()
    jax.clear_caches()
    gc.collect()
    assert weights() is None


def test_function_that_closes_over_a_tracer_is_refused():
    with pytest.raises(ValueError, match="closes over a tracer"):
        jax.jit(lambda x: eqxi.noinline(lambda y: x * y)(x))(X)


def test_function_without_a_hash_is_refused():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    for abstract_fn in (None, lambda arrays, x: x):
        with pytest.raises(TypeError, match="hash"):
            jax.jit(lambda x, a=abstract_fn: eqxi.noinline(Unhashable(), a)(x))(X)


def test_output_of_another_structure_than_announced_is_an_error():
    f = eqxi.noinline(lambda x: {"a": x}, abstract_fn=lambda arrays, x: {"b": x})
    with pytest.raises(
        RuntimeError, match=r"(?s)structure that its `abstract_fn`.*'b'"
    ):
        jax.block_until_ready(jax.jit(lambda x: f(x))(X))


def test_finalised_program_holds_the_function_itself():
    f = functools.partial(jax.vmap, in_axes=0)(eqxi.noinline(jnp.sin))
    names = [e.primitive.name for e in eqxi.finalise_make_jaxpr(f)(X).jaxpr.eqns]
    assert names == ["sin"]


SETTING = eqx.Context(1.0, name="setting")


def test_context_is_that_of_the_call():
    f = eqxi.noinline(lambda x: SETTING.value * jnp.sin(x))

    def loss(x):
        with SETTING(5.0):
            return f(x).sum()

    expected = 5 * jnp.cos(X)
    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert jnp.allclose(transformed(X), expected)
    assert jnp.allclose(jax.jit(loss)(X), loss(X))
    assert jnp.allclose(jax.jit(lambda x: f(x).sum())(X), jnp.sin(X).sum())
    assert jnp.allclose(jax.hessian(loss)(X), jnp.diag(-5 * jnp.sin(X)), atol=1e-6)


def test_derivatives_keep_no_tracer():
    f = eqxi.noinline(plain)
    with jax.checking_leaks():
        jax.grad(lambda x: f(x, X)[0].sum())(X)


IN_SHARD_MAP = {
    "value": lambda f: f,
    "gradient of what varies": lambda f: jax.grad(lambda x, y: f(x, y).sum()),
    "gradient of what does not": lambda f: (
        lambda x, y: x + jax.grad(lambda y: f(x, y).sum())(y)
    ),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, y: f(x, y).sum()), (0, None)),
    "tangents": lambda f: lambda x, y: sum(jax.jvp(lambda y: f(x, y), (y,), (y,))),
    "scan": lambda f: (
        lambda x, y: jax.lax.scan(lambda c, _: (f(c, y), None), x, length=3)[0]
    ),
}


@pytest.mark.parametrize("transform", IN_SHARD_MAP.values(), ids=IN_SHARD_MAP)
def test_outputs_in_a_shard_map_vary_as_those_of_the_function(transform):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    map_over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P()))

    def f(x, y):
        return jnp.sin(x) * y

    ours, expected = (
        jax.jit(map_over(transform(f), out_specs=P("d")))(jnp.stack([X, 2 * X]), X)
        for f in (eqxi.noinline(f), f)
    )
    assert jnp.allclose(ours, expected)
    # What varies is refused where one value for all devices is promised.
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(map_over(eqxi.noinline(f), out_specs=P()))(jnp.stack([X, 2 * X]), X)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_go_in_and_come_out(impl):
    def f(key, x):
        new, used = jax.random.split(key)
        return new, x * jax.random.normal(used, x.shape)

    def both(f):
        keys = jax.random.split(jax.random.key(0, impl=impl), 2)
        news, values = jax.jit(jax.vmap(f))(keys, jnp.stack([X, X]))
        gradient = jax.jit(jax.grad(lambda x: f(keys[0], x)[1].sum()))(X)
        return jax.random.key_data(news), values, gradient

    assert jax.tree.all(jax.tree.map(jnp.allclose, both(eqxi.noinline(f)), both(f)))


def test_types_are_those_of_the_current_settings():
    f = eqxi.noinline(lambda x: x.astype(float))
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            assert jax.eval_shape(f, X).dtype == ("float64" if enabled else "float32")
