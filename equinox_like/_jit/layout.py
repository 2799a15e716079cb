"""Layouts: how a call is bound to the signature, and its leaves are sorted into groups.

A group is a run of consecutive data leaves that are either all donated or all kept. JAX
donates a group as a whole or not at all. The groups together hold the data leaves in
canonical order: the order of the signature, however the arguments were passed.

A layout depends only on the structure of the arguments and on their leaves' types. It
is made once (`LayoutTable`), and calls look it up. The static leaves of a call then
select the compiled function, which the layout caches.
"""

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

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
    by_name = [bound.kwargs[k] for k in sorted(bound.kwargs)]
    each = []
    for position in [0, *bound.args, *by_name]:
        shown, parameter = names[position]
        is_donated = parameter is not None and donates(parameter, position in firsts)
        each.append(_Argument(shown, spans[position], is_donated))
    canonical = (
        tree,
        tuple([values[i] for i in bound.args]),
        {k: values[i] for k, i in bound.kwargs.items()},
    )
    return each, canonical


_T = TypeVar("_T")
_Pair = TypeVar("_Pair", bound=tuple[Any, ...])

DONATE: Final = "donate"
KEEP: Final = "keep"


class Layout:
    """How the leaves of `(callable, args, kwargs)` go to the groups of a skeleton."""

    def __init__(
        self,
        treedef: Any,
        labels: Sequence[Any],
        places: Sequence[Any],
        embedded: Sequence[Any],
        arguments: Arguments,
    ):
        """**Arguments:**

        - `treedef`: JAX's treedef of the call in canonical form.
        - `labels`: for each of its leaves, in order, its group or `STATIC`.
        - `places`: for each leaf, its index among the leaves of our registry; `None`
            for a static leaf that is part of the structure there.
        - `embedded`: the static leaves whose place is `None`, and anything elsewhere.
        - `arguments`: the name and the number of leaves of each argument.
        """
        self.treedef = treedef
        self.labels = tuple(labels)
        self.arguments = arguments
        self.donates = DONATE in self.labels
        self._places = places
        self._embedded = embedded
        self._count = len(places) - list(places).count(None)
        placed = list(zip(labels, places, strict=True))
        runs = [[i for _, i in run] for _, run in groups_of(placed)]
        # Whether all leaves, in the order they come, form the only group.
        self.is_whole = [list(range(self._count))] == runs
        self._takes = [_getter(run) for run in runs]
        self.take_donated = _getter([i for label, i in placed if label == DONATE])
        self.take_kept = _getter([i for label, i in placed if label == KEEP])
        # The indices, among the leaves of a call, of the data and of the static leaves.
        self.data_places = [i for label, i in placed if label is not STATIC]
        self._are_donated = [label == DONATE for label in labels if label is not STATIC]
        self._static_places = [
            i for label, i in placed if label is STATIC and i is not None
        ]
        self._take_statics = _getter(self._static_places)
        # The compiled function if there are no static leaves; else those by static key.
        self.only: Any = None
        self._known: dict[Any, Any] = {}

    def groups(self, leaves: list[Any]) -> list[Any]:
        """The arguments of the compiled function: one sequence of arrays per group."""
        return [tuple(take(leaves)) for take in self._takes]

    def find(self, leaves: list[Any]) -> Any:
        """The compiled function for the static leaves among these, if there is one."""
        try:
            return self._known.get(self.static_key(leaves))
        except TypeError:
            return None  # a static leaf is unhashable, which `skeleton` reports

    def remember(self, leaves: list[Any], specialization: Any) -> None:
        """Caches the compiled function for the static leaves among `leaves`."""
        if self._static_places:
            add_bounded(self._known, self.static_key(leaves), specialization)
        else:
            self.only = specialization

    def forget(self, specialization: Any) -> None:
        """Removes a compiled function from the cache."""
        if self.only is specialization:
            self.only = None
        for key, kept in list(self._known.items()):
            if kept is specialization:
                self._known.pop(key, None)

    def static_key(self, leaves: list[Any]) -> Any:
        """The cache key of the static leaves. Values of different types differ."""
        return strict_key(self._take_statics(leaves))

    def skeleton(self, leaves: list[Any]) -> Skeleton:
        """The structure and static leaves of a call."""
        statics = []
        for label, i, value in zip(
            self.labels, self._places, self._embedded, strict=True
        ):
            if label is STATIC:
                statics.append(value if i is None else leaves[i])
        names = functools.partial(_names, self.treedef, self.arguments)
        return make_skeleton(self.treedef, self.labels, statics, names)

    def take_data(self, leaves: list[Any]) -> list[Any]:
        """The data leaves."""
        return [leaves[i] for i in self.data_places]

    def donated_of_data(self, values: Sequence[Any]) -> list[Any]:
        """The donated leaves' values, from `values` for all data leaves."""
        return list(itertools.compress(values, self._are_donated))

    @property
    def arguments_of_donated(self) -> list[int]:
        """For each donated leaf, the number of its argument."""
        sizes = [size for _, size in self.arguments]
        numbers = (n for n, size in enumerate(sizes) for _ in range(size))
        labelled = zip(numbers, self.labels, strict=True)
        return [n for n, label in labelled if label == DONATE]

    @property
    def number_of_own_data(self) -> int:
        """The number of data leaves in the callable itself. They come first."""
        _, size = self.arguments[0]
        return sum(label is not STATIC for label in self.labels[:size])

    @property
    def data_names(self) -> list[str]:
        """The names of the leaves that are data."""
        return data_names(self.arguments, self)

    def named_leaves(self, leaves: list[Any]) -> list[tuple[str, Any, bool]]:
        """For each data leaf: its name, its value, and whether it is donated."""
        data = self.take_data(leaves)
        return list(zip(self.data_names, data, self._are_donated, strict=True))


