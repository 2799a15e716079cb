"""The inverse of a function, derived from its jaxpr, and the check of one.

The outputs are known and the inputs wanted. Known values are propagated forward through
equations with known inputs, and backward through equations whose primitive has a rule
below. `y1 = x1 + f(x2)` gives `x1` as soon as `x2` is known.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat.host import call_host
from .._compat.jaxpr import is_literal, name_and_params, opened, run_equation, text_of
from .._compat.primitives import for_whole_batch
from .._core.base import name_of
from .._core.flat_call import take_apart
from .._errors import NotInvertibleError
from .._jit.checks import register_check
from .._tree.filters import is_inexact_array


def derived_inverse(fun: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`inverse(block, y) -> x` of `fun(block, x) -> y`; `x` and `y` are of one form."""

    def inverse(block, y):
        held, block_template = take_apart(block)
        outs, template = take_apart(y)

        def flat(held, data):
            return take_apart(fun(block_template.fill(held), template.fill(data)))[0]

        closed = jax.make_jaxpr(flat)(held, outs)
        return template.fill(_solve(closed, held, outs, name_of(fun)))

    return inverse


def _solve(closed: Any, held: list[Any], outs: list[Any], name: str) -> list[Any]:
    """The last inputs of a jaxpr, given its first inputs and its outputs."""
    program = _Program(closed)
    given = [*closed.consts, *held]
    known: dict[int, Any] = dict(zip(program.inputs, given, strict=False))
    wanted = program.inputs[len(known) :]
    for number, value in zip(program.outputs, outs, strict=True):
        if isinstance(number, int):
            known.setdefault(number, value)
    todo = program.equations
    while not all(number in known for number in wanted):
        left = [e for e in todo if not e.spread(known)]
        if len(left) == len(todo) and not _fill_from_slices(left, known):
            raise _stopped(left, known, name)
        todo = left
    return [known[number] for number in wanted]


@dataclasses.dataclass(frozen=True, eq=False)
class _Equation:
    """An equation of a jaxpr, with numbers for its variables."""

    jaxpr: Any
    equation: Any
    ins: list[Any]
    outs: list[int]
    primitive: str
    params: dict[str, Any]

    def spread(self, known: dict[int, Any]) -> bool:
        """Adds to `known` what this equation yields. Returns whether it is done."""
        values = [known.get(i) if isinstance(i, int) else i.value for i in self.ins]
        unknown = [n for n, value in enumerate(values) if value is None]
        if not unknown:
            if not all(number in known for number in self.outs):
                found = run_equation(self.jaxpr, self.equation, values)
                known.update(zip(self.outs, found, strict=True))
            return True
        if not all(number in known for number in self.outs):
            return False
        outs = [known[number] for number in self.outs]
        found = self._invert(outs, values, unknown)
        if found is None:
            return False
        for n in unknown:
            known[self.ins[n]] = found[n]
        return True

    def _invert(self, outs: list[Any], values: list[Any], unknown: list[int]) -> Any:
        """The unknown inputs by position, or `None` if there is no rule for them."""
        if self.primitive in _OF_PARTS:
            return dict(enumerate(_OF_PARTS[self.primitive](self, outs)))
        rule = _OF_ONE.get(self.primitive)
        if rule is None or len(unknown) > 1:
            return None
        (n,) = unknown
        found = rule(self, outs[0], n, values[1 - n] if len(values) == 2 else None)
        return None if found is None else {n: found}

    def aval(self, n: int) -> Any:
        return self.equation.invars[n].aval


@dataclasses.dataclass(frozen=True, eq=False)
class _Literal:
    value: Any


