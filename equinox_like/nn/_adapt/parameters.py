"""The parameters of a model, each with its layer: `summary` and `reinit`."""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._module import Frozen, Module
from ..._module.freezing import leaves_under, trainable_leaves
from ..._tree import is_array
from ..._tree.arrays import is_typed_key
from ..._tree.filters import is_array_or_struct
from ..._tree.glob import matches, near_paths
from ..._tree.nodes import children_of, leaf_paths, plain_path
from ..._tree.table import table_lines
from ..._typing import PRNGKeyArray
from .._base.arguments import as_size
from .._base.init import WEIGHTS, Init, initialised, key_named, layout_of, leading_axes
from .._base.state import State, StateIndex
from .._scale.stacked import Stacked


class Place(NamedTuple):
    """A leaf, its path, and the nodes around it."""

    path: tuple[Any, ...]
    leaf: Any
    # The innermost Module or State that contains the leaf, and the Module's field.
    owner: Any
    name: str | None
    # The depths of all `Stacked` around it, which are leading axes of its array.
    rows: tuple[int, ...]
    # The classes of all nodes on the path, from the root on.
    classes: tuple[type, ...]


def places(tree: Any) -> Iterator[Place]:
    """All leaves of `tree`, in JAX's order."""
    return _below(tree, Place((), None, None, None, (), ()))


def _below(node: Any, here: Place) -> Iterator[Place]:
    if node is not None and jtu.all_leaves([node]):
        yield here._replace(leaf=node)
        return
    if isinstance(node, Frozen):
        # `Frozen` is skipped: its content belongs to the layer around it.
        yield from _below(node.value, here)
        return
    classes = (*here.classes, type(node))
    rows = (*here.rows, node.depth) if isinstance(node, Stacked) else here.rows
    children, _ = children_of(node)
    for step, child in children:
        owner, name = here.owner, here.name
        if isinstance(node, Module):
            owner, name = node, getattr(step[0], "name", None)
        elif isinstance(node, State):
            owner, name = node, None
        yield from _below(
            child, Place((*here.path, *step), None, owner, name, rows, classes)
        )


_Status = Literal["trainable", "frozen", "state", "mixed"]


class SummaryRow(NamedTuple):
    """One row of a [`equinox_like.nn.Summary`][].

    **Attributes:**

    - `path`, `shape`, `dtype`: of the array; `layer`: the class of its layer.
    - `params`, `bytes`: the number of its elements, and their size. A typed PRNG key
        counts as the integers that it consists of.
    - `status`: `"trainable"`, `"frozen"` or `"state"`.
    - `tied_to`: the path at which the same array was counted, if it occurs there too.

    In a row for several arrays, `shape` is `None`, and a value that differs between them
    is `"mixed"`.
    """

    path: str
    layer: str
    shape: tuple[int, ...] | None
    dtype: str
    params: int
    bytes: int
    status: _Status
    tied_to: str | None = None


