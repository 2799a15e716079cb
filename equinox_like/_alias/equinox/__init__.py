"""The package `equinox` as an alias of `equinox_like`: see
`equinox_like.as_equinox`."""

import equinox_like as _library

from . import debug as debug, internal as internal, nn as nn
from ._files import (
    tree_deserialise_leaves as tree_deserialise_leaves,
    tree_serialise_leaves as tree_serialise_leaves,
)
from ._forward import names_of
from ._names import StrictConfig as StrictConfig, static_field as static_field
from ._private import install

# The version of Equinox that the library is compatible with.
__version__ = "0.13.8"
__all__, __getattr__, __dir__ = names_of(_library, __name__)
install()
