"""Which arguments of a compiled program give their buffer to an output.

Serves jax 0.10 to 0.12. XLA says it in the first line of the compiled program, by the
number of the parameter. JAX drops arguments that a program does not use, and tells which
only in the private `_lowering.compile_args`. Without that, programs that use all their
arguments are still told right; for the others the answer is `None`.
"""

import re
from typing import Any

import jax.tree_util as jtu

# In `input_output_alias={ {0}: (2, {}, may-alias), ... }`, the 2.
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")


def reused_arguments(lowered: Any, compiled: Any) -> list[bool | None] | None:
    """For each flat argument whether an output takes its buffer; `None` if unused."""
    count = len(jtu.tree_leaves(lowered.args_info))
    kept = _kept_arguments(lowered, count)
    if _parameter_count(lowered) != len(kept):
        return None
    header = compiled.as_text().partition("\n")[0]
    aliased = set(map(int, _ALIASED.findall(header)))
    reused: list[bool | None] = [None] * count
    for parameter, index in enumerate(kept):
        reused[index] = parameter in aliased
    return reused


def _kept_arguments(lowered: Any, count: int) -> list[int]:
    try:
        return sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return list(range(count))


def _parameter_count(lowered: Any) -> int | None:
    for operation in lowered.compiler_ir("stablehlo").body.operations:
        attributes = operation.attributes
        if "sym_name" in attributes and str(attributes["sym_name"]) == '"main"':
            return len(attributes["arg_attrs"]) if "arg_attrs" in attributes else None
    return None
