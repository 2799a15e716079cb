"""Binds a call to the signature of its function: names and orders the arguments."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _Argument(NamedTuple):
    name: str
    span: range
    is_donated: bool


def bind(
    signature: inspect.Signature,
    name: str,
    call: Call,
    treedef: Any,
    donates: Callable[[str, bool], bool],
) -> tuple[list[_Argument], Call]:
    """The arguments of a call in canonical order, and the call rebuilt from them."""
    tree, args, kwargs = call
    tree_def, args_def, kwargs_def = treedef.children()
    sizes = [
        d.num_leaves for d in (tree_def, *args_def.children(), *kwargs_def.children())
    ]
    ends = list(itertools.accumulate(sizes))
    spans = [range(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    # Bind the indices of the arguments' spans in place of the arguments.
    by_key = dict(zip(sorted(kwargs), range(len(args) + 1, len(spans)), strict=True))
    try:
        bound = signature.bind(*range(1, len(args) + 1), **by_key)
    except TypeError as e:
        raise TypeError(f"{name}: {e}") from None
    values = {position: kwargs[key] for key, position in by_key.items()}
    values |= dict(enumerate(args, start=1))

    # Of the first parameter. Of `*args`, only the first one counts.
    first = bound.arguments.get(next(iter(signature.parameters), ""))
    firsts = first.values() if isinstance(first, dict) else [first]
    if isinstance(first, tuple):
        firsts = first[:1]
    names = argument_names(bound) | {0: (name, None)}
    positions = [0, *bound.args, *(bound.kwargs[k] for k in sorted(bound.kwargs))]
    each = []
    for position in positions:
        shown, parameter = names[position]
        is_donated = parameter is not None and donates(parameter, position in firsts)
        each.append(_Argument(shown, spans[position], is_donated))
    canonical = (
        tree,
        tuple(values[i] for i in bound.args),
        {k: values[i] for k, i in bound.kwargs.items()},
    )
    return each, canonical


def argument_names(bound: inspect.BoundArguments) -> dict[Any, tuple[str, str]]:
    """For each argument: its name in messages, and its parameter."""
    names = {}
    for parameter, value in bound.arguments.items():
        kind = bound.signature.parameters[parameter].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for i, position in enumerate(value):
                names[position] = f"{parameter}[{i}]", parameter
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, position in value.items():
                names[position] = f"{parameter}[{key!r}]", parameter
        else:
            names[value] = parameter, parameter
    return names
