"""What a lowered program does with its arguments, with and without JAX's private word."""

import types
import warnings

import jax
import jax.numpy as jnp

from equinox_like._compat.lowered import reused_arguments


def lower(f, *args, donate=()):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.jit(f, donate_argnums=donate).lower(*args)


def without_private_names(lowered):
    """Only what is public of a lowered program."""
    return types.SimpleNamespace(
        args_info=lowered.args_info, compiler_ir=lowered.compiler_ir
    )


def test_each_argument_is_told_apart():
    def f(reused, cast, unused, unusable, kept):
        return reused + unusable.sum() + kept, cast.astype(jnp.int32)

    x, y = jnp.ones(3), jnp.ones(5)
    lowered = lower(f, x, y, x, jnp.ones(7), x, donate=(0, 1, 2, 3))
    assert reused_arguments(lowered) == [True, True, None, False, False]


def test_without_the_private_name_full_programs_are_still_told_right():
    lowered = lower(lambda a, b: a + b.sum(), jnp.ones(3), jnp.ones(5), donate=(0, 1))
    assert reused_arguments(without_private_names(lowered)) == [True, False]


def test_without_the_private_name_unused_arguments_leave_it_open():
    lowered = lower(lambda a, b: a + 1, jnp.ones(3), jnp.ones(5), donate=(0, 1))
    assert reused_arguments(lowered) == [True, None]
    assert reused_arguments(without_private_names(lowered)) is None
