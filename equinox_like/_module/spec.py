"""What a Module class knows about itself, and the `__init__` that it is given."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Final

from .._tree.cached import Attribute
from .._warn import warn
from .abstract import find_open_variables
from .fields import converter_of, is_static, is_trainable
from .flatten import Node, getter

_new = object.__new__
_NOTHING: Final = object()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModuleSpec:
    """What one Module class is made of."""

    fields: tuple[dataclasses.Field, ...]
    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    # The dynamic ones whose arrays are not parameters.
    buffers: frozenset[str]
    converters: tuple[tuple[str, Callable[[Any], Any]], ...]
    no_init: tuple[str, ...]
    checks: tuple[Callable[[Any], None], ...]
    custom_init: bool
    names: tuple[str, ...]
    read_all: Callable[[Any], Any]
    read_static: Callable[[Any], Any]
    # Whether the class was declared abstract, and what it still lacks.
    is_abstract: bool
    open_variables: frozenset[str]
    open_class_variables: frozenset[str]
    # Whether making an empty instance is `object.__new__` and nothing else.
    new_is_plain: bool
    # Whether a field that can be read is certain to be set on the instance itself.
    always_regular: bool
    # Whether there is nothing to do around `__init__`.
    init_is_all: bool
    # Whether there are converters, or abstract variables without a value.
    has_hooks: bool
    # Whether fields are to be checked whatever their types are.
    has_checks: bool


# What a spec says of an `__init__` that came after the class was made.
KNOWING_NOTHING_OF_INIT = {"always_regular": False, "init_is_all": False}


def make_spec(
    cls: type, *, is_abstract: bool, custom_init: bool, plain_setattr: bool
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
    open_variables, open_class_variables = find_open_variables(cls)
    new_is_plain = not is_abstract and not open_class_variables and cls.__new__ is _new
    sets_all = not custom_init and not no_init
    names_on_class = hasattr(cls, "__getattr__") or any(_has(cls, n) for n in names)
    has_hooks = bool(converters or open_variables)
    return ModuleSpec(
        fields=fields,
        dynamic=tuple(f.name for f in fields if not is_static(f)),
        static=static,
        buffers=frozenset(f.name for f in fields if not is_trainable(f)),
        converters=converters,
        no_init=no_init,
        checks=checks,
        custom_init=custom_init,
        names=names,
        read_all=getter(names),
        read_static=getter(static),
        is_abstract=is_abstract,
        open_variables=open_variables,
        open_class_variables=open_class_variables,
        new_is_plain=new_is_plain,
        always_regular=sets_all or not names_on_class,
        init_is_all=sets_all
        and new_is_plain
        and plain_setattr
        and not has_hooks
        and not hasattr(cls, "__post_init__"),
        has_hooks=has_hooks,
        has_checks=bool(static or no_init or checks),
    )


def _has(cls: type, name: str) -> bool:
    """Whether the class has a value, or a property, of the name of a field."""
    found = getattr(cls, name, _NOTHING)
    return found is not _NOTHING and type(found) is not Attribute


def has_custom_init(cls: type, spec_of: Callable[[type], ModuleSpec | None]) -> bool:
    """Whether `cls` takes an `__init__` that someone wrote, its own or an inherited one.

    The first Module after `cls` in its method resolution order decides, unless a class
    that is not a Module comes earlier and has an `__init__`.
    """
    if "__init__" in cls.__dict__:
        return True
    for base in cls.__mro__[1:]:
        spec = spec_of(base)
        if spec is not None:
            return spec.custom_init
        if not issubclass(base, Node) and base.__init__ is not object.__init__:
            return True
    return False


def generate_init(cls: type, past_setattr: bool) -> Callable[..., None]:
    """An `__init__` from the fields of `cls`, written by `dataclasses`.

    It is that of a throw-away dataclass with the same fields. If that one is frozen, its
    `__init__` assigns by `object.__setattr__`, past our own, which saves two thirds of
    the time of a construction.
    """
    # With a docstring, as `dataclasses` takes its time to write one.
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__doc__": "..."}
    annotations = namespace["__annotations__"] = {}
    pseudo_fields = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    regular = {f.name for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    parameters = {}
    for name, f in pseudo_fields.items():
        if name in regular:
            annotations[name] = object
        elif f._field_type is dataclasses._FIELD_INITVAR:  # pyright: ignore
            annotations[name] = dataclasses.InitVar[object]
        else:
            continue
        namespace[name] = copy.copy(f)
        if f.init:
            parameters[name] = f.type
    if hasattr(cls, "__post_init__"):
        namespace["__post_init__"] = _called_if_present
    make = dataclasses.dataclass(
        repr=False, eq=False, match_args=False, frozen=past_setattr
    )
    shadow: Any = make(type(cls.__name__, (), namespace))
    init: Any = shadow.__init__
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__module__ = cls.__module__
    init.__doc__ = cls.__init__.__doc__
    init.__annotations__ = parameters | {"return": None}
    return init


def convert_annotations(init: Callable[..., None], spec: ModuleSpec) -> None:
    """A parameter that is converted may be given what its converter takes."""
    annotations = getattr(init, "__annotations__", None)
    if annotations is None:
        return
    for name, convert in spec.converters:
        if name in annotations:
            annotations[name] = _first_annotation(convert)


def warn_of_unused_post_init(cls: type) -> None:
    if hasattr(cls, "__post_init__"):
        warn(
            f"{cls.__module__}.{cls.__qualname__} has both a hand-written `__init__` "
            "and a `__post_init__`, which will never run. Call it from the "
            "`__init__`, or remove one of them.",
        )


def _called_if_present(self, *args: Any) -> None:
    """Its presence makes `dataclasses` call `self.__post_init__`, which is the user's."""


def _first_annotation(convert: Callable[[Any], Any]) -> Any:
    try:
        parameters = list(inspect.signature(convert).parameters.values())
    except (ValueError, TypeError):
        return Any
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return Any
    return parameters[0].annotation
