"""`filter_jit`: `jax.jit` for any arguments, at its speed.

A call flattens its arguments once, looks up the plan for that kind of call (`plan.py`),
and hands flat arrays to one `jax.jit`-ed function per skeleton. A call like an earlier one
is left to JAX's own dispatch, which does so in C++ (`quick.py`). What comes back from
JAX's C++ path is the user's output already (`pack.py`). Nothing is waited for, and
nothing that is process-wide is touched.
"""

import collections
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, ParamSpec, TypeVar, overload

import jax
import jax.tree_util as jtu

from .._compat.fast_path import forget_calls
from .._compat.lowered import Buffer, buffers_of
from .._compat.trace_state import at_top_level, trace_context
from .._core.base import (
    MISSING,
    Transformed,
    function_of,
    hide_frames,
    is_global,
    jit_is_disabled,
    name_of,
    refuse_deprecated,
    require_callable,
)
from .._core.caches import on_clear
from .._core.pack import Packed, pack, unpack
from .._core.parts import is_array_or_struct
from .._errors import DonationError, DonationWarning
from .._module.field import field
from .._module.partial import Partial
from .._tree.filters import is_array
from .._tree.split import Skeleton, merge
from .._tree.strict import strict_key
from .checks import explained, holds_check, there_are_checks, wait_for
from .donation import (
    Donate,
    Donation,
    are_all_deleted,
    are_any_deleted,
    are_any_sharded,
    check_mode,
    in_vain,
    is_deleted,
    muted,
    records,
    refuse_gone,
    still_alive,
    traits_of,
)
from .plan import DONATE, MAX_KEPT, Plan, groups_of, keep, make_plan
from .quick import IN_PYTHON, MANY, MANY_DONATING, Miss, make_quick
from .report import DonationReport, report_on
from .retrace import Retrace, Trace, announce, explain, trace_of, trace_to_be
from .shardings import OPTIONS, Shardings
from .stages import Call, Lowered, Traced, platform_of

_P = ParamSpec("_P")
_T = TypeVar("_T")

_flatten = jtu.tree_flatten


@overload
def filter_jit(
    *, donate: Donate = "none", **jitkwargs: Any
) -> "Callable[[Callable[_P, _T]], Jitted[_P, _T]]": ...
@overload
def filter_jit(
    fun: Callable[_P, _T], *, donate: Donate = "none", **jitkwargs: Any
) -> "Jitted[_P, _T]": ...
def filter_jit(fun: Any = MISSING, *, donate: Any = "none", **jitkwargs: Any) -> Any:
    """`jax.jit` for functions of any pytrees: arrays are traced, the rest is static.

    **Arguments:**

    - `fun`: the function to compile; a Module, a method, a partial, ... The arrays of a
        callable pytree are traced, too. Without it a decorator is returned, as in
        `@filter_jit(donate="arrays")`.
    - `donate`: whose buffers the outputs may reuse. An array that was donated, and could
        be reused, is gone after the call.
        - `"none"`: no array's.
        - `"arrays"`, alias `"all"`: those of every JAX array in the arguments. An array
            whose buffer no output can take stays alive.
        - `"all-except-first"`: as before, but for those in the first argument.
        - `"warn"`, `"warn-except-first"`: likewise, and a
            [`equinox_like.DonationWarning`][] names the arrays that no output can take,
            once for each compilation, before anything runs.
        - `"strict"`: as `"arrays"`, but such an array is an error, and nothing runs.
        - a tuple of names of parameters, `("model", "opt_state")`: the arrays in these. One
            that no output can take is warned of, and deleted all the same.

        The arrays of `fun` itself are never donated, nor is anything under another
        transformation. For a method decorated in a class, `self` is the first argument.

    - `**jitkwargs`: as for `jax.jit`, for example `inline` or `compiler_options`.
        `in_shardings` and `out_shardings` are prefix trees of the tuple of positional
        arguments and of the output; their leaves are shardings, `PartitionSpec`s, `None`,
        or functions from an array to one of these. `in_shardings` may also be a dictionary
        from the names of parameters. Leaves that face no array are skipped.

    **Returns:**

    A callable like `fun`. It compiles once for each combination of shapes, dtypes,
    structure and static values, where values of different type differ (`1`, `1.0`,
    `True`). Its outputs may hold anything; what is no array comes back as the very object
    that `fun` returned when it was compiled. Like `jax.jit` it does not wait for the
    result. `.trace`, `.lower` and `.eval_shape`, each called with arguments or with
    `jax.ShapeDtypeStruct`s in place of arrays, work ahead of time, and so does
    `.donation_report` and `.explain`; `.clear_cache()` forgets what was compiled.

    **Raises:**

    When wrapping: `TypeError` if `fun` cannot be called, `ValueError` for another
    `donate`, for arguments of `jax.jit` that say which arguments are static or donated, and
    for `in_shardings` that do not fit the parameters.
    When called: `ValueError` naming the path of a static leaf that cannot be hashed;
    [`equinox_like.DonationError`][] naming the path of an array that has been donated
    before, or the paths of two arrays that share a buffer and would both be donated.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit(donate="arrays")
        def update(params, rate, name):
            return {k: (1 - rate) * v for k, v in params.items()}, name

        params = {"w": jnp.ones(3)}
        new_params, name = update(params, 0.1, "first")
        assert params["w"].is_deleted() and name == "first"
        ```
    """
    check_mode(donate)
    _check_jitkwargs(jitkwargs)
    if fun is MISSING:
        return lambda fun: filter_jit(fun, donate=donate, **jitkwargs)
    return Jitted(fun, donate, jitkwargs)


