"""What a Module class knows about itself, and what happens around `__init__`.

`ModuleSpec` is made once, when the class is; construction then does only what the class
needs. Each message to a user stands beside the check that raises it.
"""

import copy
import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn

import jax.tree_util as jtu

from .._tree.filters import is_array, is_inexact_array_like
from .._warn import warn
from .field import converter_of, is_static
from .flatten import (
    IRREGULAR,
    OPEN,
    OPEN_NAMED,
    REGULAR,
    STATE,
    WRAPPER_ATTRIBUTES,
    Node,
    getter,
)

_new = object.__new__
_set = object.__setattr__

# Values of these types hold no array, so that most static fields need no look inside.
HOLD_NO_ARRAY = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, types.FunctionType}
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModuleSpec:
    """What one Module class is made of."""

    fields: tuple[dataclasses.Field, ...]
    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    converters: tuple[tuple[str, Callable[[Any], Any]], ...]
    no_init: tuple[str, ...]
    checks: tuple[Callable[[Any], None], ...]
    custom_init: bool
    custom_new: bool
    read_all: Callable[[Any], Any]
    read_static: Callable[[Any], Any]
    # Whether a field that can be read is certain to be set on the instance itself.
    always_regular: bool
    # Whether there is anything to do once all fields are there.
    has_more: bool
    # Whether there is nothing to do around `__init__` but to look at static fields.
    init_is_all: bool


# What a spec says of an `__init__` that came after the class was made.
KNOWING_NOTHING_OF_INIT = {"always_regular": False, "init_is_all": False}


def make_spec(cls: type, custom_init: bool, plain_setattr: bool) -> ModuleSpec:
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
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
    init_sets_all = not custom_init and not no_init
    has_hooks = bool(converters or no_init or checks)
    names_on_class = hasattr(cls, "__getattr__") or any(
        hasattr(cls, f.name) for f in fields
    )
    return ModuleSpec(
        fields=fields,
        dynamic=tuple(f.name for f in fields if not is_static(f)),
        static=static,
        converters=converters,
        no_init=no_init,
        checks=checks,
        custom_init=custom_init,
        custom_new=cls.__new__ is not _new,
        read_all=getter(tuple(f.name for f in fields)),
        read_static=getter(static),
        always_regular=init_sets_all or not names_on_class,
        has_more=has_hooks or bool(static),
        init_is_all=plain_setattr
        and init_sets_all
        and not has_hooks
        and cls.__new__ is _new
        and not hasattr(cls, "__post_init__"),
    )


def has_custom_init(cls: type, spec_of: Callable[[type], ModuleSpec | None]) -> bool:
    """Whether `cls` takes an `__init__` that someone wrote, its own or an inherited one.

    The first Module after `cls` in its method resolution order decides, unless a class
    that is no Module comes earlier and brings an `__init__`.
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
    namespace: dict[str, Any] = {"__module__": cls.__module__}
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
    shadow = dataclasses.dataclass(repr=False, eq=False, frozen=past_setattr)(
        type(cls.__name__, (), namespace)
    )
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


def construct(cls: Any, spec: ModuleSpec, args: Any, kwargs: Any) -> Any:
    """Makes an instance where there is more to do than the generated `__init__` does."""
    if spec.custom_new:
        self = cls.__new__(cls, *args, **kwargs)
        if not isinstance(self, cls):
            return self
    else:
        self = _new(cls)
    _set(self, STATE, OPEN)
    try:
        cls.__init__(self, *args, **kwargs)
        try:
            spec.read_all(self)
        except AttributeError:
            _require_all_fields(self, spec)
    except BaseException:
        _set(self, STATE, IRREGULAR)
        raise
    if self._module_state_ is OPEN and spec.always_regular:
        _set(self, STATE, REGULAR)
    else:
        _set(self, STATE, REGULAR if _is_regular(self, spec) else IRREGULAR)
    if spec.has_more:
        _finish(self, spec)
    return self


def _finish(self: Any, spec: ModuleSpec) -> None:
    for name, convert in spec.converters:
        _set(self, name, convert(getattr(self, name)))
    if not HOLD_NO_ARRAY.issuperset(map(type, spec.read_static(self))):
        look_at_statics(self, spec)
    for name in spec.no_init:
        if any(map(is_inexact_array_like, jtu.tree_leaves(getattr(self, name)))):
            _warn_of_cached_value(self, name)
    for check in spec.checks:
        check(self)


def look_at_statics(self: Any, spec: ModuleSpec) -> None:
    """Warns of arrays in static fields."""
    for name, value in zip(spec.static, spec.read_static(self), strict=True):
        if any(map(is_array, jtu.tree_leaves(value))):
            warn(
                "A JAX or NumPy array is being set as static: field "
                f"'{name}' of {_name(self)}. Static fields are compared whenever a "
                "transformed function is called, which arrays cannot be: remove "
                "`static=True`.",
            )


def _require_all_fields(self: Any, spec: ModuleSpec) -> None:
    for f in spec.fields:
        if not hasattr(self, f.name):
            raise TypeError(
                f"Field '{f.name}' of {_name(self)} was not initialized. Assign "
                f"`self.{f.name}` in `__init__`, or give the field a default."
            ) from None


def _is_regular(self: Any, spec: ModuleSpec) -> bool:
    """Whether each field, and no name of a wrapped function, is set on the instance."""
    attributes = self.__dict__
    return all(f.name in attributes for f in spec.fields) and not any(
        name in attributes for name in WRAPPER_ATTRIBUTES
    )


def _warn_of_cached_value(self: Any, name: str) -> None:
    warn(
        f"`field(init=False)`: '{name}' of {_name(self)} holds floating-point values. "
        "They are leaves of their own, at which gradients stop: they do not reach what "
        "the values were computed from. Compute them in a property instead.",
    )


def warn_of_unused_post_init(cls: type) -> None:
    if hasattr(cls, "__post_init__"):
        warn(
            f"{cls.__module__}.{cls.__qualname__} has both an `__init__` that was written "
            "by hand and a `__post_init__`, which will never run. Call it from the "
            "`__init__`, or remove one of them.",
        )


def refuse_assignment(self: Any, name: str) -> NoReturn:
    spec: ModuleSpec = self._module_spec_
    if self._module_state_ is OPEN or self._module_state_ is OPEN_NAMED:
        raise dataclasses.FrozenInstanceError(
            f"Cannot set '{name}' on {_name(self)}: it is not a field. Declare it, as in "
            f"`{name}: SomeType`, in the body of the class."
        )
    if name in spec.dynamic:
        fix = f"`tree_at(lambda m: m.{name}, module, new_value)`"
    else:
        fix = "`dataclasses.replace(module, field=new_value)`"
    raise dataclasses.FrozenInstanceError(
        f"Cannot set or delete '{name}' on {_name(self)}: Modules are immutable once "
        f"constructed. Make a changed copy instead, for example by {fix}."
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


def _name(self: Any) -> str:
    return f"{type(self).__module__}.{type(self).__qualname__}"
