"""Traced arrays that JAX does not see: in attributes of objects that are not pytrees, in
functions and generators, and a `jax.Ref` in the output, which is not an array.

JAX traces a function once. An array of that trace that such an object keeps is a tracer
for ever: later calls of the function run its program, and not its Python code.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

import jax.tree_util as jtu

from .._compat.tracing import Tracer, is_of_current_trace
from .._module.values import leaves_of
from .._tree.filters import is_array
from .._tree.match import leaf_name
from .._tree.nodes import MAKE_A_PYTREE


def check_no_leaked_tracers(out: Any) -> None:
    """Raises for an object with arrays of the trace in the output of a function, and for
    a `jax.Ref` of the trace.

    It would be returned by every call, with the tracers of the first one.
    """
    for i, leaf in enumerate(jtu.tree_leaves(out)):
        if is_array(leaf):
            continue
        kind = type(leaf).__name__
        if is_of_current_trace(leaf):
            raise TypeError(
                "The function returned a `jax.Ref` that exists only while it is traced, at "
                f"`{leaf_name(out, i, 'out')}`. JAX does not support that. Make the "
                "Ref outside of compiled functions, or return its value, `ref[...]`."
            )
        if any(map(_holds_tracer, _local_variables(leaf))):
            raise TypeError(
                f"The function returned a {kind} at `{leaf_name(out, i, 'out')}`, whose "
                "code would run after the trace. Return a list in place of `yield`, and "
                "do not compile an `async` function, but what it calls."
            )
        for name, value in _captured(leaf).items():
            if any(map(is_of_current_trace, leaves_of(value))):
                raise TypeError(
                    f"The function returned a {kind} at `{leaf_name(out, i, 'out')}` that "
                    f"captures an array of its trace, in `{name}`. Return "
                    "`equinox_like.Partial(f, array)`, whose arguments are a part of the "
                    "tree, or a Module with the array in a field."
                )
        for name, value in _attributes(leaf).items():
            if _holds_tracer(value):
                raise TypeError(
                    f"The function returned an instance of `{kind}` at "
                    f"`{leaf_name(out, i, 'out')}`, with an array in its attribute "
                    f"`{name}`. But {kind} is not a pytree, so JAX does not see the "
                    f"array: {MAKE_A_PYTREE}"
                )


class Assignments:
    """The traced arrays that a function assigns to attributes of its static arguments."""

    def __init__(self, statics: Iterable[Any]):
        """To be made before the function is traced."""
        self._before = [(x, _attributes(x)) for x in statics]

    def warnings(self, function: str) -> list[str]:
        """A warning for each of them."""
        return [
            f"`{function}` assigned an array to the attribute `{name}` of a "
            f"`{type(x).__name__}`, which is not a pytree. That runs only when the "
            "function is traced: later calls skip it, and use the values that were read "
            f"then. Pass `{name}` as an argument, return the new one, and assign it "
            "after the call."
            for x, before in self._before
            for name, value in _attributes(x).items()
            if value is not before.get(name) and _holds_tracer(value)
        ]


def _local_variables(x: Any) -> Iterable[Any]:
    """The variables in a generator or coroutine."""
    name = _FRAMES.get(type(x))
    frame = getattr(x, name) if name else None
    return () if frame is None else frame.f_locals.values()


_FRAMES = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}


def _captured(x: Any) -> dict[str, Any]:
    """What a function or partial was made with, by name."""
    if isinstance(x, functools.partial):
        return {"args": x.args, "keywords": x.keywords}
    if isinstance(x, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable without a value
            return dict(inspect.getclosurevars(x).nonlocals)
    return {}


def _attributes(x: Any) -> dict[str, Any]:
    attributes = getattr(x, "__dict__", None)
    if type(attributes) is not dict or isinstance(x, types.FunctionType | type):
        return {}
    return attributes.copy()  # another thread may change them


def _holds_tracer(value: Any) -> bool:
    return any(isinstance(x, Tracer) for x in leaves_of(value))
