"""What a lowered program does with its arguments, with and without JAX's private word."""

import types
import warnings

import jax
import jax.numpy as jnp

from equinox_like._compat.compiled import Buffer, buffers_of


def lower(f, *args, donate=()):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.jit(f, donate_argnums=donate).lower(*args)


def ask(lowered, without_private_names=False):
    compiled = lowered.compile()
    if without_private_names:
        lowered = public_part(lowered)
    return buffers_of(lowered, compiled)


def public_part(lowered):
    """Only what is public of a lowered program."""
    return types.SimpleNamespace(
        args_info=lowered.args_info, compiler_ir=lowered.compiler_ir
    )


def test_buffer_that_is_offered_in_vain_is_not_reused():
    # JAX hands a typed key's buffer to XLA, and does not say that nothing takes it.
    lowered = lower(
        lambda key, x: (jax.random.normal(key), x + 1),
        jax.random.key(0),
        jnp.ones(3),
        donate=(0, 1),
    )
    assert ask(lowered) == [Buffer.DONOR, 1]


def test_each_argument_is_told_apart():
    def f(reused, cast, unused, unusable, kept):
        return reused + unusable.sum() + kept, cast.astype(jnp.int32)

    x, y = jnp.ones(3), jnp.ones(5)
    lowered = lower(f, x, y, x, jnp.ones(7), x, donate=(0, 1, 2, 3))
    assert ask(lowered) == [0, 1, Buffer.PRUNED, Buffer.UNUSABLE, Buffer.NOT_DONATED]


def test_without_the_private_name_full_programs_are_still_told_right():
    lowered = lower(lambda a, b: a + b.sum(), jnp.ones(3), jnp.ones(5), donate=(0, 1))
    assert ask(lowered, without_private_names=True) == [0, Buffer.UNUSABLE]


def test_without_the_private_name_unused_arguments_leave_it_open():
    lowered = lower(lambda a, b: a + 1, jnp.ones(3), jnp.ones(5), donate=(0, 1))
    assert ask(lowered) == [0, Buffer.PRUNED]
    assert ask(lowered, without_private_names=True) is None


def test_other_words_of_xla_leave_it_open():
    lowered = lower(lambda a: a + 1, jnp.ones(3), donate=0)
    compiled = lowered.compile()
    text = compiled.as_text().replace("input_output_alias", "reuse")
    text = text.replace("alias", "reuse").replace("buffer_donor", "offer")
    other = types.SimpleNamespace(as_text=lambda: text)
    assert buffers_of(lowered, compiled) == [0] and buffers_of(lowered, other) is None
    kept = lower(lambda a: a + 1, jnp.ones(3))
    assert ask(kept) == [Buffer.NOT_DONATED]
