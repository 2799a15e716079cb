"""`scan` and `scan_trick` of `equinox_like.internal`, for other libraries."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._core.base import frames_hidden, name_of, require_callable
from .._core.flat_call import pair_of
from .._transforms.arguments import show_as_call
from .branch import filter_switch
from .checkpointed_scan import checkpointed_scan, output_types
from .flat_carry import FlatCarry, arrays_of
from .scan import check_lengths, filter_scan
from .schedule import check_checkpoints

_C = TypeVar("_C")


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
        raise ValueError(
            f'`scan`: `kind` must be "lax" or "checkpointed"; got {kind!r}.'
        )
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
    carry = FlatCarry(init, buffers, where)
    rows, in_tree = jtu.tree_flatten(xs)
    out_tree: Any = None

    @functools.wraps(step)
    def flat(pred, data, row):
        nonlocal out_tree
        new, y = step(carry.fill(pred, data), in_tree.unflatten(row))
        leaves, out_tree = jtu.tree_flatten(y)
        return carry.flatten(new), leaves

    wanted = steps if checkpoints == "all" else check_checkpoints("scan", checkpoints)
    types = output_types(flat, carry.data, rows)
    data, ys = checkpointed_scan(
        flat, carry.data, carry.is_buffer, rows, types, steps, wanted
    )
    return carry.refill(data), out_tree.unflatten(ys)


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
