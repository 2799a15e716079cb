"""`filter_while_loop`, `filter_fori_loop`, `internal.while_loop`, and the kinds of loops.

The kinds are `"lax"`, `"bounded"` and `"checkpointed"`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._call_path import call_rebuilt
from .._core.base import frames_hidden, name_of, require_callable
from .._errors import did_you_mean
from .._transforms.arguments import show_as_call
from .._tree.filters import is_array_like, is_array_or_struct
from .._tree.nodes import describe_node
from .._tree.require import integer_or_none, require_integer
from .carry import BufferCarry, Carry, arrays_of, jax_type, with_carry
from .checkpointed import MOST_STEPS, number_of_checkpoints, run_checkpointed
from .eager import as_python, run_cached
from .staging import Loop, goes_on, is_boolean_scalar, run_plain, stage

_C = TypeVar("_C")

LoopKind = Literal["lax", "bounded", "checkpointed"]


@frames_hidden
def filter_while_loop(
    cond: Callable[[_C], Any],
    body: Callable[[_C], _C],
    init: _C,
    *,
    max_steps: SupportsIndex | None = None,
    kind: LoopKind = "lax",
    checkpoints: int | None = None,
) -> _C:
    """`jax.lax.while_loop` for any pytrees, and with a derivative in reverse mode.

    **Arguments:**

    - `cond`: a function from the carry to a boolean scalar: whether to do another step.
    - `body`: a function from the carry to the next carry: one step.
    - `init`: the initial carry. Its arrays may change from step to step, each keeping
        its shape and dtype; everything else must stay the same. A Python number that a
        step changes is an array from the start, as in JAX.
    - `max_steps`: the maximum number of steps. The loop then ends even if `cond` is true.
    - `kind`: how the loop is differentiated. [Loops](../loops.md) says what each costs.
        - `"lax"`: as JAX does it, in forward mode only.
        - `"checkpointed"`: in reverse mode, with the memory of `checkpoints` copies of
            the carry. Needs `max_steps` or `checkpoints`.
        - `"bounded"`: in both modes, to any order. Needs `max_steps`; memory and time
            grow with it.
    - `checkpoints`: for the kind `"checkpointed"`, the number of steps whose carry is
        saved for the backward pass. By default the smallest `c` for which
        `(c + 1)(c + 2) > 2 * max_steps`, with which no step is done more than twice.

    **Returns:**

    The last carry. Under `jax.vmap`, gradients may be NaN if the step or its derivative is
    infinite or NaN at the last carry of an element: see [Loops](../loops.md).

    **Raises:**

    `TypeError` if something in the carry changes that must not change, naming its path.
    `ValueError` for another `kind`, or a negative `max_steps`, and if the kind lacks an
    option that it needs.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def body(state):
            return {**state, "x": state["x"] / 2}

        state = {"x": jnp.asarray(5.0), "name": "halving"}
        state = eqx.filter_while_loop(lambda state: state["x"] > 1, body, state)
        assert state["x"] == 0.625 and state["name"] == "halving"
        ```
    """
    require_callable(cond, "filter_while_loop", "cond")
    require_callable(body, "filter_while_loop", "body")
    limit = integer_or_none(max_steps, "filter_while_loop", "max_steps")
    checkpoints = integer_or_none(checkpoints, "filter_while_loop", "checkpoints", 1)
    return run_cached(_filter_while_loop, (cond, body), init, limit, kind, checkpoints)


def _filter_while_loop(functions, init, limit, kind, checkpoints) -> Any:
    cond, body = functions
    if checkpoints is not None and kind != "checkpointed":
        raise ValueError(
            '`filter_while_loop`: `checkpoints` is only for `kind="checkpointed"`; '
            f"got {kind!r}."
        )
    run_loop = runner("filter_while_loop", kind, limit, checkpoints)

    def as_jax_does(carry: Carry) -> Any:
        def flat_cond(state):
            steps, data = state
            goes_on = call_rebuilt(cond, carry.fill(data))
            _require_bool(goes_on, cond)
            return goes_on if limit is None else (steps < limit) & goes_on

        def flat_body(state):
            steps, data = state
            steps = None if limit is None else steps + 1
            return steps, carry.step(data, call_rebuilt(body, carry.fill(data)))

        steps = [] if limit is None else ["the number of steps"]
        for flat, fun in [(flat_cond, cond), (flat_body, body)]:
            show_as_call(flat, fun, (carry.init,), before=steps)
        start = None if limit is None else jnp.int32(0)
        _, last = jax.lax.while_loop(flat_cond, flat_body, (start, carry.data))
        return carry.fill(last)

    def differentiably(carry: Carry) -> Any:
        def checked(state):
            goes_on = cond(state)
            _require_bool(goes_on, cond)
            return goes_on

        return run_staged(carry, cond, checked, body, run_loop)

    run = as_jax_does if kind == "lax" else differentiably
    return with_carry("filter_while_loop", body, init, run)


def _require_bool(goes_on: Any, cond: Any) -> None:
    if not is_boolean_scalar(goes_on):
        found = jax_type(goes_on) if is_array_like(goes_on) else describe_node(goes_on)
        raise TypeError(
            f"`filter_while_loop`: the condition `{name_of(cond)}` must return a boolean "
            f"scalar; it returned {found}."
        )


@frames_hidden
def filter_fori_loop(
    lower: Any,
    upper: Any,
    body: Callable[[Any, _C], _C],
    init: _C,
    *,
    unroll: int | bool | None = None,
) -> _C:
    """`jax.lax.fori_loop` for any pytrees.

    **Arguments:**

    - `lower`, `upper`: integers: the steps are `lower`, ..., `upper - 1`. Reverse mode
        works if both are known when the loop is traced.
    - `body`: a function from the number of the step and the carry to the next carry.
    - `init`: the initial carry. Its arrays may change from step to step, each keeping
        its shape and dtype; everything else must stay the same. A Python number that a
        step changes is an array from the start, as in JAX.
    - `unroll`: as for `jax.lax.fori_loop`.

    **Returns:**

    The last carry.

    **Raises:**

    `TypeError` if something in the carry changes that must not change, naming its path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def body(i, state):
            total, name = state
            return total + i, name

        total, name = eqx.filter_fori_loop(0, 4, body, (jnp.asarray(0), "sum"))
        assert total == 6 and name == "sum"
        ```
    """
    require_callable(body, "filter_fori_loop", "body")
    for name, bound in [("lower", lower), ("upper", upper)]:
        if not is_array_like(bound) or jnp.ndim(bound):
            raise TypeError(
                f"`filter_fori_loop`: `{name}` must be an integer; got "
                f"{describe_node(bound)}."
            )
    unroll = as_python(unroll)
    if not (unroll is None or isinstance(unroll, bool)):
        unroll = require_integer(unroll, "filter_fori_loop", "unroll", least=1)
    return run_cached(_filter_fori_loop, [body], lower, upper, init, unroll)


def _filter_fori_loop(functions, lower, upper, init, unroll) -> Any:
    (body,) = functions

    def run(carry: Carry) -> Any:
        def flat(i, data):
            return carry.step(data, body(i, carry.fill(data)))

        args = jax.ShapeDtypeStruct((), jnp.int32), carry.init
        show_as_call(flat, body, args, is_data=is_array_or_struct)
        last = jax.lax.fori_loop(lower, upper, flat, carry.data, unroll=unroll)
        return carry.fill(last)

    return with_carry("filter_fori_loop", body, init, run)


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
    carry = BufferCarry(init_val, buffers, where)
    if max_steps == 0:
        return init_val

    return run_staged(carry, cond_fun, cond_fun, body_fun, run)


def run_staged(
    carry: Carry | BufferCarry,
    shown: Any,
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    run: Callable[[Loop], Sequence[Any]],
) -> Any:
    """The last carry of a loop that `run` runs. `shown` is the user's condition."""

    def flat_cond(data):
        return cond(carry.fill(data, jnp.asarray(True)))

    def flat_body(pred, data):
        after = carry.step(data, call_rebuilt(body, carry.fill(data, pred)))
        return data if after is None else after

    # JAX's messages name the user's functions and the leaves of the carry.
    show_as_call(flat_cond, shown, (carry.init,))
    state = ["whether the loop continues"]
    show_as_call(flat_body, body, (carry.init,), before=state)
    loop = stage(flat_cond, flat_body, carry.data, carry.is_buffer)
    return None if carry.numbers_change else carry.whole(loop.complete(run(loop)))


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
    checkpoints = integer_or_none(checkpoints, loop, "checkpoints", 1)
    if kind == "lax":
        return lambda loop: run_plain(loop.step, loop.consts, loop.state, max_steps)
    if kind == "bounded":
        if max_steps is None:
            raise ValueError(f'`{loop}` with `kind="bounded"` needs `max_steps`.')
        base = require_integer(base, loop, "base", 2)
        return lambda loop: run_bounded(loop, max_steps, base)
    if kind == "checkpointed":
        if max_steps is not None:
            checkpoints = number_of_checkpoints(max_steps, checkpoints)
        if checkpoints is None:
            raise ValueError(
                f'`{loop}` with `kind="checkpointed"` needs `max_steps` or `checkpoints`.'
            )
        return lambda loop: run_checkpointed(loop, max_steps, checkpoints)
    raise wrong_kind(loop, kind, "lax", "bounded", "checkpointed")