def with_methods(call: Call) -> Call:
    """The call, with each `model.__call__` as a pytree, so that it is not static.

    What the field of a Module holds stays as it is.
    """
    return jtu.tree_map(as_pytree, call, is_leaf=_is_module)


def _is_module(x: Any) -> bool:
    return isinstance(x, Module)


def _names(treedef: Any, arguments: Arguments) -> list[str]:
    """For each leaf, in canonical order, an expression like `model.weight`."""
    own, *parts = treedef.children()
    subtrees = [own, *itertools.chain(*[part.children() for part in parts])]
    named = zip(arguments, subtrees, strict=True)
    return [x for (name, _), subtree in named for x in leaf_names(subtree, name)]


def data_names(arguments: Arguments, call: Skeleton | Layout) -> list[str]:
    """The names of the leaves of a call that are data."""
    named = zip(_names(call.treedef, arguments), call.labels, strict=True)
    return [name for name, label in named if label is not STATIC]


_label: Final = operator.itemgetter(0)


def groups_of(leaves: Iterable[_Pair]) -> Iterator[tuple[Any, Iterator[_Pair]]]:
    """The label and the members of each group, of pairs of a label and something else."""
    data = [leaf for leaf in leaves if leaf[0] is not STATIC]
    return itertools.groupby(data, _label)


def chained(groups: Iterable[Iterable[_T]]) -> list[_T]:
    """The members of all groups, in order."""
    return [x for group in groups for x in group]


class LayoutsByTypes(NamedTuple):
    """The layouts of calls of one structure, by the types of their unknown leaves.

    `take_unknown` picks the leaves that the structure does not tell to be arrays.
    """

    take_unknown: Callable[[Sequence[Any]], Any]
    layouts: dict[tuple[type, ...], Layout]


