"""What a lowered program does with each of its arguments.

Serves jax 0.10 to 0.12. JAX drops arguments that a program does not use, and tells which
only in the private `_lowering.compile_args`. Without that, programs that use all their
arguments are still told right; for the others the answer is `None`.
"""

from typing import Any

import jax.tree_util as jtu


def reused_arguments(lowered: Any) -> list[bool | None] | None:
    """For each flat argument whether an output may take its buffer; `None` if unused."""
    count = len(jtu.tree_leaves(lowered.args_info))
    kept = _kept_arguments(lowered, count)
    attributes = _main_argument_attributes(lowered)
    if attributes is None or len(attributes) != len(kept):
        return None
    reused: list[bool | None] = [None] * count
    for index, names in zip(kept, attributes, strict=True):
        reused[index] = "tf.aliasing_output" in names or "jax.buffer_donor" in names
    return reused


def _kept_arguments(lowered: Any, count: int) -> list[int]:
    try:
        return sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return list(range(count))


def _main_argument_attributes(lowered: Any) -> Any:
    for operation in lowered.compiler_ir("stablehlo").body.operations:
        attributes = operation.attributes
        if "sym_name" in attributes and str(attributes["sym_name"]) == '"main"':
            return list(attributes["arg_attrs"]) if "arg_attrs" in attributes else None
    return None
