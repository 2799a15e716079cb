"""Trees taken apart and put together: `partition` and `combine`, `split` and `merge`.

`partition` has `None` for a leaf that is left out. Each part has the structure of the
whole tree, so gradients, updates and parameters correspond leaf by leaf. `split` gives the
data and a `Skeleton`, the tree without its data:

    groups, skeleton = split(tree, label)   # label(leaf) -> "a group's name" | STATIC
    tree = merge(groups, skeleton)

JAX gets the skeleton as a static argument, so it is hashable, and is compared by the strict
rule of `strict.py`. Equal skeletons are not interned: two static leaves that are equal may
still differ in what their `==` leaves out.
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax.tree_util as jtu

from .deleted import deleted_named
from .filters import is_array, is_none
from .format import tree_pformat
from .match import flatten_up_to, leaf_name
from .nodes import describe_node, path_str
from .require import one_bool, require_callable
from .strict import HashedKey, has_hash, strict_key, strict_treedef

_F = TypeVar("_F", bound=Callable[..., Any])

_NAMES = "filter_spec", "pytree"


def filter(
    pytree: Any,
    filter_spec: Any,
    inverse: bool = False,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Keeps the leaves that `filter_spec` chooses, and replaces the others by `None`.

    **Arguments:**

    - `pytree`: any pytree.
    - `filter_spec`: usually a function `leaf -> bool`, such as
        [`equinox_like.is_array`][]. In general a prefix tree of `pytree`, whose leaves
        are `True`, `False`, or such functions, mapped over the matching subtree. The one
        exception is [`equinox_like.trainable`][], which is called on the whole subtree.
    - `inverse`: if `True`, the other leaves are kept instead.
    - `replace`: the value that replaces a leaf that is not kept.
    - `is_leaf`: a function `node -> bool`: which nodes to treat as leaves.

    **Returns:**

    A tree of the structure of `pytree`; kept leaves are the identical objects.

    **Raises:**

    `ValueError` if `filter_spec` is not a prefix of `pytree`, or has a leaf that is
    neither a bool nor a callable.

    The result shares arrays with `pytree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = [jnp.ones(2), 3, "text"]
        assert eqx.filter(tree, eqx.is_array)[1:] == [None, None]
        ```
    """
    kept, rest = partition(pytree, filter_spec, replace, is_leaf)
    return rest if inverse else kept


