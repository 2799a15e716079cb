"""The package `equinox` as an alias of `equinox_like`, see `equinox_like.as_equinox`."""

from ._modules import install
from ._names import (
    StrictConfig as StrictConfig,
    static_field as static_field,
    tree_deserialise_leaves as tree_deserialise_leaves,
    tree_serialise_leaves as tree_serialise_leaves,
)

# The version of Equinox that the library is compatible with.
__version__ = "0.13.8"
install()
