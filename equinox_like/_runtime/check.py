"""The primitives of `error_if`, the message, and how that gets to the user.

A check is a primitive that maps the failed elements, and the indices of their messages,
to one bool. If it is true, the program takes a branch that calls Python, which raises.
The text of this error holds all that is known of the failure. JAX passes it on to the
call of `filter_jit` that waits for the program (`_jit/checks.py`). There is no global
state, so failures in other threads cannot be confused.

All checks of a program whose arrays have the same types share one `jax.jit` function with
one call of Python. What differs is the number of the check: its place in JAX's list of
what the program keeps alive. So a check lives as long as its program. Each device makes
the call with the whole batch: JAX's own callbacks run on one device, and the others would
wait for it for ever if it fails. For XLA the call has a side effect, because a pure call
may be moved out of a loop that then takes no step. For JAX it has none, so JAX removes it
with a value that is not used.
"""

import dataclasses
import functools
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import lax

from .._compat.errors import Frame
from .._compat.host import call_host
from .._compat.primitives import finalisations, for_whole_batch
from .._errors import EquinoxRuntimeError
from .._jit.checks import register_check


@dataclasses.dataclass(frozen=True)
class Check:
    """The messages of a check, and its place in the user's code."""

    messages: tuple[str, ...]
    # The user's stack frames, within the innermost function that JAX traces as a whole.
    frames: tuple[Frame, ...]
    goes_on: bool

    def fail(self, pred: np.ndarray, index: np.ndarray) -> None:
        """Raises or prints a failure."""
        text = self._describe(pred, index)
        if self.goes_on:
            print(text, file=sys.stderr)
        else:
            raise EquinoxRuntimeError(f"\n{_BEGIN}\n{text}\n{_END}\n")

    def fail_on_tpu(self, pred: np.ndarray, index: np.ndarray) -> None:
        print(self._describe(pred, index), file=sys.stderr)
        if not self.goes_on:
            input("Press enter to go on with NaN in place of the values checked.")

    def fail_eagerly_if(self, pred: Any, index: Any) -> np.ndarray:
        """The check outside of compiled programs, where the values are known."""
        pred, index = np.asarray(pred), np.asarray(index)
        if pred.any() and self.goes_on:
            self.fail(pred, index)
        elif pred.any():
            raise _error_of(self._describe(pred, index))
        return np.asarray(pred.any())

    def _describe(self, pred: np.ndarray, index: np.ndarray) -> str:
        lines = traceback.format_list(
            [traceback.FrameSummary(*f, lookup_line=False) for f in self.frames]
        )
        name = EquinoxRuntimeError.__name__
        text = "".join(lines) + f"\n{name}: " + "\n".join(self._failures(pred, index))
        # The text passes through C++, where a NUL would cut it off, and a lone
        # surrogate would crash the process.
        return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")

    def _failures(self, pred: np.ndarray, index: np.ndarray) -> Iterator[str]:
        if pred.ndim == 0:
            yield self.message(int(index))
            return
        places = np.argwhere(pred).tolist()
        if not places:
            yield f"An element of a batch failed on another device: {self!r}"
            return
        yield f"{len(places)} of {pred.size} elements of a batch failed."
        for place in places[:_MAX_LISTED]:
            shown = place[0] if len(place) == 1 else tuple(place)
            yield f"Batch element {shown}: {self.message(int(index[tuple(place)]))}"
        if len(places) > _MAX_LISTED:
            yield f"... and {len(places) - _MAX_LISTED} more."

    def message(self, index: int) -> str:
        if 0 <= index < len(self.messages):
            return self.messages[index]
        return (
            f"A check failed with the invalid index {index}: `branched_error_if` was "
            f"given {len(self.messages)} messages."
        )

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.messages))


def _any(pred: Any, *_: Any, **__: Any) -> Any:
    return pred.any() if pred.ndim else pred


def _fail(checks: Any, pred: Any, index: Any, number: Any) -> None:
    checks[number.flat[0]].fail(pred, index)


def _fail_on_tpu(checks: Any, pred: Any, index: Any, number: Any) -> None:
    checks[number.flat[0]].fail_on_tpu(pred, index)


def _report(pred: Any, index: Any, number: Any, is_removable: bool) -> Any:
    # A single bool is true if it is reported. XLA need not compute it once more.
    args = pred if pred.ndim else np.True_, index, number
    to = {"function": _fail, "on_tpu": _fail_on_tpu}
    return call_host(*args, **to, is_removable=is_removable)


def _report_if(pred: Any, index: Any, check: Check) -> Any:
    fail = lambda _, *args: check.fail(*args)  # noqa: E731
    call = functools.partial(call_host, function=fail, on_tpu=fail)
    return lax.cond(_any(pred), call, lambda *_: np.False_, pred, index)


# Whether any element fails. If that is known, as in code that is not compiled, it raises.
error_if_p = for_whole_batch(
    "error_if",
    _any,
    like=_any,
    eager=lambda pred, index, check: check.fail_eagerly_if(pred, index),
)
# Reports a failure of the check with the number, and returns `True`: for a branch
# that runs if any element fails. `is_removable`: whether the compiler may drop it if its
# result is unused. Others may not even be moved, for example out of a loop of no step.
report_failure_p = for_whole_batch(
    "report_failure", _report, like=_any, eager=lambda *_, **__: np.True_
)
# There are no numbers without our primitives, so the first one reports.
finalisations[error_if_p] = _report_if
finalisations[report_failure_p] = lambda *_, **__: np.True_


def _error_of(text: str) -> EquinoxRuntimeError:
    return EquinoxRuntimeError(f"{_ABOVE}\n{text}\n\n{_ADVICE}")


_MAX_LISTED = 10
_BEGIN = "---- a check by `equinox_like.error_if` failed ----"
_END = (
    "---- with `equinox_like.filter_jit` in place of `jax.jit` this would be the "
    "whole error ----"
)
_ABOVE = "The frames above are those outside of JIT. Below are those inside of JIT:"
_ADVICE = """\
--------------------
This error is from a check of values, while the program ran. To look at them:

- Set the environment variable `EQX_ON_ERROR=breakpoint`, and a debugger opens where the
  check is. Most of the usual commands work: `u`, `d`, `p name`, `c`.
- Set `JAX_DISABLE_JIT=1`, and most of the program runs as ordinary Python.
- Set `EQX_ON_ERROR=nan`, and the program goes on with NaN in place of these values.
"""


def check_if(pred: Any, index: Any, check: Check) -> Any:
    """Binds `error_if_p`: whether any element fails."""
    register_check(error_if_p, _BEGIN, _END, _error_of)
    return error_if_p.bind(pred, index, check=check)
