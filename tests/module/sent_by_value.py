"""What a notebook may define, run as `__main__` by `test_by_value.py`.

`payloads` are all of it, in the bytes of cloudpickle and of joblib, with a `check` of what
arrives.
"""

import abc
import dataclasses
from typing import Any, Generic, TypeVar

import cloudpickle
import jax
import jax.numpy as jnp
from joblib.externals.loky.backend import reduction

import equinox_like as eqx

T = TypeVar("T")


class Mixin:
    def doubled(self):
        return 2 * self.weight  # pyright: ignore[reportAttributeAccessIssue]


class Base(eqx.Module, Mixin):
    weight: jax.Array = eqx.field(converter=jnp.asarray)
    power: int = eqx.field(static=True, default=2)
    options: dict = eqx.field(default_factory=dict)
    kind: eqx.AbstractVar[str]

    def __check_init__(self):
        if self.power < 0:
            raise ValueError("power")

    @property
    def squared(self):
        return self.weight**2

    @classmethod
    def make(cls, weight):
        return cls(weight)

    @abc.abstractmethod
    def scale(self, x): ...

    @eqx.filter_jit
    def __call__(self, x):
        return self.scale(x) ** self.power


class Net(Base, Generic[T]):
    kind = "net"
    activation: Any = eqx.field(static=True, default=abs)
    other_activation: Any = eqx.field(static=True, default=jax.nn.relu)

    def scale(self, x):
        return self.activation(self.weight * x)

    @jax.jit
    def relu(self, x):
        return self.other_activation(self.weight * x)

    @eqx.filter_jit
    def jitted(self, x):
        return self.scale(x) + 1

    def clones(self):
        return [Clone(self.weight)]


class Counter(eqx.Module):
    count: Any
    _: dataclasses.KW_ONLY
    step: int = 1

    def __init__(self, start):
        self.count = start + 10
        self.step = 3

    def sibling(self):
        return Later(1)


class Later(Counter):
    """`Counter` refers to it, so it arrives while that is still incomplete."""


class Clone(Net):
    pass


class Open(eqx.Module):
    x: Any

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


class Results(eqx.Enumeration):
    OK = "fine"
    failed = "not fine"


class MoreResults(Results):
    slow = "slow"


@eqx.filter_jit(donate="arrays")
def step(net, x):
    return jax.tree.map(lambda w: w + x, net)


def make_power(exponent):
    def power(n):
        return n**exponent

    return power


sent = {
    "net": Net([1.0, -2.0]),
    "lazy": step(Net([1.0, -2.0]), 0.0),
    "method": Net([1.0, -2.0]).scale,
    "jitted": eqx.filter_jit(Net([1.0, -2.0]).scale),
    "jitted_method": Net([1.0, -2.0]).jitted,
    "counter": Counter(1),
    "open": Open(1),
    "item": Results.failed,
    "step": step,
    "closure": eqx.internal.closure_to_pytree(make_power(3)),
    "classes": (Base, Net, Counter, Later, Results, MoreResults),
}


def raises(error, text, function):
    try:
        function()
    except error as e:
        return text in str(e)
    return False


def check(
    net,
    lazy,
    method,
    jitted,
    jitted_method,
    counter,
    open,
    item,
    step,
    closure,
    classes,
):
    Base, Net, Counter, Later, Results, MoreResults = classes
    x = jnp.full(2, 2.0)
    # instances
    assert type(net) is type(lazy) is Net and isinstance(net, Base)
    assert net(x).tolist() == lazy(x).tolist() == [4, 16]
    assert net.squared.tolist() == [1, 4] and net.doubled().tolist() == [2, -4]
    assert repr(net) == "Net(weight=f32[2], options={})" and net.kind == "net"
    assert len(jax.tree.leaves(net)) == 1
    assert jax.jit(Net.scale)(lazy.clones()[0], x).tolist() == [2, 4]
    assert raises(
        dataclasses.FrozenInstanceError, "weight", lambda: setattr(net, "weight", 1)
    )
    for f in (method, jitted, net.scale, eqx.filter_jit(net.scale)):
        assert f(x).tolist() == [2, 4]
    assert jitted_method(x).tolist() == net.jitted(x).tolist() == [3, 5]
    moved = step(step(lazy, 1.0), 1.0)
    assert type(moved) is Net and moved.weight.tolist() == [3, 0]
    assert moved == eqx.tree_at(lambda n: n.weight, net, net.weight + 2)
    assert "'arrays'" in repr(step) and lazy.weight.is_deleted()
    # classes
    made = Net.make(3)
    assert made.weight.shape == () and made.power == 2 and made.options == {}
    assert Net(1, 3, activation=abs)(2.0) == 8
    assert eqx.filter_jit(net.relu)(x).tolist() == net.relu(x).tolist() == [2, 0]
    assert raises(TypeError, "'weight'", lambda: Net())
    assert raises(TypeError, "abstract", lambda: Base(1))
    assert raises(ValueError, "power", lambda: Net(1, -1))
    assert [f.name for f in dataclasses.fields(Net)][2:4] == ["options", "activation"]

    class Sub(Net):
        extra: int = 5

    assert Sub(1).extra == 5 and raises(TypeError, "'weight'", lambda: Sub())
    assert jax.tree.map(lambda x: x, Sub(2.0)).weight == 2
    # a hand-written `__init__`, also where it is inherited
    assert (counter.count, counter.step) == (11, 3)
    assert type(counter.sibling()) is Later
    for cls in (Counter, Later):
        assert (cls(2).count, cls(2).step) == (12, 3)
    # a class whose instances are not frozen
    open.x = 2
    assert eqx.filter_jit(lambda o: o.x)(open) == 2
    open.x = 3
    assert eqx.filter_jit(lambda o: o.x)(open) == 3
    # the values of a closure
    assert closure(4) == 64
    # enumerations
    assert isinstance(item, Results) and item is Results.failed
    assert Results[item] == "not fine" and bool(item != Results.OK)
    assert MoreResults.promote(item) is MoreResults.failed
    assert len(MoreResults) == 3
    assert raises(AttributeError, "`OK`", lambda: setattr(Results, "OK", item))


payloads = {
    "cloudpickle": cloudpickle.dumps((check, sent)),
    # Its `Parallel` sends methods in a way of its own.
    "joblib": bytes(reduction.dumps((check, sent))),
}
