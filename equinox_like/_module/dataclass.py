"""Makes a class a dataclass. Its annotations are fields or abstract variables."""

import dataclasses
from typing import Any

from .._annotations import annotations_of
from .._tree.cached import MISSING, Attribute
from .._tree.structure import FLAT
from .._warn import warn
from .abstract import own_declarations
from .flatten import AUX, OPEN

_RESERVED = frozenset({FLAT, AUX, OPEN})


def make_dataclass(cls: Any, kw_only: bool) -> None:
    annotations = annotations_of(cls)
    reserved = sorted(_RESERVED.intersection(annotations))
    if reserved:
        raise TypeError(
            f"Field '{reserved[0]}' of {cls.__qualname__} has a reserved name, under "
            "which a Module remembers how it is flattened: rename the field."
        )
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
        cls.__annotations__ = {
            n: a for n, a in annotations.items() if n not in abstract
        }
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
