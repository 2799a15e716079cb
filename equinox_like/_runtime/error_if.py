"""`error_if`: errors that depend on values, from within compiled programs.

A check is a primitive from what failed, and which message that has, to one bool, on which
the returned arrays then depend. Where it fails, the program calls Python, which raises. All
that is known of the failure travels in the text of that error, through JAX's, to the call
of `filter_jit` that waits for the program (`_jit/checks.py`): nothing is kept beside
it, so failures in other threads cannot be confused with it.
"""

import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._compat.frames import Frame, traced_frames
from .._compat.primitive import call_host, for_whole_batch
from .._compat.trace_state import at_top_level
from .._compat.tracer import Tracer
from .._compat.varying import varying_axes
from .._core.base import frames_hidden
from .._core.parts import take_apart
from .._environment import BREAKPOINT_FRAMES, MODES, ON_ERROR
from .._errors import EquinoxRuntimeError
from .._jit.checks import register_check
from .._tree import is_array, is_array_like
from .unvmap import unvmap_any_p

_T = TypeVar("_T")

OnError = Literal["default", "raise", "nan", "breakpoint", "off"]


@frames_hidden
def error_if(
    x: _T, pred: ArrayLike, msg: str, *, on_error: OnError | str = "default"
) -> _T:
    """Raises an error if a value turns out to be bad when the program runs.

    **Arguments:**

    - `x`: any pytree that holds an array. The check belongs to what is returned for it: if
        no array of that is used, JAX leaves out the check as it does all that is unused.
    - `pred`: whether it is an error: a bool, or an array of any shape, of which one true
        element suffices. Under `jax.vmap` the error lists the elements of the batch that
        failed.
    - `msg`: what the error says.
    - `on_error`: what happens then; by default what the environment variable `EQX_ON_ERROR`
        said when the library was imported, and otherwise `"raise"`.
        - `"raise"`: an error is raised. On TPU, where a program cannot be ended from
            within, the message is printed and the program waits for the enter key.
        - `"nan"`: the program goes on with NaN in all arrays of `x`; with the greatest
            integer, and `True`, in those of another dtype. Keys stay what they are.
        - `"breakpoint"`: prints the message and opens JAX's debugger, with as many frames
            as `EQX_ON_ERROR_BREAKPOINT_FRAMES` said (1 by default). Then as `"nan"`.
        - `"off"`: nothing is checked.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays; `x` itself if `pred` is `False`, for which nothing
    is done. It is differentiated as the identity.

    **Raises:**

    [`equinox_like.EquinoxRuntimeError`][], from code that is not compiled, and from the
    call of the outermost [`equinox_like.filter_jit`][], which waits for programs that hold
    a check. Under `jax.jit` it is an error of JAX that has the message in its text, and
    comes when the result is used.
    At once: `ValueError` if `x` holds no array, `RuntimeError` for another `on_error`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        def root(x):
            x = eqx.error_if(x, x < 0, "`x` must not be negative.")
            return jnp.sqrt(x)

        assert root(jnp.asarray(4.0)) == 2
        try:
            root(jnp.asarray(-4.0))
        except eqx.EquinoxRuntimeError as e:
            assert "`x` must not be negative." in str(e)
        ```
    """
    return branched_error_if(x, pred, 0, (msg,), on_error=on_error)


@frames_hidden
def branched_error_if(
    x: _T,
    pred: ArrayLike,
    index: ArrayLike,
    msgs: Sequence[str],
    *,
    on_error: OnError | str = "default",
) -> _T:
    """[`equinox_like.error_if`][] with one of several messages, chosen by a value.

    **Arguments:**

    - `x`, `pred`, `on_error`: as for `error_if`.
    - `index`: which message: an integer, or an array of them. If it is no scalar, it is
        broadcast against `pred`, and each true element has a message of its own.
    - `msgs`: the messages, a list or tuple. If a check fails whose `index` is not of one of
        them, the error says so.

    **Returns:**

    As `error_if`.

    **Raises:**

    As `error_if`; `TypeError` if `index` is not of integers.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        def check(x):
            which = jnp.where(jnp.isnan(x), 0, 1)
            messages = ["It is not a number.", "It is too large."]
            return eqx.branched_error_if(x, ~(x < 10), which, messages)

        assert check(jnp.asarray(4.0)) == 4
        try:
            check(jnp.asarray(jnp.nan))
        except eqx.EquinoxRuntimeError as e:
            assert "It is not a number." in str(e)
        ```
    """
    mode = _mode(on_error)
    messages = _check_messages(msgs)
    if mode == "off" or _is_plainly_false(pred):
        return x
    arrays, rest = take_apart(x, may_depend)
    if not arrays:
        raise ValueError(
            "No arrays are in the `x` of `error_if`, so there is nothing that the check "
            "could belong to. Pass an array that is used afterwards, and use the one that "
            f"is returned. The check was for: {', '.join(map(repr, messages))}."
        )
    arrays = [jnp.asarray(array) for array in arrays]
    if not _is_known_false(pred):
        failed = _failed(*_by_element(pred, index), messages, mode)
        if isinstance(failed, Tracer) or failed:
            arrays = _spoilt_if(failed, arrays, mode)
    return rest.fill(arrays)


