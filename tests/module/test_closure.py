"""`closure_to_pytree`: functions whose closure is made of leaves."""

import copy
import functools
import operator

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import equinox_like as eqx
from equinox_like.internal import closure_to_pytree


def optimiser(rate, momentum):
    def init(params):
        return jtu.tree_map(jnp.zeros_like, params)

    def update(gradient, state):
        def one(g, s):
            return momentum * s + g

        state = jtu.tree_map(one, gradient, state)
        return jtu.tree_map(lambda s: -rate * s, state), state

    return init, update


def nested(value):
    def inner():
        return value

    return lambda x: x + inner()


def test_values_of_closures_are_leaves_at_any_depth():
    rate, momentum = jnp.asarray(0.5), jnp.asarray(0.25)
    init, update = optimiser(rate, momentum)
    tree = closure_to_pytree((init, update))
    assert set(map(id, jtu.tree_leaves(tree))) == {id(rate), id(momentum)}
    state = tree[0](jnp.ones(2))
    out, state = tree[1](jnp.ones(2), state)
    assert out.tolist() == [-0.5, -0.5] and state.tolist() == [1, 1]

    f = closure_to_pytree(nested(jnp.asarray(2.0)))
    assert f(1.0) == 3
    doubled = jtu.tree_map(lambda x: 2 * x, f)
    assert doubled(1.0) == 5 and f(1.0) == 3
    assert eqx.filter_grad(lambda f: f(1.0))(f).cells[0].cells == (1.0,)


def test_what_is_not_a_python_function_stays():
    partial = functools.partial(optimiser, 1.0)
    tree = [len, partial, operator.add, jnp.tanh, "text", 1.0, None, str.upper]
    assert all(a is b for a, b in zip(closure_to_pytree(tree), tree, strict=True))


def test_function_without_a_closure_is_replaced():
    f = closure_to_pytree(optimiser)
    assert isinstance(f, eqx.Module) and jtu.tree_leaves(f) == []
    assert f(1.0, 2.0)[0](jnp.ones(())) == 0
    assert f.__name__ == "optimiser"


def test_defaults_are_kept_and_their_arrays_are_leaves():
    a, b = jnp.asarray(1.0), jnp.asarray(2.0)

    def f(x, y=a, *args, z=b, n=3):
        return x + y + z + n

    g = closure_to_pytree(f)
    assert [*map(float, jtu.tree_leaves(eqx.filter(g, eqx.is_array)))] == [1, 2]
    assert g(1.0) == f(1.0) == 7
    assert g(1.0, 5.0, z=0.0, n=0) == 6
    g = eqx.tree_at(lambda g: g.keyword_defaults["z"], g, jnp.asarray(10.0))
    assert g(1.0) == 15 and f(1.0) == 7


def traces_of(functions):
    count = 0

    @eqx.filter_jit
    def call(f, x):
        nonlocal count
        count += 1
        return f(x)

    out = [float(call(closure_to_pytree(f), jnp.asarray(1.0))) for f in functions]
    return count, out


def with_default(value):
    def f(x, factor=value):
        return factor * x

    return f


def test_function_that_is_made_again_compiles_nothing():
    functions = [nested(jnp.asarray(float(i))) for i in range(3)]
    assert traces_of(functions) == (1, [1, 2, 3])
    functions = [with_default(jnp.asarray(float(i))) for i in range(3)]
    assert traces_of(functions) == (1, [0, 1, 2])


def test_functions_that_differ_are_told_apart():
    # fmt: off
    pair = [lambda x: x + 1, lambda x: x + 2]
    # fmt: on
    assert traces_of(pair) == (2, [2, 3])
    # Python gives the lambdas of these texts the same name and line.
    texts = ["lambda x: x / 4", "lambda x: x // 4", "lambda x: x / 8"]
    assert traces_of(map(eval, texts)) == (3, [0.25, 0, 0.125])
    assert traces_of(map(with_default, (2, 3, 2.5))) == (3, [2, 3, 2.5])
    assert traces_of(map(nested, (1, 2))) == (2, [2, 3])


def test_functions_with_other_globals_are_told_apart():
    def make(factor):
        space = {"factor": factor}
        exec("def f(x): return factor * x", space)
        return space["f"]

    assert traces_of(map(make, (2, 3))) == (2, [2, 3])


def test_cycle_of_functions_is_an_error_that_names_them():
    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    with pytest.raises(ValueError, match=r"even` -> `.*odd` -> `.*even`"):
        closure_to_pytree(even)

    def f(n):
        return 0 if n == 0 else f(n - 1)

    with pytest.raises(ValueError, match=r"f` -> `.*f`"):
        closure_to_pytree(f)

    def boxed():
        return box

    box = [boxed]
    with pytest.raises(ValueError, match="refers to itself"):
        closure_to_pytree(boxed)


def test_name_that_is_not_assigned_yet_stays_so():
    def make():
        def f(x):
            return late + x

        tree = closure_to_pytree(f)
        late = 1.0
        return tree, f(late)

    f, out = make()
    assert out == 2
    with pytest.raises(NameError, match="late"):
        f(1.0)


def test_it_is_a_module_like_any_other():
    f = closure_to_pytree(nested(jnp.asarray(2.0)))
    g = copy.deepcopy(f)
    assert g == f and hash(f.code) == hash(g.code)
    assert "code of nested.<locals>.<lambda>" in repr(f)
    leaves, treedef = jtu.tree_flatten(f)
    assert treedef.unflatten(leaves)(1.0) == 3
    assert eqx.filter_jit(f)(1.0) == 3
