"""ResNet-18 and ResNet-34, with the weights of torchvision."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from safetensors.numpy import load_file

import equinox_like as eqx

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
# The mean and standard deviation of the channels of ImageNet, with which the weights
# were trained.
MEAN, STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], "f4")


def conv(in_size: int, out_size: int, kernel: int, stride: int, key: PRNGKeyArray):
    return eqx.nn.Conv2d(
        in_size, out_size, kernel, stride, kernel // 2, use_bias=False, key=key
    )


def norm(size: int) -> eqx.nn.BatchNorm:
    """`torch.nn.BatchNorm2d(size)`."""
    return eqx.nn.BatchNorm(size, "batch", mode="batch", momentum=0.9, unbiased=True)


class Block(eqx.Module):
    conv1: eqx.nn.Conv2d
    bn1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    bn2: eqx.nn.BatchNorm
    downsample: eqx.nn.Sequential | None

    def __init__(self, in_size: int, size: int, stride: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.conv1 = conv(in_size, size, 3, stride, keys[0])
        self.bn1 = norm(size)
        self.conv2 = conv(size, size, 3, 1, keys[1])
        self.bn2 = norm(size)
        self.downsample = None
        if stride != 1 or in_size != size:
            self.downsample = eqx.nn.Sequential(
                [conv(in_size, size, 1, stride, keys[2]), norm(size)]
            )

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        y, state = self.bn1(self.conv1(x), state)
        y, state = self.bn2(self.conv2(jax.nn.relu(y)), state)
        if self.downsample is not None:
            x, state = self.downsample(x, state)
        return jax.nn.relu(x + y), state


class ResNet(eqx.Module):
    conv1: eqx.nn.Conv2d
    bn1: eqx.nn.BatchNorm
    pool: eqx.nn.MaxPool2d
    layer1: list[Block]
    layer2: list[Block]
    layer3: list[Block]
    layer4: list[Block]
    fc: eqx.nn.Linear

    def __init__(self, depths: Sequence[int], num_classes: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 6)
        self.conv1 = conv(3, 64, 7, 2, keys[0])
        self.bn1 = norm(64)
        self.pool = eqx.nn.MaxPool2d(3, stride=2, padding=1)

        def stage(size: int, stride: int, depth: int, key: PRNGKeyArray):
            first, *rest = jax.random.split(key, depth)
            start = Block(size // stride, size, stride, key=first)
            return [start, *(Block(size, size, 1, key=key) for key in rest)]

        self.layer1 = stage(64, 1, depths[0], keys[1])
        self.layer2 = stage(128, 2, depths[1], keys[2])
        self.layer3 = stage(256, 2, depths[2], keys[3])
        self.layer4 = stage(512, 2, depths[3], keys[4])
        self.fc = eqx.nn.Linear(512, num_classes, key=keys[5])

    def features(self, image: Array, state: eqx.nn.State):
        """512 numbers for an image of shape `(3, height, width)`, and the next state."""
        x, state = self.bn1(self.conv1(image), state)
        x = self.pool(jax.nn.relu(x))
        for block in (*self.layer1, *self.layer2, *self.layer3, *self.layer4):
            x, state = block(x, state)
        return x.mean(axis=(1, 2)), state

    def __call__(self, image: Array, state: eqx.nn.State):
        """A logit for each class, and the next state."""
        x, state = self.features(image, state)
        return self.fc(x), state


def rename(name: str) -> str:
    """The name in the checkpoint of what has `name` here."""
    return name.replace(".layers.", ".")  # of a `Sequential`


TRACKED = "running_mean", "running_var", "num_batches_tracked"


def load(weights: str | Path | Mapping[str, Any], depth: int = 18):
    """The model and its state, of a safetensors file or a dictionary of arrays."""
    theirs = weights if isinstance(weights, Mapping) else load_file(weights)
    parameters = {name: x for name, x in theirs.items() if not name.endswith(TRACKED)}
    # Shapes and dtypes only: nothing is initialised.
    make = eqx.nn.make_with_state(ResNet)
    classes, key = len(theirs["fc.bias"]), jax.random.key(0)
    model, state = eqx.filter_eval_shape(make, DEPTHS[depth], classes, key=key)
    model = eqx.load_state_dict(model, parameters, rename=rename)
    for path, layer in eqx.select(model).of(eqx.nn.BatchNorm):
        # From "layer2[0].downsample.layers[1]" to "layer2.0.downsample.1".
        name = rename(path.replace("[", ".").replace("]", ""))
        assert layer.batch_state_index and layer.batch_counter
        mean, variance = (jnp.array(theirs[f"{name}.{x}"]) for x in TRACKED[:2])
        state = state.set(layer.batch_state_index, (mean, variance))
        # So many steps that the layer takes the statistics as they are.
        state = state.set(layer.batch_counter, jnp.array(1_000_000))
    return model, state