def may_depend(x: Any) -> bool:
    """Whether a leaf is an array that a program can compute."""
    return is_array(x) and x.dtype != jax.dtypes.float0


def _mode(on_error: str) -> str:
    if on_error == "default":
        return ON_ERROR
    if on_error not in MODES:
        raise RuntimeError(
            f"`on_error` is 'default' or one of {', '.join(map(repr, MODES))}; got "
            f"{on_error!r}."
        )
    return on_error


def _check_messages(msgs: Sequence[str]) -> tuple[str, ...]:
    wrong = [m for m in msgs if not isinstance(m, str)]
    if wrong or isinstance(msgs, str):
        raise TypeError(
            "`branched_error_if` takes a list or tuple of strings as its messages; got "
            f"{msgs!r}."
        )
    return tuple(msgs)


def _is_plainly_false(pred: Any) -> bool:
    if not is_array_like(pred):
        raise TypeError(
            "The predicate of `error_if` is a bool or an array; got a "
            f"{type(pred).__name__}."
        )
    return not is_array(pred) and not hasattr(pred, "__jax_array__") and not pred


def _is_known_false(pred: Any) -> bool:
    """Whether it is false for certain, and that is no secret to anyone.

    What is known may still be computed just now: within a trace it is not waited for.
    """
    if isinstance(pred, Tracer) or hasattr(pred, "__jax_array__"):
        return False
    if isinstance(pred, jax.Array):
        return at_top_level() and not jnp.any(pred)
    return not np.any(pred)


def _by_element(pred: Any, index: Any) -> tuple[jax.Array, jax.Array]:
    """Two arrays of one shape, which is `()` if there is only one index."""
    pred, index = jnp.asarray(pred).astype(bool), jnp.asarray(index)
    if not jnp.issubdtype(index.dtype, np.integer):
        raise TypeError(
            f"The index of `branched_error_if` is an integer; got one of {index.dtype}."
        )
    if index.ndim == 0:
        return pred.any(), index
    shape = jnp.broadcast_shapes(pred.shape, index.shape)
    return jnp.broadcast_to(pred, shape), jnp.broadcast_to(index, shape)


def _failed(
    pred: jax.Array, index: jax.Array, messages: tuple[str, ...], mode: str
) -> Any:
    """One bool for all: whether an element of the batch has failed."""
    if mode == "nan":
        return unvmap_any_p.bind(pred)
    frames, in_shard_map = traced_frames(_PASSED_OVER)
    if in_shard_map:
        pred, index = _of_all_devices(pred, index)
    check = Check(messages, frames, mode == "breakpoint")
    failed = error_if_p.bind(pred, index, check=check)
    return _stopping_if(failed) if mode == "breakpoint" else failed


def _of_all_devices(pred: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes all devices of a `shard_map` fail with one of them.

    Else they would wait for it for ever at their next `psum`.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if varying_axes(jax.typeof(lax.axis_index(axes))):
        # Types tell along which axes it differs. (With `check_vma=False` they do not.)
        axes = tuple(varying_axes(jax.typeof(pred)) | varying_axes(jax.typeof(index)))
    if not axes:
        return pred, index
    least = np.asarray(np.iinfo(index.dtype).min, index.dtype)
    index = lax.pmax(jnp.where(pred, index, least), axes)
    return lax.psum(pred.astype(np.int32), axes) > 0, index


def _stopping_if(failed: Any) -> Any:
    # A function of its own, lest JAX take what it traced for another check.
    def stop() -> Any:
        jax.debug.breakpoint(num_frames=BREAKPOINT_FRAMES)
        return True

    return lax.cond(failed, stop, lambda: False)


def _spoilt_if(failed: Any, arrays: list[Any], mode: str) -> list[Any]:
    """The arrays, but NaN or the like if `failed`; in derivatives they are as they were.

    A `select` would do, but XLA merges it with what comes before and after, and computes
    all of that again for the next check: 40 of them took 16 times as long.
    """
    spoil = functools.partial(_spoilt, mode=mode)
    return lax.cond(failed, lambda xs: list(map(spoil, xs)), lambda xs: xs, arrays)


def _spoilt(x: Any, mode: str) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        if mode == "nan":
            return x
        data = _spoilt(jax.random.key_data(x), mode)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, np.inexact):
        return x + lax.full_like(x, np.nan)
    if jnp.issubdtype(x.dtype, np.integer):
        return lax.full_like(x, jnp.iinfo(x.dtype).max)
    return lax.full_like(x, True)


