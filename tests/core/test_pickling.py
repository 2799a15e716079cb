import copy
import pickle
import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


@jax.custom_jvp
def double(x):
    return 2 * x


double.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))


@jax.custom_vjp
def triple(x):
    return 3 * x


triple.defvjp(lambda x: (3 * x, None), lambda _, grad: (4 * grad,))


@jax.jit
def jitted(x):
    return x


@eqx.filter_custom_jvp
def quadruple(x):
    return 4 * x


quadruple.def_jvp(lambda primals, tangents: (4 * primals[0], 5 * tangents[0]))


@eqx.filter_checkpoint
def checkpointed(x):
    return x


@eqx.filter_jit
def compiled(x):
    return x


class Holds(eqx.Module):
    value: object = eqx.field(static=True)
    x: object


def through_pickle(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize(
    "activation",
    [
        *(jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.negative, double, triple, jitted),
        *(quadruple, checkpointed, compiled),
    ],
)
def test_copies_keep_the_activation(key, activation, copied):
    mlp = eqx.nn.MLP(2, 2, 2, 1, activation=activation, key=key)
    copy_ = copied(mlp)
    assert copy_.activation is activation
    assert eqx.tree_equal(copy_, mlp)
    call = eqx.filter_jit(eqx.debug.assert_max_traces(lambda m, x: m(x), max_traces=1))
    assert eqx.tree_equal(call(mlp, jnp.ones(2)), call(copy_, jnp.ones(2)))


def test_function_without_a_global_name_is_copied_by_jax():
    @jax.custom_jvp
    def local(x):
        return 2 * x

    local.defjvp(lambda primals, tangents: (2 * primals[0], 5 * tangents[0]))
    copied = copy.deepcopy(local)
    assert copied is not local
    assert jax.grad(copied)(1.0) == 5
    with pytest.raises(Exception, match="local"):
        pickle.dumps(local)


@pytest.mark.parametrize(
    "transform",
    [eqx.filter_custom_jvp, eqx.filter_custom_vjp, eqx.filter_custom_vmap],
)
def test_deep_copy_of_a_local_function_with_rules_has_the_same_structure(transform):
    model = eqx.nn.Lambda(transform(lambda x: x))
    copied = copy.deepcopy(model)
    assert jax.tree.structure(copied) == jax.tree.structure(model)


def test_copies_of_an_average_keep_compiled_functions(key):
    model = eqx.nn.MLP(2, 2, 2, 1, activation=compiled, key=key)
    average = eqx.nn.EMA(model, 0.9)
    for copied in copy.deepcopy(average), pickle.loads(pickle.dumps(average)):
        assert jax.tree.structure(copied) == jax.tree.structure(average)
        assert eqx.tree_equal(copied.update(model).model(), average.model())


def test_cloudpickle_sends_what_a_script_defines():
    code = """
import cloudpickle, sys, jax

@jax.custom_jvp
def double(x):
    return 2 * x

double.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))
import equinox_like
sys.stdout.buffer.write(cloudpickle.dumps((double, jax.nn.relu)))
"""
    sent = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True
    ).stdout
    received, relu = pickle.loads(sent)
    assert jax.grad(received)(1.0) == 3
    assert relu is jax.nn.relu


@pytest.mark.parametrize("value", [through_pickle, [through_pickle], {"a": len}])
def test_structure_with_a_static_function_can_be_pickled(value):
    structure = jax.tree.structure(Holds(value, 1))
    assert through_pickle(structure) == structure
    assert through_pickle(structure).unflatten([2]) == Holds(value, 2)


def test_cloudpickle_sends_a_structure_with_a_dtype_of_bfloat16(key):
    # cloudpickle cannot send the class of such a dtype.
    mixed = eqx.nn.mixed(eqx.nn.Linear(2, 2, key=key), "compute=bf16")
    for sent in eqx.nn.EMA(mixed, 0.9), jax.tree.structure(mixed):
        assert pickle.loads(cloudpickle.dumps(sent)) == sent
