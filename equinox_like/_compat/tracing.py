"""Tracers, what JAX is tracing now, and functions that its transformations have returned.

JAX has no stable way to ask. Serves jax 0.10 to 0.12.

- `Tracer` is `jax.core.Tracer`, the only name for the class. Not every tracer is a
  `jax.Array`: one that stands for a `jax.Ref` is not.
- A transformation outside of compiled functions computes with arrays, which its tracers
  hold as `val` (`vmap`) or `primal` (derivatives). A compiled function that it calls waits
  for them if it holds a check. If they are not found, the call does not wait, and JAX
  raises the error when the result is used.
- `at_top_level` is needed because JAX donates buffers also under eager `vmap`, `grad` and
  `vjp`, where the caller still needs them. It is `jax._src.core.trace_state_clean`, which
  takes 0.2 us a call. The fallback is `jax.extend.core.get_opaque_trace_state`, which takes
  0.35 us, and whose module is slow to import.
- `trace_context` explains why a function is retraced. It is
  `jax._src.config.trace_context`, which is in JAX's cache keys. The fallback is the values
  of `jax.config`.
- `current_trace` tells whether two operations belong to one trace. It is in
  `jax._src.core.trace_ctx`. Without it the buffers of loops assume that they do not, and
  the derivative of reading a buffer is slower. A Ref that a compiled function makes and
  returns is then a tracer in place of an error.
- `mapped_at_once` is needed by `filter_invertible`: `jax.custom_batching.custom_vmap` has
  no reverse mode, so it is called only where a `vmap` applies its rule immediately. It
  reads the axis data of a trace. The fallback is to answer no, which only costs memory.
- `scope_type` is the class of what `jax.named_scope` returns. To make an instance takes
  0.1 us less than to call `jax.named_scope`, as long as its only argument is the name.
- A function that `jax.vmap` returned is recognised by its name and by JAX's file. This is
  needed by containers, since such a function would map a PRNG key passed by keyword. The
  fallback is to answer no; JAX then raises its own error about that key.
- What a function of JAX wraps is its `__wrapped__`. JAX does not set that if the docstring
  of what is wrapped has braces; then it is among the free variables. Without it, a Module
  does not warn that such a function hides arrays.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer as Tracer

from . import private

_HOLD = ("val", "primal")


def scope_type(name: str) -> Callable[[str], Any]:
    """What makes the context manager `jax.named_scope(name)`, faster than that."""
    return type(jax.named_scope(name))


def known_array(x: Any) -> jax.Array | None:
    """The array that `x` is or stands for; `None` if it is known only when it runs."""
    while isinstance(x, Tracer):
        held = (getattr(x, name, None) for name in _HOLD)
        x = next((y for y in held if isinstance(y, Tracer | jax.Array)), None)
    return x if isinstance(x, jax.Array) else None


def within_program() -> bool:
    """Whether JAX is tracing a program or a part of one, as under `jax.jit`.

    Then every result is a tracer, even if it depends on no argument.
    """
    return not at_top_level() and isinstance(lax.neg(np.int32(0)), Tracer)


def find_top_level(core: Any) -> Callable[[], bool]:
    """`at_top_level`, from `jax._src.core` or by public means."""
    return getattr(core, "trace_state_clean", None) or by_opaque_state()


def by_opaque_state() -> Callable[[], bool]:
    """`at_top_level` by comparison with the trace state of a new thread."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    state = importlib.import_module("jax.extend.core").get_opaque_trace_state
    with ThreadPoolExecutor(1) as pool:
        clean = pool.submit(state).result()
    return lambda: state() == clean


def find_context(config: Any) -> Callable[[], Any]:
    """`trace_context`, from `jax._src.config` or by public means."""
    return getattr(config, "trace_context", lambda: tuple(settings().items()))


def jit_is_disabled() -> bool:
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


def settings() -> dict[str, Any]:
    """JAX's settings, by their names."""
    names = getattr(jax.config, "values", ())
    return {name: getattr(jax.config, name, None) for name in names}


_core = private("core")

at_top_level: Callable[[], bool] = find_top_level(_core)
"""Whether no JAX transformation is active in this thread."""

trace_context: Callable[[], Any] = find_context(private("config"))
"""Equal in two calls if a trace of the same function and arguments can be reused."""


def find_trace(core: Any) -> Callable[[], Any]:
    """`current_trace`, from `jax._src.core`; otherwise a new object at each call."""
    if hasattr(core, "trace_ctx"):
        return lambda: core.trace_ctx.trace
    return object


current_trace: Callable[[], Any] = find_trace(_core)
"""The trace that processes operations now (or evaluates them); compare it by `is`."""


def is_of_current_trace(x: Any) -> bool:
    """Whether `x` is a tracer of the current trace, not an array or an outer tracer."""
    return isinstance(x, Tracer) and getattr(x, "_trace", None) is current_trace()


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
