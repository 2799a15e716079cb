"""Environment variables, which are read once, when the library is imported.

EQX_ON_ERROR                    what a failed check does: raise, nan, breakpoint or off
EQX_ON_ERROR_BREAKPOINT_FRAMES  how many frames JAX's debugger then shows
EQX_GETKEY_SEED                 the seed of `internal.GetKey()`
EQX_REGISTRY                    how `filter_jit` flattens its arguments: with a registry of
                                its `own`, or with JAX's, which is `public`
EQX_RETRACE_WARNING             whether a function that is compiled again and again causes
                                a `RetraceWarning`: on or off
"""

import os
from collections.abc import Sequence
from typing import Any, Final

from ._errors import did_you_mean, warn

MODES: Final = ("raise", "nan", "breakpoint", "off")


def read_choice(name: str, choices: Sequence[str]) -> str:
    """The value of a variable. The first of `choices` is the default."""
    value = os.environ.get(name, choices[0])
    if value not in choices:
        raise ValueError(
            f"The environment variable {name} must be one of {', '.join(choices)}; got "
            f"{value!r}.{did_you_mean(value, choices, '{!r}')}"
        )
    return value


def read_integer(name: str, default: int | None) -> Any:
    value = os.environ.get(name)
    try:
        return default if value is None else int(value)
    except ValueError:
        raise ValueError(
            f"The environment variable {name} must be an integer; got {value!r}."
        ) from None


ON_ERROR: Final = read_choice("EQX_ON_ERROR", MODES)
if ON_ERROR == "breakpoint":
    warn(
        "EQX_ON_ERROR=breakpoint opens a debugger where a check of `error_if` fails: the "
        "program will wait there for input."
    )
BREAKPOINT_FRAMES: Final[int] = read_integer("EQX_ON_ERROR_BREAKPOINT_FRAMES", 1)
GETKEY_SEED: Final[int | None] = read_integer("EQX_GETKEY_SEED", None)
REGISTRY: Final = read_choice("EQX_REGISTRY", ("own", "public"))
WARNS_OF_RETRACES: Final = read_choice("EQX_RETRACE_WARNING", ("on", "off")) == "on"
