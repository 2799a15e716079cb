"""`backward_nan`: what is printed of a cotangent, and what a NaN in it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import equinox_like as eqx

X = jnp.ones(2)
wraps = pytest.mark.parametrize(
    "wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"]
)


def scaled(x, factor, **kwargs):
    return (eqx.debug.backward_nan(x, **kwargs) * factor).sum()


def out_of(capsys):
    jax.effects_barrier()
    return capsys.readouterr().out


@wraps
def test_primal_and_cotangent_are_printed(wrap, capsys):
    gradient = wrap(jax.grad(lambda x: scaled(x, 3.0)))(X)
    assert gradient.tolist() == [3, 3]
    assert out_of(capsys) == (
        "   primals=Array([1., 1.], dtype=float32)\n"
        "cotangents=Array([3., 3.], dtype=float32)\n"
    )


@wraps
@pytest.mark.parametrize("terminate", [True, False])
@pytest.mark.parametrize("derivative", [jax.jacrev, jax.jacfwd])
def test_the_gradient_can_be_differentiated(derivative, terminate, wrap):
    def cubes(x):
        return (eqx.debug.backward_nan(x, terminate=terminate) ** 3).sum()

    second = wrap(derivative(jax.grad(cubes)))(X)
    assert jnp.allclose(second, 6 * jnp.eye(2))


def test_nothing_is_printed_without_a_backward_pass(capsys):
    assert scaled(X, 3.0) == 6
    assert out_of(capsys) == ""
    with pytest.raises(TypeError, match=r"^`debug.backward_nan` .*forward-mode"):
        jax.jvp(eqx.debug.backward_nan, (X,), (X,))


def test_numpy_arrays_become_jax_arrays():
    x, name = eqx.debug.backward_nan((np.ones(2, "f4"), "name"))
    assert isinstance(x, jax.Array) and name == "name"


def test_name_stands_above(capsys):
    jax.grad(lambda x: scaled(x, 1.0, name="here"))(X)
    assert out_of(capsys).startswith("here:\n   primals=")


@wraps
def test_nan_is_an_error(wrap, capsys):
    with pytest.raises(eqx.EquinoxRuntimeError, match="Encountered NaN"):
        wrap(jax.grad(lambda x: scaled(x, jnp.nan)))(X)
    assert "cotangents=Array([nan, nan]" in out_of(capsys)
    with pytest.raises(eqx.EquinoxRuntimeError, match="in the cotangent of here"):
        wrap(jax.grad(lambda x: scaled(x, jnp.nan, name="here")))(X)


@wraps
def test_nan_is_printed_and_passed_on_if_it_is_no_error(wrap, capsys):
    f = wrap(jax.grad(lambda x: scaled(x, jnp.nan, terminate=False)))
    assert jnp.isnan(f(X)).all()
    assert "cotangents=Array([nan, nan]" in out_of(capsys)


def test_cotangents_are_printed_in_the_order_of_the_backward_pass(capsys):
    @jax.jit
    @jax.grad
    def gradient(x):
        for name in range(5):
            x = eqx.debug.backward_nan(jnp.sin(x), name=str(name))
        return x

    gradient(1.0)
    lines = [line[0] for line in out_of(capsys).splitlines() if line[1:] == ":"]
    assert lines == ["4", "3", "2", "1", "0"]


@wraps
def test_each_element_of_a_batch_is_printed(wrap, capsys):
    f = wrap(jax.vmap(jax.grad(lambda x, y: scaled(x, y))))
    assert f(X, jnp.asarray([5.0, 7.0])).tolist() == [5, 7]
    out = out_of(capsys)
    assert out.index("cotangents=Array(5.") < out.index("cotangents=Array(7.")


def test_what_is_not_differentiated_is_printed(capsys):
    def f(tree):
        return eqx.debug.backward_nan(tree)[0].sum()

    tree = (X, jnp.arange(2), "text", jax.random.key(0))
    gradient = eqx.filter_grad(f)(tree)
    assert gradient[0].tolist() == [1, 1] and gradient[1:] == (None, None, None)
    out = out_of(capsys)
    assert "Array([0, 1], dtype=int32)" in out and "'text'" in out
    assert "(Array([1., 1.], dtype=float32), None, None, None)" in out


def test_python_float_has_its_gradient(capsys):
    assert jax.grad(lambda x: scaled(x, 3.0))(2.0) == 3
    assert "primals=Array(2." in out_of(capsys)


def test_arrays_on_several_devices_are_printed_whole(capsys):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("a")))
    assert jax.jit(jax.grad(lambda x: scaled(x, 3.0)))(x).tolist() == [3, 3]
    assert "cotangents=Array([3., 3.]" in out_of(capsys)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_element_of_a_batch_on_several_devices_is_printed(axis_type, capsys):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("a")))
        gradient = jax.jit(jax.vmap(jax.grad(lambda x: scaled(x, x))))(x)
    assert gradient.tolist() == [0, 2, 4, 6]
    lines = [line for line in out_of(capsys).splitlines() if "primals" in line]
    assert [line.split("(")[1][0] for line in lines] == ["0", "1", "2", "3"]


def test_each_element_of_nested_batches_is_printed(capsys):
    x = jnp.arange(6.0).reshape(2, 3)
    gradient = jax.vmap(jax.vmap(jax.grad(lambda x: scaled(x, 3.0))))(x)
    assert (gradient == 3).all()
    lines = [line for line in out_of(capsys).splitlines() if "primals" in line]
    assert [line.split("(")[1][0] for line in lines] == list("012345")
