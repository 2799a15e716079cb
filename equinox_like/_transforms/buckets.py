"""`bucketed`: a few compiled programs for arrays of many lengths."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._annotations import signature_of
from .._core.base import frames_hidden, name_of, require_callable
from .._jit.jit import Jitted, filter_jit
from .._jit.retrace import Retrace
from .._module.fields import field
from .._tree.filters import is_array_or_struct
from .._tree.nodes import path_str
from .._tree.require import require_integer
from .arguments import WithOptions

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
        sizes: `{"x": {0: sizes}}`. Axes are counted from 0. The sizes are
        `"powers-of-two"`, a sequence of ints, or a function from a length to a size that
        is not smaller. If the argument is a tree, all arrays in it are padded, and must
        have the same length.
    - `fill`: the value of the padded elements.
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
    or if an axis is negative or a size not positive. When called: `ValueError` naming the
    path of an array that is longer than the largest bucket, that does not have such an
    axis, that is longer than another array of the same argument, that is a masked array
    of NumPy, or whose dtype does not hold the `fill`. PRNG keys are not padded: pass one
    key as an argument of its own, and use `jax.random.fold_in(key, i)` for element `i`.

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


class Bucketed(WithOptions[_P, _T]):
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
        passed = [*signature_of(fun).parameters]
        if "lengths" not in passed:
            raise TypeError(
                f"`bucketed` passes the true lengths to `{name_of(fun)}`, which has no "
                "parameter `lengths`. Add one, and mask what is beyond a length: "
                '`jnp.where(jnp.arange(len(x)) < lengths["x"][0], x, 0)`.'
            )
        passed.remove("lengths")
        flat_axes = tuple(_flat_axes(axes))
        unknown = [name for name in axes if name not in passed]
        if unknown:
            raise ValueError(
                f"`axes` names {unknown}, but the parameters of `{name_of(fun)}` are "
                f"{passed}."
            )
        jitted = fun if isinstance(fun, Jitted) else filter_jit(fun)
        super().__init__(jitted, _axes=flat_axes, _fill=fill, _crop=crop)

    @property
    def __signature__(self) -> inspect.Signature:
        return _without_lengths(signature_of(self.__wrapped__))

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        padded, keywords, lengths = self._padded(args, kwargs)
        out: Any = self.__wrapped__(*padded, **keywords)
        return out if self._crop is None else self._crop(out, lengths)

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
        return jitted.explain(*args, **kwargs)

    def _padded(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any], Lengths]:
        signature = signature_of(self.__wrapped__)
        bound = _without_lengths(signature).bind(*args, **kwargs)
        bound.apply_defaults()
        lengths: Lengths = {}
        for name, axis, sizes in self._axes:
            value = bound.arguments[name]
            path, length = _length(value, name, axis)
            size = _bucket(sizes, length, f"axes[{name!r}][{axis}](...)")
            if size < length:
                raise ValueError(
                    f"`{path}` has length {length} along axis {axis}, and the largest "
                    f"bucket is {size}. Add a larger one."
                )
            bound.arguments[name] = _pad(value, name, axis, size - length, self._fill)
            lengths.setdefault(name, {})[axis] = length
        traced = jax.tree.map(np.int32, lengths)
        # `lengths` may be at any position among the parameters.
        arguments: Any = {**bound.arguments, "lengths": traced}
        full = inspect.BoundArguments(signature, arguments)
        return full.args, full.kwargs, lengths


def _without_lengths(signature: inspect.Signature) -> inspect.Signature:
    kept = [p for name, p in signature.parameters.items() if name != "lengths"]
    return signature.replace(parameters=kept)


def _flat_axes(axes: Any) -> Iterator[tuple[str, int, Any]]:
    """Each parameter and axis, with its sizes in order, or a function to a size."""
    of_parameters = axes.values() if isinstance(axes, Mapping) else [axes]
    if not all(isinstance(of_axes, Mapping) for of_axes in of_parameters):
        raise TypeError(
            "`axes` of `bucketed` must map parameters to axes, and these to sizes, as in "
            f"`{{'x': {{0: [8, 64]}}}}`; got {axes!r}."
        )
    for name, of_axes in axes.items():
        for axis, sizes in of_axes.items():
            require_integer(axis, "bucketed", f"key in axes[{name!r}]", least=0)
            yield name, axis, _checked_sizes(sizes, f"axes[{name!r}][{axis}]")


def _checked_sizes(sizes: Any, place: str) -> Any:
    if isinstance(sizes, str) and sizes == "powers-of-two":
        return _next_power_of_two
    if callable(sizes):
        return sizes
    if isinstance(sizes, Sequence) and sizes:
        if all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
            return tuple(sorted(map(int, sizes)))
    raise ValueError(
        f"`{place}` is {sizes!r}; sizes are 'powers-of-two', a sequence of positive "
        "ints, or a function from a length to a size."
    )


def _next_power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def _bucket(sizes: Any, length: int, function: str) -> int:
    """The smallest size that fits a length, or the largest of all if none does."""
    if callable(sizes):
        return require_integer(sizes(length), "bucketed", function)
    return next((size for size in sizes if size >= length), sizes[-1])


def _length(value: Any, name: str, axis: int) -> tuple[str, int]:
    """The path of the first array of an argument, and the length of all along `axis`."""
    paths: dict[int, str] = {}  # by length
    for steps, x in jtu.tree_leaves_with_path(value):
        if not is_array_or_struct(x):
            continue
        path = path_str(steps, name)
        if axis >= x.ndim:
            raise ValueError(
                f"`{path}` is to be padded along axis {axis}, but has shape {x.shape}."
            )
        if isinstance(x, np.ma.MaskedArray):
            raise ValueError(f"`{path}` is a masked array: pass `{path}.filled()`.")
        paths.setdefault(x.shape[axis], path)
    if not paths:
        raise ValueError(f"`{name}` is to be padded, but holds no array.")
    (length, first), *others = paths.items()
    for other, path in others:
        raise ValueError(
            f"`{name}` is padded along axis {axis}, so its arrays must have equal lengths "
            f"there; but `{first}` has length {length}, and `{path}` has {other}."
        )
    return first, length


def _pad(value: Any, name: str, axis: int, number: int, fill: Any) -> Any:
    """The tree, with `number` elements added to each array along `axis`."""

    def padded(path, x):
        if not is_array_or_struct(x):
            return x
        element = _element(fill, x.dtype)
        if element is None:
            raise ValueError(
                f"`{path_str(path, name)}` is padded with `fill={fill!r}`, which its "
                f"dtype {x.dtype} does not hold."
            )
        if number == 0:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, number
        pad: Any = np.pad if isinstance(x, np.ndarray) else jnp.pad
        pad = functools.partial(pad, pad_width=widths, constant_values=element)
        return jax.eval_shape(pad, x) if isinstance(x, jax.ShapeDtypeStruct) else pad(x)

    return jtu.tree_map_with_path(padded, value)


def _element(fill: Any, dtype: Any) -> Any:
    """`fill` as an array of this dtype, or `None` if it would be another value."""
    try:
        with np.errstate(over="ignore"):
            element = np.asarray(fill, dtype)
        # An inexact dtype may round, but 1e9 is infinite in float16.
        rounding = 0.1 if jnp.issubdtype(dtype, np.inexact) else 0
        is_held = np.isclose(complex(element), fill, rounding, atol=0, equal_nan=True)
        return element if is_held else None
    except (OverflowError, TypeError, ValueError):
        return None
