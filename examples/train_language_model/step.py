"""What is compiled: the start of training, one step of it, and the evaluation."""

import jax
import jax.numpy as jnp
import optax
from config import Config
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray
from model import make_model

import equinox_like as eqx


class TrainState(eqx.Module):
    """All that changes from step to step, and that a checkpoint holds."""

    model: eqx.Module
    opt_state: optax.OptState
    ema: eqx.nn.EMA
    step: Array
    key: PRNGKeyArray


def make_schedule(config: Config) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=config.steps,
        end_value=config.learning_rate / 10,
    )


def make_optimiser(config: Config) -> optax.GradientTransformation:
    schedule = make_schedule(config)
    return optax.chain(
        optax.clip_by_global_norm(config.max_norm),
        optax.adamw(schedule, weight_decay=config.weight_decay, mask=decayed),
    )


def decayed(params):
    """Which parameters have weight decay: all but those of norms."""
    every = jax.tree.map(lambda _: True, params)
    norms = eqx.select(every).of(eqx.nn.RMSNorm)
    return norms.apply(lambda norm: jax.tree.map(lambda _: False, norm))


def init_state(config: Config) -> TrainState:
    model_key, key = jax.random.split(jax.random.key(config.seed))
    model = make_model(config, key=model_key)
    opt_state = make_optimiser(config).init(eqx.filter(model, eqx.trainable))
    ema = eqx.nn.EMA(model, config.ema_decay)
    return TrainState(model, opt_state, ema, jnp.zeros((), jnp.int32), key)


def loss_fn(model, tokens: Array, key: PRNGKeyArray | None = None) -> Array:
    """The mean cross-entropy per byte, in nats, of `tokens`, `(batch, context + 1)`."""
    model = eqx.gather(model)
    if key is None:
        logits, _ = jax.vmap(model)(tokens[:, :-1])
    else:  # each sequence has its own dropout
        keys = eqx.constrain(jax.random.split(key, len(tokens)), "batch")
        logits, _ = jax.vmap(lambda x, key: model(x, key=key))(tokens[:, :-1], keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def accumulate(model, batches: ArrayLike, key: PRNGKeyArray):
    """The loss and its gradient, as means over micro-batches, one after the other.

    `batches` has the shape `(batch, micro_batches, context + 1)`.
    """

    def add(total, batch):
        new = eqx.filter_value_and_grad(loss_fn)(model, *batch)
        return jax.tree.map(jnp.add, total, new), None

    zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.trainable))
    batches = jnp.swapaxes(batches, 0, 1)
    keys = jax.random.split(key, len(batches))
    total, _ = eqx.filter_scan(add, (jnp.zeros(()), zeros), (batches, keys))
    return jax.tree.map(lambda x: x / len(keys), total)


def train_step(state: TrainState, batches: ArrayLike, config: Config):
    """The next state, and what to log. `config` is static."""
    key = jax.random.fold_in(state.key, state.step)
    loss, grads = accumulate(state.model, batches, key)
    params = eqx.filter(state.model, eqx.trainable)
    updates, opt_state = make_optimiser(config).update(grads, state.opt_state, params)
    model = eqx.apply_updates(state.model, updates)
    metrics = {
        "training_loss": loss,
        "gradient_norm": optax.tree.norm(grads),
        "learning_rate": make_schedule(config)(state.step),
    }
    ema = state.ema.update(model)
    return TrainState(model, opt_state, ema, state.step + 1, state.key), metrics


def evaluate(ema: eqx.nn.EMA, batches: ArrayLike) -> Array:
    """The loss of the averaged model on held-out text, without dropout."""
    model = eqx.nn.inference_mode(ema.model())
    batches = jnp.swapaxes(batches, 0, 1)
    return jax.lax.map(lambda tokens: loss_fn(model, tokens), batches).mean()
