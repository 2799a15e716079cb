"""XLA's option to run operations on the CPU in the order that takes the least memory.

By default the CPU's scheduler prefers what can run at once. In a program that draws the
weights of many layers, it then keeps the temporary arrays of all layers at the same
time. Serves jax 0.10 to 0.12; without the option a program is the default one. GPUs and
TPUs save memory anyway.
"""

import functools
from typing import Final

import jax

_OPTION: Final = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def least_memory(platform: str) -> dict[str, str]:
    """The `compiler_options` of `jax.jit` for this platform."""
    return (
        dict(_OPTION) if platform == "cpu" and is_known(tuple(_OPTION.items())) else {}
    )


@functools.cache
def is_known(options: tuple[tuple[str, str], ...]) -> bool:
    """Whether the compiler takes these options."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except Exception:
        return False
    return True
