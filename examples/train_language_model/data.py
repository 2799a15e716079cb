"""The data: Python's own language reference, as bytes.

`help("while")` shows a part of it, so each Python has it. To train on other text, change
`load_data`.
"""

import math
from pydoc_data.topics import topics

import numpy as np
from config import Config
from jax.typing import ArrayLike

VOCABULARY = 256  # a token is a byte


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the training text and of the held-out text, each of shape `(n,)`."""
    # Some topics repeat parts of others. Each paragraph is taken once, so that the
    # held-out text, the last tenth, has none that was trained on.
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))
    tokens = encode("\n\n".join(paragraphs))
    border = len(tokens) * 9 // 10
    return tokens[:border], tokens[border:]


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: ArrayLike) -> str:
    return bytes(np.asarray(tokens).tolist()).decode(errors="replace")


def training_batch(tokens: np.ndarray, step: int, config: Config) -> np.ndarray:
    """Random windows of the text, of shape `(batch_size, micro_batches, context + 1)`.

    They depend on the seed and the step alone, so a resumed run sees the same ones, and
    each process those of all. The first axis is the one that devices share.
    """
    rng = np.random.default_rng((config.seed, step))
    shape = config.micro_batches, config.batch_size, 1
    starts = rng.integers(0, len(tokens) - config.context, shape)
    return tokens[starts + np.arange(config.context + 1)].swapaxes(0, 1)


def held_out_batches(tokens: np.ndarray, config: Config) -> np.ndarray:
    """The text cut into windows, of shape `(batch_size, batches, context + 1)`."""
    shape = config.batch_size, config.context + 1
    number = len(tokens) // math.prod(shape)  # what does not fill a batch is left out
    if number == 0:
        raise ValueError(
            f"The held-out text has {len(tokens):,} bytes, and a batch takes {shape[0]} x "
            f"{shape[1]} = {math.prod(shape):,}. Use ten times as much text, or a smaller "
            "`batch_size` or `context`."
        )
    windows = tokens[: number * math.prod(shape)].reshape(number, *shape)
    return windows.swapaxes(0, 1)
