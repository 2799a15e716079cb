"""`filter_closure_convert`: arrays that a function closes over become pytree leaves."""

import itertools
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from .._compat.jaxpr import eval_jaxpr, without_constants
from .._core.base import frames_hidden, name_of, require_callable
from .._core.difference import tree_differences
from .._core.flat_call import Template, take_apart
from .._module.fields import field
from .._module.module import Module
from .._tree.arrays import describe_array, jax_struct_of, struct_of
from .._tree.filters import is_array, is_array_or_struct
from .._tree.format import tree_pformat
from .._tree.nodes import path_str
from .trace import filter_eval_shape, trace

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
        data, rest = take_apart((args, kwargs), is_array_or_struct)
        return ClosureConverted([], fn, None, map(jax_struct_of, data), rest, None)
    jaxpr, out_structs, rest, out_rest = trace(fn, args, kwargs)
    structs = map(struct_of, jaxpr.in_avals)
    out = out_structs, out_rest
    program = without_constants(jaxpr)
    return ClosureConverted(list(jaxpr.consts), fn, program, structs, rest, out)


def _captures_nothing(fn: Any) -> bool:
    return (
        isinstance(fn, types.FunctionType)
        and fn.__closure__ is None
        and not any(
            map(is_array, jtu.tree_leaves((fn.__defaults__, fn.__kwdefaults__)))
        )
    )


class ClosureConverted(Module, Generic[_P, _T]):
    """The result of [`equinox_like.filter_closure_convert`][]."""

    consts: list[Any]
    _name: str = field(static=True)
    _fun: Any = field(static=True)  # called if there is no jaxpr
    # A leaf, as in Equinox, because libraries look for such leaves.
    _jaxpr: Any
    _structs: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)
    _rest: Template = field(static=True)
    _out: Any = field(static=True)

    def __init__(self, consts, fn, jaxpr, structs, rest, out):
        self.consts = consts
        self._name = name_of(fn)
        self._fun = fn if jaxpr is None else None
        self._jaxpr = jaxpr
        self._structs = tuple(structs)
        self._rest = rest
        self._out = out

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # A struct that stood for an array may be one again, which `_fun` gets as it is.
        data, rest = take_apart((args, kwargs), is_array_or_struct)
        given = tuple(map(jax_struct_of, data))
        if rest != self._rest or given != self._structs:
            raise self._mismatch(rest.fill(given))
        if self._jaxpr is None:
            return self._fun(*args, **kwargs)
        for path, leaf in jtu.tree_leaves_with_path({"args": args, "kwargs": kwargs}):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"`{path_str(path[1:], path[0].key)}` of the closure-converted "
                    f"`{self._name}` is a `jax.ShapeDtypeStruct`, which stood for an "
                    "array when it was converted: pass an array."
                )
        return self._out[1].fill(eval_jaxpr(self._jaxpr, self.consts, *data))

    @property
    def in_struct(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._rest.fill(self._structs)

    @property
    def out_struct(self) -> Any:
        if self._jaxpr is None:
            args, kwargs = self.in_struct
            return filter_eval_shape(self._fun, *args, **kwargs)
        structs, rest = self._out
        return rest.fill(structs)

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
