"""Train a small convolutional network on handwritten digits, donating its memory.

The data are scikit-learn's digits: 1797 images of 8x8 pixels, drawn by 43 people. The
script prints the accuracy on images that it has not trained on, and what donation saves;
it saves the model, loads it into a fresh one and compares; and it draws a picture.

    python examples/train_digits.py --epochs 20 --out out
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import equinox_like as eqx

matplotlib.use("Agg")  # a file, not a window
import matplotlib.pyplot as plt

SMOOTHING = 0.1


class Net(eqx.Module):
    """Two convolutions, each followed by pooling, and a perceptron on top.

    Takes one image of shape (1, 8, 8), and returns 10 logits: a batch is for `jax.vmap`.
    """

    convolutions: eqx.nn.Sequential
    head: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.convolutions = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 32, kernel_size=3, padding=1, key=keys[0]),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(kernel_size=2, stride=2),
                eqx.nn.Conv2d(32, 64, kernel_size=3, padding=1, key=keys[1]),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            ]
        )
        self.head = eqx.nn.MLP(64 * 2 * 2, 10, width_size=256, depth=1, key=keys[2])

    def __call__(self, image):
        return self.head(jnp.ravel(self.convolutions(image)))


def loss(model, images, labels):
    logits = jax.vmap(model)(images)
    # Smoothed labels ask for 91 % certainty, not for all of it. With so few images that
    # keeps the net from learning them by heart: on others it errs some 40 % less.
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
    return jnp.mean(optax.softmax_cross_entropy(logits, targets))


def make_step(optimiser, donate):
    # The new model and optimiser state take over the memory of the old ones, which are
    # gone after each step. The images are donated as well, and simply not reused.
    @eqx.filter_jit(donate=donate)
    def step(model, opt_state, images, labels):
        value, gradient = eqx.filter_value_and_grad(loss)(model, images, labels)
        updates, opt_state = optimiser.update(gradient, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    return step


@eqx.filter_jit
def predict(model, images):
    return jnp.argmax(jax.vmap(model)(images), axis=-1)


def load_data(seed):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=labels
    )


def train(model, images, labels, *, optimiser, epochs, batch_size, seed):
    step = make_step(optimiser, donate="arrays")
    # Only arrays have an optimiser state; activation functions and sizes do not.
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    rng = np.random.default_rng(seed)
    losses = []
    with trange(epochs, desc="training", unit="epoch") as progress:
        for _ in progress:
            order = rng.permutation(len(images))
            for start in range(0, len(images) - batch_size + 1, batch_size):
                batch = order[start : start + batch_size]
                model, opt_state, value = step(
                    model, opt_state, images[batch], labels[batch]
                )
                # The step is still running: looking at the loss now would wait for it.
                losses.append(value)
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return model, np.asarray(jnp.stack(losses))


def memory_of_step(optimiser, donate, model, images, labels):
    """XLA's account of one step, which it gives before anything runs."""
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    lowered = make_step(optimiser, donate).lower(model, opt_state, images, labels)
    return lowered.compile().memory_analysis()


def total_bytes(found):
    # Less is saved here than donation reuses: without it, XLA works in the memory of the
    # outputs until they are written, and with it needs temporaries for that.
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes  # counted as argument and as output
    )


def draw(path, losses, epochs, images, labels, predictions, accuracy):
    """The loss curve, and test images: as many as fit, the wrong ones first, in red."""
    fig = plt.figure(figsize=(11, 5), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=[1, 1.15])
    axes = left.subplots()
    axes.plot(losses, color="0.8", lw=0.8, label="each step")
    window = len(losses) // epochs
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(np.arange(window - 1, len(losses)), smooth, label="mean of an epoch")
    target = optax.smooth_labels(np.eye(10)[0], SMOOTHING)
    least = -np.sum(target * np.log(target))
    axes.axhline(least, color="0.5", ls=":", label="least possible")
    axes.set(xlabel="step", ylabel="cross-entropy", title="Training loss", ylim=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)

    right.suptitle(f"Test images, predictions: {accuracy:.2%} right", fontsize="large")
    wrong = predictions != labels
    shown = np.argsort(~wrong, kind="stable")[:40]
    for cell, i in zip(right.subplots(5, 8).flat, shown, strict=True):
        cell.imshow(images[i, 0], cmap="gray_r", vmin=0, vmax=1)
        cell.set(xticks=[], yticks=[])
        title = f"{predictions[i]}"
        if wrong[i]:
            title += f", is {labels[i]}"
            cell.spines[:].set(color="crimson", linewidth=2.5)
        cell.set_title(title, fontsize=9, color="crimson" if wrong[i] else "0.3", pad=3)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    images, test_images, labels, test_labels = load_data(options.seed)
    steps = options.epochs * (len(images) // options.batch_size)
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    model, losses = train(
        Net(jax.random.key(options.seed)),
        images,
        labels,
        optimiser=optimiser,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    predictions = np.asarray(predict(model, test_images))
    accuracy = np.mean(predictions == test_labels)
    print(f"Test accuracy: {accuracy:.2%} of {len(test_labels)} images")

    batch = images[: options.batch_size], labels[: options.batch_size]
    without, with_donation = (
        memory_of_step(optimiser, donate, model, *batch)
        for donate in ("none", "arrays")
    )
    print(
        f"Donation: {with_donation.alias_size_in_bytes:,} of the "
        f"{with_donation.output_size_in_bytes:,} bytes that a step returns take the place "
        "of its inputs"
    )
    saved_bytes = total_bytes(without) - total_bytes(with_donation)
    print(
        f"Donation saves {saved_bytes:,} of {total_bytes(without):,} bytes in each step, "
        "XLA's temporaries included"
    )

    saved = options.out / "digits.eqx"
    eqx.tree_serialise_leaves(saved, model)
    # Loading needs a model of the same structure; its numbers do not matter.
    fresh = Net(jax.random.key(options.seed + 1))
    loaded = eqx.tree_deserialise_leaves(saved, fresh)
    same = np.array_equal(
        jax.vmap(loaded)(test_images), jax.vmap(model)(test_images)
    ) and bool(eqx.tree_equal(loaded, model))
    print(f"Saved to {saved}; loaded into a fresh model, equal to the bit: {same}")

    picture = options.out / "digits.png"
    draw(
        picture,
        losses,
        options.epochs,
        test_images,
        test_labels,
        predictions,
        accuracy,
    )
    print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
