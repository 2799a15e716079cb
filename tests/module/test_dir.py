"""Tools read each name of `dir`, as `typing.no_type_check` and `inspect` do."""

import abc
import functools
import inspect
import typing
from typing import Any, Generic, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import debug, internal, nn

T = TypeVar("T")
KEY = jax.random.key(0)


class Mixin:
    def mixed_in(self): ...


class Plain(eqx.Module):
    weight: Any
    name: str = eqx.field(static=True, default="a")

    @property
    def doubled(self):
        return 2 * self.weight

    @classmethod
    def make(cls):
        return cls(1.0)

    @staticmethod
    def helper(): ...

    @functools.cached_property
    def cached(self):
        return 1


class Called(Mixin, Plain):
    def __call__(self, x):
        return x

    @eqx.filter_jit
    def jitted(self, x):
        return x

    @functools.lru_cache  # noqa: B019
    def kept(self):
        return 1


class Abstract(eqx.Module):
    x: eqx.AbstractVar[int]
    y: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def method(self): ...

    @eqx.filter_jit
    @abc.abstractmethod
    def jitted(self): ...


class Typed(Plain, Generic[T]):
    __slots__ = ()
    extra: int = 2


class Wrapper(eqx.Module):
    fun: Any

    @property
    def __wrapped__(self):
        return self.fun


class Kinds(eqx.Enumeration):
    first = "one"
    second = "two"


class Empty(eqx.Module):
    pass


OWN = [Plain, Called, Abstract, Typed, Wrapper, Kinds, Empty]
PUBLIC = [
    value
    for module in (eqx, nn, internal, debug)
    for name in dir(module)
    if not name.startswith("_")
    and isinstance(value := getattr(module, name), type)
    # Python lists `__abstractmethods__` for each metaclass, and does not find it.
    and not issubclass(value, type)
]


def double(x):
    return 2 * x


def wrapped(fun):
    yield from (eqx.filter_jit(fun), eqx.filter_vmap(fun), eqx.filter_grad(fun))
    yield from (eqx.filter_checkpoint(fun), eqx.filter_closure_convert(fun, 1.0))
    yield from (eqx.filter_custom_jvp(fun), eqx.filter_custom_vjp(fun))
    yield from (eqx.Partial(fun), eqx.Partial(fun, 1.0), eqx.Partial(fun, x=1.0))
    yield internal.noinline(fun)


def instances():
    plain, called = Plain(1.0), Called(1.0)
    yield from (plain, called, Typed(1.0), Empty(), Wrapper(len), Wrapper(3))
    yield from (Kinds.first, called.jitted, called.mixed_in, called.kept, plain.make)
    yield from (called.__call__, internal.Static(1))
    yield eqx.filter_jit(lambda m: m)(Plain(jnp.ones(2)))  # lazy
    yield eqx.module_update_wrapper(Wrapper(double))
    for fun in (double, called, jax.jit(double), functools.partial(double)):
        yield from wrapped(fun)
    linear = nn.Linear(2, 2, key=KEY)
    yield from (linear, nn.Sequential([linear]), nn.Lambda(len), eqx.frozen(linear))
    yield from (nn.WeightNorm(linear), nn.MLP(1, 1, 2, 1, key=KEY), nn.PReLU())
    yield from nn.make_with_state(nn.BatchNorm)(2, mode="batch")


def unreadable(x, names):
    return [name for name in names if not hasattr(x, name)]


@pytest.mark.parametrize("cls", OWN + PUBLIC, ids=lambda cls: cls.__name__)
def test_each_name_of_a_class_can_be_read(cls):
    names = dir(cls)
    assert unreadable(cls, names) == []
    assert {
        name for name in names if name not in dict(inspect.getmembers(cls))
    } == set()
    for name in ("__init__", "__doc__", "__module__"):
        assert name in names


def test_each_name_of_an_instance_can_be_read():
    tried = 0
    for instance in instances():
        names = dir(instance)
        assert unreadable(instance, names) == [], instance
        assert set(names) == dict(inspect.getmembers(instance)).keys(), instance
        assert "__class__" in names
        tried += 1
    assert tried > 60


def test_what_can_be_read_is_listed():
    """So nothing is hidden that was found before."""
    called = Called(1.0)
    for name in ("weight", "name", "doubled", "make", "helper", "cached", "mixed_in"):
        assert name in dir(called)
    assert {"weight", "jitted", "kept", "__call__"} <= set(dir(Called))
    assert {"__name__", "__wrapped__"} <= set(dir(eqx.filter_jit(double)))
    assert {"x", "y", "method", "jitted"} & set(dir(Abstract)) == {"method", "jitted"}
    for name in ("lower", "trace", "eval_shape", "explain", "donation_report"):
        assert name in dir(Called.jitted) and name not in dir(called.jitted)


def test_dir_reads_no_property():
    class Loud(eqx.Module):
        @property
        def loud(self):
            raise AssertionError

        @functools.cached_property
        def louder(self):
            raise AssertionError

    assert {"loud", "louder"} <= set(dir(Loud()))


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_no_type_check_takes_each_kind_of_class(cls):
    assert typing.no_type_check(cls) is cls


def test_no_type_check_marks_the_methods():
    @typing.no_type_check
    class Unchecked(eqx.Module):
        x: "no type at all"

        def method(self, y: "nor this"):
            return self.x + y

        def __call__(self): ...

    assert Unchecked(1).method(2) == 3
    assert Unchecked.method.__no_type_check__ and Unchecked.__init__.__no_type_check__
    assert typing.get_type_hints(Unchecked) == {}
    assert jax.tree.leaves(Unchecked(1)) == [1]


@pytest.mark.parametrize("cls", [Plain, Called, Typed, nn.Linear, nn.Dropout])
def test_specifications_of_mock(cls):
    made = mock.create_autospec(cls)
    assert set(dir(cls)) - {"__class__", "__dict__"} <= set(dir(made)) | {
        "__annotations__"
    }
