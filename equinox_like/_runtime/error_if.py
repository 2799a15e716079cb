"""`error_if`: errors that depend on values, from within compiled programs.

A check is a primitive that maps the failed elements, and the indices of their messages,
to one bool. If it is true, the program takes a branch that calls Python, which raises.
The text of this error holds all that is known of the failure. JAX passes it on to the
call of `filter_jit` that waits for the program (`_jit/checks.py`). There is no global
state, so failures in other threads cannot be confused. What failed may be filled with NaN,
or another conspicuous value.

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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat.axes import varying_axes
from .._compat.errors import Frame, traced_frames
from .._compat.host import call_host, number_p
from .._compat.primitives import finalisations, for_whole_batch
from .._compat.tracing import Tracer, at_top_level, within_program
from .._core.base import frames_hidden
from .._core.flat_call import take_apart
from .._environment import BREAKPOINT_FRAMES, MODES, ON_ERROR
from .._errors import FOLDER, EquinoxRuntimeError, EquinoxTracetimeError, did_you_mean
from .._jit.checks import register_check
from .._tree.arrays import is_typed_key, with_key, without_key
from .._tree.filters import is_array, is_array_like
from .._tree.nodes import describe_node
from .._typing import ArrayLike
from .primitives import unvmap_any_p


def may_depend(x: Any) -> bool:
    """Whether a leaf is an array that a program can compute, and so not a float0."""
    return is_array(x) and x.dtype != jax.dtypes.float0


def spoilt(x: Any, mode: str = "raise") -> Any:
    """An array of NaN, of the largest integer or of `True`, in the dtype of `x`."""
    if is_typed_key(x):
        if mode == "nan":
            return x
        return with_key(spoilt(without_key(x), mode), x)
    if jnp.issubdtype(x.dtype, np.inexact):
        return x + lax.full_like(x, np.nan)
    if jnp.issubdtype(x.dtype, np.integer):
        return lax.full_like(x, jnp.iinfo(x.dtype).max)
    return lax.full_like(x, True)


_T = TypeVar("_T")

_AT_ONCE = (
    "The predicate of this check is true as a Python value, so it fails while the program "
    "is traced, also in a branch that is not taken. In a branch, pass `jnp.asarray(True)`: "
    "that fails if the branch runs."
)

OnError = Literal["default", "raise", "nan", "breakpoint", "off"]


@frames_hidden
def error_if(
    x: _T, pred: ArrayLike, msg: str, *, on_error: OnError | str = "default"
) -> _T:
    """Raises an error if a value turns out to be bad when the program runs.

    **Arguments:**

    - `x`: any pytree that holds an array. The check is attached to the returned value: if
        none of its arrays is used, JAX removes the check as dead code.
    - `pred`: a bool, or an array of any shape. The check fails if any element is true.
        Under `jax.vmap` the error lists the elements of the batch that failed.
    - `msg`: the message of the error.
    - `on_error`: what happens if the check fails; by default the value of the environment
        variable `EQX_ON_ERROR` at import, or `"raise"` if it is not set.
        - `"raise"`: an error is raised. On TPU, where a program cannot stop itself, the
            message is printed and the program waits for the enter key.
        - `"nan"`: the program goes on with NaN in all arrays of `x`, under `jax.vmap` in
            those of the elements that failed, so that an array that the batch shares is
            no longer shared; integer arrays are filled with the greatest integer,
            boolean arrays with `True`. PRNG keys do not change.
        - `"breakpoint"`: prints the message and opens JAX's debugger. The environment
            variable `EQX_ON_ERROR_BREAKPOINT_FRAMES` sets the number of frames (1 by
            default). Then as `"nan"`.
        - `"off"`: nothing is checked.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays; `x` itself if `pred` is the Python value
    `False`. It is differentiated as the identity.

    **Raises:**

    [`equinox_like.EquinoxTracetimeError`][] at once, also while a program is traced, if
    `pred` is true as a Python value and `on_error` is `"raise"`. A branch that is not taken
    is traced, too: `jnp.asarray(True)` or `np.True_` fails only where it runs.
    [`equinox_like.EquinoxRuntimeError`][], from code that is not compiled, and from the
    call of the outermost [`equinox_like.filter_jit`][], which waits for the result if
    the program has a check. Under `jax.jit`, and in a loop or branch under a `jax.grad`
    or `jax.vmap` that is not compiled, it is an error of JAX with the message in its
    text, raised when the result is used. `ValueError` if `x` has no array, and
    `RuntimeError` for another `on_error`, are raised at once.

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
    - `index`: the index of the message: an integer or an array of integers. An array is
        broadcast against `pred`, and gives each true element its own message.
    - `msgs`: the messages, a list or tuple. If a check fails and its `index` is out of
        range, the error says so.

    **Returns:**

    As `error_if`.

    **Raises:**

    As `error_if`, at once only if `index` is a Python integer, too; `TypeError` if `index`
    is not of integers, `ValueError` if it cannot be broadcast against `pred`.

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
    is_plain = _is_plain(pred)
    if mode == "off" or (is_plain and not pred):
        return x
    arrays, rest = take_apart(x, may_depend)
    if not arrays:
        raise ValueError(
            "No arrays are in the `x` of `error_if`, so there is nothing to attach the "
            "check to. Pass an array, and use the returned one in its place. The check "
            f"was for: {', '.join(map(repr, messages))}."
        )
    if mode == "raise" and is_plain and isinstance(index, int):
        error = EquinoxTracetimeError(Check(messages, (), goes_on=False).message(index))
        error.add_note(_AT_ONCE)
        raise error
    arrays = [jnp.asarray(array) for array in arrays]
    if not _is_known_false(pred):
        arrays = _attach_check(arrays, *_by_element(pred, index), messages, mode)
    return rest.fill(arrays)


