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
from typing import Final

from ._warn import warn

MODES: Final = ("raise", "nan", "breakpoint", "off")


def read_mode(value: str) -> str:
    if value not in MODES:
        raise ValueError(
            f"The environment variable EQX_ON_ERROR must be one of {', '.join(MODES)}; "
            f"got {value!r}."
        )
    if value == "breakpoint":
        warn(
            "EQX_ON_ERROR=breakpoint opens a debugger where a check of `error_if` "
            "fails: the program will wait there for input."
        )
    return value


def read_frames(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            "The environment variable EQX_ON_ERROR_BREAKPOINT_FRAMES must be an "
            f"integer; got {value!r}."
        ) from None


def read_seed(value: str | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        raise ValueError(
            "The environment variable EQX_GETKEY_SEED must be an integer; got "
            f"{value!r}."
        ) from None


def read_registry(value: str) -> str:
    if value not in ("own", "public"):
        raise ValueError(
            "The environment variable EQX_REGISTRY must be own or public; got "
            f"{value!r}."
        )
    return value


def read_retrace_warning(value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError(
            "The environment variable EQX_RETRACE_WARNING must be on or off; got "
            f"{value!r}."
        )
    return value == "on"


ON_ERROR: Final = read_mode(os.environ.get("EQX_ON_ERROR", "raise"))
BREAKPOINT_FRAMES: Final = read_frames(
    os.environ.get("EQX_ON_ERROR_BREAKPOINT_FRAMES", "1")
)
GETKEY_SEED: Final = read_seed(os.environ.get("EQX_GETKEY_SEED"))
REGISTRY: Final = read_registry(os.environ.get("EQX_REGISTRY", "own"))
WARNS_OF_RETRACES: Final = read_retrace_warning(
    os.environ.get("EQX_RETRACE_WARNING", "on")
)
