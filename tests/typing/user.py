"""The public names as a user's type checker sees them: checked by pyright, never run.

`reportUnnecessaryTypeIgnoreComment` makes each ignored error one that must occur.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

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


def loss(model: Affine, x: jax.Array) -> jax.Array:
    return jnp.sum(model(x))


# A gradient has the type of what it is taken by.
assert_type(eqx.filter_grad(loss)(model, jnp.ones(2)), Affine)
value, gradient = eqx.filter_value_and_grad(loss)(model, jnp.ones(2))
assert_type(value, jax.Array)
assert_type(gradient, Affine)


# So have the tangent and the cotangent functions, Jacobians and custom rules.
@eqx.filter_checkpoint
def block(model: Affine, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return scale * model(x)


@eqx.filter_checkpoint(policy=jax.checkpoint_policies.dots_saveable)
def saving_block(x: jax.Array) -> tuple[jax.Array, str]:
    return x, "name"


@eqx.filter_custom_jvp
def own_jvp(x: jax.Array, power: int) -> jax.Array:
    return x**power


@eqx.filter_custom_vjp
def own_vjp(x: jax.Array, limit: float) -> jax.Array:
    return x


@eqx.filter_custom_vjp(optimize_remat=True)
def own_vjp_remat(x: jax.Array) -> str:
    return ""


@eqx.filter_grad(has_aux=True, wrt=eqx.is_array)
def slope(model: Affine, x: jax.Array) -> tuple[jax.Array, str]:
    return loss(model, x), "aux"


assert_type(block(model, jnp.ones(2), scale=2.0), jax.Array)
block(model)  # pyright: ignore[reportCallIssue]
assert_type(saving_block(jnp.ones(2)), tuple[jax.Array, str])
assert_type(own_jvp(jnp.ones(2), 2), jax.Array)
own_jvp(jnp.ones(2), "2")  # pyright: ignore[reportArgumentType]
assert_type(own_vjp(jnp.ones(2), limit=1.0), jax.Array)
own_vjp(jnp.ones(2))  # pyright: ignore[reportCallIssue]
assert_type(own_vjp_remat(jnp.ones(2)), str)
assert_type(slope(model, jnp.ones(2)), tuple[Affine, str])
out, _ = eqx.filter_jvp(loss, (model, jnp.ones(2)), (model, None))
assert_type(out, jax.Array)
out, f_jvp = eqx.filter_linearize(loss, model, jnp.ones(2))
assert_type(out, jax.Array)
out, pullback = eqx.filter_vjp(loss, model, jnp.ones(2))
assert_type(out, jax.Array)
assert_type(pullback(out)[0], Any)
out, pullback, aux = eqx.filter_vjp(saving_block, jnp.ones(2), has_aux=True)
assert_type(aux, str)
converted = eqx.filter_closure_convert(double, jax.ShapeDtypeStruct((2,), jnp.float32))
assert_type(converted(jnp.ones(2)), jax.Array)
jacobian = eqx.filter_jacfwd(loss)
jacobian(model, jnp.ones(2))
jacobian(model)  # pyright: ignore[reportCallIssue]
jac, name = eqx.filter_jacrev(saving_block, has_aux=True)(jnp.ones(2))
assert_type(name, str)
eqx.filter_make_jaxpr(loss)(model)  # pyright: ignore[reportCallIssue]

# Trees keep their type where the value does.
assert_type(eqx.apply_updates(model, gradient), Affine)
assert_type(eqx.tree_at(lambda m: m.weight, model, jnp.zeros((2, 2))), Affine)
