"""Is `vmap` the innermost transformation, and are some arrays mapped by it? Did it make
this function?

JAX has no public way to ask. Serves jax 0.10 to 0.12, by `jax._src.core.trace_ctx` and
what a trace says about its axis. Needed by `filter_invertible`:
`jax.custom_batching.custom_vmap` has no reverse mode, so that it may only be called
where its rule is asked at once. The fallback is to say no, which costs memory, and
nothing else.

What `jax.vmap` returns is known by the name of the function in JAX's file. Needed by
containers, as it would map a PRNG key passed by keyword. The fallback is to say no, and
then JAX's error about that key.
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
    """Whether a `vmap` maps one of `arrays` right now, its axis without name or mesh."""
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
    """Whether `jax.vmap` returned `fun`, or another function that is wrapped around it."""
    while fun is not None:
        # JAX's frame filter is around it, and has it as a free variable.
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
