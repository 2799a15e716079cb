"""`while_loop` of `equinox_like.internal`, with buffers, for other libraries."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp

from .._core.base import frames_hidden, name_of, require_callable
from .flat_carry import FlatCarry, arrays_of
from .kinds import LoopKind, runner
from .staging import show_step_as, stage

_C = TypeVar("_C")


@frames_hidden
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: _C,
    *,
    max_steps: int | None = None,
    buffers: Callable[[_C], Any] | None = None,
    kind: LoopKind,
    checkpoints: int | None = None,
    base: int = 16,
) -> _C:
    """`jax.lax.while_loop`, differentiable in reverse mode, and with buffers.

    [`equinox_like.filter_while_loop`][] has no buffers, and takes any pytree.

    **Arguments:**

    - `cond_fun`: from the carry to a bool or a boolean scalar: whether to do another step.
        It is not differentiated.
    - `body_fun`: a function from the carry to the next carry: one step.
    - `init_val`: the initial carry: any pytree of arrays and numbers. Numbers become
        arrays.
    - `max_steps`: the maximum number of steps: an `int`, or `None` for no limit.
    - `buffers`: a function from the carry to a node of it, or a sequence of nodes, whose
        arrays become buffers in `cond_fun` and `body_fun`. A buffer has only
        `buf[index]`, `shape`, `dtype`, `size` and
        `buf.at[index].set(value, *, pred=True, **kwargs)`. Each element may be written at
        most once, and read only after that; otherwise gradients may be wrong.
    - `kind`: one of
        - `"lax"`: as JAX does it: differentiable in forward mode.
        - `"checkpointed"`: differentiable in reverse mode, with a few checkpoints. Needs
            `max_steps` or `checkpoints`.
        - `"bounded"`: differentiable in both modes, to any order. Needs `max_steps`;
            memory and time grow with it.
    - `checkpoints`: for the kind `"checkpointed"`, the number of steps whose carry, except
        for its buffers, is saved for the backward pass. By default the smallest `c` for
        which `(c + 1)(c + 2) > 2 * max_steps`, with which no step is run more than twice.
        Other kinds ignore it.
    - `base`: for the kind `"bounded"`, the number of steps of each scan. Other kinds ignore
        it.

    **Returns:**

    The last carry. [Loops](../loops.md) describes the cost of each kind.

    **Raises:**

    `ValueError` for options that do not fit, and if a step returns another structure;
    `TypeError` if the carry holds anything but arrays and numbers, and if `cond_fun`
    does not return a boolean scalar.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        def trajectory(x0):
            def body(carry):
                i, x, xs = carry
                return i + 1, 0.5 * x, xs.at[i].set(x)

            _, _, xs = eqxi.while_loop(
                lambda carry: carry[0] < 3,
                body,
                (0, x0, jnp.zeros(3)),
                kind="checkpointed",
                max_steps=3,
                buffers=lambda carry: carry[2],
            )
            return xs

        assert trajectory(jnp.asarray(4.0)).tolist() == [4, 2, 1]
        assert jax.grad(lambda x: trajectory(x).sum())(4.0) == 1.75
        ```
    """
    require_callable(cond_fun, "while_loop", "cond_fun")
    require_callable(body_fun, "while_loop", "body_fun")
    if max_steps is not None and type(max_steps) is not int:
        raise ValueError(
            f"`while_loop`: `max_steps` must be an `int` or `None`; got {max_steps!r}."
        )
    if buffers is not None:
        require_callable(buffers, "while_loop", "buffers")
    where = f"`while_loop` of `{name_of(body_fun)}`"
    run = runner("while_loop", kind, max_steps, checkpoints, base)
    init_val = arrays_of(init_val, "init_val")
    carry = FlatCarry(init_val, buffers, where)
    if max_steps == 0:
        return init_val

    def cond(data):
        return cond_fun(carry.fill(jnp.asarray(True), data))

    def body(pred, data):
        return carry.flatten(body_fun(carry.fill(pred, data)))

    show_step_as(cond, cond_fun, body, body_fun, init_val)
    loop = stage(cond, body, carry.data, carry.is_buffer)
    return carry.refill(loop.complete(run(loop)))
