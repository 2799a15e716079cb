"""The version, said once: the build reads it from here, and so does `__version__`."""

__version__ = "0.1.0"
