"""What published libraries use of Equinox's file of this name.

quax, ihoop and distreqx derive a metaclass from `_ModuleMeta`. That of quax constructs
instances by itself, with the help of the two others.
"""

from typing import Any

from equinox_like import Module
from equinox_like._module.flatten import OPEN

_ModuleMeta: type = type(Module)


class _CurrentlyInitialising:
    """Instances in it can be assigned to. Equinox's is a set of them."""

    def add(self, instance: Any) -> None:
        object.__setattr__(instance, OPEN, type(instance)._open_names_)

    def remove(self, instance: Any) -> None:
        object.__delattr__(instance, OPEN)


_currently_initialising = _CurrentlyInitialising()


def is_abstract_module(cls: Any) -> bool:
    """Whether a class has abstract methods, or abstract variables without a value."""
    spec = cls._module_spec_
    return bool(spec.is_abstract or spec.open_variables or spec.open_class_variables)
