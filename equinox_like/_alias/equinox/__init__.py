"""The name `equinox`, under which `equinox_like` answers: see `equinox_like.as_equinox`."""

import equinox_like as _library

from . import _module as _module, debug as debug, internal as internal, nn as nn
from ._forward import names_of

# The version whose interface this is.
__version__ = "0.13.8"
__all__, __getattr__, __dir__ = names_of(_library, __name__)
