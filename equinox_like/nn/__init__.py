"""Layer 6: neural network layers, each a Module."""

from .._tree import tree_inference as _tree_inference
from ._conv import (
    Conv as Conv,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    Conv3d as Conv3d,
)
from ._dropout import Dropout as Dropout
from ._linear import Identity as Identity, Linear as Linear
from ._mlp import MLP as MLP
from ._norm import LayerNorm as LayerNorm
from ._pool import (
    AvgPool1d as AvgPool1d,
    AvgPool2d as AvgPool2d,
    AvgPool3d as AvgPool3d,
    MaxPool1d as MaxPool1d,
    MaxPool2d as MaxPool2d,
    MaxPool3d as MaxPool3d,
    Pool as Pool,
)
from ._sequential import Lambda as Lambda, Sequential as Sequential
from ._stateful import StatefulLayer as StatefulLayer

inference_mode = _tree_inference
"""[`equinox_like.tree_inference`][] by another name."""