@frames_hidden
def assert_dce(x: _T, msg: str, *, on_error: OnError | str = "default") -> _T:
    """Raises an error if a value is computed: asserts that the compiler has removed it.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged.
    - `msg`: the error message.
    - `on_error`: as for [`equinox_like.error_if`][].

    **Returns:**

    `x`, with NumPy arrays as JAX arrays. Outside of a trace nothing is removed, so `x`
    itself is returned.

    **Raises:**

    As [`equinox_like.error_if`][], if a compiled program uses a returned array.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        def f(x, is_used):
            y = eqx.internal.assert_dce(jnp.sin(x), "The sine is computed.")
            return x + y if is_used else x

        assert f(jnp.asarray(1.0), is_used=False) == 1
        try:
            f(jnp.asarray(1.0), is_used=True)
        except eqx.EquinoxRuntimeError as e:
            assert "The sine is computed." in str(e)
        ```
    """
    mode = _mode(on_error)
    messages = _check_messages((msg,))
    arrays, rest = take_apart(x, may_depend)
    if mode == "off" or not arrays or not within_program():
        return x
    arrays = [jnp.asarray(array) for array in arrays]
    pred, index = _by_element(True, 0)
    return rest.fill(
        _attach_check(arrays, pred, index, messages, mode, is_removable=True)
    )


def _mode(on_error: str) -> str:
    if on_error == "default":
        return ON_ERROR
    if on_error not in MODES:
        raise RuntimeError(
            f"`on_error` must be 'default' or one of {', '.join(map(repr, MODES))}; "
            f"got {on_error!r}.{did_you_mean(on_error, MODES, '{!r}')}"
        )
    return on_error


def _check_messages(msgs: Sequence[str]) -> tuple[str, ...]:
    # A generator can be read only once.
    given = tuple(msgs) if isinstance(msgs, Iterable) else (msgs,)
    if isinstance(msgs, str) or not all(isinstance(m, str) for m in given):
        raise TypeError(
            "`error_if` takes a string as its message, and `branched_error_if` a list or "
            f"tuple of strings; got {msgs!r}."
        )
    return given


def _is_plain(pred: Any) -> bool:
    """Whether the predicate is a Python value, which JAX does not trace."""
    if not is_array_like(pred):
        raise TypeError(
            "The predicate of `error_if` must be a bool or an array; got "
            f"{describe_node(pred)}."
        )
    return not is_array(pred) and not hasattr(pred, "__jax_array__")


