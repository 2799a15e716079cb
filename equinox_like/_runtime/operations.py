"""What each Module of a model returns, and how many operations it takes.

The model is traced, and nothing is computed. Watched copies of the Modules (`harvest.py`)
mark what they return, and enter a named scope. JAX notes the scopes around each equation of
a jaxpr, also under `jax.vmap` and in derivatives, so an equation tells which Modules it
belongs to.
"""

import collections
import math
import re
from typing import Any, Final, NamedTuple

import jax

from .._compat.jaxpr import name_and_params, opened, programs_in, scopes_of
from .._transforms.trace import trace
from .harvest import Mark, See, class_of, map_modules, mark_p, with_step

# `capture` marks values with a depth of 1 or more.
_DEPTH: Final = 0
_SCOPE: Final = re.compile(r"eqx_layer_(\d+)_")


class LayerRow(NamedTuple):
    """One layer that was called, in [`equinox_like.nn.Summary`][].

    **Attributes:**

    - `path`: of the layer; that of the model itself is empty. `layer`: its class.
    - `output`: what it returned, with a `jax.ShapeDtypeStruct` for each array; a tuple of
        its outputs if it was called more than once. Arrays have the axes of `jax.vmap`
        and of the steps of a scan in front.
    - `operations`: the number of multiplications and additions in its matrix products and
        convolutions, and in those of the layers within it. A multiplication and an
        addition are two. Within `jax.shard_map` they are those of one device.
    - `share`: of the operations of the whole call, from 0 to 1.
    """

    path: str
    layer: str
    output: Any
    operations: int
    share: float


def layer_rows(model: Any, args: Any, kwargs: Any) -> tuple[list[LayerRow], int]:
    """A row for each Module that `model(*args, **kwargs)` calls, in the order in which
    they return, and the number of all operations."""
    modules: list[tuple[str, str]] = []
    outputs: dict[str, list[Any]] = {}
    operations: collections.Counter[str] = collections.Counter()

    def watched(path, node):
        i = str(len(modules))
        modules.append((path, class_of(node).__name__))
        return with_step(node, See(Mark(i, _DEPTH), "outputs", f"eqx_layer_{i}_"))

    def call(model, args, kwargs):
        return model(*args, **kwargs)

    def read(program, times, axes, around):
        """Reads a program that runs `times`, within scans over `axes`."""
        for equation in opened(program)[0].eqns:
            name, params = name_and_params(equation)
            if equation.primitive is mark_p and params["mark"].depth == _DEPTH:
                avals = [x.aval for x in equation.outvars]
                arrays = [
                    jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype) for x in avals
                ]
                found = outputs.setdefault(params["mark"].path, [])
                found.append(params["rest"].fill(arrays))
            within = around.union(_SCOPE.findall(scopes_of(equation)))
            number = times * _operations(name, params, equation)
            operations.update(dict.fromkeys(within, number))
            steps = [params["length"]] if name in ("scan", "Scan3") else []
            for inner in programs_in(params):
                read(inner, times * math.prod(steps), (*axes, *steps), within)

    inputs = map_modules(model, watched), args, kwargs
    read(trace(call, inputs, {})[0], 1, (), {"all"})
    total, rows = operations["all"], []
    for i, found in outputs.items():
        output, number = found[0] if len(found) == 1 else tuple(found), operations[i]
        rows.append(LayerRow(*modules[int(i)], output, number, number / (total or 1)))
    return rows, total


def _operations(name: str, params: dict[str, Any], equation: Any) -> int:
    if name not in ("dot_general", "conv_general_dilated"):
        return 0
    size = math.prod(equation.outvars[0].aval.shape)
    left, right = (x.aval.shape for x in equation.invars[:2])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(left[axis] for axis in contracted)
    channels = right[params["dimension_numbers"].rhs_spec[0]]
    return 2 * size * math.prod(right) // max(channels, 1)
