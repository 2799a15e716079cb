"""Quantised weights: bytes of programs as XLA counts them, and what rounding costs.

Nothing is timed. The first table has one `Linear`, the second its weights in half
precision, the third the program of `nn.generate` for the GPT of `generation`, the fourth
a network of scikit-learn's digits, if that is installed, and the fifth the language model
of `examples/`, if it was trained.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import equinox_like as eqx
from equinox_like import nn

from .generation import GPT, SLOTS

SIZE, GROUP, TOKENS = 1024, 64, 16
MODES: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "int8": {"bits": 8},
    "int8, groups": {"bits": 8, "group_size": GROUP},
    "int8, groups, not symmetric": {
        "bits": 8,
        "group_size": GROUP,
        "symmetric": False,
    },
    "int8, dynamic": {"bits": 8, "dynamic": True},
    "int4": {"bits": 4},
    "int4, groups": {"bits": 4, "group_size": GROUP},
    "int4, groups, not symmetric": {
        "bits": 4,
        "group_size": GROUP,
        "symmetric": False,
    },
    "int4, groups, dynamic": {"bits": 4, "group_size": GROUP, "dynamic": True},
    "float8_e4m3fn": {"bits": "float8_e4m3fn"},
}


def in_mode(model: Any, mode: dict[str, Any] | None) -> Any:
    return model if mode is None else nn.quantize(model, nn.Linear, **mode)


def relative_error(found: Any, expected: Any) -> float:
    difference = np.asarray(found) - np.asarray(expected)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def of_a_linear() -> None:
    print(f"\nQuantised: a Linear of {SIZE} x {SIZE} on one vector")
    head = "arguments", "temporary", "read and written", "weights", "outputs"
    print(f"{'':30}{head[0]:>12}{head[1]:>12}{head[2]:>18}{head[3]:>10}{head[4]:>10}")
    init = jax.nn.initializers.normal(SIZE**-0.5)
    key = jax.random.key(0)
    plain = nn.Linear(SIZE, SIZE, use_bias=False, key=key, weight_init=init)
    xs = jax.random.normal(jax.random.key(1), (256, SIZE))
    expected = jax.vmap(plain)(xs)
    for name, mode in MODES.items():
        layer = in_mode(plain, mode)
        compiled = eqx.filter_jit(layer).lower(xs[0]).compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        errors = (
            relative_error(layer.weight, plain.weight),
            relative_error(jax.vmap(layer)(xs), expected),
        )
        print(
            f"{name:30}{memory.argument_size_in_bytes:>12,}"
            f"{memory.temp_size_in_bytes:>12,}{cost['bytes accessed']:>18,.0f}"
            + "".join(f"{100 * error:>8.2f} %" for error in errors)
        )


def of_half_precision() -> None:
    print(f"\nQuantised: the error of weights of {SIZE} x {SIZE} in half precision")
    sizes, dtypes = (SIZE**-0.5, 1e-5, 1e-6), (jnp.float16, jnp.bfloat16)
    kinds = [f"{np.dtype(dtype)}, {size:.0e}" for dtype in dtypes for size in sizes]
    print(f"{'':30}{'bytes':>12}" + "".join(f"{kind:>17}" for kind in kinds))
    weight = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    for name, mode in MODES.items():
        if mode is None or "dynamic" in mode:
            continue
        errors = []
        for dtype in dtypes:
            for size in sizes:
                init = (weight * size).astype(dtype)
                options = {"use_bias": False, "dtype": dtype, "weight_init": init}
                plain = nn.Linear(SIZE, SIZE, key=jax.random.key(0), **options)
                layer = nn.Quantized(plain, **mode)
                # In double precision: the squares of small numbers are zero in half.
                pair = np.float64(layer.weight), np.float64(plain.weight)
                errors.append(relative_error(*pair))
        stored = nn.summary(layer).total_bytes
        print(
            f"{name:30}{stored:>12,}" + "".join(f"{100 * e:>15.2f} %" for e in errors)
        )


def of_a_generation() -> None:
    print(f"\nQuantised: nn.generate, {TOKENS} tokens, with a cache of {SLOTS}")
    print(f"{'':30}{'model':>12}{'arguments':>12}{'temporary':>12}")
    plain = GPT(jax.random.key(0))

    @eqx.filter_jit
    def generated(model: Any, caches: Any) -> jax.Array:
        prompt = jnp.zeros(1, int)
        return nn.generate(model, prompt, caches, TOKENS, temperature=0).tokens

    for name, mode in MODES.items():
        model = in_mode(plain, mode)
        lowered = generated.lower(model, plain.init_caches())
        memory = lowered.compile().memory_analysis()
        print(
            f"{name:30}{nn.summary(model).total_bytes:>12,}"
            f"{memory.argument_size_in_bytes:>12,}{memory.temp_size_in_bytes:>12,}"
        )


def trained(images: Any, labels: Any) -> nn.MLP:
    model = nn.MLP(64, 10, width_size=128, depth=2, key=jax.random.key(0))
    optimiser = optax.adam(1e-3)
    state = optimiser.init(eqx.filter(model, eqx.trainable))
    rng = np.random.default_rng(0)

    @eqx.filter_jit
    def step(model: Any, state: Any, images: Any, labels: Any) -> Any:
        def loss_fn(model: Any) -> jax.Array:
            logits = jax.vmap(model)(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        updates, state_ = optimiser.update(eqx.filter_grad(loss_fn)(model), state)
        return eqx.apply_updates(model, updates), state_

    for _ in range(600):
        rows = rng.choice(len(images), 128, replace=False)
        model, state = step(model, state, images[rows], labels[rows])
    return model


def of_the_digits() -> None:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        print("\nQuantised: the digits need `pip install scikit-learn`")
        return
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16, labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    seen, unseen = order[:1200], order[1200:]
    plain = trained(images[seen], labels[seen])
    print(f"\nQuantised: an MLP of the digits, on {len(unseen)} images not seen")
    print(f"{'':30}{'bytes':>12}{'right':>12}{'answers changed':>18}")
    before = jax.vmap(plain)(images[unseen]).argmax(-1)
    for name, mode in MODES.items():
        model = in_mode(plain, mode)
        answers = jax.vmap(model)(images[unseen]).argmax(-1)
        right = float((answers == labels[unseen]).mean())
        changed = int((answers != before).sum())
        size = nn.summary(model).total_bytes
        print(f"{name:30}{size:>12,}{100 * right:>10.1f} %{changed:>18}")


def of_the_language_model() -> None:
    path = Path("out/language_model/model.safetensors")
    example = "examples/train_language_model"
    if not path.exists():
        print(f"\nQuantised: the language model needs `python {example}/train.py`")
        return
    sys.path.insert(0, example)
    data, sample = importlib.import_module("data"), importlib.import_module("sample")
    plain, config = sample.load_model(path)
    plain = nn.inference_mode(plain)
    batches = data.held_out_batches(data.load_data()[1], config).swapaxes(0, 1)

    @eqx.filter_jit
    def evaluated(model: Any, batches: Any) -> Any:
        def of_a_batch(batch: Any) -> Any:
            logits, _ = jax.vmap(model)(batch[:, :-1])
            labels = batch[:, 1:]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), logits.argmax(-1)

        losses, answers = jax.lax.map(of_a_batch, batches)
        return losses.mean(), answers

    labels = batches[..., 1:]
    _, before = evaluated(plain, batches)
    print(f"\nQuantised: the language model, on {labels.size:,} bytes not seen")
    print(f"{'':30}{'bytes':>12}{'loss':>12}{'right':>12}{'answers changed':>18}")
    for name, mode in MODES.items():
        model = in_mode(plain, mode)
        loss, answers = evaluated(model, batches)
        right, changed = (answers == labels).mean(), (answers != before).mean()
        size = nn.summary(model).total_bytes
        print(
            f"{name:30}{size:>12,}{loss:>12.4f}{100 * right:>10.1f} %"
            f"{100 * changed:>16.1f} %"
        )


def run(rounds: int) -> None:
    of_a_linear()
    of_half_precision()
    of_a_generation()
    of_the_digits()
    of_the_language_model()
