"""`ModuleSpec`: the description of a Module class; and the generated `__init__`."""

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from .._annotations import annotate, annotations_of, signature_of
from .._warn import warn
from .abstract import find_abstract_variables
from .fields import converter_of, is_static, is_trainable
from .flatten import Node, getter
from .values import may_need_check

_new = object.__new__


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModuleSpec:
    """The fields and settings of one Module class."""

    cls: type
    fields: tuple[dataclasses.Field, ...]
    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    # Dynamic fields whose arrays are not parameters: `field(trainable=False)`.
    buffers: frozenset[str]
    converters: tuple[tuple[str, Callable[[Any], Any]], ...]
    no_init: tuple[str, ...]
    checks: tuple[Callable[[Any], None], ...]
    # The generated `__init__`; `None` if a hand-written one is used.
    init: Callable[..., None] | None
    # Whether a generated `__init__` calls `__post_init__`. One that is added to the class
    # later is not called, as in a dataclass.
    has_post_init: bool
    names: tuple[str, ...]
    read_all: Callable[[Any], Any]
    read_static: Callable[[Any], Any]
    # Whether the class was declared abstract, and the variables that it still lacks.
    is_abstract: bool
    abstract_variables: frozenset[str]
    abstract_class_variables: frozenset[str]
    # Whether `object.__new__` alone makes an empty instance.
    new_is_plain: bool
    # Whether construction is `__init__` and the checks of values, and nothing else.
    init_is_all: bool
    # Whether there are converters, or abstract variables without a value.
    needs_conversion: bool
    # Whether the fields must be checked for values of any type.
    has_checks: bool
    # Whether assignment goes to our own `__setattr__`, which may be bypassed.
    plain_setattr: bool
    # Whether instances never change.
    is_immutable: bool

    @functools.cached_property
    def assign(self) -> Callable[..., None]:
        """The generated `__init__` for construction, which need not check for freezing.

        Made when the first instance is: generating it takes 0.2 ms.
        """
        return generate_init(
            self.cls, past_setattr=self.plain_setattr, has_post_init=self.has_post_init
        )


def spec_of(cls: type) -> ModuleSpec | None:
    """The spec of a Module class; `None` for any other class."""
    return cls.__dict__.get("_module_spec_")


def make_spec(
    cls: type,
    *,
    is_abstract: bool,
    init: Callable[..., None] | None,
    plain_setattr: bool,
    is_immutable: bool,
) -> ModuleSpec:
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    names = tuple(f.name for f in fields)
    static = tuple(f.name for f in fields if is_static(f))
    converters = tuple(
        (f.name, convert) for f in fields if (convert := converter_of(f)) is not None
    )
    no_init = tuple(f.name for f in fields if not f.init)
    checks = tuple(
        base.__dict__["__check_init__"]
        for base in cls.__mro__
        if "__check_init__" in base.__dict__
    )
    abstract_variables, abstract_class_variables = find_abstract_variables(cls)
    new_is_plain = (
        not is_abstract
        and not abstract_class_variables
        and not inspect.isabstract(cls)
        and cls.__new__ is _new
    )
    # Our `__setattr__` tells of a field that is also a property.
    plain_setattr &= not any(isinstance(getattr(cls, n, None), property) for n in names)
    needs_conversion = bool(converters or abstract_variables)
    has_post_init = hasattr(cls, "__post_init__")
    return ModuleSpec(
        cls=cls,
        fields=fields,
        dynamic=tuple(f.name for f in fields if not is_static(f)),
        static=static,
        buffers=frozenset(f.name for f in fields if not is_trainable(f)),
        converters=converters,
        no_init=no_init,
        checks=checks,
        init=init,
        has_post_init=has_post_init,
        names=names,
        read_all=getter(names),
        read_static=getter(static),
        is_abstract=is_abstract,
        abstract_variables=abstract_variables,
        abstract_class_variables=abstract_class_variables,
        new_is_plain=new_is_plain,
        init_is_all=init is not None
        and not no_init
        and new_is_plain
        and plain_setattr
        and not needs_conversion
        and not has_post_init,
        needs_conversion=needs_conversion,
        has_checks=bool(static or no_init or checks)
        or any(map(may_need_check, fields)),
        plain_setattr=plain_setattr,
        is_immutable=is_immutable,
    )


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


def generate_init(
    cls: type, past_setattr: bool, has_post_init: bool
) -> Callable[..., None]:
    """An `__init__` for the fields of `cls`, generated by `dataclasses`.

    It comes from a temporary dataclass with the same fields. If this class is frozen
    (`past_setattr`), its `__init__` assigns by `object.__setattr__` instead of ours,
    which saves two thirds of the time of a construction, and would change a frozen
    instance.
    """
    # The docstring keeps `dataclasses` from generating one, which is slow.
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__doc__": "..."}
    annotations = namespace["__annotations__"] = {}
    pseudo_fields = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    regular = {f.name for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    parameters = []
    for name, f in pseudo_fields.items():
        if name in regular:
            annotations[name] = object
        elif f._field_type is dataclasses._FIELD_INITVAR:  # pyright: ignore
            annotations[name] = dataclasses.InitVar[object]
        else:
            continue
        namespace[name] = copy.copy(f)
        if f.init:
            parameters.append(name)
    if has_post_init:
        namespace["__post_init__"] = _called_if_present
    make = dataclasses.dataclass(
        repr=False, eq=False, match_args=False, frozen=past_setattr
    )
    shadow: Any = make(type(cls.__name__, (), namespace))
    init: Any = shadow.__init__
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


def _called_if_present(self, *args: Any) -> None:
    """Has `dataclasses` generate a call of `self.__post_init__`, the user's method."""


def _first_annotation(convert: Callable[[Any], Any]) -> Any:
    try:
        parameters = list(signature_of(convert).parameters.values())
    except (ValueError, TypeError):
        return Any
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return Any
    return parameters[0].annotation
