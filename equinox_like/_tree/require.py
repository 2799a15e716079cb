"""Checks of arguments, whose errors name the argument and say what it must be."""

import contextlib
import inspect
import operator
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
    if argument is not None:
        raise TypeError(
            f"`{function}` takes a function as `{argument}`; got {describe_node(fun)}."
        )
    kind = type(fun).__name__
    fix = ""
    if isinstance(fun, classmethod | property):
        fix = f" Write `@{kind}` above `@{function}`, which wraps the function."
    raise TypeError(
        f"`{function}` wraps a function or another callable; got {fun!r} of type "
        f"{kind}.{fix}"
    )


def refuse_class(value: Any, argument: str) -> None:
    """Raises if a class is given in place of an instance."""
    if isinstance(value, type):
        raise TypeError(
            f"`{argument}` is the class `{value.__qualname__}`: pass an instance."
        )


def refuse_callable_leaf(tree: Any, argument: str) -> None:
    """Raises if a class or a function is given in place of a tree that it makes."""
    refuse_class(tree, argument)
    if callable(tree) and jtu.all_leaves([tree]):
        name = getattr(tree, "__qualname__", type(tree).__name__)
        raise TypeError(
            f"`{argument}` is the function `{name}`, which has no leaves: pass what it "
            "returns, or a Module."
        )


def not_one_bool(function: str, answer: Any, name: str) -> ValueError:
    """The error for an array that was returned for the leaf or node of this name."""
    return ValueError(
        f"{function} returned {describe_array(answer)} for `{name}`. It chooses whole "
        "leaves, so it must return one bool, as `(x > 0).all()` is."
    )


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


def refuse_unknown_options(
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


def explain_call(error: TypeError, cls: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Ends the error of a call that does not fit the signature with the call to write.

    Parameters that are passed by name, such as `key`, are often passed by position.
    """
    signature = signature_of(cls)
    with contextlib.suppress(TypeError):
        signature.bind(*args, **kwargs)
        return  # another call failed, within the function
    known = signature.parameters
    unknown = [n for n in kwargs if n not in known]
    by_name = [n for n, p in known.items() if p.kind == p.KEYWORD_ONLY]
    by_default = {n for n, p in known.items() if p.default is not p.empty}
    missing = [n for n in by_name if n not in {*kwargs, *by_default}]
    number = sum(p.kind <= p.POSITIONAL_OR_KEYWORD for p in known.values())
    answer = ""
    if unknown:
        if "Did you mean" not in str(error):  # Python 3.13 says it
            answer = did_you_mean(unknown[0], known, "`{}=`")
    elif missing and "required positional" not in str(error):
        shown = [_short(x) for x in args if not may_be_key(x)][:number]
        shown += [f"{n}={_short(x)}" for n, x in kwargs.items()]
        shown += [f"{n}={n}" for n in missing]
        call = f"{cls.__name__}({', '.join(shown)})"
        answer = f" Pass {listed(missing, 5)} by name: `{call}`."
    elif by_name and len(args) > number:
        answer = f" These are passed by name: {listed(by_name, 9)}."
    if answer:
        # An inherited `__init__` names the class that has it.
        said = str(error).rpartition(".__init__() ")[2].rstrip(".")
        error.args = (f"{cls.__name__}.__init__() {said}.{answer}",)


def may_be_key(x: Any) -> bool:
    """Whether an argument looks like a PRNG key, typed or not."""
    return is_typed_key(x) or (is_array(x) and x.ndim == 1 and x.dtype == "uint32")


def _short(x: Any) -> str:
    """An argument as it may have been written, if that is short."""
    return repr(x) if isinstance(x, bool | int | float | str | None) else "..."


def named_arguments(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by the names of the parameters, if these are known.

    `function` may be a method of a transformed function, which comes first.
    """
    wrapped = getattr(args[0], "__wrapped__", None) if args else None
    if wrapped is not None:  # the method of a transformed function
        yield getattr(wrapped, "__name__", type(wrapped).__name__), args[0]
        function, args = wrapped, args[1:]
    try:
        bound = signature_of(function).bind(*args, **kwargs)
        yield from bound.arguments.items()
    except (TypeError, ValueError):
        yield from {"args": args, "kwargs": kwargs}.items()
