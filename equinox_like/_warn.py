"""`warn`: warnings that point to the user's line, from any depth of the library."""

import os
import sys
import warnings

# The folder of the library as frames name it. PyInstaller and the like compile without
# the path that `__file__` has.
FOLDER = os.path.join(os.path.dirname(sys._getframe().f_code.co_filename), "")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn` with the line that called into the library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def is_internal(filename: str) -> bool:
    # Runtime type checkers add their own frames around the library's functions. JAX calls
    # the library when it transforms a compiled function.
    parts = "/jaxtyping/", "/jax/_src/"
    return filename.startswith((FOLDER, "<@beartype")) or any(
        p in filename for p in parts
    )
