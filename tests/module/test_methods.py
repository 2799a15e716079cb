"""A method read from an instance is a pytree with the leaves of the instance."""

import copy
import dataclasses
import functools
import inspect
import pickle
import types
import typing
from typing import Any, ClassVar
from unittest import mock

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


def test_equality_and_hash_are_those_of_methods_of_python():
    scale = Scale(1.0)
    assert scale.apply == scale.apply and hash(scale.apply) == hash(scale.apply)
    assert scale.apply != Scale(1.0).apply and scale.apply != Scale.apply
    assert scale.apply == mock.ANY and scale.apply != scale.__call__


def test_bound_method_can_be_copied_and_pickled():
    bound = Scale(3.0).apply
    for again in (copy.copy(bound), copy.deepcopy(bound)):
        assert again(2.0) == 6.0 and eqx.tree_equal(again, bound)
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


@pytest.mark.parametrize("transformation", [eqx.filter_jit, eqx.filter_vmap])
def test_source_and_hints_of_a_transformed_method_are_the_functions(transformation):
    class Named(eqx.Module):
        @transformation
        def f(self, x: "eqx.Module") -> "eqx.Module":
            return x

    method = Named().f
    assert inspect.getsource(method) == inspect.getsource(Named.f)
    assert "def f(self" in inspect.getsource(method)
    hints = typing.get_type_hints(method)
    assert hints == {"x": eqx.Module, "return": eqx.Module}


class Mixin:
    """No Module: Python alone knows it."""

    def describe(self):
        """Describes."""
        return ("mixin", self.x)

    def shadowed(self):
        return "mixin"

    @property
    def prop(self):
        return "property"

    def __len__(self):
        return 3


class WithMixin(Mixin, eqx.Module):
    x: Any

    def shadowed(self):
        return ("own", super().shadowed())


class TestMixins:
    @pytest.mark.parametrize("order", [(Mixin, eqx.Module), (eqx.Module, Mixin)])
    def test_method_of_a_mixin_binds_as_a_pytree(self, order):
        cls = type("Mixed", order, {"__annotations__": {"x": Any}})
        bound = cls(3.0).describe
        assert isinstance(bound, eqx.Module) and bound() == ("mixin", 3.0)
        assert jtu.tree_leaves(bound) == [3.0] and bound.__doc__ == "Describes."
        assert cls.describe is Mixin.describe

    def test_all_else_of_it_is_as_python_has_it(self):
        module = WithMixin(1)
        assert module.shadowed() == ("own", "mixin")
        assert module.prop == "property" and len(module) == 3

    def test_subclass_inherits_it(self):
        class Derived(WithMixin):
            pass

        assert Derived(2).describe() == ("mixin", 2)
        assert isinstance(Derived(2).describe, eqx.Module)

    def test_class_between_overrides_it_as_in_python(self):
        class Other(Mixin):
            def describe(self):
                return "other"

            prop = "plain"

        class OtherModule(Other, eqx.Module):
            pass

        class Diamond(WithMixin, OtherModule):
            pass

        class PlainDiamond(WithMixin, Other):
            pass

        for cls in (Diamond, PlainDiamond):
            assert cls(1).describe() == "other" and cls(1).prop == "plain"
            assert isinstance(cls(1).describe, eqx.Module)

    def test_attribute_that_is_no_method_overrides_it(self):
        class Other(Mixin):
            describe = 5

        class Diamond(WithMixin, Other):
            pass

        assert Diamond(1).describe == 5

    def test_change_of_the_mixin_is_seen(self):
        class Changing:
            def f(self):
                return 1

        class Mixed(Changing, eqx.Module):
            pass

        assert Mixed().f() == 1
        Changing.f = lambda self: 2
        assert Mixed().f() == 2 and isinstance(Mixed().f, eqx.Module)
        Changing.f = 5
        assert Mixed().f == Mixed.f == 5
        Changing.f = property(lambda self: 6)
        assert Mixed().f == 6
        del Changing.f
        assert not hasattr(Mixed(), "f") and not hasattr(Mixed, "f")
        with pytest.raises(AttributeError, match="'Mixed' object has no attribute 'f'"):
            Mixed().f  # noqa: B018

    def test_method_that_is_deleted_shows_the_next_one(self):
        class Above:
            def f(self):
                return "above"

        class Below(Above):
            def f(self):
                return "below"

        class Mixed(Below, eqx.Module):
            pass

        class Derived(Mixed):
            def f(self):
                return "own", super().f()

        assert Derived().f() == ("own", "below")
        del Below.f
        assert Mixed().f() == "above" and Derived().f() == ("own", "above")
        assert isinstance(Mixed().f, eqx.Module)
        del Derived.f
        assert Derived().f() == "above"

    def test_method_that_is_added_later_is_bound_by_python(self):
        class Changing:
            pass

        class Mixed(Changing, eqx.Module):
            x: int = 1

        Changing.f = lambda self: self.x
        assert Mixed().f() == 1 and type(Mixed().f) is types.MethodType
        Mixed.f = Changing.f
        assert Mixed().f() == 1 and isinstance(Mixed().f, eqx.Module)

    def test_init_of_a_mixin_may_set_fields_only(self):
        class Setting:
            def __init__(self, x):
                self.x = x
                self.extra = 1

        class Mixed(Setting, eqx.Module):
            x: int

        with pytest.raises(dataclasses.FrozenInstanceError, match="'extra'"):
            Mixed(1)

    def test_dataclass_as_a_mixin_brings_its_fields(self):
        @dataclasses.dataclass
        class Data:
            y: int

        class Mixed(eqx.Module, Data):
            x: int

        assert jtu.tree_leaves(Mixed(1, x=2)) == [1, 2]


