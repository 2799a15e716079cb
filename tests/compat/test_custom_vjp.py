"""What JAX says it cannot do with a `jax.custom_vjp` is recognised; other errors pass."""

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat.custom_vjp import call_with_rules, is_forward_mode

P = jax.sharding.PartitionSpec


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (2 * x.value, None), lambda _, c: (2 * c,), symbolic_zeros=True)


def test_function_is_called_within_an_eager_shard_map():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        lambda x: call_with_rules(double, x),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
    assert f(jnp.ones(4)).tolist() == [2, 2, 2, 2]


def test_other_errors_pass():
    def fails(x):
        raise NotImplementedError("something else")

    with pytest.raises(NotImplementedError, match="something else"):
        call_with_rules(fails, 1.0)


def test_forward_mode_is_recognised():
    with pytest.raises(TypeError) as caught:
        jax.jvp(double, (1.0,), (1.0,))
    assert is_forward_mode(caught.value)
    assert not is_forward_mode(TypeError("another one"))
