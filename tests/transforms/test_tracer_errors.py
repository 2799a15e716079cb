"""Errors about a Python `if` on an array name the user's function and argument."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import equinox_like as eqx

ON = {"w": jnp.ones(4), "name": "static"}
ROW = {"w": jnp.ones((1, 4)), "name": "static"}


def broken(model):
    if model["w"].sum() > 0:
        return model
    return model


def broken_step(model, row):
    return broken(model), row


def broken_body(i, model):
    return broken(model)


def ends(model):
    if model["w"].sum() > 0:
        return model["w"].sum() > 1
    return True


def same(model):
    return model


MESH = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
CALLS = {
    "jit": (broken, lambda: eqx.filter_jit(broken)(ON)),
    "checkpoint": (broken, lambda: eqx.filter_checkpoint(broken)(ON)),
    "eval_shape": (broken, lambda: eqx.filter_eval_shape(broken, ON)),
    "make_jaxpr": (broken, lambda: eqx.filter_make_jaxpr(broken)(ON)),
    "shard_map": (
        broken,
        lambda: eqx.filter_shard_map(
            broken, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec()
        )(ON),
    ),
    "pmap": (broken, lambda: eqx.filter_pmap(broken)(ROW)),
    "cond": (broken, lambda: eqx.filter_cond(jnp.asarray(True), same, broken, ON)),
    "switch": (broken, lambda: eqx.filter_switch(jnp.asarray(0), [same, broken], ON)),
    "scan": (broken_step, lambda: eqx.filter_scan(broken_step, ON, jnp.ones(2))),
    "fori": (broken_body, lambda: eqx.filter_fori_loop(0, 2, broken_body, ON)),
    "while": (broken, lambda: eqx.filter_while_loop(lambda _: True, broken, ON)),
    "limit": (ends, lambda: eqx.filter_while_loop(ends, broken, ON, max_steps=2)),
    "condition": (ends, lambda: eqx.filter_while_loop(ends, same, ON)),
}


@pytest.mark.parametrize("name", CALLS)
def test_function_and_argument_are_named(name):
    fun, call = CALLS[name]
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        call()
    message = str(caught.value)
    assert f"function {fun.__name__} at {__file__}:{fun.__code__.co_firstlineno}" in (
        message
    )
    assert "the argument model['w']." in message
