"""Layouts: how a call is bound to the signature, and its leaves are sorted into groups.

A group is a run of consecutive data leaves that are either all donated or all kept. JAX
donates a group as a whole or not at all. The groups together hold the data leaves in
canonical order: the order of the signature, however the arguments were passed.

A layout depends only on the structure of the arguments and on their leaves' types. It
is made once (`LayoutTable`), and calls look it up. The static leaves of a call then
select the compiled function, which the layout caches.
"""

import dataclasses
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax.tree_util as jtu

from .._annotations import argument_names
from .._compat.tracing import Tracer
from .._core.difference import Arguments
from .._module.module import Module, as_pytree
from .._tree.cached import forget_other_classes
from .._tree.filters import is_array
from .._tree.nodes import flatten_with_nodes
from .._tree.partitioning import STATIC, Skeleton, leaf_names, make_skeleton
from .._tree.registry import StaticLeaf, registry
from .._tree.strict import strict_key

# The callable if it is a pytree, the positional and the keyword arguments.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
# The leaves of a call, in the order that its layout expects.
Leaves = list[Any]


class NamedLeaf(NamedTuple):
    """A data leaf of a call, with an expression such as `model.weight`."""

    name: str
    value: Any
    is_donated: bool


@dataclasses.dataclass(eq=False)
class _Passed:
    """What is passed in one place, and the indices of its leaves in the call."""

    value: Any
    span: range


class _Argument(NamedTuple):
    name: str
    span: range
    is_donated: bool


def bind(
    signature: inspect.Signature,
    name: str,
    call: Call,
    treedef: Any,
    donates: Callable[[str, bool], bool] | None,
) -> tuple[list[_Argument], Call]:
    """The arguments of a call in canonical order, and the call rebuilt from them."""
    tree, args, kwargs = call
    of_tree, of_args, of_kwargs = treedef.children()
    parts = of_tree, *of_args.children(), *of_kwargs.children()
    ends = itertools.accumulate(part.num_leaves for part in parts)
    spans = [range(end - x.num_leaves, end) for x, end in zip(parts, ends, strict=True)]
    values = tree, *args, *(kwargs[key] for key in sorted(kwargs))
    own, *passed = map(_Passed, values, spans)
    by_key = dict(zip(sorted(kwargs), passed[len(args) :], strict=True))
    try:
        bound = signature.bind(*passed[: len(args)], **by_key)
    except TypeError as e:
        raise TypeError(f"{name}: {e}") from None

    names = argument_names(bound)
    firsts = () if donates is None else _firsts(bound)
    arguments = [_Argument(name, own.span, is_donated=False)]
    for x in [*bound.args, *(bound.kwargs[key] for key in sorted(bound.kwargs))]:
        shown, parameter = names[x]
        is_donated = donates is not None and donates(parameter, x in firsts)
        arguments.append(_Argument(shown, x.span, is_donated))
    positional = tuple([x.value for x in bound.args])
    return arguments, (tree, positional, {k: x.value for k, x in bound.kwargs.items()})


def _firsts(bound: inspect.BoundArguments) -> Collection[Any]:
    """What is given for the first parameter. Of `*args`, only the first one counts."""
    first = bound.arguments.get(next(iter(bound.signature.parameters), ""))
    if isinstance(first, dict):
        return first.values()
    return first[:1] if isinstance(first, tuple) else [first]


_T = TypeVar("_T")

DONATE: Final = "donate"
KEEP: Final = "keep"


@dataclasses.dataclass(slots=True)
class _Leaf:
    """Where one leaf goes."""

    label: Any  # its group, or `STATIC`
    # Its index among the leaves of our registry. Or `None`, if it is a static leaf that is
    # a part of the structure there, which is kept here.
    place: int | None
    fixed: Any
    argument: int


