"""The arrays of a model in the names and layouts of PyTorch."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

import equinox_like as eqx

Arrays = dict[str, np.ndarray]


def to_torch(model: Any, state: eqx.nn.State | None = None) -> Arrays:
    """A state dict for the same layers in PyTorch.

    `state` has the running statistics of each `BatchNorm`.
    """
    # Rates and flags, such as those of a dropout, are not in a state dict there.
    found = eqx.state_dict(model).items()
    arrays = {name: np.asarray(x) for name, x in found if eqx.is_array(x)}
    convert_convolutions(model, arrays)
    convert_recurrent(model, arrays)
    convert_attention(model, arrays)
    convert_weight_norms(model, arrays)
    for at, _ in layers(model, eqx.nn.PReLU):
        arrays[f"{at}weight"] = arrays.pop(f"{at}negative_slope").ravel()
    if state is not None:
        for at, layer in layers(model, eqx.nn.BatchNorm):
            arrays |= {f"{at}{x}": y for x, y in statistics(layer, state).items()}
    # From the innermost `Sequential` outwards: "features.layers.0" is "features.0" there.
    inside = sorted((at for at, _ in layers(model, eqx.nn.Sequential)), key=len)
    for at in reversed(inside):
        rename(arrays, f"{at}layers.", at)
    return arrays


def convert_convolutions(model: Any, arrays: Arrays) -> None:
    for at, layer in layers(model, eqx.nn.Conv, eqx.nn.ConvTranspose):
        if layer.bias is not None:
            arrays[f"{at}bias"] = arrays[f"{at}bias"].ravel()
        if isinstance(layer, eqx.nn.ConvTranspose):
            arrays[f"{at}weight"] = transposed_back(arrays[f"{at}weight"], layer.groups)


def transposed_back(weight: np.ndarray, groups: int = 1) -> np.ndarray:
    """The weight of a `ConvTranspose` of PyTorch, from that of the layer here."""
    spatial = tuple(range(2, weight.ndim))
    parts = np.split(np.flip(weight, spatial), groups)
    weight = np.concatenate([part.swapaxes(0, 1) for part in parts])
    # safetensors saves an array as it is in memory.
    return np.ascontiguousarray(weight)


def convert_recurrent(model: Any, arrays: Arrays) -> None:
    for at, layer in layers(model, eqx.nn.GRUCell, eqx.nn.LSTMCell):
        if layer.bias is not None:  # PyTorch has two biases, which are added
            first = arrays.pop(f"{at}bias")
            second = np.zeros_like(first)
            if isinstance(layer, eqx.nn.GRUCell):
                second[2 * len(second) // 3 :] = arrays.pop(f"{at}bias_n")
            arrays |= {f"{at}bias_ih": first, f"{at}bias_hh": second}
    for at, _ in layers(model, eqx.nn.RNN):
        cell = re.compile(rf"{re.escape(at)}layers\.(\d+)\.(forward|backward)?\.?(\w+)")
        for name, match in [(name, cell.fullmatch(name)) for name in arrays]:
            if match:
                end = "_reverse" if match[2] == "backward" else ""
                arrays[f"{at}{match[3]}_l{match[1]}{end}"] = arrays.pop(name)


def convert_attention(model: Any, arrays: Arrays) -> None:
    for at, _ in layers(model, eqx.nn.MultiheadAttention):
        for kind in "weight", "bias":
            names = [f"{at}{part}_proj.{kind}" for part in ("query", "key", "value")]
            if names[0] in arrays:
                parts = [arrays.pop(name) for name in names]
                arrays[f"{at}in_proj_{kind}"] = np.concatenate(parts)
        rename(arrays, f"{at}output_proj.", f"{at}out_proj.")


def convert_weight_norms(model: Any, arrays: Arrays) -> None:
    for at, layer in layers(model, eqx.nn.WeightNorm):
        g = arrays.pop(f"{at}g")
        if isinstance(layer.layer, eqx.nn.ConvTranspose):
            g = transposed_back(g, layer.layer.groups)
        weight = f"{at}parametrizations.weight.original"
        arrays |= {f"{weight}0": g, f"{weight}1": arrays.pop(f"{at}layer.weight")}
        rename(arrays, f"{at}layer.", at)


def layers(model: Any, *kinds: type) -> Iterator[tuple[str, Any]]:
    """Layers of these classes, each with what the names of its arrays begin with."""
    for path, layer in eqx.select(model).of(kinds):
        name = re.sub(r"\['?(.*?)'?\]", r".\1", path)
        yield f"{name}." if name else "", layer


def rename(arrays: Arrays, old: str, new: str) -> None:
    for name in [name for name in arrays if name.startswith(old)]:
        arrays[new + name.removeprefix(old)] = arrays.pop(name)


def statistics(norm: eqx.nn.BatchNorm, state: eqx.nn.State) -> Arrays:
    """The running statistics as inference uses them: PyTorch takes them as they are."""
    if norm.batch_state_index is None or norm.batch_counter is None:
        raise ValueError('PyTorch has BatchNorm with `mode="batch"` only.')
    mean, variance = map(np.asarray, state.get(norm.batch_state_index))
    steps = np.asarray(state.get(norm.batch_counter), np.int64)
    # They start at 0 and 1, and `left` is the weight of these after some steps.
    left = np.asarray(norm.momentum, mean.dtype) ** steps.astype(mean.dtype)
    if 0 < left < 1:
        mean, variance = mean / (1 - left), (variance - left) / (1 - left)
    return {
        "running_mean": mean,
        "running_var": variance,
        "num_batches_tracked": steps,
    }
