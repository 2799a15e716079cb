"""Validation of the arrays that layers are called with, with the same messages for all.

Shapes are known during a trace, so compiled
programs hold none of these checks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._errors import NotAnArrayError, ShapeError
from ..._tree.arrays import is_typed_key
from ..._tree.filters import is_number
from ..._tree.nodes import describe_node
from .arguments import refusal


def check_input(
    layer: Any, x: Any, wanted: Sequence[int | None], name: str = "x"
) -> None:
    """Raises `ShapeError` unless `x` has the `wanted` shape; `None` is any size.

    Raises `TypeError` if `x` is not an array of numbers.
    """
    shape = _shape_of(x)
    if shape is None and not (hasattr(x, "__jax_array__") or hasattr(x, "__array__")):
        raise _not_an_array(layer, name, x, _hint_for(x))
    if shape is None or _matches(shape, wanted):
        if _holds_no_numbers(x):
            raise _not_an_array(layer, name, x, " It must hold numbers.")
        return
    extra = len(shape) - len(wanted)
    message = (
        f"{type(layer).__name__} takes `{name}` of shape {_as_text(wanted)}, but was "
        f"given shape {_as_text(shape)}."
    )
    if extra > 0 and _matches(shape[extra:], wanted):
        message += (
            f" The input has {_axes(extra, 'extra leading ')}; layers take one example, "
            f"without a batch axis. Call `{'jax.vmap(' * extra}model{')' * extra}({name})`"
            ". If it is an axis of a sequence, use `jax.vmap` on this layer only."
        )
    elif wanted and wanted[0] == 1 and _matches(shape, wanted[1:]):
        message += f" Add the first axis, of size 1: `{name}[None]`."
    elif wanted[1:] and wanted[0] is not None and not any(wanted[1:]):
        if _matches(shape, (*wanted[1:], wanted[0])):
            message += f" The channels come first: `jnp.moveaxis({name}, -1, 0)`."
    raise ShapeError(message)


def _hint_for(x: Any) -> str:
    if isinstance(x, tuple) and not all(map(is_number, x)):
        return " If a layer returned it, unpack it, as in `x, state = layer(x, state)`."
    return " Convert it with `jnp.asarray`." if isinstance(x, list | tuple) else ""


def jax_array(x: Any) -> jax.Array:
    """`jnp.asarray(x)`, without the 8 us that this takes if `x` is a JAX array."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def as_array(layer: Any, name: str, x: Any, dtype: Any = None) -> jax.Array:
    """`x` as a JAX array, after validating that it is one of numbers, of any shape."""
    try:
        if not _holds_no_numbers(x):
            return jax_array(x) if dtype is None else jnp.asarray(x, dtype)
    except (TypeError, ValueError) as error:
        raise _not_an_array(layer, name, x) from error
    raise _not_an_array(layer, name, x)


def _holds_no_numbers(x: Any) -> bool:
    # Text is not left to JAX 0.10, which takes it as the name of a dtype.
    if x is None or isinstance(x, str) or is_typed_key(x):
        return True
    return getattr(x, "dtype", None) == np.dtype(object)


def _not_an_array(layer: Any, name: str, x: Any, hint: str = "") -> NotAnArrayError:
    return NotAnArrayError(refusal(layer, "an array", name, describe_node(x), hint))


def check_channels_first(layer: Any, x: Any, channels: int | None) -> None:
    """`check_input` for `channels`, followed by any number of axes of any size."""
    shape = _shape_of(x)
    extra = 0
    if shape and channels is not None and shape[0] != channels and channels in shape:
        extra = shape.index(channels)  # the axes before are batch axes
    number = max(len(shape or ()) - extra, 1)
    check_input(layer, x, (channels,) + (None,) * (number - 1))


def check_windows(
    layer: Any, shape: Sequence[int], sizes: Any, padding: Any, windows: Sequence[int]
) -> None:
    """Raises `ShapeError` if a spatial axis of an input of this shape is empty, or if a
    window does not fit into it. It has one of the `sizes`, and then the padding is added.
    Symbolic sizes are not checked."""
    name, of_shape = type(layer).__name__, f"but was given shape {_as_text(shape)}"
    if 0 in shape[1:]:
        raise ShapeError(f"{name} takes an `x` without empty spatial axes, {of_shape}.")
    axes = zip(sizes, padding, windows, strict=True)
    for axis, (size, (low, high), window) in enumerate(axes, 1):
        total = size + low + high
        if isinstance(total, int) and total < window:
            raise ShapeError(
                f"{name} takes an `x` into which its window fits, {of_shape}. Along axis "
                f"{axis} the window spans {window} elements, and there are {max(total, 0)} "
                "with the padding. Pass a larger `x`, or change the `kernel_size` or "
                "`padding` of the layer."
            )


def parameter_shape(layer: Any, name: str, ndim: int) -> tuple[int, ...] | None:
    """The shape of a parameter that should have `ndim` axes.

    Inputs are checked against this shape, and not against the sizes that the layer was
    built with. `None` if it is not known: an object in place of an array may lack a
    shape. Raises `ShapeError` for more axes: the layer is an ensemble.
    """
    shape = _shape_of(getattr(layer, name))
    if shape is None or len(shape) < ndim:
        return None
    if len(shape) > ndim:
        raise ShapeError(
            f"{type(layer).__name__} has a `{name}` of shape {_as_text(shape)}: "
            f"{_axes(len(shape) - ndim)} more than one layer has, in front. "
            f"{IF_AN_ENSEMBLE}"
        )
    return shape


def check_columns(layer: Any, x: Any, weight: str = "weight", name: str = "x") -> None:
    """`check_input` for what a matrix is multiplied by, if its shape is known."""
    shape = parameter_shape(layer, weight, 2)
    if shape is not None:
        check_input(layer, x, shape[1:], name)


IF_AN_ENSEMBLE = (
    "If it is an ensemble, built under `filter_vmap`, call it under `filter_vmap` as "
    "well: `filter_vmap(lambda model, x: model(x), in_axes=(if_array(0), "
    "None))(ensemble, x)`."
)


def described(tree: Any) -> str:
    """The shape and dtype of an array or a number, or of each leaf of a tree."""

    def shown(x: Any) -> str:
        # `result_type` of a weakly typed array depends on `jax_enable_x64`.
        dtype = x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)
        return f"shape {jnp.shape(x)} and dtype {dtype}"

    out = jtu.tree_map(shown, tree)
    return out if isinstance(out, str) else str(out)


def _shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array or a number; `None` for an object without a known shape."""
    if is_number(x):
        return ()
    return getattr(x, "shape", None)


def _matches(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        b is None or a == b for a, b in zip(shape, wanted, strict=True)
    )


def _as_text(shape: Sequence[int | None]) -> str:
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _axes(number: int, kind: str = "") -> str:
    return f"one {kind}axis" if number == 1 else f"{number} {kind}axes"
