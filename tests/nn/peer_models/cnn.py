"""A convolutional classifier whose layers, functions among them, are a list."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        k1, k2, k3 = jr.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=k1),
            eqx.nn.MaxPool2d(kernel_size=5, stride=4),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(108, 16, key=k2),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, 10, key=k3),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compute_loss(params, static, images, labels):
    model = eqx.combine(params, static)
    return -jnp.mean(jax.vmap(model)(images)[jnp.arange(len(labels)), labels])


def run(key):
    mkey, ikey, lkey = jr.split(key, 3)
    model = CNN(mkey)
    images = jr.normal(ikey, (4, 1, 28, 28))
    labels = jr.randint(lkey, (4,), 0, 10)
    optim = optax.adamw(1e-2)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        loss, grads = jax.value_and_grad(compute_loss)(params, static, images, labels)
        updates, opt_state = optim.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(3):
        model, opt_state, loss = make_step(model, opt_state)
        losses.append(loss)
    kernel = model.layers[0].weight
    return {
        "losses": losses,
        "kernel": kernel[:, 0, 0, 0],
        "bias": model.layers[0].bias,
    }
