"""Why a function is retraced: how a call differs from the earlier ones.

A trace depends on the structure and static leaves of the arguments (`difference.py`),
on the abstract value of each array, and on JAX's configuration. All are kept for each
trace. `Storm` counts the values for which a function is compiled again and again.
"""

import contextlib
import inspect
import os
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax

from .._compat.tracing import settings, trace_context
from .._core.base import on_clear
from .._core.context import Context, values_here
from .._core.difference import FEW, MANY, Arguments, Difference, differences
from .._environment import WARNS_OF_RETRACES
from .._module.instance import function_of
from .._tree.arrays import is_weak
from .._tree.nodes import listed
from .._tree.partitioning import Skeleton
from .._tree.strict import strictly_same
from .layout import data_names

# How many of the latest traces are searched for the most similar one: for a user who asks,
# and at each retrace, which must not take long.
_SEARCHED: Final = 128
_SEARCHED_AT_RETRACE: Final = 16
_SHOWN: Final = 5


class Trace(NamedTuple):
    """Everything that one trace depends on."""

    arguments: Arguments
    skeleton: Skeleton
    # The types of the arrays.
    avals: tuple[Any, ...]
    context: Any
    settings: dict[str, Any]
    # The values of this library's contexts that differ from their defaults.
    user_contexts: dict[Context[Any], Any]
    # An object that changes with `jax.clear_caches()`.
    session: Any

    def serves(self, other: "Trace") -> bool:
        """Whether JAX reuses this trace for the call that `other` describes."""
        return (
            self.skeleton == other.skeleton
            and self.avals == other.avals
            and self.context == other.context
            and self.session is other.session
        )


def trace_of(arguments: Arguments, skeleton: Skeleton, avals: Iterable[Any]) -> Trace:
    # Not the layout, which holds the specialization that holds this.
    return Trace(
        arguments,
        skeleton,
        tuple(avals),
        trace_context(),
        settings(),
        values_here(),
        _session.trace().jaxpr,
    )


# JAX returns the same jaxpr until its caches are cleared.
_session: Final = jax.jit(lambda: ())


def trace_to_be(layout: Any, leaves: Sequence[Any]) -> Trace:
    """What a trace of a call with these leaves would depend on."""
    data = [x for group in layout.groups(leaves) for x in group]
    avals = jax.make_jaxpr(lambda *data: ())(*data).in_avals
    return trace_of(layout.arguments, layout.skeleton(leaves), avals)


class Retrace:
    """Why a call is retraced; from `filter_jit(f).explain(...)`.

    **Attributes:**

    - `differences`: how the call differs from the most similar earlier call. Each has a
        `path`, a `kind`, and texts `before`, `after` and `fix`. The kind is one of
        "shape", "dtype", "weak type", "sharding", "static value", "static type", "tree
        structure", "argument count", "JAX configuration" and "user context". The fix is
        empty if none is known. `differences` is empty if there was no earlier call.

    `str(retrace)` is a paragraph.
    """

    def __init__(self, function: str, differences: Iterable[Difference]):
        self.function = function
        self.differences = tuple(differences)

    def __str__(self) -> str:
        if not self.differences:
            return (
                f"`{self.function}` has not been traced yet, or its earlier traces "
                "were dropped."
            )
        sentences = [f"`{self.function}` is retraced."]
        for i, difference in enumerate(self.differences[:_SHOWN]):
            sentences.append(str(difference))
            fixes_to_come = [d.fix for d in self.differences[i + 1 : _SHOWN]]
            if difference.fix and difference.fix not in fixes_to_come:
                sentences.append(difference.fix)
        if (more := len(self.differences) - _SHOWN) > 0:
            sentences.append(f"And {more} more difference{'s' * (more > 1)}.")
        return " ".join(sentences)

    __repr__ = __str__


def explain(
    function: str, trace: Trace, before: Sequence[Trace], searched: int | None = None
) -> Retrace:
    """The differences of `trace` from the most similar one of the latest of `before`."""
    # Without those that JAX has dropped since.
    known = [
        old
        for old in before
        if old.context != trace.context or old.session is trace.session
    ]
    nearest: list[Difference] = []
    for old in reversed(known[-(searched or _SEARCHED) :]):
        found = list(_differences(old, trace))
        if not nearest or len(found) < len(nearest):
            nearest = found
        if len(found) <= 1:
            break
    return Retrace(function, nearest)


def _differences(old: Trace, new: Trace) -> Iterator[Difference]:
    if old.skeleton != new.skeleton:
        yield from differences(
            (old.arguments, old.skeleton), (new.arguments, new.skeleton)
        )
    before, after = _named(old), _named(new)
    for name in after if old.avals != new.avals else ():
        if name in before and before[name] != after[name]:
            yield from _of_data(name, before[name], after[name])
    if old.context != new.context:
        yield from _of_context(old, new)


def _named(trace: Trace) -> dict[str, Any]:
    return dict(
        zip(data_names(trace.arguments, trace.skeleton), trace.avals, strict=True)
    )


def _of_data(name: str, old: Any, new: Any) -> Iterator[Difference]:
    was, now = (x.str_short() + " with a weak type" * is_weak(x) for x in (old, new))
    fixes = {}
    if old.shape != new.shape:
        fixes["shape"] = (
            "Each shape is compiled separately: pad to a few sizes, as `bucketed` does."
        )
    if old.dtype != new.dtype:
        fixes["dtype"] = "Convert it before the call."
    if is_weak(old) != is_weak(new):
        fixes["weak type"] = "Give it a dtype, as in `jnp.asarray(x, jnp.float32)`."
    if not fixes:
        was, now = f"{was} {_sharding_of(old)}", _sharding_of(new)
        fixes["sharding"] = (
            "Shard it like this before the first call, by `filter_shard`."
        )
    for kind, fix in fixes.items():
        limit = MANY if kind == "shape" else 0
        yield Difference(name, kind, f"an array {was}", now, fix, limit)


