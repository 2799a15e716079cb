"""The layers as a user's type checker sees them: checked by pyright, never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp

import equinox_like as eqx

key = jax.random.key(0)
x = jnp.ones((5, 8))

# Attention returns an array, unless it has a cache or returns its weights.
attention = eqx.nn.MultiheadAttention(2, 8, key=key)
cache = attention.init_cache(5)
assert_type(attention(x, x, x), jax.Array)
assert_type(attention(x, x, x, None, is_causal=True, window=2), jax.Array)
assert_type(attention(x, x, x, cache=cache), Any)
assert_type(attention(x, x, x, return_weights=True), Any)
assert_type(jax.vmap(attention)(x, x, x), jax.Array)
assert_type(eqx.filter_jit(attention)(x, x, x), jax.Array)
# Of a layer with other overloads, the type of a transformed call is that of the first one.
eqx.filter_jit(attention)(x, x, x, cache=cache)  # pyright: ignore[reportArgumentType]
attention(x, x, x, caceh=cache)  # pyright: ignore[reportCallIssue]
attention(x, x, x, cache="x")  # pyright: ignore[reportCallIssue, reportArgumentType]


# A norm returns a state as it is.
for norm in (
    eqx.nn.LayerNorm(8),
    eqx.nn.RMSNorm(8),
    eqx.nn.GroupNorm(2, 8),
    eqx.nn.InstanceNorm(8),
):
    assert_type(norm(x), jax.Array)
    assert_type(norm(x, {"a": 1}), tuple[jax.Array, dict[str, int]])
    assert_type(norm(x, eqx.nn.State(norm)), tuple[jax.Array, eqx.nn.State])


# So do a chain and a norm that are compiled or mapped.
chain = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=key)])
chain_state = eqx.nn.State(chain)
compiled = eqx.filter_jit(chain)
assert_type(compiled(x), jax.Array)
assert_type(compiled(x, key=key), jax.Array)
assert_type(compiled(x, chain_state), tuple[jax.Array, eqx.nn.State])
compiled(x, chain_state, 3)  # pyright: ignore[reportCallIssue]
compiled.lower(x, chain_state).compile()
jax.vmap(compiled)(x)
mapped = eqx.filter_vmap(chain, in_axes=(0, None))
assert_type(mapped(x, chain_state), tuple[jax.Array, eqx.nn.State])
assert_type(eqx.filter_jit(mapped)(x), jax.Array)
assert_type(eqx.filter_jit(eqx.nn.LayerNorm(8))(x, 3), tuple[jax.Array, int])


# A stateful layer of a user need not take a key.
class Counted(eqx.nn.StatefulLayer):
    def __call__(
        self, x: jax.Array, state: eqx.nn.State
    ) -> tuple[jax.Array, eqx.nn.State]:
        return x, state


# A wrapper returns what its layer returns, and keeps its type.
linear = eqx.nn.Linear(8, 8, key=key)
state = eqx.nn.State(linear)
spectral = eqx.nn.SpectralNorm(linear, "weight", key=key)
assert_type(spectral, eqx.nn.SpectralNorm[eqx.nn.Linear])
assert_type(spectral(x[0], state), tuple[jax.Array, eqx.nn.State])
assert_type(eqx.nn.WeightNorm(linear)(x[0]), jax.Array)
assert_type(eqx.nn.WeightNorm(eqx.nn.LayerNorm(8))(x[0]), jax.Array)
assert_type(jax.vmap(eqx.nn.WeightNorm(linear))(x), jax.Array)
assert_type(eqx.filter_vmap(eqx.nn.WeightNorm(linear))(x), jax.Array)

lora = eqx.nn.LoRA(linear, 2, key=key)
assert_type(lora, eqx.nn.LoRA[eqx.nn.Linear])
assert_type(lora.merge().layer, eqx.nn.Linear)
assert_type(lora.merge().unmerge().layer.use_bias, bool)
assert_type(lora.in_features, Any)

quantised = eqx.nn.Quantized(linear, bits=4, group_size=8)
assert_type(quantised, eqx.nn.Quantized[eqx.nn.Linear])
assert_type(quantised.dequantized(), eqx.nn.Linear)
assert_type(jax.vmap(quantised)(x), jax.Array)
eqx.nn.Quantized(linear, bits=3)  # pyright: ignore[reportArgumentType]

mlp = eqx.nn.MLP(8, 8, 8, 2, key=key)
assert_type(eqx.nn.quantize(mlp, "**"), eqx.nn.MLP)
assert_type(mlp.layers[-1].weight, jax.Array)
ema = eqx.nn.EMA(mlp, decay=0.9)
assert_type(ema, eqx.nn.EMA[eqx.nn.MLP])
assert_type(ema.model(), eqx.nn.MLP)
assert_type(ema.update(mlp).model()(x[0]), jax.Array)
assert_type(ema.update(eqx.apply_updates(mlp, mlp)), eqx.nn.EMA[eqx.nn.MLP])

# What is built in its shards has the type that the function returns.
mesh = jax.make_mesh((1,), ("x",))
made = eqx.Layout(mesh, []).init(eqx.nn.MLP, 8, 8, 8, 2, key=key)
assert_type(made, eqx.nn.MLP)


# A step within a layout has the arguments and the result of the function.
@eqx.Layout(mesh, []).jit(donate="all")
def step(model: eqx.nn.MLP, x: jax.Array) -> tuple[eqx.nn.MLP, jax.Array]:
    return model, model(x)


assert_type(step(mlp, x[0]), tuple[eqx.nn.MLP, jax.Array])
step(mlp, "x")  # pyright: ignore[reportArgumentType]


# The first flag that is not None may be an array, if a flag may be one.
def flags(flag: bool | None, traced: bool | jax.Array | None) -> None:
    assert_type(eqx.is_inference(), bool)
    assert_type(eqx.is_inference(flag, None, True), bool)
    assert_type(eqx.is_inference(flag, traced), bool | jax.Array)


# Layers of a fixed number of axes are constructed without it.
assert_type(eqx.nn.Conv1d(1, 2, 3, key=key).weight, jax.Array)
assert_type(eqx.nn.ConvTranspose2d(1, 2, 3, stride=2, key=key).weight, jax.Array)
eqx.nn.MaxPool1d(3, stride=2)
eqx.nn.AvgPool2d(3)
eqx.nn.Conv2d(1, 2, 3)  # pyright: ignore[reportCallIssue] -- there is no key
