"""Checks of the values of a new instance's fields, and the key that compares instances.

The checks detect common mistakes. Instances are compared and hashed by the identity of
their arrays.

Each check runs only if the type of some value requires it, so that most constructions
are not slowed down.
"""

import copy
import dataclasses
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import jax
import jax.tree_util as jtu
import numpy as np

from .._compat.tracing import wrapped_by
from .._errors import warn
from .._tree.arrays import describe_array
from .._tree.cycles import check_no_cycle, contains
from .._tree.filters import is_array, is_array_like
from .._tree.nodes import flatten_with_nodes, plain_path, with_article
from .._tree.strict import ByIdentity, strict_key, strict_treedef
from .flatten import Node

# Name and value of each field to check.
Fields = Iterator[tuple[str, Any]]

_set = object.__setattr__

# Values of these types hold no array.
HOLD_NO_ARRAY: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, types.FunctionType}
)

# What has no hash. A scalar of NumPy is a value like a number of Python.
ARRAYS: Final = (jax.Array, np.ndarray)

JITTED: Final = type(jax.jit(lambda: None))
# The types that JAX's transformations return. Some return plain functions.
_TRANSFORMED: Final = (types.FunctionType, JITTED, jax.custom_jvp, jax.custom_vjp)
# Containers that are copied when a static field is set to one.
_CONTAINERS: Final = frozenset(
    {list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter}
)
# Values of these types do not hold callables: plain values, arrays, and Modules, which
# were checked when they were constructed. Array types and Modules are added when they
# occur.
harmless_types: Final[set[type]] = {bool, int, float, complex, str, bytes, type(None)}


def may_hold_callable(value: Any) -> bool:
    """Whether a field's value, not of `harmless_types`, may contain a JAX-transformed
    callable."""
    kind = type(value)
    if kind is list or kind is tuple or kind is dict:
        for item in value.values() if kind is dict else value:
            # Tested first, because a function call would take longer.
            if type(item) not in harmless_types and may_hold_callable(item):
                return True
        return False
    if kind is types.FunctionType:
        return hasattr(value, "__wrapped__")
    if isinstance(value, (jax.Array, np.ndarray, Node)):
        harmless_types.add(kind)
        return False
    return True


def warn_of_unannotated(cls: Any, namespace: dict[str, Any]) -> None:
    """Warns of layers and arrays in the body of a class that are not fields."""
    declared = {*cls.__dataclass_fields__}.union(
        *(getattr(base, "__abstractclassvars__", ()) for base in cls.__bases__)
    )
    for name, value in namespace.items():
        if name in declared or (name.startswith("__") and name.endswith("__")):
            continue
        for leaf in leaves_of(value, is_leaf=_is_module):
            found = describe_array(leaf) if isinstance(leaf, jax.Array) else None
            # A Module without arrays is a constant, like a function: so are decorated
            # methods. But one that behaves differently at inference must be found then.
            if _is_module(leaf) and (
                hasattr(leaf, "inference") or any(map(is_array, leaves_of(leaf)))
            ):
                found = with_article(type(leaf).__name__)
            if found is not None:
                kind = type(value).__name__
                warn(
                    f"`{cls.__qualname__}.{name}` holds {found} and has no annotation, so "
                    "it is an attribute of the class and not a field: it is not a part of "
                    "the tree, and never trained, saved or moved. Annotate it, as in "
                    f"`{name}: {kind}`, and assign `self.{name}` in `__init__`. If it is a "
                    f"constant of all instances, write `{name}: ClassVar[{kind}]`."
                )
                break


def check_statics(self: Any, fields: Fields) -> None:
    """Copies what can be changed in place, and warns of JAX arrays."""
    for name, value in fields:
        check_no_cycle(f"self.{name}", value, HOLD_NO_ARRAY)
        leaves = leaves_of(value)
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            warn(
                f"A JAX array is being set as static! Field '{name}' of "
                f"{type_name(self)}. Static fields are compared whenever a transformed "
                "function is called, and a JAX array equals only itself: remove "
                "`static=True`, or convert it to a constant with `numpy.asarray`."
            )
        copied = _static_copy(value)
        if copied is not value:
            _set(self, name, copied)


def check_callables(self: Any, fields: Fields) -> None:
    """Warns of JAX-transformed callables with arrays, which JAX does not see, and refuses
    what `field` returns."""
    if self._wraps_callables_:
        return
    for name, value in fields:
        if isinstance(value, dataclasses.Field):
            raise TypeError(
                f"Field '{name}' of {type_name(self)} is set to the result of `field`, "
                f"which belongs in the body of the class: `{name}: SomeType = "
                f"field(...)`. Set `self.{name}` to the value itself."
            )
        if type(value) in harmless_types or not may_hold_callable(value):
            continue
        check_no_cycle(f"self.{name}", value, harmless_types)
        leaves = leaves_of(value, is_leaf=_is_module)
        if any(_hides_arrays(leaf, self) for leaf in leaves):
            warn(
                f"A JAX-transformed callable is being set as field '{name}' of "
                f"{type_name(self)}. JAX does not look inside `jax.vmap(layer)`, "
                "`jax.jit(layer)` and the like: the arrays of the layer become "
                "constants, which get no gradients and no updates. Store the layer "
                "itself, and transform it where it is called; or use this library's "
                "transformation of the same name, as in `filter_vmap(layer)`."
            )


