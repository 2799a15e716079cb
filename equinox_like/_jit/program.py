"""All compiled functions of one callable with one set of options: the hot path of a call.

A call flattens its arguments in C++ (`_tree/cached.py`), looks up the layout for their
structure (`layout.py`), and the specialization for their static leaves, which calls JAX
(`specialization.py`, `donating.py`).
"""

import inspect
import threading
from collections.abc import Callable
from typing import Any

from .._compat.trace_state import at_top_level
from .._tree.registry import registry
from .._tree.splitting import Skeleton
from .donating import DonatingSpecialization
from .donation import Donate, Donation, records
from .layout import Call, Layout, LayoutTable, keep
from .retrace import Trace
from .shardings import OPTIONS, Shardings
from .specialization import Specialization

flatten = registry.flatten


class Program:
    """The layouts and specializations of a callable.

    An opaque callable is held weakly. For a callable pytree `opaque` returns `None`: it is
    part of each call.
    """

    def __init__(
        self,
        name: str,
        opaque: Callable[[], Any],
        signature: inspect.Signature,
        donate: Donate,
        jitkwargs: dict[str, Any],
        shardings: Shardings | None,
        without_donation: Callable[[], "Program"],
    ):
        """`without_donation()` is the same program with `donate="none"`."""
        self.name = name
        self.opaque = opaque
        self.donate: Donate = donate
        self.jitkwargs = jitkwargs
        self.shardings = shardings
        self.options = {k: v for k, v in jitkwargs.items() if k not in OPTIONS}
        self.donation = Donation(donate)
        self.record = records.new(name)
        self.layouts = LayoutTable(signature, name, self.donation.donates)
        self._forms = self.layouts.forms
        self._specializations: dict[Skeleton, Specialization] = {}
        self._lock = threading.RLock()
        self._donates = self.donation.is_any
        self._without_donation = without_donation

    def call(self, call: Call) -> Any:
        """Calls the function with these arguments."""
        if self._donates and not at_top_level():
            # JAX would donate there too, though the caller may still need the arrays.
            return self.without_donation.call(call)
        # As `LayoutTable.fit`, without a step in between.
        leaves, structure = flatten(call)
        form = self._forms.get(structure)
        layout = form and form.layouts.get(tuple(map(type, form.take_open(leaves))))
        if layout is None:
            layout, leaves = self.layouts.add(call)
        specialization = layout.only
        if specialization is None:  # a static leaf decides
            specialization, layout, leaves = self.specialize(layout, leaves, call)
        return specialization.run(layout, leaves)

    def specialize(
        self, layout: Layout, leaves: list[Any], call: Call
    ) -> tuple[Specialization, Layout, list[Any]]:
        """The compiled function for the static leaves of a call; and how to call it."""
        if layout.is_outdated(leaves):
            layout, leaves = self.layouts.add(call)
        found = layout.find(leaves)
        if found is None:
            found = self.find(layout, leaves, call)
            layout.keep(leaves, found)
        return found, layout, leaves

    def find(self, layout: Layout, leaves: list[Any], call: Call) -> Specialization:
        """The compiled function for the static side of a call."""
        skeleton = layout.skeleton(leaves)
        # Threads that come first together share one function, and so one compilation.
        with self._lock:
            found = self._specializations.get(skeleton)
            if found is None:
                kind = DonatingSpecialization if layout.donates else Specialization
                fun = self.opaque() if call[0] is None else call[0]
                found = kind(self, fun, layout, skeleton)
                self._forget(keep(self._specializations, skeleton, found))
        return found

    def clear(self, structure: Any) -> None:
        """Forgets all that is kept for callables of this structure."""
        with self._lock:
            keys = [
                skeleton
                for skeleton in self._specializations
                if skeleton.treedef.children()[0] == structure
            ]
            self._forget([self._specializations.pop(key) for key in keys])
            self.layouts.clear(structure)

    def _forget(self, specializations: list[Specialization]) -> None:
        for specialization in specializations:
            self.layouts.forget(specialization)
            specialization.function.clear_cache()

    def __repr__(self) -> str:  # a mismatch of static fields prints it
        return f"<program of {self.name}, donate={self.donate!r}>"

    @property
    def without_donation(self) -> "Program":
        return self._without_donation()

    def traces(self) -> list[Trace]:
        specializations = list(self._specializations.values())
        return [t for s in specializations for t in list(s.traces)]
