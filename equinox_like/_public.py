"""What tracebacks and `help` show of public names.

`publish` sets the `__module__` of functions and exceptions to their public module. So
tracebacks and `help` show `equinox_like.LeafError`, and not the private file. Other
classes keep the name of their file, which `inspect.getsource` needs to find their
source.

`describe_arguments` moves what the constructor of a layer says of its arguments to the
docstring of the class. `help` begins with that, and shows `__init__` two screens later.
The pages are made from the source, where both have their own docstring.
"""

import sys
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


def describe_arguments(names: Mapping[str, Any]) -> None:
    """Describes the arguments of public classes after the first paragraph of each."""
    described = set()
    # Before Python 3.13, a docstring is indented as it is in the source.
    indent = "" if sys.version_info >= (3, 13) else "    "
    for name, value in names.items():
        if name.startswith("_") or not isinstance(value, type):
            continue
        arguments = (value.__init__.__doc__ or "").rstrip()
        if arguments.startswith("**Arguments:**") and value.__doc__:
            purpose, _, rest = value.__doc__.partition("\n\n")
            arguments = indent + arguments.replace(f"\n{indent}", "\n")
            if not rest.lstrip().startswith("!!!"):
                rest = f"{indent}**Details:**\n\n{rest}"
            value.__doc__ = f"{purpose}\n\n{arguments}\n\n{rest}"
            described.add(value.__init__)
    for init in described:  # now, because several classes may share one
        init.__doc__ = None