class Cached(eqx.Module):
    x: int

    @functools.lru_cache  # noqa: B019
    def cached(self, y):
        return self.x + y

    @jax.jit
    def jitted(self, y):
        """Jitted."""
        return self.x + y


class TestWrappedMethods:
    @pytest.mark.parametrize("name", ["cached", "jitted"])
    def test_wrapped_method_binds_as_a_pytree(self, name):
        module = Cached(1)
        bound = getattr(module, name)
        assert isinstance(bound, eqx.Module) and bound(2) == 3
        assert bound.__self__ is module and bound.__name__ == name
        assert jtu.tree_leaves(bound) == [1]
        assert getattr(Cached, name) is bound.__func__

    def test_cache_is_shared_by_equal_instances(self):
        class Keyed(eqx.Module):
            x: int

            @functools.lru_cache  # noqa: B019
            def get(self):
                return object()

        assert Keyed(1).get() is Keyed(1).get()
        assert Keyed(1).get() is not Keyed(2).get()

    @pytest.mark.parametrize("name", ["cached", "jitted"])
    def test_it_can_be_pickled_and_copied(self, name):
        bound = getattr(Cached(1), name)
        for again in (pickle.loads(pickle.dumps(bound)), copy.deepcopy(bound)):
            assert again(2) == 3 and eqx.tree_equal(again, bound)
            assert jtu.tree_structure(again) == jtu.tree_structure(bound)


def test_getattribute_of_a_user_keeps_binding():
    seen = []

    class Watched(eqx.Module):
        x: int

        def __getattribute__(self, name):
            seen.append(name)
            return super().__getattribute__(name)

        def f(self):
            return self.x

    assert isinstance(Watched(1).f, eqx.Module) and Watched(1).f() == 1
    assert "f" in seen


def test_methods_that_python_alone_binds():
    class Plain(eqx.Module):
        x: int
        partial = functools.partialmethod(lambda self, y: self.x + y, 1)

        class Nested:
            pass

    assert Plain(1).partial() == 2 and not isinstance(Plain(1).partial, eqx.Module)
    assert isinstance(Plain(1).Nested, type)


def test_method_of_one_class_may_be_an_attribute_of_another():
    bound = Scale(2.0).apply

    class Other(eqx.Module):
        f: ClassVar[Any] = bound

    assert Other().f(3.0) == 6.0 and Other().f.__self__ is bound.__self__


def test_doctest_finds_every_docstring():
    import doctest

    class Documented(eqx.Module):
        """Class."""

        def method(self):
            """Method."""

        @eqx.filter_jit
        def compiled(self):
            """Compiled."""

        @property
        def prop(self):
            """Property."""

        @classmethod
        def cls_method(cls):
            """Class method."""

    found = doctest.DocTestFinder(exclude_empty=True).find(Documented, "D")
    names = {test.name for test in found if test.docstring}
    assert names >= {"D", "D.method", "D.compiled", "D.prop", "D.cls_method"}


