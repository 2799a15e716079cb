"""The module `equinox.nn` as an alias of `equinox_like.nn`."""

from equinox_like import nn as _library

from .._forward import names_of

__all__, __getattr__, __dir__ = names_of(_library, __name__)
