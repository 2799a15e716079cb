"""Checks of what layers are built with and called with, with the same messages for all.

Shapes are known during a trace, so compiled programs hold none of these checks.
"""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._errors import NotAnArrayError, ShapeError, did_you_mean
from ..._module import Module
from ..._tree.arrays import is_typed_key
from ..._tree.filters import is_number
from ..._tree.nodes import describe_node
from ..._tree.require import name_of_call


def taker_name(layer: Any) -> str:
    """How messages name what takes an argument: a layer by its class.

    `layer` may also be the class, or the name of a function in backquotes.
    """
    if isinstance(layer, str):
        return layer
    return (layer if isinstance(layer, type) else type(layer)).__name__


def refusal(taker: Any, wanted: str, name: str, given: str, fix: str = "") -> str:
    return f"{taker_name(taker)} takes {wanted} as `{name}`; got {given}.{fix}"


def wrong_value(
    taker: Any, wanted: str, name: str, value: Any, words: Any = ()
) -> ValueError:
    """`words`: the strings that could have been meant; by default those in `wanted`."""
    words = words or re.findall(r"""['"](\w+)['"]""", wanted)
    meant = did_you_mean(value, words, "{!r}")
    return ValueError(refusal(taker, wanted, name, repr(value), meant))


def wrong_type(
    taker: Any, wanted: str, name: str, value: Any, fix: str = ""
) -> TypeError:
    return TypeError(refusal(taker, wanted, name, describe_node(value), fix))


def wrong_shape(
    taker: Any, wanted: str, name: str, shape: Any, fix: str = ""
) -> ShapeError:
    return ShapeError(refusal(taker, wanted, name, f"shape {shape}", fix))


def check_scalar(layer: Any, name: str, value: Any, fix: str = "") -> None:
    if jnp.shape(value) != ():
        raise wrong_shape(layer, "a scalar", name, jnp.shape(value), fix)


