import collections
import dataclasses

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given
from strategies import Node, trees

import equinox_like as eqx

Flags = collections.namedtuple("Flags", ["inference", "other"])


class Layer(eqx.Module):
    inner: object = None
    inference: object = False


@jtu.register_dataclass
@dataclasses.dataclass
class Plain:
    inference: object
    x: object = None


@given(trees())
def test_tree_without_flags_stays_equal(tree):
    assume(not isinstance(tree, type))  # a class is refused
    new = eqx.tree_inference(tree)
    assert jtu.tree_structure(new) == jtu.tree_structure(tree)
    assert all(map(lambda a, b: a is b, jtu.tree_leaves(new), jtu.tree_leaves(tree)))


@given(trees(), trees())
def test_flags_at_every_depth_are_set_and_nothing_else(a, b):
    def build(flag):
        return Layer([a, {"x": Layer(b, flag)}, Node(Layer(inference=flag))], flag)

    new = eqx.tree_inference(build(False), "new")
    expected = build("new")
    assert jtu.tree_structure(new) == jtu.tree_structure(expected)
    leaves = jtu.tree_leaves(new), jtu.tree_leaves(expected)
    assert all(map(lambda x, y: x is y, *leaves))


def test_flag_may_be_none_an_array_or_a_whole_subtree():
    for flag in (None, jnp.asarray(False), (), [1, 2]):
        assert eqx.tree_inference(Layer(inference=flag)).inference is True
    assert eqx.tree_inference(Layer(inference=True), False).inference is False
    value = jnp.asarray(True)
    assert eqx.tree_inference(Layer(), value).inference is value


def test_dataclasses_and_named_tuples_have_flags_too_but_dictionaries_have_none():
    assert eqx.tree_inference(Plain(False)) == Plain(True)
    assert eqx.tree_inference([Flags(False, 1)]) == [Flags(True, 1)]
    assert eqx.tree_inference({"inference": False}) == {"inference": False}


def test_no_init_and_no_check_runs():
    calls = []

    class Checked(eqx.Module):
        inference: bool

        def __init__(self):
            calls.append("init")
            self.inference = False

        def __check_init__(self):
            calls.append("check")

    new = eqx.tree_inference(Checked())
    assert type(new) is Checked and new.inference and calls == ["init", "check"]


def test_only_the_chosen_nodes_are_switched_if_some_are_chosen():
    model = [Layer(Layer()), Layer()]
    new = eqx.tree_inference(model, where=lambda m: m[0])
    assert new[0].inference and new[0].inner.inference and not new[1].inference


def test_flag_that_is_no_part_of_the_tree_is_refused_by_its_path():
    class Static(eqx.Module):
        inference: bool = eqx.field(static=True, default=False)

    class Property(eqx.Module):
        @property
        def inference(self):
            return False

    class Attribute(eqx.Module):
        inference = False

    for cls in (Static, Property, Attribute):
        with pytest.raises(TypeError, match=r"`pytree\[0\]\['a'\]\.inference`") as info:
            eqx.tree_inference([{"a": cls()}])
        assert cls.__qualname__ in str(info.value)


class Unassigned(eqx.Module):
    inference: bool = False

    def __init__(self):
        pass


class Overridden(Unassigned):
    inference = True


class NotInInit(eqx.Module):
    inference: bool = eqx.field(default=False, init=False)


@pytest.mark.parametrize("cls", [Unassigned, Overridden, NotInInit])
def test_flag_that_was_not_assigned_is_refused_with_the_fix(cls):
    """The pattern of PyTorch: a default, and an `__init__` that leaves it alone."""
    text = r"`pytree\[0\]\['a'\]\.inference` cannot be set.* "
    text += rf"In {cls.__name__}, assign `self\.inference` in `__init__`"
    for function in eqx.tree_inference, eqx.nn.inference_mode:
        with pytest.raises(TypeError, match=text):
            function([{"a": cls()}])
    with pytest.raises(TypeError, match=text):
        eqx.tree_at(lambda m: m[0]["a"].inference, [{"a": cls()}], True)


def test_method_of_that_name_is_left_alone():
    class Model(eqx.Module):
        dropout: eqx.nn.Dropout

        def inference(self, x):
            return self.dropout(x)

    new = eqx.tree_inference(Model(eqx.nn.Dropout()))
    assert new.dropout.inference is True
    assert new.inference(jnp.ones(2)).sum() == 2


def test_layers_are_switched_by_the_same_function_under_its_name_in_nn():
    assert eqx.nn.inference_mode is eqx.tree_inference
    model = eqx.nn.Sequential([eqx.nn.Dropout(), eqx.nn.Lambda(jnp.sum)])
    assert eqx.nn.inference_mode(model)(jnp.ones(3)) == 3
    with pytest.raises(RuntimeError, match="key"):
        eqx.nn.inference_mode(eqx.nn.inference_mode(model), False)(jnp.ones(3))


def test_transformed_model_is_switched_inside():
    wrapped = eqx.filter_jit(eqx.nn.Dropout())
    assert eqx.tree_inference(wrapped)(jnp.ones(3)).sum() == 3
    switched = jax.jit(eqx.tree_inference)(Layer(jnp.ones(2)))
    assert switched.inference


def test_flag_of_what_is_wrapped_is_set() -> None:
    class Wrapper(eqx.Module):
        inner: object

        def __getattr__(self, name):
            return getattr(self.__dict__["inner"], name)

    wrapped = eqx.tree_inference(Wrapper(eqx.frozen(Layer(inference=False))))
    assert wrapped.inference is True and wrapped.inner.value.inference is True
    mixed = eqx.nn.mixed(eqx.nn.Dropout(), "compute=bf16")
    for model in (mixed, eqx.frozen(mixed), eqx.nn.mixed(mixed, "output=f32")):
        assert eqx.tree_inference(model)(jnp.ones(2)).sum() == 2
        assert eqx.tree_inference(eqx.tree_inference(model), False).inference is False


@pytest.mark.parametrize("where", [None, lambda m: m])
def test_class_in_place_of_a_model_is_refused(where) -> None:
    with pytest.raises(TypeError, match="`pytree` is the class `Dropout`"):
        eqx.tree_inference(eqx.nn.Dropout, where=where)
