"""Traces functions: `filter_eval_shape`, `filter_make_jaxpr`, `filter_closure_convert`.

JAX traces arrays, and `jax.ShapeDtypeStruct`s in their place. All other leaves are
passed to the function unchanged.
"""

import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.jaxpr import eval_jaxpr, without_constants
from .._core.base import Transformed, frames_hidden, name_of, on_clear, require_callable
from .._core.difference import tree_differences
from .._core.flat_call import FlatCall, Template, pack, take_apart, unpack
from .._module.fields import field
from .._module.module import Function, Module
from .._tree.arrays import describe_array, jax_struct_of, struct_of
from .._tree.cached import Cached
from .._tree.filters import is_array, is_array_or_struct
from .._tree.format import tree_pformat
from .._tree.partitioning import STATIC, Skeleton, merge, split
from .arguments import applied, show_as_call

_P = ParamSpec("_P")
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Module)
_C = TypeVar("_C", bound=Cached)  # another Module, or a `State`


@overload
def filter_eval_shape(fun: Callable[..., _M], /, *args: Any, **kwargs: Any) -> _M: ...


@overload
def filter_eval_shape(
    fun: Callable[..., tuple[_M, _C]], /, *args: Any, **kwargs: Any
) -> tuple[_M, _C]: ...


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
        out, out_template = take_apart(call.run(data))
        # JAX would keep it, with the static values in it, as part of the output.
        outs.append(out_template)
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
    return applied(JaxprMaker, fun)


class JaxprMaker(Transformed[_P, tuple[Any, Any, Any]], Generic[_P]):
    """The result of [`equinox_like.filter_make_jaxpr`][]."""

    _transformation_ = "filter_make_jaxpr"

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Any, Any, Any]:
        jaxpr, structs, _, template = trace(self.__wrapped__, args, kwargs)
        return jaxpr, template.alone(structs), template.fill([None] * len(structs))


def trace(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_data: Callable[[Any], bool] = is_array_or_struct,
) -> tuple[Any, list[jax.ShapeDtypeStruct], Template, Template]:
    """The jaxpr, its output structs, and the rests of the arguments and the output."""
    data, template = take_apart((args, kwargs), is_data)
    out_template: Any = None

    def flat(data):
        nonlocal out_template
        args, kwargs = template.fill(data)
        out, out_template = take_apart(fun(*args, **kwargs))
        return out

    show_as_call(flat, fun, args, kwargs, None, is_data)
    jaxpr, structs = jax.make_jaxpr(flat, return_shape=True)(data)
    return jaxpr, structs, template, out_template


