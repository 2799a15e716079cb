"""A `__new__` may assign fields, as `__init__` may; afterwards nothing may."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import equinox_like as eqx

FROZEN = dataclasses.FrozenInstanceError


class InNew(eqx.Module):
    """Assigns everything in `__new__`, beside an `__init__` that does nothing."""

    x: jax.Array
    name: str = eqx.field(static=True)

    def __new__(cls, x=0.0, name="a"):
        self = super().__new__(cls)
        self.x = jnp.asarray(x)
        self.name = name
        return self

    def __init__(self, x=0.0, name="a"):
        pass


class Beside(eqx.Module):
    """Assigns one field in `__new__`, beside a generated `__init__`."""

    x: float
    doubled: int = eqx.field(init=False, static=True)

    def __new__(cls, x=0):
        self = super().__new__(cls)
        self.doubled = 2 * x
        return self


class EachField(eqx.Module):
    x: int = eqx.field(init=False)
    y: int = eqx.field(init=False)

    def __new__(cls):
        self = super().__new__(cls)
        for f in dataclasses.fields(cls):
            setattr(self, f.name, len(f.name))
        return self


class Half(InNew):
    """Inherits `__new__`, and assigns the rest in `__init__`."""

    y: jax.Array

    def __init__(self, x, name):
        self.x = self.x + 1
        self.y = self.x


def refuse(instance, name="x"):
    old = getattr(instance, name)
    for change in (lambda: setattr(instance, name, 7), lambda: delattr(instance, name)):
        with pytest.raises(FROZEN, match=f"Cannot set or delete '{name}'"):
            change()
    assert getattr(instance, name) is old


def test_fields_assigned_in_new():
    module = InNew(2.0, "b")
    assert module.x == 2 and module.name == "b"
    assert Beside(3).doubled == 6 and Beside(3).x == 3
    assert (EachField().x, EachField().y) == (1, 1)
    half = Half(2.0, "c")
    assert half.x == half.y == 3 and half.name == "c"


@pytest.mark.parametrize(
    "make", [InNew, lambda: Beside(1), EachField, lambda: Half(1, "")]
)
def test_what_is_constructed_is_immutable(make):
    module = make()
    refuse(module)
    assert "_assignable_" not in vars(module)


@pytest.mark.parametrize(
    "remake",
    [
        copy.copy,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: jax.tree.map(lambda x: x, m),
        lambda m: dataclasses.replace(m, x=m.x),
        lambda m: eqx.tree_at(lambda m: m.x, m, m.x),
        lambda m: eqx.filter_jit(lambda m: m)(m),
    ],
)
@pytest.mark.parametrize("module", [InNew(3.0, "b"), Beside(2)])
def test_copies_are_equal_and_immutable(remake, module):
    made = remake(module)
    assert eqx.tree_equal(
        jax.tree.map(jnp.asarray, made), jax.tree.map(jnp.asarray, module)
    )
    refuse(made)


def test_what_was_never_constructed_is_immutable():
    class Plain(eqx.Module):
        x: float

    for bare in (object.__new__(Beside), object.__new__(Plain), Plain.__new__(Plain)):
        with pytest.raises(FROZEN):
            bare.x = 1.0
        for _ in range(2):
            with pytest.raises(FROZEN):
                bare.__init__(1.0)


def test_init_cannot_be_called_again():
    for module in (Beside(1), Half(1, "")):
        with pytest.raises(FROZEN):
            module.__init__(*(2, "b")[: len(dataclasses.fields(module)) - 1])
        refuse(module)


def test_only_fields_can_be_assigned_in_new():
    class Other(eqx.Module):
        weight: int

        def __new__(cls):
            self = super().__new__(cls)
            self.wieght = 1
            return self

    with pytest.raises(
        FROZEN, match=r"Cannot set 'wieght' .* Did you mean `self.weight`"
    ):
        Other()


def test_fields_are_converted_and_checked():
    class Checked(eqx.Module):
        x: int = eqx.field(converter=int)
        y: int

        def __new__(cls, **fields):
            self = super().__new__(cls)
            for name, value in fields.items():
                setattr(self, name, value)
            return self

        def __init__(self, **fields):
            pass

        def __check_init__(self):
            if self.x < 0:
                raise ValueError("negative")

    assert Checked(x=2.5, y=1).x == 2
    with pytest.raises(ValueError, match="negative"):
        Checked(x=-2, y=1)
    with pytest.raises(TypeError, match=r"Field 'y' of .* was not initialized"):
        Checked(x=2)


def test_flattening_in_new_caches_nothing():
    class Flat(eqx.Module):
        x: list

        def __new__(cls):
            self = super().__new__(cls)
            self.x = [1]
            assert jax.tree.leaves(self) == eqx.filter_jit(lambda m: m)(self).x == [1]
            self.x = [2, 3]
            return self

        def __init__(self):
            assert jax.tree.leaves(self) == [2, 3]
            self.x = [4]

    assert jax.tree.leaves(Flat()) == [4]


def test_an_earlier_instance_stays_immutable():
    known = {}

    class Kept(eqx.Module):
        x: int

        def __new__(cls, x):
            if x not in known:
                known[x] = self = super().__new__(cls)
                self.x = x
            return known[x]

        def __init__(self, x):
            self.x = x + 1

    first = Kept(1)
    with pytest.raises(FROZEN):
        Kept(1)
    assert first.x == 2
    refuse(first)


def test_a_construction_within_new_is_one_of_its_own():
    class Outer(eqx.Module):
        inner: InNew
        x: int

        def __new__(cls, depth):
            self = super().__new__(cls)
            self.inner = InNew(1.0)
            other = cls(depth - 1) if depth else self.inner
            refuse(self.inner)
            refuse(other)
            self.x = depth
            return self

        def __init__(self, depth):
            pass

    assert Outer(2).x == 2


def test_base_classes_that_are_not_modules():
    class Before:
        def __new__(cls, *args):
            self = super().__new__(cls, *args)
            self.x = 3
            return self

    class After:
        def __new__(cls, x):
            self = super().__new__(cls)
            object.__setattr__(self, "x", x + 1)
            return self

    class A(Before, eqx.Module):
        x: int

        def __init__(self, _):
            pass

    class B(eqx.Module, After):
        x: int

        def __init__(self, _):
            pass

    assert A(1).x == 3 and B(1).x == 2
    refuse(A(1))
    refuse(B(1))


def test_abstract_classes_are_refused_before_new_assigns():
    class Abstract(eqx.Module):
        x: eqx.AbstractVar[int]
        y: int

        def __new__(cls):
            self = super().__new__(cls)
            self.y = 1
            return self

        def __init__(self):
            pass

    class Concrete(Abstract):
        x: int = 2

    with pytest.raises(TypeError, match="abstract attributes 'x'"):
        Abstract()
    assert Concrete().y == 1


@given(
    st.lists(st.sampled_from(["new", "init", "both"]), min_size=1, max_size=5),
    st.data(),
)
def test_it_does_not_matter_where_a_field_is_assigned(places, data):
    names = [f"f{i}" for i in range(len(places))]
    values = data.draw(
        st.lists(st.integers(), min_size=len(names), max_size=len(names))
    )
    statics = data.draw(st.sets(st.sampled_from(names)))

    def assigning(wanted, old):
        def assign(self):
            for name, value, place in zip(names, values, places, strict=True):
                if place in (wanted, "both"):
                    setattr(self, name, value + old * (place == "both"))

        return assign

    def new(cls):
        self = super(eqx.Module, cls).__new__(cls)
        assigning("new", 1)(self)
        return self

    body = {
        "__annotations__": dict.fromkeys(names, int),
        **{name: eqx.field(static=True) for name in statics},
        "__init__": assigning("init", 0),
    }
    made = type(eqx.Module)("Made", (eqx.Module,), {**body, "__new__": new})()
    expected = type(eqx.Module)("Made", (eqx.Module,), body | {"__init__": everything})
    want = expected(dict(zip(names, values, strict=True)))
    assert vars(made) == vars(want)
    assert jax.tree.leaves(made) == jax.tree.leaves(want)
    refuse(made, names[0])


def everything(self, values):
    for name, value in values.items():
        setattr(self, name, value)
