"""Sets the `__module__` of public functions and exceptions to their public module.

So tracebacks and `help` show `equinox_like.LeafError`, and not the private file. Other
classes keep the name of their file, which `inspect.getsource` needs to find their
source.
"""

from collections.abc import Mapping
from types import FunctionType
from typing import Any


def publish(names: Mapping[str, Any], module: str) -> None:
    """Sets the `__module__` of the public functions and exceptions in `names`."""
    for name, value in names.items():
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if (
            not name.startswith("_")
            and (is_error or isinstance(value, FunctionType))
            and value.__name__ == name
            and value.__module__.startswith(f"{__package__}.")
        ):
            value.__module__ = module
