"""`ModuleSpec`: the description of a Module class; and the construction of an instance."""

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import jax.tree_util as jtu

from .._annotations import annotate, annotations_of, signature_of
from .._errors import warn
from .._tree.cached import MISSING, raw_dict
from .._tree.cycles import check_no_cycle
from .._tree.filters import is_inexact_array_like
from .._tree.require import explain_call
from .fields import (
    CONVERTER,
    STATIC,
    TRAINABLE,
    add_note_on_abstract_fields,
    find_abstract_variables,
    raise_abstract_class,
    raise_abstract_variables,
)
from .flatten import ASSIGNABLE, Node, getter
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


class ModuleSpec:
    """The fields and settings of one Module class."""

    def __init__(
        self,
        cls: type,
        *,
        is_abstract: bool,
        init: Callable[..., None] | None,
        plain_setattr: bool,
        is_immutable: bool,
    ):
        self.cls = cls
        self.fields = fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        self.names = names = tuple(f.name for f in fields)
        self.dynamic = tuple(f.name for f in fields if not f.metadata.get(STATIC))
        self.static = tuple(f.name for f in fields if f.metadata.get(STATIC))
        # Dynamic fields whose arrays are not parameters: `field(trainable=False)`.
        self.buffers = frozenset(
            f.name for f in fields if not f.metadata.get(TRAINABLE, True)
        )
        self.converters = tuple(
            (f.name, convert)
            for f in fields
            if (convert := f.metadata.get(CONVERTER)) is not None
        )
        self.no_init = tuple(f.name for f in fields if not f.init)
        self.checks: tuple[Callable[[Any], None], ...] = tuple(
            base.__dict__["__check_init__"]
            for base in cls.__mro__
            if "__check_init__" in base.__dict__
        )
        self.read_all = getter(names)
        self.read_static = getter(self.static)
        # The generated `__init__`; `None` if a hand-written one is used.
        self.init = init
        # Whether the class was declared abstract, and the variables that it still lacks.
        self.is_abstract = is_abstract
        self.abstract_variables, self.abstract_class_variables = (
            find_abstract_variables(cls)
        )
        # Whether instances never change.
        self.is_immutable = is_immutable
        # Whether assignment goes to our own `__setattr__`, which may be bypassed.
        self.plain_setattr = plain_setattr
        # Whether `object.__new__` alone makes an empty instance.
        self.new_is_plain = (
            cls.__new__ is make_instance
            and super(Node, cls).__new__ is _new  # pyright: ignore[reportArgumentType]
            and not (is_abstract or self.abstract_class_variables)
            and not inspect.isabstract(cls)
        )
        self.has_checks = bool(self.static or self.no_init or self.checks)


def spec_of(cls: type) -> ModuleSpec | None:
    """The spec of a Module class; `None` for any other class."""
    spec = cls.__dict__.get("_module_spec_")
    return spec if isinstance(spec, ModuleSpec) else None


def has_custom_init(cls: type) -> bool:
    """Whether `cls` uses a hand-written `__init__`, its own or an inherited one.

    The first Module after `cls` in its method resolution order decides, unless a class
    that is not a Module comes earlier and has an `__init__`.
    """
    if "__init__" in cls.__dict__:
        return True
    for base in cls.__mro__[1:]:
        spec = spec_of(base)
        if spec is not None:
            return spec.init is None
        if not issubclass(base, Node) and base.__init__ is not object.__init__:
            return True
    return False


