"""`select`: chooses the nodes of a tree by conditions, to read or replace them.

A `Selection` holds the tree, all its nodes with their paths, and the places of the
chosen ones. Each condition tests a single node, so the order of the conditions does not
matter.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Generic, overload

import jax.tree_util as jtu
from typing_extensions import TypeVar  # `default` is in `typing` from Python 3.13

from .._annotations import signature_of
from .cycles import check_no_cycle
from .nodes import Nodes, children_of, listed
from .paths import check_patterns, matches, near_paths
from .require import check_not_class, one_bool, require_callable, require_integer

_Tree = TypeVar("_Tree")
_Node = TypeVar("_Node", default=Any)
_C = TypeVar("_C")
_SHOWN = 10


def select(tree: _Tree) -> "Selection[_Tree]":
    """Chooses nodes and leaves of a tree, to read them or to replace them in a copy.

    It starts with all of them. The methods of the result narrow the choice.

    **Arguments:**

    - `tree`: any pytree. The tree itself and each `None` in it are nodes, too.

    **Returns:**

    A [`equinox_like.Selection`][]. Its methods return new selections or trees, and
    change neither it nor `tree`.

    **Raises:**

    `TypeError` for a class in place of an instance.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
        linears = eqx.select(model).of(eqx.nn.Linear).count(3)
        assert [path for path, _ in linears.at("layers[*]")][0] == "layers[0]"

        biases = eqx.select(model).at("layers[*].bias")
        model = biases.apply(jnp.ones_like)
        assert model.layers[2].bias.sum() == 2
        ```
    """
    check_not_class(tree, "tree")
    check_no_cycle("tree", tree)
    nodes = Nodes(tree)
    places = tuple(range(len(nodes.all)))
    root = f"select({type(tree).__name__})"
    return Selection(tree, nodes, places, ((root, len(places)),))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Selection(Generic[_Tree, _Node]):
    """The nodes of a tree that [`equinox_like.select`][] and the methods here chose.

    It is immutable: each method returns something new. Iterating over it gives pairs of a
    path, in the form that [`equinox_like.tree_at`][] takes, and a node, in JAX's order;
    `len` is the number of nodes, so an empty selection is false.

    A node may lie within another chosen one. A part that is [`equinox_like.frozen`][] and
    its content have the same path: if both fulfil the conditions, only the frozen part is
    chosen.
    """

    _tree: _Tree
    _nodes: Nodes
    _places: tuple[int, ...]
    # The text of each condition, and how many nodes it left.
    _steps: tuple[tuple[str, int], ...]
    _patterns: tuple[str, ...] = ()  # those of `at`

    @overload
    def of(self, one: type[_C], /) -> "Selection[_Tree, _C]": ...
    @overload
    def of(self, *classes: Any) -> "Selection[_Tree]": ...
    def of(self, *classes: Any) -> Any:
        """Keeps the chosen nodes that are instances of one of these classes.

        **Arguments:**

        - `classes`: what `isinstance` takes: `eqx.nn.Linear`, `jax.Array`.

        **Raises:**

        `TypeError` if one of them is not a class.
        """
        try:
            isinstance(None, classes)
        except TypeError:
            raise TypeError(
                "`of` takes classes, such as `equinox_like.nn.Linear`; got "
                f"{classes!r}. To choose by a path, use `at`; by a condition, use "
                "`where`."
            ) from None
        text = ", ".join(getattr(each, "__name__", str(each)) for each in classes)
        return self._narrowed(
            f".of({text})", lambda place: isinstance(self._nodes.all[place], classes)
        )

    def at(self, *patterns: str) -> "Selection[_Tree, _Node]":
        """Keeps the chosen nodes whose whole path matches one of these patterns.

        **Arguments:**

        - `patterns`: paths as [`equinox_like.save`][] writes them, `"layers[0].weight"`, in
            which `*` stands for anything within one component, and `**` for any number of
            components: `"blocks[*].attention.**"`, `"**.bias"`. An asterisk in a key of a
            dictionary is written `\\*`, as in `r"['\\*']"`. The tree itself has the
            empty path, which `""` and `"**"` match.

        **Raises:**

        `TypeError` if a pattern is not a string.
        """
        check_patterns(patterns, "at")

        def fits(place: int) -> bool:
            path = self._nodes.plain_paths[place]
            return any(matches(pattern, path) for pattern in patterns)

        return self._narrowed(f".at({', '.join(map(repr, patterns))})", fits, patterns)

    def where(
        self, predicate: Callable[[_Node], Any] | Callable[[str, _Node], Any]
    ) -> "Selection[_Tree, _Node]":
        """Keeps the chosen nodes for which a function returns true.

        **Arguments:**

        - `predicate`: a function of a node; or, if it has two positional parameters
            without a default, of a path and a node.

        **Raises:**

        `TypeError` if it is not callable, `ValueError` naming the path if it returns an
        array of several values.
        """
        call = _of_path_and_node(predicate, "where", "predicate")
        name = getattr(predicate, "__name__", type(predicate).__name__)

        def holds(place: int) -> bool:
            path = self._nodes.plain_paths[place]
            answer = call(path, self._nodes.all[place])
            return one_bool(
                answer, "The `predicate` of `where`", lambda: path or "<root>"
            )

        return self._narrowed(f".where({name})", holds)

    def within(self, other: Any) -> "Selection[_Tree, _Node]":
        """Keeps the chosen nodes that lie below a node of another selection.

        The nodes of the other selection do not lie below themselves.

        **Arguments:**

        - `other`: a selection of the same tree; or a class or a pattern, which stands for
            `select(tree).of(other)` and `select(tree).at(other)`.

        **Raises:**

        `ValueError` if `other` is a selection of another tree.
        """
        if not isinstance(other, Selection):
            whole = select(self._tree)
            other = whole.at(other) if isinstance(other, str) else whole.of(other)
        elif other._tree is not self._tree:
            raise ValueError(
                "`within` takes a selection of the same tree: begin both with `select` of "
                "one object. A copy, such as `apply` returns, is another tree."
            )
        below: set[int] = set()
        for above in other._chosen():
            path = self._nodes.plain_paths[above]
            # A frozen part and its content have the same path, and count as one node.
            below.update(
                place
                for place in range(above + 1, self._nodes.ends[above])
                if self._nodes.plain_paths[place] != path
            )
        conditions = "".join(text for text, _ in other._steps[1:])
        return self._narrowed(f".within({conditions})", below.__contains__)

    def get(self) -> tuple[_Node, ...]:
        """The chosen nodes, as a tuple, even if there is only one.

        They are in JAX's order: a node comes before the nodes within it.
        """
        return tuple(self._nodes.all[place] for place in self._chosen())

    def count(self, n: int) -> "Selection[_Tree, _Node]":
        """Asserts that exactly `n` nodes are chosen.

        **Arguments:**

        - `n`: the expected number.

        **Returns:** the selection itself.

        **Raises:**

        `ValueError` if there are fewer or more. It lists the paths, and what each
        condition left.
        """
        if len(self) != require_integer(n, "count", "n"):
            raise ValueError(
                f"Expected {n} nodes, but {len(self)} are chosen: {self._listed()}. "
                f"{self._history()}"
            )
        return self

    def set(self, value: Any) -> _Tree:
        """A copy of the tree with one value in place of each chosen node.

        **Arguments:**

        - `value`: anything. To give each node a value of its own, use `apply`.

        **Raises:**

        `ValueError` if nothing is chosen, or if a chosen node lies within another one,
        because the inner one would be lost.
        """
        places = self._chosen()
        paths, ends = self._nodes.plain_paths, self._nodes.ends
        for above, below in pairwise(places):
            if below < ends[above]:
                raise ValueError(
                    f"`set` would replace the node at `{paths[below]}` and the one "
                    f"that contains it, at `{paths[above] or '<root>'}`. Choose one of "
                    "them, or use `apply`, which rewrites the inner one first. "
                    f"{self._history()}"
                )
        return self._rewritten("set", lambda path, node: value)

    def apply(self, fn: Callable[[_Node], Any] | Callable[[str, _Node], Any]) -> _Tree:
        """A copy of the tree in which `fn(node)` replaces each chosen node.

        Nodes are rewritten in JAX's order, except that a node within another chosen one
        comes first: `fn` gets the outer one with the inner one rewritten. Leaves that
        are not replaced are the identical objects. No `__init__` of a Module runs.

        **Arguments:**

        - `fn`: a function of a node; or, if it has two positional parameters without a
            default, of a path and a node.

        **Raises:**

        `ValueError` if nothing is chosen. Where that is fine, write
        `chosen.apply(fn) if chosen else model`.
        """
        return self._rewritten("apply", _of_path_and_node(fn, "apply", "fn"))

    def __iter__(self) -> Iterator[tuple[str, _Node]]:
        for place in self._chosen():
            yield self._nodes.plain_paths[place], self._nodes.all[place]

    def __len__(self) -> int:
        return len(self._chosen())

    def __repr__(self) -> str:
        steps = "".join(text for text, _ in self._steps)
        near = near_paths(self._patterns, self._nodes.plain_paths)
        return f"<{steps}: {len(self)} nodes, {self._listed()}{near and '.' + near}>"

    def _narrowed(
        self, step: str, is_chosen: Callable[[int], bool], patterns: Any = ()
    ) -> Any:
        places = tuple(filter(is_chosen, self._places))
        steps = (*self._steps, (step, len(places)))
        patterns = (*self._patterns, *patterns)
        return Selection(self._tree, self._nodes, places, steps, patterns)

    def _chosen(self) -> list[int]:
        """The chosen places, without the content of a frozen part that is chosen."""
        among, paths = set(self._places), self._nodes.plain_paths
        return [
            place
            for place in self._places
            if place - 1 not in among or paths[place] != paths[place - 1]
        ]

    def _rewritten(self, method: str, fn: Callable[[str, Any], Any]) -> _Tree:
        chosen, nodes = self._chosen(), self._nodes
        if not chosen:
            raise ValueError(
                f"`{method}` has no node to replace: nothing is chosen. "
                f"{self._history()}"
            )
        among = set(chosen)

        def rewritten(place, node):
            """The node that replaces the one at `place`."""
            following = bisect.bisect_right(chosen, place)
            if following < len(chosen) and chosen[following] < nodes.ends[place]:
                node = with_new_children(place, node)
            elif place not in among:
                # As in `tree_at`, lists and dicts are copied, and not shared.
                leaves, treedef = jtu.tree_flatten(node)
                return treedef.unflatten(leaves)
            return fn(nodes.plain_paths[place], node) if place in among else node

        def with_new_children(place, node):
            children, treedef = children_of(node)
            place, new = place + 1, []
            for _, child in children:
                new.append(rewritten(place, child))
                place = nodes.ends[place]
            return treedef.unflatten(new)

        new: Any = rewritten(0, self._tree)
        return new

    def _listed(self) -> str:
        return listed([path for path, _ in self], _SHOWN)

    def _history(self) -> str:
        steps = ", ".join(f"`{text}` leaves {left}" for text, left in self._steps[1:])
        text, size = self._steps[0]
        near = near_paths(self._patterns, self._nodes.plain_paths)
        return f"Of the {size} nodes of `{text}`, {steps or 'all are left'}.{near}"


def _of_path_and_node(
    fn: Callable[..., Any], method: str, argument: str
) -> Callable[[str, Any], Any]:
    """`fn` as a function of a path and a node, if it takes only the node."""
    require_callable(fn, method, argument)
    try:
        parameters = signature_of(fn).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        parameters = ()
    required = [
        p
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return fn if len(required) == 2 else lambda path, node: fn(node)