class JittedMethod(Partial):
    """A compiled method, read from an instance; called without a step in between."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted: Any = self.func
        if type(jitted) is not Jitted or self.keywords:  # somebody has put it together
            return super().__call__(*args, **kwargs)
        program = jitted._program
        run = program.quick or program.choose()
        try:
            if run is IN_PYTHON:
                run = program.call
            return run(jitted._tree, (*self.args, *args), kwargs)
        except Exception as e:
            hide_frames(e)
            raise


class Jitted(Transformed[_P, _T]):
    """What [`equinox_like.filter_jit`][] returns: a compiled function that is a pytree."""

    _binds_as_: ClassVar[type[Partial]] = JittedMethod

    _program: "Program" = field(static=True)

    def __init__(self, fun: Any, donate: Donate, jitkwargs: dict[str, Any]):
        require_callable(fun, "filter_jit")
        signature = inspect.signature(fun)  # raises where there is none
        super().__init__(fun)
        Donation(donate).check_names(signature, name_of(fun))
        shardings = None
        if any(option in jitkwargs for option in OPTIONS):
            shardings = Shardings(jitkwargs, name_of(fun), signature)
        self._program = program_for(
            self._opaque, signature, donate, jitkwargs, shardings
        )

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # As in `JittedMethod`: a function for both would be a step more at each call.
        program = self._program
        run = program.quick or program.choose()
        try:
            if run is IN_PYTHON:
                run = program.call
            return run(self._tree, args, kwargs)
        except Exception as e:
            hide_frames(e)
            raise

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced[_P, _T]:
        """Traces for these arguments, without compiling or running.

        Arguments are as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        """
        entry, plan, leaves = self._prepare(args, kwargs)
        # What is known of the leaves, but not their data: a stage may live long.
        named = plan.named_leaves(_abstract(leaves))
        call = Call(
            self,
            self._arrange,
            plan,
            entry.skeleton,
            self._program.donation,
            self._program.record,
            named,
            platform_of(leaves),
        )
        traced = self._apply("trace", entry, plan, leaves)
        call.waits = holds_check(traced.jaxpr)
        return Traced(traced, call)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered[_P, _T]:
        """Traces and lowers for these arguments, without compiling or running.

        Arguments are as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        """
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The output with a `jax.ShapeDtypeStruct` in place of each array.

        Nothing is compiled or run. A `jax.ShapeDtypeStruct` may stand for an array.
        """
        entry, plan, leaves = self._prepare(args, kwargs)
        return unpack(self._apply("eval_shape", entry, plan, leaves))

    def explain(self, /, *args: Any, **kwargs: Any) -> Retrace | None:
        """Why a call would be traced anew, or `None` if it would not be.

        Compares with the traces that this function has, and tells the differences to the
        nearest one. Nothing is traced or run. Arguments are as for a call; a
        `jax.ShapeDtypeStruct` may stand for an array. An array that differs only in how
        `Auto` axes of a mesh shard it is compiled for anew, without another trace: of that
        nothing is told.
        """
        program = self._program
        if program.donates and not at_top_level():
            program = program.without_donation
        trace = trace_to_be(*self._plan(program, args, kwargs))
        before = program.traces()
        if any(old.serves(trace) for old in before):
            return None
        return explain(name_of(self.__wrapped__), trace, before)

    def donation_report(self, /, *args: Any, **kwargs: Any) -> DonationReport:
        """What a call would donate, leaf by leaf, and what XLA makes of it.

        Compiles for these arguments, but runs and deletes nothing. Arguments are as for a
        call; a `jax.ShapeDtypeStruct` may stand for an array.
        """
        return report_on(self.lower(*args, **kwargs), repr(self))

    def clear_cache(self) -> None:
        """Forgets what was compiled for this function, also by other wraps of it.

        For a callable pytree: what was compiled for those of the same structure.
        """
        structure = jtu.tree_structure(self._tree)
        self._program.clear(structure)
        if self._program.donates:
            self._program.without_donation.clear(structure)

    def _prepare(self, args, kwargs) -> tuple["Entry", Plan, list[Any]]:
        plan, leaves = self._plan(self._program, args, kwargs)
        return self._program.entry(self.__wrapped__, plan, leaves), plan, leaves

    def _plan(self, program, args, kwargs) -> tuple[Plan, list[Any]]:
        """For a call with perhaps a `jax.ShapeDtypeStruct` in place of an array."""
        call = (self._tree, args, kwargs)
        leaves, treedef = _flatten(call)
        return program.make_plan(
            self.__wrapped__, call, leaves, treedef, is_array_or_struct
        ), leaves

    def _apply(self, stage: str, entry: "Entry", plan: Plan, leaves: list[Any]) -> Any:
        entry.is_watched = plan.donates
        try:
            return entry.stage(stage, plan.groups(leaves))
        except Exception as e:
            error = explained(e, plan.named_leaves, leaves)
            if error is e:
                raise
            raise error from None

    def _arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, list[Any]]:
        """For a compiled call: where the leaves go, and the leaves."""
        return self._program.planned((self._tree, args, kwargs))

    def __repr__(self) -> str:
        donate = self._program.donate
        return f"<filter_jit of {name_of(self.__wrapped__)}, donate={donate!r}>"

    def __reduce__(self):
        if is_global(self):  # under its name there is no function, but what it became
            return self.__qualname__
        program = self._program
        return Jitted, (self.__wrapped__, program.donate, program.jitkwargs)


