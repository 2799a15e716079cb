"""Donation: what to donate, the inspection of a first call, deletion after each one.

JAX warns of an unusable donation while it lowers, by its shape only, and after a call it
deletes the arrays whose buffers XLA could reuse. So a call for which JAX has no program
is lowered and inspected before it runs. JAX's warning is hidden meanwhile, and ours names
the leaves. After a call, those that were donated by name are deleted here if no output
could reuse them. An array whose memory NumPy holds stays alive, as with `jax.jit`.

To compare each array with those of the last call, to see whether the program was inspected
before, would cost 0.12 us for each. Instead, the function that JAX traces raises
`UnexpectedTrace` if no trace is expected. Arrays on several devices are compared in each
call, because JAX compiles for another layout of them without a trace.
"""

import contextlib
import dataclasses
import enum
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, TypeVar, get_args

import jax
import numpy as np

from .._compat.arrays import stored_as
from .._compat.compiled import Buffer, buffers_of, unused_arguments
from .._compat.errors import UNUSABLE_DONATION, forget_calls, is_deleted_array_error
from .._compat.tracing import jit_is_disabled
from .._errors import DonationError, DonationWarning, did_you_mean, warn
from .._tree.arrays import describe_array
from .._tree.deleted import Record
from .checks import are_any_sharded, check_not_fatal, check_unused, fatal
from .layout import CallLayout, Leaves, NamedLeaf, add_bounded
from .specialization import Specialization, UnexpectedTrace, expected

_T = TypeVar("_T")

Mode = Literal[
    "none", "arrays", "all", "all-except-first", "warn", "warn-except-first", "strict"
]
Donate = Mode | tuple[str, ...]
MODES: Final = get_args(Mode)
# For each data leaf, what happens to its buffer; `None` if JAX does not say.
Buffers = Sequence[int | Buffer | None]
BuffersOf = Callable[[CallLayout, Leaves], Buffers]
# The arguments of a compiled function: see `CallLayout.groups`.
Groups = Sequence[Any]


class Donation:
    """A parsed `donate=`: which arrays to donate, and how to report unusable ones."""

    def __init__(self, donate: Any):
        check_mode(donate)
        self.names = frozenset(donate) if isinstance(donate, tuple) else None
        self.is_any = donate != "none" and self.names != frozenset()
        self.is_strict = donate == "strict"
        self.spares_first = str(donate).endswith("-except-first")
        # Whether unusable donations are reported before the first call runs.
        warns = self.names is not None or str(donate).startswith("warn")
        self.inspects_first = self.is_any and (self.is_strict or warns)

    def donates(self, parameter: str, is_first: bool) -> bool:
        """Whether a parameter's arrays are donated."""
        if self.names is not None:
            return parameter in self.names
        return self.is_any and not (is_first and self.spares_first)

    def check_names(self, signature: inspect.Signature, function: str) -> None:
        for name in sorted(self.names or ()):
            if name not in signature.parameters:
                meant = did_you_mean(name, signature.parameters, "{!r}")
                raise ValueError(
                    f"`donate` names {name!r}, which is not a parameter of "
                    f"`{function}`. Its parameters: "
                    f"{', '.join(map(repr, signature.parameters)) or 'none'}.{meant}"
                )

    def report_unusable(
        self, named: Sequence[NamedLeaf], buffers: Buffers | None
    ) -> None:
        """Raises or warns, depending on the mode, for leaves that no output reuses.

        Those that the program does not use are reported only if they are donated by name,
        because only then are they deleted.
        """
        kinds = {Buffer.DONOR, Buffer.UNUSABLE}
        if self.names is not None:
            kinds.add(Buffer.PRUNED)
        leaves = [
            (name, x)
            for (name, x, is_donated), buffer in zip(named, buffers or (), strict=False)
            if is_donated
            and buffer in kinds
            and not isinstance(x, np.ndarray | np.generic)
        ]
        if not leaves:
            return
        listing = ", ".join(f"`{name}` ({describe_array(x)})" for name, x in leaves)
        advice = ""
        if are_any_sharded([x for _, x in leaves]):
            advice = (
                " The size on each device must be equal. If the array is returned with "
                "another sharding, which JAX may choose, pass the sharding of the "
                "argument, as in `filter_jit(..., out_shardings=...)`."
            )
        if self.is_strict:
            raise DonationError(
                f'`donate="strict"`: some donated buffers are not usable: {listing}. '
                "No remaining output has their size. Nothing was run or deleted. Return an "
                'updated array for each, or donate the others: `donate=("model",)`.'
                + advice
            )
        outcome = "are deleted anyway, unless NumPy holds their memory"
        if self.names is None:
            outcome = "stay alive"
        warn(
            f"Some donated buffers were not usable: {listing}. No remaining output has "
            f"their size, or the function does not use them; these arrays {outcome}. "
            "Return an updated array for each of them, or do not donate them." + advice,
            DonationWarning,
        )


