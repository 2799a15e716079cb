"""varying_axes: from each form in which JAX has told it."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from equinox_like._compat.varying import varying_axes


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
