"""`Shared`: one node at several places of a model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from ..._module import Module
from ..._tree import is_array_like, tree_at, tree_pformat
from ..._tree.at_where import read

_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True, repr=False)
class SharedNode:
    """Stands in a [`equinox_like.nn.Shared`][] where a node was removed."""

    def __repr__(self) -> str:
        return "SharedNode"


class Shared(Module, Generic[_Tree]):
    """Shares parameters between places of a model, as in tied weights.

    It holds each shared node in one place only. A call returns the whole model, with the
    node in all its places. So a shared array has one gradient, the sum over its uses, and
    an optimiser updates it once.

    It shares arrays with the tree that it is made of: to donate one deletes those of the
    other. [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class LanguageModel(eqx.Module):
            shared: eqx.nn.Shared[tuple[eqx.nn.Embedding, eqx.nn.Linear]]

            def __init__(self, key):
                k1, k2 = jax.random.split(key)
                embedding = eqx.nn.Embedding(10, 4, key=k1)
                linear = eqx.nn.Linear(4, 10, use_bias=False, key=k2)
                self.shared = eqx.nn.Shared(
                    (embedding, linear), where="[1].weight", get="[0].weight"
                )

            def __call__(self, token):
                embedding, linear = self.shared()
                return linear(embedding(token))

        model = LanguageModel(jax.random.key(0))
        assert len(jax.tree.leaves(eqx.filter(model, eqx.is_array))) == 1
        assert model(jnp.array(3)).shape == (10,)
        ```
    """

    pytree: _Tree
    where: Callable[[_Tree], Any] | str | Sequence[str]
    get: Callable[[_Tree], Any] | str | Sequence[str]

    def __init__(
        self,
        pytree: _Tree,
        where: Callable[[_Tree], Any] | str | Sequence[str],
        get: Callable[[_Tree], Any] | str | Sequence[str],
    ):
        """**Arguments:**

        - `pytree`: the model, or the part of it that has the nodes.
        - `where`: the node to remove, or several: a path such as `"layers[0].weight"`, a
            sequence of paths, or a function that returns the node, or a sequence of
            nodes, as in [`equinox_like.tree_at`][].
        - `get`: the nodes that take their places, one for each, in the same form. A
            function may compute them, for example a transpose. Paths can be pickled and
            exported; a lambda cannot.

        **Raises:**

        `ValueError` if a removed node and its replacement differ in structure, shape or
        dtype, if they are the same node, or if a path does not exist.
        """
        removed = _nodes_at(where, pytree)
        is_one = isinstance(where, str) or (
            callable(where) and _is_one(where(pytree), removed)
        )
        replaced = [_asked(get, pytree)] if is_one else list(_asked(get, pytree))
        if len(removed) != len(replaced):
            raise ValueError(
                "`where` and `get` must return the same number of nodes: `where` "
                "returned "
                f"{len(removed)}, and `get` {len(replaced)}."
            )
        for node, other in zip(removed, replaced, strict=True):
            if _description(node) != _description(other):
                raise ValueError(
                    "Every node being shared together must have the same structure, "
                    f"shapes and dtypes. `where` returned {tree_pformat(node)}, but `get` "
                    f"returned {tree_pformat(other)}."
                )
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: SharedNode())
        # A node may hold others of its own, from a `Shared` within it.
        if _number_removed(_asked(get, self.pytree)) > _number_removed(replaced):
            raise ValueError(
                "`where` and `get` of Shared returned the same node. `get` must return "
                "another one, because the node of `where` is removed."
            )
        self.where = where
        self.get = get

    def __call__(self) -> _Tree:
        """**Returns:** the whole tree."""
        return tree_at(self.where, self.pytree, replace=_asked(self.get, self.pytree))


def _asked(get: Any, tree: Any) -> Any:
    """What the function `get` returns of the tree, or what it has at the paths `get`."""
    if callable(get):
        return get(tree)
    try:
        # Not among the nodes: a LoRA computes the weight that it has.
        if isinstance(get, str):
            return read(get, tree)
        if isinstance(get, list | tuple) and all(isinstance(p, str) for p in get):
            return [read(path, tree) for path in get]
        return _nodes_at(get, tree)
    except (TypeError, ValueError) as error:
        error_class = TypeError if isinstance(error, TypeError) else ValueError
        raise error_class(str(error).replace("`where`", "`get`")) from None


def _nodes_at(where: Any, tree: Any) -> list[Any]:
    nodes: list[Any] = []
    tree_at(where, tree, replace_fn=nodes.append)
    return nodes


def _is_one(answer: Any, nodes: Sequence[Any]) -> bool:
    """Whether `where` returned a single node, not a sequence of nodes."""
    if not isinstance(answer, list | tuple) or len(answer) != len(nodes):
        return True
    return any(a is not b for a, b in zip(answer, nodes, strict=True))


def _number_removed(tree: Any) -> int:
    return sum(isinstance(leaf, SharedNode) for leaf in jax.tree.leaves(tree))


def _description(node: Any) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(node)
    return treedef, [
        (jnp.shape(x), jnp.result_type(x)) if is_array_like(x) else type(x)
        for x in leaves
    ]