def generate_init(cls: type) -> Callable[..., None]:
    """An `__init__` for the fields of `cls`, as `dataclasses` would generate it.

    That takes time by the square of the number of fields. A `__post_init__` that is added
    to the class later is not called, as in a dataclass.
    """
    pseudo_fields = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    fields: list[Any] = [
        f
        for f in pseudo_fields.values()
        if f._field_type is not dataclasses._FIELD_CLASSVAR  # pyright: ignore
    ]
    by_place = [_parameter(f) for f in fields if f.init and not f.kw_only]
    by_name = [_parameter(f) for f in fields if f.init and f.kw_only]
    for before, after in pairwise(by_place):
        if "=" in before and "=" not in after:
            last = before.partition("=")[0]
            raise TypeError(
                f"non-default argument {after!r} follows default argument {last!r}"
            )
    parameters = [text.partition("=")[0] for text in by_place + by_name]
    this = "__dataclass_self__" if "self" in parameters else "self"
    lines, passed_on = [f"__set__ = __setter__({this})"], []
    for f in fields:
        name = value = f.name
        if f.default_factory is not MISSING:
            made = f"__fields__[{name!r}].default_factory()"
            value = f"{made} if {name} is __unset__ else {name}" if f.init else made
        elif f._field_type is dataclasses._FIELD_INITVAR:  # pyright: ignore
            passed_on.append(name)
            continue
        elif not f.init:
            continue
        lines.append(f"__set__({this}, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append(f"{this}.__post_init__({', '.join(passed_on)})")
    given = [this, *by_place, *(["*", *by_name] if by_name else [])]
    code = "\n  ".join(
        [
            "def make(__setter__, __fields__, __unset__):",
            f"def __init__({', '.join(given)}):",
            *(f"  {line}" for line in lines),
            "return __init__",
        ]
    )
    scope: dict[str, Any] = {}
    exec(code, vars(sys.modules.get(cls.__module__, types)), scope)
    # The last one is what `dataclasses` shows as the default of a field with a factory.
    init = scope["make"](_setter, pseudo_fields, dataclasses._HAS_DEFAULT_FACTORY)  # pyright: ignore
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__module__ = cls.__module__
    init.__doc__ = cls.__init__.__doc__

    def annotations_of_init(read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found |= read(base)
        return {name: found[name] for name in parameters} | {"return": None}

    annotate(init, annotations_of_init)
    return init


def _setter(made: Any) -> Any:
    """What a generated `__init__` assigns fields with.

    `object.__setattr__` saves a third of the time of a construction. It would change a
    frozen instance, and does not do what a `__setattr__` of the user's does.
    """
    may_bypass = made._assignable_ and made._module_spec_.plain_setattr
    return _set if may_bypass else type(made).__setattr__


def convert_annotations(init: Callable[..., None], spec: ModuleSpec) -> None:
    """Annotates each parameter that has a converter with the converter's input type."""
    if not isinstance(init, types.FunctionType):
        return
    annotations = annotations_of(init)
    for name, convert in spec.converters:
        if name in annotations:
            annotations[name] = _first_annotation(convert)
    init.__annotations__ = annotations


def warn_of_unused_post_init(cls: type) -> None:
    if hasattr(cls, "__post_init__"):
        warn(
            f"{cls.__module__}.{cls.__qualname__} has both a hand-written `__init__` "
            "and a `__post_init__`, which will never run. Call it from the "
            "`__init__`, or remove one of them."
        )


def _parameter(f: Any) -> str:
    if f.default_factory is not MISSING:
        return f"{f.name}=__unset__"
    return (
        f.name if f.default is MISSING else f"{f.name}=__fields__[{f.name!r}].default"
    )


def _first_annotation(convert: Callable[[Any], Any]) -> Any:
    try:
        parameters = list(signature_of(convert).parameters.values())
    except (ValueError, TypeError):
        return Any
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return Any
    return parameters[0].annotation


def _references_to_a_local() -> int:
    local = object()
    return _count_references(local)


# The result of `_count_references` for an object to which only one local refers.
_ALONE: Final = _references_to_a_local()


def construct(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    # Makes an instance: calls `__init__`, freezes it, and checks its fields. This is a
    # comment, since `help` would show a docstring for each `__call__` that has none.
    spec: ModuleSpec = cls._module_spec_
    try:
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
        values = _initialise(self, cls, spec, args, kwargs)
        # If nothing else refers to the instance, none of its fields can contain it.
        if _count_references(self) != _ALONE:
            check_values(self, _own_fields(self, spec))
    except TypeError as error:
        explain_call(error, cls, args, kwargs, f"{cls.__name__}({{}})")
        raise
    try:
        for value in values:
            if type(value) not in harmless_types and may_hold_callable(value):
                check_callables(self, _own_fields(self, spec))
                break
    except RecursionError:
        # A field contains itself, or is as deep as Python's stack.
        for name, value in _own_fields(self, spec):
            check_no_cycle(f"self.{name}", value)
    if spec.has_checks:
        _check_fields(self, spec)
    return self


def _initialise(made: Any, cls: Any, spec: ModuleSpec, args: Any, kwargs: Any) -> Any:
    """Calls `__init__`, which may assign fields, and the converters. Returns the values
    of the fields."""
    # Not called `self`: then errors would name the instance as a layer that runs.
    _set(made, ASSIGNABLE, cls._assignable_names_)
    try:
        if kwargs:
            cls.__init__(made, *args, **kwargs)
        else:  # faster
            cls.__init__(made, *args)
        if spec.abstract_variables:
            raise_abstract_variables(cls, spec.abstract_variables, "attributes")
        try:
            values = spec.read_all(made)
        except AttributeError:
            _require_all_fields(made, spec)
            raise
    finally:
        _unset(made, ASSIGNABLE)
    return _convert(made, spec) if spec.converters else values


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
        raise_abstract_class(cls)
    if spec.abstract_class_variables:
        raise_abstract_variables(cls, spec.abstract_class_variables, "class attributes")
    try:
        return cls.__new__(cls, *args, **kwargs)
    except TypeError as error:
        add_note_on_abstract_fields(error, cls, spec.names)
        raise


def make_instance(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # The `__new__` of Modules. One of the user's that calls it may then assign fields.
    make = super(Node, cls).__new__
    if make is not _new:  # that of a base class which is not a Module
        return make(cls, *args, **kwargs)
    self = _new(cls)
    if cls.__new__ is not make_instance:
        _set(self, ASSIGNABLE, cls._assignable_names_)
    return self


def _is_finished(self: Any, spec: ModuleSpec) -> bool:
    # A `__new__` that assigns all fields leaves the rest of the construction to us.
    is_open = bool(self._assignable_) or not spec.names
    return not is_open and all(name in self.__dict__ for name in spec.names)


def _convert(self: Any, spec: ModuleSpec) -> Any:
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
    for field in spec.fields:
        if not hasattr(self, field.name):
            fix = "or give the field a default"
            if field.default_factory is not MISSING:
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
