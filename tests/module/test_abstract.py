"""Abstract classes, abstract variables, and what makes them concrete."""

import abc
import dataclasses
import sys
from typing import Any, ClassVar

import pytest

import equinox_like as eqx
from equinox_like import AbstractVar as Renamed


class HasX(eqx.Module):
    x: eqx.AbstractVar[int]


class HasClassX(eqx.Module):
    x: eqx.AbstractClassVar[int]


def test_field_fills_an_abstract_variable():
    class Concrete(HasX):
        y: int
        x: int

    # It had no say in the order of the parameters.
    made = Concrete(1, 2)
    assert (made.y, made.x) == (1, 2)
    assert HasX.__abstractvars__ == {"x"} and Concrete.__abstractvars__ == frozenset()


@pytest.mark.parametrize(
    "body",
    [
        {"x": 3},
        {"x": property(lambda self: 3)},
        {"x": 3, "__annotations__": {"x": ClassVar[int]}},
        {"x": 3, "__annotations__": {"x": "ClassVar[int]"}},
    ],
    ids=["value", "property", "class variable", "class variable as string"],
)
def test_any_attribute_of_the_class_fills_it(body):
    assert type("Concrete", (HasX,), dict(body))().x == 3
    assert type("Concrete", (HasClassX,), dict(body))().x == 3


def test_method_fills_it():
    class Concrete(HasX):
        def x(self):
            return 3

    assert Concrete().x() == 3


def test_bare_class_variable_fills_only_an_abstract_class_variable():
    class Open(HasX):
        x: ClassVar[int]

    class Filled(HasClassX):
        x: ClassVar[int]

    assert Open.__abstractvars__ == {"x"}
    assert Filled.__abstractclassvars__ == frozenset()


def test_instance_field_fills_an_abstract_class_variable():
    class Concrete(HasClassX):
        x: int

    assert Concrete(3).x == 3


def test_open_variable_is_refused_after_init_and_an_open_class_variable_before_it():
    ran = []

    class Open(HasX):
        def __init__(self):
            ran.append("open")

    class OpenClass(HasClassX):
        def __init__(self):
            ran.append("class")

    with pytest.raises(TypeError, match=r"Open with abstract attributes 'x'"):
        Open()
    with pytest.raises(
        TypeError, match=r"OpenClass with abstract class attributes 'x'"
    ):
        OpenClass()
    assert ran == ["open"]


def test_open_variable_is_reported_before_missing_fields():
    class Open(HasX):
        y: int

        def __init__(self):
            pass

    with pytest.raises(TypeError, match="abstract attributes 'x'"):
        Open()


def test_open_variable_cannot_be_assigned():
    class Open(HasX):
        def __init__(self):
            self.x = 1

    with pytest.raises(AttributeError, match=r"'x'.*not a field"):
        Open()


def test_filling_goes_by_the_order_of_inheritance():
    class HasFieldX(eqx.Module):
        x: int

    class Concrete(HasFieldX, HasX):
        pass

    class Abstract(HasX, HasFieldX):
        pass

    assert Concrete(1).x == 1
    assert Abstract.__abstractvars__ == {"x"}


def test_mixin_that_is_no_module_fills_it():
    class Mixin:
        x = 3

    class Concrete(Mixin, HasX):
        pass

    assert Concrete().x == 3


def test_declaring_it_anew_opens_it_again():
    class Concrete(HasX):
        x: int

    class Reopened(Concrete):
        x: eqx.AbstractVar[int]

    assert Reopened.__abstractvars__ == {"x"}


def test_open_variable_may_become_a_class_variable_but_not_the_other_way_round():
    class Narrowed(HasX):
        x: eqx.AbstractClassVar[int]

    class Widened(HasClassX):
        x: eqx.AbstractVar[int]

    for cls in (Narrowed, Widened):
        assert cls.__abstractvars__ == frozenset()
        assert cls.__abstractclassvars__ == {"x"}


def test_annotation_is_kept():
    assert HasX.__annotations__ == {"x": eqx.AbstractVar[int]}
    assert repr(eqx.AbstractVar[int]).endswith(".AbstractVar[int]")