class Summary:
    """The result of [`equinox_like.nn.summary`][]: `print` it, or read its attributes.

    **Attributes:**

    - `rows`: a list of [`equinox_like.nn.SummaryRow`][].
    - `total_params`, `trainable_params`: the number of elements of all arrays, and of
        those that are trained.
    - `total_bytes`: the size of all arrays in bytes.
    """

    rows: list[SummaryRow]
    total_params: int
    trainable_params: int
    total_bytes: int

    def __init__(self, rows: list[SummaryRow], arrays: list[SummaryRow]):
        """**Arguments:**

        - `rows`: what to show.
        - `arrays`: one row for each array, for the totals.
        """
        counted = [row for row in arrays if row.tied_to is None]
        self.rows = rows
        self.total_params = sum(row.params for row in counted)
        self.trainable_params = sum(
            row.params for row in counted if row.status == "trainable"
        )
        self.total_bytes = sum(row.bytes for row in counted)
        self._dtypes: Counter[str] = Counter()
        for row in counted:
            self._dtypes[row.dtype] += row.params

    def __str__(self) -> str:
        head = ("path", "layer", "shape", "dtype", "params", "bytes", "status")
        table = [head, *(_cells(row) for row in self.rows)]
        lines = table_lines(table, right_aligned=(4, 5))
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(lines[1])
        lines.append(
            f"{self.total_params:,} parameters, {self.trainable_params:,} trainable, "
            f"{self.total_bytes:,} bytes"
        )
        if len(self._dtypes) > 1:
            each = (f"{number:,} {dtype}" for dtype, number in self._dtypes.items())
            lines.append(f"of these {', '.join(each)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def summary(tree: Any, *, depth: int | None = None, where: Any = None) -> Summary:
    """A table of the arrays of a model.

    **Arguments:**

    - `tree`: any pytree. `jax.ShapeDtypeStruct`s count as arrays if there are no arrays,
        so a model that is too large to build can be summarised through
        [`equinox_like.filter_eval_shape`][]. Beside arrays they are static values.
    - `depth`: the length of the paths in the table: deeper arrays are summed up in one
        row.
    - `where`: restricts the table to a part of the model: a function that returns it,
        as in [`equinox_like.tree_at`][], a class of layers, or a pattern for paths, as
        in [`equinox_like.trainable`][].

    **Returns:**

    A [`equinox_like.nn.Summary`][], with one row for each array: its path, the class of
    the layer, shape, dtype, number of elements, bytes, and whether it is trainable,
    frozen (or in a `field(trainable=False)`, or an integer), or state. An array that
    occurs at several places is counted once. No values are read from the device.

    **Raises:**

    `ValueError` if `depth` is negative or not an integer, or if `where` chooses nothing.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        summary = eqx.nn.summary(model)
        assert summary.total_params == 3 * 8 + 8 + 8 * 2 + 2
        assert summary.rows[0].path == "layers[0].weight"
        print(summary)
        ```
    """
    if depth is not None:
        depth = as_size("`summary`", "depth", depth)
    found = list(places(tree))
    flags = trainable_leaves(tree, _is_parameter)
    shown = [True] * len(found) if where is None else leaves_under(tree, where)
    if not any(shown) and where is not None:
        raise ValueError(f"`summary` found nothing in the tree for `where`, {where!r}.")
    # A struct stands for an array in a tree of structs, and is a value beside arrays.
    has_arrays = any(is_array(place.leaf) for place in found)
    is_counted = is_array if has_arrays else is_array_or_struct
    firsts: dict[int, str] = {}
    kept, arrays = [], []
    for place, trained, is_shown in zip(found, flags, shown, strict=True):
        if is_shown and is_counted(place.leaf):
            kept.append(place)
            arrays.append(_row(place, trained, firsts))
    rows = arrays if depth is None else _summed(zip(kept, arrays, strict=True), depth)
    return Summary(rows, arrays)


def _is_parameter(leaf: Any) -> bool:
    return is_array_or_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _row(place: Place, trained: bool, firsts: dict[int, str]) -> SummaryRow:
    leaf, path = place.leaf, plain_path(place.path)
    is_state = isinstance(place.owner, State | StateIndex)
    status: _Status = "state" if is_state else "trainable" if trained else "frozen"
    first = path
    if is_array(leaf):  # a struct may occur twice without being one shared array
        first = firsts.setdefault(id(leaf), path)
    tied_to = None if first == path else first
    array = tuple(leaf.shape), str(leaf.dtype), *_measure(leaf)
    return SummaryRow(path, _class_name(place), *array, status, tied_to)


def _measure(leaf: Any) -> tuple[int, int]:
    """The number of elements of an array, and its size in bytes."""
    dtype, number = leaf.dtype, math.prod(leaf.shape)
    if is_typed_key(leaf):
        struct = jax.ShapeDtypeStruct(leaf.shape, dtype)
        data = jax.eval_shape(jax.random.key_data, struct)
        dtype, number = data.dtype, math.prod(data.shape)
    bits = 8 * np.dtype(dtype).itemsize
    for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        if jnp.issubdtype(dtype, kind):
            bits = info(dtype).bits  # four for int4
    return number, -(-number * bits // 8)


def _class_name(place: Place) -> str:
    if place.owner is not None:
        return type(place.owner).__name__
    return place.classes[-1].__name__ if place.classes else ""


def _summed(pairs: Iterable[tuple[Place, SummaryRow]], depth: int) -> list[SummaryRow]:
    groups: dict[str, list[tuple[Place, SummaryRow]]] = {}
    for place, row in pairs:
        groups.setdefault(plain_path(place.path[:depth]), []).append((place, row))
    return [_sum(path, group, depth) for path, group in groups.items()]


def _sum(path: str, group: list[tuple[Place, SummaryRow]], depth: int) -> SummaryRow:
    place, first = group[0]
    if len(group) == 1 and len(place.path) <= depth:
        return first
    rows = [row for _, row in group]
    counted = [row for row in rows if row.tied_to is None]
    dtypes, statuses = {row.dtype for row in rows}, {row.status for row in rows}
    return SummaryRow(
        path,
        place.classes[depth].__name__ if depth < len(place.classes) else first.layer,
        None,
        first.dtype if len(dtypes) == 1 else "mixed",
        sum(row.params for row in counted),
        sum(row.bytes for row in counted),
        first.status if len(statuses) == 1 else "mixed",
    )


def _cells(row: SummaryRow) -> tuple[str, ...]:
    status = row.status if row.tied_to is None else f"{row.status}, = {row.tied_to}"
    shape = "" if row.shape is None else str(row.shape)
    numbers = f"{row.params:,}", f"{row.bytes:,}"
    return row.path, row.layer, shape, row.dtype, *numbers, status


_Tree = TypeVar("_Tree")


def reinit(
    tree: _Tree,
    rules: Sequence[tuple[Any, Init]],
    *,
    key: PRNGKeyArray,
    allow_unused: bool = False,
) -> _Tree:
    """Initialises parameters of a model again, by rules.

    **Arguments:**

    - `tree`: a model; its floating-point and complex arrays can be chosen, and also
        `jax.ShapeDtypeStruct`s, which become arrays.
    - `rules`: pairs of a selector and an initialiser. For each parameter the first pair
        whose selector matches is used. A selector is
        - a class of layers, or a tuple of classes, for their weights;
        - a pair of a class and the name of a field: `(eqx.nn.Linear, "bias")`;
        - a pattern for the path: `"layers[*].weight"`, `"**.query_proj.weight"`, in which
            `*` stands for anything within one component and `**` for any number of
            components;
        - a function `(path, layer, name, array) -> bool`.

        Initialisers are those of [`equinox_like.nn.Linear`][]. A function gets the shape
        in JAX's layout, so that fan-in and fan-out are right.
    - `key`: a PRNG key. Each parameter is drawn with a key that is made from it and the
        path, so it does not depend on other parts of the model.
    - `allow_unused`: whether a selector may choose nothing.

    **Returns:**

    The new model. Arrays that no rule chooses are the identical objects.

    **Raises:**

    `ValueError` if an initialiser gives another shape, naming the path, or if a selector
    chooses nothing. `TypeError` if a rule is not a pair, or for another selector.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
        rules = [
            ("layers[2].weight", "zeros"),
            (eqx.nn.Linear, jax.nn.initializers.he_normal()),
            ((eqx.nn.Linear, "bias"), 0.0),
        ]
        model = eqx.nn.reinit(model, rules, key=jax.random.key(1))
        assert not model.layers[2].weight.any() and model.layers[0].weight.any()
        assert not model.layers[0].bias.any()
        ```
    """
    rules, conditions = list(rules), []
    for i, rule in enumerate(rules):
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            raise TypeError(
                "`reinit` takes a sequence of pairs `(selector, initialiser)` as `rules`; "
                f"`rules[{i}]` is {rule!r}."
            )
        conditions.append(_condition(rule[0]))
        if conditions[i] is None:
            raise TypeError(
                "A selector must be a class, a tuple of classes, a pair of a class and "
                "the name of a field, a pattern for paths, or a function; that of "
                f"`rules[{i}]` is {rule[0]!r}."
            )
    used = [False] * len(rules)
    leaves = []
    for place in places(tree):
        dtype = getattr(place.leaf, "dtype", None)
        may_be = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
        chosen = [may_be and condition(place) for condition in conditions]
        used = [a or b for a, b in zip(used, chosen, strict=True)]
        leaf = place.leaf
        if True in chosen:
            _, init = rules[chosen.index(True)]
            with key_named(key, "`reinit`"):
                leaf = _drawn(init, place, key)
        leaves.append(leaf)
    if not (allow_unused or all(used)):
        selector = rules[used.index(False)][0]
        near = near_paths([selector], leaf_paths(tree))
        raise ValueError(
            f"The rule for {selector!r} chooses no parameter. Correct its selector, or "
            f"pass `allow_unused=True`.{near}"
        )
    return jtu.tree_structure(tree).unflatten(leaves)


def _condition(selector: Any) -> Callable[[Place], bool] | None:
    """Whether a selector chooses a place; `None` for what is no selector."""
    if isinstance(selector, str):
        return lambda place: matches(selector, plain_path(place.path))
    classes, names = selector, WEIGHTS
    if (
        isinstance(selector, tuple)
        and len(selector) == 2
        and isinstance(selector[1], str)
    ):
        classes, names = selector[0], (selector[1],)
    each = classes if isinstance(classes, tuple) else (classes,)
    if all(isinstance(cls, type) for cls in each):
        return lambda place: isinstance(place.owner, each) and place.name in names
    if not callable(selector):
        return None
    return lambda place: bool(
        selector(plain_path(place.path), place.owner, place.name, place.leaf)
    )


def _drawn(init: Init, place: Place, key: Any) -> Any:
    path = plain_path(place.path)
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    layout = layout_of(place.owner, place.name or "")
    shape, dtype = tuple(place.leaf.shape), jnp.result_type(place.leaf)
    number = leading_axes(place.owner, place.name or "", len(shape), len(place.rows))
    if number == 0 or (not callable(init) and not isinstance(init, str)):
        return initialised(init, key, shape, dtype, layout, path)
    rows, shape = shape[:number], shape[number:]
    if 0 in rows:  # there is nothing to draw
        return jnp.zeros((*rows, *shape), dtype)
    keys = jax.random.split(key, math.prod(rows))
    drawn = [initialised(init, k, shape, dtype, layout, path) for k in keys]
    return jnp.stack(drawn).reshape(*rows, *shape)
