"""`bucketed`: a few compiled programs for arrays of many lengths."""

import dataclasses
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._annotations import signature_of
from .._core.base import (
    Transformed,
    frames_hidden,
    hide_frames,
    name_of,
    require_callable,
)
from .._core.difference import Difference
from .._jit.jit import Jitted, filter_jit
from .._jit.retrace import SHAPE, Retrace
from .._module.fields import field
from .._tree.arrays import is_typed_key, with_key, without_key
from .._tree.filters import is_array_or_struct
from .._tree.nodes import path_str
from .._tree.require import require_integer

_P = ParamSpec("_P")
_T = TypeVar("_T")

Lengths = dict[str, dict[int, Any]]


def bucketed(
    fun: Callable[..., _T],
    axes: Mapping[str, Mapping[int, Any]],
    *,
    fill: Any = 0,
    crop: Callable[[Any, Lengths], Any] | None = None,
) -> "Bucketed[..., _T]":
    """Compiles a function for a few sizes, and pads arrays of other lengths to them.

    A compiled function is compiled again for each new shape. This function pads the named
    axes to the next larger size, a bucket, so that there is one compilation for each
    bucket. The padded elements reach `fun`, which must leave them out: it is given the
    true lengths.

    **Arguments:**

    - `fun`: the function, or the result of [`equinox_like.filter_jit`][] if options such
        as `donate` are needed. It has a parameter `lengths`, which callers do not pass:
        `lengths["x"][0]` is the true length of axis 0 of `x`, an `int32` scalar that is
        traced.
    - `axes`: a dictionary from names of parameters to the axes that are padded, and their
        sizes: `{"x": {0: sizes}}`. The sizes are `"powers-of-two"`, a sequence of ints,
        or a function from a length to a size that is not smaller. If the argument is a
        tree, all arrays in it are padded, and must have the same length.
    - `fill`: the value of the padded elements. An array of typed PRNG keys is padded
        with the key whose data are zeros, and a single key reaches `fun` as it is.
    - `crop`: a function `crop(out, lengths)` of the output and the true lengths, which
        are ints. It runs outside of the compiled program, and its result is returned. For
        example `lambda out, lengths: out[: lengths["x"][0]]`.

    **Returns:**

    A function like `fun`, without the parameter `lengths`. Its `.explain(...)` takes the
    arguments of a call and says whether it needs a new bucket; `.pad(...)` returns
    the padded `(args, kwargs)` that the compiled function is called with.

    NumPy arrays are padded on the host. To pad a JAX array, or to crop one, JAX compiles a
    small program of its own for each length, so pass NumPy arrays if there are many
    lengths.

    **Raises:**

    When wrapping: `TypeError` if `fun` has no parameter `lengths`, or if `axes` is not
    nested like this; `ValueError` if `axes` names a parameter that `fun` does not have,
    or if a size is not positive. When called: `ValueError` naming the path of an array
    that is longer than the largest bucket, that does not have such an axis, that is
    longer than another array of the same argument, that is a masked array of NumPy, or
    whose dtype does not hold the `fill`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp
        import numpy as np

        def mean(x, lengths):
            n = lengths["x"][0]
            return jnp.where(jnp.arange(x.shape[0]) < n, x, 0).sum() / n

        mean = eqx.bucketed(mean, {"x": {0: [8, 64]}})
        assert mean(np.ones(3)) == 1.0
        assert mean.explain(np.ones(8)) is None  # the same program
        ```
    """
    return Bucketed(fun, axes, fill, crop)


