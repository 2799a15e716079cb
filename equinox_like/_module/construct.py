"""The construction of a Module: `__init__`, and the checks before and after it."""

import dataclasses
import sys
from typing import Any, Final

import jax.tree_util as jtu

from .._tree.cached import raw_dict
from .._tree.filters import is_inexact_array_like
from .._warn import warn
from .abstract import (
    note_abstract_fields,
    refuse_abstract_class,
    refuse_abstract_variables,
)
from .flatten import OPEN
from .spec import ModuleSpec
from .values import (
    HOLD_NO_ARRAY,
    check_callables,
    check_statics,
    check_values,
    harmless_types,
    may_hold_callable,
    type_name,
)

_new = object.__new__
_set = object.__setattr__
_unset = object.__delattr__
_count_references = sys.getrefcount


def _references_to_a_local() -> int:
    local = object()
    return _count_references(local)


# The result of `_count_references` for an object to which only one local refers.
_ALONE: Final = _references_to_a_local()


def construct(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    # Makes an instance: calls `__init__`, freezes it, and checks its fields. This is a
    # comment, since `help` would show a docstring for each `__call__` that has none.
    spec: ModuleSpec = cls._module_spec_
    if spec.init_is_all:
        self = _new(cls)
        if kwargs:
            spec.assign(self, *args, **kwargs)
            args += tuple(kwargs.values())
        else:  # faster
            spec.assign(self, *args)
        # Reading the fields takes longer than to go through the arguments.
        values = spec.read_all(self) if spec.has_checks else args
    else:
        if spec.new_is_plain:
            self = _new(cls)
        else:
            self = _make_empty(cls, spec, args, kwargs)
            if not isinstance(self, cls):
                return self
            if _is_finished(self, spec) and _count_references(self) != _ALONE:
                # `__new__` returned an instance that it made before.
                cls.__init__(self, *args, **kwargs)
                return self
        init = cls.__init__
        if init is spec.init:
            init = spec.assign
        _set(self, OPEN, cls._open_names_)
        try:
            if kwargs:
                init(self, *args, **kwargs)
            else:
                init(self, *args)
            try:
                values = spec.read_all(self)
            except AttributeError:
                _require_all_fields(self, spec)
                raise
        finally:
            _unset(self, OPEN)
        if spec.needs_conversion:
            values = _convert(self, spec)
        # If nothing else refers to the instance, none of its fields can contain it.
        if _count_references(self) != _ALONE:
            check_values(self, _own_fields(self, spec))
    for value in values:
        if type(value) not in harmless_types and may_hold_callable(value):
            check_callables(self, _own_fields(self, spec))
            break
    if spec.has_checks:
        _check_fields(self, spec)
    return self


def filled(cls: type, fields: dict[str, Any]) -> Any:
    """An instance with these fields, made without calling `__init__`."""
    new: Any = _new(cls)
    for name, value in fields.items():
        _set(new, name, value)
    return new


def _check_fields(self: Any, spec: ModuleSpec) -> None:
    if spec.static and not HOLD_NO_ARRAY.issuperset(map(type, spec.read_static(self))):
        check_statics(self, zip(spec.static, spec.read_static(self), strict=True))
    if spec.no_init:
        _check_cached_values(self, spec)
    for check in spec.checks:
        check(self)


def _make_empty(cls: type, spec: ModuleSpec, args: Any, kwargs: Any) -> Any:
    if spec.is_abstract:
        refuse_abstract_class(cls)
    if spec.abstract_class_variables:
        refuse_abstract_variables(
            cls, spec.abstract_class_variables, "class attributes"
        )
    try:
        return cls.__new__(cls, *args, **kwargs)
    except TypeError as error:
        note_abstract_fields(error, cls, spec.names)
        raise


def _is_finished(self: Any, spec: ModuleSpec) -> bool:
    return bool(spec.names) and all(name in self.__dict__ for name in spec.names)


def _convert(self: Any, spec: ModuleSpec) -> Any:
    """Raises if abstract variables have no value, and applies the converters."""
    if spec.abstract_variables:
        refuse_abstract_variables(type(self), spec.abstract_variables, "attributes")
    for name, convert in spec.converters:
        try:
            _set(self, name, convert(getattr(self, name)))
        except Exception as error:
            error.add_note(
                f"This is from the converter of field '{name}' of {type_name(self)}."
            )
            raise
    return spec.read_all(self)


def _own_fields(self: Any, spec: ModuleSpec) -> Any:
    # A field that a property provides is not in the dictionary, nor part of the tree.
    attributes = raw_dict(self)
    return ((name, attributes[name]) for name in spec.names if name in attributes)


def _require_all_fields(self: Any, spec: ModuleSpec) -> None:
    if spec.abstract_variables:
        refuse_abstract_variables(type(self), spec.abstract_variables, "attributes")
    for field in spec.fields:
        if not hasattr(self, field.name):
            fix = "or give the field a default"
            if field.default_factory is not dataclasses.MISSING:
                fix = "since only a generated `__init__` calls its `default_factory`"
            raise TypeError(
                f"Field '{field.name}' of {type_name(self)} was not initialized. Assign "
                f"`self.{field.name}` in `__init__`, {fix}."
            ) from None


def _check_cached_values(self: Any, spec: ModuleSpec) -> None:
    for name in spec.no_init:
        leaves = jtu.tree_leaves(self.__dict__.get(name))
        if any(map(is_inexact_array_like, leaves)):
            # The first words are Equinox's, as users filter warnings by them.
            warn(
                f"Using `field(init=False)`: '{name}' of {type_name(self)} holds "
                "floating-point values. They are stored apart from the values that they "
                "were computed from, so no gradient reaches those. Compute them in a "
                "property instead. If they are parameters, which are not computed from "
                "other fields, set them in an `__init__`, and drop `init=False`."
            )
