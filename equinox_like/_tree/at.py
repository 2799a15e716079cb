"""`tree_at`: a copy of a tree in which some nodes are replaced.

First `where` is resolved to places: the numbers of the chosen nodes in the order in which
JAX visits them. Then the nodes at these places are replaced. A function `where` is called
on two copies of the tree, whose nodes are distinct objects, so what it returns is found
by identity. If it returns one leaf, the common case, no other node is visited. Paths and
trees of bools are looked up among the key paths of all nodes (`paths.py`).
"""

import threading
import types
from collections.abc import Callable, Mapping, Set
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar, overload

import jax.tree_util as jtu

from .._typing import NOT_GIVEN
from .deleted import deleted_named
from .filters import is_array
from .nodes import Nodes, describe_node
from .paths import choose_places, is_function
from .require import check_not_callable, require_callable

_Tree = TypeVar("_Tree")


@overload
def tree_at(
    where: Callable[[_Tree], Any] | object,
    pytree: _Tree,
    replace: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _Tree: ...
@overload
def tree_at(
    where: Callable[[_Tree], Any] | object,
    pytree: _Tree,
    *,
    replace_fn: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> _Tree: ...
@deleted_named
def tree_at(
    where: Any,
    pytree: Any,
    replace: Any = NOT_GIVEN,
    replace_fn: Any = NOT_GIVEN,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """A copy of `pytree` with the nodes that `where` chooses replaced.

    `pytree` is not modified, and arrays are not copied: leaves that are not replaced
    are the identical objects. No `__init__`, converter or check of a Module runs.

    **Arguments:**

    - `where`: the nodes to replace, in one of these forms:
        - A function: `where(pytree)` returns a node of the tree, or a list or tuple of
            nodes. It must not use the values of leaves, because it is also called on a
            copy of the tree without them.
        - A path to a node: a string such as `"layers[0].weight"`, relative to the tree,
            or a tuple of key entries as JAX gives it. The empty string and the empty
            tuple are the whole tree. A list (or a tuple of strings) chooses several
            nodes.
        - A tree of bools: `pytree` with `True` and `False` in place of nodes or leaves.
            The nodes at `True` are chosen, in JAX's order. `replace` is then a sequence,
            even if only one node is chosen.
    - `pytree`: any pytree.
    - `replace`: the new node; for several nodes a sequence of the same length, in the
        order in which they were chosen. It may be `None`, or have any structure.
    - `replace_fn`: instead of `replace`, a function `node -> new node`.
    - `is_leaf`: further nodes to treat as leaves. For a function to choose a `None` among
        several, pass `is_leaf=lambda x: x is None`.

    A callable tree whose leaves are all `True` or `False` is taken as a tree of bools.
    Any other callable is taken as a function.

    **Returns:**

    The new tree.

    **Raises:**

    `ValueError` if not exactly one of `replace` and `replace_fn` is given, if their
    lengths differ, if a node is chosen twice or lies inside another chosen one, if
    `where` depends on the leaves, or returns a container that is not in the tree, if a
    path does not exist, or if the tree of bools has another structure. `TypeError` if
    `where` is none of these or returns anything else that is not in the tree, or if
    `replace` for several nodes is a dictionary, a set, or has no length.

    The result shares arrays with `pytree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx

        tree = {"a": (1, 2), "b": [3]}
        assert eqx.tree_at(lambda t: t["a"][0], tree, 10) == {"a": (10, 2), "b": [3]}
        both = lambda t: (t["b"], t["a"][0])
        assert eqx.tree_at(both, tree, replace_fn=str) == {"a": ("1", 2), "b": "[3]"}

        assert eqx.tree_at("['a'][0]", tree, 10) == {"a": (10, 2), "b": [3]}
        mask = {"a": (False, True), "b": True}
        assert eqx.tree_at(mask, tree, "xy") == {"a": (1, "x"), "b": "y"}
        ```
    """
    if (replace is NOT_GIVEN) == (replace_fn is NOT_GIVEN):
        raise ValueError(
            "Precisely one of `replace` and `replace_fn` must be given to `tree_at`."
        )
    if replace is NOT_GIVEN:
        require_callable(replace_fn, "tree_at", "replace_fn")
    leaves, treedef = jtu.tree_flatten(pytree, is_leaf)
    opaque = [_OpaqueLeaf() for _ in leaves]
    copy = treedef.unflatten(opaque)
    if is_function(where):
        answer = _ask(where, copy, pytree)
        if type(answer) is _OpaqueLeaf:  # the common case: no other node is visited
            index = _position(opaque, answer)
            if _asked(where, treedef.unflatten(leaves)) is not leaves[index]:
                raise _depends_on_leaves()
            new = replace_fn(leaves[index]) if replace is NOT_GIVEN else replace
            leaves[index] = new
            return treedef.unflatten(leaves)
        filled = _own_tuples(pytree, is_leaf or (lambda _: False))
        twin = _asked(where, filled)
        nodes = Nodes(copy)
        if len(nodes.all) != treedef.num_nodes:
            raise ValueError(
                "`where` must not change the tree that it is given. Reading a missing "
                "key of a `defaultdict` adds the key."
            )
        real = set(map(id, leaves))
        copies = _Copies(nodes, Nodes(filled, lambda node: id(node) in real))
        places, is_one_node = _choose(where, answer, twin, copies)
    else:
        nodes = Nodes(copy)
        places, is_one_node = choose_places(where, nodes)
    _check_no_overlap(places, nodes)
    if replace is NOT_GIVEN:
        originals = Nodes(pytree, is_leaf).all
        new = [replace_fn(originals[place]) for place in places]
    else:
        new = [replace] if is_one_node else _as_sequence(replace, len(places))
    return _rebuild(leaves, nodes, dict(zip(places, new, strict=True)))


class _OpaqueLeaf:
    """Placeholder for a leaf in the copy that `where` is called on."""

    __slots__ = ()


class _Tuple(tuple):
    """A tuple that is always a new object.

    Python has only one `()`, and `tuple(t)` returns `t`. Neither holds for a subclass.
    """

    __slots__ = ()


jtu.register_pytree_node(_Tuple, lambda t: (t, None), lambda _, xs: _Tuple(xs))


class _Choosing(threading.local):
    """Whether this thread is asking a `where`, which must get the nodes themselves. A
    frozen part gives its content as it is then, and not copies that stop gradients."""

    is_on = False


choosing = _Choosing()

_BY_VALUES: Final = (
    "To choose nodes by values or shapes, use `equinox_like.select(tree).where(...)`."
)


def _asked(where: Any, pytree: Any) -> Any:
    before, choosing.is_on = choosing.is_on, True
    try:
        return where(pytree)
    finally:
        choosing.is_on = before


def _ask(where: Any, copy: Any, pytree: Any) -> Any:
    """`where(copy)`, with an error that explains if it used the value of a leaf, or if
    `where` or `pytree` is something else by mistake."""
    try:
        return where(copy)
    except Exception as error:
        if isinstance(where, type) or any(map(is_array, jtu.tree_leaves(where))):
            raise TypeError(
                "The first argument of `tree_at` is `where`, a function of the tree, and "
                "the second one is the tree. As `where` it got "
                f"{where if isinstance(where, type) else describe_node(where)}, which "
                f"fails on the tree: {type(error).__name__}."
            ) from error
        check_not_callable(pytree, "pytree")
        if not isinstance(error, AttributeError | TypeError):
            raise
        if _OpaqueLeaf.__name__ not in str(error):
            raise
        what = str(error).replace(_OpaqueLeaf.__name__, "leaf")
        raise type(error)(
            "`where` must choose nodes by structure alone. It is called with a copy "
            "of `pytree` whose leaves have no value, but used the value of one: "
            f"{what}. To compute the new value from the old one, pass `replace_fn`. "
            + _BY_VALUES
        ) from error


def _position(opaque: list[_OpaqueLeaf], answer: _OpaqueLeaf) -> int:
    try:
        return opaque.index(answer)
    except ValueError:
        raise TypeError(
            "`where` returned a leaf of a tree other than `pytree`. It must use its "
            "argument: `lambda tree: tree.layers[0]`."
        ) from None


def _own_tuples(pytree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """A copy of `pytree` in which each tuple is a `_Tuple`."""

    def copied(part):
        if type(part) is not tuple or is_leaf(part):
            return part
        return _Tuple(_own_tuples(x, is_leaf) for x in part)

    def stop(node):
        return is_leaf(node) or type(node) is tuple

    return jtu.tree_map(copied, pytree, is_leaf=stop)


class _Copies(NamedTuple):
    """All nodes of the two copies of the tree that `where` is called on.

    In `opaque` each leaf is a distinct object; in `filled`, with the real leaves, each
    tuple is. What `where` chose is where both have what it returned for them.
    """

    opaque: Nodes
    filled: Nodes

    def candidates(self, answer: Any, twin: Any) -> list[int]:
        """The places of `answer` in the copy in which such objects are distinct."""
        if type(answer) is not tuple:
            return self.opaque.places_of(answer)
        # Nodes such as `jax.tree_util.Partial` make plain tuples of those they are given.
        # These are new objects too, unless they are empty.
        is_new = type(twin) is _Tuple or bool(twin)
        return self.filled.places_of(twin) if is_new else []

    def locate(self, answer: Any, twin: Any) -> int:
        """The one place of `answer` in the one copy, and of `twin` in the other."""
        candidates = self.candidates(answer, twin)
        opaque, filled = self.opaque.all, self.filled.all
        places = [i for i in candidates if opaque[i] is answer and filled[i] is twin]
        if len(places) == 1:
            return places[0]
        if places:
            raise ValueError(
                f"`where` does not uniquely identify a node of `pytree`: the same "
                f"{answer!r} occurs at {self.opaque.paths_of(answer)}. To replace a "
                "`None` among several, pass `is_leaf=lambda x: x is None`."
            )
        raise _depends_on_leaves() if candidates else _not_in_tree(answer)


def _choose(
    where: Any, answer: Any, twin: Any, copies: _Copies
) -> tuple[list[int], bool]:
    """The places of what `where` returned for the two copies, and whether it is one node
    or a sequence of nodes."""
    is_sequence = isinstance(answer, list | tuple)
    is_one_node = not is_sequence or bool(copies.candidates(answer, twin))
    pairs: Any = [(answer, twin)]
    try:
        if not is_one_node:
            if type(answer) is not type(twin) or len(answer) != len(twin):
                raise _depends_on_leaves()
            pairs = zip(answer, twin, strict=True)
        places = [copies.locate(*pair) for pair in pairs]
    except (TypeError, ValueError):
        copies.opaque.check_assigned(where)
        raise
    # Python has only one `None`, and a default `()` looks like no nodes.
    if not places or any(copies.opaque.all[place] is None for place in places):
        copies.opaque.check_assigned(where)
    return places, is_one_node


def _not_in_tree(node: Any) -> Exception:
    if type(node) is _OpaqueLeaf or node is None or jtu.all_leaves([node]):
        is_method = isinstance(node, types.MethodType)  # its `repr` shows the instance
        shown = f"the method `{node.__qualname__}`" if is_method else repr(node)
        return TypeError(
            f"`where` returned {shown}, which is not in `pytree`. It must return a "
            "node of the tree that it is given, or a list or tuple of nodes; values "
            "of static fields are not nodes, nor are defaults in the class that "
            "`__init__` did not assign."
        )
    return ValueError(
        "`where` must return a node of the tree that it is given, or a list or tuple "
        f"of nodes. It returned {describe_node(node)} that is not in `pytree`."
    )


def _check_no_overlap(places: list[int], nodes: Nodes) -> None:
    ordered = sorted(places)
    for above, below in pairwise(ordered):
        if above == below:
            raise ValueError(
                f"`where` returned the node at `{nodes.path(above)}` twice. Name each "
                "node once."
            )
        if below < nodes.end(above):
            raise ValueError(
                f"`where` returned the node at `{nodes.path(below)}`, which lies inside "
                f"another one that it returned, at `{nodes.path(above)}`. Replace the "
                "outer one alone, or do it in two steps."
            )


def _as_sequence(replace: Any, length: int) -> list[Any]:
    several = f"`where` returned a sequence of {length} nodes"
    try:
        given = len(replace)
    except TypeError:
        given = None
    # A mapping gives keys, and a set has no order.
    if given is None or isinstance(replace, Mapping | Set):
        what = describe_node(replace) + ", which has no length" * (given is None)
        raise TypeError(
            f"{several}, so `replace` must be a sequence of the same length, in their "
            f"order. It is {what}."
        )
    if given != length:
        raise ValueError(f"{several}, but `replace` has {given}.")
    return list(replace)


def _rebuild(leaves: list[Any], nodes: Nodes, new: dict[int, Any]) -> Any:
    """The tree of `nodes` with these leaves, and the nodes `new` at their places."""
    places = (i for i, node in enumerate(nodes.all) if type(node) is _OpaqueLeaf)
    values = dict(zip(places, leaves, strict=True)) | new
    ends = {place: nodes.end(place) for place in new}
    parts: list[Any] = []
    place = 0

    def is_replaced(_):
        nonlocal place
        here, place = place, ends.get(place, place + 1)
        if here in values:
            parts.append(values[here])
        return here in new

    return jtu.tree_structure(nodes.all[0], is_replaced).unflatten(parts)


def _depends_on_leaves() -> ValueError:
    return ValueError(
        "`where` must depend only on the structure of `pytree`. It chose one node in "
        "a copy of the tree without leaves, and another in a copy with them: it must "
        f"not use values, types or shapes of leaves. {_BY_VALUES}"
    )
