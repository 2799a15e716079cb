"""Modules as dataclasses and as pytrees."""

import copy
import dataclasses
import functools
import gc
import pickle
import re
import threading
import typing
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from strategies import Node, trees

import equinox_like as eqx

T = TypeVar("T")


class Affine(eqx.Module):
    weight: Any
    bias: Any = 0.0
    name: str = eqx.field(static=True, default="affine")

    def __call__(self, x):
        return self.weight * x + self.bias

    def doubled(self, x):
        return 2 * self(x)


class Custom(eqx.Module):
    """Has an `__init__` of its own, which leaves a class-level default alone."""

    weight: Any
    default: int = 3
    size: int = eqx.field(static=True, default=4)

    def __init__(self, weight):
        self.weight = weight


class Partway(eqx.Module):
    x: int
    y: int

    def __init__(self, shown):
        self.x = 1
        shown.append(repr(self))
        self.y = 2


def leaves(x):
    return jtu.tree_leaves(x)


class TestDataclass:
    def test_init_is_generated_from_the_fields(self):
        module = Affine(1.0, name="first")
        assert (module.weight, module.bias, module.name) == (1.0, 0.0, "first")
        assert [f.name for f in dataclasses.fields(Affine)] == [
            "weight",
            "bias",
            "name",
        ]
        assert dataclasses.replace(module, bias=2.0).bias == 2.0

    def test_fields_of_base_classes_come_first(self):
        class More(Affine):
            extra: int = 1
            weight: Any = 5

        assert [f.name for f in dataclasses.fields(More)] == [
            "weight",
            "bias",
            "name",
            "extra",
        ]
        assert leaves(More()) == [5, 0.0, 1]

    def test_subclass_may_make_a_field_static(self):
        class StaticLeaf(Affine):
            bias: float = eqx.field(static=True, default=1.0)

        assert leaves(StaticLeaf(2.0)) == [2.0]

    def test_own_init_is_inherited_instead_of_generating_one(self):
        class More(Custom):
            extra: int = 7

        assert More(1).weight == 1
        with pytest.raises(TypeError, match="positional"):
            More(1, 2)

    def test_first_base_decides_which_init(self):
        class A(eqx.Module):
            x: int

            def __init__(self):
                self.x = 1

        class B(eqx.Module):
            y: int = 2

        class AB(A, B):
            pass

        class BA(B, A):
            pass

        assert AB().x == 1
        assert BA(x=5).x == 5

    def test_init_of_a_base_that_is_no_module_is_used(self):
        class Mixin:
            def __init__(self, x):
                self.x = x

        class WithMixin(Mixin, eqx.Module):
            x: int

        assert WithMixin(3).x == 3

    def test_own_init_may_call_a_generated_one(self):
        class More(Affine):
            extra: int

            def __init__(self, weight):
                super().__init__(weight, bias=1.0)
                self.extra = 2

        assert leaves(More(3.0)) == [3.0, 1.0, 2]

    def test_init_false_kw_only_factory_and_init_var(self):
        class Special(eqx.Module):
            a: int
            b: list = dataclasses.field(default_factory=list)
            c: dataclasses.InitVar[int] = 5
            d: int = eqx.field(init=False)
            e: int = eqx.field(kw_only=True)

            def __post_init__(self, c):
                self.d = self.a + c

        first, second = Special(1, e=2), Special(1, c=7, e=2)
        assert (first.d, second.d) == (6, 8)
        assert first.b is not second.b
        with pytest.raises(TypeError, match="'e'"):
            Special(1)

    def test_post_init_added_to_a_class_later_does_not_run(self):
        class Late(eqx.Module):
            x: int

        Late.__post_init__ = lambda self: setattr(self, "x", 5)
        assert Late(1).x == 1

    def test_name_mangled_fields_work(self):
        class Private(eqx.Module):
            __x: int

            def get(self):
                return self.__x

        assert Private(3).get() == 3 and leaves(Private(3)) == [3]

    def test_class_variables_are_no_fields(self):
        class WithClassVar(eqx.Module):
            x: int
            shared: typing.ClassVar[int] = 3
            plain = 4

        assert leaves(WithClassVar(1)) == [1]

    def test_mutable_default_is_refused(self):
        with pytest.raises(ValueError, match="default_factory"):

            class Bad(eqx.Module):
                x: list = []  # noqa: RUF012

    def test_module_is_a_default(self):
        class Outer(eqx.Module):
            inner: Affine = Affine(1.0)

        assert Outer().inner.weight == 1.0

    def test_generics_can_be_subscripted(self):
        class Box(eqx.Module, Generic[T]):
            x: T

        box = Box[int](3)
        assert box.x == 3 and jtu.tree_structure(box) == jtu.tree_structure(Box(4))

    def test_classes_that_are_generic_in_equinox_can_be_subscripted(self):
        class A(eqx.Module):
            def method(self): ...

        for cls in type(A().method), eqx.internal.Static:
            assert typing.get_args(cls[int]) == (int,)
            assert typing.get_origin(cls[int]) is cls

    def test_signature_is_that_of_init(self):
        import inspect

        assert list(inspect.signature(Affine).parameters) == ["weight", "bias", "name"]
        assert list(inspect.signature(Affine(1.0)).parameters) == ["x"]

    def test_docstring_is_written_from_the_signature_where_there_is_none(self):
        class Undocumented(eqx.Module):
            x: int
            y: int = eqx.field(kw_only=True, default=3)

        assert Undocumented.__doc__ == "Undocumented(x: int, *, y: int = 3)"
        assert typing.cast(str, eqx.Module.__doc__).startswith("Base class of models")

    def test_metaclass_of_a_user_is_called(self):
        calls = []

        class Meta(type(eqx.Module)):
            def __call__(cls, *args, **kwargs):
                calls.append(cls)
                return super().__call__(*args, **kwargs)

        class Plain(eqx.Module, metaclass=Meta):
            x: int

        class Own(Plain):
            def __init__(self):
                self.x = 3

        assert (Plain(1).x, Own().x) == (1, 3)
        assert calls == [Plain, Own] and isinstance(Own, Meta)

    def test_type_of_the_class_is_written_after_subscription(self):
        class Box(eqx.Module, Generic[T]):
            x: T

        box = Box[int](3)
        assert box.__orig_class__ == Box[int]
        with pytest.raises(dataclasses.FrozenInstanceError):
            box.x = 4
        assert jtu.tree_structure(box) == jtu.tree_structure(Box(3))

    def test_new_may_return_something_else(self):
        class Odd(eqx.Module):
            def __new__(cls):
                return 3

        assert Odd() == 3

    def test_replaced_init_is_used(self):
        class Late(eqx.Module):
            x: int
            y: int = eqx.field(converter=float, default=1)

        def init(self, x):
            self.x = x + 1
            self.y = x

        Late.__init__ = init
        assert (Late(1).x, Late(1).y) == (2, 1.0)

    def test_match_statement_knows_the_fields(self):
        match Affine(1.0, 2.0):
            case Affine(w, b):
                assert (w, b) == (1.0, 2.0)

    @pytest.mark.parametrize("slots", [("x",), ("x", "y", "other"), "x"])
    def test_slots_are_ignored_as_fields_live_in_the_dictionary(self, slots):
        class Slotted(eqx.Module):
            __slots__ = slots
            x: int
            y: int = 2

        slotted = Slotted(1)
        assert vars(slotted) == {"x": 1, "y": 2} and jtu.tree_leaves(slotted) == [1, 2]
        assert jtu.tree_map(lambda x: x + 1, slotted) == Slotted(2, 3)