class Bucketed(Transformed[_P, _T]):
    """The result of [`equinox_like.bucketed`][]."""

    _transformation_ = "bucketed"

    # Parameter, axis, and the sizes of its buckets, or a function to one from a length.
    _axes: tuple[tuple[str, int, Any], ...] = field(static=True)
    _fill: Any = field(static=True)
    _crop: Any = field(static=True)

    def __init__(self, fun: Any, axes: Any, fill: Any, crop: Any):
        require_callable(fun, "bucketed")
        if crop is not None:
            require_callable(crop, "bucketed", "crop")
        super().__init__(fun if isinstance(fun, Jitted) else filter_jit(fun))
        parameters = signature_of(fun).parameters
        if "lengths" not in parameters:
            raise TypeError(
                f"`bucketed` passes the true lengths to `{name_of(fun)}`, which has no "
                "parameter `lengths`. Add one, and mask what is beyond a length: "
                '`jnp.where(jnp.arange(len(x)) < lengths["x"][0], x, 0)`.'
            )
        _check_axes(axes)
        passed = [name for name in parameters if name != "lengths"]
        unknown = [name for name in axes if name not in passed]
        if unknown:
            raise ValueError(
                f"`axes` names {unknown}, but the parameters of `{name_of(fun)}` are "
                f"{passed}."
            )
        self._axes = tuple(
            (name, axis, _checked(sizes, name, axis))
            for name, of_axes in axes.items()
            for axis, sizes in of_axes.items()
        )
        jitted: Any = self.__wrapped__
        jitted._program.storm.padded.update(axes)
        self._fill = fill
        self._crop = crop

    @property
    def __signature__(self) -> inspect.Signature:
        return _without_lengths(signature_of(self.__wrapped__))

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            padded, keywords, lengths = self._padded(args, kwargs)
            out: Any = self.__wrapped__(*padded, **keywords)
            return out if self._crop is None else self._crop(out, lengths)
        except Exception as e:
            hide_frames(e)
            raise

    @frames_hidden
    def pad(self, /, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The `(args, kwargs)` that the compiled function is called with."""
        args, kwargs, _ = self._padded(args, kwargs)
        return args, kwargs

    @frames_hidden
    def explain(self, /, *args: Any, **kwargs: Any) -> Retrace | None:
        """Why a call would be retraced, for a new bucket for example, else `None`."""
        args, kwargs, _ = self._padded(args, kwargs)
        jitted: Any = self.__wrapped__
        retrace = jitted.explain(*args, **kwargs)
        if retrace is None:
            return None
        return Retrace(retrace.function, map(self._with_fix, retrace.differences))

    def _with_fix(self, difference: Difference) -> Difference:
        """Adds advice on buckets to the difference, if it is a padded array's shape."""
        name = re.split(r"[.\[]", difference.path, maxsplit=1)[0]
        axes = [str(axis) for padded, axis, _ in self._axes if padded == name]
        if difference.kind != SHAPE or not axes:
            return difference
        fix = (
            f"`{name}` is padded to a bucket along axis {' and '.join(axes)}, and each "
            "bucket is compiled once. If another axis varies, give it buckets too."
        )
        return dataclasses.replace(difference, fix=fix)

    def _padded(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any], Lengths]:
        signature = signature_of(self.__wrapped__)
        bound = _without_lengths(signature).bind(*args, **kwargs)
        bound.apply_defaults()
        lengths: Lengths = {}
        for name, axis, sizes in self._axes:
            value = bound.arguments[name]
            length = _length(value, name, axis, lengths.get(name, ()))
            size = _bucket(sizes, length)
            if size is not None:
                size = require_integer(size, "bucketed", f"axes[{name!r}][{axis}](...)")
            if size is None or size < length:
                raise ValueError(_too_long(value, name, axis, length, sizes))
            bound.arguments[name] = _pad(value, name, axis, size - length, self._fill)
            lengths.setdefault(name, {})[axis] = length
        traced = jax.tree.map(np.int32, lengths)
        # `lengths` may be at any position among the parameters.
        full = inspect.BoundArguments(
            signature, OrderedDict({**bound.arguments, "lengths": traced})
        )
        return full.args, full.kwargs, lengths


def _without_lengths(signature: inspect.Signature) -> inspect.Signature:
    kept = [p for name, p in signature.parameters.items() if name != "lengths"]
    return signature.replace(parameters=kept)


def _bucket(sizes: Any, length: int) -> Any:
    """The smallest of the sorted `sizes` that fits a length, or `None`."""
    if callable(sizes):
        return sizes(length)
    return next((size for size in sizes if size >= length), None)


def _next_power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def _check_axes(axes: Any) -> None:
    is_nested = isinstance(axes, Mapping) and all(
        isinstance(of_axes, Mapping) for of_axes in axes.values()
    )
    if not is_nested:
        raise TypeError(
            "`axes` of `bucketed` must map parameters to axes, and these to sizes, as in "
            f"`{{'x': {{0: [8, 64]}}}}`; got {axes!r}."
        )
    for name, of_axes in axes.items():
        for axis in of_axes:
            require_integer(axis, "bucketed", f"key in axes[{name!r}]")


