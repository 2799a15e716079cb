"""A specialization: the compiled function for one structure with its static leaves.

It is a `jax.jit`-ed function of groups of arrays. It returns to JAX the arrays of the
output and a number; the output's structure and static leaves are kept here under that
number. So JAX's caches hold no object of the user, and all is freed with the
specialization.
"""

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._call_path import call_rebuilt
from .._compat.arrays import stored_as
from .._compat.errors import forget_calls
from .._compat.tracing import at_top_level, known_array
from .._core.base import jit_is_disabled, name_of
from .._core.deletion import fatal
from .._core.flat_call import take_apart
from .._core.show_as import show_as
from .._errors import RetraceWarning, warn
from .._tree.cycles import check_no_cycle
from .._tree.filters import is_none
from .._tree.partitioning import STATIC, Skeleton, merge
from .._tree.registry import registry
from .checks import holds_check, raise_explained, there_are_checks, wait_for
from .donation import check_not_fatal
from .layout import DONATE, MAX_KEPT, Layout, chained, data_names
from .leaked import Assignments, check_no_leaked_tracers
from .retrace import SEARCHED_AT_RETRACE, Trace, explain, trace_of


class Outputs:
    """The structures and static leaves of a function's outputs, by number of the trace."""

    def __init__(self, are_grouped: bool) -> None:
        """`are_grouped`: whether the arrays come in one group for each sharding."""
        self._are_grouped = are_grouped
        # By number: rebuilds the output from its arrays. With JIT disabled, the number
        # is `None`, and the output comes as it is.
        self.build: dict[Any, Callable[[Any], Any]] = {None: lambda out: out}
        self._numbers = itertools.count()

    def take_apart(self, out: Any) -> tuple[list[Any], int]:
        """The arrays of the output of a trace, and its number."""
        check_no_cycle("<output>", out)
        check_no_leaked_tracers(out)
        arrays, build = registry.describe_output(out)
        number = next(self._numbers)
        self.build[number] = (
            (lambda groups: build(chained(groups))) if self._are_grouped else build
        )
        return arrays, number

    def tree(self, out: Any) -> Any:
        """The output of a call."""
        data, (number,) = out
        return self.build[number](data)

    def fill(self, out: Any, static: Callable[[Any], Any] | None = None) -> Any:
        """The output, with the values of `out` for arrays, `static(leaf)` elsewhere.

        It is built of nodes that are not lazy, as the values need not be arrays.
        """
        data, number = out
        values, treedef = jtu.tree_flatten(data, is_none)
        marked = self.tree((treedef.unflatten([_Mark() for _ in values]), number))
        _, template = take_apart(marked, lambda leaf: type(leaf) is _Mark)
        return template.fill(values, static)


class _Mark:
    """A placeholder for an array of an output."""


