"""All that the library needs of unstable JAX; each file says what for."""

import importlib
from typing import Any


def private(name: str) -> Any:
    """The module `jax._src.<name>`, or `None` if there is none."""
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None
