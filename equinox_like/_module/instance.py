"""What each instance of a Module has: names, a picture, and errors for assignments."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from .._annotations import ARE_LAZY
from .._errors import did_you_mean
from .._tree.cached import raw_dict
from .construct import ModuleSpec, make_instance
from .fields import is_dunder
from .flatten import ASSIGNABLE, WRAPPER_ATTRIBUTES, Node
from .values import type_name


def function_of(fun: Any) -> Any:
    """The function that a `functools.partial` calls; other callables unchanged."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun


def name_of(fun: Any) -> str:
    """The name to show for a callable: its `__name__`, or else its type's."""
    fun = function_of(fun)
    name = getattr(fun, "__name__", None)
    return name if isinstance(name, str) else type(fun).__name__


def code_of(fun: Any) -> types.CodeType | None:
    return getattr(inspect.unwrap(function_of(fun)), "__code__", None)


class OfCallables:
    """An attribute that only callable instances have."""

    def __init__(self, read: Callable[[Any], Any]):
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        # There is no `__set__`, so a name in the instance's dictionary is found first.
        if instance is not None and callable(instance):
            return self.read(instance)
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}"
        )


class _Doc:
    """The docstring of a class; for an instance, that of its function."""

    def __init__(self, of_class: str | None):
        self.of_class = of_class

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self.of_class if instance is None else owner._shown_(instance).__doc__


class _Annotations(dict[str, Any]):
    """The annotations of a class; for an instance, those of its function.

    It is a dictionary, since Python expects one in the class.
    """

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        # Not its `__annotations__`: `functools.lru_cache` copies `__annotate__` only.
        return inspect.get_annotations(owner._shown_(instance))


class Shown:
    """Base class of callables that show the attributes of a function."""

    def _shown_(self) -> Any:
        """The function."""
        return self.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]

    if ARE_LAZY:
        __annotations__ = _Annotations()
        __annotate__ = OfCallables(lambda self: type(self)._shown_(self).__annotate__)


def show_function(cls: Any) -> None:
    """Gives instances of `cls` the docstring and annotations of their function."""
    cls.__doc__ = _Doc(cls.__doc__)
    if not ARE_LAZY:
        cls.__annotations__ = _Annotations(cls.__annotations__)


_set = object.__setattr__
_unset = object.__delattr__


class Immutable(Shown, Node):
    """Makes instances immutable. The metaclass refers to it, so it is not a Module."""

    # An annotation would show in `typing.get_type_hints` of every Module.
    if TYPE_CHECKING:
        _module_spec_: ClassVar[ModuleSpec]
        _module_fields_: ClassVar[frozenset[str]]
        # Names that can be assigned during construction: fields and
        # `WRAPPER_ATTRIBUTES`.
        _assignable_names_: ClassVar[frozenset[str]]

    # Type checkers that see these allow any name to be assigned and deleted, and any
    # argument of the class.
    if not TYPE_CHECKING:
        __new__ = make_instance

        def __setattr__(self, name: str, value: Any) -> None:
            # `Cls[int](...)` sets `__orig_class__` on the instance; it is not in the tree.
            if name in self._assignable_ or name == "__orig_class__":
                _set(self, name, value)
            else:
                raise_assignment_error(self, name)

        def __delattr__(self, name: str) -> None:
            if name in self._assignable_:
                _unset(self, name)
            else:
                raise_assignment_error(self, name)

    def __dir__(self) -> list[str]:
        # Some special names are of some instances only, as `__wrapped__`. Others are not
        # read, since they may be properties of the user's.
        return [x for x in super().__dir__() if not is_dunder(x) or hasattr(self, x)]

    def __getstate__(self) -> dict[str, Any]:
        # Only the parts of the tree; cached properties are computed again.
        names = self._module_fields_.union(WRAPPER_ATTRIBUTES)
        # A copy, since another thread that flattens the instance adds to its caches.
        attributes = self.__dict__.copy()
        return {name: x for name, x in attributes.items() if name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        raw_dict(self).pop(ASSIGNABLE, None)  # if a `__new__` of the user's was called


def raise_assignment_error(self: Any, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(_why_immutable(self, name))


def _why_immutable(self: Any, name: str) -> str:
    spec: ModuleSpec = self._module_spec_
    owner = type_name(self)
    if self._assignable_:
        unset = [n for n in spec.names if n not in self.__dict__]
        return (
            f"Cannot set '{name}' on {owner}: it is not a field. Declare it, as in "
            f"`{name}: SomeType`, in the body of the class."
            + did_you_mean(name, unset, "`self.{}`")
        )
    if self._wraps_callables_ and name not in spec.names:
        return (
            f"Cannot set or delete '{name}' on {owner}, which is immutable. If a decorator "
            "sets it, put it below the transformation, or decorate a plain function that "
            "calls this one."
        )
    fix = (
        "`dataclasses.replace(module, field=new_value)` if its class has no `__init__` of "
        "its own, or build a new one"
    )
    if name in spec.dynamic:
        fix = f"`tree_at(lambda m: m.{name}, module, new_value)`"
    return (
        f"Cannot set or delete '{name}' on {owner}: Modules are immutable once "
        f"constructed. Make a changed copy instead, for example by {fix}. What a call of a "
        "model changes belongs to an `nn.State`, which the call takes and returns."
    )


def render(node: Any, path: str | None, subtree_renderer: Any) -> Any:
    """A dataclass as treescope shows it.

    Arguments and result are those of `__treescope_repr__`.
    """
    from treescope import formatting_util, repr_lib

    shown = [f.name for f in dataclasses.fields(node) if f.repr]
    return repr_lib.render_object_constructor(
        type(node),
        {name: getattr(node, name) for name in shown if hasattr(node, name)},
        path,
        subtree_renderer,
        color=formatting_util.color_from_string(type(node).__qualname__),
    )
