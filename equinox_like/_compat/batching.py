"""Whether `vmap` is the innermost transformation and maps given arrays, and whether
`jax.vmap` returned a given function.

JAX has no public way to ask. Serves jax 0.10 to 0.12, by `jax._src.core.trace_ctx` and
the axis data of a trace. The first is needed by `filter_invertible`:
`jax.custom_batching.custom_vmap` has no reverse mode, so it is called only where a
`vmap` applies its rule immediately. The fallback is to answer no, which only costs
memory.

A function that `jax.vmap` returned is recognised by its name and by JAX's file. This is
needed by containers, since such a function would map a PRNG key passed by keyword. The
fallback is to answer no; JAX then raises its own error about that key.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax


def find(core: str) -> Any:
    """The module with `trace_ctx`, or `None`."""
    try:
        module = importlib.import_module(core)
    except ImportError:
        return None
    return module if hasattr(module, "trace_ctx") else None


_core = find("jax._src.core")


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
    if getattr(code, "co_name", None) != name:
        return False
    return code.co_filename.startswith(os.path.dirname(jax.__file__) + os.sep)
