"""`warn`: warnings that point to the user's line, from any depth of the library."""

import sys
import warnings
from pathlib import Path

_OURS = str(Path(__file__).parent)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn` with the line that called into the library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_passed_over(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def _is_passed_over(filename: str) -> bool:
    # Runtime type checkers add their own frames around the library's functions.
    return filename.startswith((_OURS, "<@beartype")) or "/jaxtyping/" in filename
