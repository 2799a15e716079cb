"""Are we under a transformation? JAX has no stable way to ask.

Needed because JAX donates buffers also under eager `vmap`, `grad` and `vjp`, where the
caller still needs them. Serves jax 0.10 to 0.12: `jax._src.core.trace_state_clean`, 0.2 us
a call. The fallback is `jax.extend.core.get_opaque_trace_state`, which takes 0.35 us, and
whose module alone takes as long to import as this whole library may.
"""

import importlib
import threading
from collections.abc import Callable
from typing import Any


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


def _core() -> Any:
    try:
        return importlib.import_module("jax._src.core")
    except ImportError:
        return None


at_top_level: Callable[[], bool] = find(_core())
"""Whether no transformation of JAX is under way in this thread."""