class Entry:
    """One compiled function, for one skeleton."""

    __slots__ = (
        "buffers",
        "function",
        "is_watched",
        "known",
        "place",
        "settled",
        "skeleton",
        "stays_slow",
        "times_quick",
        "traces",
    )

    def __init__(self, function: Any, skeleton: Skeleton, traces: "Traces"):
        self.function = function
        self.skeleton = skeleton
        self.traces = traces
        # Where it donates: the traits of the last call that was looked at, and for all
        # traits that there were what becomes of the buffer of each argument.
        self.known: Any = None
        self.buffers: dict[Any, Sequence[int | Buffer | None]] = {}
        # Where the first array of the last call was.
        self.place: Any = None
        # For the traits of a call the indices of what is right to be alive after it.
        self.settled: tuple[Any, tuple[int, ...]] = None, ()
        # Whether to look before each call, not only before one that JAX has no trace for:
        # it may have traces that were not looked at, or got arrays on several devices.
        self.is_watched = False
        # Whether JAX's dispatch cannot have it.
        self.stays_slow = False
        # How often JAX's dispatch was told of a call of it.
        self.times_quick = 0

    def stage(self, name: str, groups: Sequence[Any]) -> Any:
        """`trace`, `lower` or `eval_shape` of the function."""
        with _expected.trace_of(self.traces):
            return getattr(self.function, name)(*groups)


