"""Checks of arguments, whose errors name the argument and say what it must be."""

import contextlib
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from .._annotations import signature_of
from .._errors import did_you_mean
from .arrays import describe_array, is_typed_key
from .filters import is_array
from .nodes import describe_node, listed


def require_callable(fun: Any, function: str, argument: str | None = None) -> None:
    """Raises unless `fun` is callable: what `function` wraps, or its `argument`."""
    if callable(fun):
        return
    fix = name_of_call(fun)
    if argument is not None:
        given = describe_node(fun)
        raise TypeError(
            f"`{function}` takes a function as `{argument}`; got {given}.{fix}"
        )
    kind = type(fun).__name__
    if isinstance(fun, classmethod | property):
        fix = f" Write `@{kind}` above `@{function}`, which wraps the function."
    raise TypeError(
        f"`{function}` wraps a function or another callable; got {fun!r} of type "
        f"{kind}.{fix}"
    )


def name_of_call(value: Any) -> str:
    """What to do if a pytree has the method that another library calls."""
    for name in ("forward", "apply", "call"):
        if callable(getattr(value, name, None)) and not jtu.all_leaves([value]):
            return f" Rename its method `{name}` to `__call__`."
    return ""


def check_not_class(value: Any, argument: str) -> None:
    """Raises if a class is given in place of an instance."""
    if isinstance(value, type):
        raise TypeError(
            f"`{argument}` is the class `{value.__qualname__}`: pass an instance."
        )


def check_not_callable(tree: Any, argument: str) -> None:
    """Raises if a class or a function is given in place of a tree that it makes."""
    check_not_class(tree, argument)
    if callable(tree) and jtu.all_leaves([tree]):
        name = getattr(tree, "__qualname__", type(tree).__name__)
        raise TypeError(
            f"`{argument}` is the function `{name}`, which has no leaves: pass what it "
            "returns, or a Module."
        )


def one_bool(answer: Any, function: str, name: Callable[[], str]) -> bool:
    """`answer`, which `function` returned for the leaf or node of this name, as a bool."""
    try:
        return bool(answer)
    except ValueError:
        if not is_array(answer):
            raise
        raise ValueError(
            f"{function} returned {describe_array(answer)} for `{name()}`. It chooses "
            "whole leaves, so it must return one bool, as `(x > 0).all()` is."
        ) from None


def require_integer(
    value: Any, function: str, argument: str, least: int | None = None
) -> int:
    """`value` as an `int`.

    **Raises:**

    `TypeError` if it is not an integer, `ValueError` if it is less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        if is_array(value):  # JAX's error names a traced array
            raise
        raise TypeError(
            f"`{function}`: `{argument}` must be an integer; got {value!r}."
        ) from None
    if least is not None and number < least:
        raise ValueError(
            f"`{function}`: `{argument}` must be at least {least}; got {number}."
        )
    return number


def integer_or_none(
    value: Any, function: str, argument: str, least: int | None = None
) -> int | None:
    """`None`, or as `require_integer`."""
    if value is None:
        return None
    return require_integer(value, function, argument, least)


def check_options(
    options: Mapping[str, Any],
    function: str,
    of: Callable[..., Any],
    own: Sequence[str] = (),
) -> None:
    """Raises `TypeError` for an option that is neither one of `of`, nor an `own` one."""
    known = [*own, *inspect.signature(of).parameters] if options else ()
    for name in options:
        if name not in known:
            raise TypeError(
                f"`{function}` has no option `{name}`.{did_you_mean(name, known)}"
            )


def explain_call(
    error: TypeError, called: Any, args: Sequence[Any], kwargs: Any, form: str
) -> None:
    """Ends the error of a call that does not fit the signature with the call to write.

    `called` is a class or an instance, and `form` the call, with `{}` for the arguments.
    """
    signature = signature_of(called)
    with contextlib.suppress(TypeError):
        signature.bind(*args, **kwargs)
        return  # another call failed, within the function
    # An inherited method names the class that has it.
    name = (called if isinstance(called, type) else type(called)).__name__
    said = re.sub(r"^\S*\.(?=__\w+__\(\) )", f"{name}.", str(error))
    if "Did you mean" not in said:  # Python 3.13 says that of a keyword
        answer = _answer(called, signature.parameters, args, kwargs, form)
        said = f"{said.rstrip('.')}.{answer}" if answer else said
    error.args = (said,)


def _answer(called: Any, known: Any, args: Any, kwargs: Any, form: str) -> str:
    by_position = [n for n, p in known.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    by_name = [n for n, p in known.items() if p.kind == p.KEYWORD_ONLY]
    # A key is passed by name, and often by position.
    moved = {"key"} if "key" in by_name and any(map(may_be_key, args)) else set()
    given = [x for x in args if not (moved and may_be_key(x))]
    is_class = isinstance(called, type)
    other = getattr(called, "_other_constructor", "") if is_class else ""
    if len(given) > len(by_position) and not moved:
        if by_position and by_position[0].endswith("s") and all(map(callable, args)):
            return f" Pass one list: `{form.format('[..., ...]')}`."
        names = f" These are passed by name: {listed(by_name, 9)}."
        return other or names * bool(by_name)
    if unknown := [n for n in kwargs if n not in known]:
        return did_you_mean(unknown[0], known, "`{}=`") or other
    pairs = zip(by_position, given, strict=False)
    shown = {n: _short(x) if is_class else n for n, x in pairs}
    shown |= {n: f"{n}={_short(x)}" for n, x in kwargs.items()}
    names = by_position + by_name
    missing = moved.union(n for n in names if known[n].default is known[n].empty)
    missing -= shown.keys()
    if not missing or not (args or missing.issubset(by_name)):
        return ""  # Python has named all that is missing
    ahead = [*itertools.takewhile(lambda n: n not in kwargs, by_position)]
    shown |= {n: n if n in ahead else f"{n}={n}" for n in missing}
    call = form.format(", ".join(shown[n] for n in names if n in shown))
    if missing.issubset(by_name):
        return f" Pass {listed(sorted(missing), 5)} by name: `{call}`."
    return f" Write `{call}`."


def may_be_key(x: Any) -> bool:
    """Whether an argument looks like a PRNG key, typed or not."""
    return is_typed_key(x) or (is_array(x) and x.ndim == 1 and x.dtype == "uint32")


def _short(x: Any) -> str:
    """An argument as it may have been written, if that is short."""
    if may_be_key(x):
        return "key"
    return repr(x) if isinstance(x, bool | int | float | str | None) else "..."


def named_arguments(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by the names of the parameters, if these are known.

    `function` may be a method of a transformed function, which comes first.
    """
    if is_transformed(args):
        held, wrapped = args[0], args[0].__wrapped__
        while hasattr(held, "_held_"):
            held = held._held_
        owner = getattr(held, "__self__", held)  # of a method
        named = wrapped if owner is held else type(owner)
        yield getattr(named, "__name__", type(named).__name__), owner
        function, args = wrapped, args[1:]
    try:
        bound = signature_of(function).bind(*args, **kwargs)
        yield from bound.arguments.items()
    except (TypeError, ValueError):
        yield from {"args": args, "kwargs": kwargs}.items()


def is_transformed(args: Any) -> bool:
    """Whether the first argument is a transformed function."""
    return bool(args) and getattr(args[0], "_wraps_callables_", False)
