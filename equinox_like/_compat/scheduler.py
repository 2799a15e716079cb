"""XLA's option to run operations on the CPU in the order that needs the least memory.

By default the CPU's scheduler prefers to run operations concurrently. In a program that
initialises the weights of many layers, it then holds the temporary arrays of all layers
at the same time. Serves jax 0.10 to 0.12. If the option is unknown, the default order
is used. The schedulers of GPUs and TPUs already save memory.
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
    """Whether the compiler accepts these options."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except Exception:
        return False
    return True
