"""Why an instance of a Module cannot be changed: its methods for assignment."""

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from .flatten import WRAPPER_ATTRIBUTES, Node
from .names import Shown
from .spec import ModuleSpec
from .values import type_name

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
        _open_names_: ClassVar[frozenset[str]]

    # Type checkers that see these allow any name to be assigned and deleted.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # `Cls[int](...)` sets `__orig_class__` on the instance; it is not in the tree.
            if name in self._is_open_ or name == "__orig_class__":
                try:
                    _set(self, name, value)
                except AttributeError as error:
                    _note_property(self, name, error)
                    raise
            else:
                refuse_assignment(self, name)

        def __delattr__(self, name: str) -> None:
            if name in self._is_open_:
                _unset(self, name)
            else:
                refuse_assignment(self, name)

    def __getstate__(self) -> dict[str, Any]:
        # Only the parts of the tree; cached properties are computed again.
        names = self._module_fields_.union(WRAPPER_ATTRIBUTES)
        # A copy, since another thread that flattens the instance adds to its caches.
        attributes = self.__dict__.copy()
        return {name: x for name, x in attributes.items() if name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _note_property(self: Any, name: str, error: AttributeError) -> None:
    """Adds to the error of an assignment that a property has the name of the field."""
    if isinstance(getattr(type(self), name, None), property):
        error.add_note(
            f"'{name}' of {type_name(self)} is both a field and a property: rename one of "
            "them. A base class that leaves the choice to its subclasses declares "
            f"`{name}: AbstractVar[...]` in place of a field."
        )


def refuse_assignment(self: Any, name: str) -> NoReturn:
    spec: ModuleSpec = self._module_spec_
    if self._is_open_:
        unset = [n for n in spec.names if n not in self.__dict__]
        meant = "".join(
            f" Or did you mean '{n}'?"
            for n in difflib.get_close_matches(name, unset, 1)
        )
        raise dataclasses.FrozenInstanceError(
            f"Cannot set '{name}' on {type_name(self)}: it is not a field. Declare it, "
            f"as in `{name}: SomeType`, in the body of the class.{meant}"
        )
    if name == "__isabstractmethod__":
        raise dataclasses.FrozenInstanceError(
            f"Cannot mark {type_name(self)} as abstract: put `@abstractmethod` below the "
            "other decorators, directly above the method."
        )
    if self._wraps_callables_ and name not in spec.names:
        raise dataclasses.FrozenInstanceError(
            f"Cannot set or delete '{name}' on {type_name(self)}, which is immutable. If a "
            "decorator sets it, put it below the transformation, or decorate a plain "
            "function that calls this one."
        )
    if name in spec.dynamic:
        fix = f"`tree_at(lambda m: m.{name}, module, new_value)`"
    else:
        fix = (
            "`dataclasses.replace(module, field=new_value)` if its class has no "
            "`__init__` of its own, or build a new one"
        )
    raise dataclasses.FrozenInstanceError(
        f"Cannot set or delete '{name}' on {type_name(self)}: Modules are immutable once "
        f"constructed. Make a changed copy instead, for example by {fix}."
    )
