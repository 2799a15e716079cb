"""`split` takes a tree apart into its data and a `Skeleton`; `merge` rebuilds it.

    groups, skeleton = split(tree, label)   # label(leaf) -> "a group's name" | STATIC
    tree = merge(groups, skeleton)

A `Skeleton` is the tree without its data. JAX gets it as a static argument, so it is
hashable, and is compared by the strict rule of `strict.py`. Equal skeletons are not
interned: two static leaves that are equal may still differ in what their `==` leaves out.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .deleted import deleted_named
from .nodes import describe_node, path_str
from .require import require_callable
from .strict import has_hash, strict_key, strict_treedef
from .structure import HashedKey


class _Static:
    __slots__ = ()

    def __repr__(self) -> str:
        return "STATIC"

    def __reduce__(self) -> str:
        return "STATIC"


STATIC: Final = _Static()


class Skeleton:
    """A tree without its data: its structure, the label of each leaf and the static
    leaves.

    Made by [`equinox_like.split`][]. Two skeletons are equal if their structure, labels
    and static leaves are equal. Static leaves must also have the same type: `1`, `1.0`
    and `True` differ at any depth, as do `0.0` and `-0.0`; a NaN equals another NaN.

    **Attributes:**

    - `treedef`: the `jax.tree_util.PyTreeDef` of the whole tree.
    - `labels`: for each leaf its label, in JAX's order.
    - `statics`: the leaves labelled `STATIC`, in the same order.
    """

    __slots__ = ("__weakref__", "_contents", "labels", "statics", "treedef")

    _contents: HashedKey
    treedef: Any
    labels: tuple[Hashable, ...]
    statics: tuple[Any, ...]

    def __init__(self) -> None:
        raise TypeError("A Skeleton cannot be instantiated: `split` makes one.")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A Skeleton is immutable: cannot set `{name}`.")

    def __eq__(self, other: object) -> bool:
        return self is other or (
            type(other) is Skeleton and self._contents == other._contents
        )

    def __hash__(self) -> int:
        return hash(self._contents)

    def __repr__(self) -> str:
        return f"Skeleton({self.treedef}, labels={self.labels}, statics={self.statics})"

    def __reduce__(self):
        # A tree, since what pickles a node need not pickle its aux data: that of a
        # compiled function holds its programs.
        try:
            tree = self.treedef.unflatten([STATIC] * len(self.labels))
        except Exception:  # a user's node type does not take placeholders
            return make_skeleton, (self.treedef, self.labels, self.statics)
        return _of_tree, (tree, self.labels, self.statics)

    def __deepcopy__(self, memo: Any) -> "Skeleton":
        return self


@deleted_named
def split(
    tree: Any,
    label: Callable[[Any], Hashable],
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[dict[Hashable, list[Any]], Skeleton]:
    """Takes a tree apart into groups of leaves and a skeleton.

    **Arguments:**

    - `tree`: any pytree.
    - `label`: a function of a leaf that returns the name of its group, or `STATIC` if the
        leaf is part of the structure.
    - `is_leaf`: as for `jax.tree_util.tree_flatten`.

    **Returns:**

    A dictionary from each label to its leaves, in JAX's order, and the
    [`equinox_like.Skeleton`][]. `merge` gives back the tree, with the identical leaves.

    **Raises:**

    `ValueError` if a static leaf cannot be hashed, naming its path.

    The result shares arrays with `tree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = {"w": jnp.ones(2), "name": "first"}
        label = lambda x: "data" if eqx.is_array(x) else eqx.STATIC
        groups, skeleton = eqx.split(tree, label)
        assert skeleton.statics == ("first",)
        assert eqx.merge(groups, skeleton)["w"] is tree["w"]
        ```
    """
    require_callable(label, "split", "label")
    leaves, treedef = jtu.tree_flatten(tree, is_leaf)
    labels = tuple(map(label, leaves))
    groups: dict[Hashable, list[Any]] = {}
    statics = []
    for leaf, name in zip(leaves, labels, strict=True):
        if name is STATIC:
            statics.append(leaf)
        else:
            groups.setdefault(name, []).append(leaf)
    return groups, make_skeleton(treedef, labels, statics)


def merge(groups: Mapping[Hashable, Sequence[Any]], skeleton: Skeleton) -> Any:
    """Puts together what [`equinox_like.split`][] took apart.

    **Arguments:**

    - `groups`: for each label of the skeleton its leaves, in the same order. They may be
        replaced by other values.
    - `skeleton`: from `split`.

    **Raises:**

    `ValueError` if a group is missing, or has too few or too many leaves.

    The result shares arrays with `groups`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = {"w": jnp.ones(2), "name": "layer"}
        label = lambda leaf: "data" if eqx.is_array(leaf) else eqx.STATIC
        groups, skeleton = eqx.split(tree, label)
        doubled = eqx.merge({"data": [2 * x for x in groups["data"]]}, skeleton)
        assert doubled["w"].tolist() == [2, 2] and doubled["name"] == "layer"
        ```
    """
    if not isinstance(skeleton, Skeleton):
        raise TypeError(
            "`merge` takes the groups first, and then the `Skeleton` that `split` "
            f"returned; got {describe_node(skeleton)} as `skeleton`."
        )
    parts = {name: iter(leaves) for name, leaves in groups.items()}
    parts[STATIC] = iter(skeleton.statics)
    try:
        leaves = [next(parts[name]) for name in skeleton.labels]
    except (KeyError, StopIteration, RuntimeError):
        leaves = None
    if leaves is None or any(True for part in parts.values() for _ in part):
        wanted = {name: skeleton.labels.count(name) for name in skeleton.labels}
        wanted.pop(STATIC, None)
        given = {name: len(leaves) for name, leaves in groups.items()}
        raise ValueError(
            f"`merge` was given groups of sizes {given}, but the skeleton has groups "
            f"of sizes {wanted}."
        )
    return skeleton.treedef.unflatten(leaves)


def make_skeleton(
    treedef: Any,
    labels: Sequence[Hashable],
    statics: Sequence[Any],
    names: Callable[[], Sequence[str]] | None = None,
) -> Skeleton:
    """The skeleton with this treedef, these labels and these static leaves.

    `names()` are the names of all leaves for an error; by default, their paths.
    """
    labels, statics = tuple(labels), tuple(statics)
    if not all(map(has_hash, statics)):
        shown = names() if names is not None else leaf_names(treedef, "")
        of_statics = [
            n for n, label in zip(shown, labels, strict=True) if label is STATIC
        ]
        raise _unhashable(statics, of_statics)
    key = strict_treedef(treedef), labels, strict_key(statics)
    contents = HashedKey(key, hash(key))
    made: Any = object.__new__(Skeleton)
    for name, value in (
        ("treedef", treedef),
        ("labels", labels),
        ("statics", statics),
        ("_contents", contents),
    ):
        object.__setattr__(made, name, value)
    return made


def _of_tree(tree: Any, *rest: Any) -> Skeleton:
    return make_skeleton(jtu.tree_structure(tree), *rest)


def leaf_names(treedef: Any, name: str) -> list[str]:
    """An expression for each leaf of a tree with this name, such as `model.weight`."""
    count = treedef.num_leaves
    try:
        found, _ = jtu.tree_flatten_with_path(treedef.unflatten(range(count)))
    except Exception:  # a user's node type cannot hold placeholders
        found = []
    if len(found) != count:  # or what is a child depends on its value
        return [f"{name}.<leaf {i}>" for i in range(count)]
    return [path_str(path, name) for path, _ in found]


def _unhashable(statics: Sequence[Any], names: Sequence[str]) -> ValueError:
    """The error for the first unhashable value."""
    named = zip(statics, names, strict=True)
    value, name = next(pair for pair in named if not has_hash(pair[0]))
    return ValueError(
        f"The static leaf `{name}` is {describe_node(value)}, which cannot be "
        "hashed. Whatever is not an array must be hashable: make it an array, "
        "or put it into a `field(static=True)` of a Module. A configuration may "
        "be a dataclass with `frozen=True`. If it holds arrays, its class must be "
        "a pytree: derive it from `Module`, or register it with "
        "`jax.tree_util.register_dataclass`."
    )
