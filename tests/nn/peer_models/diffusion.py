"""Score-based diffusion with an MLP-Mixer: training, and the reverse process."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, patches, hidden, *, key):
        k1, k2 = jr.split(key)
        self.patch_mixer = eqx.nn.MLP(patches, patches, 8, 1, key=k1)
        self.hidden_mixer = eqx.nn.MLP(hidden, hidden, 8, 1, key=k2)
        self.norm1 = eqx.nn.LayerNorm((hidden, patches))
        self.norm2 = eqx.nn.LayerNorm((patches, hidden))

    def __call__(self, y):
        y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
        y = y.T
        y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
        return y.T


class Mixer2d(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    blocks: list
    norm: eqx.nn.LayerNorm
    t1: float = eqx.field(static=True)

    def __init__(self, size, patch, hidden, depth, t1, *, key):
        inkey, outkey, *bkeys = jr.split(key, 2 + depth)
        patches = (size // patch) ** 2
        self.conv_in = eqx.nn.Conv2d(2, hidden, patch, stride=patch, key=inkey)
        self.conv_out = eqx.nn.ConvTranspose2d(
            hidden, 1, patch, stride=patch, key=outkey
        )
        self.blocks = [MixerBlock(patches, hidden, key=bkey) for bkey in bkeys]
        self.norm = eqx.nn.LayerNorm((hidden, patches))
        self.t1 = t1

    def __call__(self, t, y, *, key=None):
        t = jnp.full((1, *y.shape[1:]), t / self.t1)
        y = self.conv_in(jnp.concatenate([y, t]))
        hidden, *patches = y.shape
        y = y.reshape(hidden, -1)
        for block in self.blocks:
            y = block(y)
        return self.conv_out(self.norm(y).reshape(hidden, *patches))


def single_loss(model, data, t, key):
    mean = data * jnp.exp(-0.5 * t)
    std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
    noise = jr.normal(key, data.shape)
    pred = model(t, mean + std * noise, key=key)
    return (1 - jnp.exp(-t)) * jnp.mean((pred + noise / std) ** 2)


def batch_loss(model, data, key):
    tkey, losskey = jr.split(key)
    size = data.shape[0]
    t = jr.uniform(tkey, (size,), minval=0, maxval=model.t1 / size)
    t = t + (model.t1 / size) * jnp.arange(size)
    loss = jax.vmap(ft.partial(single_loss, model))
    return jnp.mean(loss(data, t, jr.split(losskey, size)))


@eqx.filter_jit
def make_step(model, data, key, opt_state, update):
    loss, grads = eqx.filter_value_and_grad(batch_loss)(model, data, key)
    updates, opt_state = update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


@eqx.filter_jit
def sample(model, y, steps):
    dt = model.t1 / steps

    def euler(i, y):
        t = model.t1 - i * dt
        return y + dt * 0.5 * (y + model(t, y))

    return jax.lax.fori_loop(0, steps, euler, y)


def run(key):
    mkey, dkey, lkey, skey = jr.split(key, 4)
    model = Mixer2d(8, 4, 6, 1, 10.0, key=mkey)
    data = jr.normal(dkey, (4, 1, 8, 8))
    optim = optax.adabelief(1e-2)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(3):
        loss, model, opt_state = make_step(model, data, lkey, opt_state, optim.update)
        losses.append(loss)
    images = sample(model, jr.normal(skey, (1, 8, 8)), 10)
    return {"losses": losses, "image": images[0, 0, :4]}
