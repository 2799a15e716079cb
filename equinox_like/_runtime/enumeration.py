"""Enumerations whose items are arrays for JAX, and messages for users.

The metaclass turns the strings of a class body into items. An item is a Module with its
index as an array leaf and its enumeration as a static field. So the choice of the item
may depend on traced values, but the choice of the enumeration may not."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._compat.tracing import Tracer
from .._errors import warn
from .._module import Module, field
from .._module.fields import is_dunder
from .._tree import is_array, tree_pformat
from .._tree.arrays import is_deleted
from .._tree.nodes import describe_node
from .error_if import branched_error_if

if TYPE_CHECKING:
    # Type checkers know of no other class whose attributes are instances of it.
    from enum import Enum as _Base, EnumMeta as _BaseMeta
else:
    _Base, _BaseMeta = object, type

# The enumeration. Not `Self`, and without a bound: beartype would check that items are
# instances of `Enumeration`, which they are not.
_E = TypeVar("_E")

_T = TypeVar("_T")


class EnumerationItem(Module):
    """One item of an enumeration. Only the enumeration creates items."""

    _index: Any
    _enumeration: Any = field(static=True)

    @property
    def _value(self) -> Any:
        """The index, by the name that libraries written for Equinox read."""
        return self._index

    def is_traced(self) -> bool:
        """Whether it is only known at run time which item this is."""
        return isinstance(self._index, Tracer)

    def error_if(self, token: _T, pred: Any) -> _T:
        """`token`, with an error at run time if `pred` is true: the message of this item.

        It is [`equinox_like.error_if`][]. Which item this is may be known only then.
        """
        messages = tuple(self._enumeration.__messages__.values())
        return branched_error_if(token, pred, self._index, messages)

    def __eq__(self, other: object) -> Any:
        return self._compare(jnp.equal, other)

    def __ne__(self, other: object) -> Any:
        return self._compare(jnp.not_equal, other)

    def _compare(self, function: Callable[..., Any], other: Any) -> Any:
        enumeration = self._enumeration
        if not isinstance(other, enumeration):
            raise ValueError(
                f"Cannot compare an item of {_name(enumeration)} with {_describe(other)}: "
                "that takes items of the same enumeration, as `promote` makes them."
            )
        return _at_compile_time(function, self._index, other._index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = self._enumeration
        for name in cls.__messages__:
            if vars(cls)[name] is self:
                return _own_item, (cls, name, self._index)
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{_name(self._enumeration)}<{self._enumeration[self]}>"

    def __pdoc__(self, **kwargs: Any) -> Any:
        import wadler_lindig as wl

        return wl.TextDoc(repr(self))


class EnumerationMeta(_BaseMeta):
    """Turns the strings of a class body into items."""

    # From names to messages, in the order of the indices.
    __messages__: dict[str, str]

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        **kwargs: Any,
    ):
        new: Any = super().__new__
        if bases == (object,):
            return new(mcs, name, bases, namespace | {"__messages__": {}})
        own = {key: x for key, x in namespace.items() if not is_dunder(key)}
        _check_bodies(name, bases, own)
        messages = _merge_messages(name, bases, own)
        rest = {key: x for key, x in namespace.items() if key not in own}
        items = "".join(f"\n- `{name}`: {text}" for name, text in messages.items())
        rest.setdefault("__doc__", f"An enumeration with these items:\n{items}\n")
        cls = new(mcs, name, bases, rest | {"__messages__": messages}, **kwargs)
        for i, item_name in enumerate(messages):
            index = np.asarray(i, np.int32)
            index.setflags(write=False)
            type.__setattr__(cls, item_name, EnumerationItem(index, cls))
        return cls

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{_name(cls)} cannot be instantiated. Read an item from the class, as in "
            f"`{cls.__name__}.{next(iter(cls.__messages__), 'name')}`."
        )

    def __getattr__(cls, name: str) -> Any:
        items = ", ".join(cls.__messages__) or "none"
        raise AttributeError(
            f"{cls.__qualname__} has no item `{name}`. Its items: {items}."
        )

    def __setattr__(cls, name: str, value: Any) -> None:
        # cloudpickle makes a class without items, and then sets each attribute.
        if name in cls.__messages__ and vars(cls).get(name, value) is not value:
            raise AttributeError(
                f"The item `{name}` of {_name(cls)} cannot be changed."
            )
        super().__setattr__(name, value)

    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance) is EnumerationItem and instance._enumeration is cls

    def __len__(cls) -> int:
        return len(cls.__messages__)

    def __getitem__(cls, item: Any) -> str:
        _check_members(cls, f"{cls.__name__}[...]", item)
        index = item._index
        if isinstance(index, Tracer):
            return "traced"
        if is_deleted(index):
            return "deleted"
        if not is_array(index) or not jnp.issubdtype(index.dtype, np.integer):
            return "unknown"
        messages, index = list(cls.__messages__.values()), np.asarray(index)
        if not ((0 <= index) & (index < len(messages))).all():
            return "unknown"
        return messages[index] if index.ndim == 0 else str(np.asarray(messages)[index])

    # Without these, Python would try `cls[0]`, `cls[1]`, ...
    __iter__ = None  # pyright: ignore[reportAssignmentType]
    __contains__ = None  # pyright: ignore[reportAssignmentType]


class Enumeration(_Base, metaclass=EnumerationMeta):
    """A set of named messages that can be chosen from within a compiled program.

    Each string in the body of a subclass becomes an item, read as an attribute of the
    class. An item is a [`equinox_like.Module`][] with one leaf, its index, so it passes
    through `jax.jit`, `jax.vmap`, `jax.lax.scan` and the like. With these operations:

    - `item == other`, `item != other`: a JAX array of `bool`, known at compile time if
        both items are. `ValueError` if `other` is not an item of the same enumeration.
    - `isinstance(item, Results)`: whether it is an item of this very class.
    - `Results[item]`: the message. `"traced"` if it is not known yet, `"deleted"` after a
        donation; for a batch of items the printed array of messages.
    - `len(Results)`: the number of items.
    - `item.is_traced()`: whether it is only known at run time which item this is.
    - `item.error_if(x, pred)`: [`equinox_like.error_if`][] with the message of the item.

    A subclass of an enumeration has the items of its parents, in their order, and then
    its own. Its items are not those of the parents: `promote` converts an item of a
    parent class. Giving an inherited name another message causes a warning.

    Type checkers take an enumeration for an `enum.Enum`, so that `Results.success` is a
    `Results`. For them an enumeration with items is final: to derive from it, write
    `# pyright: ignore[reportGeneralTypeIssues]` or `# type: ignore`.

    **Raises:**

    `TypeError` if a name in the class body is not a string (names such as `__doc__` are
    allowed); `ValueError` for an item named `promote` or `where`, and for a base class
    that is not an enumeration and has base classes itself.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Results(eqx.Enumeration):
            success = "All is well."
            diverged = "The iteration diverged."

        @jax.jit
        def solve(x):
            result = Results.where(jnp.isfinite(x), Results.success, Results.diverged)
            return jnp.nan_to_num(x), result

        _, result = solve(jnp.inf)
        assert result == Results.diverged
        assert Results[result] == "The iteration diverged."
        ```
    """

    __messages__: ClassVar[dict[str, str]]

    if TYPE_CHECKING:
        # For type checkers, an item is an instance of its enumeration.
        def is_traced(self) -> bool: ...
        def error_if(self, token: _T, pred: Any) -> _T: ...
        def __eq__(self, other: object) -> Any: ...
        def __ne__(self, other: object) -> Any: ...

    @classmethod
    def promote(cls: type[_E], item: Any) -> _E:
        """The item of this class that has the name of an item of a parent class.

        **Arguments:**

        - `item`: an item of a proper parent class; it may be traced, or a batch of items.

        **Returns:**

        The item of this class, known at compile time if `item` is.

        **Raises:**

        `ValueError` if `item` is not such an item.
        """
        parent = item._enumeration if type(item) is EnumerationItem else None
        if parent not in cls.__mro__[1:] or not is_array(item._index):
            raise ValueError(
                f"`{cls.__name__}.promote` takes an item of a parent class of "
                f"{_name(cls)}; got {_describe(item)}."
            )
        index = item._index
        own = list(cls.__messages__)  # pyright: ignore[reportAttributeAccessIssue]
        offsets = np.asarray([own.index(x) for x in parent.__messages__], np.int32)
        if not isinstance(index, Tracer) and index.ndim == 0:
            return vars(cls)[own[offsets[int(index)]]]
        promoted: Any = EnumerationItem(
            _at_compile_time(lambda i: jnp.asarray(offsets)[i], index), cls
        )
        return promoted

    @classmethod
    def where(cls: type[_E], pred: Any, a: Any, b: Any) -> _E:
        """`a` if `pred` is true, and otherwise `b`.

        **Arguments:**

        - `pred`: a scalar of `bool`; it may be traced.
        - `a`, `b`: items of this very class.

        **Returns:**

        The item. If `pred` is known at compile time, or both items are the same, this is
        one of the two objects.

        **Raises:**

        `ValueError` if `pred` is not a scalar of `bool`, or an item is of another
        class.
        """
        _check_members(cls, f"{cls.__name__}.where", a, b)
        if not isinstance(pred, bool) and not (
            is_array(pred) and pred.shape == () and pred.dtype == bool
        ):
            raise ValueError(
                f"`{cls.__name__}.where` takes a scalar of `bool` as its predicate; got "
                f"{_describe(pred)}. For a batch of predicates use `jax.vmap`."
            )
        if a._index is b._index:
            return a
        if not isinstance(pred, Tracer):
            return a if pred else b
        chosen: Any = EnumerationItem(jnp.where(pred, a._index, b._index), cls)
        return chosen


def _at_compile_time(function: Callable[..., Any], *xs: Any) -> Any:
    if any(isinstance(x, Tracer) for x in xs):
        return function(*xs)
    with jax.ensure_compile_time_eval():
        return function(*xs)


def _own_item(cls: Any, name: str, index: Any) -> EnumerationItem:
    """The item of this name; a new one while cloudpickle has not yet given `cls` its
    items."""
    return vars(cls).get(name) or EnumerationItem(index, cls)


def _check_bodies(name: str, bases: Any, items: dict[str, Any]) -> None:
    for base in bases:
        is_plain = base.__mro__[1:] == (object,)
        if not isinstance(base, EnumerationMeta) and not is_plain:
            raise ValueError(
                f"The enumeration {name} has a base class that is not an enumeration: "
                f"{_name(base)}."
            )
    for item_name, message in items.items():
        if item_name in ("promote", "where"):
            raise ValueError(
                f"The enumeration {name} cannot have an item `{item_name}`: that is the "
                "name of a method."
            )
        if not isinstance(message, str):
            raise TypeError(
                f"`{name}.{item_name}` must be a string, the message of an item of "
                f"this enumeration; got {describe_node(message)}."
            )


def _merge_messages(name: str, bases: Any, own: dict[str, str]) -> dict[str, str]:
    merged: dict[str, str] = {}
    parents = [b.__messages__ for b in bases if isinstance(b, EnumerationMeta)]
    for messages in (*parents, own):
        for item_name, message in messages.items():
            if merged.setdefault(item_name, message) != message:
                warn(
                    f"The enumeration {name} gives its item `{item_name}` the message "
                    f"{message!r}, where a parent has {merged[item_name]!r}."
                )
                merged[item_name] = message
    return merged


def _check_members(cls: type, function: str, *items: Any) -> None:
    for item in items:
        if not isinstance(item, cls):
            raise ValueError(
                f"`{function}` takes items of {_name(cls)}; got {_describe(item)}."
            )


def _describe(x: Any) -> str:
    if type(x) is EnumerationItem:
        index = f" with `{tree_pformat(x._index)}` as index"
        return f"an item of {_name(x._enumeration)}" + index * (not is_array(x._index))
    return f"`{tree_pformat(x)}`"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class ContainerMeta(type):
    """Metaclass whose classes are enumerations. Use [`equinox_like.Enumeration`][] instead.

    The attributes of the class become integers, counted from 0. `Cls[i]` is the value that
    was written for the integer `i`, `Cls.reverse_lookup` is the list of them, and
    `len(Cls)` is their number. `isinstance(x, Cls)` is true for Python integers and for
    integer arrays of shape `()`.

    !!! example

        ```python
        import equinox_like as eqx

        class Results(metaclass=eqx.internal.ContainerMeta):
            successful = "It worked."
            failed = "It did not work."

        assert Results.failed == 1 and Results[1] == "It did not work."
        ```
    """

    reverse_lookup: list[Any]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]):
        items = {k: v for k, v in namespace.items() if not k.startswith("__")}
        numbers = {k: i for i, k in enumerate(items)}
        lookup = {"reverse_lookup": list(items.values())}
        return super().__new__(mcs, name, bases, namespace | numbers | lookup)

    def __getitem__(cls, item: Any) -> Any:
        return cls.reverse_lookup[item]

    def __len__(cls) -> int:
        return len(cls.reverse_lookup)

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, jax.Array | np.ndarray | np.generic):
            return instance.ndim == 0 and jnp.issubdtype(instance.dtype, jnp.integer)
        return isinstance(instance, int)