def _is_known_false(pred: Any) -> bool:
    """Whether the predicate is known to be false.

    JAX may still be computing an array; within a trace this does not wait for it.
    """
    if isinstance(pred, Tracer) or hasattr(pred, "__jax_array__"):
        return False
    if isinstance(pred, jax.Array):
        return at_top_level() and not jnp.any(pred)
    return not np.any(pred)


def _by_element(pred: Any, index: Any) -> tuple[jax.Array, jax.Array]:
    """Both as arrays of one shape, which is `()` if the index is a scalar."""
    pred, given = jnp.asarray(pred).astype(bool), index
    if isinstance(given, list | tuple) or is_array_like(given):
        index = jnp.asarray(given)
    if not is_array(index) or not jnp.issubdtype(index.dtype, np.integer):
        raise TypeError(
            "The index of `branched_error_if` must be an integer; got "
            f"{describe_node(given)}."
        )
    if index.ndim == 0:
        return (pred.any() if pred.ndim else pred), index
    pred, index = jnp.broadcast_arrays(pred, index)
    return pred, index


def _attach_check(
    arrays: list[Any],
    pred: jax.Array,
    index: jax.Array,
    messages: tuple[str, ...],
    mode: str,
    is_removable: bool = False,
) -> list[Any]:
    """The arrays, spoilt if the check fails. Their derivatives are unchanged."""
    if mode == "nan":
        failed, args = unvmap_any_p.bind(pred), (pred,)
    else:
        frames, in_shard_map = traced_frames((FOLDER,))
        if in_shard_map:
            pred, index = _of_all_devices(pred, index)
        check = Check(messages, frames, goes_on=mode == "breakpoint")
        register_check(error_if_p, _BEGIN, _END, _error_of)
        failed = error_if_p.bind(pred, index, check=check)
        args = pred, index, number_p.bind(item=check)
    is_shared = isinstance(failed, Tracer) and mode != "breakpoint"
    change = _shared if is_shared else _spoilt_if
    return change(failed, args, arrays, mode, is_removable)


def _spoilt_if(failed, args, arrays, mode, is_removable) -> list[Any]:
    def spoil(arrays: list[Any]) -> list[Any]:
        is_bad = args[0].any()  # one bool for each element of a batch
        if mode != "nan":
            # What is computed from the arrays waits for the report.
            reported = report_failure_p.bind(*args, is_removable=is_removable)
            is_bad = _stopping_if(reported) & is_bad if mode != "raise" else reported
        return [lax.select_n(is_bad, x, spoilt(x, mode)) for x in arrays]

    # A `select` would also work, but XLA fuses it with the operations before and after,
    # and recomputes these for the next check: 40 checks took 16 times as long.
    if isinstance(failed, Tracer):  # one bool for the whole batch
        return lax.cond(failed, spoil, lambda arrays: arrays, arrays)
    return spoil(arrays) if failed else arrays


# A compiled program has one function for all checks of arrays of the same types.
_shared = jax.jit(_spoilt_if, static_argnames=("mode", "is_removable"))


def _of_all_devices(pred: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes all devices of a `shard_map` fail if one of them fails.

    Otherwise the others would wait forever for the failed device at their next `psum`.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if varying_axes(jax.typeof(lax.axis_index(axes))):
        # Types have the axes along which values differ, unless `check_vma=False`.
        axes = tuple(varying_axes(jax.typeof(pred)) | varying_axes(jax.typeof(index)))
    if not axes:
        return pred, index
    least = np.asarray(np.iinfo(index.dtype).min, index.dtype)
    index = lax.pmax(jnp.where(pred, index, least), axes)
    return lax.psum(pred.astype(np.int32), axes) > 0, index


def _stopping_if(failed: Any) -> Any:
    # A new function, so that JAX does not reuse the trace of another check.
    def stop() -> Any:
        jax.debug.breakpoint(num_frames=BREAKPOINT_FRAMES)
        return True

    return lax.cond(failed, stop, lambda: False)


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
