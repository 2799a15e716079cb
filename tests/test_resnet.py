"""The model of `examples/resnet` agrees with that of torchvision, whose outputs are in the
file that `tests/data/make_resnet.py` made.
"""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

import equinox_like as eqx

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "data" / "resnet.safetensors"


@pytest.fixture(scope="module")
def modules():
    """The modules of the example, and the one that made the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / "resnet")
        patch.syspath_prepend(FILE.parent)
        import fine_tune
        import make_resnet
        import resnet

        yield resnet, fine_tune, make_resnet
    for name in "resnet", "fine_tune", "make_resnet":
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def weights(modules):
    with safetensors.safe_open(FILE, "numpy") as file:
        shapes = json.loads(file.metadata()["shapes"])
    return modules[2].random_weights(shapes)


@pytest.fixture(scope="module")
def loaded(modules, weights):
    return modules[0].load(weights)


EXPECTED = load_file(FILE)
AXES = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}


def assert_close(ours, theirs):
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_logits_agree_with_torchvision(modules, loaded):
    model, state = eqx.nn.inference_mode(loaded)
    images = modules[2].random_images(4, 64)
    logits, _ = eqx.filter_jit(jax.vmap(model, **AXES))(images, state)
    assert_close(logits, EXPECTED["evaluated"])


def test_step_of_training_agrees_with_torchvision(modules, loaded):
    model, state = loaded
    images = modules[2].random_images(4, 64)
    logits, state = eqx.filter_jit(jax.vmap(model, **AXES))(images, state)
    assert_close(logits, EXPECTED["trained"])
    first, last = model.bn1, model.layer4[1].bn2
    mean, _ = state.get(first.batch_state_index)
    _, variance = state.get(last.batch_state_index)
    assert_close(mean, EXPECTED["bn1.running_mean"])
    assert_close(variance, EXPECTED["layer4.1.bn2.running_var"])


def test_names_are_those_of_torchvision(modules, loaded, weights):
    model, _ = loaded
    ours = {modules[0].rename(name) for name in eqx.state_dict(model)}
    settings = {name for name in ours if name not in weights}
    tracked = {name for name in weights if name.endswith(modules[0].TRACKED)}
    assert ours - settings == weights.keys() - tracked
    assert not any(eqx.is_array(eqx.state_dict(model).get(name)) for name in settings)


def test_deeper_model_has_the_blocks_of_its_depth(modules, weights):
    with pytest.raises(eqx.LeafError, match=r"missing in .*`layer1\.2\.conv1\.weight"):
        modules[0].load(weights, depth=34)


@pytest.mark.parametrize("train_all", [False, True])
def test_fine_tuning_trains_the_head_or_everything(
    modules, weights, train_all, monkeypatch, capsys
):
    resnet, fine_tune, _ = modules
    images, _, labels, _ = fine_tune.load_data(32)
    assert images.shape[1:] == (3, 32, 32) and images.dtype == np.float32
    few = images[:64], images[64:96], labels[:64], labels[64:96]
    monkeypatch.setattr(fine_tune, "load_data", lambda size: few)
    before, state = resnet.load(weights)
    model, after = fine_tune.fine_tune(weights, train_all=train_all, size=32, epochs=3)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert model.fc.weight.shape == (10, 512)
    changed = not eqx.tree_equal(
        *(eqx.filter(eqx.unfrozen(m).layer3, eqx.is_array) for m in (before, model))
    )
    tracked = not eqx.tree_equal(
        state.get(before.bn1.batch_state_index), after.get(model.bn1.batch_state_index)
    )
    assert changed == tracked == train_all