def _hides_arrays(leaf: Any, self: Any) -> bool:
    """Whether it is a JAX-transformed callable with arrays that are not of `self`."""
    return isinstance(leaf, _TRANSFORMED) and any(
        not _is_of(wrapped, self) and any(map(is_array_like, leaves_of(wrapped)))
        for wrapped in _wrapped_by(leaf)
    )


def check_values(self: Any, fields: Fields) -> None:
    """Raises if a field contains `self`; warns if a callable in it refers to `self`."""
    for name, value in fields:
        if contains(value, self):
            _raise_contains_itself(self, name)
        check_no_cycle(f"self.{name}", value)
        nodes: Any = []
        leaves_of(value, is_leaf=nodes.append)  # which returns `None`: not a leaf
        for node in nodes:
            if isinstance(node, types.MethodType) and node.__self__ is self:
                _raise_contains_itself(self, name)
        if any(_is_of(part, self) for node in nodes for part in _inside(node)):
            warn(
                f"Field '{name}' of {type_name(self)} holds a callable that refers to the "
                f"{type(self).__qualname__} itself, where JAX does not see it. It keeps "
                "the arrays of this instance, even in updated copies. Define a method "
                "instead."
            )


def _raise_contains_itself(self: Any, name: str) -> NoReturn:
    raise ValueError(
        "Cannot assign methods of a Module, or the Module itself, to one of its "
        f"fields: `self.{name}` of {type_name(self)} contains the Module, but a tree "
        f"cannot contain itself. Define a method `{name}` that calls the other one."
    ) from None


def leaves_of(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of any object; none, if JAX cannot flatten it."""
    try:
        return jtu.tree_leaves(value, is_leaf)
    except Exception:
        return []  # for example, a dictionary whose keys cannot be sorted


def _static_copy(value: Any) -> Any:
    """`value` with a copy of each container and NumPy array in it that can change."""
    kind = type(value)
    if kind is np.ndarray:
        if value.flags.writeable or value.base is not None:
            value = value.copy()
            value.flags.writeable = False
    elif isinstance(value, tuple):
        make = tuple if kind is tuple else getattr(kind, "_make", None)
        items = list(map(_static_copy, value))
        if make and any(a is not b for a, b in zip(items, value, strict=True)):
            value = make(items)
    elif kind in _CONTAINERS:
        value = copy.copy(value)
        if isinstance(value, list | deque | dict):
            keyed = value if isinstance(value, dict) else range(len(value))
            for key in keyed:
                value[key] = _static_copy(value[key])
    return value


def _is_module(node: Any) -> bool:
    return isinstance(node, Node)


def _wrapped_by(fun: Any) -> Iterator[Any]:
    todo, seen = wrapped_by(fun), {id(fun)}
    for inner in todo:
        if id(inner) not in seen:
            seen.add(id(inner))
            yield inner
            todo += wrapped_by(inner)


def _inside(leaf: Any) -> Iterator[Any]:
    """The callables and arguments within an opaque callable."""
    if isinstance(leaf, functools.partial):
        # `jax.tree_util.Partial` may hold a `functools.partial` as `func.fun`.
        shown = getattr(leaf.func, "fun", None)
        for part in (leaf.func, shown, *leaf.args, *leaf.keywords.values()):
            yield part
            yield from _inside(part)
    elif isinstance(leaf, _TRANSFORMED) or (
        _is_module(leaf) and leaf._wraps_callables_
    ):
        yield from _wrapped_by(leaf)


def _is_of(inner: Any, self: Any) -> bool:
    return inner is self or getattr(inner, "__self__", None) is self


def identity_key(tree: Any) -> tuple[Any, Any]:
    """What equals that of another tree only if all but the arrays is the same by the
    strict rule, and the arrays are the identical objects, traced ones included.

    Second comes the order of each dictionary, which a function may depend on.
    """
    leaves, treedef, nodes = flatten_with_nodes(tree)
    orders = tuple([tuple(node) for node in nodes if isinstance(node, dict)])
    # The strict rule compares arrays of NumPy by their content.
    leaves = [ByIdentity(x) if isinstance(x, np.ndarray) else x for x in leaves]
    return (strict_treedef(treedef), strict_key(leaves)), orders


def check_hashable(self: Any) -> None:
    """Raises if some value of a Module has no hash, and says what to do."""
    name, spec = type(self).__name__, self._module_spec_
    leaves = jtu.tree_leaves_with_path(self)
    values = [(f"leaf `{plain_path(path)}`", x) for path, x in leaves]
    values += [(f"static field `{n}`", getattr(self, n)) for n in spec.static]
    as_function = _AS_FUNCTION if callable(self) else ""
    for where, x in values:
        if isinstance(x, ARRAYS):
            raise TypeError(
                f"unhashable type: {name!r}. Its {where} is {describe_array(x)}, and "
                f"arrays have no hash.{as_function} Do not pass the {name} as a static "
                "argument: JAX would compile for each new one. Pass it as an ordinary "
                "argument of `filter_jit`, or of another filtered transformation. As the "
                "key of a dictionary, take its `id(...)`."
            )
    try:
        hash(tuple([getattr(self, n) for n in spec.names]))
    except TypeError as e:
        if as_function in str(e):
            raise
        raise TypeError(f"{e}, in {with_article(name)}.{as_function}") from None


_AS_FUNCTION: Final = (
    " For a function of JAX, such as `jax.jit` or `jax.checkpoint`, pass `model.__call__`, "
    "or use `filter_jit`, or the filtered function of the same name."
)


def type_name(self: Any) -> str:
    return f"{type(self).__module__}.{type(self).__qualname__}"
