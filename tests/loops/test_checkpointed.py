"""A checkpointed loop differentiates what must be differentiated, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import pytest

from equinox_like import internal as eqxi


@jax.custom_jvp
def nondifferentiable(x):
    return x


@functools.partial(nondifferentiable.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    if type(tangents[0]) is not jax.custom_derivatives.SymbolicZero:
        raise RuntimeError("Unexpected tangent")
    return primals[0], tangents[0]


@jax.custom_vjp
def nondifferentiable_backward(x):
    return x


def _refuse(_, ct):
    if type(ct) is not jax.custom_derivatives.SymbolicZero:
        raise RuntimeError("Unexpected cotangent")
    return (ct,)


nondifferentiable_backward.defvjp(
    lambda x: (x.value, None), _refuse, symbolic_zeros=True
)

loop = functools.partial(eqxi.while_loop, kind="checkpointed", max_steps=4)


def three(body, *init):
    """Three steps of a body."""
    step = lambda c: (c[0] + 1, *body(*c[1:]))  # noqa: E731
    return loop(lambda c: c[0] < 3, step, (0, *init))[1:]


TRANSFORMS = {
    "grad": lambda f: jax.grad(f)(2.0),
    "linearize": lambda f: jax.linearize(f, 2.0)[1](1.0),
    "compiled": lambda f: jax.jit(jax.grad(f))(2.0),
    "within jit": lambda f: jax.grad(jax.jit(f))(2.0),
    "mapped": lambda f: jax.grad(
        lambda x: jax.vmap(f, axis_size=2, in_axes=None)(x).sum() / 2
    )(2.0),
    "mapped gradient": lambda f: jax.vmap(jax.grad(f))(jnp.asarray([2.0]))[0],
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (f(x) + 0 * c, None), x, length=1)[0]
    )(2.0),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(2.0),
}


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - {"linearize"}))
def test_what_no_derivative_reaches_comes_out_without_one(name):
    def run(x):
        def body(x, y):
            y = nondifferentiable(jnp.cos(y))
            return x * y, y

        x, y = three(body, x, jnp.asarray(0.5))
        return x + nondifferentiable(y)

    y1, y2, y3 = (
        jnp.cos(0.5),
        jnp.cos(jnp.cos(0.5)),
        jnp.cos(jnp.cos(jnp.cos(0.5))),
    )
    assert jnp.allclose(TRANSFORMS[name](run), y1 * y2 * y3)


def test_linearize_knows_what_is_not_perturbed():
    def run(x):
        x, y = three(lambda x, y: (x * 2, y * 3), x, jnp.asarray(0.5))
        return x, nondifferentiable(y)

    (x, y), linear = jax.linearize(run, 2.0)
    assert (x, y) == (16, 13.5)
    assert "checkpointed_loop" in str(jax.make_jaxpr(linear)(1.0))


def test_derivative_reaches_what_another_entry_passes_on():
    """`x` reaches `z` at the second step only."""

    def run(x, mark=lambda z: z):
        body = lambda x, y, z: (x, 2 * x, y * y)  # noqa: E731
        return mark(three(body, x, jnp.asarray(1.0), jnp.asarray(1.0))[2])

    assert jax.grad(run)(3.0) == 24
    with pytest.raises(RuntimeError, match="Unexpected tangent"):
        jax.grad(functools.partial(run, mark=nondifferentiable))(3.0)


def test_derivative_comes_in_by_what_the_body_closes_over():
    def run(x):
        y, z = three(lambda y, z: (y * x, z + 1), jnp.asarray(1.0), jnp.asarray(1.0))
        return y + nondifferentiable(z)

    assert jax.grad(run)(2.0) == 12


def test_no_derivative_goes_through_the_condition():
    def run(x):
        cond = lambda c: nondifferentiable(c * x) < 20  # noqa: E731
        return loop(cond, lambda c: c * 2, x)

    assert jax.grad(run)(2.0) == 8


def test_cotangents_that_are_zero_stay_so():
    def run(x):
        def body(x, y):
            return 2 * x, nondifferentiable_backward(x * y)

        x, _ = three(body, x, x)
        return x

    assert jax.grad(run)(1.0) == 8
    assert jax.jit(jax.grad(run))(1.0) == 8


def test_cotangent_that_comes_by_another_entry_is_not_zero():
    def run(x):
        body = lambda x, y: (x, nondifferentiable_backward(x))  # noqa: E731
        return three(body, x, x)[1]

    with pytest.raises(RuntimeError, match="Unexpected cotangent"):
        jax.grad(run)(1.0)


def test_nothing_is_done_on_the_way_back_if_no_cotangent_comes():
    def run(x):
        three(lambda x: (nondifferentiable_backward(x) * 2,), x)
        return x * 3

    jaxpr = str(jax.make_jaxpr(jax.grad(run))(1.0))
    assert jax.grad(run)(1.0) == 3
    assert "transpose" not in jaxpr


def test_carry_that_stays_is_not_saved():
    """A model that goes round the loop, say."""

    def temporary(size):
        def run(x, big):
            body = lambda x, big: (jnp.sin(x) * big.sum(), big)  # noqa: E731
            return three(body, x, big)[0]

        compiled = jax.jit(jax.grad(run)).lower(1.0, jnp.ones(size)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(10_000) < 4 * 10_000


def test_functions_with_rules_of_their_own_may_be_used():
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (100 * ct * x,))
    found = jax.grad(lambda x: three(lambda x: (f(x),), x)[0])(1.0)
    assert found == 100.0**3
