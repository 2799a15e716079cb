"""The kinds of loops: `"lax"`, `"bounded"` and `"checkpointed"`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from .bounded import run_bounded
from .checkpointed import run_checkpointed
from .plain import run_plain
from .schedule import MOST_STEPS, check_checkpoints, number_of_checkpoints
from .staging import Loop

LoopKind = Literal["lax", "bounded", "checkpointed"]


def runner(
    loop: str, kind: str, max_steps: int | None, checkpoints: int | None, base: int = 16
) -> Callable[[Loop], Sequence[Any]]:
    """A function that runs a loop of this kind, and returns its last state.

    **Raises:**

    `ValueError`, naming the `loop`, if an option is invalid or missing.
    """
    if max_steps is not None and not 0 <= max_steps <= MOST_STEPS:
        raise ValueError(
            f"`{loop}`: `max_steps` must be between 0 and {MOST_STEPS}, or `None` for "
            f"no limit; got {max_steps}."
        )
    checkpoints = check_checkpoints(loop, checkpoints)
    if kind == "lax":
        return lambda loop: run_plain(loop.step, loop.consts, loop.state, max_steps)
    if kind == "bounded":
        if max_steps is None:
            raise ValueError(f'`{loop}` with `kind="bounded"` needs `max_steps`.')
        if not isinstance(base, int) or base < 2:
            raise ValueError(
                f"`{loop}`: `base` must be an integer, at least 2; got {base!r}."
            )
        return lambda loop: run_bounded(loop, max_steps, base)
    if kind == "checkpointed":
        if max_steps is not None:
            checkpoints = number_of_checkpoints(max_steps, checkpoints)
        if checkpoints is None:
            raise ValueError(
                f'`{loop}` with `kind="checkpointed"` needs `max_steps` or `checkpoints`.'
            )
        return lambda loop: run_checkpointed(loop, max_steps, checkpoints)
    raise ValueError(
        f'`{loop}`: `kind` must be "lax", "bounded" or "checkpointed"; got {kind!r}.'
    )
