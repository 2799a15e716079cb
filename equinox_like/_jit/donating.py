"""A compiled function that donates: what is inspected before a call, and after it.

JAX warns of an unusable donation while it lowers, and after a call it deletes the
arrays whose buffers XLA could reuse. So a call for which JAX has no program is lowered and
inspected before it runs. After every call, those that were donated by name are deleted
here if no output could reuse them. An array whose memory NumPy holds stays alive, as with
`jax.jit`.

To compare each array with those of the last call, to see whether the program was inspected
before, would cost 0.12 us for each. Instead, the function that JAX traces raises
`UnexpectedTrace` if no trace is expected. Arrays on several devices are compared in each
call, because JAX compiles for another layout of them without a trace.
"""

import dataclasses
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .._compat.arrays import stored_as
from .._compat.compiled import Buffer, buffers_of, unused_arguments
from .._compat.errors import forget_calls, is_deleted_array_error
from .._core.base import jit_is_disabled
from .._core.deletion import delete_array, fatal
from .._errors import DonationError, DonationWarning
from .._tree.deleted import Record
from .checks import raise_explained
from .donation import (
    Donation,
    are_any_sharded,
    are_deleted,
    check_not_fatal,
    check_unused,
    is_lowering_warning,
    lower_silently,
    unusable,
)
from .layout import Layout, add_bounded
from .specialization import (
    Specialization,
    UnexpectedTrace,
    expected,
    traits_of,
)

# For each data leaf, what happens to its buffer; `None` if JAX does not say.
Buffers = Sequence[int | Buffer | None]
_FAILED = -1  # in place of the number of a trace


class DonatingSpecialization(Specialization):
    """A `Specialization` that donates some of its arguments."""

    def __init__(self, program: Any, fun: Any, layout: Layout, skeleton: Any):
        self._donation: Donation = program.donation
        self._deletion = Deletion(program.donation, program.record)
        # The traits of the last call that was inspected, and the sharding of the first
        # array of the last call.
        self._traits: Any = None
        self._place: Any = None
        # Whether to compare the traits in every call, and not only where JAX has no
        # trace: it may have traces that were not inspected, or arrays may be on several
        # devices.
        self.inspects_every_call = False
        # By the traits of the calls that were lowered; `None` until it is needed.
        self._buffers: dict[Any, Buffers | None] = {}
        # The data leaves that some program does not use, so that JAX does not check them.
        self._unused: set[int] = set()
        super().__init__(program, fun, layout, skeleton)

    def run(self, layout: Layout, leaves: list[Any]) -> Any:
        groups = (tuple(leaves),) if layout.is_whole else layout.groups(leaves)
        out = None
        try:
            # For arrays with another sharding, JAX may recompile without a retrace. To
            # check every array would take half as long as the call, so only the first
            # one is checked. `is` comes first because comparing shardings runs Python
            # code.
            place = getattr(stored_as(groups[0][0]), "sharding", None)
            is_known = place is self._place or place == self._place
            if self.inspects_every_call or not is_known:
                is_known = self._is_known(layout, leaves, groups)
            if is_known:
                if self._unused:
                    check_unused(layout, leaves, self._unused)
                try:
                    out = self.function(*groups)
                except (UnexpectedTrace, UserWarning) as e:
                    # JAX's warning is raised, if warnings are errors, when this thread
                    # lowers what another thread has traced.
                    if not (isinstance(e, UnexpectedTrace) or is_lowering_warning(e)):
                        raise
                    forget_calls(self.function)
            if out is None:  # not in `except`, which would set `__context__`
                out = self._first_call(layout, leaves, groups)
            self._place = place
            data, (number,) = out
            build = self.build.get(number) or self.complete(layout, leaves, out)
        except BaseException as e:
            forget_calls(self.function)
            self._deletion.fail(layout, leaves, e)
            raise_explained(e, layout, leaves)
        self._deletion.finish(layout, leaves, number, self._inspect)
        return build(data)

    def _is_known(self, layout: Layout, leaves: list[Any], groups: Any) -> bool:
        """Whether the traits of a call equal those of the last one inspected."""
        check_not_fatal(layout, leaves)
        traits = traits_of(groups)
        if traits != self._traits:
            return jit_is_disabled()
        # The next call is likely to have the same objects, which compare faster.
        self._traits = traits
        return True

    def _first_call(self, layout: Layout, leaves: list[Any], groups: Any) -> Any:
        """Runs a call for which JAX may have no program; inspects it before."""
        check_unused(layout, leaves, range(len(layout.data_places)))
        self._deletion.forget()
        self.inspects_every_call |= are_any_sharded(leaves)
        self._inspect(layout, leaves, with_buffers=self._donation.inspects_first)
        self._traits = traits_of(groups)
        with expected.trace_of(self):
            return lower_silently(lambda: self.function(*groups))

    def _inspect(
        self, layout: Layout, leaves: list[Any], with_buffers: bool = True
    ) -> Any:
        """What the program for a call makes of the buffers, if that is asked for.

        The arrays may already be deleted: only their shapes, dtypes and shardings are
        read. JAX caches the program, so nothing is lowered or compiled twice.
        """
        key = tuple(traits_of(layout.groups(leaves)))
        found = self._buffers.get(key)
        if found is not None or (key in self._buffers and not with_buffers):
            return found
        lowered = lower_silently(lambda: self.stage("lower", layout, leaves))
        self._unused.update(unused_arguments(lowered))
        if with_buffers:
            found = buffers_of(lowered, lowered.compile())
            if self._donation.inspects_first:
                try:
                    self._donation.report_unusable(
                        unusable(layout.named_leaves(leaves), found, self._donation)
                    )
                except (DonationError, DonationWarning):
                    # JAX has a trace now, although the call was refused.
                    self.inspects_every_call = True
                    raise
            found = found or [None] * len(layout.data_places)
        add_bounded(self._buffers, key, found)
        return found