def check_mode(donate: Any) -> None:
    is_names = isinstance(donate, tuple) and all(isinstance(n, str) for n in donate)
    if not is_names and donate not in MODES:
        choices = ", ".join(f'"{mode}"' for mode in MODES)
        meant = did_you_mean(donate, MODES, '`donate="{}"`')
        if isinstance(donate, str) and donate.isidentifier():
            meant += f' To donate a parameter, write `donate=("{donate}",)`.'
        raise ValueError(
            f"`donate` must be one of {choices}, or a tuple of parameter names; got "
            f"{donate!r}.{meant}"
        )


class DonatingSpecialization(Specialization):
    """A `Specialization` that donates some of its arguments."""

    def __init__(self, program: Any, fun: Any, layout: CallLayout, skeleton: Any):
        self._donation: Donation = program.donation
        self._deletion = Deletion(program.donation, program.record)
        # By the traits of a call that was inspected: what its program makes of the
        # buffers; `None` until that is needed.
        self._inspected: dict[Any, Buffers | None] = {}
        # Of the last call: the sharding of its first array, and its traits, if they were
        # compared.
        self._place: Any = None
        self._traits: Any = None
        # Whether to compare the traits in every call, and not only where JAX has no
        # trace: it may have traces that were not inspected, or arrays may be on several
        # devices.
        self.compares_every_call = False
        # The data leaves that some program does not use, so that JAX does not check them.
        self._unused: set[int] = set()
        super().__init__(program, fun, layout, skeleton)

    def run(self, layout: CallLayout, leaves: Leaves) -> Any:
        groups = (tuple(leaves),) if layout.is_whole else layout.groups(leaves)
        try:
            out = self._run_inspected(layout, leaves, groups)
            if out is None:
                out = self._first_run(layout, leaves, groups)
            data, (number,) = out
            build = self.build.get(number) or self.complete(layout, leaves, out)
        except BaseException as e:
            self._deletion.fail(layout, leaves, e)
            self.fail(e, layout, leaves)
        self._deletion.finish(layout, leaves, number, self._inspect)
        return build(data)

    def _run_inspected(self, layout: CallLayout, leaves: Leaves, groups: Groups) -> Any:
        """Runs a call whose program was inspected; `None` for any other."""
        # For arrays with another sharding, JAX may recompile without a retrace. To check
        # every array would take half as long as the call, so only the first one is
        # checked. `is` comes first because comparing shardings runs Python code.
        place = getattr(stored_as(groups[0][0]), "sharding", None)
        is_like_last = place is self._place or place == self._place
        if self.compares_every_call or not is_like_last:
            check_not_fatal(layout, leaves)
            if not (self._is_inspected(groups) or jit_is_disabled()):
                return None
        if self._unused:
            check_unused(layout, leaves, self._unused)
        try:
            out = self.function(*groups)
            self._place = place
            return out
        except UnexpectedTrace:
            pass
        except UserWarning as e:
            # If warnings are errors, JAX's is raised when this thread lowers what another
            # one has traced.
            if not UNUSABLE_DONATION.match(str(e)):
                raise
        forget_calls(self.function)
        return None

    def _is_inspected(self, groups: Groups) -> bool:
        traits = _traits_of(groups)
        if traits != self._traits:
            if traits not in self._inspected:
                return False
            self._deletion.forget()
        # The next call is likely to have the same objects, which compare faster.
        self._traits = traits
        return True

    def _first_run(self, layout: CallLayout, leaves: Leaves, groups: Groups) -> Any:
        """Inspects a call for which JAX may have no program, and runs it."""
        check_unused(layout, leaves, range(len(layout.data_places)))
        self.compares_every_call |= are_any_sharded(leaves)
        self._inspect(layout, leaves, self._donation.inspects_first)
        self._deletion.forget()
        with expected.trace_of(self):
            return lower_silently(lambda: self.function(*groups))

    def _inspect(
        self, layout: CallLayout, leaves: Leaves, with_buffers: bool = True
    ) -> Any:
        """What the program for a call makes of the buffers, if that is asked for.

        The arrays may already be deleted: only their shapes, dtypes and shardings are
        read. JAX caches the program, so nothing is lowered or compiled twice.
        """
        traits = _traits_of(layout.groups(leaves))
        found = self._inspected.get(traits)
        if found is not None or (traits in self._inspected and not with_buffers):
            return found
        lowered = lower_silently(lambda: self.stage("lower", layout, leaves))
        self._unused.update(unused_arguments(lowered))
        if with_buffers:
            found = buffers_of(lowered, lowered.compile())
            if self._donation.inspects_first:
                try:
                    self._donation.report_unusable(layout.named_leaves(leaves), found)
                except (DonationError, DonationWarning):
                    # JAX has a trace now, although the call was refused.
                    self.compares_every_call = True
                    raise
            found = found or [None] * len(layout.data_places)
        add_bounded(self._inspected, traits, found)
        return found


