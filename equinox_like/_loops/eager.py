"""Loops and branches at top level, outside of compiled functions.

`jax.lax` caches what it compiles for a loop by the identity of the user's functions. Ours
wrap these in new functions at each call, so JAX would compile each call. At top level they
are therefore called through `filter_jit`. What is compiled lives as long as the user's
functions, and until a variable that they read has another value.
"""

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax.tree_util as jtu
import numpy as np

from .._annotations import signature_of
from .._compat.trace_state import at_top_level
from .._core.base import jit_is_disabled
from .._core.caches import on_clear
from .._jit import filter_jit
from .._jit.donation import Donate
from .._jit.programs import of_function
from .._module.values import JITTED
from .._tree.filters import is_array
from .._tree.strict import has_hash

_compiled: Final[dict[Any, "_Compiled"]] = {}
# After more traces, all programs for the same functions are dropped: each Python number in
# the arguments needs a program of its own.
_MOST: Final = 128
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
    variables = list(map(_variables_of, functions))
    found = _compiled.get(key)
    if found is None or not found.is_of(variables):
        found = _compiled[key] = _Compiled(key, control, functions, variables, donate)
    if len(found.traces) > _MOST:
        found.call.clear_cache()
        found.traces.clear()
    return found.call(*args)


def as_python(option: Any) -> Any:
    """A number of NumPy as Python's: `run_cached` would trace it, as it does arrays."""
    return option.item() if isinstance(option, np.generic) else option


class _Compiled:
    """A loop of certain functions, compiled. Holds neither these nor what they read."""

    def __init__(
        self,
        key: Any,
        control: Any,
        functions: Sequence[Any],
        variables: Sequence["_Variables"],
        donate: Donate,
    ):
        # A function is forgotten when it is freed, before another object can have its
        # `id`. The table is bound, since a global variable may be `None` at exit.
        def forget(_, compiled=_compiled):
            compiled.pop(key, None)

        references = [weakref.ref(f, forget) for f in functions]

        self.traces = traces = []

        def call(*args):
            traces.append(None)
            return control([reference() for reference in references], *args)

        signature = signature_of(control)
        _, *parameters = signature.parameters.values()
        # Messages about arguments show these names.
        vars(call)["__signature__"] = signature.replace(parameters=parameters)
        call.__name__ = call.__qualname__ = control.__name__.lstrip("_")
        self.call = filter_jit(call, donate=donate)
        self._variables = list(map(weakref.ref, variables))

    def is_of(self, variables: Sequence["_Variables"]) -> bool:
        """Whether it was compiled when the functions read these."""
        return [reference() for reference in self._variables] == variables


class _Variables:
    """The objects that the variables outside a function were, when it read them."""

    def __init__(self, values: Iterable[Any]):
        self._references = [_reference(value) for value in values]

    def are_current(self, function: Any) -> bool:
        """Whether the variables are the same objects now."""
        values = list(_values_read(function))
        return len(values) == len(self._references) and all(
            reference() is value
            for reference, value in zip(self._references, values, strict=True)
        )


def _variables_of(function: Any) -> _Variables:
    """The same object for as long as the function's variables do not change.

    It is stored with the function. A list in a variable may hold the function, and the
    garbage collector could not free such a cycle through a global table.
    """
    if type(function) is JITTED:
        function = getattr(function, "__wrapped__", None)
    if type(function) is not types.FunctionType:
        return _NO_VARIABLES
    programs = of_function(function)
    known = programs.variables
    if known is None or not known.are_current(function):
        known = programs.variables = _Variables(_values_read(function))
    return known


# Of what a jitted callable that is no function reads, nothing is known.
_NO_VARIABLES: Final = _Variables(())


def _values_read(function: Any) -> Iterator[Any]:
    """The values of the variables outside a function that it reads.

    Also of those that functions of the same module read, which it calls.
    """
    todo, seen = [function], {function}
    for function in todo:
        values = []
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                pass
        codes = [function.__code__]
        for code in codes:
            codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
            known = function.__globals__
            values += [known[name] for name in code.co_names if name in known]
        for value in values:
            yield value
            if (
                type(value) is types.FunctionType
                and value not in seen
                and value.__globals__ is function.__globals__
            ):
                todo.append(value)
                seen.add(value)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
