"""`assert_max_traces` and `get_num_traces`: one call more than allowed is refused."""

import copy
import gc
import operator
import pickle
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import equinox_like as eqx

assert_max_traces = eqx.debug.assert_max_traces
get_num_traces = eqx.debug.get_num_traces


def counted(max_traces):
    @eqx.filter_jit
    @assert_max_traces(max_traces=max_traces)
    def f(x, rate=0.1):
        return rate * x

    return f


def test_traces_are_counted_not_calls():
    f = counted(None)
    assert get_num_traces(f) == 0
    for _ in range(3):
        f(jnp.ones(2))
        f(jnp.ones(3))
    assert get_num_traces(f) == 2


def test_trace_too_many_is_refused_and_counted():
    f = counted(1)
    f(jnp.ones(2))
    for number in (2, 3):
        with pytest.raises(
            RuntimeError, match="`f` can only be traced 1 times"
        ) as info:
            f(jnp.ones(2), 0.2)
        assert "`rate` was left out, and is now given." in str(info.value)
        assert get_num_traces(f) == number


def test_shapes_are_told_too():
    f = counted(1)
    f(jnp.ones(2))
    with pytest.raises(
        RuntimeError, match=r"`x` was an array float32\[2\], and is now"
    ):
        f(jnp.ones(3))


def test_nothing_new_is_said_to_be_nothing_new():
    fn = assert_max_traces(lambda x: x, max_traces=1)
    jax.jit(lambda x: fn(x))(jnp.ones(2))
    with pytest.raises(RuntimeError, match="The arguments of this call do not differ"):
        jax.jit(lambda x: fn(x))(jnp.ones(2))


def test_none_may_be_allowed():
    with pytest.raises(RuntimeError, match="can only be traced 0 times"):
        counted(0)(jnp.ones(2))


def test_outside_of_jit_calls_are_counted():
    fn = assert_max_traces(lambda x, y=1: x + y, max_traces=2)
    assert fn(1) == 2 and fn(1, y=2) == 3
    with pytest.raises(RuntimeError, match="can only be traced 2 times"):
        fn(1)


def test_limit_is_a_required_keyword():
    with pytest.raises(TypeError, match="max_traces"):
        assert_max_traces(lambda x: x)


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, eqx.filter_vmap])
def test_counter_is_found_through_what_wraps_it(jit):
    f = jit(assert_max_traces(lambda x: x + 1, max_traces=5))
    f(jnp.ones(2))
    assert get_num_traces(f) == 1
    assert get_num_traces(eqx.filter_jit(f)) == 1


def test_without_a_counter_it_is_an_error():
    with pytest.raises(ValueError, match="does not count its traces"):
        get_num_traces(jax.jit(lambda x: x))


def test_copies_by_flattening_share_the_count_and_deep_copies_do_not():
    f = assert_max_traces(lambda x: x, max_traces=None)
    leaves, treedef = jtu.tree_flatten(f)
    other = treedef.unflatten(leaves)
    f(1)
    other(1)
    assert get_num_traces(f) == get_num_traces(other) == 2
    deep = copy.deepcopy(f)
    assert get_num_traces(deep) == 0
    deep(1)
    assert get_num_traces(f) == 2 and get_num_traces(deep) == 1


def test_unpickled_function_counts_its_own_traces():
    f = assert_max_traces(operator.neg, max_traces=1)
    f(1)
    for g in (f, eqx.filter_jit(f)):
        unpickled = pickle.loads(pickle.dumps(g))
        assert get_num_traces(unpickled) == 0
        assert unpickled(1) == -1 and get_num_traces(unpickled) == 1
        assert get_num_traces(f) == 1


def test_methods_and_modules_are_counted():
    class Model(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit
        @assert_max_traces(max_traces=1)
        def apply(self, x):
            return self.weight * x

        def __call__(self, x):
            return self.weight + x

    model = Model(jnp.ones(2))
    assert (model.apply(jnp.ones(2)) == 1).all()
    assert (model.apply(jnp.zeros(2)) == 0).all()
    assert get_num_traces(model.apply) == get_num_traces(Model.apply) == 1
    with pytest.raises(RuntimeError, match="`apply` can only be traced 1 times"):
        model.apply(1.0)

    f = eqx.filter_jit(assert_max_traces(model, max_traces=1))
    assert (f(jnp.ones(2)) == 2).all() and get_num_traces(f.__wrapped__) == 1
    gradient = eqx.filter_grad(lambda f, x: f(x).sum())(f, jnp.ones(2))
    assert (gradient.__wrapped__.__wrapped__.weight == 1).all()


def test_name_and_signature_are_kept():
    f = assert_max_traces(max_traces=1)(jnp.tanh)
    assert f.__name__ == "tanh"


def test_calls_hold_no_memory():
    f = assert_max_traces(lambda x: None, max_traces=9)
    x = jnp.ones(3)
    reference = weakref.ref(x)
    f(x)
    del x
    gc.collect()
    assert reference() is None