class Traces:
    """What one compiled function knows of its traces; it adds to them when it is traced."""

    __slots__ = ("all", "are_checked", "call_for_a_look")

    def __init__(self) -> None:
        self.all: collections.deque[Trace] = collections.deque(maxlen=MAX_KEPT)
        # By traits of the arrays, whether the trace for them holds a check.
        self.are_checked: dict[Any, bool] = {}
        # There is a new one, or one holds a check.
        self.call_for_a_look = False


class NewTrace(Exception):
    """Of a donating function that is about to be traced, where nobody expects it.

    So nothing is compared before a call to learn whether its arrays must be looked at.
    """


def is_of_new_trace(error: Exception) -> bool:
    """Whether a donating function ends so that JAX must first trace, or lower, it."""
    # The warning: this thread lowers what another has traced, and warnings are errors.
    return isinstance(error, NewTrace) or muted.is_about(error)


class _Expected(threading.local):
    """The traces of the function that this thread may trace now."""

    traces: Traces | None = None

    @contextmanager
    def trace_of(self, traces: Traces) -> Iterator[None]:
        before, self.traces = self.traces, traces
        try:
            yield
        finally:
            self.traces = before


_expected = _Expected()
_NOT_RUN: Any = object()


class Program:
    """All plans and compiled functions of one callable with one set of options.

    An opaque callable is held weakly, so that its programs die with it.
    """

    def __init__(
        self,
        opaque: Callable[[], Any],
        signature: inspect.Signature,
        donate: Donate,
        jitkwargs: dict[str, Any],
        shardings: Shardings | None,
    ):
        self.opaque = opaque
        self.signature = signature
        self.donate: Donate = donate
        self.jitkwargs = jitkwargs
        self.shardings = shardings
        self.options = {k: v for k, v in jitkwargs.items() if k not in OPTIONS}
        fun = opaque()
        self.name = name_of(fun) if fun is not None else ""
        self.donation = Donation(donate)
        self.donates = self.donation.is_any
        self.looks_first = self.donation.looks_first
        self.record = records.new(self.name)
        self.last_plan: Any = _NO_PLAN
        # How it is called: see `choose`.
        self.quick: Any = None
        # Whether JAX's dispatch knows calls of it; and whether all are to be in Python, as
        # it can know none, or knows too many.
        self.has_quick = self.stays_in_python = False
        self._plans: dict[tuple[Any, tuple[type, ...]], Plan] = {}
        self._entries: dict[Skeleton, Entry] = {}

    def call(self, tree: Any, args: Any, kwargs: Any, miss: Miss | None = None) -> Any:
        """Calls it with these arguments: what JAX's own dispatch does in C++, in Python."""
        fun = self.opaque() if tree is None else tree
        program = self
        if program.donates and not at_top_level():
            program = program.without_donation
        call = (tree, args, kwargs)
        leaves, treedef = _flatten(call)
        leaf_types = tuple(map(type, leaves))
        plan = program.last_plan
        if leaf_types != plan.leaf_types or treedef != plan.call_treedef:
            plan = program.plan(fun, call, leaves, treedef)
        compiled = plan.entry or plan.find(leaves)
        if compiled is None:
            compiled = program.entry(fun, plan, leaves)
        groups = [leaves] if plan.takes_all else plan.groups(leaves)
        run = compiled.function
        if (
            miss is not None
            and plan.is_in_order
            and not compiled.stays_slow
            # Before each call it is to be seen that none of these is gone.
            and not (plan.donates and are_any_sharded(leaves))
        ):
            run = miss.way(run)
        try:
            if plan.donates:
                place = getattr(groups[0][0], "sharding", None)
                # For arrays elsewhere JAX may compile anew without a trace. To look at each
                # would take half as long as the call; the first tells, if all are there.
                if (
                    miss is not None
                    or compiled.is_watched
                    # Most often the same object; to compare two runs Python.
                    or (place is not compiled.place and place != compiled.place)
                ):
                    program.before(compiled, plan, leaves, groups)
                compiled.place = place
            try:
                out = run(*groups)
            except (NewTrace, UserWarning) as e:
                if not (plan.donates and is_of_new_trace(e)):
                    raise
                out = _NOT_RUN
                if miss is not None:  # it is not made quick this time
                    miss.is_settled = False
                forget_calls(compiled.function)
            if out is _NOT_RUN:  # not in the `except`: it would be told as a context
                out = program.first_call(compiled, plan, leaves, groups)
            is_checked = compiled.traces.call_for_a_look and program.look(
                compiled, plan, leaves, groups, out
            )
        except BaseException as e:
            if plan.donates:  # else it may be muted by the function that calls this one
                muted.end()
            forget_calls(compiled.function)
            if not isinstance(e, Exception):
                raise
            error = explained(e, plan.named_leaves, leaves)
            if error is e:
                raise
            raise error from None
        if plan.donates:
            donated = groups[0] if plan.donates_all else plan.take_donated(leaves)
            if muted.count or not are_all_deleted(donated):
                program.after(compiled, plan, leaves, groups)
            else:
                program.record.arrays = donated
            program.record.tree_type = type(tree)
        if miss is None:
            return out.unpack() if isinstance(out, Packed) else out
        if plan.donates:
            miss.give(plan, leaves, compiled, program.record)
        out = miss.unpack(out)
        if is_checked:  # it is to be waited for
            miss.quick = None
        program._judge(miss, compiled)
        return out

    def choose(self) -> Any:
        """Chooses how it is called from now on: by JAX's dispatch, or in Python."""
        if not at_top_level():  # where a backend may not be wanted yet
            return IN_PYTHON
        # Shardings are chosen in Python, and outputs of them come in groups.
        if self.shardings is not None or self.stays_in_python:
            self.quick = IN_PYTHON
        else:
            self.quick = make_quick(self, self.name, self.donates)
        return self.quick or IN_PYTHON

    def explained(self, error: Exception, call: Any) -> Exception:
        """What to raise for an error of running the program."""
        plan, leaves = self.planned(call)
        return explained(error, plan.named_leaves, leaves)

    def settle(self, plan: Plan, leaves: list[Any], entry: Entry) -> None:
        """After a quick call: sees to what it was given."""
        self.after(entry, plan, leaves, plan.groups(leaves))

    def planned(self, call: Any) -> tuple[Plan, list[Any]]:
        """The plan for a call, and its leaves."""
        leaves, treedef = _flatten(call)
        fun = self.opaque() if call[0] is None else call[0]
        return self.plan(fun, call, leaves, treedef), leaves

    def _judge(self, miss: Miss, entry: Entry) -> None:
        """Sees after a call, made for `miss`, whether its like are to be quick."""
        if not miss.is_settled:
            miss.quick = None
        elif miss.quick is not None:
            self.has_quick = True
            entry.times_quick += 1
            # JAX compares a call with one kind after the other where static values
            # differ. Where they are donated it also does so where structures do.
            kind_of = _count_data if self.donates else _structure
            kind = kind_of(entry.skeleton)
            alike = [s for s in list(self._entries) if kind_of(s) == kind]
            is_too_much = len(alike) > (MANY_DONATING if self.donates else MANY)
            # Without new traces: it does not know calls again, whose structure has a hash
            # that does not go with its `==`.
            is_in_vain = entry.times_quick > MANY + 4 * len(entry.traces.all)
            self.stays_in_python = is_too_much or is_in_vain
        else:
            entry.stays_slow |= miss.was_tried
            # That of callable pytrees serves many of them.
            is_of_one = self.opaque() is not None
            self.stays_in_python = is_of_one and not self.has_quick
        if self.stays_in_python:
            self.choose()

    @property
    def without_donation(self) -> "Program":
        return program_for(
            self.opaque(), self.signature, "none", self.jitkwargs, self.shardings
        )

    def plan(self, fun: Any, call: Any, leaves: list[Any], treedef: Any) -> Plan:
        """The plan for this kind of call."""
        key = treedef, tuple(map(type, leaves))
        plan = self._plans.get(key)
        if plan is None:
            plan = self.make_plan(fun, call, leaves, treedef, is_array)
            keep(self._plans, key, plan)
        self.last_plan = plan
        return plan

    def make_plan(self, fun, call, leaves, treedef, is_data) -> Plan:
        return make_plan(
            self.signature,
            name_of(fun),
            call,
            leaves,
            treedef,
            self.donation.takes,
            is_data,
        )

    def entry(self, fun: Any, plan: Plan, leaves: list[Any]) -> Entry:
        """The compiled function for the static leaves of this call."""
        entry = plan.find(leaves)
        if entry is None:
            skeleton = plan.skeleton(leaves)
            # Threads that come first together share one function, and so one compilation.
            with _lock:
                entry = self._entries.get(skeleton)
                if entry is None:
                    traces = Traces()
                    function = self._function(fun, plan, skeleton, traces)
                    entry = Entry(function, skeleton, traces)
                    self._forget(keep(self._entries, skeleton, entry))
            plan.keep(leaves, entry)
        return entry

    def clear(self, structure: Any) -> None:
        """Forgets all that is kept for callables of this structure."""
        with _lock:
            for key in list(self._plans):
                if key[0].children()[0] == structure:
                    self._plans.pop(key, None)
            keys = [s for s in self._entries if s.treedef.children()[0] == structure]
            self._forget([self._entries.pop(key) for key in keys])
            self.last_plan = _NO_PLAN
            self.quick, self.has_quick, self.stays_in_python = None, False, False

    def _forget(self, entries: list["Entry"]) -> None:
        if entries:
            self.quick = None
        # So that the table of a plan does not keep what had to go.
        for entry in entries:
            for plan in list(self._plans.values()):
                plan.forget(entry)
            entry.function.clear_cache()

    def traces(self) -> list[Trace]:
        return [t for e in list(self._entries.values()) for t in list(e.traces.all)]

    def look(
        self,
        entry: Entry,
        plan: Plan,
        leaves: list[Any],
        groups: list[Any],
        out: Any,
    ) -> bool:
        """Sees after a call whether it is to be waited for, and does."""
        if jit_is_disabled() or not at_top_level():
            return False
        if not there_are_checks():
            entry.traces.call_for_a_look = False
            return False
        checked = entry.traces.are_checked
        key = trace_context(), *traits_of(groups)
        if key not in checked:
            # JAX has it already.
            traced = entry.stage("trace", plan.groups(_abstract(leaves)))
            keep(checked, key, holds_check(traced.jaxpr))
        entry.traces.call_for_a_look = any(checked.values())
        if checked[key]:
            wait_for(out)
        return checked[key]

    def before(
        self,
        entry: Entry,
        plan: Plan,
        leaves: list[Any],
        groups: list[Any],
        is_first: bool = False,
    ) -> None:
        """Looks at the arrays that are to be donated, unless they are as the last ones."""
        if any(map(are_any_deleted, groups)) and are_any_sharded(leaves):
            # On jax 0.10 a process does not survive that one is used.
            refuse_gone(plan.named_leaves(leaves))
        traits = traits_of(groups)
        is_new = traits != entry.known
        if is_new:
            entry.is_watched |= are_any_sharded(leaves)
        # JAX may lower what it has a trace for, as for another sharding by `Auto` axes.
        if (is_first or is_new) and not jit_is_disabled():
            if self.looks_first:
                self.buffers(entry, plan, leaves, groups, traits)
            muted.begin()
        # Equal ones, too: those of the next call are likely to be the same objects.
        entry.known = traits

    def first_call(
        self,
        entry: Entry,
        plan: Plan,
        leaves: list[Any],
        groups: list[Any],
    ) -> Any:
        """A call of a donating function that JAX has no trace for, or has not lowered."""
        self.before(entry, plan, leaves, groups, is_first=True)
        with _expected.trace_of(entry.traces):
            return entry.function(*groups)

    def after(
        self, entry: Entry, plan: Plan, leaves: list[Any], groups: list[Any]
    ) -> None:
        """Sees to it that what was given away is gone."""
        if muted.count:
            muted.end()
        if jit_is_disabled():
            return
        donated = plan.take_donated(leaves)
        alive = still_alive(donated)
        if alive:
            traits = traits_of(groups)
            if (traits, alive) != entry.settled:
                alive = self.donation.delete_rest(
                    donated,
                    alive,
                    lambda: plan.take_donated_data(
                        self.buffers(entry, plan, leaves, groups, traits)
                    ),
                )
                entry.settled = traits, alive
        # It must keep nothing that still has memory.
        self.record.arrays = list(filter(is_deleted, donated))

    def buffers(
        self,
        entry: Entry,
        plan: Plan,
        leaves: list[Any],
        groups: list[Any],
        traits: Any,
    ) -> Sequence[int | Buffer | None]:
        """For each array what becomes of its buffer; `None` if JAX does not tell.

        The arrays may be gone by now, but not what is known of them. JAX keeps what it
        lowers and compiles here for the call, or has kept it.
        """
        key = tuple(traits)
        found: Sequence[int | Buffer | None] | None = entry.buffers.get(key)
        if found is None:
            muted.begin()
            try:
                lowered = entry.stage("lower", plan.groups(_abstract(leaves)))
            finally:
                muted.end()
            found = buffers_of(lowered, lowered.compile())
            if self.looks_first:
                try:
                    self.donation.object_to(in_vain(plan.named_leaves(leaves), found))
                except (DonationError, DonationWarning):
                    # There is a trace now, though the call is refused.
                    entry.is_watched = True
                    raise
            found = found or [None] * len(plan.data_names)
            keep(entry.buffers, key, found)
        return found

    def _function(
        self, fun: Any, plan: Plan, skeleton: Skeleton, traces: Traces
    ) -> Any:
        """The `jax.jit`-ed function of groups of arrays."""
        opaque = self.opaque
        labels = [label for label, _ in groups_of(skeleton.labels, lambda x: x)]
        donated = DONATE in labels
        shardings = self.shardings
        packed = pack if shardings is None else shardings.pack
        # It must not keep the program alive, which keeps it.
        program = weakref.ref(self)

        def traced(*groups):
            # At top level JAX runs it, to tell where a NaN comes from.
            if not jit_is_disabled() and not at_top_level():
                if donated and _expected.traces is not traces:
                    raise NewTrace
                avals = [jax.typeof(x) for group in groups for x in group]
                trace = trace_of(plan, skeleton, avals)
                announce(program(), trace)
                traces.all.append(trace)
                traces.call_for_a_look = True
            parts: dict[Hashable, list[Any]] = {label: [] for label in labels}
            for label, group in zip(labels, groups, strict=True):
                parts[label] += group
            tree, args, kwargs = merge(parts, skeleton)
            fun = opaque() if tree is None else tree
            out = fun(*args, **kwargs)
            return out if jit_is_disabled() else packed(out)

        _speak_of(traced, fun, plan)
        donate_argnums = [i for i, label in enumerate(labels) if label == DONATE]
        if shardings is None:
            return jax.jit(traced, donate_argnums=donate_argnums, **self.options)
        return shardings.jit(
            traced, plan, skeleton, donate_argnums=donate_argnums, **self.options
        )


