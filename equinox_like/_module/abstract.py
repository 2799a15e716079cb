"""Abstract variables: names that a subclass must provide, like abstract methods.

An abstract variable is only an annotation. It does not make a field, so it does not
affect the order of a constructor's parameters.
"""

import dataclasses
import sys
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

from .._annotations import annotations_of

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Alias:
    """The value of `AbstractVar[T]` at run time."""

    origin: type
    parameter: Any

    def __repr__(self) -> str:
        name = getattr(self.parameter, "__qualname__", repr(self.parameter))
        return f"equinox_like.{self.origin.__name__}[{name}]"


class _Abstract:
    def __init__(self) -> None:
        raise TypeError(
            f"`{type(self).__name__}` cannot be called: it is an annotation, as in `x: "
            f"{type(self).__name__}[int]`."
        )

    def __class_getitem__(cls, parameter: Any) -> _Alias:
        if isinstance(parameter, tuple):
            raise TypeError(
                f"`{cls.__name__}` takes one type, as in `{cls.__name__}[int]`; got "
                f"{len(parameter)}."
            )
        return _Alias(cls, parameter)


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
# The attribute with the abstract variables of a class's own body, from name to kind.
_OWN: Final = "_module_abstract_"


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
        declared[name] = kind
    for name in declared:
        if name in cls.__dict__:
            raise TypeError(
                f"The abstract attribute '{name}' of {cls.__qualname__} cannot have "
                f"value {cls.__dict__[name]!r}. To give it one, annotate it with the "
                "type alone."
            )
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
            kinds[name] = (
                AbstractClassVar if kinds.get(name) is AbstractClassVar else kind
            )
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
    return annotation is typing.ClassVar or (
        typing.get_origin(annotation) is typing.ClassVar
    )


def _kind_of(cls: type, annotation: Any) -> tuple[Any, bool]:
    """`AbstractVar`, `AbstractClassVar` or `None`, and whether it is subscripted.

    A string is not evaluated, because it may refer to names that do not exist yet.
    """
    if type(annotation) is _Alias:
        return annotation.origin, True
    if not isinstance(annotation, str):
        is_bare = annotation is AbstractVar or annotation is AbstractClassVar
        return annotation if is_bare else None, False
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


def refuse_abstract_class(cls: type) -> NoReturn:
    raise TypeError(
        f"Cannot instantiate {_name(cls)}, which is abstract (`is_abstract=True`). "
        "Instantiate a subclass of it."
    )


def refuse_abstract_variables(cls: type, names: Iterable[str], kind: str) -> NoReturn:
    raise TypeError(
        f"Cannot instantiate abstract class {_name(cls)} with abstract {kind} "
        f"{', '.join(map(repr, sorted(names)))}. Provide them in a subclass."
    )


def note_abstract_fields(error: TypeError, cls: type, fields: Iterable[str]) -> None:
    """Says which abstract methods and properties of `cls` are also fields, if any."""
    for name in sorted(getattr(cls, "__abstractmethods__", frozenset()) & {*fields}):
        error.add_note(
            f"The field '{name}' of {_name(cls)} does not implement the abstract method "
            f"or property '{name}' of its base class. A base class that leaves the "
            f"choice to its subclasses declares `{name}: AbstractVar[...]`."
        )


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
