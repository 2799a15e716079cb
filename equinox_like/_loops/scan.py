"""`filter_scan`, `filter_map`, and `scan` of `internal`: loops over arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._call_path import call_rebuilt
from .._compat.arrays import weakly_typed
from .._core.base import frames_hidden, name_of, require_callable
from .._core.flat_call import pack, pair_of, take_apart, unpack
from .._transforms.arguments import show_as_call
from .._transforms.checkpoint import checkpointed_step, require_policy
from .._tree.filters import is_array
from .._tree.nodes import path_str
from .._tree.require import integer_or_none, require_integer
from .branch import filter_switch
from .carry import BufferCarry, Carry, Place, arrays_of, read, with_carry, write
from .checkpointed import number_of_checkpoints, run_checkpointed
from .eager import as_python, run_cached
from .loop import wrong_kind
from .staging import as_after_a_step, stage

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
    steps = integer_or_none(length, "filter_scan", "length", least=0)
    reverse, unroll, checkpoint = map(as_python, (reverse, unroll, checkpoint))
    if not isinstance(unroll, bool):
        unroll = require_integer(unroll, "filter_scan", "unroll", least=1)
    return run_cached(_filter_scan, [f], init, xs, steps, reverse, unroll, checkpoint)


def _filter_scan(functions, init, xs, length, reverse, unroll, checkpoint) -> Any:
    (f,) = functions
    data, template = take_apart(xs)
    steps = check_lengths(f"`filter_scan` of `{name_of(f)}`", xs, length)
    checkpoints = _number_of_checkpoints(checkpoint, steps, unroll)

    def run(carry: Carry) -> Any:
        def flat(before, x, pred=None):
            out = call_rebuilt(f, carry.fill(before), template.fill(x))
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
    return require_integer(checkpoint, "filter_scan", "checkpoint", 1)


def _by_checkpoints(
    flat: Any,
    carry: Carry | BufferCarry,
    xs: Any,
    length: int,
    checkpoints: int | None,
    reverse: bool = False,
) -> Any:
    """The last carry, and the outputs of each step along axis 0; `None` if a number has
    changed.

    **Arguments:**

    - `flat(data, x, pred)`: returns the arrays of the next carry and a `y`, given those
        of a carry and an `x`; `pred` is as in `stage`.
    - `xs`: a list of arrays.
    - `length`: the number of steps, at least 1.
    - `checkpoints`: as for `while_loop`.
    """
    out_tree: Any = None

    @functools.wraps(flat)  # so that JAX's messages name what `flat` is shown as
    def step(pred, before, x):
        nonlocal out_tree
        after, y = flat(before, x, pred)
        leaves, out_tree = jtu.tree_flatten(y)
        return before if after is None else after, leaves

    xs = list(map(jnp.asarray, xs))
    types = _output_types(step, carry.data, xs)
    if carry.numbers_change:
        return None
    ys = [_zeros(length, y) for y in types]
    first_x = 1 + len(carry.data)
    first_y = first_x + len(xs)

    def body(pred, state):
        i, *data = state[:first_x]
        place, index = Place.of((length - 1 - i) if reverse else i, {})
        pairs = [read(x, place, index) for x in state[first_x:first_y]]
        data, y = step(pred, data, [row for row, _ in pairs])
        written = [
            write(pred, whole, row, place, index)
            for whole, row in zip(state[first_y:], y, strict=True)
        ]
        return [i + 1, *data, *(x for _, x in pairs), *written]

    flags = [False, *carry.is_buffer, *([True] * (len(xs) + len(ys)))]
    start = [np.int32(0), *carry.data, *xs, *ys]
    loop = stage(lambda state: True, body, start, flags)
    number = number_of_checkpoints(length, checkpoints)
    out = loop.complete(run_checkpointed(loop, length, number))
    return carry.whole(out[1:first_x]), unpack(out_tree.unflatten(out[first_y:]))


def _output_types(step: Any, data: Sequence[Any], xs: Sequence[Any]) -> Sequence[Any]:
    """The shapes and dtypes of the `y` of one step; see `_by_checkpoints`."""

    @functools.wraps(step)
    def types(data, xs):
        return step(jnp.asarray(True), data, [x[0] for x in xs])

    data = list(map(jnp.asarray, data))
    while True:
        after, y = jax.eval_shape(types, data, xs)
        changed = as_after_a_step(data, after, keeps_weak=True)  # as in a plain scan
        if changed is None:
            return y
        data = changed


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
    size = integer_or_none(batch_size, "filter_map", "batch_size", least=1)
    return run_cached(_filter_map, [f], xs, size)


def _filter_map(functions: Sequence[Any], xs: Any, batch_size: int | None) -> Any:
    (f,) = functions
    data, template = take_apart(xs)
    where = f"`filter_map` of `{name_of(f)}`"
    if not data:
        raise ValueError(
            f"{where}: there is no array in `xs` to iterate over. {_CONVERT}"
        )
    check_lengths(where, xs, None)

    def flat(x):
        return pack(call_rebuilt(f, template.fill(x)))

    return unpack(jax.lax.map(flat, data, batch_size=batch_size))


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


@frames_hidden
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: _C,
    xs: Any,
    length: int | None = None,
    *,
    buffers: Callable[[_C], Any] | None = None,
    kind: Literal["lax", "checkpointed"] | str,
    checkpoints: int | Literal["all"] | None = None,
) -> tuple[_C, Any]:
    """`jax.lax.scan`, whose backward pass needs only a few checkpoints.

    [`equinox_like.filter_scan`][] has no buffers, and takes any pytrees.

    **Arguments:**

    - `f`, `init`, `xs`, `length`: as for `jax.lax.scan`.
    - `buffers`: as for [`equinox_like.internal.while_loop`][].
    - `kind`: `"lax"`, which is `jax.lax.scan` and ignores `buffers` and `checkpoints`, or
        `"checkpointed"`, which has a derivative in reverse mode only.
    - `checkpoints`: the number of steps whose carry is saved for the backward pass, or
        `"all"`. By default as for `while_loop`.

    **Returns:**

    The last carry, and the `y` of all steps, stacked along axis 0.

    **Raises:**

    `ValueError` for options that do not fit, if lengths differ, and if a step returns
    another structure; for the kind `"lax"` the latter is a `TypeError` of JAX.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        def last(x):
            step = lambda c, x: (jnp.sin(c) * x, c)
            return eqxi.scan(step, x, jnp.ones(100), kind="checkpointed", checkpoints=5)[0]

        plain = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, length=100)[0]
        assert jnp.allclose(jax.grad(last)(1.0), jax.grad(plain)(1.0))
        ```
    """
    if kind not in ("lax", "checkpointed"):
        raise wrong_kind("scan", kind, "lax", "checkpointed")
    require_callable(f, "scan", "f")
    if buffers is not None:
        require_callable(buffers, "scan", "buffers")
    where = f"`scan` of `{name_of(f)}`"
    init, xs = arrays_of(init, "init"), arrays_of(xs, "xs")
    steps = check_lengths(where, xs, length)

    def step(carry, x):
        new, y = pair_of(f(carry, x), f"`scan`: `{name_of(f)}`", "(carry, y)")
        return new, arrays_of(y, "y")

    show_as_call(step, f, (init, xs))
    if kind == "lax" or steps == 0:
        return lax.scan(step, init, xs, length)
    carry = BufferCarry(init, buffers, where)
    rows, in_tree = jtu.tree_flatten(xs)

    @functools.wraps(step)
    def flat(before, row, pred):
        new, y = step(carry.fill(before, pred), in_tree.unflatten(row))
        return carry.step(before, new), y

    wanted = steps if checkpoints == "all" else checkpoints
    wanted = integer_or_none(wanted, "scan", "checkpoints", 1)
    return _by_checkpoints(flat, carry, rows, steps, wanted)


def scan_trick(
    fn: Callable[[_C], _C], intermediates: Sequence[Callable[[_C], _C]], init: _C
) -> _C:
    """Calls `fn`, `intermediates[0]`, `fn`, `intermediates[1]`, ..., and finally `fn`.

    `fn` is traced once, and so compiled once, as the step of a scan.

    **Arguments:**

    - `fn`, `intermediates`: functions from a carry to a carry of the same structure.
    - `init`: the initial carry.

    **Returns:**

    The last carry.

    !!! example

        ```python
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        double = lambda x: 2 * x
        steps = [lambda x: x + 1, lambda x: x + 10]
        assert eqxi.scan_trick(double, steps, jnp.asarray(1)) == 32
        ```
    """
    branches = [*intermediates, lambda carry: carry]

    def step(carry, i):
        return filter_switch(i, branches, fn(carry)), None

    return filter_scan(step, init, jnp.arange(len(branches)))[0]


def _zeros(length: int, y: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros for the outputs of all steps, split over the explicit axes that one is, and
    of a weak dtype if that of one is weak."""
    sharding = y.sharding
    if isinstance(sharding, NamedSharding):
        is_explicit = AxisType.Explicit in sharding.mesh.axis_types
        parts = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, parts) if is_explicit else None
    zeros = jnp.zeros((length, *y.shape), y.dtype, device=sharding)
    return weakly_typed(zeros) if y.weak_type else zeros
