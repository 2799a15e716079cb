"""Whether `vmap` is the innermost transformation and maps given arrays, whether
`jax.vmap` returned a given function, and what a function of JAX wraps.

JAX has no public way to ask. Serves jax 0.10 to 0.12, by `jax._src.core.trace_ctx` and
the axis data of a trace. The first is needed by `filter_invertible`:
`jax.custom_batching.custom_vmap` has no reverse mode, so it is called only where a
`vmap` applies its rule immediately. The fallback is to answer no, which only costs
memory.

A function that `jax.vmap` returned is recognised by its name and by JAX's file. This is
needed by containers, since such a function would map a PRNG key passed by keyword. The
fallback is to answer no; JAX then raises its own error about that key.

What a function of JAX wraps is its `__wrapped__`. JAX does not set that if the docstring
of what is wrapped has braces; then it is among the free variables. Without it, a Module
does not warn that such a function hides arrays.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from .private import private

_core = private("core")


def mapped_at_once(arrays: Iterable[Any], core: Any = _core) -> bool:
    """Whether the innermost trace is a `vmap` that maps one of `arrays`.

    No, if the axis of the `vmap` has a name or belongs to a mesh.
    """
    try:
        trace = core.trace_ctx.trace
        axis, tag = trace.axis_data, trace.tag
        if axis.name is not core.no_axis_name or axis.spmd_name is not None:
            return False
        if axis.explicit_mesh_axis is not None:
            return False
    except AttributeError:
        return False
    return any(getattr(getattr(x, "_trace", None), "tag", None) is tag for x in arrays)


def wrapped_by(fun: Any) -> list[Any]:
    """What `fun` calls, if it is a wrapper: its `__wrapped__`, or what JAX keeps of it."""
    wrapped = getattr(fun, "__wrapped__", None)
    if wrapped is not None:
        return [wrapped]
    return [x for x in _free_variables(fun) if callable(x)] if _is_of_jax(fun) else []


def is_vmapped(fun: Any, name: str = "vmap_f") -> bool:
    """Whether `jax.vmap` returned `fun`, or a function that `fun` wraps."""
    while fun is not None:
        # JAX's traceback filter wraps it, and holds it as a free variable.
        if any(_is_called(f, name) for f in (fun, *_free_variables(fun))):
            return True
        fun = getattr(fun, "__wrapped__", None)
    return False


def _free_variables(fun: Any) -> Iterator[Any]:
    for cell in getattr(fun, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            pass


def _is_called(fun: Any, name: str) -> bool:
    code: Any = getattr(fun, "__code__", None)
    return getattr(code, "co_name", None) == name and _is_of_jax(fun)


def _is_of_jax(fun: Any) -> bool:
    file: Any = getattr(getattr(fun, "__code__", None), "co_filename", "")
    return file.startswith(os.path.dirname(jax.__file__) + os.sep)
