"""The version, for the build and for `equinox_like.__version__`."""

__version__ = "0.1.0"
