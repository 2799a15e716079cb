"""`to_torch` of `examples/back_to_pytorch` gives PyTorch the values of each layer that both
have, and "Coming from PyTorch" reads them back, to the bit.

`tests/data/make_torch_layers.py` stored state dicts, inputs and outputs of PyTorch. Where
PyTorch is installed, it is asked itself.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_docs import blocks_of

import equinox_like as eqx

ROOT = Path(__file__).resolve().parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "tests" / "data")
    patch.syspath_prepend(ROOT / "examples" / "back_to_pytorch")
    import make_torch_layers
    from to_torch import to_torch
CASES = make_torch_layers.CASES
STORED = load_file(make_torch_layers.FILE)
every_layer = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def page():
    """The functions that "Coming from PyTorch" shows."""
    text = (ROOT / "docs" / "coming-from-pytorch.md").read_text()
    (code,) = (c for _, c in blocks_of(text) if "def split_projections" in c)
    functions = {}
    exec(code, functions)
    return functions


def make(name):
    return eqx.nn.make_with_state(CASES[name][0])()


def from_torch(page, name, theirs):
    """A new layer and state with the values of a state dict of PyTorch."""
    layer, state = make(name)
    ours = {}
    for key, x in page["split_projections"](theirs).items():
        key = re.sub(r"parametrizations\.weight\.original(\d)", r"weight_\1", key)
        key = {"weight_0": "g", "weight_1": "layer.weight"}.get(key, key)
        if name.startswith("WeightNorm"):
            key = "layer.bias" if key == "bias" else key
        if "ConvTranspose" in name and not key.endswith("bias"):
            x = page["transposed"](x, 2 if name == "ConvTranspose1d" else 1)
        if name == "Sequential":
            key = {"0": "layers.0.", "1": "layers.1.layers.1."}[key[0]] + key[
                -6:
            ].strip(".01")
        if name == "PReLU":
            key = "negative_slope"
        if match := re.fullmatch(r"(.*)_l(\d)(_reverse)?", key):
            direction = (
                "backward." if match[3] else "forward." if name == "LSTM" else ""
            )
            key = f"layers.{match[2]}.{direction}{match[1]}"
        ours[key] = x
    for key in [key for key in ours if key.endswith("bias_ih")]:
        second = ours.pop(key.replace("bias_ih", "bias_hh"))
        if name.startswith("GRU"):
            start = len(second) * 2 // 3
            ours[key.replace("bias_ih", "bias_n")] = second[start:]
            assert not second[:start].any()
        else:
            assert not second.any()
        ours[key.removesuffix("_ih")] = ours.pop(key)
    if name == "BatchNorm":
        moments = (
            jnp.array(ours.pop("running_mean")),
            jnp.array(ours.pop("running_var")),
        )
        steps = jnp.array(ours.pop("num_batches_tracked"), jnp.int32)
        state = state.set(layer.batch_state_index, moments)
        state = state.set(layer.batch_counter, steps)
    like = eqx.state_dict(layer)
    ours = {key: x.reshape(like[key].shape) for key, x in ours.items()}
    return eqx.load_state_dict(layer, ours), state


def output_of(name, layer, state, x):
    x = jnp.asarray(x)
    if name == "MultiheadAttention":
        return layer(x, x, x)
    if name.endswith("Cell"):
        zeros = jnp.zeros(4)
        return layer(x, zeros) if name == "GRUCell" else layer(x, (zeros, zeros))[0]
    if name in ("GRU", "LSTM"):
        return layer(x)[0]
    if name == "BatchNorm":
        return eqx.nn.inference_mode(layer)(x, state)[0]
    return layer(x)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, x in theirs.items():
        assert ours[key].dtype == x.dtype and np.array_equal(ours[key], x), key


def stored(name):
    start = f"{name}/"
    return {k.removeprefix(start): x for k, x in STORED.items() if k.startswith(start)}


@every_layer
def test_state_dict_of_pytorch_comes_back(name, page):
    layer, state = from_torch(page, name, stored(name))
    out = output_of(name, layer, state, STORED[f"{name}>input"])
    np.testing.assert_allclose(out, STORED[f"{name}>output"], rtol=2e-5, atol=2e-6)
    assert_same(to_torch(layer, state), stored(name))


@every_layer
def test_layer_comes_back_from_pytorch(name, page, tmp_path):
    pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch_file

    layer, state = make(name)
    leaves, treedef = jax.tree.flatten(layer)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draw = lambda x, key: jax.random.normal(key, x.shape) if eqx.is_array(x) else x  # noqa: E731
    layer = treedef.unflatten(map(draw, leaves, keys))
    save_file(to_torch(layer, state), tmp_path / "layer")
    theirs = make_torch_layers.torch_layer(name)
    theirs.load_state_dict(load_torch_file(tmp_path / "layer"))
    x = STORED[f"{name}>input"]
    out = output_of(name, layer, state, x)
    expected = make_torch_layers.output_of(theirs, x)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    back = {key: x.numpy() for key, x in theirs.state_dict().items()}
    again, state_again = from_torch(page, name, back)
    assert eqx.tree_equal(again, layer) and eqx.tree_equal(state_again, state)


class Net(eqx.Module):
    blocks: list
    heads: dict

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        norm = eqx.nn.BatchNorm(4, "batch", mode="batch", momentum=0.9)
        conv = eqx.nn.Conv1d(2, 4, 3, key=keys[0])
        up = eqx.nn.ConvTranspose1d(4, 2, 3, key=keys[1])
        self.blocks = [eqx.nn.Sequential([conv, norm, jax.nn.relu, up])]
        self.heads = {"a": eqx.nn.LSTMCell(3, 2, key=keys[2])}


def test_names_of_nested_layers_are_those_of_pytorch():
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    arrays = to_torch(model, state)
    assert {name: x.shape for name, x in arrays.items()} == {
        "blocks.0.0.weight": (4, 2, 3),
        "blocks.0.0.bias": (4,),
        "blocks.0.1.weight": (4,),
        "blocks.0.1.bias": (4,),
        "blocks.0.1.running_mean": (4,),
        "blocks.0.1.running_var": (4,),
        "blocks.0.1.num_batches_tracked": (),
        "blocks.0.3.weight": (4, 2, 3),
        "blocks.0.3.bias": (2,),
        "heads.a.weight_ih": (8, 3),
        "heads.a.weight_hh": (8, 2),
        "heads.a.bias_ih": (8,),
        "heads.a.bias_hh": (8,),
    }


def test_running_statistics_are_those_that_inference_uses():
    """After a few steps, in which their initial values still count."""
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, state = make(3, mode="batch", momentum=0.9)
    x = 2 + jax.random.normal(jax.random.key(0), (16, 3))
    for steps in range(4):
        arrays = to_torch(norm, state)
        wanted, _ = eqx.nn.inference_mode(norm)(x, state)
        scale = np.sqrt(arrays["running_var"] + 1e-5)
        assert jnp.allclose((x - arrays["running_mean"]) / scale, wanted, atol=1e-5)
        assert arrays["num_batches_tracked"] == steps
        _, state = norm(x, state)


def test_another_mode_of_batch_norm_is_refused():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, mode="ema")
    with pytest.raises(ValueError, match='`mode="batch"` only'):
        to_torch(norm, state)
