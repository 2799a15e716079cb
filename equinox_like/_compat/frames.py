"""The user's lines in the function that is being traced.

Serves jax 0.10 to 0.12. JAX keeps what it has traced, and a function within another one may
have been traced for an earlier call of somebody else. So only the frames of the innermost
one are sure to belong to a value. It begins below the last frame of
`jax/_src/interpreters/partial_eval.py`, which makes all programs. Should that file be gone
there are no frames.
"""

import os
import sys

import jax

Frame = tuple[str, int, str]

_JAX = os.path.dirname(jax.__file__) + os.sep
_JAXTYPING = os.path.join(os.sep, "jaxtyping", "")
_TRACER = os.path.join(_JAX, "_src", "interpreters", "partial_eval.py")


def traced_frames(passed_over: tuple[str, ...]) -> tuple[Frame, ...]:
    """File, line and function, outermost first, without JAX's and those passed over."""
    found: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        if filename == _TRACER:
            return tuple(reversed(found))
        if not (
            filename.startswith((_JAX, "<@beartype", *passed_over))
            or _JAXTYPING in filename
        ):
            found.append((filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return ()
