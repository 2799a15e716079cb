"""What the programs of this folder share: sizes, and batches that can be learnt."""

from typing import Any

import numpy as np

WIDTH, DEPTH, HEADS, VOCABULARY, BATCH, LENGTH = 384, 6, 8, 512, 64, 40
STEPS = 4


def tokens_of(step: int) -> Any:
    draw = np.random.default_rng(step)
    start, stride = draw.integers(0, VOCABULARY, (2, BATCH, 1))
    return ((start + stride * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
