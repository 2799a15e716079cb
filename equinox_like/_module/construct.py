"""What happens around `__init__`. Each message stands beside the check that raises it."""

import dataclasses
from typing import Any, NoReturn

import jax.tree_util as jtu

from .._tree.filters import is_inexact_array_like
from .._warn import warn
from .abstract import refuse_abstract_class, refuse_open
from .flatten import IRREGULAR, OPEN, OPEN_NAMED, REGULAR, STATE, WRAPPER_ATTRIBUTES
from .spec import ModuleSpec
from .values import (
    HOLD_NO_ARRAY,
    HOLD_NOTHING,
    look_at_statics,
    look_at_values,
    type_name,
)

_new = object.__new__
_set = object.__setattr__


def construct(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Makes an instance where there is more to do than the generated `__init__` does."""
    spec: ModuleSpec = cls._module_spec_
    if spec.new_is_plain:
        self = _new(cls)
    else:
        self = _make_empty(cls, spec, args, kwargs)
        if not isinstance(self, cls):
            return self
    _set(self, STATE, OPEN)
    try:
        # Passing on no keywords at all is quicker.
        if kwargs:
            cls.__init__(self, *args, **kwargs)
        else:
            cls.__init__(self, *args)
        try:
            values = spec.read_all(self)
        except AttributeError:
            _require_all_fields(self, spec)
            raise
    except BaseException:
        _set(self, STATE, IRREGULAR)
        raise
    if self._module_state_ is OPEN and spec.always_regular:
        _set(self, STATE, REGULAR)
    else:
        _set(self, STATE, REGULAR if _is_regular(self, spec) else IRREGULAR)
    if spec.has_more:
        _finish(self, spec)
    else:
        for value in values:
            if type(value) not in HOLD_NOTHING:
                _look(self, spec, values)
                break
    return self


def _make_empty(cls: type, spec: ModuleSpec, args: Any, kwargs: Any) -> Any:
    if spec.is_abstract:
        refuse_abstract_class(cls)
    if spec.open_class_variables:
        refuse_open(cls, spec.open_class_variables, "class attributes")
    return cls.__new__(cls, *args, **kwargs)


def _finish(self: Any, spec: ModuleSpec) -> None:
    if spec.open_variables:
        refuse_open(type(self), spec.open_variables, "attributes")
    for name, convert in spec.converters:
        _set(self, name, convert(getattr(self, name)))
    if spec.converters and self._module_state_ is IRREGULAR and _is_regular(self, spec):
        # What was read from the class is now the instance's own.
        _set(self, STATE, REGULAR)
    _look(self, spec, spec.read_all(self))
    for value in spec.read_static(self):
        if type(value) not in HOLD_NO_ARRAY:
            fields = zip(spec.static, spec.read_static(self), strict=True)
            look_at_statics(self, fields)
            break
    if spec.no_init:
        _look_at_cached_values(self, spec)
    for check in spec.checks:
        check(self)


def _look(self: Any, spec: ModuleSpec, values: Any) -> None:
    if self._module_state_ is IRREGULAR:
        # What a property supplies is made when it is read, and is no part of the tree.
        attributes = self.__dict__
        own = ((name, attributes[name]) for name in spec.names if name in attributes)
        look_at_values(self, own)
    else:
        look_at_values(self, zip(spec.names, values, strict=True))


def _require_all_fields(self: Any, spec: ModuleSpec) -> None:
    if spec.open_variables:
        refuse_open(type(self), spec.open_variables, "attributes")
    for name in spec.names:
        if not hasattr(self, name):
            raise TypeError(
                f"Field '{name}' of {type_name(self)} was not initialized. Assign "
                f"`self.{name}` in `__init__`, or give the field a default."
            ) from None


def _is_regular(self: Any, spec: ModuleSpec) -> bool:
    """Whether each field, and no name of a wrapped function, is set on the instance."""
    attributes = self.__dict__
    return all(name in attributes for name in spec.names) and not any(
        name in attributes for name in WRAPPER_ATTRIBUTES
    )


def _look_at_cached_values(self: Any, spec: ModuleSpec) -> None:
    for name in spec.no_init:
        leaves = jtu.tree_leaves(self.__dict__.get(name))
        if any(map(is_inexact_array_like, leaves)):
            warn(
                f"`field(init=False)`: '{name}' of {type_name(self)} holds floating-point "
                "values. They are leaves of their own, at which gradients stop: they do "
                "not reach what the values were computed from. Compute them in a property "
                "instead.",
            )


def refuse_assignment(self: Any, name: str) -> NoReturn:
    spec: ModuleSpec = self._module_spec_
    if self._module_state_ is OPEN or self._module_state_ is OPEN_NAMED:
        raise dataclasses.FrozenInstanceError(
            f"Cannot set '{name}' on {type_name(self)}: it is not a field. Declare it, "
            f"as in `{name}: SomeType`, in the body of the class."
        )
    if name in spec.dynamic:
        fix = f"`tree_at(lambda m: m.{name}, module, new_value)`"
    else:
        fix = "`dataclasses.replace(module, field=new_value)`"
    raise dataclasses.FrozenInstanceError(
        f"Cannot set or delete '{name}' on {type_name(self)}: Modules are immutable once "
        f"constructed. Make a changed copy instead, for example by {fix}."
    )
