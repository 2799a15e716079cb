"""A compiled function that donates: what is inspected before and after a call.

JAX warns of an unusable donation while it lowers, and after a call it deletes the
arrays whose buffers XLA could reuse. So a call for which JAX has no trace is inspected
before it runs. After every call, donated arrays that are still alive because NumPy
reads their memory are deleted here.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._compat.deleted import DELETES_BUFFERS_ONLY
from .._compat.fast_path import forget_calls
from .._compat.keys import stored_as
from .._compat.lowered import Buffer, buffers_of, unused_arguments
from .._core.base import jit_is_disabled
from .._errors import DonationError, DonationWarning
from .donation import (
    Donation,
    Record,
    are_any_sharded,
    are_deleted,
    lowering_warnings,
    refuse_fatal,
    refuse_unused,
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
        # The traits of the last inspected call, and the sharding of the first array of
        # the last call.
        self._traits: Any = None
        self._place: Any = None
        # By the traits of a call: what happens to the buffer of each data leaf.
        self._buffers: dict[Any, Buffers] = {}
        # Whether to inspect every call, and not only those that JAX has no trace for:
        # JAX may have traces that were not inspected, or arrays may be on several
        # devices.
        self.inspects_every_call = False
        # The indices of data leaves that some trace does not use, so that JAX does not
        # check them; and the traits of the calls for which they were looked up.
        self._unused: set[int] = set()
        self._lowered: dict[Any, bool] = {}
        self._deletion = Deletion(program.donation, program.record)
        super().__init__(program, fun, layout, skeleton)

    def run(self, layout: Layout, leaves: list[Any]) -> Any:
        groups = (tuple(leaves),) if layout.is_whole else layout.groups(leaves)
        try:
            # For arrays with another sharding, JAX may recompile without a retrace. To
            # check every array would take half as long as the call, so only the first
            # one is checked. `is` comes first because comparing shardings runs Python
            # code.
            place = getattr(stored_as(groups[0][0]), "sharding", None)
            inspects = self.inspects_every_call or (
                place is not self._place and place != self._place
            )
            if inspects:
                self._inspect(layout, leaves, groups)
            self._place = place
            if self._unused:
                refuse_unused(layout, leaves, self._unused)
            try:
                out = self.function(*groups)
            except (UnexpectedTrace, UserWarning) as e:
                # A `UserWarning` is raised if warnings are errors, and this thread
                # lowers what another thread has traced.
                if not isinstance(e, UnexpectedTrace) and not lowering_warnings.is_one(
                    e
                ):
                    raise
                out = _NOT_RUN
                forget_calls(self.function)
            if out is _NOT_RUN:  # not in `except`, which would set `__context__`
                inspects = True
                out = self._first_call(layout, leaves, groups)
            if self.must_wait is not False:
                self.wait_for_check(layout, leaves, out)
        except BaseException as e:
            lowering_warnings.show_again()
            forget_calls(self.function)
            raise_explained(e, layout, leaves)
        if inspects:
            lowering_warnings.show_again()
        data, (number,) = out
        self._deletion.finish(layout, leaves, number, self._outcomes)
        return self.outputs.build[number](data)

    def _inspect(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> None:
        """Inspects the arrays of a call, unless their traits equal the last call's."""
        refuse_fatal(layout, leaves)
        traits = traits_of(groups)
        if traits != self._traits:
            self._inspect_for_lowering(layout, leaves, groups)
        # Replaced even if equal: the next call is likely to have the same objects,
        # which compare faster.
        self._traits = traits

    def _first_call(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> Any:
        """Runs a call that JAX has not traced or not lowered yet."""
        self._inspect_for_lowering(layout, leaves, groups)
        with expected.trace_of(self):
            return lowering_warnings.lower(lambda: self.function(*groups))

    def _inspect_for_lowering(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> None:
        """Inspects a call that may make JAX lower, for example for a new sharding."""
        refuse_unused(layout, leaves, range(len(layout.data_places)))
        self._deletion.forget()
        self.inspects_every_call |= are_any_sharded(leaves)
        if not jit_is_disabled():
            self._find_unused(layout, leaves, groups)
            if self._donation.inspects_first:
                self._outcomes(layout, leaves)
            # Also outside `_first_call`, because JAX may lower this call without
            # tracing.
            lowering_warnings.hide()
        self._traits = traits_of(groups)

    def _find_unused(
        self, layout: Layout, leaves: list[Any], groups: Sequence[Any]
    ) -> None:
        key = tuple(traits_of(groups))
        if key not in self._lowered:
            # JAX caches the lowered program, so the call does not lower it again.
            self._unused.update(unused_arguments(self._lower(layout, leaves)))
            keep(self._lowered, key, True)

    def _outcomes(self, layout: Layout, leaves: list[Any]) -> Buffers:
        """For each data leaf, what happens to its buffer; `None` if JAX does not say.

        The arrays may already be deleted: only their shapes, dtypes and shardings are
        read. JAX caches the program, so nothing is lowered or compiled twice.
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
                    # JAX has a trace now, although the call was refused.
                    self.inspects_every_call = True
                    raise
            found = buffers or [None] * len(layout.data_places)
            keep(self._buffers, key, found)
        return found

    def _lower(self, layout: Layout, leaves: list[Any]) -> Any:
        return lowering_warnings.lower(
            lambda: self.stage("lower", layout, abstract(leaves))
        )


class _AfterCall(NamedTuple):
    """What to do after a call that deleted these donated arrays.

    The other fields hold the indices of donated arrays.
    """

    deleted: Sequence[bool | None]
    to_delete: Sequence[int]
    to_note: Sequence[int]


class Deletion:
    """Deletes, after a call, donated arrays that JAX left alive.

    `DonatingSpecialization` and the stage `Compiled` both use it.
    """

    def __init__(self, donation: Donation, record: Record):
        self._donation = donation
        self._record = record
        self.forget()

    def forget(self) -> None:
        # By the number of the trace: what to do after a call. Most calls leave the
        # same arrays alive as the last one did.
        self._after: dict[int | None, _AfterCall] = {}

    def finish(
        self,
        layout: Layout,
        leaves: list[Any],
        number: int | None,
        outcomes: Callable[[Layout, list[Any]], Buffers],
    ) -> None:
        """After a call of the trace with this number.

        `outcomes` returns what happens to the buffer of each data leaf of a call.
        """
        donated = layout.take_donated(leaves)
        deleted = are_deleted(donated)
        after = self._after.get(number)
        if after is None or after.deleted != deleted:
            if jit_is_disabled():
                return
            to_delete = self._alive_though_aliased(layout, leaves, deleted, outcomes)
            after = _after_call(layout, donated, deleted, to_delete)
            self._after[number] = after
        for i in after.to_delete:
            donated[i].delete()
        self._record.calls.append([weakref.ref(donated[i]) for i in after.to_note])

    def _alive_though_aliased(
        self,
        layout: Layout,
        leaves: list[Any],
        deleted: Sequence[bool | None],
        outcomes: Callable[[Layout, list[Any]], Buffers],
    ) -> list[int]:
        """The donated arrays to delete: JAX copied them because NumPy reads their memory.

        Those that were donated by name are deleted even if no output could reuse them.
        """
        alive = [i for i, is_deleted in enumerate(deleted) if is_deleted is False]
        if not alive or self._donation.names is not None:
            return alive
        found = layout.donated_of_data(outcomes(layout, leaves))
        return [i for i in alive if isinstance(found[i], int)]


def _after_call(
    layout: Layout,
    donated: Sequence[Any],
    deleted: Sequence[bool | None],
    to_delete: list[int],
) -> _AfterCall:
    all_deleted = [
        i for i, is_deleted in enumerate(deleted) if is_deleted or i in to_delete
    ]
    # One array of each argument is noted. To note them all would cost every call.
    to_note: dict[int, int] = {}
    arguments = layout.arguments_of_donated
    for i in all_deleted:
        to_note.setdefault(arguments[i], i)
    if DELETES_BUFFERS_ONLY:
        sharded = {i for i in all_deleted if len(donated[i].sharding.device_set) > 1}
        to_delete = sorted(sharded.union(to_delete))
    return _AfterCall(deleted, to_delete, [*to_note.values()])
