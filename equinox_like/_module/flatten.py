"""How an instance becomes children and structure, and back: the fast path of every call.

The structure (`aux`) of one node is a tuple that JAX compares with `==`:

    (extra, names of the children, names of the statics, strict key of the statics)

`extra` holds the statics as they are, and equals any other `extra`.

Each instance has a *state*: `OPEN` while it is under construction, then `IRREGULAR`,
`REGULAR`, or the aux of its last flattening. The latter two say that every field is set on
the instance, so that its fields can be read as attributes. That matters twice: it is fast,
and on Python 3.11 an object whose `__dict__` was touched is slower to read ever after.
"""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import jax.tree_util as jtu

from .._compat.dispatch import UNKNOWN, WITHOUT_VALUE, nodes
from .._tree.intern import StandIn, stand_in
from .._tree.strict import strict_key

WRAPPER_ATTRIBUTES: Final = (
    "__module__",
    "__name__",
    "__qualname__",
    "__doc__",
    "__annotations__",
)
STATE: Final = "_module_state_"


class _Extra:
    """Rides along in an aux without taking part in its comparison.

    `blank` is the `__dict__` of a regular instance but for its children and its state,
    once an instance was made of this aux. `identity` is the same for equal structures, and
    set once it was asked for.
    """

    __slots__ = ("blank", "identity", "statics", "values")

    identity: StandIn

    def __init__(self, statics: dict[str, Any]):
        self.blank: dict[str, Any] | None = None
        self.statics = statics
        self.values: tuple[Any, ...] | None = None

    def __eq__(self, other: object) -> bool:
        return type(other) is _Extra

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # treedefs do not hash aux


State = tuple[Any, ...]
# Tuples like an aux, so that the fast path reads all states alike; their `values` equal
# those of no instance.
OPEN: Final[State] = (_Extra({}), "open")
OPEN_NAMED: Final[State] = (_Extra({}), "open, with the name of another function")
IRREGULAR: Final[State] = (_Extra({}), "irregular")
REGULAR: Final[State] = (_Extra({}), "regular")
SCANNED: Final[State] = (_Extra({}), "a tree is searched for this instance")


class ContainsItself(Exception):
    """Flattening came to the instance that is looked for."""


class Node:
    """An object that has a state. Without one of its own, it has that of its class."""

    _module_state_: State = IRREGULAR


# `self.__dict__ = attributes`, past a `__setattr__` that refuses.
set_attributes: Final = vars(Node)["__dict__"].__set__