class _Program:
    """The equations of a jaxpr and of those nested in it, with numbers for variables."""

    def __init__(self, closed: Any):
        self.equations: list[_Equation] = []
        # Equal slices of an array share their numbers, so that all are known when one is.
        self._slices: dict[Any, list[Any]] = {}
        self._new = itertools.count(1).__next__
        jaxpr = closed.jaxpr
        # Of the constants and the inputs.
        self.inputs = [self._new() for _ in [*jaxpr.constvars, *jaxpr.invars]]
        self.outputs = self._inline(jaxpr, self.inputs)

    def _inline(self, jaxpr: Any, ins: list[Any]) -> list[Any]:
        """Adds the equations, and returns the numbers of the outputs."""
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], ins, strict=True))

        def read(atom: Any) -> Any:
            return _Literal(atom.val) if is_literal(atom) else numbers[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            name, params = name_and_params(equation)
            if name in _CALLS:
                inner, consts = opened(params[_CALLS[name]])
                outs = self._inline(inner, [*map(_Literal, consts), *given])
            elif (key := _slice_key(equation, given)) in self._slices:
                outs = self._slices[key]
            else:
                outs = [self._new() for _ in equation.outvars]
                found = _Equation(jaxpr, equation, given, outs, name, params)
                self.equations.append(found)
                if key is not None:
                    self._slices[key] = outs
            numbers.update(zip(equation.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _slice_key(equation: Any, ins: list[Any]) -> Any:
    if equation.primitive.name != "slice" or not isinstance(ins[0], int):
        return None
    params = equation.params
    return ins[0], *(params[k] for k in ("start_indices", "limit_indices", "strides"))


# The primitives that call a jaxpr once on their inputs, and the parameter that holds it.
_CALLS: Final = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def _fill_from_slices(equations: list[_Equation], known: dict[int, Any]) -> bool:
    """Rebuilds arrays from their known slices, if these cover the whole array."""
    parts: dict[int, list[_Equation]] = {}
    for e in equations:
        if e.primitive == "slice" and e.outs[0] in known and e.ins[0] not in known:
            parts.setdefault(e.ins[0], []).append(e)
    found = False
    for number, slices in parts.items():
        aval = slices[0].aval(0)
        places = [_place(e.params) for e in slices]
        covered = np.zeros(aval.shape, bool)
        for place in places:
            covered[place] = True
        if covered.all():
            whole = jnp.zeros(aval.shape, aval.dtype)
            for place, e in zip(places, slices, strict=True):
                whole = whole.at[place].set(known[e.outs[0]])
            known[number] = whole
            found = True
    return found


def _place(params: Any) -> tuple[slice, ...]:
    starts, stops = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return tuple(map(slice, starts, stops, strides))


def _stopped(
    equations: list[_Equation], known: dict[int, Any], name: str
) -> NotInvertibleError:
    ready = [e for e in equations if all(number in known for number in e.outs)]
    stops = (ready or equations or [None])[0]
    what = "an input that it does not use"
    if stops is not None:
        equation = text_of(stops.equation)
        what = f"the primitive `{stops.primitive}`" + (
            f", as in `{equation}`" if len(equation) < 200 else ""
        )
    return NotInvertibleError(
        f"No inverse of `{name}` can be derived, because of {what}. Pass `inverse=`, a "
        "function `(block, y) -> x`; or write it in invertible steps, such as `y1 = "
        "x1 + f(x2)`."
    )


# The rules for one unknown input. Each gets the equation, its output, the position of
# the unknown input, and the other input if there are two.

_Rule = Callable[[_Equation, Any, int, Any], Any]


def _undone_by(undo: Callable[[Any], Any]) -> _Rule:
    return lambda e, y, n, other: undo(y)


def _reshaped(e: _Equation, y: Any, n: int, other: Any) -> Any:
    shape = e.aval(n).shape
    return jnp.reshape(y, shape) if math.prod(shape) == y.size else None


def _of_no_integers(rule: _Rule) -> _Rule:
    """`rule`, but `None` for integers, of which division drops the remainder."""
    return lambda e, y, n, other: (
        rule(e, y, n, other) if jnp.issubdtype(y.dtype, jnp.inexact) else None
    )


def _integer_pow(e: _Equation, y: Any, n: int, other: Any) -> Any:
    power = e.params["y"]
    if power % 2 == 0 or not jnp.issubdtype(y.dtype, jnp.floating):
        return None
    return jnp.sign(y) * jnp.abs(y) ** (1 / power)


_OF_ONE: Final[dict[str, _Rule]] = {
    "add": lambda e, y, n, other: y - other,
    "add_any": lambda e, y, n, other: y - other,
    "sub": lambda e, y, n, other: other + y if n == 0 else other - y,
    "mul": _of_no_integers(lambda e, y, n, other: y / other),
    "div": _of_no_integers(lambda e, y, n, other: y * other if n == 0 else other / y),
    "neg": _undone_by(jnp.negative),
    "exp": _undone_by(jnp.log),
    "log": _undone_by(jnp.exp),
    "expm1": _undone_by(jnp.log1p),
    "log1p": _undone_by(jnp.expm1),
    "tanh": _undone_by(jnp.arctanh),
    "atanh": _undone_by(jnp.tanh),
    "sinh": _undone_by(jnp.arcsinh),
    "asinh": _undone_by(jnp.sinh),
    "logistic": _undone_by(lambda y: jnp.log(y) - jnp.log1p(-y)),
    "sqrt": _undone_by(jnp.square),
    "rsqrt": _undone_by(lambda y: 1 / jnp.square(y)),
    "cbrt": _undone_by(lambda y: y**3),
    "integer_pow": _integer_pow,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "broadcast_in_dim": _reshaped,
    "transpose": lambda e, y, n, other: jnp.transpose(
        y, np.argsort(e.params["permutation"]).tolist()
    ),
    "rev": lambda e, y, n, other: jnp.flip(y, e.params["dimensions"]),
    "copy": _undone_by(lambda y: y),
    "sharding_constraint": _undone_by(lambda y: y),
}


def _undo_concatenate(e: _Equation, outs: list[Any]) -> Sequence[Any]:
    axis = e.params["dimension"]
    sizes = [e.aval(n).shape[axis] for n in range(len(e.ins))]
    return jnp.split(outs[0], np.cumsum(sizes)[:-1].tolist(), axis)


# The rules that compute all inputs from all outputs.
_OF_PARTS: Final[dict[str, Callable[[_Equation, list[Any]], Sequence[Any]]]] = {
    "concatenate": _undo_concatenate,
    "stack": lambda e, outs: jnp.unstack(outs[0], axis=e.params["axis"]),
    "unstack": lambda e, outs: [jnp.stack(outs, e.params["axis"])],
    "split": lambda e, outs: [jnp.concatenate(outs, e.params["axis"])],
    "optimization_barrier": lambda e, outs: outs,
}


def check_inverse(errors: jax.Array, x: Any, name: str) -> Any:
    """Returns `x`; raises if the inverse of the function named `name` is wrong.

    `errors` has the largest relative error, in units of the error that rounding may
    cause, and the largest absolute error.
    """
    register_check(_inverse_check, _BEGIN, _END, NotInvertibleError)
    failed = _inverse_check.bind(errors, name=name)

    def depend(leaf):
        if not is_inexact_array(leaf):
            return leaf
        # An unused check would be dropped by JAX as dead code.
        return jnp.where(failed, jnp.nan, leaf).astype(leaf.dtype)

    return jtu.tree_map(depend, x)


def _fail_if(errors: Any, name: str) -> np.ndarray:
    """The check outside of compiled programs, where the values are known."""
    if not np.all(np.asarray(errors)[..., 0] <= 1):
        raise NotInvertibleError(_text(errors, name))
    return np.asarray(False)


def _text(errors: Any, name: str) -> str:
    # `max` propagates NaN.
    relative, absolute = np.asarray(errors).reshape(-1, 2).max(0)
    return (
        f"The inverse of `{name}` is wrong: its result differs from the input by up to "
        f"{absolute:.3g}, and by up to {relative:.3g} times the error that rounding "
        "may cause."
    )


def _is_large(errors: jax.Array) -> jax.Array:
    # Negated, so that NaN counts as large.
    return ~jnp.all(errors[..., 0] <= 1)


def _run_check(errors: jax.Array, name: str) -> jax.Array:
    def fail(_, errors):
        raise NotInvertibleError(f"\n{_BEGIN}\n{_text(errors, name)}\n{_END}\n")

    call = functools.partial(call_host, function=fail, on_tpu=fail)
    return jax.lax.cond(_is_large(errors), call, lambda _: np.False_, errors)


_inverse_check = for_whole_batch(
    "inverse_check", _run_check, like=_is_large, eager=_fail_if
)

_BEGIN = "---- the check of a `filter_invertible` failed ----"
_END = "---- with `filter_jit` in place of `jax.jit` this would be the whole error ----"
