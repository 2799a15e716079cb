"""A ResNet with BatchNorm, written for Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Block(eqx.nn.StatefulLayer):
    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    conv2: eqx.nn.SpectralNorm
    norm2: eqx.nn.BatchNorm
    shortcut: eqx.Module

    def __init__(self, channels, out, stride, mode, *, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(
            channels, out, 3, stride, padding=1, use_bias=False, key=k1
        )
        self.norm1 = eqx.nn.BatchNorm(out, axis_name="batch", mode=mode)
        self.conv2 = eqx.nn.SpectralNorm(
            eqx.nn.Conv2d(out, out, 3, padding="SAME", use_bias=False, key=k2),
            weight_name="weight",
            key=k3,
        )
        self.norm2 = eqx.nn.BatchNorm(out, axis_name="batch", mode=mode)
        if stride == 1 and channels == out:
            self.shortcut = eqx.nn.Identity()
        else:
            self.shortcut = eqx.nn.Conv2d(channels, out, 1, stride, key=k4)

    def __call__(self, x, state, *, key=None):
        y = self.conv1(x)
        y, state = self.norm1(y, state)
        y, state = self.conv2(jax.nn.relu(y), state)
        y, state = self.norm2(y, state)
        return jax.nn.relu(y + self.shortcut(x)), state


def make_resnet(key, mode):
    keys = jax.random.split(key, 4)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(2, 4, 3, padding=1, key=keys[0]),
            eqx.nn.MaxPool2d(2, 2),
            Block(4, 4, 1, mode, key=keys[1]),
            Block(4, 6, 2, mode, key=keys[2]),
            eqx.nn.AdaptiveAvgPool2d(1),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.WeightNorm(eqx.nn.Linear(6, 3, key=keys[3])),
        ]
    )


def compute_loss(model, state, xs, ys):
    batch_model = jax.vmap(
        model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    pred, state = batch_model(xs, state)
    return jnp.mean((pred - ys) ** 2), state


@eqx.filter_jit
def make_step(model, state, xs, ys):
    compute = eqx.filter_value_and_grad(compute_loss, has_aux=True)
    (loss, state), grads = compute(model, state, xs, ys)
    updates = jax.tree_util.tree_map(lambda g: -0.1 * g, grads)
    return eqx.apply_updates(model, updates), state, loss


def run(key):
    outs = []
    for mode in ("batch", "ema"):
        model, state = eqx.nn.make_with_state(make_resnet)(key, mode)
        xs = jax.random.normal(key, (4, 2, 8, 8))
        for _ in range(2):
            model, state, _ = make_step(model, state, xs, jnp.ones((4, 3)))
        index = model[3].norm1.batch_state_index or model[3].norm1.ema_state_index
        outs += [state.get(index)[0], state.get(index)[1], model[3].norm1.weight]
        _, state, loss = make_step(model, state, xs, jnp.ones((4, 3)))
        outs.append(loss)
        if mode == "ema":
            resting = eqx.nn.inference_mode(model)
            apply = eqx.filter_jit(jax.vmap(resting, in_axes=(0, None)))
            outs.append(apply(xs, state)[0][0])
    return outs
