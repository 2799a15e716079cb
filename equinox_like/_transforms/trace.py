"""Tracing without execution: `filter_eval_shape`, `filter_make_jaxpr` and others.

JAX traces arrays, and `jax.ShapeDtypeStruct`s in their place. All other leaves are
passed to the function unchanged.
"""

import threading
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._core.base import Transformed, frames_hidden, require_callable
from .._core.caches import on_clear
from .._core.flat_call import FlatCall, Template, pack, take_apart, unpack
from .._jit.layout import keep
from .._module import Module
from .._tree.arrays import jax_struct_of
from .._tree.filters import is_array_or_struct
from .._tree.splitting import STATIC, Skeleton, merge, split
from .arguments import show_as_call

_P = ParamSpec("_P")
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Module)


@overload
def filter_eval_shape(fun: Callable[..., _M], /, *args: Any, **kwargs: Any) -> _M: ...


@overload
def filter_eval_shape(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...


@frames_hidden
def filter_eval_shape(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of what a function returns, without computing it.

    **Arguments:**

    - `fun`: any callable; a class, too. The arrays of a callable pytree are abstract, like
        those of the arguments.
    - `*args`, `**kwargs`: its arguments. A `jax.ShapeDtypeStruct` may stand for an
        array. Python numbers and everything else that is not an array are passed on
        unchanged.

    **Returns:**

    What `fun` returns, with a `jax.ShapeDtypeStruct` for each array. It keeps the weak
    type of the array.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        # A model without memory: something to load a file into.
        skeleton = eqx.filter_eval_shape(eqx.nn.Linear, 2, 3, key=jax.random.key(0))
        assert skeleton.weight.shape == (3, 2)
        ```
    """
    require_callable(fun, "filter_eval_shape", "fun")
    data, call = FlatCall.of(fun, args, kwargs, is_array_or_struct, with_fun=True)
    outs = []

    def flat(data):
        out, out_rest = take_apart(call.run(data))
        # JAX would keep it, with the static values in it, as part of the output.
        outs.append(out_rest)
        return out

    show_as_call(flat, fun, args, kwargs, fun, is_array_or_struct)
    structs = jax.eval_shape(flat, data)
    return outs.pop().fill(structs)


@frames_hidden
def eval_empty(fn: Callable[..., Any], /, *inputs: Any) -> Any:
    """The output of a function with uninitialised arrays; nothing is computed.

    **Arguments:**

    - `fn`, `*inputs`: as for [`equinox_like.filter_eval_shape`][].

    **Returns:**

    The output of `fn`, with each array replaced by one of `jnp.empty`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        out = eqx.internal.eval_empty(lambda x: (x > 0, "text"), jnp.ones(3))
        assert out[0].shape == (3,) and out[0].dtype == bool and out[1] == "text"
        ```
    """
    return _filled(filter_eval_shape(fn, *inputs), jnp.empty)


@frames_hidden
def eval_zero(fn: Callable[..., Any], /, *inputs: Any) -> Any:
    """The output of a function with arrays of zeros; nothing is computed.

    **Arguments:**

    - `fn`, `*inputs`: as for [`equinox_like.filter_eval_shape`][].

    **Returns:**

    The output of `fn`, with each array replaced by one of `jnp.zeros`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        out = eqx.internal.eval_zero(lambda x: {"sum": x.sum()}, jnp.ones(3))
        assert out == {"sum": 0.0}
        ```
    """
    return _filled(filter_eval_shape(fn, *inputs), jnp.zeros)


def _filled(tree: Any, fill: Callable[..., jax.Array]) -> Any:
    def fill_leaf(x):
        return fill(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

    return jtu.tree_map(fill_leaf, tree)


def filter_make_jaxpr(fun: Callable[_P, Any]) -> "JaxprMaker[_P]":
    """The jaxpr of a function of any pytrees.

    **Arguments:**

    - `fun`: any callable.

    **Returns:**

    A function of example arguments, in which a `jax.ShapeDtypeStruct` may stand for an
    array. It returns

    - the closed jaxpr. Its inputs are the arrays of the arguments in JAX's order, its
        constants the arrays that `fun` closes over or holds;
    - the output with a `jax.ShapeDtypeStruct` for each array, else `None`;
    - the output without its arrays.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        make_jaxpr = eqx.filter_make_jaxpr(lambda x, n: (n * x, n))
        jaxpr, arrays, static = make_jaxpr(jnp.ones(2), 3)
        assert len(jaxpr.jaxpr.invars) == 1
        assert arrays[0].shape == (2,) and static == (None, 3)
        ```
    """
    return JaxprMaker(fun)


class JaxprMaker(Transformed[_P, tuple[Any, Any, Any]], Generic[_P]):
    """The result of [`equinox_like.filter_make_jaxpr`][]."""

    _transformation_ = "filter_make_jaxpr"

    def __init__(self, fun: Any):
        super().__init__(fun)

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Any, Any, Any]:
        jaxpr, structs, _, rest = trace(self.__wrapped__, args, kwargs)
        return jaxpr, rest.alone(structs), rest.fill([None] * len(structs))


def trace(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_data: Callable[[Any], bool] = is_array_or_struct,
) -> tuple[Any, list[jax.ShapeDtypeStruct], Template, Template]:
    """The jaxpr, its output structs, and the rests of the arguments and the output."""
    data, rest = take_apart((args, kwargs), is_data)
    out_rest: Any = None

    def flat(data):
        nonlocal out_rest
        args, kwargs = rest.fill(data)
        out, out_rest = take_apart(fun(*args, **kwargs))
        return out

    show_as_call(flat, fun, args, kwargs, None, is_data)
    jaxpr, structs = jax.make_jaxpr(flat, return_shape=True)(data)
    return jaxpr, structs, rest, out_rest


class ShapeCache:
    """`filter_eval_shape` with a cache of its results.

    It keeps one jitted function for each structure with its static leaves. JAX caches
    its traces by shapes, dtypes and context.
    """

    def __init__(self) -> None:
        self._functions: dict[Skeleton, Any] = {}
        self._lock = threading.Lock()

    @frames_hidden
    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            groups, skeleton = split((fn, args, kwargs), _label)
        except ValueError as e:
            raise TypeError(str(e)) from None
        # Weak types and shardings are not part of the cache key.
        data = [*map(jax_struct_of, groups.get(_DATA, ()))]
        with self._lock:
            flat = self._functions.get(skeleton)
            if flat is None:
                flat = jax.jit(_function_of(skeleton))
                keep(self._functions, skeleton, flat, most=_MOST)
        return unpack(flat.eval_shape(data))

    def clear(self) -> None:
        with self._lock:
            self._functions.clear()


_DATA = "data"
# How many functions with their static values are kept. They keep what they read alive.
_MOST: Final = 256


def _label(x: Any) -> Any:
    return _DATA if is_array_or_struct(x) else STATIC


def _function_of(skeleton: Skeleton) -> Callable[..., Any]:
    groups = {_DATA} & set(skeleton.labels)

    def flat(data):
        fun, args, kwargs = merge(dict.fromkeys(groups, data), skeleton)
        return pack(fun(*args, **kwargs))

    return flat


cached_filter_eval_shape = ShapeCache()
"""[`equinox_like.filter_eval_shape`][], with a cache of its results.

The cache key holds the function, static values, structures, shapes, dtypes, and JAX's
context. Static values must be hashable, else it raises `TypeError`.
[`equinox_like.clear_caches`][] empties the cache.
"""
on_clear(cached_filter_eval_shape.clear)