class LayoutTable:
    """The layouts of one callable with one set of options."""

    def __init__(
        self,
        signature: inspect.Signature,
        name: str,
        donates: Callable[[str, bool], bool],
    ):
        """`name` is the name of the callable. `donates(parameter, is_first)` returns
        whether the arrays of a parameter are donated."""
        self._signature = signature
        self._name = name
        self._donates = donates
        # The forms, by the structure of a call.
        self.forms: dict[Any, LayoutsByTypes] = {}

    def fit(self, call: Call) -> tuple[Layout, list[Any]]:
        """The layout of a call, and its leaves in the order that it expects."""
        leaves, structure = registry.flatten(call)
        form = self.forms.get(structure)
        layout = form and form.layouts.get(tuple(map(type, form.take_unknown(leaves))))
        return (layout, leaves) if layout is not None else self.add(call)

    def add(self, call: Call) -> tuple[Layout, list[Any]]:
        leaves, structure = registry.flatten(call)
        # This builds the lazy instances of the call; the next call has lazy ones again.
        _, _, nodes = flatten_with_nodes(call)
        if types.MethodType in map(type, nodes):
            tops = jtu.tree_leaves(call, is_leaf=_is_module)
            if any(as_pytree(x) is not x for x in tops):
                # Such a call has no layout of its own, so that others are not inspected.
                return self.fit(with_methods(call))
        if forget_other_classes(nodes) or registry.adopt(nodes):
            leaves, structure = registry.flatten(call)
        expanded = registry.expand(structure)
        layout = self.make(call, expanded)
        form = self.forms.get(structure)
        if form is None:
            visible = [x for x in expanded if type(x) is not StaticLeaf]
            unknown = [i for i, is_data in enumerate(visible) if not is_data]
            form = LayoutsByTypes(_getter(unknown), {})
            add_bounded(self.forms, registry.strict_treedef(structure), form)
        add_bounded(form.layouts, tuple(map(type, form.take_unknown(leaves))), layout)
        return layout, leaves

    def make(
        self,
        call: Call,
        expanded: Sequence[Any] | None = None,
        is_data: Callable[[Any], bool] = is_array,
    ) -> Layout:
        """Binds a call to the signature, and labels its leaves.

        `expanded` has an entry for each leaf that JAX sees: how our registry flattens
        it. `is_data` returns whether a leaf is passed to the compiled function.
        """
        leaves, treedef = jtu.tree_flatten(call)
        arguments, canonical = bind(
            self._signature, self._name, call, treedef, self._donates
        )
        if expanded is None:
            expanded = [False] * len(leaves)
        elif len(expanded) != len(leaves) or any(
            type(x) is StaticLeaf and type(x.value) is not type(leaf)
            for x, leaf in zip(expanded, leaves, strict=True)
        ):
            _raise_late_registration(expanded)
        counter = itertools.count()
        where = [None if type(x) is StaticLeaf else next(counter) for x in expanded]
        order, labels = [], []
        for argument in arguments:
            group = DONATE if argument.is_donated else KEEP
            order += argument.span
            for i in argument.span:
                # A tracer is always data, because it would leak as a static value.
                is_dynamic = is_data(leaves[i]) or isinstance(leaves[i], Tracer)
                labels.append(group if is_dynamic else STATIC)
        return Layout(
            jtu.tree_structure(canonical),
            labels,
            [where[i] for i in order],
            [leaves[i] if where[i] is None else None for i in order],
            [(argument.name, len(argument.span)) for argument in arguments],
        )

    def forget(self, specialization: Any) -> None:
        for form in list(self.forms.values()):
            for layout in list(form.layouts.values()):
                layout.forget(specialization)

    def clear(self, tree_structure: Any) -> None:
        """Drops the layouts of callables of this structure."""
        for structure, form in list(self.forms.items()):
            for kinds, layout in list(form.layouts.items()):
                if layout.treedef.children()[0] == tree_structure:
                    form.layouts.pop(kinds, None)
            if not form.layouts:
                self.forms.pop(structure, None)


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


def _raise_late_registration(expanded: Sequence[Any]) -> NoReturn:
    values = [x.value for x in expanded if type(x) is StaticLeaf]
    kind = next(type(x) for x in values if not jtu.all_leaves([x]))
    raise TypeError(
        f"`{kind.__qualname__}` was registered as a pytree node after a Module that "
        "holds an instance of it was first used. Register a class before its instances "
        "are used, for example where it is defined."
    )


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """A function, implemented in C, that picks these items of a list, as a sequence."""
    start = indices[0] if indices else 0
    end = start + len(indices)
    if list(indices) == list(range(start, end)):
        return operator.itemgetter(slice(start, end))  # faster
    return operator.itemgetter(*indices)
