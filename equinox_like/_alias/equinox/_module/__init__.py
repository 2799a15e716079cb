"""Private names of Equinox that published libraries use."""

from . import _module as _module