@deleted_named
def partition(
    pytree: Any,
    filter_spec: Any,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[Any, Any]:
    """Splits a tree in two: the leaves that `filter_spec` chooses, and the others.

    Both trees have the structure of `pytree`, with `None` in place of the leaves that
    are in the other one. [`equinox_like.combine`][] puts them together again.

    Arguments and errors are those of [`equinox_like.filter`][].

    The result shares arrays with `pytree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        params, static = eqx.partition({"w": jnp.ones(2), "f": jnp.tanh}, eqx.is_array)
        assert params["f"] is None and static["w"] is None
        assert eqx.combine(params, static)["f"] is jnp.tanh
        ```
    """
    if is_leaf is not None and not jtu.all_leaves([filter_spec]):
        return _partition_below(pytree, filter_spec, replace, is_leaf)
    leaves, treedef = jtu.tree_flatten(pytree, is_leaf)
    keep = evaluate_filter(filter_spec, pytree, leaves, treedef, is_leaf)
    kept = [x if k else replace for x, k in zip(leaves, keep, strict=True)]
    rest = [replace if k else x for x, k in zip(leaves, keep, strict=True)]
    return treedef.unflatten(kept), treedef.unflatten(rest)


def combine(*pytrees: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Puts together what [`equinox_like.partition`][] split.

    It fills each `None` of the first tree from the trees after it.

    **Arguments:**

    - `*pytrees`: trees of the same structure, where `None` counts as a leaf. At each
        position the first value that is not `None` is taken. Where the first tree has a
        leaf, a later one may have a subtree, which is taken only if the leaf is `None`.
    - `is_leaf`: further nodes to treat as leaves.

    **Returns:**

    The filled tree, with the identical leaves.

    **Raises:**

    `ValueError` if the structures differ, `TypeError` if no tree is given.

    The result shares arrays with `pytrees`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        arrays, static = {"w": jnp.ones(2), "f": None}, {"w": None, "f": jnp.tanh}
        assert eqx.combine(arrays, static)["f"] is jnp.tanh
        ```
    """
    if not pytrees:
        raise TypeError("`combine` takes at least one tree.")
    stop = is_none if is_leaf is None else lambda x: x is None or is_leaf(x)
    leaves, treedef = jtu.tree_flatten(pytrees[0], stop)
    for i, other in enumerate(pytrees[1:], 1):
        names = "pytrees[0]", f"pytrees[{i}]"
        others = flatten_up_to(treedef, pytrees[0], other, *names, stop)
        leaves = [b if a is None else a for a, b in zip(leaves, others, strict=True)]
    return treedef.unflatten(leaves)


def map_arrays(fun: Callable[[Any], Any], pytree: Any) -> Any:
    """The tree with `fun(x)` in place of each array; other leaves stay."""
    return jtu.tree_map(lambda x: fun(x) if is_array(x) else x, pytree)


def map_nodes(
    fun: Callable[[Any], Any], pytree: Any, is_node: Callable[[Any], bool]
) -> Any:
    """The tree with `fun(node)` in place of each node for which `is_node` holds."""
    return jtu.tree_map(lambda x: fun(x) if is_node(x) else x, pytree, is_leaf=is_node)


def tree_filter(fun: _F) -> _F:
    """Marks a filter that is called on a whole tree, and returns a tree of bools."""
    setattr(fun, _TREE_FILTER, True)
    return fun


_TREE_FILTER = "_equinox_like_tree_filter"


def _is_tree_filter(spec: Any) -> bool:
    return getattr(spec, _TREE_FILTER, False) is True


def _partition_below(pytree, filter_spec, replace, is_leaf) -> tuple[Any, Any]:
    """As `partition`, for an `is_leaf` that holds below the leaves of `filter_spec`, and
    not for the nodes above them."""
    specs, treedef = jtu.tree_flatten(filter_spec)
    subtrees = flatten_up_to(treedef, filter_spec, pytree, *_NAMES)
    halves: list[tuple[Any, Any]] = []
    for i, (spec, subtree) in enumerate(zip(specs, subtrees, strict=True)):
        _check_filter(spec, filter_spec, i, _NAMES[0])
        halves.append(partition(subtree, spec, replace, is_leaf))
    kept = treedef.unflatten([kept for kept, _ in halves])
    return kept, treedef.unflatten([rest for _, rest in halves])


def evaluate_filter(
    filter_spec: Any,
    pytree: Any,
    leaves: list[Any],
    treedef: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    names: tuple[str, str] = _NAMES,
) -> list[bool]:
    """One bool for each leaf of `pytree`, whose leaves and treedef these are.

    `names` are those of `filter_spec` and `pytree` in errors.
    """
    if _is_tree_filter(filter_spec):
        chosen = treedef.flatten_up_to(filter_spec(pytree))
        return [all(jtu.tree_leaves(flags)) for flags in chosen]
    if callable(filter_spec) and jtu.all_leaves([filter_spec]):
        return _flags(filter_spec, leaves, 0, pytree, is_leaf, names)
    specs, spec_treedef = jtu.tree_flatten(filter_spec)
    if spec_treedef == treedef and set(map(type, specs)) <= {bool}:
        return specs
    keep: list[bool] = []
    subtrees = flatten_up_to(spec_treedef, filter_spec, pytree, *names)
    for i, (spec, subtree) in enumerate(zip(specs, subtrees, strict=True)):
        _check_filter(spec, filter_spec, i, names[0])
        below = jtu.tree_leaves(subtree, is_leaf)
        if _is_tree_filter(spec):
            keep += evaluate_filter(spec, subtree, *jtu.tree_flatten(subtree, is_leaf))
        elif isinstance(spec, bool):
            keep.extend([spec] * len(below))
        else:
            keep += _flags(spec, below, len(keep), pytree, is_leaf, names)
    return keep


def _flags(
    spec: Callable[[Any], Any],
    leaves: list[Any],
    start: int,
    pytree: Any,
    is_leaf: Callable[[Any], bool] | None,
    names: tuple[str, str],
) -> list[bool]:
    """One bool for each of these leaves, which begin at the one with number `start`."""
    filter_name, tree_name = names
    flags: list[bool] = []

    def name():
        return leaf_name(pytree, start + len(flags), tree_name, is_leaf)

    for leaf in leaves:
        try:
            answer = spec(leaf)
        except Exception as error:
            error.add_note(
                f"This is from a function of `{filter_name}`, called with the leaf "
                f"`{name()}`. It is called with each leaf, not with the tree."
            )
            if isinstance(spec, type):
                error.add_note(_tree_of_bools("class", f"of({spec.__name__})"))
            raise
        if type(answer) is not bool:
            answer = one_bool(answer, f"A function of `{filter_name}`", name)
        flags.append(answer)
    return flags


def _tree_of_bools(criterion: str, chosen: str) -> str:
    return (
        f"To choose by {criterion}, make a tree of bools: "
        f"`eqx.select(jax.tree.map(lambda _: False, tree)).{chosen}.set(True)`."
    )


def _check_filter(spec: Any, filter_spec: Any, number: int, filter_name: str) -> None:
    if not callable(spec) and not isinstance(spec, bool):
        fix = ""
        if isinstance(spec, str):
            fix = " " + _tree_of_bools("path", "at(path)")
        raise ValueError(
            f"The leaves of `{filter_name}` must be `True`, `False` or callables; at "
            f"`{leaf_name(filter_spec, number, filter_name)}` there is "
            f"`{tree_pformat(spec)}`.{fix}"
        )


def hashable_partition(
    pytree: Any, filter_fn: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], Any]]:
    """Partitions a tree into the leaves that `filter_fn` chooses, and a hashable rest.

    **Arguments:**

    - `pytree`: any pytree.
    - `filter_fn`: called with each leaf.

    **Returns:**

    `(dynamic, (static, treedef))`. `dynamic` has the chosen leaves, and `static` the
    others; both are tuples with one entry for each leaf, `None` if the leaf is in the
    other one. [`equinox_like.internal.hashable_combine`][] rebuilds the tree.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = {"a": jnp.ones(2), "b": "text"}
        dynamic, static = eqx.internal.hashable_partition(tree, eqx.is_array)
        assert dynamic == (tree["a"], None) and static[0] == (None, "text")
        assert eqx.internal.hashable_combine(dynamic, static)["b"] == "text"
        ```
    """
    leaves, treedef = jtu.tree_flatten(pytree)
    chosen = [bool(filter_fn(x)) for x in leaves]
    dynamic = tuple(x if c else None for x, c in zip(leaves, chosen, strict=True))
    static = tuple(None if c else x for x, c in zip(leaves, chosen, strict=True))
    return dynamic, (static, treedef)


def hashable_combine(
    dynamic_leaves: tuple[Any, ...], static: tuple[tuple[Any, ...], Any]
) -> Any:
    """The inverse of [`equinox_like.internal.hashable_partition`][].

    **Arguments:**

    - `dynamic_leaves`, `static`: as returned by `hashable_partition`, or with other
        leaves.

    **Returns:**

    The tree. Where both have a leaf, the static one is taken.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = {"a": jnp.ones(2), "b": "text"}
        dynamic, static = eqx.internal.hashable_partition(tree, eqx.is_array)
        doubled = tuple(x if x is None else 2 * x for x in dynamic)
        assert eqx.internal.hashable_combine(doubled, static)["a"].tolist() == [2, 2]
        ```
    """
    static_leaves, treedef = static
    pairs = zip(dynamic_leaves, static_leaves, strict=True)
    return treedef.unflatten([d if s is None else s for d, s in pairs])


class _Label(enum.Enum):  # so that it is the same object after pickling
    STATIC = "static"


STATIC: Final = _Label.STATIC


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Skeleton:
    """A tree without its data: its structure, the label of each leaf and the static
    leaves.

    Made by [`equinox_like.internal.split`][]. Two skeletons are equal if their structure,
    labels and static leaves are equal. Static leaves must also have the same type: `1`,
    `1.0` and `True` differ at any depth, as do `0.0` and `-0.0`; a NaN equals another NaN.

    **Attributes:**

    - `treedef`: the `jax.tree_util.PyTreeDef` of the whole tree.
    - `labels`: for each leaf its label, in JAX's order.
    - `statics`: the leaves labelled `STATIC`, in the same order.
    """

    treedef: Any
    labels: tuple[Hashable, ...]
    statics: tuple[Any, ...]
    _contents: HashedKey

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
    [`equinox_like.internal.Skeleton`][]. `merge` gives back the tree, with the identical
    leaves.

    **Raises:**

    `ValueError` if a static leaf cannot be hashed, naming its path.

    The result shares arrays with `tree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = {"w": jnp.ones(2), "name": "first"}
        label = lambda x: "data" if eqx.is_array(x) else eqx.internal.STATIC
        groups, skeleton = eqx.internal.split(tree, label)
        assert skeleton.statics == ("first",)
        assert eqx.internal.merge(groups, skeleton)["w"] is tree["w"]
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
    """Puts together what [`equinox_like.internal.split`][] took apart.

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
        label = lambda leaf: "data" if eqx.is_array(leaf) else eqx.internal.STATIC
        groups, skeleton = eqx.internal.split(tree, label)
        doubled = eqx.internal.merge({"data": [2 * x for x in groups["data"]]}, skeleton)
        assert doubled["w"].tolist() == [2, 2] and doubled["name"] == "layer"
        ```
    """
    if not isinstance(skeleton, Skeleton):
        raise TypeError(
            "`merge` takes the groups first, and then the `Skeleton` that `split` "
            f"returned; got {describe_node(skeleton)} as `skeleton`."
        )
    wanted = Counter(name for name in skeleton.labels if name is not STATIC)
    given = {name: len(leaves) for name, leaves in groups.items() if len(leaves)}
    if given != wanted:
        raise ValueError(
            f"`merge` was given groups of sizes {given}, but the skeleton has groups "
            f"of sizes {dict(wanted)}."
        )
    parts = {name: iter(leaves) for name, leaves in groups.items()}
    parts[STATIC] = iter(skeleton.statics)
    return skeleton.treedef.unflatten([next(parts[x]) for x in skeleton.labels])


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
    return Skeleton(treedef, labels, statics, HashedKey(key, hash(key)))


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
