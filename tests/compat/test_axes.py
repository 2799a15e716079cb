"""Axes of a mesh along which arrays vary; sums over names of `vmap` and of a mesh."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from equinox_like._compat import axes as named_axes
from equinox_like._compat.axes import varying_axes


def test_what_differs_in_a_shard_map_is_known():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def f(x):
        seen.extend(varying_axes(jax.typeof(y)) for y in (x, jax.lax.psum(x, "x")))
        return x

    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.ones(2))
    assert seen == [{"x"}, set()]
    assert varying_axes(jax.typeof(jnp.ones(2))) == set()


def test_older_and_unknown_forms():
    assert varying_axes(types.SimpleNamespace(vma=frozenset({"x"}))) == {"x"}
    assert varying_axes(types.SimpleNamespace()) == set()


MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
X = jnp.arange(12.0).reshape(4, 3)
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "unnamed vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum(),
}


def over_devices(wrap, lax, names, check_vma):
    def loss(x):
        mean = lax.pmean(x, names)
        constant = lax.psum(jnp.ones(()) * 2, names)
        return (jnp.sin(mean) * x + lax.psum(x * x, names)).sum() + constant

    mapped = jax.vmap(wrap(loss), axis_name="b")
    run = jax.shard_map(
        lambda x: mapped(x),
        mesh=MESH,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    return jax.jit(run)(X)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("names", ["b", "d", ("b", "d"), ("d", "b")])
def test_results_and_derivatives_are_those_of_jax(names, wrap) -> None:
    # Without `check_vma`, JAX's own functions take the names of a `vmap`.
    expected = over_devices(WRAPS[wrap], jax.lax, names, check_vma=False)
    for check_vma in (True, False):
        found = over_devices(WRAPS[wrap], named_axes, names, check_vma)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_vmap_around_a_shard_map() -> None:
    mapped = jax.shard_map(
        lambda x: named_axes.pmean(x, ("b", "d")),
        mesh=MESH,
        in_specs=P("d"),
        out_specs=P(),
    )
    found = jax.vmap(mapped, in_axes=1, out_axes=None, axis_name="b")(X)
    np.testing.assert_allclose(found, X.reshape(2, 2, 3).mean((0, 2)))


def test_unknown_name_is_a_name_error() -> None:
    mapped = jax.shard_map(
        lambda x: named_axes.psum(x, "other"), mesh=MESH, in_specs=P("d"), out_specs=P()
    )
    with pytest.raises(NameError, match="other"):
        mapped(X)