class CallLayout:
    """How the leaves of `(callable, args, kwargs)` go to the groups of a skeleton."""

    def __init__(self, treedef: Any, leaves: Sequence[_Leaf], arguments: Arguments):
        """`treedef` is JAX's treedef of the call in canonical form, and `leaves` are in
        its order. `arguments` are the name and the number of leaves of each argument."""
        self.treedef = treedef
        self.arguments = arguments
        self._leaves = leaves
        self.labels = tuple([leaf.label for leaf in leaves])
        self._data = data = [leaf for leaf in leaves if leaf.label is not STATIC]
        runs: Any = groups_of(self.labels, [leaf.place for leaf in leaves])
        self._takes = [_getter(run) for run in runs]
        # The indices of the data among the leaves of a call.
        self.data_places: list[int] = chained(runs)
        self.take_data = _getter(self.data_places)
        donated: Any = [leaf for leaf in data if leaf.label == DONATE]
        kept: Any = [leaf for leaf in data if leaf.label == KEEP]
        self.donates = bool(donated)
        self.take_donated = _getter([leaf.place for leaf in donated])
        self.take_kept = _getter([leaf.place for leaf in kept])
        self._static_places = [
            leaf.place
            for leaf in leaves
            if leaf.label is STATIC and leaf.place is not None
        ]
        self._take_statics = _getter(self._static_places)
        # Whether all leaves, in the order they come, form the only group.
        self.is_whole = not self._static_places and runs == [list(range(len(data)))]
        # The compiled function if there are no static leaves; else those by static key.
        self.only: Any = None
        self._known: dict[Any, Any] = {}

    def groups(self, leaves: Leaves) -> list[Any]:
        """The arguments of the compiled function: one sequence of arrays per group."""
        return [tuple(take(leaves)) for take in self._takes]

    def find(self, leaves: Leaves) -> Any:
        """The compiled function for the static leaves among these, if there is one."""
        try:
            return self._known.get(self.static_key(leaves))
        except TypeError:
            return None  # a static leaf is unhashable, which `skeleton` reports

    def remember(self, leaves: Leaves, specialization: Any) -> None:
        """Caches the compiled function for the static leaves among `leaves`."""
        if self._static_places:
            add_bounded(self._known, self.static_key(leaves), specialization)
        else:
            self.only = specialization

    def static_key(self, leaves: Leaves) -> Any:
        """The cache key of the static leaves. Values of different types differ."""
        return strict_key(self._take_statics(leaves))

    def skeleton(self, leaves: Leaves) -> Skeleton:
        """The structure and static leaves of a call."""
        statics = [
            leaf.fixed if leaf.place is None else leaves[leaf.place]
            for leaf in self._leaves
            if leaf.label is STATIC
        ]
        names = functools.partial(_names, self.treedef, self.arguments)
        return make_skeleton(self.treedef, self.labels, statics, names)

    def donated_of_data(self, values: Sequence[Any]) -> list[Any]:
        """The donated leaves' values, from `values` for all data leaves."""
        pairs = zip(values, self._data, strict=True)
        return [value for value, leaf in pairs if leaf.label == DONATE]

    @property
    def arguments_of_donated(self) -> list[int]:
        """For each donated leaf, the number of its argument."""
        return [leaf.argument for leaf in self._data if leaf.label == DONATE]

    @property
    def number_of_own_data(self) -> int:
        """The number of data leaves in the callable itself. They come first."""
        return sum(leaf.argument == 0 for leaf in self._data)

    def named_leaves(self, leaves: Leaves) -> list[NamedLeaf]:
        donated = [leaf.label == DONATE for leaf in self._data]
        names, data = data_names(self.arguments, self), self.take_data(leaves)
        return list(map(NamedLeaf, names, data, donated))


def with_methods(call: Call) -> Call:
    """The call, with each `model.__call__` as a pytree, so that it is not static.

    What the field of a Module holds stays as it is.
    """
    leaves, treedef = jtu.tree_flatten(call, lambda x: isinstance(x, Module))
    made = list(map(as_pytree, leaves))
    return call if all(map(operator.is_, made, leaves)) else treedef.unflatten(made)


def _names(treedef: Any, arguments: Arguments) -> list[str]:
    """For each leaf, in canonical order, an expression like `model.weight`."""
    own, *parts = treedef.children()
    subtrees = [own, *itertools.chain(*[part.children() for part in parts])]
    named = zip(arguments, subtrees, strict=True)
    return [x for (name, _), subtree in named for x in leaf_names(subtree, name)]


def data_names(arguments: Arguments, call: Skeleton | CallLayout) -> list[str]:
    """The names of the leaves of a call that are data."""
    named = zip(_names(call.treedef, arguments), call.labels, strict=True)
    return [name for name, label in named if label is not STATIC]


def groups_of(labels: Iterable[Any], values: Iterable[Any]) -> list[list[Any]]:
    """The values of each group, of those whose label is not `STATIC`."""
    pairs = [x for x in zip(labels, values, strict=True) if x[0] is not STATIC]
    runs = itertools.groupby(pairs, operator.itemgetter(0))
    return [[value for _, value in run] for _, run in runs]


def chained(groups: Iterable[Iterable[_T]]) -> list[_T]:
    """The members of all groups, in order."""
    return [x for group in groups for x in group]


class LayoutsByTypes(NamedTuple):
    """The layouts of calls of one structure, by the types of their unknown leaves.

    `take_unknown` picks the leaves that the structure does not tell to be arrays.
    """

    take_unknown: Callable[[Sequence[Any]], Any]
    layouts: dict[tuple[type, ...], CallLayout]


