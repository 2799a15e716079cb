"""Runs a jaxpr, or one equation of it, and reads the parameters of an equation.

JAX has no public way to run a jaxpr with other constants.
Serves jax 0.10 to 0.12: `jax.core.eval_jaxpr`, or `jax._src.core.eval_jaxpr` if the
first no longer exists, since names are removed from `jax.core`.

Under the flags `JAX_REMAT3`, `JAX_CUSTOM_JVP3`, `JAX_CUSTOM_VJP3` and `JAX_SCAN3` of jax
0.12, one primitive stands for several: its parameter `_prim` holds the actual primitive.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.tree_util as jtu

from . import find

eval_jaxpr: Callable[..., list[Any]] = find("eval_jaxpr", "jax.core", "jax._src.core")
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


def interpret(jaxpr: Any, consts: Any, args: Any, run: Callable[..., Any]) -> list[Any]:
    """Runs an open jaxpr by `run(equation, inputs) -> outputs` for each equation."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        out = run(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


# The names without the flags of what `_prim` may hold.
_NAMES: Final = {
    "RematTraced": "remat2",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}


def name_and_params(equation: Any) -> tuple[str, dict[str, Any]]:
    """The name of an equation's primitive, and its parameters.

    Checkpoints and functions with custom rules have the same names, and parameters for
    their jaxprs, under the flags of JAX as without them. So has a `closed_call`, which
    is called `eval_jaxpr` since jax 0.11.
    """
    name, params = equation.primitive.name, equation.params
    if not _holds_primitive(equation):
        return "closed_call" if name == "eval_jaxpr" else name, params
    inner = params["_prim"]
    kind = type(inner).__name__
    name, params = _NAMES.get(kind, kind), dict(inner.params)
    if "traced" in params:
        params["call_jaxpr"] = params.pop("traced").jaxpr
    if name == "remat2":
        # Of a recomputation in a backward pass only its name tells what it is.
        params["differentiated"] = "rematted_computation" in scopes_of(equation)
    return name, params


def scopes_of(equation: Any) -> str:
    """The names of the `jax.named_scope`s around an equation, within its jaxpr."""
    return str(equation.source_info.name_stack)


def text_of(equation: Any) -> str:
    """An equation as JAX prints it, without the colours that it has in a terminal."""
    return re.sub("\x1b\\[\\d+m", "", str(equation))


def definition(equation: Any) -> Callable[..., Any] | None:
    """What an equation under the flags computes, as a function of its inputs and
    parameters that uses other primitives; `None` if it is of an ordinary primitive."""
    return equation.primitive.to_lojax if _holds_primitive(equation) else None


def _holds_primitive(equation: Any) -> bool:
    return equation.primitive.name == "call_hi_primitive"


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are the carry."""
    if "ft_in" in params:  # jax 0.12
        constants, carry, _ = params["ft_in"].elts
        return len(constants.elts), len(carry.elts)
    return params["num_consts"], params["num_carry"]


def mapped_axes(params: dict[str, Any]) -> frozenset[Any]:
    """The mesh axes of a `shard_map` with these parameters."""
    if "manual_axes" in params:  # jax 0.10.0
        return params["manual_axes"]
    return params["newly_manual_axes"]


def shard_mapped(
    body: Callable[..., Any], params: dict[str, Any], out_specs: Any
) -> Callable[..., Any]:
    """`body` in place of what a `shard_map` with these parameters maps."""
    return jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=out_specs,
        axis_names=mapped_axes(params),
        check_vma=params["check_vma"],
    )


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a value instead of a variable."""
    return hasattr(atom, "val")


def is_program(x: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed or open."""
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def programs_in(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation, closed or open."""
    leaves = jtu.tree_leaves(params, is_leaf=is_program)
    return [x for x in leaves if is_program(x)]


def programs_on_one_platform(params: dict[str, Any]) -> list[Any]:
    """The same, but of `jax.lax.platform_dependent` only the default."""
    platforms = params.get("branches_platforms") or ()
    if None not in platforms:
        return programs_in(params)
    return [params["branches"][platforms.index(None)]]


def is_closed(program: Any) -> bool:
    """Whether a jaxpr holds its constants. On jax 0.12 every jaxpr does."""
    return hasattr(program, "consts")


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr, and its constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())
