"""The leaves of a model, each with its layer, and `reinit`, which draws some again."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..._module import Frozen, Module
from ..._tree.nodes import Nodes, children_of, plain_path
from ..._tree.paths import matches, near_paths
from ..._typing import PRNGKeyArray
from .._base.init import WEIGHTS, Init, initialised, key_named, layout_of, leading_axes
from .._base.state import State
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
        conditions.append(_condition(rule[0], f"`rules[{i}]`"))
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
        near = near_paths([selector], Nodes(tree).plain_paths)
        raise ValueError(
            f"The rule for {selector!r} chooses no parameter. Correct its selector, or "
            f"pass `allow_unused=True`.{near}"
        )
    return jtu.tree_structure(tree).unflatten(leaves)


def _condition(selector: Any, rule: str) -> Callable[[Place], bool]:
    """Whether the selector of a rule chooses a place."""
    if isinstance(selector, str):
        return lambda place: matches(selector, plain_path(place.path))
    match selector:
        case (classes, str(name)):
            names = (name,)
        case classes:
            names = WEIGHTS
    each = classes if isinstance(classes, tuple) else (classes,)
    if all(isinstance(cls, type) for cls in each):
        return lambda place: isinstance(place.owner, each) and place.name in names
    if not callable(selector):
        raise TypeError(
            "A selector must be a class, a tuple of classes, a pair `(class, field)`, a "
            f"pattern for paths, or a function; that of {rule} is {selector!r}."
        )
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
