"""A compiled function that donates: what is inspected before and after a call.

JAX warns of an unusable donation while it lowers, and after a call it deletes the
arrays whose buffers XLA could reuse. So a call for which JAX has no trace is inspected
before it runs. After every call, those that were donated by name are deleted here if no
output could reuse them. An array whose memory NumPy holds stays alive, as with `jax.jit`.

To compare each array with those of the last call, to see whether the program was inspected
before, would cost 0.12 us for each. Instead, the function that JAX traces raises
`UnexpectedTrace` if no trace is expected. The call is then inspected, by lowering and
compiling for these arguments, and repeated with a trace expected. Arrays on several
devices are compared in each call, because JAX compiles for another layout of them without
a trace.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .._compat.arrays import stored_as
from .._compat.failures import forget_calls
from .._compat.lowered import Buffer, buffers_of, unused_arguments
from .._compat.messages import tells_of_deleted_array
from .._core.base import jit_is_disabled
from .._core.deletion import delete_array, fatal
from .._errors import DonationError, DonationWarning
from .._tree.deleted import Record
from .donation import (
    Donation,
    are_any_sharded,
    are_deleted,
    lowering_warnings,
    refuse_fatal,
    refuse_unused,
    unusable,
)
from .layout import Layout, add_bounded
from .specialization import (
    Specialization,
    UnexpectedTrace,
    expected,
    raise_explained,
    traits_of,
)

Buffers = Sequence[int | Buffer | None]
_NOT_RUN: Any = object()
_FAILED = -1  # in place of the number of a trace


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
            self._deletion.fail(layout, leaves, e)
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
            add_bounded(self._lowered, key, True)

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
            add_bounded(self._buffers, key, found)
        return found

    def _lower(self, layout: Layout, leaves: list[Any]) -> Any:
        return lowering_warnings.lower(lambda: self.stage("lower", layout, leaves))


class Deletion:
    """Completes what JAX deleted in a call, and notes which function deleted it.

    `DonatingSpecialization` and the stage `Compiled` both use it.
    """

    def __init__(self, donation: Donation, record: Record):
        self._by_name = donation.names is not None
        self._record = record
        self.forget()

    def forget(self) -> None:
        # By the number of the trace: which donated arrays the last call left deleted,
        # and what to do with which of them. Most calls are like the last one.
        self._after: dict[int | None, tuple[Sequence[Any], ...]] = {}

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
        if after is None or after[0] != deleted:
            if jit_is_disabled():
                return
            sharded = {i for i, x in enumerate(donated) if are_any_sharded([x])}
            alive = [i for i, is_deleted in enumerate(deleted) if is_deleted is False]
            found: Sequence[Any] = ()
            if alive and (self._by_name or not sharded.isdisjoint(alive)):
                found = layout.donated_of_data(outcomes(layout, leaves))
            # NumPy holds the memory of these. If they are on several devices, JAX may
            # have deleted a part of each.
            held = {i for i in alive if found and isinstance(found[i], int)}
            others = [i for i in alive if i not in held and self._by_name]
            useless = [i for i in others if found[i] is not Buffer.NOT_DONATED]
            in_part = [i for i in sharded if i in held]
            if sharded:
                fatal.add()
            # One array of each argument is noted: to note them all would cost every call.
            gone = {i for i, is_deleted in enumerate(deleted) if is_deleted}
            gone.update(useless, in_part)
            arguments = layout.arguments_of_donated
            to_note = {arguments[i]: i for i in sorted(gone, reverse=True)}
            after = self._after[number] = deleted, useless, in_part, [*to_note.values()]
        _, useless, in_part, to_note = after
        for i in useless:
            delete_array(donated[i])
        if in_part:
            fatal.add([donated[i] for i in in_part])
        self._record.calls.append([weakref.ref(donated[i]) for i in to_note])

    def fail(self, layout: Layout, leaves: list[Any], error: BaseException) -> None:
        """After a call that raised `error`, unless an earlier call deleted the arrays."""
        is_late = not isinstance(error, DonationError | UnexpectedTrace)
        if is_late and not tells_of_deleted_array(error):
            kept = [Buffer.NOT_DONATED] * len(leaves)
            self.finish(layout, leaves, _FAILED, lambda *_: kept)