class TestUpdateWrapper:
    class Wrapper(eqx.Module):
        fun: Any

        @property
        def __wrapped__(self):
            return self.fun

    def test_copy_bears_name_and_docstring(self):
        wrapper = self.Wrapper(Scale.apply)
        named = eqx.module_update_wrapper(wrapper)
        assert (named.__name__, named.__doc__) == ("apply", "Scales.")
        assert not hasattr(wrapper, "__name__")
        assert repr(named) == repr(wrapper) and "__name__" not in repr(named)

        class Called(self.Wrapper):
            def __call__(self):
                return self.fun()

        assert ".Called(" in repr(eqx.module_update_wrapper(Called(len)))
        with pytest.raises(dataclasses.FrozenInstanceError):
            named.fun = 1

    def test_names_are_structure(self):
        def named(fun):
            return eqx.module_update_wrapper(self.Wrapper(fun))

        structure = jtu.tree_structure
        assert structure(named(len)) != structure(self.Wrapper(len))
        assert structure(named(len)) != structure(named(abs))
        assert structure(named(Scale(1.0))) == structure(named(Scale(2.0)))
        assert jtu.tree_map(lambda x: x, named(len)).__name__ == "len"

    def test_names_stay_whatever_is_done_to_the_copy(self):
        class Scaled(self.Wrapper):
            scale: float = eqx.field(static=True, default=1.0)

        for wrapper in (Scaled(len), self.Wrapper(len)):
            named = eqx.module_update_wrapper(wrapper)
            structure = jtu.tree_structure(named)
            for again in (named, copy.copy(named), jtu.tree_map(lambda x: x, named)):
                assert jtu.tree_structure(again) == structure
                assert jtu.tree_map(lambda x: x, again).__name__ == "len"
        named = eqx.module_update_wrapper(Scaled(len), None)  # as without it
        structure = jtu.tree_structure(named)
        object.__setattr__(named, "scale", 2.0)
        for _ in range(2):
            assert jtu.tree_structure(named) != structure
            assert jtu.tree_map(lambda x: x, named).__name__ == "len"
            assert jtu.tree_map(lambda x: x, named).scale == 2.0
        object.__setattr__(named, "scale", 1.0)
        assert jtu.tree_structure(named) == structure

    def test_annotations_may_be_anything(self):
        class Odd:
            __annotations__ = None

            def __call__(self, x):
                return x

        assert jtu.tree_leaves(eqx.module_update_wrapper(self.Wrapper(Odd()))) != []
        assert jtu.tree_leaves(eqx.filter_grad(Odd())) == []

    def test_wrapped_may_be_given(self):
        named = eqx.module_update_wrapper(self.Wrapper(3), len)
        assert named.__name__ == "len" and named.fun == 3

    def test_class_may_have_a_state_of_its_own(self):
        class Pickled(self.Wrapper):
            def __getstate__(self):
                return ()

        assert eqx.module_update_wrapper(Pickled(len)).fun is len

    def test_class_without_the_property_is_refused(self):
        with pytest.raises(
            ValueError, match=r"Scale must define `__wrapped__` as a property"
        ):
            eqx.module_update_wrapper(Scale(1.0))


class TestStatic:
    def test_value_is_structure(self):
        static = eqx.internal.Static({"a": [1, "text"], "b": None})
        assert jtu.tree_leaves(static) == []
        assert jax.jit(lambda: static)().value == {"a": [1, "text"], "b": None}

    @pytest.mark.parametrize("other", [1.0, True, [1], "1"])
    def test_values_are_compared_strictly(self, other):
        structure = jtu.tree_structure(eqx.internal.Static(1))
        assert structure == jtu.tree_structure(eqx.internal.Static(1))
        assert structure != jtu.tree_structure(eqx.internal.Static(other))

    def test_arrays_in_it_are_warned_of(self):
        with pytest.warns(UserWarning, match="being set as static"):
            eqx.internal.Static(jnp.ones(2))


class TestPartial:
    def test_calls_with_stored_and_given_arguments(self):
        partial = eqx.Partial(lambda *args, **kwargs: (args, kwargs), 1, a=2)
        args, kwargs = partial(3, b=4)
        assert args == (1, 3) and list(kwargs.items()) == [("b", 4), ("a", 2)]

    def test_arguments_are_leaves(self):
        partial = eqx.Partial(Scale(2.0).apply, jnp.ones(2), power=1)
        assert len(jtu.tree_leaves(partial)) == 3
        assert jax.jit(lambda p: p())(eqx.Partial(Scale(2.0), 3.0)) == 6.0

    def test_repeated_keyword_is_refused(self):
        with pytest.raises(TypeError, match="'a'"):
            eqx.Partial(dict, a=1)(a=2)
        shown = inspect.signature(eqx.Partial(lambda x, *, a, b: x, a=1))
        assert list(shown.parameters) == ["x", "b"]

    def test_any_keyword_may_be_used(self):
        partial = eqx.Partial(dict, func=1)
        assert partial(self=2) == {"func": 1, "self": 2}


printed = []


class Weighted(eqx.Module):
    weight: Any

    def __call__(self, x):
        return (self.weight * x).sum()

    def __repr__(self):
        printed.append(self.weight)
        return "Weighted"


@pytest.mark.parametrize(
    "transform",
    [
        jax.vmap,
        jax.grad,
        jax.make_jaxpr,
        lambda f: lambda x: jax.vjp(f, x)[0],
        lambda f: lambda x: jax.linearize(f, x)[0],
    ],
    ids=["vmap", "grad", "make_jaxpr", "vjp", "linearize"],
)
def test_jax_does_not_print_a_model_to_name_it(transform):
    printed.clear()
    transform(Weighted(jnp.ones(3)))(jnp.ones(3))
    assert not printed


@pytest.mark.parametrize(
    "model", [Weighted(2.0), eqx.nn.Lambda(jnp.sin), eqx.nn.Sequential([])], ids=str
)
def test_a_model_is_not_a_function_and_has_no_name(model):
    """pytest names a test by the `__name__` of its parameter."""
    assert not hasattr(model, "__name__") and not hasattr(model, "__qualname__")
    assert eqx.filter_jit(len).__name__ == eqx.Partial(len).__name__ == "len"
    assert inspect.unwrap(model).__name__ == model.__call__.__name__ == "__call__"
    assert jax.jit(model.__call__).__name__ == "__call__"


def test_what_cannot_be_called_has_no_name():
    class Config(eqx.Module):
        x: int = 1

    for name in ("__name__", "__code__", "__wrapped__"):
        assert not hasattr(Config(), name)
