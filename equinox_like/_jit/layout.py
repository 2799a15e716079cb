"""Where the leaves of a call go: from flattened arguments to groups of arrays.

A group is a run of neighbours that are all donated, or all kept. So the groups one after
the other are the data in canonical order, and JAX donates a group as a whole, or not.
Canonical order is that of the signature, however the arguments were passed.

A layout depends on the structure of the arguments and on the types of their leaves alone,
so it is made once (`LayoutTable`), and a call looks it up. Which compiled function serves
a call then depends on its static leaves; a layout remembers those that it has met.
"""

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax.tree_util as jtu

from .._compat.tracer import Tracer
from .._tree.filters import is_array
from .._tree.paths import path_str
from .._tree.registry import registry
from .._tree.splitting import (
    STATIC,
    Skeleton,
    leaf_paths,
    make_skeleton,
    refuse_unhashable,
)
from .._tree.strict import has_hash, strict_key
from .._tree.structure import Fixed, may_become_node

_T = TypeVar("_T")
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

DONATE: Final = "donate"
KEEP: Final = "keep"


class Layout:
    """How the leaves of `(callable, args, kwargs)` go to the groups of a skeleton."""

    def __init__(
        self,
        treedef: Any,
        labels: Sequence[Any],
        places: Sequence[Any],
        hidden: Sequence[Any],
        arguments: Sequence[tuple[str, int]],
    ):
        """**Arguments:**

        - `treedef`: that of the call in canonical form, by JAX's registry.
        - `labels`: for each leaf of it, in order, its group or `STATIC`.
        - `places`: for each where it is among the leaves of our registry; `None` for a
            static leaf that is part of the structure there,
        - `hidden`: which is here, and anything elsewhere.
        - `arguments`: name and number of leaves of each argument.
        """
        self.treedef = treedef
        self.labels = tuple(labels)
        self.arguments = arguments
        self.donates = DONATE in self.labels
        self._places = places
        self._hidden = hidden
        self._count = sum(i is not None for i in places)
        placed = list(zip(labels, places, strict=True))
        runs = [[i for _, i in run] for _, run in groups_of(placed, lambda x: x[0])]
        # Whether all leaves, as they come, are the sole group.
        self.is_whole = [list(range(self._count))] == runs
        self._takes = [_take_run(run) for run in runs]
        self.take_donated = _getter([i for label, i in placed if label == DONATE])
        self.take_kept = _getter([i for label, i in placed if label == KEEP])
        # The places of the data, and of the static leaves that a call brings.
        self.data_places = [i for label, i in placed if label is not STATIC]
        self._open = [i for label, i in placed if label is STATIC and i is not None]
        self._take_statics = _getter(self._open)
        # The compiled function, if no static leaf decides; else by the static leaves.
        self.only: Any = None
        self._known: dict[Any, Any] = {}

    def groups(self, leaves: list[Any]) -> list[Any]:
        """The arguments of the compiled function: one sequence of arrays per group."""
        return [take(leaves) for take in self._takes]

    def find(self, leaves: list[Any]) -> Any:
        """The compiled function for the static leaves among these, if there is one."""
        try:
            return self._known.get(self.static_key(leaves))
        except TypeError:
            return None  # one of them cannot be hashed, which `skeleton` reports

    def keep(self, leaves: list[Any], specialization: Any) -> None:
        """Lets `find` find it."""
        if self._open:
            keep(self._known, self.static_key(leaves), specialization)
        else:
            self.only = specialization

    def forget(self, specialization: Any) -> None:
        """Lets `find` no longer find it."""
        if self.only is specialization:
            self.only = None
        for key, kept in list(self._known.items()):
            if kept is specialization:
                self._known.pop(key, None)

    def static_key(self, leaves: list[Any]) -> Any:
        """Tells apart the static leaves that a call brings, strictly."""
        return strict_key(tuple(self._take_statics(leaves)))

    def is_outdated(self, leaves: list[Any]) -> bool:
        """Whether the type of a static leaf was registered as a node since."""
        return any(
            may_become_node(type(leaves[i])) and not registry.is_still_leaf(leaves[i])
            for i in self._open
        )

    def skeleton(self, leaves: list[Any]) -> Skeleton:
        """The static side of a call."""
        statics = []
        for label, i, value in zip(
            self.labels, self._places, self._hidden, strict=True
        ):
            if label is STATIC:
                statics.append(value if i is None else leaves[i])
        if not all(map(has_hash, statics)):
            named = zip(self.names, self.labels, strict=True)
            refuse_unhashable(statics, (n for n, label in named if label is STATIC))
        return make_skeleton(self.treedef, self.labels, statics)

    def data(self, leaves: list[Any]) -> list[tuple[Any, bool]]:
        """Value, and whether it is donated, of each leaf that is data."""
        labels = (label for label in self.labels if label is not STATIC)
        placed = zip(self.data_places, labels, strict=True)
        return [(leaves[i], label == DONATE) for i, label in placed]

    def donated_of_data(self, values: Sequence[Any]) -> list[Any]:
        """Those of some values, one for each datum, that belong to donated ones."""
        labels = (label for label in self.labels if label is not STATIC)
        return [x for x, k in zip(values, labels, strict=True) if k == DONATE]

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
    def number_of_own_data(self) -> int:
        """How many data are in the callable itself. They come first."""
        _, size = self.arguments[0]
        return sum(label is not STATIC for label in self.labels[:size])

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


