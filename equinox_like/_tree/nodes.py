"""Paths as a user writes them; all nodes of a tree, by identity or path; one node."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from .._call_path import nodes_with_paths, with_article as with_article
from .arrays import describe_array
from .filters import is_array, is_none


def path_str(path: Sequence[Any], name: str = "") -> str:
    """The expression that reads the leaf at `path` (JAX key entries) from `name`.

    Returns `<root>` for an empty path without a name.
    """
    return name + jtu.keystr(tuple(path)) or "<root>"


def plain_path(path: Sequence[Any]) -> str:
    """The path without the tree's name and the first dot: `layers[0].weight`."""
    return path_str(path).removeprefix(".")


def path_within(path: Sequence[Any]) -> str:
    """As `plain_path`, but empty for the root, also if that is frozen."""
    return jtu.keystr(tuple(path)).removeprefix(".")


def leaf_paths(tree: Any) -> list[str]:
    """The `plain_path` of each leaf, and of each `None`, as a missing bias is."""
    found = jtu.tree_leaves_with_path(tree, is_leaf=is_none)
    return [plain_path(path) for path, _ in found]


def listed(paths: Sequence[str], most: int) -> str:
    """The first paths, up to `most`, and how many more there are."""
    shown = ", ".join(f"`{path or '<root>'}`" for path in paths[:most]) or "none"
    more = len(paths) - most
    return f"{shown} and {more} more" if more > 0 else shown


# How messages end about an object with arrays that JAX does not see.
MAKE_A_PYTREE = (
    "derive the class from `Module`, or register it with "
    "`jax.tree_util.register_dataclass`."
)
_MAX_KEYS = 10  # that a message lists
_SIZED = dict, list, tuple


class Nodes:
    """All nodes and leaves of a tree, in the order in which JAX visits them.

    In trees of the same structure, corresponding nodes have the same place.
    """

    def __init__(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None):
        self.all: list[Any] = []
        self.places: dict[int, list[int]] = {}

        def visit(node):
            self.places.setdefault(id(node), []).append(len(self.all))
            self.all.append(node)
            return is_leaf is not None and is_leaf(node)

        jtu.tree_flatten(tree, visit)

    def places_of(self, node: Any) -> list[int]:
        return self.places.get(id(node), [])

    def end(self, place: int) -> int:
        """`ends[place]`, which takes less time if few are needed."""
        return place + jtu.tree_structure(self.all[place]).num_nodes

    @functools.cached_property
    def ends(self) -> list[int]:
        """For each node, the place after its last descendant."""
        found: list[int] = []
        following = [jtu.tree_structure(self.all[0])]
        while following:
            treedef = following.pop()
            found.append(len(found) + treedef.num_nodes)
            following += reversed(treedef.children())
        return found

    def paths_of(self, node: Any) -> str:
        """The paths of `places_of(node)`, for a message."""
        return ", ".join(f"`{self.path(place)}`" for place in self.places_of(node))

    def path(self, place: int) -> str:
        return path_str(self.key_paths[place])

    @functools.cached_property
    def key_paths(self) -> list[tuple[Any, ...]]:
        """The key path of each node, if no `is_leaf` was given."""
        return node_paths(self.all[0])

    @functools.cached_property
    def plain_paths(self) -> list[str]:
        """As `key_paths`, but as a user would write them; empty for the tree itself."""
        return [path_within(path) for path in self.key_paths]

    def check_assigned(self, where: Callable[[Any], Any]) -> None:
        """Raises if `where` chooses a field that was not assigned. In a copy of the tree
        each of these has its error as its value."""
        copy = jtu.tree_map(lambda leaf: leaf, self.all[0])
        for path, old, new in zip(
            self.key_paths, self.all, Nodes(copy).all, strict=True
        ):
            # A node without leaves may be the user's own object.
            for name in unset_fields(new) if new is not old else ():
                object.__setattr__(new, name, not_assigned(jtu.keystr(path), new, name))
        try:
            answer = where(copy)
        except Exception:
            return
        for part in answer if isinstance(answer, list | tuple) else [answer]:
            if isinstance(part, TypeError):
                raise part


def node_paths(tree: Any) -> list[tuple[Any, ...]]:
    """The key path of each node and leaf, in the order of `Nodes`."""
    return [path for path, _ in nodes_with_paths(tree)]


def flatten_with_nodes(tree: Any) -> tuple[list[Any], Any, list[Any]]:
    """As `jax.tree_util.tree_flatten`, and all nodes and leaves, from top to bottom."""
    nodes: list[Any] = []
    visit: Any = nodes.append  # returns `None`: nothing else is a leaf
    return *jtu.tree_flatten(tree, visit), nodes


def children_of(node: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """The children of a node, each with a key path of one entry, and its structure."""
    is_below = False

    def stop(_):
        nonlocal is_below
        was_below, is_below = is_below, True
        return was_below

    return jtu.tree_flatten_with_path(node, is_leaf=stop)


def unset_fields(node: Any) -> list[str]:
    """The fields of a dataclass that were not assigned, so that reading one gives the
    default in the class. They are not part of the tree."""
    own = getattr(node, "__dict__", None)
    if own is None or not dataclasses.is_dataclass(node):
        return []
    names = [f.name for f in dataclasses.fields(node) if not f.metadata.get("static")]
    kinds = {name: type(getattr(type(node), name, None)) for name in names}
    return [name for name in names if name not in own and kinds[name] is not property]


def not_assigned(path: str, node: Any, name: str) -> TypeError:
    """The error for one of `unset_fields(node)`, where `node` is at `path`."""
    return TypeError(
        f"`pytree{path}.{name}` cannot be set: defaults in the class that `__init__` did "
        f"not assign are not part of the tree. In {type(node).__qualname__}, assign "
        f"`self.{name}` in `__init__`, or in `__post_init__` if `__init__` is generated."
    )


def describe_node(node: Any) -> str:
    """Describes a node or leaf for a message: its type, and its size or keys."""
    if node is None:
        return "None"
    if is_array(node):
        return describe_array(node)
    name = with_article(type(node).__name__)
    if isinstance(node, dict) and len(node) <= _MAX_KEYS:
        return f"{name} with the keys {list(node)}"
    return f"{name} of length {len(node)}" if isinstance(node, _SIZED) else name


def describe_both(
    one: Any, other: Any, describe: Callable[[Any], str] = describe_node
) -> tuple[str, str]:
    """Both descriptions, for a message on how the two differ."""
    first, second = describe(one), describe(other)
    if first == second and type(one) is not type(other):
        # Often a class that was defined again, as by a cell of a notebook.
        second += f" of another class called {type(other).__name__}"
    return first, second
