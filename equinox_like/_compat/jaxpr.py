"""Runs a jaxpr, or one equation of it, and reads the parameters of an equation. JAX has
no public way to run a jaxpr with other constants.

Serves jax 0.10 to 0.12: `jax.core.eval_jaxpr`, or `jax._src.core.eval_jaxpr` if the
first no longer exists, since names are removed from `jax.core`. The fallback is
`jax.extend.core.jaxpr_as_fun`, which needs a closed jaxpr, and whose module is slow to
import.

Under the flags `JAX_REMAT3`, `JAX_CUSTOM_JVP3` and `JAX_CUSTOM_VJP3` of jax 0.12, one
primitive stands for several: its parameter `_prim` holds the actual primitive.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def find(*cores: str) -> Callable[..., list[Any]]:
    """`eval_jaxpr(jaxpr, consts, *args)` of the first of these modules that has it."""
    for core in cores:
        try:
            return importlib.import_module(core).eval_jaxpr
        except (ImportError, AttributeError):
            continue
    return by_extension


def by_extension(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The same as `eval_jaxpr`, by `jax.extend`."""
    core = importlib.import_module("jax.extend.core")
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))(*args)


eval_jaxpr: Callable[..., list[Any]] = find("jax.core", "jax._src.core")
"""`eval_jaxpr(jaxpr, consts, *args)`: runs an open jaxpr."""


def without_constants(closed: Any) -> Any:
    """The open jaxpr, for `eval_jaxpr`. On jax 0.12 `closed.jaxpr` has constants."""
    return closed.jaxpr.replace(constvars=list(closed.jaxpr.constvars))


def run_equation(jaxpr: Any, equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The outputs of an equation of `jaxpr`. `values` are its inputs, with literals."""
    inputs = {
        atom: value
        for atom, value in zip(equation.invars, values, strict=True)
        if not is_literal(atom)
    }
    alone = jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(equation.outvars),
        eqns=[equation],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return eval_jaxpr(alone, [], *inputs.values())


def name_and_params(equation: Any) -> tuple[str, dict[str, Any]]:
    """The name of an equation's primitive, and its parameters."""
    name, params = equation.primitive.name, equation.params
    inner = params.get("_prim") if name == "call_hi_primitive" else None
    if inner is None:
        return name, params
    params = dict(inner.params)
    if "traced" in params:
        params["jaxpr"] = params["traced"].jaxpr
    return type(inner).__name__, params


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are the carry."""
    if "ft_in" in params:  # jax 0.12
        constants, carry, _ = params["ft_in"].elts
        return len(constants.elts), len(carry.elts)
    return params["num_consts"], params["num_carry"]


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a value instead of a variable."""
    return hasattr(atom, "val")


def is_program(x: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed or open."""
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def is_closed(program: Any) -> bool:
    """Whether a jaxpr holds its constants. On jax 0.12 every jaxpr does."""
    return hasattr(program, "consts")


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr, and its constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())