class Specialization:
    """A compiled function for one skeleton, and what is known about its traces."""

    def __init__(self, program: Any, fun: Any, layout: Layout, skeleton: Skeleton):
        self.skeleton = skeleton
        # Those of the first call: traces take the names of arguments from them.
        self._arguments = layout.arguments
        shardings = program.shardings
        self.outputs = Outputs(shardings is not None and shardings.groups_outputs)
        self.traces: collections.deque[Trace] = collections.deque(maxlen=MAX_KEPT)
        # Of new traces: warnings to issue, and the traces that were not counted yet.
        self._warnings: list[str] = []
        self.new_traces: list[Trace] = []
        self._program = weakref.ref(program)
        # What builds the output, by the number of a trace after whose calls nothing is
        # left to do; and the numbers of those that hold a runtime check.
        self.build = {None: self.outputs.build[None]}
        self._checked: set[int] = set()
        self.function = self._jit(program, fun, layout)

    def run(self, layout: Layout, leaves: list[Any]) -> Any:
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
            forget_calls(self.function)
            raise_explained(e, layout, leaves)
        return build(data)

    def stage(self, name: str, layout: Layout, leaves: list[Any]) -> Any:
        """`trace`, `lower` or `eval_shape` of the function."""
        with expected.trace_of(self):
            return getattr(self.function, name)(*layout.groups(leaves))

    def complete(
        self, layout: Layout, leaves: list[Any], out: Any
    ) -> Callable[[Any], Any]:
        """After a call of a new trace, or of one with a runtime check: issues the warnings
        and waits for the check. Returns what builds the output."""
        _, (number,) = out
        warnings, self._warnings = self._warnings, []
        new_traces, self.new_traces = self.new_traces, []
        for text in warnings:
            warn(text)
        if new_traces:
            self._warn_of_storm(new_traces, out)
        build = self.outputs.build[number]
        if there_are_checks():
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

    def _warn_of_storm(self, new_traces: list[Trace], out: Any) -> None:
        """Warns if this function is compiled again and again.

        A part of another program is not compiled by itself.
        """
        program: Any = self._program()
        if program is None or not program.storm.is_watched:
            return
        new = set(map(id, new_traces))
        before = [trace for trace in program.traces() if id(trace) not in new]
        arrays = () if at_top_level() else jtu.tree_leaves(out)[:1]
        if any(known_array(x) is None for x in arrays):
            return
        text = None
        with contextlib.suppress(Exception):  # such as one of a user's `__repr__`
            if not before:
                text = program.storm.first_warning(program)
                new_traces = []
            for trace in new_traces:
                retrace = explain(program.name, trace, before, SEARCHED_AT_RETRACE)
                text = program.storm.warning(retrace) or text
        if text is not None:
            warn(text, RetraceWarning)

    def _jit(self, program: Any, fun: Any, layout: Layout) -> Any:
        """The `jax.jit`-ed function of groups of arrays."""
        skeleton, opaque, outputs = self.skeleton, program.opaque, self.outputs
        data_labels = [label for label in skeleton.labels if label is not STATIC]
        labels = [label for label, _ in itertools.groupby(data_labels)]
        donates = DONATE in labels
        shardings = program.shardings
        # `self` holds `traced`, so a weak reference avoids a cycle through JAX's caches.
        self_reference = weakref.ref(self)

        def traced(*groups):
            own: Any = self_reference()
            # With JIT disabled, JAX traces for the stages only.
            is_run = jit_is_disabled() and expected.specialization is not own
            trace = None
            # At top level, JAX does not trace: it runs the function to locate a NaN.
            if not is_run and not at_top_level():
                if donates and expected.specialization is not own:
                    raise UnexpectedTrace
                avals = [jax.typeof(x) for group in groups for x in group]
                trace = trace_of(own._arguments, skeleton, avals)
            parts: dict[Hashable, list[Any]] = {label: [] for label in labels}
            for label, group in zip(labels, groups, strict=True):
                parts[label] += group
            tree, args, kwargs = merge(parts, skeleton)
            fun = opaque() if tree is None else tree
            instance = getattr(fun, "__self__", None) if tree is None else None
            assignments = Assignments([*skeleton.statics, instance])
            out = call_rebuilt(fun, *args, **kwargs)
            if is_run:
                return out, {None: ()}
            if shardings is not None:
                result = shardings.take_apart(out, outputs)
            else:
                arrays, number = outputs.take_apart(out)
                result = arrays, {number: ()}
            if trace is not None:  # only now, as JAX forgets a trace that fails
                own.traces.append(trace)
                own.new_traces.append(trace)
                own._warnings.extend(assignments.warnings(name_of(fun)))
            return result

        def names():
            own = self_reference()
            return None if own is None else data_names(own._arguments, skeleton)

        show_as(traced, fun, names)
        options = dict(program.options)
        options["donate_argnums"] = [i for i, x in enumerate(labels) if x == DONATE]
        if shardings is None:
            return jax.jit(traced, **options)
        return shardings.jit(traced, layout, skeleton, **options)


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


def traits_of(groups: Sequence[Any]) -> list[Any]:
    """Equal for calls that JAX runs by the same program."""
    return [tuple(map(_traits, group)) for group in groups]


def _traits(x: Any) -> Any:
    """What the compiled program depends on for one array."""
    stored = stored_as(x)
    try:
        traits = stored.aval, stored.sharding
    except AttributeError:  # an array of NumPy
        return x.shape, x.dtype
    return traits if stored is x else (x.dtype, *traits)
