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
from typing import Any, NoReturn

import jax
import jax.tree_util as jtu

from .._compat.arrays import stored_as
from .._compat.failures import forget_calls
from .._compat.tracing import at_top_level, known_array, trace_context
from .._core.base import jit_is_disabled, name_of
from .._core.deletion import fatal
from .._core.flat_call import take_apart
from .._core.show_as import show_as
from .._errors import RetraceWarning
from .._tree.arrays import is_concrete, is_weak
from .._tree.cycles import refuse_cycle
from .._tree.filters import is_none
from .._tree.registry import registry
from .._tree.splitting import STATIC, Skeleton, merge
from .._warn import warn
from .checks import explained, holds_check, there_are_checks, wait_for
from .donation import note_losses, refuse_fatal
from .layout import DONATE, MAX_KEPT, Layout, add_bounded, chained, data_names
from .leaked import Assignments, refuse_leaked_tracers
from .retrace import SEARCHED_AT_RETRACE, Trace, announce, explain, trace_of


class Outputs:
    """The structures and static leaves of a function's outputs, by number of the trace."""

    def __init__(self, are_grouped: bool) -> None:
        """`are_grouped`: whether the arrays come in one group for each sharding."""
        self._are_grouped = are_grouped
        # By number: rebuilds the output from its arrays. With JIT disabled, the number
        # is `None`, and the output comes as it is.
        self.build: dict[Any, Callable[[Any], Any]] = {None: lambda out: out}
        self._lock = threading.RLock()

    def take_apart(self, out: Any) -> tuple[list[Any], int]:
        """The arrays of the output of a trace, and its number."""
        refuse_cycle("<output>", out)
        refuse_leaked_tracers(out)
        arrays, build = registry.describe_output(out)
        with self._lock:
            number = len(self.build) - 1
            self.build[number] = _of_groups(build) if self._are_grouped else build
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


def _of_groups(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda groups: build(chained(groups))


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
        # Whether each call must wait for a runtime check; `None` if that depends on the
        # trace, or after a new trace. Below: which traces hold one, by context and avals.
        self.must_wait: bool | None = False
        self._holds_check: dict[Any, bool] = {}
        self._lock = threading.Lock()  # of `traces` with `must_wait`
        self.function = self._jit(program, fun, layout)

    def run(self, layout: Layout, leaves: list[Any]) -> Any:
        try:
            if fatal.exist:
                refuse_fatal(layout, leaves)
            if layout.is_whole:
                out = self.function(tuple(leaves))
            else:
                out = self.function(*layout.groups(leaves))
            if self.must_wait is not False:
                self.wait_for_check(layout, leaves, out)
        except BaseException as e:
            forget_calls(self.function)
            raise_explained(e, layout, leaves)
        data, (number,) = out
        return self.outputs.build[number](data)

    def stage(self, name: str, layout: Layout, leaves: list[Any]) -> Any:
        """`trace`, `lower` or `eval_shape` of the function."""
        with expected.trace_of(self):
            return getattr(self.function, name)(*layout.groups(leaves))

    def wait_for_check(self, layout: Layout, leaves: list[Any], out: Any) -> None:
        """Waits for the output, after a call, if the program holds a runtime check."""
        warnings, self._warnings = self._warnings, []
        new_traces, self.new_traces = self.new_traces, []
        for text in warnings:
            warn(text)
        if jit_is_disabled():
            return
        if new_traces:
            self._warn_of_storm(new_traces, out)
        newest = self.traces[-1] if self.traces else None
        if not there_are_checks():
            self._settle(newest, False)
            return
        if not at_top_level():
            out = jtu.tree_leaves(out)
            if out and known_array(out[0]) is None:
                return  # the program runs later, as a part of another
            out = [x for x in map(known_array, out) if x is not None]
        must_wait = self.must_wait
        if must_wait is None:
            groups = layout.groups(leaves)
            avals = tuple(map(jax.typeof, chained(groups)))
            key = trace_context(), avals
            must_wait = self._holds_check.get(key)
            if must_wait is None:
                must_wait = self._look_for_check(key, groups)
            if self._are_all(must_wait, groups):
                self._settle(newest, must_wait)
        if must_wait:
            wait_for(out)

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

    def _look_for_check(self, key: Any, groups: Sequence[Any]) -> bool:
        """Whether the trace for these groups, which JAX has in its cache, holds a check."""
        with expected.trace_of(self):
            found = holds_check(self.function.trace(*groups).jaxpr)
        add_bounded(self._holds_check, key, found)
        return found

    def _are_all(self, must_wait: bool, groups: Sequence[Any]) -> bool:
        """Whether all traces hold a check, or none does.

        A trace may have been made for a stage, within another program, or in another
        thread, and be used by a later call.
        """
        if any(holds is not must_wait for holds in self._holds_check.values()):
            return False
        for trace in list(self.traces):
            key = trace.context, trace.avals
            if key in self._holds_check or trace.session is not self.traces[-1].session:
                continue
            if trace.context != trace_context():
                return False
            rest = iter(trace.avals)
            alike = [tuple(itertools.islice(rest, len(group))) for group in groups]
            if self._look_for_check(key, alike) is not must_wait:
                return False
        return True

    def _settle(self, newest: Trace | None, must_wait: bool | None) -> None:
        """Sets `must_wait`, unless another thread has traced since `newest`."""
        with self._lock:
            if newest is (self.traces[-1] if self.traces else None):
                self.must_wait = must_wait

    def _jit(self, program: Any, fun: Any, layout: Layout) -> Any:
        """The `jax.jit`-ed function of groups of arrays."""
        skeleton, opaque, outputs = self.skeleton, program.opaque, self.outputs
        data_labels = [label for label in skeleton.labels if label is not STATIC]
        labels = [label for label, _ in itertools.groupby(data_labels)]
        donates = DONATE in labels
        shardings = program.shardings
        # `self` holds `traced`, so weak references avoid a cycle through JAX's caches.
        program_reference, self_reference = weakref.ref(program), weakref.ref(self)

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
                announce(program_reference(), trace)
            parts: dict[Hashable, list[Any]] = {label: [] for label in labels}
            for label, group in zip(labels, groups, strict=True):
                parts[label] += group
            tree, args, kwargs = merge(parts, skeleton)
            fun = opaque() if tree is None else tree
            instance = getattr(fun, "__self__", None) if tree is None else None
            assignments = Assignments([*skeleton.statics, instance])
            out = fun(*args, **kwargs)
            if is_run:
                return out, {None: ()}
            if shardings is not None:
                result = shardings.take_apart(out, outputs)
            else:
                arrays, number = outputs.take_apart(out)
                result = arrays, {number: ()}
            if trace is not None:  # only now, as JAX forgets a trace that fails
                with own._lock:
                    own.traces.append(trace)
                    own.new_traces.append(trace)
                    own.must_wait = None
                    own._warnings += assignments.warnings(name_of(fun))
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


def raise_explained(
    error: BaseException, layout: Layout, leaves: list[Any]
) -> NoReturn:
    """Raises `error`, or the error that explains it by the names of the arguments."""
    if not isinstance(error, Exception):  # such as a `KeyboardInterrupt`
        note_losses(error, layout.named_leaves(leaves))
        raise error
    other = explained(error, layout, leaves)
    if other is error:
        raise error
    raise other from None


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


def abstract(leaves: list[Any]) -> list[Any]:
    """The leaves, with a `jax.ShapeDtypeStruct` in place of each known JAX array."""
    return [_struct_of(x) if is_concrete(x) else x for x in leaves]


def _struct_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=is_weak(x)
    )