def run_bounded(loop: Loop, max_steps: int, base: int) -> list[Any]:
    """Runs the loop, and returns the last state.

    It is a scan of `base` steps, or of `base` such scans, and so on until `max_steps`
    are reached. For an inner scan only its input is saved. Steps and scans that come
    after the loop has ended are skipped.
    """

    def is_on(counted):
        count, state = counted
        return (count < max_steps) & goes_on(state)

    def step(counted):
        count, state = counted
        return count + 1, loop.step(loop.consts, state)

    run, size = _repeated(step, is_on, base), base
    while size < max_steps:
        run = _repeated(jax.checkpoint(run, prevent_cse=False), is_on, base)
        size *= base
    return run((np.int32(0), loop.state))[1]


def _repeated(
    inner: Callable[[Any], Any], is_on: Callable[[Any], Any], base: int
) -> Callable[[Any], Any]:
    def one(counted, _):
        return lax.cond(is_on(counted), inner, lambda same: same, counted), None

    return lambda counted: lax.scan(one, counted, length=base)[0]


def wrong_kind(loop: str, kind: Any, *kinds: str) -> ValueError:
    *others, last = (f'"{each}"' for each in kinds)
    return ValueError(
        f"`{loop}`: `kind` must be {', '.join(others)} or {last}; got {kind!r}."
        + did_you_mean(kind, kinds, '"{}"')
    )