def _structure(skeleton: Skeleton) -> int:
    return hash(skeleton.treedef)


def _count_data(skeleton: Skeleton) -> int:
    return len(skeleton.labels) - len(skeleton.statics)


def program_for(
    opaque: Any,
    signature: inspect.Signature,
    donate: Donate,
    jitkwargs: dict[str, Any],
    shardings: Shardings | None,
) -> Program:
    """The program of a callable with these options.

    All callable pytrees with the same parameters share one (`opaque` is `None` for them):
    what else they are is in the structure of each call.
    """
    parameters = tuple(
        (p.name, p.kind, p.default is p.empty) for p in signature.parameters.values()
    )
    try:
        rest = sorted((k, v) for k, v in jitkwargs.items() if k not in OPTIONS)
        options = parameters, donate, shardings, strict_key(rest)
        hash(options)
        with _lock:
            if opaque is None:
                shared = _programs_of_pytrees
            elif type(opaque).__eq__ is object.__eq__:
                shared = _programs.setdefault(opaque, {})
            else:
                shared = {}
            if options not in shared:
                reference = weakref.ref(opaque) if opaque is not None else lambda: None
                shared[options] = Program(
                    reference, signature, donate, jitkwargs, shardings
                )
            return shared[options]
    except TypeError:
        # Options that have no hash, or a callable that cannot be referred to weakly.
        return Program(lambda: opaque, signature, donate, jitkwargs, shardings)


