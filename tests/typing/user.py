"""The public names as a user's type checker sees them: checked by pyright, never run.

`reportUnnecessaryTypeIgnoreComment` makes each ignored error one that must occur.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
import jax.numpy as jnp

import equinox_like as eqx


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None = None
    name: str = eqx.field(static=True, default="affine")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight @ x if self.bias is None else self.weight @ x + self.bias

    @eqx.filter_jit
    def compiled(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return scale * self(x)


# A Module is a dataclass: its fields are the parameters of the constructor.
model = Affine(jnp.ones((2, 2)), name="first")
assert_type(model, Affine)
assert_type(model.name, str)
assert_type(model(jnp.ones(2)), jax.Array)
Affine()  # pyright: ignore[reportCallIssue]
Affine(jnp.ones(2), nmae="x")  # pyright: ignore[reportCallIssue]


# A transformed function keeps its signature, in each way of writing it.
@eqx.filter_jit
def plain(model: Affine, x: jax.Array) -> jax.Array:
    return model(x)


@eqx.filter_jit(donate="all-except-first")
def donating(x: jax.Array, model: Affine) -> Affine:
    return model


assert_type(plain(model, jnp.ones(2)), jax.Array)
assert_type(plain(model, x=jnp.ones(2)), jax.Array)
assert_type(donating(jnp.ones(2), model), Affine)
plain(model)  # pyright: ignore[reportCallIssue]
plain(model, "x")  # pyright: ignore[reportArgumentType]


def double(x: jax.Array) -> jax.Array:
    return 2 * x


assert_type(eqx.filter_jit(double)(jnp.ones(2)), jax.Array)
assert_type(model.compiled(jnp.ones(2)), jax.Array)
assert_type(model.compiled(jnp.ones(2), scale=2.0), jax.Array)


# Ahead of time, shapes may stand for arrays; what is compiled is called like the function.
shape = jax.ShapeDtypeStruct((2,), jnp.float32)
compiled = plain.lower(model, shape).compile()
assert_type(compiled(model, jnp.ones(2)), jax.Array)
compiled(model)  # pyright: ignore[reportCallIssue]
assert_type(plain.trace(model, shape).lower().compile()(model, jnp.ones(2)), jax.Array)
exported = eqx.filter_export(plain, platforms=("cpu",))(model, shape)
assert_type(exported(model, jnp.ones(2)), jax.Array)
exported(model, "x")  # pyright: ignore[reportArgumentType]
assert_type(exported.serialize(), bytes)


def loss(model: Affine, x: jax.Array) -> jax.Array:
    return jnp.sum(model(x))


# A gradient has the type of what it is taken by.
assert_type(eqx.filter_grad(loss)(model, jnp.ones(2)), Affine)
value, gradient = eqx.filter_value_and_grad(loss)(model, jnp.ones(2))
assert_type(value, jax.Array)
assert_type(gradient, Affine)

# Trees keep their type where the value does.
assert_type(eqx.apply_updates(model, gradient), Affine)
assert_type(eqx.tree_at(lambda m: m.weight, model, jnp.zeros((2, 2))), Affine)