class TestConverter:
    def test_result_takes_the_place_of_the_value(self):
        class Converted(eqx.Module):
            x: jax.Array = eqx.field(converter=jnp.asarray)
            n: int = eqx.field(converter=int, static=True, default="3")

        module = Converted([1.0, 2.0])
        assert isinstance(module.x, jax.Array) and module.n == 3

    def test_runs_once_after_an_own_init_and_on_class_defaults(self):
        calls = []

        class Converted(eqx.Module):
            x: int = eqx.field(converter=lambda x: calls.append(x) or x + 1)
            y: int = eqx.field(converter=lambda y: y + 1, default=10)

            def __init__(self):
                self.x = 1
                assert self.x == 1

        module = Converted()
        assert (module.x, module.y, calls) == (2, 11, [1])
        assert leaves(module) == [2, 11]

    def test_does_not_run_when_unflattened(self):
        class Converted(eqx.Module):
            x: Any = eqx.field(converter=lambda x: x + 1)

        assert jtu.tree_map(lambda x: x, Converted(1)).x == 2

    def test_parameter_is_annotated_by_what_the_converter_takes(self):
        def convert(x: list) -> jax.Array:
            return jnp.asarray(x)

        class Converted(eqx.Module):
            x: jax.Array = eqx.field(converter=convert)
            y: str = eqx.field(converter=str)
            z: int

        assert Converted.__init__.__annotations__ == {
            "x": list,
            "y": Any,
            "z": int,
            "return": None,
        }

    def test_metadata_of_a_plain_dataclass_field_says_the_same(self):
        class Plain(eqx.Module):
            x: int = dataclasses.field(metadata={"converter": float})
            n: int = dataclasses.field(metadata={"static": True}, default=1)

        assert leaves(Plain(1)) == [1.0]

    @pytest.mark.parametrize("name", ["converter", "static"])
    def test_reserved_metadata_is_refused(self, name):
        with pytest.raises(ValueError, match=name):
            eqx.field(metadata={name: 1})

    def test_error_of_one_names_the_field(self):
        class Converted(eqx.Module):
            x: int
            y: jax.Array = eqx.field(converter=jnp.asarray)

        with pytest.raises(TypeError) as info:
            Converted(1, "text")
        (note,) = info.value.__notes__
        assert "converter of field 'y' of" in note and "Converted" in note

    def test_converter_that_cannot_be_called_is_refused(self):
        with pytest.raises(TypeError, match="converter"):
            eqx.field(converter=typing.cast(Any, 3))


