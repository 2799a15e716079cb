"""A specialization: the compiled function for one structure and its static leaves.

It is a `jax.jit`-ed function of groups of arrays. It returns to JAX the arrays of the
output and a number; the output's structure and static leaves are kept here under that
number. So JAX's caches hold no object of the user, and all is freed with the
specialization.

JAX traces a function once. An array of that trace that an object keeps is a tracer for
ever, since later calls do not run the function. So objects in the output that are not
pytrees, and the attributes of static arguments, are searched for tracers after a trace.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.tree_util as jtu

from .._call_path import call_rebuilt
from .._compat.errors import forget_calls
from .._compat.tracing import (
    at_top_level,
    is_of_current_trace,
    jit_is_disabled,
    known_array,
)
from .._core.base import name_of
from .._core.flat_call import take_apart
from .._core.show_as import show_as
from .._errors import RetraceWarning, warn
from .._module.values import leaves_of
from .._tree.cycles import check_no_cycle
from .._tree.filters import is_array, is_none
from .._tree.match import leaf_name
from .._tree.nodes import MAKE_A_PYTREE, with_article
from .._tree.partitioning import STATIC, Skeleton, merge
from .._tree.registry import registry
from .checks import (
    check_not_fatal,
    fatal,
    holds_check,
    raise_explained,
    registered_checks,
    wait_for,
)
from .layout import DONATE, MAX_KEPT, CallLayout, Leaves, chained, data_names
from .retrace import Trace, trace_of


class Specialization:
    """A compiled function for one skeleton, and what is known about its traces."""

    # See `DonatingSpecialization`.
    compares_every_call = False

    def __init__(self, program: Any, fun: Any, layout: CallLayout, skeleton: Skeleton):
        self.skeleton = skeleton
        # Those of the first call: traces take the names of arguments from them.
        self._arguments = layout.arguments
        self._shardings = program.shardings
        self.traces: collections.deque[Trace] = collections.deque(maxlen=MAX_KEPT)
        # Of new traces: warnings to issue, and the traces that were not counted yet.
        self._warnings: list[str] = []
        self.new_traces: list[Trace] = []
        self._program = weakref.ref(program)
        # What builds the output from its arrays, by the number of the trace. With JIT
        # disabled, the number is `None`, and the output comes as it is.
        self._outputs: dict[Any, Callable[[Any], Any]] = {None: lambda out: out}
        self._numbers = itertools.count()
        # The same for traces after whose calls nothing is left to do; and the numbers of
        # those that hold a runtime check.
        self.build = self._outputs.copy()
        self._checked: set[int] = set()
        data_labels = [label for label in skeleton.labels if label is not STATIC]
        self._labels = [label for label, _ in itertools.groupby(data_labels)]
        self.function = self._jit(program, fun, layout)

    def run(self, layout: CallLayout, leaves: Leaves) -> Any:
        try:
            if fatal.exist:
                check_not_fatal(layout, leaves)
            if layout.is_whole:
                out = self.function(tuple(leaves))
            else:
                out = self.function(*layout.groups(leaves))
            data, (number,) = out
            build = self.build.get(number) or self.complete(layout, leaves, out)
        except BaseException as e:
            self.fail(e, layout, leaves)
        return build(data)

    def fail(
        self, error: BaseException, layout: CallLayout, leaves: Leaves
    ) -> NoReturn:
        """Raises `error`, of a call or stage, or what explains it better."""
        forget_calls(self.function)
        if self._shardings is not None and isinstance(error, Exception):
            try:
                self._shardings.check_inputs(error, layout, leaves)
            except ValueError as clearer:
                error = clearer
        raise_explained(error, layout, leaves)

    def stage(self, name: str, layout: CallLayout, leaves: Leaves) -> Any:
        """`trace`, `lower` or `eval_shape` of the function."""
        with expected.trace_of(self):
            return getattr(self.function, name)(*layout.groups(leaves))

    def _jit(self, program: Any, fun: Any, layout: CallLayout) -> Any:
        """The `jax.jit`-ed function of groups of arrays."""
        opaque = program.opaque
        # `self` holds `traced`, so a weak reference avoids a cycle through JAX's caches.
        self_reference = weakref.ref(self)

        def traced(*groups):
            own: Any = self_reference()
            return own._trace(opaque, groups)

        def names():
            own = self_reference()
            return None if own is None else data_names(own._arguments, own.skeleton)

        show_as(traced, fun, names)
        donated = [i for i, label in enumerate(self._labels) if label == DONATE]
        options = program.options | {"donate_argnums": donated}
        if self._shardings is None:
            return jax.jit(traced, **options)
        return self._shardings.jit(traced, layout, options)

    def _trace(self, opaque: Callable[[], Any], groups: Sequence[Any]) -> Any:
        """What JAX traces: calls the function of the user, and records the trace."""
        # With JIT disabled, JAX traces for the stages only.
        is_run = jit_is_disabled() and expected.specialization is not self
        # At top level, JAX does not trace: it runs the function to locate a NaN.
        is_trace = not is_run and not at_top_level()
        if is_trace and DONATE in self._labels and expected.specialization is not self:
            raise UnexpectedTrace
        parts: dict[Hashable, list[Any]] = {label: [] for label in self._labels}
        for label, group in zip(self._labels, groups, strict=True):
            parts[label] += group
        tree, args, kwargs = merge(parts, self.skeleton)
        fun = opaque() if tree is None else tree
        instance = getattr(fun, "__self__", None) if tree is None else None
        before = [(x, _attributes(x)) for x in (*self.skeleton.statics, instance)]
        out = call_rebuilt(fun, *args, **kwargs)
        if is_run:
            return out, {None: ()}
        if self._shardings is None:
            result = self.take_apart(out)
        else:
            result = self._shardings.take_apart(out, self)
        if is_trace:  # only now, as JAX forgets a trace that fails
            avals = [jax.typeof(x) for group in groups for x in group]
            trace = trace_of(self._arguments, self.skeleton, avals)
            self.traces.append(trace)
            self.new_traces.append(trace)
            self._warnings += _warnings_of_assignments(name_of(fun), before)
        return result

    def take_apart(self, out: Any) -> tuple[list[Any], dict[int, tuple[()]]]:
        """What to return to JAX for the output of a trace: its arrays, and its number."""
        check_no_cycle("<output>", out)
        check_no_leaked_tracers(out)
        arrays, build = registry.describe_output(out)
        number = next(self._numbers)
        self._outputs[number] = build
        if self._shardings is not None and self._shardings.groups_outputs:
            self._outputs[number] = lambda groups: build(chained(groups))
        return arrays, {number: ()}

    def output(self, out: Any) -> Any:
        """The output of a call, from what JAX returned."""
        data, (number,) = out
        return self._outputs[number](data)

    def fill(self, out: Any, static: Callable[[Any], Any] | None = None) -> Any:
        """The output, with the values of `out` for arrays, `static(leaf)` elsewhere.

        It is built of nodes that are not lazy, as the values need not be arrays.
        """
        data, number = out
        values, treedef = jtu.tree_flatten(data, is_none)
        marked = treedef.unflatten([Placeholder() for _ in values])
        _, template = take_apart(
            self.output((marked, number)), lambda leaf: type(leaf) is Placeholder
        )
        return template.fill(values, static)

    def complete(
        self, layout: CallLayout, leaves: Leaves, out: Any
    ) -> Callable[[Any], Any]:
        """After a call of a new trace, or of one with a runtime check: issues the warnings
        and waits for the check. Returns what builds the output."""
        _, (number,) = out
        self._issue_warnings(out)
        build = self._outputs[number]
        if registered_checks:
            if not at_top_level():
                out = jtu.tree_leaves(out)
                if out and known_array(out[0]) is None:
                    return build  # the program runs later, as a part of another
                out = [x for x in map(known_array, out) if x is not None]
            # JAX has the trace in its cache.
            if number in self._checked or holds_check(
                self.stage("trace", layout, leaves).jaxpr
            ):
                self._checked.add(number)
                wait_for(out)
                return build
        self.build[number] = build
        return build

    def _issue_warnings(self, out: Any) -> None:
        """Warns of what a new trace did, and of a function that is compiled again and
        again. A part of another program is not compiled by itself."""
        warnings, self._warnings = self._warnings, []
        new_traces, self.new_traces = self.new_traces, []
        for text in warnings:
            warn(text)
        program: Any = self._program()
        if not new_traces or program is None or not program.storm.is_watched:
            return
        arrays = () if at_top_level() else jtu.tree_leaves(out)[:1]
        if all(known_array(x) is not None for x in arrays):
            new = set(map(id, new_traces))
            before = [trace for trace in program.traces() if id(trace) not in new]
            if text := program.storm.warning(program, new_traces, before):
                warn(text, RetraceWarning)


class Placeholder:
    """A placeholder for an array of an output."""


class UnexpectedTrace(Exception):
    """Raised when JAX is about to trace a donating function that was not inspected.

    With this signal, a call needs no comparison to learn whether it must be inspected.
    """


class _Expected(threading.local):
    """The specialization that this thread may trace now."""

    specialization: Specialization | None = None

    @contextlib.contextmanager
    def trace_of(self, specialization: Specialization) -> Iterator[None]:
        before, self.specialization = self.specialization, specialization
        try:
            yield
        finally:
            self.specialization = before


expected = _Expected()


def check_no_leaked_tracers(out: Any) -> None:
    """Raises for an object with arrays of the trace in the output of a function, and for
    a `jax.Ref` of the trace.

    It would be returned by every call, with the tracers of the first one.
    """
    for i, leaf in enumerate(jtu.tree_leaves(out)):
        if is_array(leaf):
            continue
        if is_of_current_trace(leaf):
            raise TypeError(
                "The function returned a `jax.Ref` that exists only while it is traced, at "
                f"`{leaf_name(out, i, 'out')}`. JAX does not support that. Make the "
                "Ref outside of compiled functions, or return its value, `ref[...]`."
            )
        held, fix = _held(leaf)
        for name, value in held.items():
            if any(map(is_of_current_trace, leaves_of(value))):
                raise TypeError(
                    f"The function returned {with_article(type(leaf).__name__)} at "
                    f"`{leaf_name(out, i, 'out')}` that holds an array of its trace, in "
                    f"`{name}`, which JAX does not see: {fix}"
                )


def _warnings_of_assignments(
    function: str, before: Iterable[tuple[Any, dict[str, Any]]]
) -> list[str]:
    """A warning for each traced array that a function has assigned to an attribute.

    `before` has its static arguments, with the attributes that they had before.
    """
    return [
        f"`{function}` assigned an array to the attribute `{name}` of a "
        f"`{type(x).__name__}`, which is not a pytree. That runs only when the function "
        f"is traced: later calls skip it. Pass `{name}` as an argument, return the new "
        "one, and assign it after the call."
        for x, attributes in before
        for name, value in _attributes(x).items()
        if value is not attributes.get(name)
        and any(map(is_of_current_trace, leaves_of(value)))
    ]


def _held(x: Any) -> tuple[dict[str, Any], str]:
    """What an object holds, by name, and what to return if there are arrays in it."""
    if isinstance(x, functools.partial):
        return {"args": x.args, "keywords": x.keywords}, _AS_PARTIAL
    if isinstance(x, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable without a value
            return dict(inspect.getclosurevars(x).nonlocals), _AS_PARTIAL
    if type(x) in _FRAMES:
        frame = getattr(x, _FRAMES[type(x)])
        return {} if frame is None else dict(frame.f_locals), _AS_LIST
    return _attributes(x), MAKE_A_PYTREE


_FRAMES = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_AS_PARTIAL = (
    "return `equinox_like.Partial(f, array)`, whose arguments are a part of the tree, or a "
    "Module with the array in a field."
)
_AS_LIST = (
    "its code would run after the trace. Return a list in place of `yield`, and do not "
    "compile an `async` function, but what it calls."
)


def _attributes(x: Any) -> dict[str, Any]:
    attributes = getattr(x, "__dict__", None)
    if type(attributes) is not dict or isinstance(x, types.FunctionType | type):
        return {}
    return attributes.copy()  # another thread may change them
