"""What becomes of the buffers of the arguments of a compiled program.

Serves jax 0.10 to 0.12. XLA says it in the first line of the compiled program, by the
number of the parameter. JAX drops arguments that a program does not use, and says which
only in the private `_lowering.compile_args`. Without that, programs that use all their
arguments are still recognised; for the others the answer is `None`. So it is if JAX has
offered buffers to XLA, and nothing of that is found in the line: then XLA may say it in
other words.
"""

import enum
import re
from typing import Any

import jax.tree_util as jtu

# In `input_output_alias={ {0}: (2, {}, may-alias), ... }` the 0 and the 2. A sole output
# has no number.
_ALIASED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
# In `buffer_donor={ (2, {}), ... }` what is within.
_DONORS = re.compile(r"buffer_donor=\{ (.*?) \}(?:,|$)")
_DONOR = re.compile(r"\((\d+), \{")
# How JAX offers a buffer to XLA.
_OFFERS = ("tf.aliasing_output", "jax.buffer_donor")


class Buffer(enum.Enum):
    """What becomes of a buffer that no output reuses."""

    PRUNED = "the program does not use the argument"
    DONOR = "XLA may reuse it for anything"
    KEPT = "the caller keeps it"


def buffers_of(lowered: Any, compiled: Any) -> list[int | Buffer] | None:
    """For each flat argument the number of the output that takes its buffer, or a fate."""
    count = len(jtu.tree_leaves(lowered.args_info))
    kept = _kept_arguments(lowered, count)
    parameters = _parameters(lowered)
    if parameters is None or len(parameters) != len(kept):
        return None
    header = compiled.as_text().partition("\n")[0]
    is_offered = any(offer in str(x) for x in parameters for offer in _OFFERS)
    if is_offered and not (_ALIASED.search(header) or _DONORS.search(header)):
        return None
    fates: list[int | Buffer] = [Buffer.PRUNED] * count
    for index in kept:
        fates[index] = Buffer.KEPT
    for donors in _DONORS.findall(header):
        for parameter in _DONOR.findall(donors):
            fates[kept[int(parameter)]] = Buffer.DONOR
    for output, parameter in _ALIASED.findall(header):
        fates[kept[int(parameter)]] = int(output or 0)
    return fates


def unused_arguments(lowered: Any) -> list[int]:
    """The flat arguments that the program does not use, as far as JAX says."""
    count = len(jtu.tree_leaves(lowered.args_info))
    return sorted(set(range(count)) - set(_kept_arguments(lowered, count)))


def _kept_arguments(lowered: Any, count: int) -> list[int]:
    try:
        return sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return list(range(count))


def _parameters(lowered: Any) -> list[Any] | None:
    """The attributes of each parameter of the program."""
    for operation in lowered.compiler_ir("stablehlo").body.operations:
        attributes = operation.attributes
        if "sym_name" in attributes and str(attributes["sym_name"]) == '"main"':
            return list(attributes["arg_attrs"]) if "arg_attrs" in attributes else None
    return None
