"""What each Module of a model returns, and how many operations it takes.

The model is traced, and nothing is computed. Watched copies of the Modules (`harvest.py`)
mark what they return, and enter a named scope. JAX notes the scopes around each equation of
a jaxpr, also under `jax.vmap` and in derivatives, so an equation tells which Modules it
belongs to.
"""

import collections
import math
import re
from typing import Any, Final

import jax

from .._compat.jaxpr import mapped_axes, name_and_params, opened, programs_in, scopes_of
from .._transforms.trace import trace
from .harvest import Mark, Scope, See, class_of, map_modules, mark_p, with_step

# `capture` marks values with a depth of 1 or more.
_DEPTH: Final = 0
_SCOPE: Final = re.compile(r"eqx_layer_(\d+)_")
_TOTAL: Final = "total"


class Calls:
    """What the Modules of a model return, and the operations of each, by their index.

    **Attributes:**

    - `modules`: the path and the class of each one.
    - `outputs`: a list for each one that is called, with an output for each call.
    - `operations`: multiplications and additions of matrix products and convolutions.
    """

    def __init__(self, model: Any, args: Any, kwargs: Any):
        self.modules: list[tuple[str, str]] = []
        self.outputs: dict[str, list[Any]] = {}
        self.operations: collections.Counter[str] = collections.Counter()

        def watched(path, node):
            index = str(len(self.modules))
            self.modules.append((path, class_of(node).__name__))
            scoped = with_step(node, Scope(f"eqx_layer_{index}_"))
            return with_step(scoped, See(Mark(index, _DEPTH), "outputs"))

        def call(model, args, kwargs):
            return model(*args, **kwargs)

        watched_model = map_modules(model, watched)
        program, *_ = trace(call, (watched_model, args, kwargs), {})
        self._read(program, 1, (), {_TOTAL})
        self.total = self.operations[_TOTAL]

    def _read(self, program: Any, times: int, axes: Any, around: set[str]) -> None:
        """Reads a program that runs `times`, within scans over `axes`."""
        for equation in opened(program)[0].eqns:
            name, params = name_and_params(equation)
            if equation.primitive is mark_p and params["mark"].depth == _DEPTH:
                avals = [x.aval for x in equation.outvars]
                arrays = [
                    jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype) for x in avals
                ]
                outputs = self.outputs.setdefault(params["mark"].path, [])
                outputs.append(params["rest"].fill(arrays))
            within = around.union(_SCOPE.findall(scopes_of(equation)))
            number = times * _operations(name, params, equation)
            self.operations.update(dict.fromkeys(within, number))
            inner_times, inner_axes = times, axes
            if name in ("scan", "Scan3"):
                inner_times *= params["length"]
                inner_axes = *axes, params["length"]
            elif name == "shard_map":
                sizes = params["mesh"].shape
                inner_times *= math.prod(sizes[x] for x in mapped_axes(params))
            for inner in programs_in(params):
                self._read(inner, inner_times, inner_axes, within)


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
