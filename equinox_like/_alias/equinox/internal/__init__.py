"""The module `equinox.internal` as an alias of `equinox_like.internal`."""

from equinox_like import internal as _library

from .._forward import names_of

__all__, __getattr__, __dir__ = names_of(_library, __name__)
