"""JAX's errors and warnings are recognised by their texts; others are not."""

import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from equinox_like._compat import errors as messages
from equinox_like._compat.errors import call_with_rules, is_forward_mode


def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def explicit_mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


def pass_deleted():
    x = jnp.ones(3)
    x.delete()
    x + 1


def pass_deleted_to_a_program():
    x, f = jnp.ones(3), jax.jit(lambda x: x + 1)
    f(x)
    x.delete()
    f(x)


def pass_deleted_by_another_thread():
    # To the program itself, as if the array were deleted after JAX has checked it.
    x = jnp.ones(3)
    compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    x.delete()
    compiled.runtime_executable().execute_sharded([x])


def donate_twice():
    x = jnp.ones(3)
    jax.jit(lambda x, y: (x + 1, y + 1), donate_argnums=(0, 1))(x, x)


def donate_and_pass():
    x = jnp.ones(3)
    jax.jit(lambda x, y: x + y, donate_argnums=0)(x, x)


def find_nan():
    with jax.debug_nans(True):
        x = jnp.zeros(3)
        try:
            jax.jit(lambda x: x / x, donate_argnums=0)(x)
        except Exception as error:
            while error is not None and not messages.is_nan_error(error):
                error = error.__context__
            raise error or AssertionError from None


def pass_another_sharding():
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh(), P()))
    jax.jit(lambda x: x, in_shardings=NamedSharding(mesh(), P("x")))(x)


def pass_another_spec():
    x = jax.device_put(jnp.ones(4), NamedSharding(explicit_mesh(), P()))
    f = jax.shard_map(
        lambda x: x, mesh=explicit_mesh(), in_specs=P("x"), out_specs=P("x")
    )
    with jax.set_mesh(explicit_mesh()):
        f(x)


def call_back(x):
    return jax.pure_callback(np.sin, x, x)


def export_callback():
    jax.export.export(jax.jit(call_back))(jnp.ones(3))


def lower_callback_for_another_platform():
    jax.jit(call_back).trace(jnp.ones(3)).lower(lowering_platforms=("tpu",))


def lower_callback_for_several_platforms():
    jax.jit(call_back).trace(jnp.ones(3)).lower(lowering_platforms=("cpu", "tpu"))


def export_cudnn():
    call = jax.ffi.ffi_call("__cudnn$test", jax.ShapeDtypeStruct((3,), jnp.float32))
    jax.export.export(jax.jit(call))(jnp.ones(3))


TELLS = {
    messages.is_deleted_array_error: [
        pass_deleted,
        pass_deleted_to_a_program,
        pass_deleted_by_another_thread,
    ],
    messages.is_shared_buffer_error: [donate_twice, donate_and_pass],
    messages.is_nan_error: [find_nan],
    messages.is_other_sharding_error: [pass_another_sharding],
    messages.is_other_specs_error: [pass_another_spec],
    messages.is_callback_error: [
        export_callback,
        lower_callback_for_another_platform,
        lower_callback_for_several_platforms,
    ],
    lambda error: messages.exported_cudnn_calls(error) == ["__cudnn$test"]: [
        export_cudnn
    ],
}
CASES = [(tells, provoke) for tells, all_ in TELLS.items() for provoke in all_]


@pytest.mark.parametrize(
    ("tells", "provoke"), CASES, ids=[provoke.__name__ for _, provoke in CASES]
)
def test_message_is_recognised_and_told_from_the_others(tells, provoke):
    with pytest.raises(Exception) as info:
        provoke()
    assert [other for other in TELLS if other(info.value)] == [tells], info.value


def test_other_messages_are_not():
    error = ValueError("donated arrays, a mesh and a callback")
    assert not any(tells(error) for tells in TELLS)


def test_warning_of_an_unusable_donation_is_recognised():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(3))
    (warning,) = caught
    assert messages.UNUSABLE_DONATION.match(str(warning.message))


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