class Form(NamedTuple):
    """Calls of one structure: the layouts, by the types of the leaves that are open.

    `take_open` picks these, which are not certain to be arrays.
    """

    take_open: Callable[[Sequence[Any]], Any]
    layouts: dict[tuple[type, ...], Layout]


class LayoutTable:
    """The layouts of one callable with one set of options."""

    def __init__(
        self,
        signature: inspect.Signature,
        name: str,
        donates: Callable[[str, bool], bool],
    ):
        """`name` is that of the callable. `donates` says whether arrays in the parameter
        of this name are donated, given whether it is the first argument."""
        self._signature = signature
        self._name = name
        self._donates = donates
        # By the structure of a call.
        self.forms: dict[Any, Form] = {}

    def fit(self, call: Call) -> tuple[Layout, list[Any]]:
        """The layout of a call, and its leaves in the order that it expects."""
        leaves, structure = registry.flatten(call)
        form = self.forms.get(structure)
        layout = form and form.layouts.get(tuple(map(type, form.take_open(leaves))))
        return (layout, leaves) if layout is not None else self.add(call)

    def add(self, call: Call) -> tuple[Layout, list[Any]]:
        leaves, structure = registry.flatten(call)
        # This builds what is lazy in the call. The next one like it is lazy again.
        if registry.adopt(call):
            leaves, structure = registry.flatten(call)
        expanded = registry.expand(structure)
        layout = self.make(call, expanded)
        form = self.forms.get(structure)
        if form is None:
            visible = [x for x in expanded if type(x) is not Fixed]
            are_open = [i for i, is_data in enumerate(visible) if not is_data]
            form = Form(_getter(are_open), {})
            keep(self.forms, registry.strict_treedef(structure), form)
        keep(form.layouts, tuple(map(type, form.take_open(leaves))), layout)
        return layout, leaves

    def make(
        self,
        call: Call,
        expanded: Sequence[Any] | None = None,
        is_data: Callable[[Any], bool] = is_array,
    ) -> Layout:
        """Binds a call to the signature, and labels its leaves.

        `expanded` gives for each leaf of JAX's what it is in our registry, where that
        is not the same; `is_data` whether a leaf is passed to the compiled function.
        """
        leaves, treedef = jtu.tree_flatten(call)
        arguments = _bind(self._signature, self._name, call, treedef, self._donates)
        expanded = [False] * len(leaves) if expanded is None else expanded
        counter = itertools.count()
        where = [None if type(x) is Fixed else next(counter) for x in expanded]
        order, labels = [], []
        for argument in arguments.each:
            group = DONATE if argument.is_donated else KEEP
            order += argument.span
            labels += [
                group if _is_data(leaves[i], is_data) else STATIC for i in argument.span
            ]
        return Layout(
            jtu.tree_structure(arguments.canonical),
            labels,
            [where[i] for i in order],
            [leaves[i] if where[i] is None else None for i in order],
            [(argument.name, len(argument.span)) for argument in arguments.each],
        )

    def forget(self, specialization: Any) -> None:
        for form in list(self.forms.values()):
            for layout in list(form.layouts.values()):
                layout.forget(specialization)

    def clear(self, tree_structure: Any) -> None:
        """Forgets the layouts of callables of this structure."""
        for structure, form in list(self.forms.items()):
            for types, layout in list(form.layouts.items()):
                if layout.treedef.children()[0] == tree_structure:
                    form.layouts.pop(types, None)
            if not form.layouts:
                self.forms.pop(structure, None)


