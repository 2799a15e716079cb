"""`filter_scan` and `filter_map`: iterate over axis 0 of the arrays of a pytree."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, SupportsIndex, TypeVar

import jax
import jax.tree_util as jtu

from .._core.base import frames_hidden, name_of, require_callable
from .._core.flat_call import pack, pair_of, take_apart, unpack
from .._transforms.arguments import show_as_call
from .._transforms.checkpoint import checkpointed_step, require_policy
from .._tree.filters import is_array
from .._tree.nodes import path_str
from .._tree.require import require_integer
from .carry import Carry, with_carry
from .checkpointed_scan import checkpointed_scan, output_types
from .eager import as_python, run_cached
from .schedule import check_checkpoints

_C = TypeVar("_C")
_X = TypeVar("_X")
_Y = TypeVar("_Y")

_CONVERT: Final = "Convert a list or a `range` with `jnp.asarray`."


@frames_hidden
def filter_scan(
    f: Callable[[_C, _X], tuple[_C, _Y]],
    init: _C,
    xs: _X = None,
    length: SupportsIndex | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    checkpoint: bool | int | Literal["all"] | Callable[..., Any] | None = None,
) -> tuple[_C, _Y]:
    """`jax.lax.scan` for any pytrees.

    **Arguments:**

    - `f`: a function `(carry, x) -> (carry, y)`.
    - `init`: the initial carry. Its arrays may change from step to step, each keeping
        its shape and dtype; everything else must stay the same. A Python number that a
        step changes is an array from the start, as in JAX.
    - `xs`: a tree of arrays, over whose axis 0 the loop runs. Everything else in it is
        the same at every step.
    - `length`, `reverse`, `unroll`: as for `jax.lax.scan`.
    - `checkpoint`: what is stored for the backward pass. Everything else is computed
        again. [Loops](../loops.md) says what it costs.
        - `None` or `False`: everything that the backward pass needs.
        - `True`: the carry of each step. One of `jax.checkpoint_policies`: also the
            values that it chooses.
        - An integer: the carries of that many steps; `"all"`: those of all steps. Then
            there is no forward mode, and no `unroll`.

    **Returns:**

    The last carry, and `y` with a new axis 0 for each of its arrays. Other values in
    `y` are returned once.

    **Raises:**

    `TypeError` if something in the carry changes that must not change, naming its path.
    `ValueError` if the arrays of `xs` differ in length or have none, and for a `length`,
    an `unroll` or a `checkpoint` other than these.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def make(key):
            return eqx.nn.Linear(2, 2, key=key)

        # Many layers, compiled as one.
        layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 8))
        x, _ = eqx.filter_scan(lambda x, layer: (layer(x), None), jnp.ones(2), layers)
        assert x.shape == (2,)
        ```
    """
    require_callable(f, "filter_scan", "f")
    steps = None
    if length is not None:
        steps = require_integer(length, "filter_scan", "length", least=0)
    reverse, unroll, checkpoint = map(as_python, (reverse, unroll, checkpoint))
    if not isinstance(unroll, bool):
        unroll = require_integer(unroll, "filter_scan", "unroll", least=1)
    if is_array(checkpoint):
        check_checkpoints("filter_scan", checkpoint, "checkpoint")
    return run_cached(_filter_scan, [f], init, xs, steps, reverse, unroll, checkpoint)


def _filter_scan(
    functions: Sequence[Any],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    unroll: int | bool,
    checkpoint: Any,
) -> Any:
    (f,) = functions
    data, rest = take_apart(xs)
    steps = check_lengths(f"`filter_scan` of `{name_of(f)}`", xs, length)
    checkpoints = _number_of_checkpoints(checkpoint, steps, unroll)

    def run(carry: Carry) -> Any:
        def flat(before, x):
            out = f(carry.fill(before), rest.fill(x))
            new, y = pair_of(out, f"`filter_scan`: `{name_of(f)}`", "(carry, y)")
            return carry.step(before, new), pack(y)

        show_as_call(flat, f, (carry.init, xs))
        if checkpoints is not None and steps > 0:
            return _by_checkpoints(flat, carry, data, steps, checkpoints, reverse)
        step = flat
        if checkpoints is None:
            step = checkpointed_step(flat, checkpoint, unroll, steps)
        last, ys = jax.lax.scan(
            step, carry.data, data, length=length, reverse=reverse, unroll=unroll
        )
        return carry.fill(last), unpack(ys)

    return with_carry("filter_scan", f, init, run)


def _number_of_checkpoints(checkpoint: Any, steps: int, unroll: Any) -> int | None:
    """The number of checkpoints, or `None` if `checkpoint` does not give one."""
    if checkpoint is None or isinstance(checkpoint, bool):
        return None
    if callable(checkpoint):
        require_policy(checkpoint, "filter_scan", "checkpoint")
        return None
    unrolls = unroll if isinstance(unroll, bool) else unroll != 1
    if unrolls:
        raise ValueError(
            "`filter_scan`: `unroll` cannot be combined with "
            f"`checkpoint={checkpoint!r}`."
        )
    if checkpoint == "all":
        return steps
    if isinstance(checkpoint, str):
        raise ValueError(
            "`filter_scan`: `checkpoint` must be `None`, a bool, an integer, 'all', or one "
            f"of `jax.checkpoint_policies`; got {checkpoint!r}."
        )
    return check_checkpoints("filter_scan", checkpoint, "checkpoint")


def _by_checkpoints(
    flat: Any, carry: Carry, xs: Any, steps: int, checkpoints: int, reverse: bool
) -> Any:
    out_tree: Any = None

    @functools.wraps(flat)  # so that JAX's messages name what `flat` is shown as
    def step(_, before, x):
        nonlocal out_tree
        after, y = flat(before, x)
        leaves, out_tree = jtu.tree_flatten(y)
        return before if after is None else after, leaves

    types = output_types(step, carry.data, xs)
    if carry.numbers_change:
        return None
    is_buffer = [False] * len(carry.data)
    last, ys = checkpointed_scan(
        step, carry.data, is_buffer, xs, types, steps, checkpoints, reverse
    )
    return carry.fill(last), unpack(out_tree.unflatten(ys))


@frames_hidden
def filter_map(f: Callable[[_X], _Y], xs: _X, *, batch_size: int | None = None) -> _Y:
    """`jax.lax.map` for any pytrees.

    **Arguments:**

    - `f`: a function of one `x`.
    - `xs`: a tree of arrays, over whose axis 0 the loop runs. Everything else in it is
        the same at every step.
    - `batch_size`: the number of steps to do at once, as by
        [`equinox_like.filter_vmap`][].

    **Returns:**

    What `f` returns, with a new axis 0 for each array. Other values are returned once.

    **Raises:**

    `ValueError` if the arrays of `xs` differ in length or have none.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        squares, name = eqx.filter_map(lambda x: (x[0] ** 2, x[1]), (jnp.arange(3), "n"))
        assert squares.tolist() == [0, 1, 4] and name == "n"
        ```
    """
    require_callable(f, "filter_map", "f")
    if batch_size is not None:
        batch_size = require_integer(batch_size, "filter_map", "batch_size", least=1)
    return run_cached(_filter_map, [f], xs, batch_size)


def _filter_map(functions: Sequence[Any], xs: Any, batch_size: int | None) -> Any:
    (f,) = functions
    data, rest = take_apart(xs)
    where = f"`filter_map` of `{name_of(f)}`"
    if not data:
        raise ValueError(
            f"{where}: there is no array in `xs` to iterate over. {_CONVERT}"
        )
    check_lengths(where, xs, None)
    return unpack(
        jax.lax.map(lambda x: pack(f(rest.fill(x))), data, batch_size=batch_size)
    )


def check_lengths(where: str, xs: Any, length: int | None) -> int:
    """The common length of `xs`; raises where JAX would, and names the paths."""
    named = [
        (path_str(path, "xs"), x)
        for path, x in jtu.tree_leaves_with_path(xs)
        if is_array(x)
    ]
    if not named and length is None:
        raise ValueError(
            f"{where}: there is no array in `xs` to iterate over, and no `length`. "
            f"{_CONVERT}"
        )
    for name, x in named:
        if x.ndim == 0:
            raise ValueError(
                f"{where}: `{name}` is a scalar, with no axis to iterate over. Pass a "
                "value that is the same at every step by a closure, or in the carry."
            )
    if len({x.shape[0] for _, x in named} | {length} - {None}) > 1:
        listing = ", ".join(f"`{name}` has {x.shape[0]}" for name, x in named)
        wanted = "" if length is None else f"; `length` is {length}"
        raise ValueError(f"{where}: the lengths differ: {listing}{wanted}.")
    return named[0][1].shape[0] if length is None else length