def _traits_of(groups: Groups) -> tuple[Any, ...]:
    """Equal for calls that JAX runs by the same program."""
    return tuple(_traits(x) for group in groups for x in group)


def _traits(x: Any) -> Any:
    """What the compiled program depends on for one array."""
    stored = stored_as(x)
    try:
        traits = stored.aval, stored.sharding
    except AttributeError:  # an array of NumPy
        return x.shape, x.dtype
    return traits if stored is x else (x.dtype, *traits)


# An entry of `warnings.filters`: action, message, category, module, line.
_HIDE: Final[Any] = ("ignore", UNUSABLE_DONATION, UserWarning, None, 0)


def lower_silently(lower: Callable[[], _T], attempts: int = 6) -> _T:
    """Returns `lower()`, without JAX's warning of unusable donations.

    Another thread's `catch_warnings` may drop the filter. If the warning is then raised
    as an error, this lowers again.
    """
    try:
        with _warning_hidden():
            return lower()
    except UserWarning as e:
        if attempts == 1 or not UNUSABLE_DONATION.match(str(e)):
            raise
    return lower_silently(lower, attempts - 1)


@contextlib.contextmanager
def _warning_hidden() -> Iterator[None]:
    """Hides JAX's warning of unusable donations.

    `warnings.catch_warnings` is not used: on exit it restores the filters that it
    found, and so drops those that another thread has set meanwhile. Here each user adds
    a filter, and removes one: also from the list that was in use before, which another
    thread's `catch_warnings` has copied, or is to restore.
    """
    before: Any = warnings.filters
    before.insert(0, _HIDE)
    try:
        yield
    finally:
        now: Any = warnings.filters
        for filters in [before] if now is before else [before, now]:
            with contextlib.suppress(ValueError):
                filters.remove(_HIDE)


class Deleted(enum.Enum):
    """How a donated array is deleted in a call."""

    BY_JAX = "an output reuses its buffer"
    HERE = "it was donated by name, and no output could reuse it"
    IN_PART = "NumPy holds a part of it; JAX may have deleted the others"
    NOT_AT_ALL = "it stays alive"


@dataclasses.dataclass
class _LastCall:
    """What the last call of a trace has done, to be done after each call like it."""

    # For each donated leaf, whether JAX has deleted it; `None` for an array of NumPy.
    by_jax: list[bool | None]
    # The leaves that are to be deleted here, or were in part.
    to_do: list[tuple[int, Deleted]]
    # The leaves to record as donated: one of each argument, as all would cost every call.
    to_record: list[int]