class LayoutTable:
    """The layouts of one callable with one set of options."""

    def __init__(
        self,
        signature: inspect.Signature,
        name: str,
        donates: Callable[[str, bool], bool] | None = None,
    ):
        """`name` is the name of the callable. `donates(parameter, is_first)` returns
        whether the arrays of a parameter are donated; `None` if none are."""
        self._signature = signature
        self._name = name
        self._donates = donates
        self.by_structure: dict[Any, LayoutsByTypes] = {}

    def fit(self, call: Call) -> tuple[CallLayout, Leaves]:
        """The layout of a call, and its leaves in the order that it expects."""
        leaves, structure = registry.flatten(call)
        layout = self._find(structure, leaves)
        if layout is None and (again := _flattened_again(call)) is not None:
            call = again
            leaves, structure = registry.flatten(call)
            layout = self._find(structure, leaves)
        if layout is None:
            layout = self.add(call, leaves, structure)
        return layout, leaves

    def _find(self, structure: Any, leaves: Leaves) -> CallLayout | None:
        known = self.by_structure.get(structure)
        return known and known.layouts.get(tuple(map(type, known.take_unknown(leaves))))

    def add(self, call: Call, leaves: Leaves, structure: Any) -> CallLayout:
        """Makes the layout of a call, and caches it."""
        expanded = registry.expand(structure)
        layout = self.make(call, expanded)
        known = self.by_structure.get(structure)
        if known is None:
            visible = [x for x in expanded if type(x) is not StaticLeaf]
            unknown = [i for i, is_data in enumerate(visible) if not is_data]
            known = LayoutsByTypes(_getter(unknown), {})
            add_bounded(self.by_structure, registry.strict_treedef(structure), known)
        add_bounded(known.layouts, tuple(map(type, known.take_unknown(leaves))), layout)
        return layout

    def make(
        self,
        call: Call,
        expanded: Sequence[Any] | None = None,
        is_data: Callable[[Any], bool] = is_array,
    ) -> CallLayout:
        """Binds a call to the signature, and labels its leaves.

        `expanded` has an entry for each leaf that JAX sees: how our registry flattens
        it. `is_data` returns whether a leaf is passed to the compiled function.
        """
        leaves, treedef = jtu.tree_flatten(call)
        arguments, canonical = bind(
            self._signature, self._name, call, treedef, self._donates
        )
        where = _places(leaves, [False] * len(leaves) if expanded is None else expanded)
        table = []
        for number, argument in enumerate(arguments):
            group = DONATE if argument.is_donated else KEEP
            for i in argument.span:
                # A tracer is always data, because it would leak as a static value.
                is_dynamic = is_data(leaves[i]) or isinstance(leaves[i], Tracer)
                fixed = leaves[i] if where[i] is None else None
                label = group if is_dynamic else STATIC
                table.append(_Leaf(label, where[i], fixed, number))
        names = [(argument.name, len(argument.span)) for argument in arguments]
        return CallLayout(jtu.tree_structure(canonical), table, names)


def _flattened_again(call: Call) -> Call | None:
    """The call, if it must be flattened again: with methods as pytrees, or because our
    registry did not know a class yet that JAX knows.

    This builds the lazy instances of the call; the next call has lazy ones again.
    """
    again = call
    _, _, nodes = flatten_with_nodes(call)
    if types.MethodType in map(type, nodes):
        again = with_methods(call)
        _, _, nodes = flatten_with_nodes(again)
    is_other = forget_other_classes(nodes) or registry.adopt(nodes)
    return again if is_other or again is not call else None


# The most structures, layouts and specializations that one function keeps of each.
MAX_KEPT: Final = 4096


def add_bounded(
    table: dict[Any, Any], key: Any, value: Any, most: int | None = None
) -> list[Any]:
    """Adds to a table of bounded size, and returns the oldest values if dropped."""
    # A copy of the keys, because another thread may add one meanwhile.
    excess = list(table)[: max(0, len(table) - (most or MAX_KEPT) + 1)]
    dropped = [table.pop(oldest, None) for oldest in excess]
    table[key] = value
    return dropped


def _places(leaves: Sequence[Any], expanded: Sequence[Any]) -> list[int | None]:
    """For each leaf that JAX sees, its index among those of our registry.

    It is `None` for a static leaf that is a part of the structure there.
    """
    if len(expanded) != len(leaves) or any(
        type(x) is StaticLeaf and type(x.value) is not type(leaf)
        for x, leaf in zip(expanded, leaves, strict=True)
    ):
        fixed = [x.value for x in expanded if type(x) is StaticLeaf]
        kind = next(type(x) for x in fixed if not jtu.all_leaves([x]))
        raise TypeError(
            f"`{kind.__qualname__}` was registered as a pytree node after a Module that "
            "holds an instance of it was first used. Register a class before its "
            "instances are used, for example where it is defined."
        )
    counter = itertools.count()
    return [None if type(x) is StaticLeaf else next(counter) for x in expanded]


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """A function, implemented in C, that picks these items of a list, as a sequence."""
    start = indices[0] if indices else 0
    end = start + len(indices)
    if list(indices) == list(range(start, end)):
        return operator.itemgetter(slice(start, end))  # faster
    return operator.itemgetter(*indices)
