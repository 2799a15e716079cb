"""A compiled function that donates: what is inspected before a call, and after it.

JAX warns of an unusable donation while it lowers, and deletes after a call what XLA could
reuse. So a call for which JAX has no trace is inspected before it runs, and after every
call the donated arrays must be deleted; those that are not, as NumPy reads their memory,
are deleted then.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._compat.fast_path import forget_calls
from .._compat.lowered import Buffer, buffers_of, unused_arguments
from .._core.base import jit_is_disabled
from .._errors import DonationError, DonationWarning
from .._tree.arrays import is_deleted
from .donation import (
    Donation,
    Record,
    are_all_deleted,
    are_any_deleted,
    are_any_sharded,
    lowering_warnings,
    refuse_deleted,
    refuse_shared,
    refuse_unused,
    release,
    still_alive,
    unusable,
)
from .layout import Layout, keep
from .specialization import (
    Specialization,
    UnexpectedTrace,
    abstract,
    expected,
    raise_explained,
    traits_of,
)

Buffers = Sequence[int | Buffer | None]
_NOT_RUN: Any = object()


class DonatingSpecialization(Specialization):
    """A `Specialization` that donates some of its arguments."""

    def __init__(self, program: Any, fun: Any, layout: Layout, skeleton: Any):
        self._donation: Donation = program.donation
        self._record: Record = program.record
        # The traits of the last call that was inspected, and where its first array was.
        self._traits: Any = None
        self._place: Any = None
        # For all traits that there were, what becomes of the buffer of each argument.
        self._buffers: dict[Any, Buffers] = {}
        # Whether to inspect every call, not only one that JAX has no trace for: it may have
        # traces that were not inspected, or arrays are on several devices.
        self.is_watched = False
        # The places that some trace does not use, for which JAX checks nothing there; and
        # the traits for which they are known.
        self._unused: set[int] = set()
        self._lowered: dict[Any, bool] = {}
        self._deletion = Deletion(program.donation, program.record)
        super().__init__(program, fun, layout, skeleton)

    def run(self, layout: Layout, leaves: list[Any]) -> Any:
        groups = (tuple(leaves),) if layout.is_whole else layout.groups(leaves)
        try:
            # For arrays elsewhere JAX may compile again without a trace. To ask each array
            # would take half as long as the call; the first one tells, if all are there.
            # Most often its sharding is the same object; to compare two runs Python.
            place = getattr(groups[0][0], "sharding", None)
            if self.is_watched or (place is not self._place and place != self._place):
                self._before(layout, leaves, groups)
            self._place = place
            if self._unused:
                refuse_unused(layout, leaves, self._unused)
            try:
                out = self.function(*groups)
            except (UnexpectedTrace, UserWarning) as e:
                # The warning: this thread lowers what another one has traced, and warnings
                # are errors.
                if not isinstance(e, UnexpectedTrace) and not lowering_warnings.is_one(
                    e
                ):
                    raise
                out = _NOT_RUN
                forget_calls(self.function)
            if out is _NOT_RUN:  # not in the `except`: it would be the error's context
                out = self._first_call(layout, leaves, groups)
            if self.may_hold_check:
                self.wait_for_check(layout, leaves, out)
        except BaseException as e:
            lowering_warnings.show_again()
            forget_calls(self.function)
            raise_explained(e, layout, leaves)
        donated = groups[0] if layout.is_whole else layout.take_donated(leaves)
        if lowering_warnings.count:
            lowering_warnings.show_again()
        if are_all_deleted(donated):
            self._record.note(donated)
            if self.is_watched:
                release(donated)
        elif not jit_is_disabled():
            self._deletion.finish(
                layout, donated, traits_of(groups), lambda: self._fates(layout, leaves)
            )
        return self.outputs.tree(out)

    def _before(self, layout: Layout, leaves: list[Any], groups: Sequence[Any]) -> None:
        """Inspects the arrays of a call, unless they are like the last ones."""
        self._refuse_fatal(layout, leaves)
        if traits_of(groups) != self._traits:
            self._before_lowering(layout, leaves, groups)

    def _first_call(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> Any:
        """A call for which JAX has no trace, or has not lowered it."""
        self._before_lowering(layout, leaves, groups)
        with expected.trace_of(self):
            return lowering_warnings.lower(lambda: self.function(*groups))

    def _refuse_fatal(self, layout: Layout, leaves: list[Any]) -> None:
        """Raises for arrays on several devices that would end the process on jax 0.10."""
        if not are_any_sharded(leaves):
            return
        if are_any_deleted(leaves):
            refuse_deleted(layout.named_leaves(leaves))
        data = [leaves[i] for i in layout.data_places]
        if len(set(map(id, data))) < len(data):
            refuse_shared(layout.named_leaves(leaves))

    def _before_lowering(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> None:
        """Inspects a call for which JAX may lower the program, as for a new sharding."""
        refuse_unused(layout, leaves, range(len(layout.data_places)))
        self.is_watched |= are_any_sharded(leaves)
        if not jit_is_disabled():
            self._find_unused(layout, leaves, groups)
            if self._donation.inspects_first:
                self._fates(layout, leaves)
            # Not only in `_first_call`: JAX may lower for this call without a trace.
            lowering_warnings.hide()
        # Equal ones, too: those of the next call are likely to be the same objects.
        self._traits = traits_of(groups)

    def _find_unused(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> None:
        key = tuple(traits_of(groups))
        if key not in self._lowered:
            # JAX keeps what it lowers here for the call.
            self._unused.update(unused_arguments(self._lower(layout, leaves)))
            keep(self._lowered, key, True)

    def _fates(self, layout: Layout, leaves: list[Any]) -> Buffers:
        """For each array what becomes of its buffer; `None` if JAX does not say.

        The arrays may be deleted by now, but what is known about them is not. JAX keeps
        what it lowers and compiles here for the call, or has kept it.
        """
        key = tuple(traits_of(layout.groups(leaves)))
        found: Buffers | None = self._buffers.get(key)
        if found is None:
            try:
                lowered = self._lower(layout, leaves)
            finally:
                lowering_warnings.show_again()
            buffers = buffers_of(lowered, lowered.compile())
            if self._donation.inspects_first:
                try:
                    self._donation.report_unusable(
                        unusable(layout.named_leaves(leaves), buffers, self._donation)
                    )
                except (DonationError, DonationWarning):
                    # There is a trace now, though the call is refused.
                    self.is_watched = True
                    raise
            found = buffers or [None] * len(layout.data_places)
            keep(self._buffers, key, found)
        return found

    def _lower(self, layout: Layout, leaves: list[Any]) -> Any:
        return lowering_warnings.lower(
            lambda: self.stage("lower", layout, abstract(leaves))
        )


class Deletion:
    """Deletes after a call what was donated, and is still alive. For all kinds of call."""

    def __init__(self, donation: Donation, record: Record):
        self._donation = donation
        self._record = record
        # For the traits of a call the indices of what is right to be alive after it.
        self._settled: tuple[Any, tuple[int, ...]] = None, ()

    def finish(
        self,
        layout: Layout,
        donated: Sequence[Any],
        traits: Any,
        fates: Callable[[], Buffers],
    ) -> None:
        """`fates()` says what became of the buffer of each datum."""
        alive = still_alive(donated)
        if alive and (traits, alive) != self._settled:
            left = alive
            if self._donation.names is None:
                # JAX leaves alive what it could not overwrite, as somebody reads it.
                found = layout.donated_of_data(fates())
                left = tuple(i for i in alive if not isinstance(found[i], int))
            else:
                left = ()
            for i in alive:
                if i not in left:
                    donated[i].delete()
            self._settled = traits, left
        gone = list(filter(is_deleted, donated))
        self._record.note(gone)
        release(gone)