class TestFrozen:
    def test_assignment_after_construction_is_refused_with_the_fix(self):
        module = Affine(1.0)
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"'weight'.*tree_at"):
            module.weight = 2.0
        fix = r"'name'.*replace.*no `__init__` of its own, or build a new one"
        with pytest.raises(dataclasses.FrozenInstanceError, match=fix):
            module.name = "other"
        with pytest.raises(dataclasses.FrozenInstanceError, match="'weight'"):
            del module.weight
        assert module.weight == 1.0

    def test_error_of_a_misspelt_field_names_the_one_that_is_not_set(self):
        class Misspelt(eqx.Module):
            layer1: int
            weight: int

            def __init__(self, name):
                self.layer1 = 1
                setattr(self, name, 2)

        with pytest.raises(AttributeError, match=r"Did you mean `self.weight`\?$"):
            Misspelt("wieght")
        with pytest.raises(AttributeError, match=r"in the body of the class\.$"):
            Misspelt("layer2")

    def test_undeclared_attribute_is_refused_during_construction(self):
        class Undeclared(eqx.Module):
            x: int

            def __init__(self):
                self.x = 1
                self.y = 2

        with pytest.raises(dataclasses.FrozenInstanceError, match=r"'y'.*not a field"):
            Undeclared()

    def test_undeclared_attribute_is_refused_after_a_name_was_taken_over(self):
        class Named(eqx.Module):
            def __init__(self):
                self.__name__ = "named"
                self.y = 2

        with pytest.raises(dataclasses.FrozenInstanceError, match=r"'y'.*not a field"):
            Named()

    def test_methods_called_by_init_may_assign(self):
        class Delegating(eqx.Module):
            x: int

            def __init__(self):
                self.setup()

            def setup(self):
                self.x = 3

        assert Delegating().x == 3

    def test_init_cannot_be_called_again(self):
        module = Custom(1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            module.__init__(2)
        assert module.weight == 1

    def test_generated_init_cannot_be_called_again(self):
        class Point(eqx.Module):
            x: int
            y: int = 2

        class Above(Point):
            def __init__(self, x):
                super().__init__(x)

        read = eqx.filter_jit(lambda m: (m.x, m.y))
        for module in (Point(1), Above(1)):
            assert read(module) == (1, 2)
            for init in (module.__init__, lambda x, m=module: Point.__init__(m, x)):
                with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
                    init(5)
            assert (module.x, module.y) == read(module) == (1, 2)

    def test_instance_that_new_returns_again_stays_frozen(self):
        class Single(eqx.Module):
            x: int
            _instance = None

            def __new__(cls, *args):
                if cls._instance is None:
                    cls._instance = super().__new__(cls)
                return cls._instance

        class Custom(Single):
            _instance = None

            def __init__(self, x):
                if x != 0:
                    self.x = x

        for cls in (Single, Custom):
            module = cls(1)
            read = eqx.filter_jit(lambda m: m.x)
            assert read(module) == 1
            with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
                cls(2)
            assert module.x == read(module) == 1
        assert Custom(0) is Custom._instance  # its `__init__` assigns nothing

    def test_init_may_delete_what_it_assigned(self):
        class Replaced(eqx.Module):
            x: int
            y: int

            def __init__(self, forgets):
                self.x = self.y = 1
                del self.x
                if not forgets:
                    self.x = 2

        assert jtu.tree_leaves(Replaced(False)) == [2, 1]
        with pytest.raises(TypeError, match=r"'x' .*was not initialized"):
            Replaced(True)
        with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
            del Replaced(False).x

    def test_check_init_runs_on_the_frozen_object_for_each_class(self):
        order = []

        class Base(eqx.Module):
            x: int

            def __check_init__(self):
                order.append("base")
                with pytest.raises(dataclasses.FrozenInstanceError):
                    self.x = 2

        class Derived(Base):
            def __check_init__(self):
                order.append("derived")
                if self.x < 0:
                    raise ValueError("negative")

        assert Derived(1).x == 1 and order == ["derived", "base"]
        with pytest.raises(ValueError, match="negative"):
            Derived(-1)

    def test_failed_init_leaves_a_frozen_object(self):
        found = []

        class Failing(eqx.Module):
            x: int

            def __init__(self):
                found.append(self)
                self.x = 1
                raise KeyError("no")

        with pytest.raises(KeyError):
            Failing()
        with pytest.raises(dataclasses.FrozenInstanceError):
            found[0].x = 2
        reference = weakref.ref(found.pop())
        gc.collect()
        assert reference() is None

    @pytest.mark.parametrize(
        "make",
        [
            copy.copy,
            copy.deepcopy,
            lambda m: pickle.loads(pickle.dumps(m)),
            lambda m: jtu.tree_map(lambda x: x, m),
            lambda m: type(m).__new__(type(m)),
        ],
    )
    @pytest.mark.parametrize("module", [Affine(1.0), Custom(1.0)])
    def test_copies_are_frozen(self, make, module):
        with pytest.raises(dataclasses.FrozenInstanceError):
            make(module).weight = 2.0

    def test_missing_field_is_named(self):
        class Missing(eqx.Module):
            x: int
            y: int

            def __init__(self):
                self.x = 1

        with pytest.raises(TypeError, match=r"'y' of .*Missing was not initialized"):
            Missing()

    def test_default_factory_is_for_a_generated_init(self):
        class Missing(eqx.Module):
            x: list = dataclasses.field(default_factory=list)

            def __init__(self):
                pass

        fix = r"`self.x` in `__init__`, since only a generated `__init__` calls its"
        with pytest.raises(TypeError, match=fix):
            Missing()

    def test_error_inside_a_property_does_not_hide_the_missing_field(self):
        class Supplied(eqx.Module):
            x: int

            def __init__(self):
                pass

            def __getattr__(self, name):
                if name == "x":
                    return 5
                raise AttributeError(name)

        assert Supplied().x == 5 and leaves(Supplied()) == []

    def test_storing_an_own_method_is_refused(self):
        class Cyclic(eqx.Module):
            f: Callable

            def __init__(self):
                self.f = self.method

            def method(self):
                pass

        with pytest.raises(ValueError, match=r"Cannot assign methods.*self\.f"):
            Cyclic()

    def test_post_init_that_never_runs_is_warned_of(self):
        with pytest.warns(UserWarning, match="`__init__`.*`__post_init__`"):

            class Both(eqx.Module):
                x: int

                def __init__(self):
                    self.x = 1

                def __post_init__(self):
                    pass

    def test_array_in_a_static_field_is_warned_of_by_the_fields_name(self):
        with pytest.warns(UserWarning, match="being set as static.*'name'"):
            Affine(1.0, name=[jnp.ones(2)])

    def test_computed_float_is_warned_of(self):
        class Cached(eqx.Module):
            x: float
            y: float = eqx.field(init=False)

            def __post_init__(self):
                self.y = 2 * self.x

        message = r"^Using `field\(init=False\)`.*'y'.*parameters.*in an `__init__`"
        with pytest.warns(UserWarning, match=message):
            Cached(1.0)

    def test_threads_construct_at_once(self):
        class Slow(eqx.Module):
            x: int
            y: int

            def __init__(self, x):
                self.x = x
                threading.Event().wait(0.001)
                self.y = x

        made = []
        threads = [
            threading.Thread(
                target=lambda i=i: made.extend(Slow(i + j) for j in range(20))
            )
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 160 and all(m.x == m.y for m in made)


class TestPytree:
    def test_leaves_are_the_values_of_the_fields_that_are_not_static(self):
        assert leaves(Affine(1.0, 2.0)) == [1.0, 2.0]

    def test_key_paths_are_attributes(self):
        module = Affine([1.0, Affine(2.0)])
        paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(module)[0]]
        assert paths == [".weight[0]", ".weight[1].weight", ".weight[1].bias", ".bias"]

    @given(trees())
    def test_round_trip_keeps_structure_and_leaves(self, tree):
        module = Node(tree, tree)
        values, treedef = jtu.tree_flatten(module)
        again = treedef.unflatten(values)
        again_values, again_treedef = jtu.tree_flatten(again)
        assert treedef == again_treedef and type(again) is Node
        assert all(a is b for a, b in zip(values, again_values, strict=True))
        assert again.tag == module.tag

    def test_structures_of_other_classes_and_statics_differ(self):
        class Twin(Affine):
            pass

        structure = jtu.tree_structure(Affine(1.0))
        assert structure == jtu.tree_structure(Affine("anything", (None and 1) or 2))
        assert structure != jtu.tree_structure(Twin(1.0))
        assert structure != jtu.tree_structure(Affine(1.0, name="other"))

    def test_unhashable_static_field_does_not_hinder_jit(self):
        module = Affine(1.0, name=["a", {"b": set()}])
        traces = []

        @jax.jit
        def f(m):
            traces.append(1)
            return m.weight

        f(module)
        f(Affine(2.0, name=["a", {"b": set()}]))
        assert len(traces) == 1
        f(Affine(2.0, name=["a", {"b": {1}}]))
        assert len(traces) == 2

    def test_unset_fields_are_no_leaves_and_stay_unset(self):
        bare = Affine.__new__(Affine)
        assert leaves(Custom(1.0)) == [1.0]
        again = jtu.tree_map(lambda x: x + 1, Custom(1.0))
        assert (
            again.weight == 2.0 and "default" not in vars(again) and again.default == 3
        )
        assert not hasattr(jtu.tree_map(lambda x: x, bare), "weight")

    def test_class_level_default_that_was_never_assigned_works_everywhere(self):
        module = Custom(jnp.ones(2))
        assert jax.jit(lambda m: m.weight * m.default)(module).tolist() == [3, 3]
        assert jax.vmap(lambda m: m)(module).default == 3
        carry, _ = jax.lax.scan(lambda m, _: (m, None), module, None, length=2)
        assert carry.weight.tolist() == [1, 1]

    def test_cached_property_does_not_change_the_structure(self):
        class Cached(eqx.Module):
            x: int

            @functools.cached_property
            def double(self):
                return 2 * self.x

        module = Cached(2)
        assert module.double == 4
        assert jtu.tree_structure(module) == jtu.tree_structure(Cached(3))
        assert jtu.tree_map(lambda x: x + 1, module).double == 6
        assert pickle.loads(pickle.dumps(eqx.Partial(len))) == eqx.Partial(len)

    def test_escape_hatch_is_seen(self):
        module = Affine(1.0)
        before = jtu.tree_structure(module)
        object.__setattr__(module, "weight", 5.0)
        object.__setattr__(module, "name", "other")
        assert leaves(module) == [5.0, 0.0]
        assert jtu.tree_structure(module) != before

    def test_overridden_field_is_read_from_the_property(self):
        class Base(eqx.Module):
            x: int = eqx.field(init=False)

        class Derived(Base):
            y: int

            @property
            def x(self):
                return self.y + 1

        module = Derived(1)
        assert module.x == 2 and leaves(module) == [1]
        assert jtu.tree_map(lambda x: x + 1, module).x == 3

    @pytest.mark.parametrize("base", [Affine, Partway], ids=["generated", "own"])
    def test_field_that_a_property_hides_is_told(self, base):
        (name, *_) = base.__dataclass_fields__
        hidden = type("Hidden", (base,), {name: property(lambda self: 1)})
        with pytest.raises(AttributeError, match=f"property {name!r} of 'Hidden'"):
            hidden([])

    def test_names_of_a_wrapped_function_are_structure(self):
        class Wrapper(eqx.Module):
            f: Callable = eqx.field(static=True)

            def __init__(self, f):
                self.f = f
                self.__name__ = f.__name__
                self.__doc__ = f.__doc__

        again = jtu.tree_map(lambda x: x, Wrapper(len))
        assert again.__name__ == "len" and again.__doc__ == len.__doc__
        assert jtu.tree_structure(Wrapper(len)) != jtu.tree_structure(Wrapper(abs))

    def test_module_without_fields_has_no_leaves(self):
        assert leaves(eqx.Module()) == []
        with pytest.raises(TypeError):
            eqx.Module(1)

    def test_construction_works_under_jit(self):
        made = jax.jit(lambda x: Affine(x, name="inside"))(1.0)
        assert made.name == "inside" and made.weight == 1.0


class TestComparison:
    def test_equal_means_equal_leaves_and_structure(self):
        assert Affine(1.0) == Affine(1.0) and Affine(1.0) != Affine(2.0)
        assert Affine(1.0) != Affine(1.0, name="other") and Affine(1.0) != 1.0

    def test_arrays_compare_to_a_jax_bool(self):
        assert isinstance(Affine(jnp.ones(2)) == Affine(jnp.ones(2)), jax.Array)
        assert Affine(jnp.ones(2)) == Affine(jnp.ones(2))
        assert Affine(jnp.ones(2)) != Affine(jnp.zeros(2))

    def test_hash_agrees_with_equality(self):
        assert hash(Affine(1.0)) == hash(Affine(1.0)) and {Affine(1.0): 1}[Affine(1.0)]
        with pytest.raises(TypeError, match="unhashable"):
            hash(Affine(jnp.ones(2)))
        with pytest.raises(TypeError, match="unhashable type: 'list'") as info:
            hash(Affine([1.0]))
        assert info.value.__cause__ is None

    def test_hash_names_a_static_array(self):
        static = Affine(1.0, name=np.ones(2))  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            TypeError, match=r"'Affine'. Its static field `name` is .*2"
        ):
            hash(static)

    def test_own_equality_is_used(self):
        class Always(eqx.Module):
            x: int

            def __eq__(self, other):
                return True

        assert Always(1) == Always(2)
        with pytest.raises(TypeError, match="unhashable"):
            hash(Always(1))

    def test_other_object_may_say_that_it_is_equal(self):
        assert Affine(1.0) == mock.ANY and not Affine(1.0) != mock.ANY
        others = 1.0, None, eqx.nn.Identity(), jnp.ones(2), np.ones(2), np.float32(1)
        for other in others:
            assert (Affine(1.0) == other) is False
            assert (Affine(1.0) != other) is True

    def test_repr_shows_fields_arrays_in_short_and_no_defaults(self):
        shown = repr(Affine(jnp.ones((2, 3)), name="other"))
        assert shown == "Affine(weight=f32[2,3], name='other')"

    def test_repr_of_a_long_model_names_the_summary(self):
        note = "\n# In fewer lines: equinox_like.nn.summary(model)"
        short, long = (eqx.nn.MLP(2, 2, 2, n, key=jax.random.key(0)) for n in (2, 16))
        assert repr(short) == eqx.tree_pformat(short)
        assert repr(long) == str(long) == eqx.tree_pformat(long) + note
        assert str(eqx.nn.summary(long)).count("\n") < repr(long).count("\n")

    def test_repr_during_construction_shows_what_is_missing(self):
        shown = []
        Partway(shown)
        assert shown == ["Partway(x=1, y=<uninitialised>)"]


