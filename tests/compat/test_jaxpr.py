"""Running a jaxpr, and reading its equations."""

import functools

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat import jaxpr as compat

find = functools.partial(compat.find, "eval_jaxpr")
WAYS = [find("jax.core"), find("jax._src.core")]


@pytest.mark.parametrize("evaluate", WAYS, ids=["public", "private"])
def test_jaxpr_runs_with_other_constants(evaluate):
    y = jnp.arange(2.0)
    closed = jax.make_jaxpr(lambda x: (x + y, x))(jnp.ones(2))
    out, x = evaluate(closed.jaxpr, [2 * y], jnp.ones(2))
    assert out.tolist() == [1, 3] and x.tolist() == [1, 1]
    gradient = jax.grad(lambda c: evaluate(closed.jaxpr, [c], y)[0].sum())(y)
    assert gradient.tolist() == [1, 1]


def test_open_jaxpr_holds_no_constant():
    y = jnp.arange(2.0)
    bare = compat.without_constants(jax.make_jaxpr(lambda x: x + y)(jnp.ones(2)))
    assert not getattr(bare, "consts", ())
    assert compat.eval_jaxpr(bare, [2 * y], y)[0].tolist() == [0, 3]


def test_missing_names_are_passed_over():
    assert find("jax.no_such_module", "jax.typing") is None
    assert find("jax.typing", "jax._src.core") is WAYS[1]


def test_one_equation_runs_alone():
    def f(x, y):
        z = jnp.sin(x) * 2.0
        return (
            jax.jit(jnp.add)(z, z)
            + jax.lax.scan(lambda c, _: (c + y, c), z, None, 2)[0]
        )

    jaxpr = jax.make_jaxpr(f)(jnp.ones(2), jnp.ones(2)).jaxpr
    known = dict(zip(jaxpr.invars, (jnp.ones(2), jnp.arange(2.0)), strict=True))
    for e in jaxpr.eqns:
        ins = [x.val if compat.is_literal(x) else known[x] for x in e.invars]
        known.update(zip(e.outvars, compat.run_equation(jaxpr, e, ins), strict=True))
    assert jnp.allclose(known[jaxpr.outvars[0]], f(jnp.ones(2), jnp.arange(2.0)))


def rectified(x):
    f = jax.custom_vjp(jax.nn.relu)
    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    return f(x)


@pytest.mark.parametrize(
    "f, name, jaxpr",
    [
        (jax.jit(jnp.sin), "jit", "jaxpr"),
        (jax.checkpoint(jnp.sin), "remat2", "jaxpr"),
        (jax.nn.relu, "custom_jvp_call", "call_jaxpr"),
        (rectified, "custom_vjp_call", "call_jaxpr"),
    ],
)
def test_equation_is_named_under_the_flags_as_without_them(f, name, jaxpr):
    """See `tests/jax_flags.py`."""
    (e,) = jax.make_jaxpr(f)(-1.0).jaxpr.eqns
    found, params = compat.name_and_params(e)
    assert found == name
    assert compat.is_program(params[jaxpr])
    if (by_others := compat.definition(e)) is not None:
        assert by_others(-1.0, **e.params) == [f(-1.0)]
