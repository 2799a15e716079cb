"""Compiled programs: what becomes of the buffers of arguments, and how to save memory.

Serves jax 0.10 to 0.12.

- The first line of a compiled program states which buffers outputs reuse, by the index of
  the parameter. JAX drops arguments that a program does not use, and lists the others
  only in the private `_lowering.compile_args`. Without that list, the answer is `None`
  unless the program uses all its arguments. It is also `None` if JAX has offered buffers
  to XLA but the line mentions none, since XLA may have changed its format.
- By default the scheduler of XLA's CPU backend prefers to run operations concurrently. In a
  program that initialises the weights of many layers, it then holds the temporary arrays
  of all layers at the same time. An option has it take the order that needs the least
  memory. The schedulers of GPUs and TPUs already save memory.
"""

import enum
import re
from typing import Any, Final

import jax.tree_util as jtu

# Matches the 0 and the 2 in `input_output_alias={ {0}: (2, {}, may-alias), ... }`. The
# number of the output is missing if there is only one.
_ALIASED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
# Matches the content of `buffer_donor={ (2, {}), ... }`.
_DONORS = re.compile(r"buffer_donor=\{ (.*?) \}(?:,|$)")
_DONOR = re.compile(r"\((\d+), \{")
# The attributes by which JAX offers a buffer to XLA.
_OFFERS = ("tf.aliasing_output", "jax.buffer_donor")


class Buffer(enum.Enum):
    """What becomes of a buffer that no output reuses."""

    PRUNED = "the program does not use the argument"
    DONOR = "XLA may reuse it for anything"
    UNUSABLE = "it is donated, but the program cannot reuse it"
    NOT_DONATED = "JAX was not asked to donate it, or does not under `jax_debug_nans`"


def buffers_of(lowered: Any, compiled: Any) -> list[int | Buffer] | None:
    """For each flat argument, the index of the output that reuses its buffer, or a
    `Buffer`. `None` if this is not known."""
    arguments = jtu.tree_leaves(lowered.args_info)
    used = _used_arguments(lowered, len(arguments))
    parameters = _parameters(lowered)
    if parameters is None or len(parameters) != len(used):
        return None
    header = compiled.as_text().partition("\n")[0]
    is_offered = any(offer in str(x) for x in parameters for offer in _OFFERS)
    if is_offered and not (_ALIASED.search(header) or _DONORS.search(header)):
        return None
    outcomes: list[int | Buffer] = [Buffer.PRUNED] * len(arguments)
    for index in used:
        is_donated = arguments[index].donated
        outcomes[index] = Buffer.UNUSABLE if is_donated else Buffer.NOT_DONATED
    for donors in _DONORS.findall(header):
        for parameter in _DONOR.findall(donors):
            outcomes[used[int(parameter)]] = Buffer.DONOR
    for output, parameter in _ALIASED.findall(header):
        outcomes[used[int(parameter)]] = int(output or 0)
    return outcomes


def unused_arguments(lowered: Any) -> list[int]:
    """Indices of the flat arguments that the program does not use, as far as known."""
    count = len(jtu.tree_leaves(lowered.args_info))
    return sorted(set(range(count)) - set(_used_arguments(lowered, count)))


def _used_arguments(lowered: Any, count: int) -> list[int]:
    try:
        return sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return list(range(count))


def _parameters(lowered: Any) -> list[Any] | None:
    """The attributes of each parameter of the program, or `None` if not found."""
    for operation in lowered.compiler_ir("stablehlo").body.operations:
        attributes = operation.attributes
        if "sym_name" in attributes and str(attributes["sym_name"]) == '"main"':
            return list(attributes["arg_attrs"]) if "arg_attrs" in attributes else None
    return None


_OPTION: Final = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def least_memory(platform: str) -> dict[str, str]:
    """The `compiler_options` of `jax.jit` for this platform."""
    return dict(_OPTION) if platform == "cpu" else {}
