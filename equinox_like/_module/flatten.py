"""How an instance becomes children and structure, and back: the fast path of every call.

The structure (`aux`) of one node is a tuple that JAX compares with `==`:

    (extra, names of the children, names of the statics, strict key of the statics)

`extra` holds the statics as they are, and equals any other `extra`.

Each instance has a *state*: `OPEN` while it is under construction, then `IRREGULAR`,
`REGULAR`, or the aux of its last flattening. The latter two say that every field is set on
the instance, so that its fields can be read as attributes. That matters twice: it is fast,
and on Python 3.11 an object whose `__dict__` was touched is slower to read ever after.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import jax.tree_util as jtu

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
    """Rides along in an aux without taking part in its comparison."""

    __slots__ = ("statics", "values")

    def __init__(self, statics: dict[str, Any], values: tuple[Any, ...] | None):
        self.statics = statics
        self.values = values

    def __eq__(self, other: object) -> bool:
        return type(other) is _Extra

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # treedefs do not hash aux


State = tuple[Any, ...]
# Tuples like an aux, so that the fast path reads all states alike; their `values` equal
# those of no instance.
OPEN: Final[State] = (_Extra({}, None), "open")
OPEN_NAMED: Final[State] = (_Extra({}, None), "open, with the name of another function")
IRREGULAR: Final[State] = (_Extra({}, None), "irregular")
REGULAR: Final[State] = (_Extra({}, None), "regular")
SCANNED: Final[State] = (_Extra({}, None), "a tree is searched for this instance")


class ContainsItself(Exception):
    """Flattening came to the instance that is looked for."""


class Node:
    """An object that has a state. Without one of its own, it has that of its class."""

    _module_state_: State = IRREGULAR


def register(
    cls: type[Node], dynamic: tuple[str, ...], static: tuple[str, ...]
) -> None:
    """Makes `cls` a pytree node whose children are the `dynamic` fields."""
    get_dynamic, get_static = getter(dynamic), getter(static)
    fill = _filler(dynamic)
    new, set_attribute = object.__new__, object.__setattr__
    # Without statics there is but one structure of a regular instance.
    sole_aux = None if static else _make_aux(dynamic, static, ())

    def flatten(self):
        aux = self._module_state_
        try:
            if aux[0].values == get_static(self):
                return get_dynamic(self), aux
        except Exception:
            pass  # statics that do not compare, a field deleted behind our back
        return flatten_anew(self)

    def flatten_without_statics(self):
        if self._module_state_ is sole_aux:
            try:
                return get_dynamic(self), sole_aux
            except AttributeError:
                pass
        return flatten_anew(self)

    def flatten_anew(self):
        state = self._module_state_
        if state is SCANNED:
            raise ContainsItself
        if state is not OPEN and state is not OPEN_NAMED and state is not IRREGULAR:
            try:
                children, statics = get_dynamic(self), get_static(self)
            except AttributeError:
                pass  # a bare `cls.__new__(cls)`, whose state is that of its class
            else:
                aux = sole_aux or _make_aux(dynamic, static, statics)
                set_attribute(self, STATE, aux)
                return children, aux
        # Fields may be missing, and other attributes may be there: a cached property, or
        # the names of a wrapped function. Of these only the latter are structure.
        attributes = self.__dict__
        present = tuple(name for name in dynamic if name in attributes)
        fixed = tuple(n for n in static + WRAPPER_ATTRIBUTES if n in attributes)
        aux = _make_aux(present, fixed, tuple(attributes[name] for name in fixed))
        return tuple(attributes[name] for name in present), aux

    def flatten_with_keys(self):
        children, aux = flatten(self)
        keys = map(jtu.GetAttrKey, aux[1])
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten(aux, children):
        self = new(cls)
        attributes = self.__dict__
        # Regular structures are made with these very tuples.
        if aux[1] is dynamic and aux[2] is static:
            if static:
                attributes.update(aux[0].statics)
            fill(attributes, children)
            attributes[STATE] = aux
        else:
            attributes.update(aux[0].statics)
            attributes.update(zip(aux[1], children, strict=True))
            attributes[STATE] = IRREGULAR
        return self

    jtu.register_pytree_with_keys(
        cls,
        flatten_with_keys,
        unflatten,
        flatten if static else flatten_without_statics,
    )


def _make_aux(
    names: tuple[str, ...], fixed: tuple[str, ...], statics: tuple[Any, ...]
) -> State:
    extra = _Extra(dict(zip(fixed, statics, strict=True)), statics)
    return extra, names, fixed, strict_key(statics)


def getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """`self -> (self.name, ...)`, in C where there are two names or more."""
    if len(names) >= 2:
        return attrgetter(*names)
    if len(names) == 1:
        read = attrgetter(*names)
        return lambda self: (read(self),)
    return lambda self: ()


def _filler(names: tuple[str, ...]) -> Callable[[dict[str, Any], Any], None]:
    """Sets each of `names` to the child that belongs to it."""
    match names:
        case (first,):

            def fill(attributes, children):
                (attributes[first],) = children

        case (first, second):

            def fill(attributes, children):
                attributes[first], attributes[second] = children

        case (first, second, third):

            def fill(attributes, children):
                attributes[first], attributes[second], attributes[third] = children

        case _:

            def fill(attributes, children):
                attributes.update(zip(names, children, strict=True))

    return fill
