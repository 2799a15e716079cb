"""What pyright and mypy both see: checked by them, never run.

    mypy --warn-unused-ignores tests/typing/both.py

`mypy` is run by hand; it needs an environment with the library, JAX and jaxtyping.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp

import equinox_like as eqx

key = jax.random.key(0)
x = jnp.ones(8)


class Scaled(eqx.Module):
    by: jax.Array

    def __call__(self, x: jax.Array, power: int = 1) -> jax.Array:
        return self.by**power * x


class Own(eqx.Module):
    size: int
    inner: Scaled

    def __init__(self, size: int):
        self.size = size
        self.inner = Scaled(jnp.ones(size))


# A name that is no field can be neither assigned nor deleted.
scaled = Scaled(jnp.ones(()))
scaled.bye = 4  # type: ignore
del scaled.nothing  # type: ignore
Own(3).inner.bye = 4  # type: ignore
eqx.nn.Linear(8, 8, key=key).wieght = x  # type: ignore


def loss(model: Scaled, x: jax.Array) -> jax.Array:
    return model(x).sum()


compiled = eqx.filter_jit(loss)
compiled.nothing = 1  # type: ignore

# A state has the type that it starts with.
index = eqx.nn.StateIndex(jnp.array(1))
assert_type(index, eqx.nn.StateIndex[jax.Array])
assert_type(index.init, jax.Array)
state = eqx.nn.State(index)
assert_type(state.get(index), jax.Array)
pair = eqx.nn.StateIndex((x, x))
assert_type(state.get(pair), tuple[jax.Array, jax.Array])
state.set(index, "text")  # type: ignore

# What wraps a layer keeps its type, is called as it is, and returns what it returns.
linear = eqx.nn.Linear(8, 8, key=key)
mlp = eqx.nn.MLP(8, 8, 8, 2, key=key)
mixed = eqx.nn.mixed(scaled, "bf16")
assert_type(mixed, eqx.nn.Mixed[Scaled])
assert_type(mixed.layer, Scaled)
assert_type(mixed(x, power=2), jax.Array)
mixed(x, pwoer=2)  # type: ignore
assert_type(eqx.nn.mixed(mlp, "bf16")(x), jax.Array)
lora = eqx.nn.LoRA(linear, 2, key=key)
assert_type(lora, eqx.nn.LoRA[eqx.nn.Linear])
assert_type(lora(x), jax.Array)
lora(x, caceh=1)  # type: ignore
assert_type(eqx.nn.LoRA(scaled, 2, key=key)(x, 2), jax.Array)
quantised = eqx.nn.Quantized(linear)
assert_type(quantised, eqx.nn.Quantized[eqx.nn.Linear])
assert_type(quantised(x), jax.Array)
quantised(x, caceh=1)  # type: ignore
weight_norm = eqx.nn.WeightNorm(linear)
assert_type(weight_norm, eqx.nn.WeightNorm[eqx.nn.Linear])
assert_type(weight_norm(x), jax.Array)
spectral = eqx.nn.SpectralNorm(linear, "weight", key=key)
assert_type(spectral, eqx.nn.SpectralNorm[eqx.nn.Linear])
assert_type(spectral(x, state), tuple[jax.Array, eqx.nn.State])
ema = eqx.nn.EMA(mlp, decay=0.9)
assert_type(ema.model(), eqx.nn.MLP)
assert_type(ema.update(mlp), eqx.nn.EMA[eqx.nn.MLP])
stacked = eqx.nn.Stacked(lambda key: scaled, 3, key=key)
assert_type(stacked, eqx.nn.Stacked[Scaled])
assert_type(stacked[0], Scaled)
assert_type(stacked(x), jax.Array)
shared = eqx.nn.Shared((linear, scaled), where="[0].bias", get="[1].by")
assert_type(shared(), tuple[eqx.nn.Linear, Scaled])
assert_type(eqx.nn.Lambda(jax.nn.relu)(x), jax.Array)
assert_type(eqx.nn.Lambda(len)(x), int)
assert_type(eqx.unfrozen(mlp), eqx.nn.MLP)
assert_type(eqx.tree_inference(mlp), eqx.nn.MLP)
assert_type(eqx.Partial(scaled, x)(), jax.Array)

# A chain of layers of arrays returns an array; of another one nothing is known.
chain = eqx.nn.Sequential([linear, jax.nn.relu, eqx.nn.Lambda(jnp.tanh)])
assert_type(chain, eqx.nn.Sequential[jax.Array])
assert_type(chain(x, key=key), jax.Array)
assert_type(chain(x, state), tuple[jax.Array, eqx.nn.State])
assert_type(chain[1:](x), jax.Array)
assert_type(eqx.filter_jit(chain)(x), jax.Array)
assert_type(eqx.nn.mixed(chain, "bf16"), eqx.nn.Mixed[eqx.nn.Sequential[jax.Array]])
assert_type(eqx.nn.mixed(chain, "bf16")(x, key=key), jax.Array)
assert_type(eqx.nn.mixed(chain, "bf16")(x, state, key=key), tuple[Any, eqx.nn.State])
assert_type(eqx.filter_jit(eqx.nn.mixed(chain, "bf16"))(x, state)[1], eqx.nn.State)
eqx.nn.mixed(linear, "bf16")(x, state)  # type: ignore
norm = eqx.nn.BatchNorm(8, "batch")
assert_type(eqx.nn.Sequential([linear, norm])(x, state)[0], jax.Array)
assert_type(eqx.nn.Sequential([chain, linear])(x), jax.Array)
dropout, skip = eqx.nn.Dropout(0.5), eqx.nn.ReversibleBlock(linear, linear)
assert_type(eqx.nn.Sequential([linear, dropout, eqx.nn.Identity(), skip])(x), jax.Array)
assert_type(eqx.nn.Sequential([linear, len])(x), Any)
assert_type(eqx.nn.Sequential([linear, len]), eqx.nn.Sequential[Any])


class Block(eqx.Module):
    layers: eqx.nn.Sequential
    index: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.layers = eqx.nn.Sequential([linear])
        self.index = eqx.nn.StateIndex(jnp.array(0))


# The result has the class of the model, and structs in place of its arrays.
assert_type(eqx.filter_eval_shape(eqx.nn.MLP, 8, 8, 8, 2, key=key), eqx.nn.MLP)
assert_type(eqx.filter_eval_shape(loss, scaled, x), Any)
assert_type(eqx.filter_eval_shape(Block).layers, eqx.nn.Sequential[Any])


def several() -> tuple[Block, int]:
    return Block(), 3


assert_type(eqx.filter_eval_shape(several), Any)


def with_state() -> tuple[Block, eqx.nn.State]:
    return eqx.nn.make_with_state(Block)()


assert_type(eqx.filter_eval_shape(with_state), tuple[Block, eqx.nn.State])