def _checked(sizes: Any, name: str, axis: int) -> Any:
    """Sorted sizes, or a function from a length to the size of its bucket."""
    if callable(sizes):
        return sizes
    if isinstance(sizes, str):
        if sizes == "powers-of-two":
            return _next_power_of_two
    elif isinstance(sizes, Sequence) and sizes:
        if all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
            return tuple(sorted(map(int, sizes)))
    raise ValueError(
        f"`axes[{name!r}][{axis}]` is {sizes!r}; sizes are 'powers-of-two', a sequence of "
        "positive ints, or a function from a length to a size."
    )


def _is_padded(x: Any) -> bool:
    # One key has no length; an array of keys has.
    return is_array_or_struct(x) and not (is_typed_key(x) and x.ndim == 0)


def _arrays(value: Any, name: str) -> list[tuple[str, Any]]:
    leaves, _ = jtu.tree_flatten_with_path(value)
    return [(path_str(path, name), x) for path, x in leaves if _is_padded(x)]


def _length(value: Any, name: str, axis: int, padded: Iterable[int]) -> int:
    """The length of the arrays of an argument along an axis, which must be equal.

    The argument has been padded along the axes `padded`.
    """
    arrays = _arrays(value, name)
    if not arrays:
        raise ValueError(f"`{name}` is to be padded, but holds no array with axes.")
    for path, x in arrays:
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"`{path}` is to be padded along axis {axis}, but has shape {x.shape}."
            )
        if any(axis % x.ndim == other % x.ndim for other in padded):
            raise ValueError(
                f"`axes` names one axis of `{path}` twice: it has {x.ndim} dimensions, "
                f"and axis {axis} is already padded. Name each axis once."
            )
        if isinstance(x, np.ma.MaskedArray):
            raise ValueError(
                f"`{path}` is a masked array, and its mask would be lost: pass "
                f"`{path}.filled()`."
            )
    (first, x), *others = arrays
    for path, y in others:
        if y.shape[axis] != x.shape[axis]:
            raise ValueError(
                f"`{name}` is padded along axis {axis}, so its arrays must have equal "
                f"lengths there; but `{first}` has length {x.shape[axis]}, and "
                f"`{path}` has {y.shape[axis]}."
            )
    return x.shape[axis]


def _too_long(value: Any, name: str, axis: int, length: int, sizes: Any) -> str:
    path = _arrays(value, name)[0][0]
    if isinstance(sizes, tuple):
        largest = f"the largest bucket is {sizes[-1]}. Add a larger one"
    else:
        largest = f"the bucket for it is {sizes(length)}. Return {length} or more"
    return f"`{path}` has length {length} along axis {axis}, and {largest}."


def _pad(value: Any, name: str, axis: int, number: int, fill: Any) -> Any:
    """The tree, with `number` elements added to each array along `axis`."""

    def each(path, x):
        if not _is_padded(x):
            return x
        holds_numbers = not is_typed_key(x) and x.dtype != jax.dtypes.float0
        element = _element(fill, x.dtype) if holds_numbers else 0
        if element is None:
            raise ValueError(
                f"`{path_str(path, name)}` is padded with `fill={fill!r}`, which its "
                f"dtype {x.dtype} does not hold."
            )
        if number == 0:
            return x

        def padded(x):
            data = without_key(x)
            widths = [(0, 0)] * data.ndim
            widths[axis % x.ndim] = 0, number
            pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
            return with_key(pad(data, widths, constant_values=element), x)

        is_struct = isinstance(x, jax.ShapeDtypeStruct)
        return jax.eval_shape(padded, x) if is_struct else padded(x)

    return jtu.tree_map_with_path(each, value)


def _element(fill: Any, dtype: Any) -> Any:
    """`fill` as an array of this dtype, or `None` if it would be another value."""
    if fill is None or np.ndim(fill):
        return None
    try:
        with np.errstate(over="ignore"):
            element = np.asarray(fill, dtype)
    except (OverflowError, TypeError, ValueError):
        return None
    if not jnp.issubdtype(dtype, np.inexact):
        return element if element == fill else None
    # Rounding is fine, but not another kind of number: 1e9 is infinite in float16.
    exact = np.asarray(fill, complex)
    is_held = all(kind(element) == kind(exact) for kind in (np.isnan, np.isinf))
    return element if is_held else None
