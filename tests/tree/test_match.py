"""Prefix trees that do not fit: each option names itself, the tree and the path."""

import io
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx

X = jnp.ones((2, 2))
DEVICE = jax.devices()[0]


def save(tree, spec):
    eqx.tree_serialise_leaves(io.BytesIO(), tree, spec)


def shard_map(in_specs, *args):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    eqx.filter_shard_map(lambda x: None, mesh=mesh, in_specs=in_specs, out_specs=None)(
        *args
    )


def axes(in_axes, *args, out=0, **kwargs):
    eqx.filter_vmap(lambda x, *_, **__: (x, [x]), in_axes=in_axes, out_axes=out)(
        *args, **kwargs
    )


def jit(*args, **shardings):
    eqx.filter_jit(lambda x: [x], **shardings)(*args)


A, B = {"a": X}, {"b": X}
KEYS = "a dict with the keys"


@pytest.mark.parametrize(
    ("call", "names", "paths"),
    [
        (
            lambda: axes((None, {"a": 0}), A, B),
            "`in_axes` must be a prefix of `args`",
            f"`in_axes[1]` is {KEYS} ['a'], but `args[1]` is {KEYS} ['b'].",
        ),
        (
            lambda: axes({"y": {"a": 0}}, A, y=B),
            "`in_axes['y']` must be a prefix of `y`",
            f"`in_axes['y']` is {KEYS} ['a'], but `y` is {KEYS} ['b'].",
        ),
        (
            lambda: axes(0, X, out=(None, (0,))),
            "`out_axes` must be a prefix of `out`",
            "`out_axes[1]` is a tuple of length 1, but `out[1]` is a list of length 1.",
        ),
        (
            lambda: jit(B, in_shardings=({"a": P()},)),
            "`in_shardings` must be a prefix of `x`",
            f"`in_shardings` is {KEYS} ['a'], but `x` is {KEYS} ['b'].",
        ),
        (
            lambda: jit(X, out_shardings=[[None]]),
            "`out_shardings` must be a prefix of `out`",
            "`out_shardings[0]` is a list of length 1, but `out[0]` is float32[2,2].",
        ),
        (
            lambda: shard_map({"x": {"a": P()}}, B),
            "`in_specs['x']` must be a prefix of `x`",
            f"`in_specs['x']` is {KEYS} ['a'], but `x` is {KEYS} ['b'].",
        ),
        (
            lambda: eqx.filter_shard([None, B], [None, {"a": DEVICE}]),
            "`device_or_shardings` must be a prefix of `x`",
            f"`device_or_shardings[1]` is {KEYS} ['a'], but `x[1]` is {KEYS} ['b'].",
        ),
        (
            lambda: eqx.partition([1, {"a": 2}], [True, {"a": [True]}]),
            "`filter_spec` must be a prefix of `pytree`",
            "`filter_spec[1]['a']` is a list of length 1, but `pytree[1]['a']` is an int.",
        ),
        (
            lambda: save([1, (2,)], [len, [len]]),
            "`filter_spec` must be a prefix of `pytree`",
            "`filter_spec[1]` is a list of length 1, but `pytree[1]` is a tuple of",
        ),
        (
            lambda: eqx.combine([None, [None]], [1, [2, 3]]),
            "`pytrees[0]` must be a prefix of `pytrees[1]`",
            "`pytrees[0][1]` is a list of length 1, but `pytrees[1][1]` is a list of",
        ),
        (
            lambda: eqx.apply_updates([{}, [1]], [None, (1,)]),
            "`updates` must be a prefix of `model`",
            "`updates[1]` is a tuple of length 1, but `model[1]` is a list of length 1.",
        ),
        (
            lambda: eqx.tree_at([True, (False,)], [1, [2]], [0]),
            "`where` must be a prefix of `pytree`",
            "`where[1]` is a tuple of length 1, but `pytree[1]` is a list of length 1.",
        ),
    ],
)
def test_prefix_that_does_not_fit_is_refused_by_names_and_paths(call, names, paths):
    with pytest.raises(ValueError, match=re.escape(paths)) as info:
        call()
    assert str(info.value).startswith(f"{names}")


def test_nodes_that_differ_in_their_structure_alone_are_told_by_jax():
    spec = eqx.tree_at("weight", eqx.nn.Linear(3, 2, key=jax.random.key(0)), True)
    with pytest.raises(
        ValueError, match=r"`filter_spec` must be a prefix of `pytree`.*in_features=3"
    ):
        eqx.partition(eqx.nn.Linear(2, 2, key=jax.random.key(0)), spec)


def test_a_prefix_is_compared_with_a_tree_of_deleted_arrays():
    deleted = jnp.ones(2)
    deleted.delete()
    with pytest.raises(ValueError, match="`device` is a tuple of length 1, but `tree`"):
        eqx.filter_device_put((deleted, X), (DEVICE,))
