"""Counts and limits how often a function is traced."""

import copy
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax.tree_util as jtu

from .._annotations import signature_of
from .._core.base import Transformed, name_of
from .._jit.layout import LayoutTable
from .._jit.retrace import Trace, explain, trace_to_be
from .._module import field
from .._tree.require import require_integer
from .._typing import NOT_GIVEN

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def assert_max_traces(
    fn: Callable[_P, _T], *, max_traces: int | None
) -> "Counted[_P, _T]": ...
@overload
def assert_max_traces(
    *, max_traces: int | None
) -> "Callable[[Callable[_P, _T]], Counted[_P, _T]]": ...
def assert_max_traces(fn: Any = NOT_GIVEN, *, max_traces: int | None) -> Any:
    """Raises an error when `fn` is called more than `max_traces` times.

    Python runs a function under `filter_jit`, `jax.jit` and the like only to trace it.
    So there it limits the number of traces, each of which costs a compilation.

    **Arguments:**

    - `fn`: any callable, also a method in the body of a class. Without it, a decorator
        is returned. Apply it before the transformation:
        `filter_jit(assert_max_traces(...))`.
    - `max_traces`: the largest number of calls; `None` only counts them, for
        [`equinox_like.debug.get_num_traces`][].

    **Returns:**

    A callable like `fn`. It shares its count with the copies that flattening and
    unflattening make; the count of a copy by `copy.deepcopy` starts at zero.

    **Raises:**

    `RuntimeError` on a call beyond `max_traces`, which says what differs from the
    earlier calls. Refused calls are counted.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.debug.assert_max_traces(max_traces=1)
        def f(x, rate):
            return rate * x

        f(jnp.ones(3), 0.1)
        f(jnp.zeros(3), 0.1)
        try:
            f(jnp.ones(3), 0.2)
        except RuntimeError as error:
            assert "`rate` was the static value 0.1, and is now 0.2." in str(error)
        assert eqx.debug.get_num_traces(f) == 2
        ```
    """
    if fn is NOT_GIVEN:
        return lambda fn: Counted(fn, max_traces)
    return Counted(fn, max_traces)


def get_num_traces(fn: Any) -> int:
    """How often a function has been traced, if it is wrapped in
    [`equinox_like.debug.assert_max_traces`][].

    **Arguments:**

    - `fn`: what `assert_max_traces` returned, or a function whose `__wrapped__` leads to
        it, as `filter_jit` and `jax.jit` return; also a bound method, or a partial.

    **Raises:**

    `ValueError` if `fn` does not wrap such a function.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.debug.assert_max_traces(max_traces=2)
        def f(x):
            return 2 * x

        for size in (3, 4, 3):
            f(jnp.ones(size))
        assert eqx.debug.get_num_traces(f) == 2
        ```
    """
    seen = set()
    inner = fn
    while not isinstance(inner, Counted):
        seen.add(id(inner))
        # A bound method, or another partial, has `func`.
        inner = getattr(inner, "func", None) or getattr(inner, "__wrapped__", None)
        if inner is None or id(inner) in seen:
            raise ValueError(
                f"{fn!r} does not count its traces. Wrap the function in "
                "`eqx.debug.assert_max_traces(max_traces=None)` first."
            )
    return inner._counter.count


class Counted(Transformed[_P, _T]):
    """The result of [`equinox_like.debug.assert_max_traces`][]."""

    _transformation_ = "assert_max_traces"

    _max_traces: int | None = field(static=True)
    _counter: "_Counter" = field(static=True)

    def __init__(self, fn: Any, max_traces: int | None):
        super().__init__(fn)
        if max_traces is not None:
            require_integer(max_traces, "assert_max_traces", "max_traces", least=0)
        self._max_traces = max_traces
        self._counter = _Counter()

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fn, most, counter = self.__wrapped__, self._max_traces, self._counter
        with counter.lock:
            counter.count += 1
            is_allowed = most is None or counter.count <= most
        if most is not None:
            trace = _trace_of((self._tree, args, kwargs), fn)
            if not is_allowed:
                raise RuntimeError(_message(fn, most, trace, counter.traces))
            if trace is not None:
                counter.traces.append(trace)
        return fn(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "Counted[_P, _T]":
        return Counted(copy.deepcopy(self.__wrapped__, memo), self._max_traces)


class _Counter:
    """The number of calls, and the traces of those that were allowed."""

    def __init__(self) -> None:
        self.count = 0
        self.traces: list[Trace] = []
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _Counter, ()  # what is unpickled counts for itself


def _trace_of(call: tuple[Any, Any, Any], fn: Any) -> Trace | None:
    try:
        signature = signature_of(fn)
        layout = LayoutTable(signature, name_of(fn)).make(call)
        return trace_to_be(layout, jtu.tree_leaves(call))
    except Exception:
        # There is nothing to compare: most such calls raise an error of their own.
        return None


def _message(fn: Any, most: int, trace: Trace | None, before: list[Trace]) -> str:
    name = name_of(fn)
    # What `filter_jit` and `jax.jit` return has both.
    if hasattr(fn, "trace") and hasattr(fn, "lower"):
        return (
            f"`assert_max_traces` of the compiled `{name}` counts all calls. To count "
            "traces, apply it to the function: "
            f"`filter_jit(assert_max_traces({name}, max_traces={most}))`."
        )
    head = f"`{name}` can only be traced {most} times."
    if trace is None or not before:
        return f"{head} What differs in this call is not known."
    if any(old.serves(trace) for old in before):
        return (
            f"{head} The arguments of this call do not differ from earlier ones. "
            "Perhaps the function is transformed again each time, as by `jax.jit` "
            "within a loop."
        )
    return f"{head} {explain(name, trace, before)}"
