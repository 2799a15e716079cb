"""The names in Equinox's file of this name that published libraries use.

quax, ihoop and distreqx derive a metaclass from `_ModuleMeta`. The metaclass of quax
constructs instances itself, and needs the two other names for that.
"""

from typing import Any

from equinox_like import Module
from equinox_like._module.flatten import OPEN

_ModuleMeta: type = type(Module)


class _CurrentlyInitialising:
    """The instances whose fields can be assigned. In Equinox it is a set."""

    def add(self, instance: Any) -> None:
        object.__setattr__(instance, OPEN, type(instance)._open_names_)

    def remove(self, instance: Any) -> None:
        object.__delattr__(instance, OPEN)


_currently_initialising = _CurrentlyInitialising()


def is_abstract_module(cls: Any) -> bool:
    """Whether a class has abstract methods, or abstract variables without a value."""
    spec = cls._module_spec_
    return bool(spec.is_abstract or spec.open_variables or spec.open_class_variables)
