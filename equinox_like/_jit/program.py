"""All compiled functions of one callable with one set of options: the hot path of a call.

A call flattens its arguments in C++ (`_tree/cached.py`). It looks up the layout for
their structure (`layout.py`), then the specialization for their static leaves
(`specialization.py`, `donating.py`). The specialization calls the `jax.jit`-ed
function.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .._compat.trace_state import at_top_level
from .._tree.deleted import Record
from .._tree.registry import registry
from .._tree.splitting import Skeleton
from .binding import Call
from .donating import DonatingSpecialization
from .donation import Donate, Donation
from .layout import Layout, LayoutTable, keep
from .retrace import Trace
from .shardings import OPTIONS, Shardings
from .specialization import Specialization
from .storm import Storm

flatten = registry.flatten


class Settings(NamedTuple):
    """What `filter_jit` was given for a callable."""

    name: str  # of the callable, for messages
    signature: inspect.Signature
    donate: Donate
    jitkwargs: dict[str, Any]
    shardings: Shardings | None


class Program:
    """The layouts and specializations of a callable.

    A callable that is not a pytree is opaque: `opaque()` returns it, from a weak
    reference if possible. A callable pytree is part of each call instead, and
    `opaque()` is `None`.
    """

    def __init__(
        self,
        opaque: Callable[[], Any],
        settings: Settings,
        without_donation: Callable[[], "Program"],
    ):
        """`without_donation()` is the same program with `donate="none"`."""
        self.opaque = opaque
        self.name, signature, donate, self.jitkwargs, self.shardings = settings
        self.donate: Donate = donate
        self.options = {k: v for k, v in self.jitkwargs.items() if k not in OPTIONS}
        self.donation = Donation(donate)
        self.record = Record(self.name)
        self.layouts = LayoutTable(signature, self.name, self.donation.donates)
        self._forms = self.layouts.forms
        self._specializations: dict[Skeleton, Specialization] = {}
        self._lock = threading.RLock()
        self._donates = self.donation.is_any
        self.storm = Storm()
        self._without_donation = without_donation

    def call(self, call: Call) -> Any:
        """Calls the function with these arguments."""
        if self._donates and not at_top_level():
            # JAX would donate under a transformation, too, where a caller may still
            # need the arrays.
            return self.without_donation.call(call)
        # `LayoutTable.fit`, inlined for speed.
        leaves, structure = flatten(call)
        form = self._forms.get(structure)
        layout = form and form.layouts.get(tuple(map(type, form.take_unknown(leaves))))
        if layout is None:
            layout, leaves = self.layouts.add(call)
        specialization = layout.only
        if specialization is None:  # static leaves select it
            specialization = layout.find(leaves) or self.find(layout, leaves, call)
        return specialization.run(layout, leaves)

    def find(self, layout: Layout, leaves: list[Any], call: Call) -> Specialization:
        """The compiled function for the structure and static leaves of a call."""
        skeleton = layout.skeleton(leaves)
        # Concurrent first calls share one function, so that it is compiled once.
        with self._lock:
            found = self._specializations.get(skeleton)
            if found is None:
                kind = DonatingSpecialization if layout.donates else Specialization
                fun = self.opaque() if call[0] is None else call[0]
                found = kind(self, fun, layout, skeleton)
                self._forget(keep(self._specializations, skeleton, found))
        layout.keep(leaves, found)
        return found

    def clear(self, structure: Any) -> None:
        """Drops all specializations and layouts for callables of this structure."""
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

    def __repr__(self) -> str:  # shown in errors about mismatched static fields
        return f"<program of {self.name}, donate={self.donate!r}>"

    @functools.cached_property
    def without_donation(self) -> "Program":
        return self._without_donation()

    def traces(self) -> list[Trace]:
        specializations = list(self._specializations.values())
        return [t for s in specializations for t in list(s.traces)]