@frames_hidden
def cached_filter_eval_shape(
    fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """[`equinox_like.filter_eval_shape`][], with a cache of its results.

    The cache key holds the function, static values, structures, shapes, dtypes, and JAX's
    context. Static values must be hashable, else it raises `TypeError`.
    [`equinox_like.clear_caches`][] empties the cache.
    """
    data, skeleton = split_data((fn, args, kwargs), is_array_or_struct)
    # Weak types and shardings are not part of the cache key.
    return unpack(_jitted(skeleton).eval_shape([*map(jax_struct_of, data)]))


def split_data(
    tree: Any, is_data: Callable[[Any], bool] = is_array
) -> tuple[list[Any], Skeleton]:
    """The data leaves; and the tree without them, which can be the key of a cache.

    **Raises:**

    `TypeError` if another leaf cannot be hashed, naming its path.
    """
    try:
        groups, skeleton = split(tree, lambda x: "data" if is_data(x) else STATIC)
    except ValueError as e:
        raise TypeError(str(e)) from None
    return groups.get("data", []), skeleton


def merge_data(data: Sequence[Any], skeleton: Skeleton) -> Any:
    return merge({"data": data}, skeleton)


# One for each structure with its static leaves; JAX caches its traces by shapes, dtypes
# and context.
# The functions that are kept keep what they and their static values read alive.
@functools.lru_cache(256)
def _jitted(skeleton: Skeleton) -> Any:
    def flat(data):
        fun, args, kwargs = merge_data(data, skeleton)
        return pack(fun(*args, **kwargs))

    return jax.jit(flat)


on_clear(_jitted.cache_clear)


@frames_hidden
def filter_closure_convert(
    fn: Callable[_P, _T], *args: Any, **kwargs: Any
) -> "ClosureConverted[_P, _T]":
    """Turns a function into a pytree whose leaves are the arrays that it captures.

    A function that closes over a traced array cannot, for example, be an argument of a
    function with a custom derivative, as JAX would not see that array. The converted
    function can.

    **Arguments:**

    - `fn`: any callable.
    - `*args`, `**kwargs`: example arguments; a `jax.ShapeDtypeStruct` may stand for an
        array. Everything that is not an array is static.

    **Returns:**

    A callable pytree whose leaves, its attribute `consts`, are the arrays that `fn`
    closes over or holds. `in_struct`, a pair of `args` and `kwargs`, and `out_struct`
    describe what it takes and returns. A plain function without a closure is not
    traced, but called.

    **Raises:**

    When called: `ValueError` if shapes, dtypes, structure or static values are not those
    of the examples.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def scale_by(factor):
            return lambda x: factor * x

        factor = jnp.asarray(2.0)
        scale = eqx.filter_closure_convert(scale_by(factor), jnp.ones(3))
        assert scale.consts[0] is factor
        assert scale(jnp.ones(3)).tolist() == [2, 2, 2]
        ```
    """
    require_callable(fn, "filter_closure_convert")
    if _captures_nothing(fn):
        data, template = take_apart((args, kwargs), is_array_or_struct)
        structs = tuple(map(jax_struct_of, data))
        return ClosureConverted([], name_of(fn), fn, None, structs, template, None)
    jaxpr, out_structs, template, out_template = trace(fn, args, kwargs)
    structs = tuple(map(struct_of, jaxpr.in_avals))
    out = out_structs, out_template
    consts, program = list(jaxpr.consts), without_constants(jaxpr)
    return ClosureConverted(consts, name_of(fn), None, program, structs, template, out)


def _captures_nothing(fn: Any) -> bool:
    return (
        isinstance(fn, types.FunctionType)
        and fn.__closure__ is None
        and not any(
            map(is_array, jtu.tree_leaves((fn.__defaults__, fn.__kwdefaults__)))
        )
    )


class ClosureConverted(Function, Generic[_P, _T]):
    """The result of [`equinox_like.filter_closure_convert`][]."""

    consts: list[Any]
    _name: str = field(static=True)
    _fun: Any = field(static=True)  # called if there is no jaxpr
    # A leaf, as in Equinox, because libraries look for such leaves.
    _jaxpr: Any
    _structs: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)
    _template: Template = field(static=True)
    _out: Any = field(static=True)

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # A struct that stood for an array may be one again, which `_fun` gets as it is.
        data, template = take_apart((args, kwargs), is_array_or_struct)
        given = tuple(map(jax_struct_of, data))
        if template != self._template or given != self._structs:
            raise self._mismatch(template.fill(given))
        if self._jaxpr is None:
            return self._fun(*args, **kwargs)
        return self._out[1].fill(eval_jaxpr(self._jaxpr, self.consts, *data))

    @property
    def in_struct(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._template.fill(self._structs)

    @property
    def out_struct(self) -> Any:
        if self._jaxpr is None:
            args, kwargs = self.in_struct
            return filter_eval_shape(self._fun, *args, **kwargs)
        structs, template = self._out
        return template.fill(structs)

    def __repr__(self) -> str:
        return f"<closure-converted {self._name}, consts={tree_pformat(self.consts)}>"

    def _mismatch(self, given: tuple[Any, Any]) -> ValueError:
        found = itertools.chain.from_iterable(
            tree_differences(name, old, new, is_array_or_struct, describe_array)
            for name, old, new in zip(
                ("args", "kwargs"), self.in_struct, given, strict=True
            )
        )
        return ValueError(
            f"The closure-converted `{self._name}` takes only arguments like those that "
            f"it was converted for: {next(found, 'the structures differ.')}"
        )