class Fate(enum.Enum):
    """What becomes of a donated array after a call."""

    DELETED = "JAX has deleted it"
    USELESS = "no output could reuse it, so it is deleted here"
    IN_PART = (
        "NumPy holds a part of it; JAX may have deleted the parts on other devices"
    )
    ALIVE = "it stays alive"


@dataclasses.dataclass
class _Aftermath:
    """What to do after a call that is like the last one of its trace, as most are."""

    # For each donated leaf, whether JAX has deleted it: see `are_deleted`.
    deleted: list[bool | None]
    # The leaves that are useless or deleted in part.
    to_do: list[tuple[int, Fate]]
    # The leaves to note as donated: one of each argument, as all would cost every call.
    to_note: list[int]


class Deletion:
    """Completes what JAX deleted in a call, and notes which function deleted it.

    `DonatingSpecialization` and the stage `Compiled` both use it.
    """

    def __init__(self, donation: Donation, record: Record):
        self._by_name = donation.names is not None
        self._record = record
        self.forget()

    def forget(self) -> None:
        self._known: dict[int | None, _Aftermath] = {}  # by the number of the trace

    def finish(
        self,
        layout: Layout,
        leaves: list[Any],
        number: int | None,
        buffers_of: Callable[[Layout, list[Any]], Any],
    ) -> None:
        """After a call of the trace with this number.

        `buffers_of` returns what happens to the buffer of each data leaf of a call.
        """
        donated = layout.take_donated(leaves)
        deleted = are_deleted(donated)
        known = self._known.get(number)
        if known is None or known.deleted != deleted:
            if jit_is_disabled():
                return
            if are_any_sharded(donated):
                fatal.add()
            fates = self._fates(
                donated,
                deleted,
                lambda: layout.donated_of_data(buffers_of(layout, leaves)),
            )
            gone = [i for i, fate in enumerate(fates) if fate is not Fate.ALIVE]
            arguments = layout.arguments_of_donated
            known = self._known[number] = _Aftermath(
                deleted,
                [(i, fates[i]) for i in gone if fates[i] is not Fate.DELETED],
                [*{arguments[i]: i for i in reversed(gone)}.values()],
            )
        for i, fate in known.to_do:
            if fate is Fate.USELESS:
                delete_array(donated[i])
            else:
                fatal.add([donated[i]])
        self._record.calls.append([weakref.ref(donated[i]) for i in known.to_note])

    def _fates(
        self,
        donated: Sequence[Any],
        deleted: Sequence[bool | None],
        buffers: Callable[[], Sequence[Any]],
    ) -> list[Fate]:
        """What becomes of each donated leaf, of which JAX has deleted some."""
        fates = [Fate.DELETED if is_gone else Fate.ALIVE for is_gone in deleted]
        alive = [i for i, is_gone in enumerate(deleted) if is_gone is False]
        sharded = [i for i in alive if are_any_sharded([donated[i]])]
        if sharded or (alive and self._by_name):
            found = buffers()
            for i in alive:
                if isinstance(found[i], int):  # so NumPy holds its memory
                    fates[i] = Fate.IN_PART if i in sharded else Fate.ALIVE
                elif self._by_name and found[i] is not Buffer.NOT_DONATED:
                    fates[i] = Fate.USELESS
        return fates

    def fail(self, layout: Layout, leaves: list[Any], error: BaseException) -> None:
        """After a call that raised `error`, unless an earlier call deleted the arrays."""
        is_late = not isinstance(error, DonationError | UnexpectedTrace)
        if is_late and not is_deleted_array_error(error):
            kept = [Buffer.NOT_DONATED] * len(leaves)
            self.finish(layout, leaves, _FAILED, lambda *_: kept)
