"""Initial values of parameters, and the PRNG keys and random numbers behind them.

All layers draw their parameters here, so that a PRNG key always gives the same values.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from ..._compat.tracing import within_program
from ..._errors import did_you_mean
from ..._loops import filter_map
from ..._transforms.vmap import filter_vmap
from ..._tree import is_array, is_inexact_array
from ..._tree.arrays import describe_array, is_concrete
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .checks import check_dtype, taker_name
from .precision import to_dtype


def split_key(key: Any, number: int, layer: Any) -> jax.Array:
    """`jax.random.split` of the key that `layer` was given."""
    with key_named(key, layer):
        return jax.random.split(key, number)


@contextlib.contextmanager
def key_named(key: Any, layer: Any) -> Iterator[None]:
    """An error of JAX within names `layer`, if the cause is that `key` is not a single
    PRNG key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        try:
            jax.eval_shape(jax.random.split, key)
        except (TypeError, ValueError):
            given = describe_array(key) if is_array(key) else repr(key)
            # Error classes of JAX may take other arguments than a message.
            error_class = TypeError if isinstance(error, TypeError) else ValueError
            raise error_class(
                f"`key` of {taker_name(layer)} must be one PRNG key, such as "
                f"`jax.random.key(0)`; got {given}."
            ) from error
        raise  # of another cause


def draw(
    sample: Callable[..., Array],
    key: PRNGKeyArray,
    shape: Sequence[int],
    dtype: DTypeLike,
    *args: Any,
) -> Array:
    """`sample(key, shape, dtype, *args)`, for a function of `jax.random`.

    Drawn along one axis and reshaped, the numbers are the same, and on a CPU they take
    less time to compile: a quarter for the weight of a `Conv2d`. But in a program for
    several devices, each of them would draw all numbers, and not only its own.

    Outside of a program, most of the time of a first construction is to compile a draw
    for each shape. So the next power of two is drawn, and NumPy takes the first numbers.
    """
    shape, size = tuple(shape), math.prod(shape)
    if within_program():
        if jax.device_count() > 1 or jax.default_backend() != "cpu":
            return sample(key, shape, dtype, *args)
    elif size <= _MOST_ROUNDED and _draws_prefixes(key):
        number = max(_LEAST_ROUNDED, 2 ** (size - 1).bit_length())
        drawn = _draw_flat(sample, key, (number,), dtype, *args)
        return jnp.array(np.asarray(drawn)[:size].reshape(shape))
    return _draw_flat(sample, key, shape, dtype, *args)


_LEAST_ROUNDED: Final = 2**12  # fewer numbers take no less time
_MOST_ROUNDED: Final = 2**20  # to draw more takes longer than to compile


def _draws_prefixes(key: Any) -> bool:
    """Whether a short draw is the beginning of a longer one, on one CPU device."""
    return (
        is_concrete(key)
        and not key.committed
        and jax.default_backend() == "cpu"
        and jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
        and jax.random.key_impl(key) == "threefry2x32"
        and jax.sharding.get_abstract_mesh().empty
    )


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _draw_flat(sample: Any, key: Any, shape: Any, dtype: Any, *args: Any) -> Array:
    return sample(key, (math.prod(shape),), dtype, *args).reshape(shape)


# An initialiser as in `jax.nn.initializers`, the name of one there, or the values.
Init = Callable[..., Any] | str | ArrayLike
# Calls an initialiser for a stored shape: `layout(init, key, shape, dtype)`.
# A new layout of other than two axes has their number as `ndim`: see `leading_axes`.
WeightLayout = Callable[[Callable[..., Any], Any, tuple[int, ...], Any], Any]
# The field names of layers' weights.
WEIGHTS = ("weight", "weight_ih", "weight_hh")


def default_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """`dtype`, or JAX's current default for `None`: float64 under `jax_enable_x64`."""
    return jnp.result_type(float) if dtype is None else dtype


def dtype_of(tree: Any) -> DTypeLike:
    """The dtype to which the parameters of `tree` promote."""
    leaves = jax.tree.leaves(tree, is_leaf=_stands_in)
    dtypes = [x.dtype for x in leaves if is_inexact_array(x) or _stands_in(x)]
    # Floats of 8 bits promote to nothing.
    dtypes = [dtype for dtype in dtypes if jnp.finfo(dtype).bits > 8]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes) if dtypes else default_dtype(None)


def _stands_in(node: Any) -> bool:
    """Whether a node is not an array, but converts to one of a dtype that it tells."""
    return hasattr(node, "__jax_array__") and hasattr(node, "dtype")


def parameter_dtype(layer: Any, dtype: DTypeLike | None) -> DTypeLike:
    """`default_dtype`, after validating that the dtype is floating or complex."""
    if dtype is not None:
        check_dtype(layer, "dtype", dtype)
    return default_dtype(dtype)


