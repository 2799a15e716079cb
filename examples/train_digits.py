"""Train a small convolutional network on handwritten digits, donating its memory.

The data are scikit-learn's digits: 1797 images of 8x8 pixels, drawn by 43 people. The
script prints the accuracy on images that it has not trained on, and what donation saves:
live arrays while it trains, and the memory that XLA needs for wider and wider networks. It
saves the model, loads it into a fresh one and compares; and it draws a picture.

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
WIDTHS = [
    256,
    1024,
    4096,
]  # of the hidden layer: the first is trained, all are measured


class Net(eqx.Module):
    """Two convolutions, each followed by pooling, and a perceptron on top.

    Takes one image of shape (1, 8, 8), and returns 10 logits: a batch is for `jax.vmap`.
    """

    convolutions: eqx.nn.Sequential
    head: eqx.nn.MLP

    def __init__(self, key, width=WIDTHS[0]):
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
        self.head = eqx.nn.MLP(64 * 2 * 2, 10, width_size=width, depth=1, key=keys[2])

    def __call__(self, image):
        return self.head(jnp.ravel(self.convolutions(image)))


def loss(model, images, labels):
    logits = jax.vmap(model)(images)
    # Smoothed labels ask for 91 % certainty, not for all of it. With so few images that
    # keeps the net from learning them by heart: on others it errs some 40 % less.
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
    return jnp.mean(optax.softmax_cross_entropy(logits, targets))


def least_loss():
    """The loss of predictions that are the smoothed labels themselves."""
    target = optax.smooth_labels(np.eye(10)[0], SMOOTHING)
    return -np.sum(target * np.log(target))


def init(optimiser, model):
    # Only what is trained has an optimiser state; activation functions and sizes do not.
    return optimiser.init(eqx.filter(model, eqx.trainable))


def make_step(optimiser, donate):
    # Donated, model and optimiser state are deleted after each step: the new ones have
    # taken over their memory. The batch comes first, and is kept.
    @eqx.filter_jit(donate=donate)
    def step(batch, model, opt_state):
        value, grads = eqx.filter_value_and_grad(loss)(model, *batch)
        params = eqx.filter(model, eqx.trainable)
        updates, opt_state = optimiser.update(grads, opt_state, params)
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
    step = make_step(optimiser, donate="all-except-first")
    opt_state = init(optimiser, model)
    rng = np.random.default_rng(seed)
    losses = []
    with trange(epochs, desc="training", unit="epoch") as progress:
        for _ in progress:
            order = rng.permutation(len(images))
            for start in range(0, len(images) - batch_size + 1, batch_size):
                pick = order[start : start + batch_size]
                batch = images[pick], labels[pick]
                model, opt_state, value = step(batch, model, opt_state)
                # The step is still running: looking at the loss now would wait for it.
                losses.append(value)
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return model, np.asarray(jnp.stack(losses))


def live_bytes(optimiser, donate, batch, steps=10):
    """Bytes of model and optimiser state that exist in each step.

    Twice per step: when it has returned, and when the new model has replaced the old one.
    """
    step = make_step(optimiser, donate)
    before = sum(x.nbytes for x in jax.live_arrays())
    model = Net(jax.random.key(0))
    opt_state = init(optimiser, model)
    live = []
    for _ in range(steps):
        new = step(batch, model, opt_state)
        live.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        model, opt_state, _ = new
        del new
        live.append(sum(x.nbytes for x in jax.live_arrays()) - before)
    return np.asarray(live)


def needed_bytes(optimiser, donate, batch, width):
    """All that XLA needs for one step, temporaries included; nothing is run for it."""

    def start():
        model = Net(jax.random.key(0), width)
        return model, init(optimiser, model)

    step = make_step(optimiser, donate)
    return step.donation_report(batch, *eqx.filter_eval_shape(start)).peak_bytes


def measure_donation(optimiser, batch):
    """Live bytes over steps and needed bytes over widths, without and with donation."""
    live, needed = {}, {}
    for name, donate in {"without": "none", "with": "all-except-first"}.items():
        live[name] = live_bytes(optimiser, donate, batch)
        needed[name] = np.asarray(
            [needed_bytes(optimiser, donate, batch, width) for width in WIDTHS]
        )
    return live, needed


def print_donation(live, needed):
    print(
        f"Donation: at most {live['with'].max():,} bytes of model and optimiser state are "
        f"alive, {live['without'].max():,} without it"
    )
    # The temporaries, activations of a batch above all, are no smaller with donation.
    saved = 1 - needed["with"] / needed["without"]
    widest, *narrower = reversed(list(zip(WIDTHS, saved, strict=True)))
    others = ", ".join(f"{share:.0%} with one of {width}" for width, share in narrower)
    print(
        f"Donation saves {widest[1]:.0%} of all memory that XLA needs for a step with a "
        f"hidden layer of {widest[0]}; {others}, where activations need most of it"
    )


def draw_donation(axes, live, needed):
    """Live bytes over steps on the left, the needed bytes over widths on the right."""
    first, second = axes
    for name, colour in {"without": "C3", "with": "C0"}.items():
        label = f"{name} donation"
        steps = np.arange(len(live[name])) / 2
        first.step(steps, live[name] / 1e6, color=colour, where="post", label=label)
        second.plot(WIDTHS, needed[name] / 1e6, "o-", color=colour, label=label)
    first.set(xlabel="step", ylabel="MB", title="Model and optimiser state", ylim=0)
    saved = 1 - needed["with"] / needed["without"]
    for width, less, share in zip(WIDTHS, needed["with"] / 1e6, saved, strict=True):
        second.annotate(
            f"-{share:.0%}", (width, less), (4, -14), textcoords="offset points"
        )
    second.set(xlabel="width of the hidden layer", ylabel="MB", ylim=0, xlim=(0, 4500))
    second.set(title="All that XLA needs for a step", xticks=WIDTHS)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.legend(frameon=False, fontsize="small")


def draw_losses(axes, losses, epochs):
    axes.plot(losses, color="0.8", lw=0.8, label="each step")
    window = len(losses) // epochs
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(np.arange(window - 1, len(losses)), smooth, label="mean of an epoch")
    axes.axhline(least_loss(), color="0.5", ls=":", label="least possible")
    axes.set(xlabel="step", ylabel="cross-entropy", title="Training loss", ylim=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def draw_predictions(figure, images, labels, predictions):
    """Test images: as many as fit, the wrong ones first, in red."""
    wrong = predictions != labels
    figure.suptitle(f"Test images, predictions: {1 - wrong.mean():.2%} right")
    shown = np.argsort(~wrong, kind="stable")[:40]
    for cell, i in zip(figure.subplots(5, 8).flat, shown, strict=True):
        cell.imshow(images[i, 0], cmap="gray_r", vmin=0, vmax=1)
        cell.set(xticks=[], yticks=[])
        title = f"{predictions[i]}"
        if wrong[i]:
            title += f", is {labels[i]}"
            cell.spines[:].set(color="crimson", linewidth=2.5)
        cell.set_title(title, fontsize=9, color="crimson" if wrong[i] else "0.3", pad=3)


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
    print(
        f"Training loss: {losses[-20:].mean():.2f}; with smoothed labels it cannot fall "
        f"below {least_loss():.2f}"
    )

    batch = images[: options.batch_size], labels[: options.batch_size]
    live, needed = measure_donation(optimiser, batch)
    print_donation(live, needed)

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
    figure = plt.figure(figsize=(11, 8.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.35, 1])
    left, right = above.subfigures(1, 2, width_ratios=[1, 1.15])
    draw_losses(left.subplots(), losses, options.epochs)
    draw_predictions(right, test_images, test_labels, predictions)
    draw_donation(below.subplots(1, 2), live, needed)
    figure.savefig(picture, dpi=130)
    print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
