"""Compiles loops and branches that are called at top level, outside of a program.

`jax.lax` caches what it compiles for a loop by the identity of the user's functions. Ours
wrap these in new functions at each call, so JAX would compile each call. At top level they
are therefore called through `filter_jit`. What is compiled lives as long as the user's
functions. As in JAX, a variable that these read is a constant of what is compiled.
"""

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._annotations import signature_of
from .._compat.tracing import at_top_level, jit_is_disabled
from .._core.base import on_clear
from .._jit import filter_jit
from .._jit.donation import Donate
from .._module.values import JITTED
from .._tree.filters import is_array
from .._tree.strict import has_hash

_compiled: Final[dict[Any, Callable[..., Any]]] = {}
on_clear(_compiled.clear)


def run_cached(
    control: Callable[..., Any],
    functions: Sequence[Any],
    /,
    *args: Any,
    donate: Donate = "none",
) -> Any:
    """`control(functions, *args)`, compiled once for each `functions` at top level.

    Only plain and jitted functions are cached: a method or a Module is a new object in
    each call.
    `donate` is the same for all calls with this `control`.
    """
    is_cached = (
        at_top_level()
        and not jit_is_disabled()
        and all(type(f) in (types.FunctionType, JITTED) for f in functions)
        and all(is_array(x) or has_hash(x) for x in jtu.tree_leaves(args))
    )
    if not is_cached:
        return control(functions, *args)
    key = control, *map(id, functions)
    found = _compiled.get(key)
    if found is None:
        found = _compiled[key] = _compile(key, control, functions, donate)
    return found(*args)


def as_python(option: Any) -> Any:
    """A number in an array as Python's: `run_cached` would trace it."""
    return option.item() if is_array(option) else option


def _compile(key: Any, control: Any, functions: Sequence[Any], donate: Donate) -> Any:
    """A loop of certain functions, compiled. It holds neither these nor what they read."""

    # A function is forgotten when it is freed, before another object can have its `id`.
    # The table is bound, since a global variable may be `None` at exit.
    def forget(_, compiled=_compiled):
        compiled.pop(key, None)

    references = [weakref.ref(f, forget) for f in functions]

    def call(*args):
        return control([reference() for reference in references], *args)

    signature = signature_of(control)
    _, *parameters = signature.parameters.values()
    # Messages about arguments show these names.
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    call.__name__ = call.__qualname__ = control.__name__.lstrip("_")
    return filter_jit(call, donate=donate)