def uniform(
    key: PRNGKeyArray, shape: Sequence[int], limit: float, dtype: DTypeLike
) -> Inexact[Array, "..."]:
    r"""Uniform in $[-\mathrm{limit}, \mathrm{limit})$; also both parts if complex."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return draw(jax.random.uniform, key, shape, dtype, -limit, limit)
    real_key, imag_key = jax.random.split(key, 2)
    component = jnp.finfo(dtype).dtype
    return jax.lax.complex(
        uniform(real_key, shape, limit, component),
        uniform(imag_key, shape, limit, component),
    )


def first_values(
    layer: Any,
    key: PRNGKeyArray,
    limit: float,
    dtype: DTypeLike | None,
    **parameters: tuple[Init | None, Sequence[int] | None],
) -> Iterator[Any]:
    """The initial value of each parameter, in order, with a PRNG key of its own.

    It is by the `init` of a pair `(init, shape)`, or uniform if that is `None`. If the
    shape is `None`, there is no such parameter.
    """
    keys = split_key(key, len(parameters), layer)
    for each_key, (name, (init, shape)) in zip(keys, parameters.items(), strict=True):
        if shape is None:
            yield None
        elif init is None:
            yield uniform(each_key, shape, limit, parameter_dtype(layer, dtype))
        else:
            yield first_value(layer, name, init, each_key, tuple(shape), dtype)


def first_value(
    layer: Any,
    name: str,
    init: Init,
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: DTypeLike | None,
) -> Array:
    """The initial value of the parameter `name`, by `init`."""
    dtype, at = parameter_dtype(layer, dtype), f"{type(layer).__name__}.{name}"
    return initialised(init, key, shape, dtype, layout_of(layer, name), at)


def initialised(
    init: Init,
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    layout: WeightLayout,
    at: str,
) -> Array:
    """The value by `init` for a parameter of this stored shape; errors name it `at`."""
    try:
        if isinstance(init, str) or callable(init):
            init = _initialiser(init, at)
            values = layout(init, key, shape, dtype)
        else:
            values = init
        values = jnp.asarray(values)
    except Exception as error:
        error.add_note(f"This is from the initialiser for `{at}`.")
        raise
    if not callable(init) and values.ndim == 0:
        values = jnp.broadcast_to(values, shape)
    if values.shape != shape:
        raise ValueError(
            f"The initialiser for `{at}` returned an array of shape {values.shape}, "
            f"but the parameter has shape {shape}."
        )
    return to_dtype(values, dtype)


def layout_of(layer: Any, name: str) -> WeightLayout:
    """The layout of a parameter: from the layer's `_layouts`, by default as stored."""
    return getattr(layer, "_layouts", {}).get(name, as_stored)


def leading_axes(layer: Any, name: str, ndim: int, default: int) -> int:
    """How many of the `ndim` axes of a parameter come before those of one layer: it is
    stacked or an ensemble. `default` if the class has no layout for the parameter."""
    layout = layout_of(layer, name)
    if layout is as_stored:
        return default
    if layout is channels_first:
        return ndim - (layer.num_spatial_dims + 2)
    # An `Einsum` has as many axes as its equation says.
    return ndim - getattr(layout, "ndim", 2)


def as_stored(init: Any, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return init(key, shape, dtype)


def output_first(init: Any, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The layout `(out, in)`: JAX's initialisers get `(in, out)`."""
    return jnp.asarray(init(key, shape[::-1], dtype)).T


def channels_first(init: Any, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The layout `(out, in, *kernel)`: JAX's initialisers get `(*kernel, in, out)`."""
    out_channels, in_channels, *kernel = shape
    values = jnp.asarray(init(key, (*kernel, in_channels, out_channels), dtype))
    return jnp.moveaxis(values, (-1, -2), (0, 1))


def gates(number: int) -> WeightLayout:
    """The layout of gates, stacked along `out` of `(out, in)`: each is drawn alone."""

    def layout(init: Any, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        each = shape[0] // number, shape[1]
        keys = jax.random.split(key, number)
        return jnp.concatenate([output_first(init, k, each, dtype) for k in keys])

    return layout


def _initialiser(init: str | Callable[..., Any], at: str) -> Callable[..., Any]:
    """`init`, or the initialiser of JAX of this name, for a parameter `at` a place."""
    function: Any = init
    if isinstance(init, str):
        function = getattr(jax.nn.initializers, init, None)
        if init.startswith("_") or not callable(function):
            near = did_you_mean(init, dir(jax.nn.initializers), "{!r}")
            raise ValueError(
                f"`jax.nn.initializers` has no initialiser {init!r}, which was requested "
                f"for `{at}`.{near}"
            )
        # These two are initialisers, the others make one.
        function = function if init in ("zeros", "ones") else function()
    decomposes = isinstance(init, str) and init in ("orthogonal", "delta_orthogonal")

    def call(key: Any, shape: Any, dtype: Any) -> Any:
        # A QR decomposition takes no half precision.
        is_half = decomposes and jnp.finfo(dtype).bits < 32
        values = function(key, shape, jnp.float32 if is_half else dtype)
        if callable(values):
            name = getattr(function, "__name__", "init")
            raise TypeError(
                f"An initialiser returns an array; {name} returned a function, since it "
                f"makes initialisers. Call it first: `{name}()`."
            )
        return values

    return call


def build_stacked(build: Callable[[Any], Any], keys: Array) -> Any:
    """The layers `build(key)` for each key, stacked into one."""
    if len(keys) == 0:  # other PRNGs cannot draw nothing
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 0)
    if jax.random.key_impl(keys) == "threefry2x32":
        return filter_vmap(build)(keys)  # compiles nothing
    # With other PRNGs (`rbg`) a batch of keys draws other numbers than single keys. A new
    # function, because what is compiled for one is kept, with the indices of its states.
    return filter_map(lambda key: build(key), keys)
