"""Makes `tests/data/torch_layers.safetensors`, which `tests/test_back_to_pytorch.py` reads:
for each layer a state dict of PyTorch with random values, an input and the output.

It is run by hand, and only to change them:

    pip install torch safetensors
    python tests/data/make_torch_layers.py
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

import equinox_like as eqx

FILE = Path(__file__).parent / "torch_layers.safetensors"
KEY = jax.random.key(0)
nn = eqx.nn
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def rnn(cell, **options):
    return nn.RNN.build(cell, 3, 4, key=KEY, **options)


def norm():
    return nn.BatchNorm(3, "batch", mode="batch", momentum=0.9, unbiased=True)


# The layer here, the code of PyTorch's, and the shape of an input without a batch axis; it
# is empty for an index.
CASES: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(3, 4, key=KEY), "Linear(3, 4)", (3,)),
    "Embedding": (lambda: nn.Embedding(5, 3, key=KEY), "Embedding(5, 3)", ()),
    "Conv1d": (
        lambda: nn.Conv1d(2, 4, 3, groups=2, key=KEY),
        "Conv1d(2, 4, 3, groups=2)",
        (2, 5),
    ),
    "Conv2d": (
        lambda: nn.Conv2d(2, 4, (3, 2), key=KEY),
        "Conv2d(2, 4, (3, 2))",
        (2, 5, 4),
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, key=KEY), "Conv3d(2, 3, 2)", (2, 3, 4, 5)),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2, key=KEY),
        "ConvTranspose1d(4, 6, 3, 2, groups=2)",
        (4, 5),
    ),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), padding=1, key=KEY),
        "ConvTranspose2d(2, 3, (3, 2), padding=1)",
        (2, 5, 4),
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, use_bias=False, key=KEY),
        "ConvTranspose3d(2, 3, 2, bias=False)",
        (2, 3, 4, 5),
    ),
    "LayerNorm": (lambda: nn.LayerNorm((4,)), "LayerNorm(4)", (4,)),
    "RMSNorm": (
        lambda: nn.RMSNorm((4,), eps=1e-5, use_bias=False),
        "RMSNorm(4, eps=1e-5)",
        (4,),
    ),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), "GroupNorm(2, 4)", (4, 3)),
    "InstanceNorm": (
        lambda: nn.InstanceNorm(3),
        "InstanceNorm2d(3, affine=True)",
        (3, 4, 5),
    ),
    "PReLU": (lambda: nn.PReLU(np.ones((4, 1), "f4")), "PReLU(4)", (4, 5)),
    "GRUCell": (lambda: nn.GRUCell(3, 4, key=KEY), "GRUCell(3, 4)", (3,)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4, key=KEY), "LSTMCell(3, 4)", (3,)),
    "GRU": (lambda: rnn(nn.GRUCell), "GRU(3, 4, batch_first=True)", (5, 3)),
    "LSTM": (
        lambda: rnn(nn.LSTMCell, num_layers=2, bidirectional=True),
        "LSTM(3, 4, 2, bidirectional=True, batch_first=True)",
        (5, 3),
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(2, 8, **BIASES, key=KEY),
        "MultiheadAttention(8, 2, batch_first=True)",
        (5, 8),
    ),
    "WeightNorm": (
        lambda: nn.WeightNorm(nn.Conv1d(2, 4, 3, key=KEY)),
        "utils.parametrizations.weight_norm(Conv1d(2, 4, 3))",
        (2, 5),
    ),
    "WeightNorm of ConvTranspose": (
        lambda: nn.WeightNorm(nn.ConvTranspose1d(2, 4, 3, key=KEY), axis=1),
        "utils.parametrizations.weight_norm(ConvTranspose1d(2, 4, 3))",
        (2, 5),
    ),
    "BatchNorm": (norm, "BatchNorm2d(3)", (3, 4, 5)),
    "Sequential": (
        lambda: nn.Sequential(
            [
                nn.Linear(2, 3, key=KEY),
                nn.Sequential([jax.nn.relu, nn.Linear(3, 2, key=KEY)]),
            ]
        ),
        "Sequential(Linear(2, 3), Sequential(ReLU(), Linear(3, 2)))",
        (2,),
    ),
}


def randomise(theirs):
    """Random values. Of two biases that are added, the second is 0, as here."""
    import torch

    random = np.random.RandomState(0)
    for name, x in theirs.state_dict().items():
        if x.dtype == torch.int64:
            x.fill_(1_000_000)
            continue
        values = random.standard_normal(x.shape).astype("f4")
        if name.endswith("running_var"):
            values = np.exp(values)
        if "bias_hh" in name:
            kept = isinstance(theirs, torch.nn.GRU | torch.nn.GRUCell)
            values[: len(values) * 2 // 3 if kept else None] = 0
        x.copy_(torch.tensor(values))


def output_of(theirs, x):
    """The output for one example, without the states of a recurrent layer."""
    import torch

    args = [torch.tensor(x)[None]] * (
        3 if isinstance(theirs, torch.nn.MultiheadAttention) else 1
    )
    with torch.no_grad():
        out = theirs(*args)
    return (out[0] if isinstance(out, tuple) else out)[0].numpy()


def torch_layer(name):
    import torch

    return eval(CASES[name][1], dict(vars(torch.nn))).eval()


def main():
    from safetensors.numpy import save_file

    arrays = {}
    for name, (_, _, shape) in CASES.items():
        theirs = torch_layer(name)
        randomise(theirs)
        x = np.random.RandomState(1).standard_normal(shape).astype("f4")
        x = x if shape else np.array(2)
        arrays |= {f"{name}/{k}": v.numpy() for k, v in theirs.state_dict().items()}
        arrays |= {f"{name}>input": x, f"{name}>output": output_of(theirs, x)}
    save_file({name: np.array(x, order="C") for name, x in arrays.items()}, FILE)


if __name__ == "__main__":
    main()
