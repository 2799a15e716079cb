"""What the annotations of a class declare: fields, and names that a subclass must provide.

The settings of a field are stored in the dataclass field's metadata, so a plain
`dataclasses.field(metadata=...)` can set them, too. An abstract variable is only an
annotation. It does not make a field, so it does not affect the order of a constructor's
parameters."""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

from .._annotations import annotations_of
from .._errors import warn
from .._tree.cached import MISSING, Attribute
from .._tree.registry import FLAT
from .flatten import ASSIGNABLE, AUX

CONVERTER = "converter"
STATIC = "static"
TRAINABLE = "trainable"


def field(
    *,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    trainable: bool = True,
    **kwargs: Any,
) -> Any:
    """Describes one field of a [`equinox_like.Module`][].

    **Arguments:**

    - `converter`: called with the value once construction has set it; its result
        replaces the value. For example `jnp.asarray`.
    - `static`: whether the field is part of the structure of the tree, and not a leaf.
        Another value then makes `jax.jit` recompile. Do not put JAX arrays into a static
        field. NumPy arrays and containers such as lists and dictionaries are copied, so
        that nothing changes them later.
    - `trainable`: whether the arrays in the field are parameters. If not, they are never
        differentiated: see [`equinox_like.trainable`][].
    - `**kwargs`: as for `dataclasses.field` (`default`, `default_factory`, `init`,
        `repr`, `kw_only`, `metadata`, ...).

    **Raises:**

    `ValueError` if `metadata` already has `"converter"`, `"static"` or `"trainable"`;
    `TypeError` if the converter is not callable.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Scale(eqx.Module):
            factor: jax.Array = eqx.field(converter=jnp.asarray)
            name: str = eqx.field(static=True, default="scale")

        assert jax.tree.leaves(Scale(2.0)) == [2.0]
        ```
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    for reserved in (CONVERTER, STATIC, TRAINABLE):
        if reserved in metadata:
            raise ValueError(
                f"`field(metadata=...)` cannot have the key {reserved!r}: pass "
                f"`{reserved}=` to `field` itself."
            )
    if converter is not None:
        if not callable(converter):
            raise TypeError(
                f"`field(converter=...)` must be callable; got {converter!r}."
            )
        metadata[CONVERTER] = converter
    if static:
        metadata[STATIC] = True
    if not trainable:
        metadata[TRAINABLE] = False
    return dataclasses.field(metadata=metadata, **kwargs)


# The attribute with the abstract variables of a class's own body, from name to kind.
_OWN: Final = "_module_abstract_"
# What instances and classes keep of themselves, and the settings of our own classes.
_RESERVED: Final = {
    *(FLAT, AUX, ASSIGNABLE),
    *(_OWN, "_assignable_names_", "_module_fields_", "_module_spec_"),
    "_passes_calls_on_",
    "_registers_itself_",
    "_shown_",
    "_shown_fields_",
    "_wraps_callables_",
}
_LIBRARY = __name__.partition(".")[0] + "."


def _check_no_reserved_names(cls: Any, annotations: dict[str, Any]) -> None:
    body = vars(cls)
    # A copy of a Module class has what its metaclass wrote.
    if cls.__module__.startswith(_LIBRARY) or "__dataclass_fields__" in body:
        return
    for name in sorted(_RESERVED.intersection({*annotations, *body})):
        kind = "Field" if name in annotations else "Attribute"
        raise TypeError(
            f"{kind} '{name}' of {cls.__qualname__} has a reserved name, under which a "
            "Module keeps data of its own: rename it."
        )


def make_dataclass(cls: Any, kw_only: bool) -> None:
    annotations = annotations_of(cls)
    _check_no_reserved_names(cls, annotations)
    for name, annotation in annotations.items():
        if isinstance(annotation, dataclasses.Field):
            warn(
                f"Field '{name}' of {cls.__qualname__} has its settings in place of its "
                f"type, so they have no effect. Write `{name}: SomeType = field(...)`."
            )
    # Otherwise `dataclasses` writes a docstring, with a signature that is not ours.
    cls.__doc__ = cls.__doc__ or " "
    make = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)
    abstract = own_declarations(cls, annotations)
    if abstract:
        # Hide them from `dataclasses`, which would make them fields.
        lazy = getattr(cls, "__annotate__", None)  # of Python 3.14
        fields = {n: a for n, a in annotations.items() if n not in abstract}
        cls.__annotations__ = fields
        make(cls)
        cls.__annotations__ = annotations
        if lazy is not None:
            type.__setattr__(cls, "__annotate__", lazy)
    else:
        make(cls)


def put_attributes(cls: Any) -> None:
    """Puts an `Attribute` on `cls` for each field. Lazy instances need them."""
    for name in annotations_of(cls):
        declared = cls.__dataclass_fields__.get(name)
        if declared is None or declared._field_type is not dataclasses._FIELD:  # pyright: ignore
            continue
        default = cls.__dict__.get(name, MISSING)
        # A property overrides its field. Names such as `__doc__` stay as they are.
        if not hasattr(type(default), "__set__") and not is_dunder(name):
            type.__setattr__(cls, name, Attribute(cls, name, default))


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


_T = TypeVar("_T")


class _Abstract:
    def __init__(self) -> None:
        raise TypeError(
            f"`{type(self).__name__}` cannot be called: it is an annotation, as in `x: "
            f"{type(self).__name__}[int]`."
        )

    def __class_getitem__(cls, parameter: Any) -> Any:
        if isinstance(parameter, tuple) and len(parameter) != 1:
            raise TypeError(
                f"`{cls.__name__}` takes one type, as in `{cls.__name__}[int]`; got "
                f"{len(parameter)}."
            )
        return types.GenericAlias(cls, parameter)


if TYPE_CHECKING:
    # Type checkers see a variable, or a class variable, of type `T`.
    from typing import ClassVar as AbstractClassVar

    AbstractVar = Annotated[_T, "abstract"]
else:

    class AbstractVar(_Abstract):
        """Annotates a name that each subclass must provide.

        A subclass provides it by a field, a property, a method or a value in its body.
        Until then, instantiating is a `TypeError`. An abstract variable makes no field.
        The annotation may be a string, as after `from __future__ import annotations`;
        if a value is given too, a string makes an ordinary field.

        **Raises:**

        `TypeError` without a type, as in `x: AbstractVar`, and if a value is given to an
        annotation that is not a string.

        !!! example

            ```python
            import equinox_like as eqx

            class Shape(eqx.Module):
                name: eqx.AbstractVar[str]

                def describe(self):
                    return f"a {self.name}"

            class Circle(Shape):
                radius: float
                name: str = "circle"

            assert Circle(1.0).describe() == "a circle"
            ```
        """

    class AbstractClassVar(_Abstract):
        """Annotates a class variable that each subclass must provide.

        Like [`equinox_like.AbstractVar`][], but for a variable of the class: an
        annotation `x: ClassVar[T]` in a subclass provides it as well, and instantiating
        fails before `__init__` runs.

        !!! example

            ```python
            import equinox_like as eqx

            class Solver(eqx.Module):
                order: eqx.AbstractClassVar[int]

            class Euler(Solver):
                order = 1

            assert Euler().order == 1
            ```
        """


_KINDS: Final = {"AbstractVar": AbstractVar, "AbstractClassVar": AbstractClassVar}


def own_declarations(cls: type, annotations: dict[str, Any]) -> dict[str, Any]:
    """The abstract variables in the body of `cls`, a dict from name to kind."""
    declared = {}
    for name, annotation in annotations.items():
        kind, has_type = _kind_of(cls, annotation)
        # For Equinox, a string makes a field, and libraries such as jinns rely on that.
        if kind is None or (isinstance(annotation, str) and name in cls.__dict__):
            continue
        if not has_type:
            raise TypeError(
                f"Cannot use an unsubscripted `{kind.__name__}`, as for '{name}' of "
                f"{cls.__qualname__}: write `{name}: {kind.__name__}[SomeType]`."
            )
        if name in cls.__dict__:
            raise TypeError(
                f"The abstract attribute '{name}' of {cls.__qualname__} cannot have "
                f"value {cls.__dict__[name]!r}. To give it one, annotate it with the "
                "type alone."
            )
        declared[name] = kind
    setattr(cls, _OWN, declared)
    return declared


def find_abstract_variables(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """The abstract variables, and abstract class variables, that `cls` still lacks."""
    kinds: dict[str, Any] = {}
    bases = cls.__mro__[-2::-1]
    if not any(base.__dict__.get(_OWN) for base in bases):
        return frozenset(), frozenset()
    for base in bases:
        for name in [n for n in kinds if _provides(base, n, kinds[n])]:
            del kinds[name]
        for name, kind in base.__dict__.get(_OWN, {}).items():
            # A subclass cannot turn a class variable into a variable.
            if kinds.get(name) is not AbstractClassVar:
                kinds[name] = kind
    return _of_kind(kinds, AbstractVar), _of_kind(kinds, AbstractClassVar)


def _of_kind(kinds: dict[str, Any], kind: Any) -> frozenset[str]:
    return frozenset(name for name, found in kinds.items() if found is kind)


def _provides(base: type, name: str, kind: Any) -> bool:
    """Whether the body of `base` provides the abstract variable `name`."""
    if name in base.__dict__:
        return True
    annotation = annotations_of(base).get(name)
    if annotation is None or _kind_of(base, annotation)[0] is not None:
        return False
    if _is_class_variable(annotation):
        return kind is AbstractClassVar
    return name in getattr(base, "__dataclass_fields__", {})


def _is_class_variable(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return _head(annotation).rpartition(".")[2] == "ClassVar"
    kinds = annotation, typing.get_origin(annotation)
    return any(kind is typing.ClassVar for kind in kinds)


def _kind_of(cls: type, annotation: Any) -> tuple[Any, bool]:
    """`AbstractVar`, `AbstractClassVar` or `None`, and whether it is subscripted.

    A string is not evaluated, because it may refer to names that do not exist yet.
    """
    if not isinstance(annotation, str):
        origin = typing.get_origin(annotation)
        kind = annotation if origin is None else origin
        is_abstract = kind is AbstractVar or kind is AbstractClassVar
        return kind if is_abstract else None, origin is not None
    head = _head(annotation)
    kind = _KINDS.get(head.rpartition(".")[2])
    if kind is None:
        # The class's module may have imported it under another name.
        found: Any = sys.modules.get(cls.__module__)
        for part in head.split("."):
            found = getattr(found, part, None)
        kind = found if found is AbstractVar or found is AbstractClassVar else None
    return kind, "[" in annotation


def _head(annotation: str) -> str:
    return annotation.partition("[")[0].strip()


def raise_abstract_class(cls: type) -> NoReturn:
    raise TypeError(
        f"Cannot instantiate {_name(cls)}, which is abstract (`is_abstract=True`). "
        "Instantiate a subclass of it."
    )


def raise_abstract_variables(cls: type, names: Iterable[str], kind: str) -> NoReturn:
    raise TypeError(
        f"Cannot instantiate abstract class {_name(cls)} with abstract {kind} "
        f"{', '.join(map(repr, sorted(names)))}. Provide them in a subclass."
    )


def add_note_on_abstract_fields(
    error: TypeError, cls: type, fields: Iterable[str]
) -> None:
    """Says which abstract methods and properties of `cls` are also fields, if any."""
    for name in sorted(getattr(cls, "__abstractmethods__", frozenset()) & {*fields}):
        error.add_note(
            f"The field '{name}' of {_name(cls)} does not implement the abstract method "
            f"or property '{name}' of its base class. A base class that leaves the "
            f"choice to its subclasses declares `{name}: AbstractVar[...]`."
        )


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
