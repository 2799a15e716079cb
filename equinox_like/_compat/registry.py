"""Our own registry of pytree nodes, in addition to JAX's.

`filter_jit` flattens its arguments with it. In this registry, a Module is one node
whose children are all arrays below it, so no Python runs for a Module that was
flattened before.

Serves jax 0.10 to 0.12. It uses private parts of JAX: the registry's constructor, its
`register_node` and `flatten_one_level`, and `node_data` and
`from_node_data_and_children` of `PyTreeDef`. They are tried once, at import. If they
fail, or with `EQX_REGISTRY=public`, Modules are flattened and unflattened node by node,
by JAX's registry.
"""

import operator
from typing import Any

import jax.tree_util as jtu


def new_registry() -> Any:
    """A registry with Python's containers as nodes, or `None` if JAX has changed."""
    try:
        registry = _make()
        return registry if _works(_make()) else None
    except Exception:
        return None


def _make() -> Any:
    return type(jtu.default_registry)(
        enable_none=True,
        enable_tuple=True,
        enable_namedtuple=True,
        enable_list=True,
        enable_dict=True,
    )


class _Example:
    cached: Any


def _works(registry: Any) -> bool:
    """Whether nodes are flattened, described, compared and built as expected."""
    first, second = object(), object()
    registry.register_node(
        _Example, operator.attrgetter("cached"), lambda aux, children: (aux, children)
    )
    example = _Example()
    example.cached = (1, [2]), first
    leaves, treedef = registry.flatten((example, {"b": 4, "a": 3}, None))
    example.cached = (1, [2]), second
    _, other = registry.flatten((example, {"b": 4, "a": 3}, None))
    nodes = [child.node_data() for child in treedef.children()]
    leaf = registry.flatten(0)[1]
    made = leaf.from_node_data_and_children(registry, (_Example, first), [leaf, leaf])
    level = jtu.default_registry.flatten_one_level
    return (
        leaves == [1, 2, 3, 4]
        and treedef != other
        and hash(treedef) == hash(other)
        and nodes == [(_Example, first), (dict, ["a", "b"]), (type(None), None)]
        and leaf.node_data() is None
        and made.unflatten([5, 6]) == (first, (5, 6))
        and level(0) is None
        and list(level([7, 8])[0]) == [7, 8]
    )