def check_integer(layer: Any, name: str, value: Any, fix: str = "") -> None:
    """Raises `TypeError` for an array or a number that is not of an integer dtype."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.integer):
        wanted = "integers" if jnp.ndim(value) else "an integer"
        raise TypeError(refusal(layer, wanted, name, f"dtype {dtype}", fix))


def _converted(
    layer: Any, name: str, value: Any, wanted: str, convert: Any, words: Any = ()
) -> Any:
    """`convert(value)`, unless that raises or is `None`: then it is not what is wanted."""
    try:
        converted = convert(value)
    except (TypeError, ValueError):
        converted = None
    if converted is None:
        raise wrong_value(layer, wanted, name, value, words=words)
    return converted


def as_size(layer: Any, name: str, value: Any, minimum: int = 0) -> int:
    """`value` as an int, after validating that it is an int of at least `minimum`."""

    def convert(value: Any) -> int | None:
        size = operator.index(value)
        return size if size >= minimum else None

    return _converted(layer, name, value, f"an int >= {minimum}", convert)


def as_divisor(layer: Any, name: str, value: Any) -> int:
    """`as_size`, except that 0 is a `ZeroDivisionError`, as it is in Equinox."""
    size = as_size(layer, name, value)
    if size == 0:
        raise ZeroDivisionError(refusal(layer, "an int >= 1", name, "0"))
    return size


def as_number(
    layer: Any,
    name: str,
    value: Any,
    wanted: str = "a number",
    is_valid: Callable[[float], bool] = lambda _: True,
) -> float:
    """`value` as a Python float, after validating that it is a number, and valid."""

    def convert(value: Any) -> float | None:
        is_text = isinstance(value, str | bytes)
        return None if is_text or not is_valid(float(value)) else float(value)

    return _converted(layer, name, value, wanted, convert)


def as_eps(layer: Any, value: Any) -> float:
    """`value` as the `eps` of a norm."""
    return as_number(layer, "eps", value, "a number >= 0", lambda x: x >= 0)


def as_theta(layer: Any, value: Any) -> float:
    """`value` as the `theta` of a positional embedding."""
    return as_number(layer, "theta", value, "a number > 0", lambda x: x > 0)


def check_dtype(layer: Any, name: str, dtype: Any, kind: Any = jnp.inexact) -> None:
    """Raises `ValueError` unless `dtype` is one of `kind`: inexact or floating."""

    def convert(dtype: Any) -> bool | None:
        is_given = dtype is not None and not is_typed_key(dtype)
        return (is_given and jnp.issubdtype(jnp.dtype(dtype), kind)) or None

    wanted = "a floating or complex" if kind is jnp.inexact else "a real floating"
    words = "bfloat16", "float16", "float32", "float64"
    _converted(layer, name, dtype, f"{wanted} dtype", convert, words)


def as_even_size(layer: Any, name: str, value: Any) -> int:
    size = as_size(layer, name, value)
    if size % 2 != 0:
        raise wrong_value(layer, "an even number", name, size)
    return size


def as_size_or_scalar(layer: Any, name: str, value: Any) -> int | Literal["scalar"]:
    """`as_size`, which also accepts the word "scalar"."""
    if not isinstance(value, str):
        return as_size(layer, name, value)
    if value == "scalar":
        return "scalar"
    raise wrong_value(layer, 'an int >= 0 or "scalar"', name, value)


def per_axis(
    layer: Any, name: str, value: Any, length: int, minimum: int = 1
) -> tuple[int, ...]:
    """An int for each axis, from an int or a sequence; all are at least `minimum`."""
    if isinstance(value, SupportsIndex):
        return (as_size(layer, name, value, minimum),) * length
    if isinstance(value, Sequence):
        return tuple(as_size(layer, name, each, minimum) for each in value)
    raise wrong_value(layer, f"an int or a sequence of {length} ints", name, value)


def check_length(layer: Any, name: str, value: Sequence[Any], length: int) -> None:
    """Raises `ShapeError` unless there is one value for each of `length` axes."""
    if len(value) != length:
        raise ShapeError(
            f"{taker_name(layer)} takes one value for each spatial axis as `{name}`: "
            f"{length} in all; got {value!r}."
        )


def as_axis(layer: Any, name: str, value: Any) -> int:
    """`value` as an int, after validating that it is one."""
    return _converted(layer, name, value, "an int", operator.index)


def as_axes(layer: Any, name: str, value: Any) -> tuple[int, ...]:
    """`value` as a tuple of ints, after validating that it is a sequence of these."""

    def convert(value: Any) -> tuple[int, ...]:
        return tuple(map(operator.index, value))

    return _converted(layer, name, value, "a sequence of ints", convert)


def as_padding(layer: Any, value: Any, length: int) -> tuple[tuple[int, int], ...]:
    """The padding `(before, after)` of each axis, from an int, ints or pairs."""

    def convert(value: Any) -> tuple[tuple[int, int], ...] | None:
        is_one = isinstance(value, SupportsIndex)
        each: Any = (value,) * length if is_one else tuple(value)
        if all(isinstance(p, SupportsIndex) for p in each):
            each = tuple((p, p) for p in each)
        pairs = tuple((operator.index(low), operator.index(high)) for low, high in each)
        return pairs if len(pairs) == length else None

    wanted = (
        f"an int, a sequence of {length} ints, or one of {length} pairs (before, after)"
    )
    return _converted(layer, "padding", value, wanted, convert)


def check_not_layer_class(taker: str, name: str, layer: Any) -> None:
    """Raises `TypeError` for a class of layers in place of a layer.

    A class is callable, so a call of it would return a new layer instead of an array.
    """
    if isinstance(layer, type) and issubclass(layer, Module):
        given, fix = f"the class {layer.__name__}", f" Write `{layer.__name__}(...)`."
        raise TypeError(refusal(taker, "a layer", name, given, fix))


def check_layer(
    taker: str, name: str, layer: Any, wanted: str = "a layer or a function"
) -> None:
    """Raises `TypeError` unless `layer` can be called, and for a class of layers."""
    check_not_layer_class(taker, name, layer)
    check_function(taker, name, layer, wanted)


def check_function(
    taker: str, name: str, function: Any, wanted: str = "a function"
) -> None:
    """Raises `TypeError` unless `function` can be called."""
    if not callable(function):
        near = did_you_mean(function, dir(jax.nn), "`jax.nn.{}`")
        fix = near or name_of_call(function)
        raise wrong_type(taker, wanted, name, function, fix)


def as_layers(taker: str, name: str, layers: Iterable[Any]) -> tuple[Any, ...]:
    """`layers` as a tuple, after validating that it is a sequence without classes."""
    try:
        iterator = iter(layers)
    except TypeError:
        fix = f" Write `{taker}([...])`."
        raise wrong_type(taker, "a list of layers", name, layers, fix) from None
    found = tuple(iterator)
    for i, layer in enumerate(found):
        check_not_layer_class(taker, f"{name}[{i}]", layer)
    return found


def check_input(
    layer: Any, x: Any, wanted: Sequence[int | None], name: str = "x"
) -> None:
    """Raises `ShapeError` unless `x` has the `wanted` shape; `None` is any size.

    Raises `TypeError` if `x` is not an array of numbers.
    """
    if isinstance(x, jax.Array) and x.shape == wanted and isinstance(x.dtype, np.dtype):
        return  # as below, in less time
    shape = _shape_of(x)
    if shape is None and not (hasattr(x, "__jax_array__") or hasattr(x, "__array__")):
        raise _not_an_array(layer, name, x, _hint_for(x))
    if shape is None or _matches(shape, wanted):
        if _holds_no_numbers(x):
            raise _not_an_array(layer, name, x, " It must hold numbers.")
        return
    extra = len(shape) - len(wanted)
    message = (
        f"{taker_name(layer)} takes `{name}` of shape {_as_text(wanted)}, but was "
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
    "If it is an ensemble, call it under `filter_vmap`: `filter_vmap(lambda model, x: "
    "model(x), in_axes=(if_array(0), None))(ensemble, x)`."
)


def described(tree: Any) -> str:
    """The shape and dtype of an array or a number, or of each leaf of a tree."""

    def shown(x: Any) -> str:
        # `result_type` of a weakly typed array depends on `jax_enable_x64`.
        dtype = x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)
        return f"shape {jnp.shape(x)} and dtype {dtype}"

    return str(jtu.tree_map(shown, tree))


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
