"""All that the library needs of unstable JAX; each file says what for."""

import importlib
from typing import Any


def find(name: str, *modules: str) -> Any:
    """What has this name in the first of these modules that has it; or `None`."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


def private(name: str) -> Any:
    """The module `jax._src.<name>`, or `None` if there is none."""
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None
