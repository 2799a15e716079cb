"""Are we under a transformation, and what does a trace depend on beside its arguments?

JAX has no stable way to ask. Serves jax 0.10 to 0.12.

The first is needed because JAX donates buffers also under eager `vmap`, `grad` and `vjp`,
where the caller still needs them: `jax._src.core.trace_state_clean`, 0.2 us a call. The
fallback is `jax.extend.core.get_opaque_trace_state`, which takes 0.35 us, and whose module
alone takes as long to import as this whole library may.

The second says why a function is retraced: `jax._src.config.trace_context`, which JAX
itself compares. The fallback are the settings that have a name.

The third says whether two operations belong to one trace: `jax._src.core.trace_ctx`.
Without it the buffers of loops do as if they did not, and reading one has a slower
derivative.
"""

import importlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from .tracer import Tracer


def within_program() -> bool:
    """Whether JAX traces a whole program now, as `jax.jit` does, or a part of one.

    Then everything is a tracer, also what depends on no argument.
    """
    return isinstance(lax.neg(np.int32(0)), Tracer)


def find(core: Any) -> Callable[[], bool]:
    """`at_top_level`, from `jax._src.core` or from what is public."""
    try:
        return core.trace_state_clean
    except AttributeError:
        return by_opaque_state()


def by_opaque_state() -> Callable[[], bool]:
    """The same by comparing with the state of a new thread, which is under no trace."""
    state = importlib.import_module("jax.extend.core").get_opaque_trace_state
    found = []
    thread = threading.Thread(target=lambda: found.append(state()))
    thread.start()
    thread.join()
    return lambda: state() == found[0]


def find_context(config: Any) -> Callable[[], Any]:
    """`trace_context`, from `jax._src.config` or from what is public."""
    try:
        return config.trace_context
    except AttributeError:
        return lambda: tuple(settings().items())


def settings() -> dict[str, Any]:
    """JAX's settings, by their names."""
    names = getattr(jax.config, "values", ())
    return {name: getattr(jax.config, name, None) for name in names}


def _private(name: str) -> Any:
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None


at_top_level: Callable[[], bool] = find(_private("core"))
"""Whether no transformation of JAX is under way in this thread."""

trace_context: Callable[[], Any] = find_context(_private("config"))
"""Equal if a trace of the same function and arguments can be reused."""


def find_trace(core: Any) -> Callable[[], Any]:
    """`current_trace`, from `jax._src.core`; else something new at each call."""
    if hasattr(core, "trace_ctx"):
        return lambda: core.trace_ctx.trace
    return object


current_trace: Callable[[], Any] = find_trace(_private("core"))
"""What traces right now, or evaluates: to be compared by `is`."""
