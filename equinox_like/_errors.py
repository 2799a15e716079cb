"""The exceptions and warnings of the library, as one tree, and what issues a warning.

    RuntimeError
    ├── DonationError      a buffer was donated and is used again, or cannot be donated
    ├── EquinoxRuntimeError    a check of values failed while a program ran
    │   └── EquinoxTracetimeError  a check failed already while it was traced
    ├── LeafError          reading or writing one leaf of a tree failed (carries `.path`)
    └── MissingKeyError    a layer that draws random numbers got no key
    TypeError
    └── NotAnArrayError    a layer was given something else than an array
    ValueError
    ├── NotInvertibleError  no inverse of a function can be found, or it is wrong
    └── ShapeError          a layer was given an array of another shape than it takes;
                            a TypeError and AssertionError, too
    UserWarning
    ├── DonationWarning    a donated buffer could not be reused
    └── RetraceWarning     a function is compiled again and again

Each is exported from `equinox_like`, so that users can catch it. Exceptions that are
caught within the library are defined where they are raised.

This file imports nothing else from the library than the path that begins the messages of
layers, so that each layer can use it. It also has the last sentence of messages about a
name that is not known.
"""

import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from ._call_path import path_here


class DonationError(RuntimeError):
    """A donated array was used again, or an array cannot be donated.

    The message names each leaf as the caller would write it, for example
    `model.layers[0].weight`.
    """


class DonationWarning(UserWarning):
    """A donated buffer was not reused by any output.

    Issued once for each new trace under `donate="warn"`, where the array stays alive,
    and for an array that was donated by name, which is deleted.
    """


class EquinoxRuntimeError(RuntimeError):
    """A check of values by [`equinox_like.error_if`][] failed while a program ran."""


class EquinoxTracetimeError(EquinoxRuntimeError):
    """A check by [`equinox_like.error_if`][] whose condition is true as a Python value.

    It fails at once, also while a program is traced.
    """


class LeafError(RuntimeError):
    """Reading or writing one leaf of a tree failed.

    **Attributes:**

    - `path`: the leaf's place in the tree, a tuple of JAX key entries as given by
        `jax.tree_util.tree_flatten_with_path`.
    """

    def __init__(self, message: str, path: tuple[Any, ...] = ()):
        super().__init__(message)
        self.path = path

    def __reduce__(self):
        return type(self), (self.args[0], self.path)


class _OfLayer:
    """For an error whose message begins with the path of the layer that makes it."""

    _noted_ = sys.maxsize, None  # for `add_note_on_path`

    def __init__(self, *args: Any):
        if args and not str(args[0]).startswith("At `") and (path := path_here()):
            args = f"At {path}: {args[0]}", *args[1:]
        super().__init__(*args)  # of an exception


class MissingKeyError(_OfLayer, RuntimeError):
    """A layer that draws random numbers was called without a `key`.

    Pass a key in training, and evaluate with [`equinox_like.nn.inference_mode`][].
    """


class NotAnArrayError(_OfLayer, TypeError):
    """A layer was called with something that is not an array, such as text or `None`."""


class NotInvertibleError(ValueError):
    """No inverse of a function can be derived, or the given inverse is wrong.

    Raised by [`equinox_like.filter_invertible`][].
    """


class RetraceWarning(UserWarning):
    """A compiled function is traced and compiled again and again.

    Issued once for each function of [`equinox_like.filter_jit`][]: at the 8th trace for
    another static value at the same place, such as a Python number, a string, or a
    function that is made in each call; and at the 16th for another shape of the same
    array, for another structure, or for another value of a context; and at the 32nd trace
    in any case. It tells the place, the last two values and the fix. And issued once for
    each line that defines a function, at the 8th function from it that is compiled.

    `warnings.filterwarnings("ignore", category=equinox_like.RetraceWarning)` or the
    environment variable `EQX_RETRACE_WARNING=off` switches it off.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp
        import pytest

        @eqx.filter_jit
        def step(x, rate):
            return x * rate

        with pytest.warns(eqx.RetraceWarning, match="pass `jnp.asarray"):
            for i in range(9):
                step(jnp.ones(3), 0.9**i)  # compiled 9 times
        ```
    """


class ShapeError(_OfLayer, ValueError, TypeError, AssertionError):
    """A layer was called with an array whose shape it cannot take.

    It derives from three built-in classes, because code for other libraries may catch any
    of them.
    """


def did_you_mean(
    name: Any, options: Iterable[str], form: str = "`{}`", cutoff: float = 0.6
) -> str:
    """` Did you mean ...?` with the option that is most like `name`; or nothing."""
    if not isinstance(name, str):
        return ""
    by_lower = {option.lower(): option for option in options}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
    return "".join(f" Did you mean {form.format(by_lower[n])}?" for n in near)


# The folder of the library as frames name it. PyInstaller and the like compile without
# the path that `__file__` has.
FOLDER = os.path.join(os.path.dirname(sys._getframe().f_code.co_filename), "")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn` with the line that called into the library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def is_internal(filename: str) -> bool:
    # Runtime type checkers add their own frames around the library's functions. JAX calls
    # the library when it transforms a compiled function.
    parts = "/jaxtyping/", "/jax/_src/"
    return filename.startswith((FOLDER, "<@beartype")) or any(
        p in filename for p in parts
    )
