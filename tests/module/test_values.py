"""Values that make trouble in a field: warned of, or refused, as the instance is made."""

import dataclasses
import functools
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import equinox_like as eqx


class Layer(eqx.Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x

    def method(self, x):
        return self.weight * x


class Generated(eqx.Module):
    f: Any
    tag: str = eqx.field(static=True, default="tag")


class Own(eqx.Module):
    f: Any

    def __init__(self, f):
        self.f = f


class Checked(eqx.Module):
    """Has a generated `__init__`, and more to do after it."""

    f: Any

    def __check_init__(self):
        pass


class Documented(Layer):
    r"""The product $\sum_{i} w_{i} x_{i}$. JAX cannot format this as a docstring."""


layer = Layer(jnp.ones(2))
documented = Documented(jnp.ones(2))
CLASSES = [Generated, Own, Checked]


def warnings_of(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(w.message) for w in caught]


class TestTransformedCallables:
    @pytest.mark.parametrize("cls", CLASSES)
    @pytest.mark.parametrize(
        "value",
        [
            jax.vmap(layer),
            jax.jit(layer),
            jax.grad(layer),
            jax.value_and_grad(layer),
            jax.jacfwd(layer),
            jax.jacrev(layer),
            jax.hessian(layer),
            jax.checkpoint(layer),
            jax.jit(layer.method),
            jax.vmap(jax.vmap(layer)),
            functools.wraps(layer)(lambda x: x),
            [jax.vmap(layer)],
            {"a": (jax.vmap(layer),)},
            jax.vmap(documented),
            jax.vmap(jax.vmap(documented), in_axes=1),
            jax.vmap(jax.grad(documented)),
        ],
        ids=range(16),
    )
    def test_one_that_hides_arrays_is_warned_of_once(self, cls, value):
        (message,) = warnings_of(lambda: cls(value))
        assert "JAX-transformed callable" in message
        assert f"field 'f' of {__name__}.{cls.__qualname__}" in message

    @pytest.mark.parametrize("cls", CLASSES)
    @pytest.mark.parametrize(
        "value",
        [
            jax.vmap(jnp.sin),
            jax.nn.relu,
            lambda x: x,
            jnp.tanh,
            jax.jit(layer.__call__),
            jax.jit(functools.partial(layer)),
            eqx.filter_vmap(layer),
            eqx.filter_jit(layer),
            layer.method,
            Generated,
        ],
        ids=range(10),
    )
    def test_others_are_not(self, cls, value):
        assert warnings_of(lambda: cls(value)) == []

    def test_transforming_one_is_no_mistake(self):
        assert warnings_of(lambda: eqx.filter_jit(jax.vmap(layer))) == []

    def test_outer_module_does_not_warn_again(self):
        with pytest.warns(UserWarning, match="JAX-transformed"):
            inner = Generated(jax.vmap(layer))
        assert warnings_of(lambda: Own([Generated(inner)])) == []

    def test_given_by_keyword_it_is_found_too(self):
        assert len(warnings_of(lambda: Generated(f=jax.vmap(layer)))) == 1

    @pytest.mark.parametrize("transform", [jax.vmap, jax.jit])
    def test_in_a_default_it_is_found_too(self, transform):
        class Plain(eqx.Module):
            f: Any = transform(layer)

        class Made(eqx.Module):
            f: Any = dataclasses.field(default_factory=lambda: transform(layer))

        for make in (Plain, Made):
            assert len(warnings_of(make)) == 1
        assert warnings_of(lambda: Made(jnp.tanh)) == []

    def test_init_that_calls_a_generated_one_warns_once(self):
        class Derived(Generated):
            def __init__(self, f):
                super().__init__(f)

        (message,) = warnings_of(lambda: Derived(jax.vmap(layer)))
        assert "Derived" in message


class TestCycles:
    @pytest.mark.parametrize(
        "hide",
        [
            lambda self: self.method,
            lambda self: [self.method],
            lambda self: {"a": (1, self.method)},
            lambda self: self,
            lambda self: [self],
            lambda self: self.__call__,
            lambda self: eqx.Partial(self.method),
            lambda self: Generated([self]),
        ],
        ids=range(8),
    )
    @pytest.mark.parametrize("static", [False, True])
    def test_value_that_contains_the_module_is_refused(self, hide, static):
        class Cyclic(eqx.Module):
            g: Any = eqx.field(static=static)
            weight: Any

            def __init__(self):
                self.weight = 1.0
                self.g = hide(self)

            def __call__(self):
                pass

            def method(self):
                pass

        with pytest.raises(ValueError, match=r"Cannot assign methods.*`self\.g` of"):
            Cyclic()

    def test_it_is_refused_in_post_init_and_in_a_list_filled_later(self):
        class InPost(eqx.Module):
            g: Any = eqx.field(init=False)

            def __post_init__(self):
                self.g = self.method

            def method(self):
                pass

        class Later(eqx.Module):
            g: Any

            def __init__(self):
                self.g = []
                self.g.append(self.method)

            def method(self):
                pass

        for cls in (InPost, Later):
            with pytest.raises(ValueError, match=r"Cannot assign methods.*self\.g"):
                cls()

    @pytest.mark.parametrize(
        "hide",
        [
            lambda self: functools.partial(self.method),
            lambda self: [functools.partial(functools.partial(max, self))],
            lambda self: jtu.Partial(self.method),
            lambda self: {"a": (jtu.Partial(functools.partial(self.method)),)},
            lambda self: jtu.Partial(jax.jit(self.method)),
            lambda self: Generated(jtu.Partial(self.method)),
            lambda self: jtu.Partial(max, functools.partial(self.method)),
            lambda self: jax.jit(self.method),
            lambda self: jax.vmap(self),
            lambda self: eqx.filter_vmap(self.__call__),
            lambda self: [eqx.filter_jit(eqx.filter_grad(self.__call__))],
        ],
        ids=range(11),
    )
    def test_one_that_hides_it_from_jax_is_warned_of(self, hide):
        class Hiding(eqx.Module):
            weight: Any
            g: Any

            def __init__(self):
                self.weight = 1.0
                self.g = hide(self)

            def __call__(self, x):
                return x

            def method(self, x):
                return x

        (message,) = warnings_of(Hiding)
        assert "Field 'g' of" in message and "Hiding itself" in message

    def test_method_and_copy_of_another_instance_are_fine(self):
        class Fine(eqx.Module):
            other: Any
            f: Any

            def __init__(self, other):
                self.other = other
                self.f = other and [
                    other.method,
                    other.__call__,
                    eqx.filter_vmap(other.__call__),
                    eqx.filter_jit(other.method),
                ]

            def __call__(self):
                pass

            def method(self):
                pass

        inner = Fine(None)
        assert warnings_of(lambda: Fine(inner)) == []

    def test_module_may_be_flattened_in_its_own_init(self):
        class Flattened(eqx.Module):
            x: Any
            n: int

            def __init__(self):
                self.x = [1, 2, 3]
                self.n = len(jtu.tree_leaves(self))

        assert Flattened().n == 3

    def test_property_that_returns_a_method_is_fine(self):
        class Base(eqx.Module):
            f: Any = eqx.field(init=False)

        class Derived(Base):
            x: int

            @property
            def f(self):
                return self.method

            def method(self):
                return self.x

        assert Derived(3).f() == 3


class TestStaticConstants:
    def test_numpy_constant_is_compared_by_content(self):
        traces = []

        @eqx.filter_jit
        def f(module):
            traces.append(1)
            return module.f * module.tag

        make = lambda tag: Generated(jnp.ones(2), tag=tag)  # noqa: E731
        assert f(make(np.arange(2.0))).tolist() == [0.0, 1.0]
        assert f(make(np.arange(2.0))).tolist() == [0.0, 1.0]
        assert len(traces) == 1
        assert f(make(np.arange(2.0) + 1)).tolist() == [1.0, 2.0]
        assert len(traces) == 2

    @pytest.mark.parametrize(
        ("a", "b", "same"),
        [
            (np.array([1]), np.array([1]), True),
            (np.array([1]), np.array([True]), False),
            (np.array([1]), np.array([1], np.int32), False),
            (np.array([0.0]), np.array([-0.0]), False),
            (np.array([np.nan, 1]), np.array([-np.nan, 1]), True),
            (np.array([1, 2]), np.array([[1, 2]]), False),
            (np.array(["a"]), np.array(["a"]), True),
            (np.float32(1), np.float32(1), True),
            (np.float32(1), np.float64(1), False),
            ([np.arange(3)], [np.arange(3)], True),
            (np.asfortranarray(np.eye(3)), np.eye(3), True),
        ],
        ids=range(11),
    )
    def test_same_means_dtype_shape_and_values(self, a, b, same):
        one, two = Generated(1, a), Generated(1, b)
        assert (jtu.tree_structure(one) == jtu.tree_structure(two)) is same
        assert (one == two) is same

    def test_it_is_kept_as_a_read_only_copy(self):
        given = np.arange(3)
        view = given.view()
        view.flags.writeable = False
        for value in (given, [given], view):
            module = Generated(1, value)
            (kept,) = jtu.tree_leaves(module.tag)
            given[0] = 7
            assert kept[0] == 0
            with pytest.raises(ValueError, match="read-only"):
                kept[0] = 7
            given[0] = 0

    def test_constant_that_is_read_only_already_is_kept_as_it_is(self):
        given = np.arange(3)
        given.flags.writeable = False
        assert Generated(1, given).tag is given

    def test_array_of_jax_is_warned_of_and_compared_by_identity(self):
        with pytest.warns(
            UserWarning, match="^A JAX array is being set as static! Field 'tag'"
        ):
            one = Generated(1, [jnp.ones(2)])
        with pytest.warns(UserWarning, match="being set as static"):
            two = Generated(1, [jnp.ones(2)])
        assert jtu.tree_structure(one) != jtu.tree_structure(two)

    def test_masked_array_is_compared_by_identity(self):
        one, two = (Generated(1, np.ma.masked_array([1], [m])) for m in (0, 1))
        assert jtu.tree_structure(one) != jtu.tree_structure(two)

    def test_any_value_may_be_static(self):
        tag = {1: "a", "b": {2}, None: []}
        one, two = Generated(1, tag), Generated(1, {1: "a", "b": {2}, None: []})
        assert jtu.tree_structure(one) == jtu.tree_structure(two)
        other = Generated(1, tag | {1: "c"})
        assert jtu.tree_structure(one) != jtu.tree_structure(other)


class TestSettingsOfFields:
    """What `field` returns, at another place than in the body of the class."""

    @pytest.mark.parametrize("cls", CLASSES)
    def test_as_a_value_they_are_refused(self, cls):
        message = f"Field 'f' of {__name__}.{cls.__qualname__} is set to the result of"
        with pytest.raises(TypeError, match=message):
            cls(eqx.field(static=True))

    def test_as_an_annotation_they_are_warned_of(self):
        with pytest.warns(UserWarning, match="'f' of .*Settings has its settings in"):

            class Settings(eqx.Module):
                f: eqx.field(trainable=False)  # pyright: ignore

        assert Settings(1.0).f == 1.0


# In a process of its own: Python counts recursions wrong after JAX has refused one.
LOOPED = """
import equinox_like as eqx

class Box(eqx.Module):
    content: object

class Looped(eqx.Module):
    box: object

    def __init__(self):
        self.box = Box(self)
        try:
            eqx.filter_jit(lambda tree: tree)(self.box)
        except ValueError as error:
            assert "at `tree` contains itself, at `tree.content.box`" in str(error)
            print("refused")
        self.box = None

Looped()
"""


def test_instance_that_contains_itself_while_it_is_constructed_is_no_endless_tree():
    run = subprocess.run(
        [sys.executable, "-c", LOOPED], capture_output=True, timeout=60
    )
    assert run.stdout == b"refused\n", run.stderr[-2000:]
