"""The public names as a user's type checker sees them: checked by pyright, never run.

`reportUnnecessaryTypeIgnoreComment` makes each ignored error one that must occur.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import abc
from typing import Any, Generic, TypeVar, assert_type

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
assert_type(eqx.tree_at("weight", model, jnp.zeros((2, 2))), Affine)
assert_type(eqx.tree_at(["weight", "bias"], model, replace_fn=jnp.zeros_like), Affine)
mask: object = jax.tree.map(eqx.is_array, model)
assert_type(eqx.tree_at(mask, model, replace_fn=jnp.zeros_like), Affine)
eqx.tree_at(lambda m: m.missing, model, 0)  # pyright: ignore[reportAttributeAccessIssue]
assert_type(eqx.tree_copy(model), Affine)
assert_type(eqx.tree_inference(model), Affine)
assert_type(eqx.nn.inference_mode(model, value=False), Affine)
assert_type(eqx.tree_inference(model, where=lambda m: m.bias), Affine)
eqx.tree_inference(model, where=lambda m: m.missing)  # pyright: ignore[reportAttributeAccessIssue]
eqx.tree_check(model)


# An item is an instance of its enumeration.
class Results(eqx.Enumeration):
    success = "All is well."


class MoreResults(Results):
    failure = "All is lost."


result = Results.where(True, Results.success, Results.success)
assert_type(result, Results)
assert_type(result.is_traced(), bool)
assert_type(MoreResults.promote(result), MoreResults)
assert_type(Results[result], str)
assert_type(len(Results), int)


# A field with a converter takes what the converter takes.
def to_array(x: float | list[float]) -> jax.Array:
    return jnp.asarray(x)


class Converted(eqx.Module):
    x: jax.Array = eqx.field(converter=to_array)
    n: int = eqx.field(static=True, default=3, kw_only=True)


assert_type(Converted([1.0]).x, jax.Array)
Converted(1.0, n=4)
Converted("1.0")  # pyright: ignore[reportArgumentType]
Converted(1.0, 4)  # pyright: ignore[reportCallIssue]


# Generics, abstract variables, abstract methods.
T = TypeVar("T")


assert_type(eqx.error_if(model, jnp.ones(2) > 3, "too large"), Affine)
assert_type(eqx.branched_error_if(jnp.ones(2), False, 0, ["a", "b"]), jax.Array)
eqx.error_if(model, False, 3)  # pyright: ignore[reportArgumentType]
eqx.error_if(model, False, "a", on_error=1)  # pyright: ignore[reportArgumentType]


class Box(eqx.Module, Generic[T]):
    content: T

    def get(self) -> T:
        return self.content


assert_type(Box(3).get(), int)
assert_type(Box(model).content, Affine)


class Solver(eqx.Module):
    order: eqx.AbstractClassVar[int]
    scale: eqx.AbstractVar[float]

    @abc.abstractmethod
    def step(self, x: jax.Array) -> jax.Array: ...

    def doubled_scale(self) -> float:
        return 2 * self.scale


class Euler(Solver):
    order: int = 1
    scale: float = 0.5

    def step(self, x: jax.Array) -> jax.Array:
        return self.scale * x


assert_type(Euler().step(jnp.ones(2)), jax.Array)
assert_type(Euler.order, int)
assert_type(Euler(scale=1.0).doubled_scale(), float)
Solver(order=1, scale=1.0)  # pyright: ignore[reportAbstractUsage]


class Own(eqx.Module):
    weight: jax.Array
    inner: Affine | None

    def __init__(self, size: int, *, inner: Affine | None = None):
        self.weight = jnp.ones(size)
        self.inner = inner

    @eqx.filter_jit(donate="none")
    def scaled(self, by: float) -> jax.Array:
        return by * self.weight

    @property
    def size(self) -> int:
        return self.weight.shape[0]


assert_type(Own(3).scaled(2.0), jax.Array)
assert_type(Own(3).size, int)
Own("3")  # pyright: ignore[reportArgumentType]
Own(3).scaled("2")  # pyright: ignore[reportArgumentType]
