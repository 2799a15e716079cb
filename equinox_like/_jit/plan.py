"""From the arguments of a call to groups of arrays, by a plan made once per kind of call.

A group is a run of neighbours that are all donated, or all kept. So the groups one after
the other are the data in canonical order, and JAX is told of each whether to donate it.

Flattening is done by JAX in C++; which leaf then goes where depends on the structure of
the arguments and the types of the leaves alone, so it is looked up, not computed. A plan
also puts the leaves in canonical order: that of the signature, however they were passed.
"""

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import jax.tree_util as jtu

from .._compat.tracer import Tracer
from .._tree.filters import is_array
from .._tree.paths import path_str
from .._tree.split import (
    STATIC,
    Skeleton,
    leaf_paths,
    make_skeleton,
    refuse_unhashable,
)
from .._tree.strict import strict_key

_T = TypeVar("_T")

DONATE: Final = "donate"
KEEP: Final = "keep"


class Plan:
    """How the leaves of `(callable, args, kwargs)` go to the groups of a skeleton."""

    def __init__(
        self,
        leaf_types: tuple[type, ...],
        call_treedef: Any,
        treedef: Any,
        order: Sequence[int],
        labels: Sequence[Any],
        arguments: Sequence[tuple[str, int]],
    ):
        """Described by the canonical `treedef`, the `order` of the call's leaves in it,
        their `labels`, and name and number of leaves of each of the `arguments`."""
        self.leaf_types = leaf_types
        self.call_treedef = call_treedef
        self.treedef = treedef
        self.labels = tuple(labels)
        self.donates = DONATE in self.labels
        self.arguments = arguments
        self.order = tuple(order)
        placed = list(zip(labels, order, strict=True))
        runs = [[i for _, i in run] for _, run in groups_of(placed, lambda x: x[0])]
        self.takes = list(map(taker, runs))
        if len(self.order) in map(len, runs):
            # The same leaves in another order may come as they are, in a list.
            self.takes = [_as_list(take) for take in self.takes]
        # All leaves, in the order in which they come: nothing is to be picked.
        self.takes_all = [list(range(len(self.order)))] == runs
        self.take_donated = taker([i for label, i in placed if label == DONATE])
        data = [label for label, _ in placed if label is not STATIC]
        donated = [i for i, label in enumerate(data) if label == DONATE]
        # The indices of the data.
        self.places = [i for label, i in placed if label is not STATIC]
        data_order = list(itertools.chain.from_iterable(runs))
        # The same among nothing but data.
        self.take_donated_data = taker(donated)
        self.is_in_order = all(map(operator.lt, data_order, data_order[1:]))
        # Whether all arrays are: they are the sole group.
        self.donates_all = self.donates and KEEP not in self.labels
        static = [i for label, i in placed if label is STATIC]
        self.take_statics = taker(static)
        self.has_statics = bool(static)
        # Values of other types are compared as they are: their types are known.
        self.must_wrap = any(issubclass(leaf_types[i], WRAPPED) for i in static)
        # The compiled function, if no static leaf decides; else by the static leaves.
        self.entry: Any = None
        self.entries: dict[Any, Any] = {}

    def groups(self, leaves: list[Any]) -> list[Any]:
        """The arguments of the compiled function: one sequence of arrays per group."""
        return [leaves] if self.takes_all else [take(leaves) for take in self.takes]

    def find(self, leaves: list[Any]) -> Any:
        """The compiled function for the static leaves among these, if there is one."""
        try:
            return self.entries.get(self.static_key(leaves))
        except TypeError:
            return None  # one of them has no hash, of which `skeleton` tells

    def keep(self, leaves: list[Any], entry: Any) -> None:
        """Lets `find` find it."""
        if self.has_statics:
            keep(self.entries, self.static_key(leaves), entry)
        else:
            self.entry = entry

    def forget(self, entry: Any) -> None:
        """Lets `find` no longer find it."""
        if self.entry is entry:
            self.entry = None
        for key, kept in list(self.entries.items()):
            if kept is entry:
                self.entries.pop(key, None)

    def static_key(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Tells apart the static leaves, strictly, given that their types are known."""
        statics = self.take_statics(leaves)
        return strict_key(statics)[0] if self.must_wrap else statics

    def skeleton(self, leaves: list[Any]) -> Skeleton:
        statics = self.take_statics(leaves)
        try:
            hash(statics)
        except TypeError:
            named = zip(self.names, self.labels, strict=True)
            refuse_unhashable(statics, (n for n, label in named if label is STATIC))
        return make_skeleton(self.treedef, self.labels, statics)

    def data(self, leaves: list[Any]) -> list[tuple[Any, bool]]:
        """Value, and whether it is donated, of each leaf that is data."""
        labels = (label for label in self.labels if label is not STATIC)
        placed = zip(self.places, labels, strict=True)
        return [(leaves[i], label == DONATE) for i, label in placed]

    @property
    def names(self) -> list[str]:
        """For each leaf, in canonical order, the expression that a user would write."""
        try:
            paths = leaf_paths(self.treedef)
        except Exception:
            # A foreign node that does not take placeholders: name the argument only.
            return [
                f"{name}.<leaf {i}>"
                for name, size in self.arguments
                for i in range(size)
            ]
        # The first two keys of a path lead to the argument, which has a better name.
        below = iter(paths)
        names = []
        for index, (name, size) in enumerate(self.arguments):
            depth = 2 if index else 1
            names += [path_str(next(below)[depth:], name) for _ in range(size)]
        return names

    @property
    def data_names(self) -> list[str]:
        """The names of the leaves that are data."""
        named = zip(self.names, self.labels, strict=True)
        return [name for name, label in named if label is not STATIC]

    def named_leaves(self, leaves: list[Any]) -> list[tuple[str, Any, bool]]:
        """Name, value, and whether it is donated, of each leaf that is data."""
        named = zip(self.data_names, self.data(leaves), strict=True)
        return [(name, x, is_donated) for name, (x, is_donated) in named]


def groups_of(
    leaves: Iterable[_T], label_of: Callable[[_T], Any]
) -> Iterator[tuple[Any, Iterator[_T]]]:
    """The label of each group, and what belongs to it, in canonical order."""
    data = (leaf for leaf in leaves if label_of(leaf) is not STATIC)
    return itertools.groupby(data, label_of)


# Static leaves of these types are not compared as they are.
WRAPPED: Final = (float, complex, tuple, list, dict, set, frozenset)


def make_plan(
    signature: inspect.Signature,
    name: str,
    call: tuple[Any, tuple[Any, ...], dict[str, Any]],
    leaves: list[Any],
    treedef: Any,
    donates: Callable[[str, bool], bool],
    is_data: Callable[[Any], bool] = is_array,
) -> Plan:
    """Binds a call to the signature, and labels its leaves.

    **Arguments:**

    - `signature`, `name`: of the wrapped callable.
    - `call`: the callable if it is a pytree, else `None`; and the arguments.
    - `leaves`, `treedef`: `call`, flattened.
    - `donates`: whether arrays in the parameter of this name are donated, given whether
        it is the first argument.
    - `is_data`: whether a leaf is passed to the compiled function.
    """
    tree, args, kwargs = call
    tree_def, args_def, kwargs_def = treedef.children()
    sizes = [
        d.num_leaves for d in (tree_def, *args_def.children(), *kwargs_def.children())
    ]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = [range(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    # Arguments stand for themselves as the numbers of their spans.
    by_key = dict(zip(sorted(kwargs), range(len(args) + 1, len(spans)), strict=True))
    try:
        bound = signature.bind(*range(1, len(args) + 1), **by_key)
    except TypeError as e:
        raise TypeError(f"{name}: {e}") from None
    values = dict(
        zip(by_key.values(), (kwargs[k] for k in sorted(kwargs)), strict=True)
    )
    values |= dict(enumerate(args, start=1))

    first = _first_argument(signature, bound)
    labels, order, arguments = [], [], []
    names = argument_names(bound) | {0: (name, None)}
    positions = [0, *bound.args, *(bound.kwargs[k] for k in sorted(bound.kwargs))]
    for position in positions:
        shown, parameter = names[position]
        donated = parameter is not None and donates(parameter, position == first)
        group = DONATE if donated else KEEP
        span = spans[position]
        arguments.append((shown, len(span)))
        order += span
        labels += [group if _is_data(leaves[i], is_data) else STATIC for i in span]
    canonical = (
        tree,
        tuple(values[i] for i in bound.args),
        {k: values[i] for k, i in bound.kwargs.items()},
    )
    return Plan(
        tuple(map(type, leaves)),
        treedef,
        jtu.tree_structure(canonical),
        order,
        labels,
        arguments,
    )


# How many kinds of call, and how many compiled programs, one function may keep.
MAX_KEPT: Final = 4096


def keep(table: dict[Any, Any], key: Any, value: Any) -> list[Any]:
    """Adds to a table of bounded size, and returns the oldest values if they had to go."""
    # A copy of the keys, because another thread may add one meanwhile.
    excess = list(table)[: max(0, len(table) - MAX_KEPT + 1)]
    gone = [table.pop(oldest, None) for oldest in excess]
    table[key] = value
    return gone


def _is_data(leaf: Any, is_data: Callable[[Any], bool]) -> bool:
    # A tracer is data whatever it stands for: as a static value it would leak.
    return is_data(leaf) or isinstance(leaf, Tracer)


def argument_names(bound: inspect.BoundArguments) -> dict[Any, tuple[str, str]]:
    """For each argument how to show it, and its parameter."""
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


def _first_argument(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> int | None:
    """Which argument is for the first parameter, however it was passed."""
    for parameter in signature.parameters.values():
        value = bound.arguments.get(parameter.name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return value[0] if value else None
        return None if parameter.kind is inspect.Parameter.VAR_KEYWORD else value
    return None


def _as_list(take: Callable[[list[Any]], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda leaves: list(take(leaves))


def taker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    if len(indices) == 1:
        (index,) = indices
        return lambda leaves: (leaves[index],)
    return operator.itemgetter(*indices) if indices else lambda leaves: ()
