"""The public names as a user's type checker sees them: checked by pyright, never run.

`reportUnnecessaryTypeIgnoreComment` makes each ignored error one that must occur.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import abc
import functools
import io
from typing import Any, Generic, TypeVar, assert_type

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

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

# A Module has a hash, if its leaves do.
named = {model: "first"}


# A transformed function keeps its signature, in each way of writing it.
@eqx.filter_jit
def plain(model: Affine, x: jax.Array) -> jax.Array:
    return model(x)


@eqx.filter_jit(donate="all-except-first")
def donating(x: jax.Array, model: Affine) -> Affine:
    return model


@functools.partial(eqx.filter_value_and_grad, has_aux=True)
def configured(model: Affine, x: jax.Array) -> tuple[jax.Array, int]:
    return model(x), 1


assert_type(plain(model, jnp.ones(2)), jax.Array)
assert_type(plain(model, x=jnp.ones(2)), jax.Array)
assert_type(configured(model, jnp.ones(2))[0], tuple[jax.Array, int])
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
assert_type(plain.donation_report(model, shape).rows[0].path, str)
retrace = plain.explain(model, shape)
assert_type(str(retrace) if retrace else None, str | None)
plain.explane()  # pyright: ignore[reportAttributeAccessIssue]


def loss(model: Affine, x: jax.Array) -> jax.Array:
    return jnp.sum(model(x))


# A gradient has `None` where nothing is differentiated, so it is not an `Affine`; and
# Optax's annotations allow no Module.
value, gradient = eqx.filter_value_and_grad(loss)(model, jnp.ones(2))
assert_type(value, jax.Array)
assert_type(gradient, Any)
optimiser = optax.adam(1e-3)


@eqx.filter_jit(donate="all")
def train_step(
    model: Affine, opt_state: optax.OptState, x: jax.Array
) -> tuple[Affine, optax.OptState, jax.Array]:
    value, grads = eqx.filter_value_and_grad(loss)(model, x)
    params = eqx.filter(model, eqx.trainable)
    updates, opt_state = optimiser.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, value


# The parameters of a lambda have no type: anything may be done with them.
eqx.filter_grad(lambda m: m(jnp.ones(2)).sum())(model)
eqx.filter_value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones(2))
eqx.filter_value_and_grad(lambda m: (m(jnp.ones(2)).sum(), m.name), has_aux=True)(model)

# A wrapper has the type of what it wraps.
norm = eqx.nn.WeightNorm(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
assert_type(norm, eqx.nn.WeightNorm[eqx.nn.Linear])
assert_type(norm.layer.use_bias, bool)
assert_type(eqx.Partial(len), eqx.Partial[int])
assert_type(eqx.Partial(len)([]), int)


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
assert_type(slope(model, jnp.ones(2)), tuple[Any, str])
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
linear_out, tangent_of = eqx.filter_linearize(saving_block, jnp.ones(2))
assert_type(linear_out, tuple[jax.Array, str])
tangent_of(jnp.ones(2))


@eqx.filter_custom_vmap
def own_vmap(model: Affine, x: jax.Array) -> jax.Array:
    return model(x)


@own_vmap.def_vmap
def own_rule(size: int, batched: Any, model: Affine, x: jax.Array) -> Any:
    return x, True


assert_type(own_vmap(model, x=jnp.ones(2)), jax.Array)
own_vmap(model)  # pyright: ignore[reportCallIssue]


@eqx.filter_invertible
def chain(block: Affine, x: tuple[jax.Array, str]) -> tuple[jax.Array, str]:
    return block(x[0]), x[1]


@eqx.filter_invertible(inverse=lambda block, y: y - block, check=True)
def shifts(block: jax.Array, x: jax.Array) -> jax.Array:
    return x + block


assert_type(chain([model, model], (jnp.ones(2), "")), tuple[jax.Array, str])
assert_type(chain(model, (jnp.ones(2), "")), tuple[jax.Array, str])
chain([model], jnp.ones(2))  # pyright: ignore[reportArgumentType]
assert_type(shifts((jnp.ones(2),), jnp.ones(2)), jax.Array)


# What runs a model with its values read or replaced is called like the model.
captured = eqx.capture(model, "**")
assert_type(captured(jnp.ones(2)), tuple[jax.Array, dict[str, Any]])
captured("x")  # pyright: ignore[reportArgumentType]
intervened = eqx.intervene(loss, {"name": jnp.sin})
assert_type(intervened(model, x=jnp.ones(2)), jax.Array)
assert_type(eqx.capture(intervened, "name")(model, jnp.ones(2))[0], jax.Array)


# Control flow: a carry keeps its type, and branches get the arguments.
def step(model: Affine, x: jax.Array) -> tuple[Affine, str]:
    return model, "name"


assert_type(eqx.filter_scan(step, model, jnp.ones((3, 2))), tuple[Affine, str])
last, rows = eqx.filter_scan(lambda m, x: (m, m(x)), model, jnp.ones((3, 2)))
assert_type(last, Affine)
assert_type(rows, jax.Array)
eqx.filter_scan(step, 0, jnp.ones(3))  # pyright: ignore[reportArgumentType]
assert_type(eqx.filter_map(lambda x: (x, model), jnp.ones(3)), tuple[jax.Array, Affine])
assert_type(eqx.filter_while_loop(lambda m: m.weight.any(), lambda m: m, model), Affine)
assert_type(eqx.filter_fori_loop(0, 3, lambda i, m: m, model), Affine)
eqx.filter_fori_loop(0, 3, lambda i, m: m.missing, model)  # pyright: ignore[reportAttributeAccessIssue]
assert_type(eqx.filter_cond(True, double, lambda x: x, jnp.ones(2)), jax.Array)
assert_type(eqx.filter_cond(True, lambda m: m.name, lambda m: "", model), str)
eqx.filter_cond(True, double, double, "x")  # pyright: ignore[reportArgumentType]
assert_type(eqx.filter_switch(0, [model, double], jnp.ones(2)), jax.Array)
eqx.filter_switch(0, [model, double])  # pyright: ignore[reportArgumentType]


# Many devices.
@eqx.filter_shard_map(in_specs=(None, PartitionSpec("x")), out_specs=PartitionSpec("x"))
def sharded(model: Affine, x: jax.Array) -> jax.Array:
    return model(x)


assert_type(sharded(model, x=jnp.ones(2)), jax.Array)
sharded(model)  # pyright: ignore[reportCallIssue]
assert_type(eqx.filter_shard(model, PartitionSpec("x")), Affine)
assert_type(eqx.filter_device_put(model, donate=True), Affine)

# Layers in layers.
stacked = eqx.nn.Stacked(lambda key: Box(model), 3, key=jax.random.key(0))
assert_type(stacked[0].content, Affine)
assert_type(stacked.layers.content, Affine)
assert_type(stacked.unstack(), "tuple[Box[Affine], ...]")
assert_type(eqx.nn.Stacked.from_layers([model])[-1], Affine)
reversible = eqx.nn.ReversibleSequential(
    [eqx.nn.ReversibleBlock(double, model, split_axis=1)], memory_efficient=False
)
assert_type(reversible(jnp.ones(2), key=jax.random.key(0)), jax.Array)
assert_type(reversible.inverse((jnp.ones(2), jnp.ones(2))), tuple[jax.Array, jax.Array])
eqx.nn.ReversibleSequential(stacked)
eqx.nn.ReversibleSequential(3)  # pyright: ignore[reportArgumentType]

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
linears = eqx.select(model).of(eqx.nn.Linear)
assert_type([node.weight for _, node in linears], list[jax.Array])
assert_type(linears.where(lambda node: node.use_bias).get(), tuple[eqx.nn.Linear, ...])
assert_type(linears.apply(lambda path, node: node.weight), Affine)
linears.apply(lambda node: node.wieght)  # pyright: ignore[reportAttributeAccessIssue]
assert_type(eqx.select(model).of(eqx.nn.Linear, Affine).get(), tuple[Any, ...])
selection: eqx.Selection[Affine] = linears


# An item is an instance of its enumeration.
class Results(eqx.Enumeration):
    success = "All is well."


class MoreResults(Results):  # pyright: ignore[reportGeneralTypeIssues]
    failure = "All is lost."


class Solution(eqx.Module):
    result: Results


solution = Solution(result=Results.success)
Solution(result="success")  # pyright: ignore[reportArgumentType]
item: Results = Results.success
assert_type(item.is_traced(), bool)
assert_type(item.error_if(jnp.ones(2), True), jax.Array)
assert_type(solution.result == Results.success, Any)
MoreResults.promote(Results.success).error_if(jnp.ones(2), True)
Results.where(solution.result != item, item, solution.result)


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


class KeywordOnly(Converted, kw_only=True):
    rate: float


KeywordOnly(1.0, rate=2.0)
KeywordOnly(1.0, 2.0)  # pyright: ignore[reportCallIssue]


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

    @classmethod
    @eqx.filter_jit
    def of_size(cls, size: int) -> "Own":
        return cls(size)

    @staticmethod
    @eqx.filter_jit
    def halved(x: jax.Array, power: int) -> jax.Array:
        return x / 2**power

    @property
    def size(self) -> int:
        return self.weight.shape[0]


assert_type(Own(3).scaled(2.0), jax.Array)
assert_type(Own.of_size(3), Own)
assert_type(Own(3).of_size(3), Own)
Own.of_size("3")  # pyright: ignore[reportArgumentType]
assert_type(Own.halved(jnp.ones(2), 1), jax.Array)
assert_type(Own(3).halved(jnp.ones(2), 1), jax.Array)
Own.halved("3", 1)  # pyright: ignore[reportArgumentType]
assert_type(Own(3).size, int)
Own("3")  # pyright: ignore[reportArgumentType]
Own(3).scaled("2")  # pyright: ignore[reportArgumentType]


# A misspelt option is seen, and so is a wrong order of arguments.
eqx.filter_jit(double, inline=True, keep_unused=True)
eqx.filter_jit(double, dontae="all")  # pyright: ignore[reportCallIssue]
eqx.filter_vmap(double, in_axs=0)  # pyright: ignore[reportCallIssue]
eqx.filter_vmap(double, spmd_axis_name="x")
eqx.filter_pmap(double, in_axs=0)  # pyright: ignore[reportCallIssue]
eqx.filter_pmap(double, donate="foo")  # pyright: ignore[reportArgumentType]
eqx.filter_grad(loss, hasaux=True)  # pyright: ignore[reportCallIssue]
eqx.filter_grad(loss, holomorphic=True)
eqx.filter_jacrev(loss, hasaux=True)  # pyright: ignore[reportCallIssue]
eqx.filter_while_loop(lambda x: x < 3, lambda x: x + 1, 0, kind="chekpointed")  # pyright: ignore[reportArgumentType]
assert_type(eqx.tree_at(lambda m: m.weight, model, replace_fn=lambda w: 2 * w), Affine)
eqx.tree_at(lambda m: m.weight, model, replace_fn=3)  # pyright: ignore[reportArgumentType]
eqx.tree_at(lambda m: m.weight, model)  # pyright: ignore[reportCallIssue]
eqx.save(model, "model")  # pyright: ignore[reportArgumentType]
assert_type(eqx.load("model", model), Affine)
assert_type(eqx.tree_deserialise_leaves("model", model), Affine)
eqx.tree_serialise_leaves(model, "model")  # pyright: ignore[reportArgumentType]
eqx.tree_serialise_leaves(io.BytesIO(), model)
eqx.tree_serialise_leaves(io.StringIO(), model)  # pyright: ignore[reportArgumentType]
assert_type(eqx.tree_equal(model, model), bool | jax.Array)
assert_type(Affine.compiled(model, jnp.ones(2)), jax.Array)
Affine.compiled.lower(model, jnp.ones(2))

# Names that do not exist are errors, although the modules answer for some of them.
print(eqx.no_such_name)  # pyright: ignore[reportAttributeAccessIssue]
print(eqx.nn.ReLU)  # pyright: ignore[reportAttributeAccessIssue]
