"""Values that Python computes for a program, by JAX's lowering and by public means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from equinox_like._compat import host
from equinox_like._compat.primitives import Primitive


def computed(emit):
    """`compute_on_host`, with another `emit` than that of this version of JAX."""
    primitive = Primitive("test_on_host")
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *_, structs, **__: [jax.typeof(s) for s in structs]
    )
    lower = functools.partial(host.lower_values, emit=emit)
    mlir.register_lowering(primitive, lower)

    def compute(function, structs, *args):
        return primitive.bind(*args, function=function, structs=tuple(structs))

    return compute


STRUCTS = [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)]


@pytest.mark.parametrize("emit", [mlir.emit_python_callback, None], ids=["own", "jax"])
def test_results_are_those_of_the_function(emit):
    seen = []

    def function(x, y):
        seen.append(type(x))
        return jnp.sin(x) + y, (x > 0).sum(dtype=jnp.int32)

    x = jax.device_put(jnp.arange(3.0), jax.devices("cpu")[0])
    run = jax.jit(lambda x: computed(emit)(function, STRUCTS, x, 2 * x))
    sines, number = run(x)
    np.testing.assert_allclose(sines, np.sin(x) + 2 * x, rtol=1e-6)
    assert (number, number.dtype) == (2, jnp.int32)
    assert issubclass(seen[0], np.ndarray) == (emit is not None)


def refusing_emit(*_, **__):
    raise AssertionError("called")


def test_programs_on_several_devices_or_with_a_mesh_use_jax():
    mesh = jax.make_mesh((4,), ("a",), (jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("a")))
    struct = [jax.ShapeDtypeStruct((4,), jnp.float32)]

    def double(x):
        return computed(refusing_emit)(lambda x: [2 * x], struct, x)

    (out,) = jax.jit(double)(sharded)
    assert out.tolist() == [0, 2, 4, 6]
    one = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    with jax.set_mesh(one):
        (out,) = jax.jit(double)(jnp.arange(4.0))
    assert out.tolist() == [0, 2, 4, 6]
    with pytest.raises(AssertionError, match="called"):
        jax.jit(double)(jnp.arange(4.0))


@pytest.mark.parametrize("emit", [mlir.emit_python_callback, None], ids=["own", "jax"])
def test_function_that_fails_ends_the_program(emit):
    def fail(x):
        raise ValueError("too much")

    with pytest.raises(Exception, match="too much"):
        jax.block_until_ready(
            jax.jit(lambda x: computed(emit)(fail, STRUCTS, x))(jnp.ones(3))
        )


def test_library_uses_what_jax_has():
    assert host._emit is mlir.emit_python_callback
