"""What every transformation returns: a pytree with name and leaves of what it wraps."""

import abc
import copy
import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import equinox_like as eqx


class Scale(eqx.Module):
    factor: Any

    def __call__(self, x):
        """Scales."""
        return (self.factor * x).sum()


def total(x, y=0):
    """Sums."""
    return jnp.sum(x) + y


shard_map = functools.partial(
    eqx.filter_shard_map, in_specs=PartitionSpec(), out_specs=PartitionSpec()
)
TRANSFORMATIONS = {
    "filter_jit": eqx.filter_jit,
    "filter_grad": eqx.filter_grad,
    "filter_value_and_grad": eqx.filter_value_and_grad,
    "filter_vmap": eqx.filter_vmap,
    "filter_pmap": eqx.filter_pmap,
    "filter_pmap on a device": lambda f: eqx.filter_pmap(f, devices=jax.devices()[:1]),
    "filter_shard_map": shard_map,
    "filter_checkpoint": eqx.filter_checkpoint,
    "filter_custom_jvp": eqx.filter_custom_jvp,
    "filter_custom_vjp": eqx.filter_custom_vjp,
    "filter_custom_vmap": eqx.filter_custom_vmap,
    "filter_invertible": eqx.filter_invertible,
    "filter_make_jaxpr": eqx.filter_make_jaxpr,
}
of_each = pytest.mark.parametrize("name", TRANSFORMATIONS)


@of_each
def test_wrapper_knows_what_it_wraps(name):
    for fun in total, Scale(2.0):
        wrapper = TRANSFORMATIONS[name](fun)
        assert wrapper.__wrapped__ is fun
        name_of_fun = getattr(fun, "__name__", "Scale")  # an instance has none
        assert wrapper.__doc__ == fun.__doc__ and wrapper.__name__ == name_of_fun
        assert repr(wrapper).startswith(f"<{name.split()[0]} of {name_of_fun}")


@of_each
def test_what_it_wraps_can_be_changed_in_a_copy(name):
    wrapper = TRANSFORMATIONS[name](Scale(jnp.ones(2)))
    changed = eqx.tree_at(lambda f: f.__wrapped__.factor, wrapper, jnp.zeros(2))
    assert type(changed) is type(wrapper)
    assert not changed.__wrapped__.factor.any() and wrapper.__wrapped__.factor.all()


@of_each
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_it_can_be_copied_and_pickled(name, again):
    for fun in total, Scale(2.0):
        wrapper = TRANSFORMATIONS[name](fun)
        other = again(wrapper)
        assert type(other) is type(wrapper) and other.__wrapped__ == fun
        assert repr(other) == repr(wrapper) and other.__name__ == wrapper.__name__


@of_each
def test_a_decorated_function_is_pickled_and_copied_by_its_name(name, monkeypatch):
    def decorated(x):
        return x.sum()

    decorated.__qualname__ = "decorated"
    wrapper = TRANSFORMATIONS[name](decorated)
    monkeypatch.setitem(globals(), "decorated", wrapper)
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper
    assert copy.deepcopy(wrapper) is wrapper


@pytest.mark.parametrize("transform", [eqx.filter_jit, eqx.filter_vmap])
def test_abstract_methods_are_marked_below_the_transformation(transform):
    class Base(eqx.Module):
        @transform
        @abc.abstractmethod
        def scaled(self, x): ...

    class Twice(Base):
        @transform
        def scaled(self, x):
            return 2 * x

    with pytest.raises(TypeError, match=r"abstract.*scaled"):
        Base()
    assert Twice().scaled(jnp.ones(2)).tolist() == [2, 2]
    fix = "If a decorator sets it, put it below the transformation"
    with pytest.raises(dataclasses.FrozenInstanceError, match=fix):
        abc.abstractmethod(transform(lambda self: None))


def test_decorator_that_sets_an_attribute_is_told_where_to_go():
    with pytest.raises(dataclasses.FrozenInstanceError, match="put it below the trans"):
        eqx.filter_jit(abs).mark = 1


def test_pickled_pmap_runs_on_the_devices_that_it_had():
    devices = jax.devices()[2:]
    f = eqx.filter_pmap(total, devices=devices)
    again = pickle.loads(pickle.dumps(f))
    out = again(jnp.ones((2, 3)))
    assert out.tolist() == [3, 3] and out.sharding.device_set == set(devices)


@of_each
def test_name_of_a_partial_is_that_of_its_function(name):
    wrapper = TRANSFORMATIONS[name](functools.partial(total, y=1))
    assert wrapper.__name__ == "total" and "total" in repr(wrapper)


def test_partial_shows_its_function():
    partial = eqx.Partial(total, y=1)
    assert partial.__name__ == "total" and partial.__doc__ == "Sums."
    assert partial.__code__ is total.__code__
    assert eqx.Partial(partial).__name__ == "total"
    assert eqx.Partial(len).__name__ == "len" and eqx.Partial.__doc__ != len.__doc__
    assert eqx.Partial(eqx.nn.Identity()).__name__ == "Identity"


@pytest.mark.parametrize("name", ["default", "fn", "args", "kwargs", "out"])
def test_keywords_removed_long_ago_are_refused(name):
    for transformation in eqx.filter_jit, eqx.filter_vmap, eqx.filter_pmap:
        with pytest.raises(ValueError, match=f"`{name}`.*deprecated"):
            transformation(total, **{name: 1})


@pytest.mark.parametrize(
    "name",
    [
        *("filter_grad", "filter_value_and_grad", "filter_vmap", "filter_pmap"),
        *("filter_jacfwd", "filter_jacrev", "filter_hessian", "filter_checkpoint"),
    ],
)
def test_errors_name_the_transformation_as_the_user_does(name):
    with pytest.raises(TypeError, match=f"`{name}` wraps a function"):
        getattr(eqx, name)(3)


@pytest.mark.parametrize("outer", [classmethod, property])
def test_decorators_in_the_wrong_order_are_named(outer):
    fix = f"Write `@{outer.__name__}` above `@filter_jit`, which wraps the function."
    with pytest.raises(TypeError, match=fix):
        eqx.filter_jit(outer(lambda x: 1))

    class Counter(eqx.Module):
        size: int

        count = outer(eqx.filter_jit(lambda x: 1))

    assert (Counter(2).count if outer is property else Counter.count()) == 1