def register(
    cls: type[Node], dynamic: tuple[str, ...], static: tuple[str, ...]
) -> None:
    """Makes `cls` a pytree node whose children are the `dynamic` fields."""
    get_dynamic, get_static = getter(dynamic), getter(static)
    new, set_attribute = object.__new__, object.__setattr__
    # Without statics there is but one structure of a regular instance.
    sole_aux = None if static else _make_regular(dynamic, static, ())

    def flatten(self):
        aux = self._module_state_
        try:
            if aux[0].values == get_static(self):
                return get_dynamic(self), aux
        except WITHOUT_VALUE:
            pass  # statics that do not compare, a field deleted behind our back
        return flatten_anew(self)

    def flatten_without_statics(self):
        if self._module_state_ is sole_aux:
            try:
                return get_dynamic(self), sole_aux
            except AttributeError:
                pass
        return flatten(self)

    def flatten_anew(self):
        state = self._module_state_
        if state is SCANNED:
            raise ContainsItself
        if state is REGULAR or (len(state) > 2 and state[2] is static):
            try:
                children, statics = get_dynamic(self), get_static(self)
            except AttributeError:
                pass  # a bare `cls.__new__(cls)`, whose state is that of its class
            else:
                aux = sole_aux or _make_regular(dynamic, static, statics)
                set_attribute(self, STATE, aux)
                return children, aux
        # Fields may be missing, and other attributes may be there: a cached property, or
        # the names of a wrapped function. Of these only the latter are structure.
        attributes = self.__dict__
        present = tuple(name for name in dynamic if name in attributes)
        fixed = tuple(n for n in static + WRAPPER_ATTRIBUTES if n in attributes)
        aux = _make_aux(present, fixed, tuple(attributes[name] for name in fixed))
        is_done = STATE in attributes and state is not OPEN and state is not OPEN_NAMED
        if is_done and present + fixed[: len(static)] == dynamic + static:
            aux[0].values = get_static(self)
            set_attribute(self, STATE, aux)
            return get_dynamic(self), aux
        return tuple(attributes[name] for name in present), aux

    def flatten_by_identity(self):
        """For JAX's dispatch, in whose table there must be no comparison by Python."""
        aux = self._module_state_
        try:
            extra = aux[0]
            if aux is sole_aux or extra.values == get_static(self):
                return get_dynamic(self), extra.identity
        except WITHOUT_VALUE:
            pass
        children, aux = flatten(self)
        extra = aux[0]
        if not hasattr(extra, "identity"):
            try:
                extra.identity = stand_in(aux[1:])
            except WITHOUT_VALUE:  # what may change does not stand for itself
                return (UNKNOWN,), None
        return children, extra.identity

    def flatten_with_keys(self):
        children, aux = flatten(self)
        keys = map(jtu.GetAttrKey, aux[1])
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten_anew(aux, children):
        extra, names, *_ = aux
        self = new(cls)
        attributes = dict.fromkeys(names) | extra.statics
        if extra.values is not None:
            extra.blank = attributes.copy()
            attributes[STATE] = aux
        else:
            attributes[STATE] = IRREGULAR
        attributes.update(zip(names, children, strict=True))
        set_attributes(self, attributes)
        return self

    if sole_aux is not None:
        # What unflattening need not set on each instance.
        cls._module_state_ = sole_aux
    make_unflatten = _unflattener(len(dynamic), sole_aux is not None)
    unflatten = make_unflatten(cls, dynamic, sole_aux, unflatten_anew)
    flatten_quickly = flatten if static else flatten_without_statics
    nodes[cls] = flatten_by_identity
    jtu.register_pytree_with_keys(
        cls,
        flatten_with_keys,
        unflatten,
        flatten_quickly,
    )


def _make_regular(
    names: tuple[str, ...], fixed: tuple[str, ...], statics: tuple[Any, ...]
) -> State:
    aux = _make_aux(names, fixed, statics)
    aux[0].values = statics
    return aux


def _make_aux(
    names: tuple[str, ...], fixed: tuple[str, ...], statics: tuple[Any, ...]
) -> State:
    extra = _Extra(dict(zip(fixed, statics, strict=True)))
    if "__annotations__" in fixed:  # a dictionary, which would have no hash
        statics = tuple(map(_annotations_as_items, fixed, statics))
    return extra, names, fixed, strict_key(statics)


def _annotations_as_items(name: str, value: Any) -> Any:
    is_dict = name == "__annotations__" and isinstance(value, dict)
    return tuple(value.items()) if is_dict else value


def getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """`self -> (self.name, ...)`, in C where there are two names or more."""
    if len(names) >= 2:
        return attrgetter(*names)
    if len(names) == 1:
        read = attrgetter(*names)
        return lambda self: (read(self),)
    return lambda self: ()


@functools.cache
def _unflattener(count: int, has_sole_aux: bool) -> Callable[..., Any]:
    """Makes the function that unflattens regular instances with so many children.

    Written out for each number: nothing else that Python does here is as quick.
    """
    names = "".join(f"name{i}, " for i in range(count))
    targets = "".join(f"attributes[name{i}], " for i in range(count))
    if has_sole_aux:
        body = f"""
        if aux is not sole_aux:
            return unflatten_anew(aux, children)
        self = new(cls)
        attributes = self.__dict__
        ({targets}) = children
        return self
"""
    else:
        body = f"""
        blank = aux[0].blank
        if blank is None:
            return unflatten_anew(aux, children)
        attributes = blank.copy()
        ({targets}) = children
        attributes[STATE] = aux
        self = new(cls)
        set_attributes(self, attributes)
        return self
"""
    code = f"""
def unflattener(cls, names, sole_aux, unflatten_anew):
    ({names}) = names

    def unflatten(aux, children):{body}
    return unflatten
"""
    scope = {"STATE": STATE, "new": object.__new__, "set_attributes": set_attributes}
    exec(code, scope)
    return scope["unflattener"]