class Deletion:
    """Completes what JAX deleted in a call, and records which function deleted it.

    `DonatingSpecialization` and the stage `Compiled` both use it.
    """

    def __init__(self, donation: Donation, record: Record):
        self._by_name = donation.names is not None
        self._record = record
        self.forget()

    def forget(self) -> None:
        self._last: dict[int | None, _LastCall] = {}  # by the number of the trace

    def finish(
        self,
        layout: CallLayout,
        leaves: Leaves,
        number: int | None,
        buffers_of: BuffersOf,
    ) -> None:
        """After a call of the trace with this number.

        `buffers_of` returns what happens to the buffer of each data leaf of a call.
        """
        donated = layout.take_donated(leaves)
        by_jax = [x.is_deleted() if hasattr(x, "is_deleted") else None for x in donated]
        last = self._last.get(number)
        if last is None or last.by_jax != by_jax:
            if jit_is_disabled():
                return
            table = self._table(layout, leaves, by_jax, buffers_of)
            numbers = layout.arguments_of_donated
            deleted = [
                i for i, how in enumerate(table) if how is not Deleted.NOT_AT_ALL
            ]
            last = self._last[number] = _LastCall(
                by_jax,
                [(i, table[i]) for i in deleted if table[i] is not Deleted.BY_JAX],
                [*{numbers[i]: i for i in reversed(deleted)}.values()],
            )
        for i, how in last.to_do:
            if how is Deleted.HERE:
                delete_array(donated[i])
            else:
                fatal.add([donated[i]])
        self._record.calls.append([weakref.ref(donated[i]) for i in last.to_record])

    def _table(
        self,
        layout: CallLayout,
        leaves: Leaves,
        by_jax: Sequence[bool | None],
        buffers_of: BuffersOf,
    ) -> list[Deleted]:
        """What becomes of each donated leaf, of which JAX has deleted some."""
        donated = layout.take_donated(leaves)
        table = [Deleted.BY_JAX if x else Deleted.NOT_AT_ALL for x in by_jax]
        alive = [i for i, is_deleted in enumerate(by_jax) if is_deleted is False]
        sharded = [i for i, x in enumerate(donated) if are_any_sharded([x])]
        if sharded:
            fatal.add()
        if alive and (self._by_name or not set(sharded).isdisjoint(alive)):
            buffers = layout.donated_of_data(buffers_of(layout, leaves))
            for i in alive:
                if isinstance(buffers[i], int):  # so NumPy holds its memory
                    table[i] = Deleted.IN_PART if i in sharded else Deleted.NOT_AT_ALL
                elif self._by_name and buffers[i] is not Buffer.NOT_DONATED:
                    table[i] = Deleted.HERE
        return table

    def fail(self, layout: CallLayout, leaves: Leaves, error: BaseException) -> None:
        """After a call that raised `error`, unless an earlier call deleted the arrays."""
        if not isinstance(error, DonationError) and not is_deleted_array_error(error):
            kept = [Buffer.NOT_DONATED] * len(layout.data_places)
            self.finish(layout, leaves, _FAILED, lambda *_: kept)


_FAILED: Final = -1  # in place of the number of a trace


def delete_array(x: jax.Array) -> None:
    """Deletes an array that another thread may be reading, unless NumPy holds its memory.

    `.delete()` would end the process if another thread is converting the array to NumPy,
    because it frees what that thread reads. A donation waits for such a thread. So the
    array is donated to a program that returns it, and what it returns is dropped.
    """
    if x.is_deleted():
        return
    with jax.disable_jit(False):
        _returns_its_argument(x.sharding)(x)
    if len(x.sharding.device_set) > 1:
        fatal.add([] if x.is_deleted() else [x])


@functools.lru_cache(maxsize=64)
def _returns_its_argument(sharding: Any) -> Any:
    return jax.jit(
        jax.lax.optimization_barrier, donate_argnums=0, out_shardings=sharding
    )
