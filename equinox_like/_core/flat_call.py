"""`FlatCall`: a call that was taken apart, into its data, which JAX gets, and the rest.

    data, call = FlatCall.of(fun, args, kwargs)
    call.run(data)        # fun(*args, **kwargs), with other data if need be

    data, template = take_apart(tree, is_data)
    template.fill(data)   # the tree again
    template.alone(data)  # the tree with `None` for all other leaves

    pack(out), unpack(packed)  # any output, through a function that returns arrays only

Unlike in `split`, leaves that are not data need not be hashable, since none of our
caches depends on them. A `FlatCall` and a `Template` do not hold the data, as JAX may keep
the functions that use them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._call_path import call_rebuilt
from .._tree.filters import is_array, is_number
from .._tree.nodes import describe_node
from .._tree.strict import strict_key, strict_treedef
from .base import name_of

# A function of a leaf, or a bool for each leaf.
IsData = Callable[[Any], bool] | Iterable[bool]


class Template:
    """A tree without its data leaves. `==` compares static leaves by `strict_key`."""

    __slots__ = ("leaves", "places", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any], places: Sequence[int]):
        self.treedef = treedef
        # All leaves, with `None` for the data; `places` are the indices of the data.
        self.leaves = list(leaves)
        self.places = tuple(places)
        for i in places:
            self.leaves[i] = None

    def fill(
        self, data: Iterable[Any], static: Callable[[Any], Any] | None = None
    ) -> Any:
        """The tree with these data leaves, and `static(leaf)` for each other leaf."""
        leaves = (
            self.leaves.copy() if static is None else list(map(static, self.leaves))
        )
        for i, x in zip(self.places, data, strict=True):
            leaves[i] = x
        return self.treedef.unflatten(leaves)

    def alone(self, data: Iterable[Any]) -> Any:
        """The tree with these data leaves, and `None` for each other leaf."""
        return self.fill(data, lambda _: None)

    def has_places_of(self, other: "Template") -> bool:
        """Whether the structure, and the places of the data, are the same."""
        return self.places == other.places and (
            self.treedef is other.treedef
            or strict_treedef(self.treedef) == strict_treedef(other.treedef)
        )

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Template
            and self.has_places_of(other)
            and strict_key(self.leaves) == strict_key(other.leaves)
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.places))


def take_apart(tree: Any, is_data: IsData = is_array) -> tuple[list[Any], Template]:
    """The data leaves, and the tree without them."""
    leaves, treedef = jtu.tree_flatten(tree)
    flags = map(is_data, leaves) if callable(is_data) else is_data
    places = [i for i, flag in enumerate(flags) if flag]
    return [leaves[i] for i in places], Template(treedef, leaves, places)


def take_apart_like(tree: Any, like: Template) -> tuple[list[Any], Template]:
    """As `take_apart`, but Python numbers become arrays where `like` has data."""
    leaves, treedef = jtu.tree_flatten(tree)
    if treedef == like.treedef:
        for i in like.places:
            if is_number(leaves[i]):
                leaves[i] = jnp.asarray(leaves[i])
    return take_apart(treedef.unflatten(leaves))


class FlatCall:
    """A call of a function without its data: JAX transforms `run`."""

    __slots__ = ("fun", "template")

    def __init__(self, fun: Any, template: Template):
        self.fun = fun
        # Of the function, if its data are inputs, the arguments and keyword arguments.
        self.template = template

    @classmethod
    def of(
        cls,
        fun: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        is_data: IsData = is_array,
        with_fun: bool = False,
    ) -> tuple[list[Any], "FlatCall"]:
        """The data, and the call without them.

        `with_fun`: whether the data of the function come first. Else it keeps them.
        """
        held, fun = (fun, None) if with_fun else (None, fun)
        data, template = take_apart((held, args, kwargs), is_data)
        return data, cls(fun, template)

    def run(self, data: Iterable[Any]) -> Any:
        """What the function returns, with these data."""
        fun, args, kwargs = self.template.fill(data)
        return call_rebuilt(fun if self.fun is None else self.fun, *args, **kwargs)

    def args_alone(self, data: Iterable[Any]) -> Any:
        """The positional arguments with these data, and `None` for each other leaf."""
        return self.template.alone(data)[1]


class Packed:
    """A pytree node with the arrays of a tree as children, and its template.

    So JAX's caches return the other leaves, too. (The node cannot unflatten directly to the
    user's tree, because JAX's fast path needs outputs that flatten to arrays only.)
    """

    __slots__ = ("data", "template")

    def __init__(self, template: Template, data: Any):
        self.template = template
        self.data = data


jtu.register_pytree_node(Packed, lambda packed: (packed.data, packed.template), Packed)


def pack(tree: Any) -> Any:
    """`tree` itself if all its leaves are arrays, else a `Packed` of it."""
    data, template = take_apart(tree)
    return tree if len(data) == len(template.leaves) else Packed(template, data)


def unpack(out: Any) -> Any:
    """The tree of which `out` is the `pack`."""
    return out.template.fill(out.data) if isinstance(out, Packed) else out


def as_arrays(data: Sequence[Any]) -> list[Any]:
    """Python numbers and NumPy arrays as JAX arrays.

    JAX passes them to a rule as they are, if the user gave them as the primal. A rule would
    then compute in other dtypes than the function: NumPy makes bfloat16 times 2.0 float32.
    """
    # Unlike `jnp.asarray`, `device_put` is not refused by `jax.transfer_guard`.
    return [x if isinstance(x, jax.Array) else jax.device_put(x) for x in data]


def pair_of(returned: Any, function: str, pair: str) -> tuple[Any, Any]:
    """The two values that a user's function returned; `TypeError` for anything else."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return returned[0], returned[1]
    raise TypeError(
        f"{function} must return a pair `{pair}`; it returned {describe_node(returned)}."
    )


def value_and_aux(fun: Any, out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The pair that `fun` must return under `has_aux=True`; else `out` and `None`."""
    if not has_aux:
        return out, None
    return pair_of(out, f"With `has_aux=True`, `{name_of(fun)}`", "(value, aux)")
