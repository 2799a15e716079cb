"""The names in Equinox's file of this name that published libraries use.

quax, ihoop, distreqx and galax derive a metaclass from `_ModuleMeta`. The metaclass of
quax constructs instances itself, and needs `_currently_initialising` and
`is_abstract_module` for that. The one of galax wraps an `__init__` that was generated, and
asks `_has_dataclass_init` for it.
"""

from typing import Any

from equinox_like import Module
from equinox_like._module.flatten import ASSIGNABLE

_ModuleMeta: type = type(Module)


class _CurrentlyInitialising:
    """The instances whose fields can be assigned. In Equinox it is a set."""

    def add(self, instance: Any) -> None:
        object.__setattr__(instance, ASSIGNABLE, type(instance)._assignable_names_)

    def remove(self, instance: Any) -> None:
        object.__delattr__(instance, ASSIGNABLE)


class _HasDataclassInit:
    """Whether a class has a generated `__init__`. In Equinox it is a dict."""

    def __getitem__(self, cls: Any) -> bool:
        return cls._module_spec_.init is not None


_currently_initialising = _CurrentlyInitialising()
_has_dataclass_init = _HasDataclassInit()


def is_abstract_module(cls: Any) -> bool:
    """Whether a class has abstract methods, or abstract variables without a value."""
    spec = cls._module_spec_
    return bool(
        spec.is_abstract or spec.abstract_variables or spec.abstract_class_variables
    )