def _sharding_of(aval: Any) -> str:
    mesh = aval.sharding.mesh
    return (
        f"sharded by {aval.sharding.spec} over {mesh}" if mesh.shape else "on no mesh"
    )


def _of_context(old: Trace, new: Trace) -> Iterator[Difference]:
    settings = [
        name
        for name, value in new.settings.items()
        if name in old.settings and old.settings[name] != value
    ]
    for name in settings:
        yield Difference(
            name,
            "JAX configuration",
            repr(old.settings[name]),
            repr(new.settings[name]),
            "Set it once, before the first call.",
        )
    before, after = old.user_contexts, new.user_contexts
    contexts = [
        c for c in before | after if not strictly_same(before.get(c), after.get(c))
    ]
    for context in contexts:
        was, now = (repr(x.get(context, context.default)) for x in (before, after))
        fix = "Each value is compiled separately, once."
        place = f"the context {context.name}"
        yield Difference(place, "user context", was, now, fix, MANY)
    if not settings and not contexts:
        yield Difference(
            "the context",
            "user context",
            "that of another mesh, other named axes of a `vmap`, or another context of JAX",
            "a new one",
            "Each is compiled separately: call the function within the same "
            "`jax.set_mesh`, `axis_name` and contexts.",
        )


def _user_code(program: Any) -> types.CodeType | None:
    """The code of the function, if a user may have defined it again and again."""
    function = function_of(program.opaque())
    # A method is one function of many instances.
    function = inspect.unwrap(function, stop=lambda f: isinstance(f, types.MethodType))
    if type(function) is not types.FunctionType:
        return None
    is_ours = str(function.__module__).split(".")[0] == __name__.split(".")[0]
    return None if is_ours else function.__code__


# The most places that are counted for one function.
_COUNTED: Final = 256
# How many traces of one function cause a warning, whatever differs.
_MOST: Final = 32
# How many functions with the same code were compiled, by its `id`; and in which test.
_functions: Final[dict[int, tuple[str | None, int]]] = {}
on_clear(_functions.clear)
_counting: Final = threading.RLock()  # reentrant: a finaliser may call a function


# The variable that names the test of pytest that runs. Each is a program of its own, and
# shares its functions with others.
_TEST: Final = "PYTEST_CURRENT_TEST"


class Storm:
    """Counts the traces of one function, and the values that caused them, by their places.

    Holds texts and hashes only, no values, and nothing after the warning.
    """

    def __init__(self) -> None:
        self.is_watched = WARNS_OF_RETRACES
        self.number = 0  # of traces, in this test
        self._test: str | None = None
        self._values: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def warning(
        self, program: Any, new: Sequence[Trace], before: Sequence[Trace]
    ) -> str | None:
        """The text of the warning, if new traces of this function cause it."""
        text = None
        with contextlib.suppress(Exception):  # such as one of a user's `__repr__`
            if not before:
                return self._of_first(program)
            for trace in new:
                retrace = explain(program.name, trace, before, _SEARCHED_AT_RETRACE)
                text = self._of_retrace(retrace) or text
        return text

    def _of_first(self, program: Any) -> str | None:
        """The text, if this is the eighth function of its code that was compiled."""
        with _counting:
            if self.number:  # the cache of the function was cleared
                return None
            self.number, self._test = 1, os.environ.get(_TEST)
            code = _user_code(program)
            if code is None:
                return None
            before, number = _functions.get(id(code), (self._test, 0))
            if number == 0:
                weakref.finalize(code, _functions.pop, id(code), None).atexit = False
            number = number + 1 if before == self._test else 1
            _functions[id(code)] = self._test, number
        if number != FEW:
            return None
        return (
            f"`{program.name}` is a new function with the code of {number - 1} functions "
            f"that were compiled before ({code.co_filename}:{code.co_firstlineno}): define "
            f"it once, outside of the loop or function that defines it now. {_OFF}"
        )

    def _of_retrace(self, retrace: Retrace) -> str | None:
        with self._lock:
            if not (self.is_watched and retrace.differences):
                return None
            before, self._test = self._test, os.environ.get(_TEST)
            self.number = self.number + 1 if before == self._test else 1
            text = self._warning_of_place(retrace)
            if text is None and self.number >= _MOST:
                places = listed(list(self._values), _SHOWN)
                text = (
                    f"{retrace} This is trace {self.number} of the function, and each of "
                    f"them is compiled. They differ at {places}. {_OFF}"
                )
            if text is not None:
                self.is_watched = False
                self._values.clear()
            return text

    def _warning_of_place(self, retrace: Retrace) -> str | None:
        """The text, if a place has had too many values."""
        differences = retrace.differences
        for difference in differences:
            if len(self._values) < _COUNTED:
                self._values.setdefault(difference.path, set())
        if not all(difference.limit for difference in differences):
            return None  # another use of the function: of another class of layer, maybe
        for cause in differences:
            values = self._values.get(cause.path, set())
            # What looks the same may be a new object each time.
            is_shown = cause.before != cause.after
            values.add(hash(cause.after) if is_shown else len(values))
            if len(values) == cause.limit:
                rest = [
                    difference for difference in differences if difference is not cause
                ]
                return (
                    f"{Retrace(retrace.function, [cause, *rest])} This is one of "
                    f"{len(values)} traces for another `{cause.path}`, and each of them is "
                    f"compiled. {_OFF}"
                )
        return None


_OFF: Final = (
    "`EQX_RETRACE_WARNING=off`, or a filter for `equinox_like.RetraceWarning`, switches "
    "this warning off."
)
