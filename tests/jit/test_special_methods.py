"""`model.__call__`, as a function or an argument, is a pytree like `model.apply`."""

import functools
import pickle

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


class Plain:
    def __call__(self, x):
        return self.weight * x  # pyright: ignore[reportAttributeAccessIssue]


class Model(eqx.Module):
    weight: jax.Array

    def apply(self, x):
        return self.weight * x

    def __call__(self, x):
        return self.weight * x

    def __matmul__(self, x):
        return self.weight * x

    @property
    def called(self):
        return self.__call__


class Derived(Model):
    def __call__(self, x):
        return super().__call__(x)


class Mixed(Plain, eqx.Module):
    weight: jax.Array


class Jitted(eqx.Module):
    weight: jax.Array

    @jax.jit
    def __call__(self, x):
        return self.weight * x


X = jnp.ones(2)
METHODS = {
    "apply": lambda w: Model(w).apply,
    "call": lambda w: Model(w).__call__,
    "matmul": lambda w: Model(w).__matmul__,
    "property": lambda w: Model(w).called,
    "derived": lambda w: Derived(w).__call__,
    "mixed": lambda w: Mixed(w).__call__,
    "jitted": lambda w: Jitted(w).__call__,
    "partial": lambda w: eqx.Partial(Model(w).__call__),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("donate", ["none", "all-except-first"])
def test_method_of_a_new_model_runs_the_same_program(method, donate):
    traces = []

    @eqx.filter_jit(donate=donate)
    def run(f, x, others):
        traces.append(f)
        return f(x), others["f"](x)

    for i in range(4):
        f, g = METHODS[method](i * X), METHODS[method](2 * i * X)
        one, two = run(f, jnp.ones(2), {"f": g})
        assert one.tolist() == [i, i] and two.tolist() == [2 * i, 2 * i]
    assert len(traces) == 1
    f = METHODS[method](X)
    assert run.explain(f, X, {"f": f}) is None
    compiled = run.lower(f, X, {"f": f}).compile()
    three = METHODS[method](3 * X)
    assert compiled(three, X + 0, {"f": METHODS[method](3 * X)})[0].tolist() == [3, 3]


@pytest.mark.parametrize("method", METHODS)
def test_compiled_method_is_a_pytree_and_shares_its_program(method):
    traces = []

    class Counting(Model):
        def __call__(self, x):
            traces.append(x)
            return self.weight * x

    models = [Counting(i * X) for i in range(4)]  # programs live as long as one
    for i, model in enumerate(models):
        f = eqx.filter_jit(METHODS[method](i * X))
        assert f(X).tolist() == [i, i] and len(jax.tree.leaves(f)) == 1
        assert eqx.filter_jit(model.__call__)(X).tolist() == [i, i]
    assert len(traces) == 1


@pytest.mark.parametrize(
    "transform",
    [
        eqx.filter_vmap,
        eqx.filter_checkpoint,
        eqx.filter_jit,
        lambda f: eqx.filter_grad(lambda x: f(x).sum()),
        lambda f: lambda x: eqx.filter_jvp(f, (x,), (x,)),
        lambda f: eqx.filter_eval_shape(f, X) and f,
        lambda f: eqx.filter_closure_convert(f, X),
    ],
)
def test_transformations_take_special_methods_as_other_methods(transform):
    model = Model(2 * X)
    one, two = transform(model.__call__)(X), transform(model.apply)(X)
    assert eqx.tree_equal(one, two)


def test_calls_of_the_model_and_its_method_are_as_before():
    model = Model(X)
    assert model.__call__ == model.__call__
    assert model.__call__.__self__ is model
    f = eqx.filter_jit(model.__call__)
    assert f.__name__ == "__call__" and f.__wrapped__.__func__ is Model.__call__
    assert pickle.loads(pickle.dumps(f))(X).tolist() == [1, 1]


def test_partial_that_hides_arrays_is_told():
    run = eqx.filter_jit(lambda f, x: f(x))
    for make in (
        lambda i: functools.partial(Model(i * X).__call__),
        lambda i: functools.partial(Model(i * X).apply),
        lambda i: functools.partial(jnp.add, i * X),
    ):
        run(make(1), X)
        assert "Use `equinox_like.Partial`" in str(run.explain(make(2), X))


def test_model_may_hold_a_node_that_our_registry_does_not_know_yet():
    class Pair:
        def __init__(self, *children):
            self.children = children

    jax.tree_util.register_pytree_node(
        Pair, lambda pair: (pair.children, None), lambda _, children: Pair(*children)
    )

    class Summed(eqx.Module):
        pair: Pair

        def __call__(self, x):
            return sum(self.pair.children) * x

    f = eqx.filter_jit(lambda method, x: method(x))
    for scale in (1, 2):
        method = Summed(Pair(X, scale * X)).__call__
        assert f(method, X).tolist() == [1 + scale, 1 + scale]