class _Argument(NamedTuple):
    name: str
    span: range
    is_donated: bool


class _Bound(NamedTuple):
    """The arguments of a call in canonical order, and the call in canonical form."""

    each: list[_Argument]
    canonical: Call


def _bind(
    signature: inspect.Signature,
    name: str,
    call: Call,
    treedef: Any,
    donates: Callable[[str, bool], bool],
) -> _Bound:
    tree, args, kwargs = call
    tree_def, args_def, kwargs_def = treedef.children()
    sizes = [
        d.num_leaves for d in (tree_def, *args_def.children(), *kwargs_def.children())
    ]
    ends = list(itertools.accumulate(sizes))
    spans = [range(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    # Arguments stand for themselves as the numbers of their spans.
    by_key = dict(zip(sorted(kwargs), range(len(args) + 1, len(spans)), strict=True))
    try:
        bound = signature.bind(*range(1, len(args) + 1), **by_key)
    except TypeError as e:
        raise TypeError(f"{name}: {e}") from None
    values = {position: kwargs[key] for key, position in by_key.items()}
    values |= dict(enumerate(args, start=1))

    first = _first_argument(signature, bound)
    names = argument_names(bound) | {0: (name, None)}
    positions = [0, *bound.args, *(bound.kwargs[k] for k in sorted(bound.kwargs))]
    each = []
    for position in positions:
        shown, parameter = names[position]
        is_donated = parameter is not None and donates(parameter, position == first)
        each.append(_Argument(shown, spans[position], is_donated))
    canonical = (
        tree,
        tuple(values[i] for i in bound.args),
        {k: values[i] for k, i in bound.kwargs.items()},
    )
    return _Bound(each, canonical)


# How many kinds of call, and how many compiled programs, one function may keep.
MAX_KEPT: Final = 4096


def keep(
    table: dict[Any, Any], key: Any, value: Any, most: int | None = None
) -> list[Any]:
    """Adds to a table of bounded size, and returns the oldest values if they had to go."""
    # A copy of the keys, because another thread may add one meanwhile.
    excess = list(table)[: max(0, len(table) - (most or MAX_KEPT) + 1)]
    dropped = [table.pop(oldest, None) for oldest in excess]
    table[key] = value
    return dropped


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


def _take_run(run: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Picks the leaves of a group: a tuple."""
    start, end = run[0], run[-1] + 1
    if list(run) == list(range(start, end)):
        return lambda leaves: tuple(leaves[start:end])
    return operator.itemgetter(*run)


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Picks these items of a list, in C: a sequence."""
    if len(indices) < 2:
        start = indices[0] if indices else 0
        return operator.itemgetter(slice(start, start + len(indices)))
    return operator.itemgetter(*indices)
