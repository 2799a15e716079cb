"""A classifier of 28 x 28 images with one hidden layer, trained by AdamW."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


def cross_entropy(logits, labels):
    logits = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


@eqx.filter_jit
def compute_loss(model, images, labels):
    logits = jax.vmap(lambda image: model(image.ravel()))(images)
    return cross_entropy(logits, labels), jnp.mean(logits.argmax(1) == labels)


@eqx.filter_jit
def make_step(model, opt_state, optim, images, labels):
    loss = eqx.filter_value_and_grad(compute_loss, has_aux=True)
    (value, _), grads = loss(model, images, labels)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, value


def run(key):
    mkey, ikey, lkey = jr.split(key, 3)
    model = eqx.nn.MLP(28 * 28, 10, 16, 2, key=mkey)
    images = jr.normal(ikey, (8, 1, 28, 28))
    labels = jr.randint(lkey, (8,), 0, 10)
    optim = optax.adamw(3e-3)
    opt_state = optim.init(eqx.filter(model, eqx.is_array))
    losses = []
    for _ in range(3):
        model, opt_state, loss = make_step(model, opt_state, optim, images, labels)
        losses.append(loss)
    return {"losses": losses, "resting": compute_loss(model, images, labels)}
