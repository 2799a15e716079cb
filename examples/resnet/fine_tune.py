"""Fine-tunes a pretrained ResNet-18 on scikit-learn's handwritten digits.

python fine_tune.py WEIGHTS [--all] [--size 64] [--epochs 3]

WEIGHTS is a safetensors file with the names of torchvision. Only the new head is trained,
or with `--all` everything.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import resnet
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import equinox_like as eqx

BACKBONE = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]
BATCH = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}


def load_data(size: int):
    """Images as the network was trained with: RGB, `size` by `size`, normalised."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 8, 8) / 16
    images = jax.image.resize(images, (len(images), size, size), "bilinear")
    images = (images[:, None] - resnet.MEAN[:, None, None]) / resnet.STD[:, None, None]
    labels = labels.astype(np.int32)
    return train_test_split(np.asarray(images), labels, test_size=0.2, random_state=0)


def with_new_head(model: resnet.ResNet, num_classes: int, train_all: bool, key):
    head = eqx.nn.Linear(512, num_classes, key=key)
    model = eqx.tree_at("fc", model, head)
    if train_all:
        return model
    # The statistics of a frozen `BatchNorm` stay, too, in inference mode.
    model = eqx.select(model).of(eqx.nn.BatchNorm).apply(eqx.nn.inference_mode)
    return eqx.tree_at(BACKBONE, model, replace_fn=eqx.frozen)


def loss_fn(model, state, images, labels):
    logits, state = jax.vmap(model, **BATCH)(images, state)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), state


def make_step(optimiser):
    @eqx.filter_jit(donate=("model", "state", "opt_state"))
    def step(model, state, opt_state, images, labels):
        value_and_grad = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = value_and_grad(model, state, images, labels)
        params = eqx.filter(model, eqx.trainable)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    return step


@eqx.filter_jit
def predict(model, state, images):
    logits, _ = jax.vmap(eqx.nn.inference_mode(model), **BATCH)(images, state)
    return jnp.argmax(logits, axis=-1)


def fine_tune(weights, *, train_all=False, size=64, epochs=3, batch_size=32):
    """Prints the accuracy on test images, and returns the model and its state."""
    images, test_images, labels, test_labels = load_data(size)
    model, state = resnet.load(weights)
    model = with_new_head(model, 10, train_all, jax.random.key(0))
    steps = epochs * (len(images) // batch_size)
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-3, steps))
    opt_state = optimiser.init(eqx.filter(model, eqx.trainable))
    step = make_step(optimiser)
    rng = np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        order, losses = rng.permutation(len(images)), []
        for start in range(0, len(images) - batch_size + 1, batch_size):
            i = order[start : start + batch_size]
            model, state, opt_state, loss = step(
                model, state, opt_state, images[i], labels[i]
            )
            losses.append(loss)
        accuracy = np.mean(predict(model, state, test_images) == test_labels)
        print(f"Epoch {epoch}: loss {np.mean(losses):.3f}, accuracy {accuracy:.1%}")
    return model, state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tunes a ResNet-18.")
    parser.add_argument("weights")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    fine_tune(
        options.weights,
        train_all=options.all,
        size=options.size,
        epochs=options.epochs,
    )