def test_bare_annotation_is_refused():
    with pytest.raises(TypeError, match=r"unsubscripted `AbstractVar`.*'x'"):
        type("Bad", (eqx.Module,), {"__annotations__": {"x": eqx.AbstractVar}})


def test_two_types_are_refused():
    with pytest.raises(TypeError, match="one type"):
        eqx.AbstractVar[int, str]  # pyright: ignore


def test_value_beside_it_is_refused():
    with pytest.raises(TypeError, match=r"'x'.*cannot have value"):

        class Bad(eqx.Module):
            x: eqx.AbstractVar[int] = 3

    with pytest.raises(TypeError, match=r"'x'.*cannot have value"):

        class AlsoBad(eqx.Module):
            x: eqx.AbstractVar[int] = eqx.field()


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        ("AbstractVar[int]", "attributes"),
        ("eqx.AbstractVar[int]", "attributes"),
        ("some.where.AbstractClassVar[NotYetDefined]", "class attributes"),
        ("Renamed[int]", "attributes"),
    ],
)
def test_string_annotation_declares_an_abstract_variable(annotation, kind):
    assert sys.modules[__name__].Renamed is Renamed
    here = {"__module__": __name__}
    body = {"__annotations__": {"x": annotation, "y": "int"}}
    base: Any = type("Base", (eqx.Module,), here | body)
    assert [f.name for f in dataclasses.fields(base)] == ["y"]
    with pytest.raises(TypeError, match=f"abstract {kind} 'x'"):
        base(1)
    body = {"__annotations__": {"x": annotation}}
    again: Any = type("Again", (base,), here | body)
    with pytest.raises(TypeError, match=f"abstract {kind} 'x'"):
        again(1)
    full: Any = type("Full", (again,), {"__annotations__": {"x": "int"}})
    assert full(1, 2).x == 2
    given: Any = type("Given", (again,), {"x": 3})
    assert given(1).x == 3


def test_string_annotation_without_a_type_is_refused():
    with pytest.raises(TypeError, match=r"unsubscripted `AbstractVar`.*'x'"):
        type("Bad", (eqx.Module,), {"__annotations__": {"x": "eqx.AbstractVar"}})


@pytest.mark.parametrize("value", [3, eqx.field(default=3)])
def test_string_annotation_with_a_value_makes_a_field(value):
    body = {"__annotations__": {"x": "eqx.AbstractVar[int]"}, "x": value}
    made: Any = type("Made", (eqx.Module,), body)
    assert (made().x, made(4).x) == (3, 4)


def test_other_string_annotations_make_fields():
    body = {"__annotations__": {"x": "int", "y": "NotAbstractVar[int]"}}
    assert type("Fine", (eqx.Module,), body)(1, 2).x == 1


def test_init_subclass_may_read_what_fills_a_class_variable():
    seen = []

    class Base(eqx.Module):
        order: eqx.AbstractClassVar[int]

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(cls.order)

    class Concrete(Base):
        order = 2

    assert seen == [2]


def test_class_declared_abstract_is_refused_but_not_its_subclass():
    class Abstract(eqx.Module, is_abstract=True):
        x: int

    class Concrete(Abstract):
        pass

    with pytest.raises(TypeError, match="Abstract, which is abstract"):
        Abstract(1)
    assert Concrete(1).x == 1


def test_virtual_subclass_is_refused():
    with pytest.raises(ValueError, match=r"register <class 'int'>.*HasX"):
        HasX.register(int)


def test_abstract_method_of_a_mixin_must_be_filled():
    class Interface(abc.ABC):
        @abc.abstractmethod
        def f(self): ...

    class Open(Interface, eqx.Module):
        pass

    class Concrete(Open):
        def f(self):
            return 3

    with pytest.raises(TypeError, match="abstract"):
        Open()
    assert Concrete().f() == 3


def test_error_tells_of_a_field_that_does_not_implement_a_property():
    class Shape(eqx.Module):
        @property
        @abc.abstractmethod
        def size(self) -> int: ...

        @abc.abstractmethod
        def area(self): ...

    class Square(Shape):
        size: int

    with pytest.raises(TypeError, match="abstract") as caught:
        Square(3)
    (note,) = caught.value.__notes__
    assert "The field 'size' of" in note and "`size: AbstractVar[...]`" in note
