"""Runs recurrent cells over a sequence: `scan_cell`, and `scanned` for `RNN`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from ..._call_path import call_part
from ..._errors import ShapeError
from ..._tree import is_array
from ..._tree.arrays import is_typed_key, is_weak
from ..._tree.nodes import describe_node
from .._base.arguments import check_layer, taker_name, wrong_type
from .._base.inputs import described, jax_array
from .._base.precision import cast_to_precision, is_half
from .._base.sharding import explicit_mesh, parts, varying_as


def scan_cell(
    cell: Callable[..., Any],
    xs: Any,
    init: Any = None,
    *,
    reverse: bool = False,
    mask: Bool[Array, " length"] | None = None,
) -> tuple[Any, Any]:
    """Runs a recurrent cell over a sequence.

    **Arguments:**

    - `cell`: called as `cell(x, state)`, and returns the next state. An
        [`equinox_like.nn.LSTMCell`][], an [`equinox_like.nn.GRUCell`][] or your own.
    - `xs`: an array, or a pytree of arrays, whose first axis is that of the sequence.
    - `init`: the first state; by default `cell.init_state()`. It is cast to the dtypes in
        which the cell returns it.
    - `reverse`: if `True`, start at the end. The outputs are in the order of the inputs.
    - `mask`: shape `(length,)`; where it is `False` the state does not change, so that
        sequences of several lengths can be padded to one.

    **Returns:**

    The pair of all outputs, stacked, and the last state. The output of a step is its state,
    or the first part of it if the state is a tuple.

    **Raises:**

    [`equinox_like.ShapeError`][] if the cell returns another structure or other shapes than
    those of `init`, if `mask` has another shape, or if `xs` holds anything but arrays.
    `TypeError` if `mask` is not an array, `cell` cannot be called, or has no `init_state`
    where `init` is not given.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        cell = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))
        outputs, (h, c) = eqx.nn.scan_cell(cell, jnp.ones((10, 3)))
        assert outputs.shape == (10, 4) and (outputs[-1] == h).all()
        ```
    """
    check_layer("`scan_cell`", "cell", cell)
    xs, length = as_sequence("`scan_cell`", xs)
    init = varying_as((cell, xs), _first_state(cell, xs, cast_to_precision(init)))
    if mask is not None:
        if not is_array(mask):
            fix = " Pass `jnp.asarray(mask)`."
            raise wrong_type("`scan_cell`", "an array", "mask", mask, fix)
        if mask.shape != (length,):
            raise ShapeError(
                f"`scan_cell` takes a `mask` of shape ({length},), one entry for each "
                f"element of the sequence, but was given shape {mask.shape}."
            )
        xs = _without_padding(xs, mask)

    wide, narrow = _widened(cell)

    def step(state, inputs):
        x, is_there = inputs
        new = _called(cell, narrow(wide), x, state)
        if is_there is not None:
            new = _where(is_there, new, state)
        return new, new[0] if isinstance(new, tuple) else new

    final, outputs = jax.lax.scan(step, init, (xs, mask), reverse=reverse)
    return outputs, final


def scanned(
    cells: Sequence[Any],
    states: Sequence[Any],
    xs: Any,
    there: Array | None,
    unroll: int | bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The outputs and the last state of each cell. The first cell runs forward over the
    sequence, the second one backward. Elements where `there` is false are padding."""
    if there is not None:
        xs = _without_padding(xs, there)
    each = zip(cells, states, strict=True)
    states = tuple(_first_state(cell, xs, state) for cell, state in each)
    states = varying_as((cells, xs), states)
    inputs = [(xs, there), _flipped((xs, there))][: len(cells)]

    wide, narrow = _widened(tuple(cells))

    def step(states, inputs):
        new, outputs = [], []
        for cell, narrowed, state, (x, is_there) in zip(
            cells, narrow(wide), states, inputs, strict=True
        ):
            after = _called(cell, narrowed, x, state)
            output = after[0] if isinstance(after, tuple) else after
            if is_there is not None:
                after = _where(is_there, after, state)
                output = _where(is_there, output, jax.tree.map(jnp.zeros_like, output))
            new.append(after)
            outputs.append(output)
        return tuple(new), tuple(outputs)

    last, outputs = jax.lax.scan(step, states, inputs, unroll=unroll)
    return (outputs[0], *map(_flipped, outputs[1:])), tuple(last)


def as_sequence(taker: Any, xs: Any) -> tuple[Any, int]:
    """`xs` with JAX arrays as leaves, and the length of this sequence."""
    leaves = jax.tree.leaves(xs)
    if not leaves or not all(is_array(x) and x.ndim > 0 for x in leaves):
        raise ShapeError(
            f"{taker_name(taker)} takes an array, or a pytree of arrays, as `xs`, with "
            "the sequence along the first axis."
        )
    return jax.tree.map(jax_array, xs), leaves[0].shape[0]


def _called(cell: Any, copy: Any, x: Any, state: Any) -> Any:
    return call_part(cell, (), copy, copy, x, state)


def _widened(cells: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`cells` with half-precision arrays in float32, and the function that undoes it.

    The gradient of a weight is a sum over all steps, which a scan computes in the dtype
    that the weight has outside of it.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, cells)
    narrow = functools.partial(
        jax.tree.map, lambda old, x: x.astype(old.dtype) if is_half(old) else x, cells
    )
    return wide, narrow


def _first_state(cell: Any, xs: Any, init: Any) -> Any:
    """`init`, by default that of the cell, of the types that the state has after a step.

    Dtypes may differ if the inputs have other ones than the parameters, or in a `mixed`
    cell; shardings over explicit axes if the parameters are split. A list becomes the
    tuple that the cell returns.
    """
    if init is None:
        if not hasattr(cell, "init_state"):
            raise TypeError(
                f"The cell has no method `init_state`: it is {describe_node(cell)}. "
                "Pass `init`, or another cell."
            )
        init = cell.init_state()
    state = jax.tree.map(jnp.asarray, init)
    x = jax.tree.map(_type_of_row, xs)
    # Twice, because the types after the first step may change those after the second.
    for _ in range(2):
        after = jax.eval_shape(cell, x, state)
        if type(state) is list and type(after) is tuple:
            state = tuple(state)
        if _structure_and_shapes(state) != _structure_and_shapes(after):
            raise ShapeError(
                "A recurrent cell returns the next state, of the structure and shapes of "
                f"`init`. `init` is {described(state)}; the {type(cell).__name__} returned "
                f"{described(after)}. Pass an `init` like `cell.init_state()`."
            )
        state = jax.tree.map(_of_type, state, after)
    return state


def _structure_and_shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [x.shape for x in leaves]


def _type_of_row(xs: Any) -> jax.ShapeDtypeStruct:
    where = None
    if (mesh := explicit_mesh(xs)) is not None:
        where = NamedSharding(mesh, PartitionSpec(*parts(xs)[1:]))
    options = {"weak_type": is_weak(xs), "sharding": where}
    return jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype, **options)


def _of_type(x: Any, like: Any) -> Any:
    # A PRNG key has no `astype`.
    x = x if is_typed_key(x) else x.astype(like.dtype)
    split = None if like.sharding is None else tuple(like.sharding.spec)
    return x if split in (None, parts(x)) else jax.sharding.reshard(x, like.sharding)


def _flipped(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.flip(x, 0), tree)


def _without_padding(xs: Any, there: Array) -> Any:
    """`xs`, with zeros where `there` is false. A cell must not see a NaN in padding,
    because a zero gradient times NaN is NaN."""

    def each(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 1)), x, 0)

    return jax.tree.map(each, xs)


def _where(condition: Array, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)
