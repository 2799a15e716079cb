"""The name in Equinox's file of this name that dynamiqs uses, to define `array**ω`."""

from equinox_like.internal import ω

_Metaω: type = type(ω)
