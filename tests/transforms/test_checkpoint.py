"""filter_checkpoint: the same values and derivatives, and less to remember."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


class Scale(eqx.Module):
    factor: Any
    name: str = eqx.field(static=True, default="scale")

    def __call__(self, x):
        return jnp.sin(self.factor * x)

    @eqx.filter_checkpoint
    def method(self, x, *, power=1):
        return self(x) ** power

    @eqx.filter_checkpoint(policy=jax.checkpoint_policies.everything_saveable)
    def saving(self, x):
        return self(x)


def test_anything_goes_in_and_comes_out():
    marker = object()
    f = eqx.filter_checkpoint(lambda tree, *, n: (tree["x"] * n, tree["m"], n))
    out = f({"x": jnp.ones(2), "m": marker}, n=3)
    assert out[0].tolist() == [3, 3] and out[1] is marker and out[2] == 3


@pytest.mark.parametrize("disabled", [False, True])
def test_gradients_flow_to_the_wrapped_module(disabled):
    x = jnp.linspace(0, 1, 3)
    model = Scale(jnp.asarray(2.0))
    with jax.disable_jit(disabled):
        expected = eqx.filter_grad(lambda m: m(x).sum())(model)
        for call in (
            lambda m: eqx.filter_checkpoint(m)(x),
            lambda m: eqx.filter_checkpoint(m.__call__)(x),
            lambda m: m.method(x),
            lambda m: m.saving(x),
        ):
            gradient = eqx.filter_grad(lambda m, call=call: call(m).sum())(model)
            assert jnp.allclose(gradient.factor, expected.factor)


def test_functions_may_close_over_tracers():
    gradient = jax.grad(lambda y: eqx.filter_checkpoint(lambda x: x * y)(3.0))(2.0)
    assert gradient == 3.0


def saved(f, x):
    """How many arrays the backward pass of `f` remembers, besides `x`."""
    _, pullback = eqx.filter_vjp(f, x)
    return sum(leaf.size for leaf in jax.tree.leaves(pullback)) - x.size


def test_only_inputs_are_remembered_unless_the_policy_says_otherwise():
    def f(x):
        for _ in range(4):
            x = jnp.sin(x)
        return x

    x = jnp.ones(10)
    everything = jax.checkpoint_policies.everything_saveable
    assert saved(eqx.filter_checkpoint(f), x) <= 0 < saved(f, x)
    assert saved(eqx.filter_checkpoint(f, policy=everything), x) > 0


def test_wrapper_has_the_name_and_the_signature():
    @eqx.filter_checkpoint
    def documented(x, y=1):
        """Doc."""

    assert documented.__name__ == "documented" and documented.__doc__ == "Doc."
    assert list(inspect.signature(documented).parameters) == ["x", "y"]
    assert repr(documented) == "<filter_checkpoint of documented>"
    (leaf,) = jax.tree.leaves(eqx.filter_checkpoint(Scale(jnp.ones(2))))
    assert leaf.shape == (2,)
    with pytest.raises(TypeError, match="wraps a function"):
        eqx.filter_checkpoint(3)
