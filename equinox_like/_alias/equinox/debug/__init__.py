"""The module `equinox.debug` as an alias of `equinox_like.debug`."""

from equinox_like import debug as _library

from .._forward import names_of

__all__, __getattr__, __dir__ = names_of(_library, __name__)
