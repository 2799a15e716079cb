"""Faults of JAX under its flags for new implementations, reproduced in plain JAX.

Each function fails under its flag, and passes without it. `jax_flags.py` tells the flag,
and which tests fail for the same reason.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call


def power(x):
    return lax.scan(lambda c, _: (c * x, None), x, None, 2)[0]


def loop_has_a_reverse_mode():
    assert jax.grad(power)(1.0) == 3


def loop_can_be_mapped():
    assert jax.vmap(power)(jnp.arange(2.0)).tolist() == [0, 1]


def compiled_loop_with_nothing_but_a_carry_runs():
    assert jax.jit(power)(2.0) == 8


def loop_runs_backwards():
    step = lambda c, x: (2 * c + x, c)  # noqa: E731
    assert lax.scan(step, 0.0, jnp.arange(3.0), reverse=True)[0] == 4 + 2 * 1 + 4


def error_in_a_loop_names_the_function():
    def step(c, x):
        return c if c > 0 else x, None

    try:
        lax.scan(step, 1.0, jnp.arange(2.0))
    except jax.errors.TracerBoolConversionError as error:
        assert "function step at" in str(error)
        return
    raise AssertionError


def loop_does_not_consume_keys_that_it_does_not_use():
    keys = jax.random.split(jax.random.key(0), 2)
    ones = lambda: lax.scan(lambda c, _: (c, None), 1.0, keys)[0]  # noqa: E731
    with jax.debug_key_reuse(True):
        assert jax.jit(lambda: ones() + ones())() == 2


def carry_of_another_type_is_a_type_error():
    try:
        lax.scan(lambda c, _: (c.astype(int), None), jnp.ones(2), None, 2)
    except TypeError:
        return
    raise AssertionError


def integer_in_the_carry_has_a_forward_mode():
    loop = lambda x: lax.fori_loop(0, 2, lambda i, c: c * x, x)  # noqa: E731
    assert jax.jvp(loop, (2.0,), (1.0,))[1] == 12


def loop_without_steps_runs():
    lax.scan(lambda c, x: (c, x), 1.0, jnp.ones(0))


def numpy_array_can_be_iterated_over():
    lax.scan(lambda c, x: (c + x, None), 0, np.arange(2))


def function_that_needs_values_has_a_rule():
    f = jax.custom_jvp(lambda x: x if x > 0 else -x)
    f.defjvp(lambda primals, tangents: (2 * primals[0], tangents[0]))
    jax.jvp(f, (1.0,), (1.0,))


def rule_may_close_over_a_traced_value():
    @jax.jit
    def outer(x, y):
        batching = custom_vmap(lambda x: x)
        batching.def_vmap(lambda n, batched, x: (x * y, True))
        f = jax.custom_jvp(batching)
        f.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
        return jax.vmap(f)(x)

    assert outer(jnp.arange(3.0), 2.0).tolist() == [0, 2, 4]


def cotangent_that_is_zero_is_not_computed_with():
    def transpose(_, cotangent):
        raise AssertionError

    f = jax.custom_jvp(lambda x: (x, x))
    f.defjvp(
        lambda primals, tangents: (
            f(*primals),
            (*tangents, linear_call(lambda _, t: t, transpose, (), *tangents)),
        )
    )
    assert jax.grad(lambda x: f(x)[0])(1.0) == 1


def linear_function_with_a_checkpoint_is_transposed():
    f = jax.custom_jvp(lambda x: 2 * x)
    f.defjvp(lambda primals, tangents: (f(*primals), jax.checkpoint(f)(*tangents)))
    assert jax.grad(f)(1.0) == 2
