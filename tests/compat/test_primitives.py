"""Calling the host from a compiled program, by JAX's lowering and by public means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir

from equinox_like._compat import host, primitives


def test_primitives_are_of_the_first_class_that_there_is():
    find = functools.partial(primitives.find, "Primitive")
    public = find("jax.no_such_module", "jax.typing", "jax.extend.core")
    assert public is primitives.Primitive is find("jax._src.core")
    assert find("jax.typing") is None


def test_jax_has_what_is_asked_for():
    assert host.find_emit(mlir) is mlir.emit_python_callback
    assert host.find_emit(object()) is None


def host_call(lower):
    primitive = primitives.Primitive("test_host_call")
    result = jax.typeof(jnp.asarray(True))
    primitive.def_abstract_eval(lambda x, **_: result)
    mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive


@pytest.mark.parametrize("emit", [mlir.emit_python_callback, None], ids=["own", "jax"])
def test_host_is_called_with_the_array_and_may_fail(emit, caplog):
    seen = []

    def function(x):
        seen.append(x)
        if x.sum() > 3:
            raise ValueError("too much")

    primitive = host_call(functools.partial(host.lower_host_call, emit=emit))
    f = jax.jit(
        lambda x: primitive.bind(x, function=function, on_tpu=None, is_removable=False)
    )
    assert f(jnp.arange(3))
    jax.effects_barrier()
    assert isinstance(seen[0], np.ndarray) and seen[0].tolist() == [0, 1, 2]
    with pytest.raises(Exception, match="too much"):
        f(jnp.arange(4)).block_until_ready()
    assert bool(caplog.records) == (emit is None)


def test_on_tpu_another_function_is_called():
    seen = []
    primitive = host_call(host._lower_on_tpu)
    f = jax.jit(
        lambda x: primitive.bind(
            x, function=None, on_tpu=seen.append, is_removable=False
        )
    )
    assert f(jnp.arange(3))
    assert [x.tolist() for x in seen] == [[0, 1, 2]]


def refusing_emit(*_, **__):
    raise ValueError("not supported on this backend")


def test_where_python_cannot_be_called_there_is_one_warning():
    host._warn_of_backend.cache_clear()
    lower = functools.partial(host.lower_host_call, emit=refusing_emit)
    primitive = host_call(lower)
    f = jax.jit(
        lambda x: primitive.bind(x, function=None, on_tpu=None, is_removable=False)
    )
    with pytest.warns(UserWarning, match=r"'cpu' cannot call Python.*on this backend"):
        assert f(jnp.arange(3))
    assert f(jnp.arange(4))


def test_removable_call_is_made_only_if_its_result_is_used():
    seen = []
    primitive = host_call(
        functools.partial(host.lower_host_call, emit=mlir.emit_python_callback)
    )

    def f(is_used, is_removable):
        out = primitive.bind(
            jnp.ones(1), function=seen.append, on_tpu=None, is_removable=is_removable
        )
        # Whose result is known to XLA alone.
        return lax.select(jnp.asarray(is_used), out, jnp.asarray(False))

    for is_used, is_removable in ((True, True), (False, True), (False, False)):
        seen.clear()
        out = jax.jit(f, static_argnums=(0, 1))(is_used, is_removable)
        assert out == is_used
        assert len(seen) == (0 if is_removable and not is_used else 1)


def test_primitive_sees_the_whole_batch_and_has_one_result():
    seen = []

    def total(x, y, factor):
        seen.append((x.shape, y.shape))
        return (x * y).sum() * factor

    primitive = primitives.for_whole_batch(
        "test_total", total, like=lambda x, y: x.sum()
    )

    def f(x):
        return primitive.bind(x, jnp.ones(x.shape), factor=2)

    x = jnp.arange(6.0).reshape(2, 3)
    for wrap in (lambda f: f, jax.jit):
        seen.clear()
        inner = jax.vmap(f, in_axes=0, out_axes=None)
        assert wrap(jax.vmap(inner, in_axes=1, out_axes=None))(x) == 30
        assert ((3, 2), (3, 2)) in seen
        assert wrap(f)(x[0]) == 6
    assert jax.eval_shape(jax.vmap(f, out_axes=None), x).shape == ()
