import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import internal as eqxi
from equinox_like._compat.jaxpr import name_and_params


def checked(x):
    return eqx.error_if(x, x > 100, "too large")


def in_scan(x):
    return lax.scan(lambda c, x: (checked(c + x), c), x, jnp.ones(3))


def in_vjp_rule(x):
    f = jax.custom_vjp(lambda x: checked(2 * x))
    f.defvjp(lambda x: (f(x), None), lambda _, ct: (2 * ct,))
    return f(x)


def with_mutable_array(x):
    total = jax.new_ref(x)

    @jax.jit
    def add(x):
        total[...] += checked(x)

    add(2 * x)
    return total[...]


def in_shard_map(x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    each = jax.jit(lambda x: checked(lax.psum(x, "d")))
    specs = {"in_specs": P("d"), "out_specs": P()}
    return jax.shard_map(each, mesh=mesh, **specs)(jnp.stack([x, x]))


PROGRAMS = {
    "plain": checked,
    "cond": lambda x: lax.cond(x > 0, checked, jnp.cos, x),
    "scan": in_scan,
    "while": lambda x: lax.while_loop(lambda c: c < 5, lambda c: checked(c + 1), x),
    "jit": lambda x: jax.jit(lambda x: jax.jit(checked)(x) + 1)(x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(checked(x))),
    "custom_jvp": lambda x: jax.nn.relu(lax.stop_gradient(checked(x))),
    "custom_vjp": in_vjp_rule,
    "vmap": lambda x: jax.vmap(checked)(jnp.stack([x, x])),
    "guards": lambda x: jax.vmap(eqxi.nondifferentiable_backward)(
        jnp.stack([eqxi.nonbatchable(eqxi.nontraceable(x))] * 2)
    ),
    "announce": lambda x: eqx.debug.announce_transform(x, announce=lambda _: None),
    "loop": lambda x: jax.vmap(
        lambda x: eqxi.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, c[1].at[c[0]].set(x)),
            (jnp.int32(0), jnp.zeros(3)),
            kind="checkpointed",
            max_steps=3,
            buffers=lambda c: c[1],
        )
    )(jnp.stack([x, x])),
    "mutable array": with_mutable_array,
    "shard_map": in_shard_map,
    "none": lambda x: x + 1,
}


def equations_in(jaxpr):
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in name_and_params(equation)[1].values():
            for part in value if isinstance(value, tuple | list) else [value]:
                if hasattr(getattr(part, "jaxpr", part), "eqns"):
                    yield from equations_in(part)


def primitives_in(jaxpr):
    return {equation.primitive for equation in equations_in(jaxpr)}


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_finalised_program_has_none_of_our_primitives_and_the_same_output(fn):
    x = jnp.asarray(0.5)
    if fn is not PROGRAMS["none"]:
        before = primitives_in(jax.make_jaxpr(fn)(x))
        assert before & set(eqxi.primitive_finalisations)
    jaxpr = eqxi.finalise_make_jaxpr(fn)(x)
    assert not primitives_in(jaxpr) & set(eqxi.primitive_finalisations)
    names = {name_and_params(equation)[0] for equation in equations_in(jaxpr)}
    assert not names & {"stop_gradient", "custom_jvp_call"}
    assert eqx.tree_equal(eqxi.finalise_fn(fn)(x), fn(x))
    assert eqx.tree_equal(jax.jit(eqxi.finalise_fn(fn))(x), fn(x))


def test_program_without_our_primitives_stays_as_it_is():
    def fn(x):
        return lax.scan(lambda c, x: (c + x, jax.jit(jnp.sin)(c)), x, jnp.ones(3))

    jaxpr = jax.make_jaxpr(fn)(1.0)
    assert str(eqxi.finalise_jaxpr(jaxpr)) == str(jaxpr)


def test_finalising_twice_changes_nothing():
    once = eqxi.finalise_jaxpr(jax.make_jaxpr(in_scan)(1.0))
    assert str(eqxi.finalise_jaxpr(once)) == str(once)


def test_inputs_keep_their_shardings():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8), jax.P("d"))
        jaxpr = jax.make_jaxpr(checked)(x)
        assert eqxi.finalise_jaxpr(jaxpr).in_avals == jaxpr.in_avals


def test_finalised_check_raises_as_before():
    with pytest.raises(Exception, match="too large"):
        jax.block_until_ready(jax.jit(eqxi.finalise_fn(checked))(jnp.asarray(101.0)))


def test_output_may_hold_anything_and_the_shape_is_returned():
    x = jnp.ones(2)
    assert eqxi.finalise_fn(lambda x, n: (x * n, n))(x, 3)[1] == 3
    _, shape = eqxi.finalise_make_jaxpr(lambda x: {"a": x}, return_shape=True)(x)
    assert shape == {"a": jax.ShapeDtypeStruct((2,), x.dtype)}


def test_primitive_is_replaced_by_its_implementation():
    twice_p = jax.extend.core.Primitive("twice")
    twice_p.def_impl(lambda x: 2 * x)
    twice_p.def_abstract_eval(lambda x: x)
    eqxi.register_impl_finalisation(twice_p)
    try:
        jaxpr = eqxi.finalise_make_jaxpr(twice_p.bind)(jnp.ones(3))
        assert [e.primitive.name for e in jaxpr.jaxpr.eqns] == ["mul"]
    finally:
        del eqxi.primitive_finalisations[twice_p]


def test_flat_function_takes_and_returns_lists():
    jaxpr = jax.make_jaxpr(lambda x: (checked(x), x + 1))(1.0)
    assert [float(x) for x in eqxi.finalise_jaxpr_as_fn(jaxpr)(2.0)] == [2, 3]