_programs: weakref.WeakKeyDictionary[Any, dict[Any, Program]]
_programs = weakref.WeakKeyDictionary()
_programs_of_pytrees: dict[Any, Program] = {}
_lock = threading.RLock()


@on_clear
def _forget_programs() -> None:
    # Wrappers that exist hold theirs themselves.
    with _lock:
        _programs.clear()
        _programs_of_pytrees.clear()


class _NoPlan:
    """What `last_plan` is before the first call: equal to no call."""

    leaf_types = None
    call_treedef = None


_NO_PLAN = _NoPlan()


class _Names(inspect.Signature):
    """Tells JAX the names of flat arguments: `model.layers[0].weight`."""

    def __init__(self, plan: Plan):
        rest = inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)
        super().__init__([rest])
        self.plan = plan

    def bind(self, *groups: Any, **kwargs: Any) -> Any:
        leaves = [leaf for group in groups for leaf in group]
        return types.SimpleNamespace(
            arguments=dict(zip(self.plan.data_names, leaves, strict=True))
        )


def _speak_of(traced: Any, fun: Any, plan: Plan) -> None:
    """Makes what JAX says of `traced` speak of the user's function and arguments."""
    traced.__name__ = traced.__qualname__ = name_of(fun)
    traced.__doc__ = getattr(fun, "__doc__", None)
    traced.__signature__ = _Names(plan)
    source = inspect.unwrap(function_of(fun))
    code = getattr(source, "__code__", None) or getattr(
        type(source).__call__, "__code__", None
    )
    if code is not None:
        # It shares the code, and so file and line, but does not keep `fun` alive.
        cells = tuple(types.CellType() for _ in code.co_freevars)
        traced.__wrapped__ = types.FunctionType(code, {}, traced.__name__, None, cells)


def _abstract(leaves: list[Any]) -> list[Any]:
    return [_struct_of(x) if isinstance(x, jax.Array) else x for x in leaves]


def _struct_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    # A typed key has no weak type.
    weak_type = getattr(x, "weak_type", False)
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding, weak_type=weak_type
    )


_REFUSED = {
    "static_argnums": "whatever is not an array is static already",
    "static_argnames": "whatever is not an array is static already",
    "donate_argnums": "use `donate=`",
    "donate_argnames": "use `donate=`",
}
_DEPRECATED = ("default", "fn", "args", "kwargs", "out")


def _check_jitkwargs(jitkwargs: dict[str, Any]) -> None:
    for name, fix in _REFUSED.items():
        if name in jitkwargs:
            raise ValueError(f"`filter_jit` does not take `{name}`: {fix}.")
    refuse_deprecated("filter_jit", _DEPRECATED, jitkwargs, "")
    options = {k: v for k, v in jitkwargs.items() if k not in OPTIONS}
    if options:
        jax.jit(lambda: None, **options)  # raises for what it does not know
