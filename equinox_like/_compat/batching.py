"""Is `vmap` the innermost transformation, and are some arrays mapped by it?

JAX has no public way to ask. Serves jax 0.10 to 0.12, by `jax._src.core.trace_ctx` and what
a trace tells of its axis. Needed by `filter_invertible`: `jax.custom_batching.custom_vmap`
has no reverse mode, so that it may only be called where its rule is asked at once. The
fallback is to say no, which costs memory, and nothing else.
"""

import importlib
from collections.abc import Iterable
from typing import Any


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
