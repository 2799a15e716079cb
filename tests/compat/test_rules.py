"""Rules for batches, with the table whose rules get the axis and without it."""

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat import rules


def doubled(**options):
    """A primitive that doubles its input, and the names that its batching rule gets."""
    names = []
    primitive = rules.new_primitive("doubled")
    primitive.def_impl(lambda x: [2 * x])
    primitive.def_abstract_eval(lambda x: [x])

    def rule(name, args, axes):
        names.append(name)
        return primitive.bind(*args), axes

    rules.register_batching(primitive, rule, **options)
    return lambda x: primitive.bind(x)[0], names


@pytest.mark.parametrize("options", [{}, {"rules_with_axis": None}])
def test_batch_is_that_of_the_rule(options):
    f, names = doubled(**options)
    x = jnp.arange(6.0).reshape(2, 3)
    assert (jax.vmap(f, 1, 1, axis_name="batch")(x) == 2 * x).all()
    assert names == [None if options else "batch"]
    # What has no batch axis is not batched.
    once = jax.vmap(lambda _: f(jnp.ones(())), out_axes=None, axis_name="batch")
    assert once(x) == 2 and len(names) == 1
