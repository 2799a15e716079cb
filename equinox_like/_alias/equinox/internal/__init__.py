"""The name `equinox.internal`, under which `equinox_like.internal` answers."""

from equinox_like import internal as _library

from .._forward import names_of

__all__, __getattr__, __dir__ = names_of(_library, __name__)