@dataclasses.dataclass(frozen=True)
class Check:
    """What a check says, and where it stands."""

    messages: tuple[str, ...]
    # Of the user's functions that lead to it, within the innermost that JAX traces whole.
    frames: tuple[Frame, ...]
    goes_on: bool

    def fail(self, pred: np.ndarray, index: np.ndarray) -> None:
        """Called by a compiled program."""
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
        """Called with known values, not by a compiled program."""
        pred = np.asarray(pred)
        if pred.any():
            text = self._describe(pred, np.asarray(index))
            if not self.goes_on:
                raise EquinoxRuntimeError(_report(text))
            print(text, file=sys.stderr)
        return np.asarray(pred.any())

    def _describe(self, pred: np.ndarray, index: np.ndarray) -> str:
        lines = traceback.format_list(
            [traceback.FrameSummary(*f, lookup_line=False) for f in self.frames]
        )
        name = EquinoxRuntimeError.__name__
        text = "".join(lines) + f"\n{name}: " + "\n".join(self._failures(pred, index))
        # On its way through C++ a NUL would end it, and a lone surrogate the process.
        return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")

    def _failures(self, pred: np.ndarray, index: np.ndarray) -> Iterator[str]:
        if pred.ndim == 0:
            yield self._message(int(index))
            return
        places = np.argwhere(pred).tolist()
        if not places:
            yield f"An element of a batch failed on another device: {self!r}"
            return
        yield f"{len(places)} of {pred.size} elements of a batch failed."
        for place in places[:_MAX_LISTED]:
            shown = place[0] if len(place) == 1 else tuple(place)
            yield f"Batch element {shown}: {self._message(int(index[tuple(place)]))}"
        if len(places) > _MAX_LISTED:
            yield f"... and {len(places) - _MAX_LISTED} more."

    def _message(self, index: int) -> str:
        if 0 <= index < len(self.messages):
            return self.messages[index]
        return (
            f"A check failed whose index {index} is invalid: `branched_error_if` was given "
            f"{len(self.messages)} messages."
        )

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.messages))


def _run_check(pred: jax.Array, index: jax.Array, check: Check) -> jax.Array:
    fail = functools.partial(call_host, function=check.fail, on_tpu=check.fail_on_tpu)
    return lax.cond(pred.any(), fail, lambda *_: np.False_, pred, index)


error_if_p = for_whole_batch(
    "error_if",
    _run_check,
    like=lambda pred, index: pred.any(),
    eager=lambda pred, index, check: check.fail_eagerly_if(pred, index),
)


def _explain(error: Exception) -> Exception | None:
    if not isinstance(error, RuntimeError | ValueError):
        return None
    _, begin, rest = str(error).partition(f"\n{_BEGIN}\n")
    text, end, _ = rest.partition(f"\n{_END}\n")
    return EquinoxRuntimeError(_report(text)) if begin and end else None


def _report(text: str) -> str:
    return f"{_ABOVE}\n{text}\n\n{_ADVICE}"


register_check(error_if_p, _explain)

_PASSED_OVER = (str(Path(__file__).parents[1]) + os.sep,)
_MAX_LISTED = 10
_BEGIN = "---- a check by `equinox_like.error_if` failed ----"
_END = (
    "---- with `equinox_like.filter_jit` in place of `jax.jit` this would be all of the "
    "error ----"
)
_ABOVE = "The frames above are those outside of JIT. Below are those inside of JIT:"
_ADVICE = """\
--------------------
This error is from a check of values, while the program ran. To look at them:

- Set the environment variable `EQX_ON_ERROR=breakpoint`, and a debugger opens where the
  check is. Most of the usual commands work: `u`, `d`, `p name`, `c`.
- Set `JAX_DISABLE_JIT=1`, and most of the program runs as ordinary Python.
- Set `EQX_ON_ERROR=nan`, and it goes on with NaN in place of the values checked.
"""
