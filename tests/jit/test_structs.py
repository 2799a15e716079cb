"""A `jax.ShapeDtypeStruct` stands for an array in a stage, and is a value in a call."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


class Pair(eqx.Module):
    weight: Any
    shape: Any


STRUCT = jax.ShapeDtypeStruct((3,), jnp.float32)
OTHER = jax.ShapeDtypeStruct((4,), jnp.float32)


def fun(pair):
    return pair.weight * 2, pair.shape, jnp.zeros(pair.shape.shape)


def pair(weight=None):
    return Pair(jnp.ones(2) if weight is None else weight, STRUCT)


@pytest.mark.parametrize("donate", ["none", "all", ("pair",)])
@pytest.mark.parametrize(
    "compiled",
    [
        lambda f: f.lower(pair()).compile(),
        lambda f: f.trace(pair()).lower().compile(),
        lambda f: f.lower(
            Pair(jax.ShapeDtypeStruct((2,), jnp.float32), STRUCT)
        ).compile(),
    ],
)
def test_stage_takes_arrays_in_place_of_structs(compiled, donate):
    compiled = compiled(eqx.filter_jit(fun, donate=donate))
    for _ in range(2):
        argument = Pair(jnp.ones(2), jnp.ones(3))
        assert eqx.tree_equal(compiled(argument), fun(Pair(jnp.ones(2), jnp.ones(3))))
        fix = r"`pair\.shape` was an array, and is now ShapeDtypeStruct.*Compile again"
        with pytest.raises(TypeError, match=fix):
            compiled(pair())


@pytest.mark.parametrize(
    "argument",
    [
        Pair(jnp.ones(2), OTHER),
        Pair(jnp.ones(3), STRUCT),
        Pair(STRUCT, STRUCT),
        Pair(jax.ShapeDtypeStruct((2,), jnp.float32), STRUCT),
        Pair(jnp.ones(2), 3),
        [pair()],
    ],
)
def test_other_arguments_are_refused(argument):
    compiled = eqx.filter_jit(fun).lower(pair()).compile()
    with pytest.raises(TypeError, match="other than those it was compiled for"):
        compiled(argument)


def test_array_that_was_lowered_is_not_replaced_by_a_struct():
    compiled = eqx.filter_jit(lambda x: x).lower(jnp.ones(3)).compile()
    with pytest.raises(TypeError, match="`x` was an array, and is now Shape"):
        compiled(STRUCT)


def test_exported_program_takes_arrays_only_and_says_so():
    exported = eqx.filter_export(fun)(pair())
    assert exported(Pair(jnp.ones(2), jnp.ones(3)))[1].tolist() == [1, 1, 1]
    with pytest.raises(
        TypeError, match=r"`pair\.shape` was an array, and is now the static"
    ):
        exported(pair())


def test_converted_function_takes_what_it_was_converted_for():
    converted = eqx.filter_closure_convert(fun, pair())
    assert eqx.tree_equal(converted(pair()), fun(pair()))
    assert converted(Pair(jnp.ones(2), jnp.ones(3)))[1].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"float32\[4\]"):
        converted(Pair(jnp.ones(2), OTHER))
    captured = jnp.ones(())
    converted = eqx.filter_closure_convert(lambda p: p.weight * captured, pair())
    assert converted(pair()).tolist() == [1, 1]  # it does not use the struct
    assert converted(Pair(jnp.ones(2), jnp.ones(3))).tolist() == [1, 1]


def test_summary_counts_structs_in_a_tree_of_structs_only():
    assert eqx.nn.summary(pair()).total_params == 2
    assert [row.path for row in eqx.nn.summary(pair()).rows] == ["weight"]
    shapes = eqx.filter_eval_shape(lambda: Pair(jnp.ones(2), jnp.ones(3)))
    assert eqx.nn.summary(shapes).trainable_params == 5