class TestCopies:
    @pytest.mark.parametrize(
        "make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
    )
    def test_copy_has_equal_structure_and_leaves(self, make):
        module = Affine(jnp.arange(3.0), name="kept")
        leaves(module)
        again = make(module)
        assert again == module and again.name == "kept"
        assert jtu.tree_structure(again) == jtu.tree_structure(module)

    def test_shallow_copy_shares_arrays_and_deep_copy_does_not(self):
        module = Affine(np.ones(2))
        assert copy.copy(module).weight is module.weight
        assert copy.deepcopy(module).weight is not module.weight

    def test_weak_references_work(self):
        module = Affine(1.0)
        assert weakref.ref(module)() is module


def test_abstract_class_cannot_be_instantiated():
    import abc

    class Abstract(eqx.Module):
        @abc.abstractmethod
        def f(self): ...

    class Concrete(Abstract):
        def f(self):
            return 1

    with pytest.raises(TypeError, match="abstract"):
        Abstract()
    assert Concrete().f() == 1


def test_init_subclass_takes_class_keywords():
    class Base(eqx.Module):
        def __init_subclass__(cls, /, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    class Derived(Base, tag="x"):
        pass

    assert Derived.tag == "x"


def test_init_false_keeps_the_init_of_the_base():
    class Base(eqx.Module):
        size: int

        def __init__(self, text: str):
            self.size = len(text)

    class Derived(Base, init=False):
        pass

    assert Derived("four").size == 4
    with pytest.raises(
        TypeError, match="`init=False` for Plain: neither it nor a base"
    ):

        class Plain(eqx.Module, init=False):
            size: int


def test_class_keyword_makes_the_fields_of_that_class_keyword_only():
    class Base(eqx.Module):
        a: int = 1

    class Derived(Base, kw_only=True):
        b: int

    class More(Derived):
        c: int = 3

    assert (Derived(2, b=3).a, Derived(b=3).b) == (2, 3)
    assert vars(More(1, 2, b=3)) == {"a": 1, "b": 3, "c": 2}
    assert Derived.__doc__ == "Derived(a: int = 1, *, b: int)"
    with pytest.raises(TypeError, match="positional"):
        Derived(2, 3)


def test_no_warning_for_ordinary_values():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Affine(jnp.ones(2), name=("a", 1, jax.nn.relu, None, len, int))


def test_value_that_a_call_changes_belongs_to_a_state():
    class Counter(eqx.Module):
        count: int

        def __call__(self):
            self.count += 1

    with pytest.raises(dataclasses.FrozenInstanceError, match=r"`tree_at.*`nn\.State`"):
        Counter(0)()


RESERVED = {
    *("_flat_", "_aux_", "_assignable_", "_module_abstract_", "_assignable_names_"),
    *("_module_fields_", "_module_spec_", "_registers_itself_", "_shown_"),
    *("_passes_calls_on_", "_shown_fields_", "_wraps_callables_"),
}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_field_with_a_name_that_is_used_is_refused(name):
    with pytest.raises(TypeError, match=f"Field '{name}' of Used has a reserved name"):
        type(eqx.Module)("Used", (eqx.Module,), {"__annotations__": {name: int}})


@pytest.mark.parametrize("name", sorted(RESERVED))
@pytest.mark.parametrize("value", [lambda self: 1, property(lambda self: 1), 1])
def test_attribute_with_a_name_that_is_used_is_refused(name, value):
    with pytest.raises(TypeError, match=f"Attribute '{name}' of Used has a reserved"):
        type(eqx.Module)("Used", (eqx.Module,), {name: value})


def test_every_name_that_a_module_keeps_for_itself_is_reserved():
    kept = {n for n in dir(Affine) if re.fullmatch("_[a-z][a-z_]*_", n)}
    assert kept <= RESERVED


def test_class_can_be_copied_with_what_is_kept_in_it():
    copy = type(Affine)("Copy", Affine.__bases__, dict(vars(Affine)))
    assert copy(jnp.ones(2)).weight.sum() == 2


def test_dictionary_holds_the_fields_and_nothing_else():
    module = Affine(1.0)
    eqx.filter_jit(lambda m: None)(module)
    jtu.tree_flatten(module)
    assert vars(module).keys() == {f.name for f in dataclasses.fields(Affine)}
    assert Affine(**vars(module)) == module
