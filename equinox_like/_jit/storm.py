"""`RetraceWarning`: a function that is compiled again for each value of one argument."""

import threading

from .._core.difference import Difference
from .._environment import WARNS_OF_RETRACES
from .retrace import Retrace

# How many of the latest traces are searched for the most similar one. The others would
# cost time at each trace.
SEARCHED = 16
# The most places that are counted for one function.
_COUNTED = 256


class Storm:
    """Counts the values that caused retraces of one function, by their places.

    Holds texts and hashes only, no values, and nothing after the warning.
    """

    def __init__(self) -> None:
        self.is_watched = WARNS_OF_RETRACES
        # Parameters that `bucketed` pads: each shape of them is compiled once.
        self.padded: set[str] = set()
        self._values: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def warning(self, retrace: Retrace) -> str | None:
        """The text of the warning, if this retrace causes it."""
        differences = retrace.differences if self.is_watched else []
        if not all(difference.limit for difference in differences):
            return (
                None  # another use of the function, such as with another class of layer
            )
        with self._lock:
            for difference in differences:
                number = self._count(difference)
                if number and number == difference.limit:
                    self.is_watched = False
                    self._values.clear()
                    return _text(retrace, difference, number)
        return None

    def _count(self, difference: Difference) -> int:
        """How many values this place has had."""
        place = difference.path
        full = len(self._values) >= _COUNTED and place not in self._values
        is_padded = place.partition("[")[0].partition(".")[0] in self.padded
        if not difference.limit or full or is_padded:
            return 0
        values = self._values.setdefault(place, set())
        is_shown = difference.before != difference.after
        # What looks the same may be a new object each time.
        values.add(hash(difference.after) if is_shown else len(values))
        return len(values)


def _text(retrace: Retrace, cause: Difference, number: int) -> str:
    rest = [d for d in retrace.differences if d is not cause]
    return (
        f"{Retrace(retrace.function, [cause, *rest])} This is one of {number} traces for "
        f"another `{cause.path}`, and each of them is compiled. "
        "`EQX_RETRACE_WARNING=off`, or a filter for `equinox_like.RetraceWarning`, "
        "switches this warning off."
    )
