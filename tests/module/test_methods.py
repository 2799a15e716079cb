"""A method read from an instance is a pytree with the leaves of the instance."""

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import equinox_like as eqx


class Scale(eqx.Module):
    factor: Any
    name: str = eqx.field(static=True, default="scale")

    def apply(self, x, power: int = 1):
        """Scales."""
        return self.factor * x**power

    def __call__(self, x):
        return self.apply(x)

    @property
    def half(self):
        return self.factor / 2

    @classmethod
    def unit(cls):
        return cls(1.0)

    @staticmethod
    def helper():
        return "helped"

    square = lambda self: self.factor**2  # noqa: E731


class Base(eqx.Module):
    x: Any

    def f(self):
        return ("base", self.x)


class Derived(Base):
    def f(self):
        return ("derived", *super().f())


def test_bound_method_calls_the_method():
    scale = Scale(3.0)
    assert scale.apply(2.0) == 6.0 and scale.apply(2.0, power=2) == 12.0
    assert scale.square() == 9.0 and Derived(1).f() == ("derived", "base", 1)


def test_leaves_and_paths_are_those_of_the_instance():
    bound = Scale(jnp.ones(2)).apply
    ((path, leaf),), _ = jtu.tree_flatten_with_path(bound)
    assert jtu.keystr(path) == ".__self__.factor" and leaf.shape == (2,)


def test_bound_method_is_a_module_that_knows_function_and_instance():
    scale = Scale(3.0)
    bound = scale.apply
    assert isinstance(bound, eqx.Module)
    assert bound.__self__ is scale and bound.__func__ is Scale.apply
    assert bound.__wrapped__(2.0) == 6.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.__self__ = scale
    with pytest.raises(AttributeError, match="unknown"):
        bound.unknown  # noqa: B018


def test_bound_method_has_name_doc_and_signature_also_after_a_round_trip():
    bound = Scale(3.0).apply
    for method in (bound, jtu.tree_map(lambda x: x, bound)):
        assert method.__name__ == "apply" and method.__doc__ == "Scales."
        assert method.__qualname__ == "Scale.apply" and method.__module__ == __name__
        assert list(inspect.signature(method).parameters) == ["x", "power"]


def test_jit_of_a_bound_method_compiles_once_for_all_instances():
    traces = []

    @jax.jit
    def run(f, x):
        traces.append(1)
        return f(x)

    assert run(Scale(2.0).apply, 3.0) == 6.0
    assert run(Scale(5.0).apply, 3.0) == 15.0
    assert len(traces) == 1
    run(Scale(5.0, name="other").apply, 3.0)
    assert len(traces) == 2


def test_gradient_of_a_bound_method_is_one():
    gradient = jax.grad(lambda f: f(3.0))(Scale(2.0).apply)
    assert gradient.__self__.factor == 3.0


def test_equality_and_hash_go_by_structure():
    assert Scale(1.0).apply == Scale(1.0).apply
    assert Scale(1.0).apply != Scale(2.0).apply
    assert Scale(1.0).apply != Scale.apply
    assert hash(Scale(1.0).apply) == hash(Scale(1.0).apply)


def test_bound_method_can_be_copied_and_pickled():
    bound = Scale(3.0).apply
    for again in (copy.copy(bound), copy.deepcopy(bound)):
        assert again(2.0) == 6.0 and again == bound
    assert pickle.loads(pickle.dumps(bound))(2.0) == 6.0


def test_other_attributes_are_as_in_any_class():
    scale = Scale(3.0)
    assert scale.half == 1.5 and Scale.unit().factor == 1.0
    assert scale.helper() == "helped"
    assert not isinstance(scale.__call__, eqx.Module)
    assert inspect.isfunction(Scale.apply)


def test_function_attached_later_binds_too():
    class Late(eqx.Module):
        x: int

    def get(self):
        return self.x

    Late.get = get
    assert Late.get is get
    assert Late(3).get() == 3 and isinstance(Late(3).get, eqx.Module)


def test_method_may_be_kept_by_another_module():
    class Holder(eqx.Module):
        f: Any

    holder = Holder(Scale(2.0).apply)
    assert holder.f(3.0) == 6.0 and jtu.tree_leaves(holder) == [2.0]


def test_method_may_be_called_during_construction():
    class Early(eqx.Module):
        x: int
        y: int

        def __init__(self):
            self.x = 1
            self.y = self.plus_one()

        def plus_one(self):
            return self.x + 1

    assert Early().y == 2


def test_help_finds_the_documentation():
    import pydoc

    assert "Scales." in pydoc.render_doc(Scale)


class TestPartial:
    def test_calls_with_stored_and_given_arguments(self):
        partial = eqx.Partial(lambda *args, **kwargs: (args, kwargs), 1, a=2)
        assert partial(3, b=4) == ((1, 3), {"a": 2, "b": 4})

    def test_arguments_are_leaves(self):
        partial = eqx.Partial(Scale(2.0).apply, jnp.ones(2), power=1)
        assert len(jtu.tree_leaves(partial)) == 3
        assert jax.jit(lambda p: p())(eqx.Partial(Scale(2.0), 3.0)) == 6.0

    def test_repeated_keyword_is_refused(self):
        with pytest.raises(TypeError, match="'a'"):
            eqx.Partial(dict, a=1)(a=2)

    def test_any_keyword_may_be_used(self):
        partial = eqx.Partial(dict, func=1)
        assert partial(self=2) == {"func": 1, "self": 2}
