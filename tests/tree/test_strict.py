"""The laws of static values: which are the same, and which only seem so to Python."""

import collections
import itertools
import math
import types
from functools import partial
from typing import Any

import attrs
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from strategies import (
    CONFUSABLE,
    CONTAINERS,
    Config,
    Node,
    OfAttrs,
    One,
    Registered,
    reference_same,
    static_leaves,
    static_values,
)

import equinox_like as eqx
from equinox_like._tree.registry import registry as ours
from equinox_like._tree.strict import strict_key, strict_treedef, strictly_same


@given(static_values, static_values)
def test_static_values_are_the_same_only_with_the_same_types_at_every_depth(a, b):
    assert strictly_same(a, b) == reference_same(a, b)
    assert (strict_key((a,)) == strict_key((b,))) == reference_same(a, b)


@given(static_leaves, static_leaves)
def test_same_values_have_the_same_hash(a, b):
    if strictly_same(a, b):
        assert hash(strict_key((a,))) == hash(strict_key((b,)))


def nested(containers, x):
    for container in reversed(containers):
        x = CONTAINERS[container](x)
    return x


def nests(containers, x, y):
    """Both in the same containers, where these take what has no hash, and others."""
    try:
        return nested(containers, x), nested(containers, y)
    except TypeError:
        hypothesis.reject()


@pytest.mark.parametrize("container", CONTAINERS)
def test_values_that_python_calls_equal_differ_in_every_container(container):
    wrap = CONTAINERS[container]
    keys = [strict_key((wrap(x),)) for x in CONFUSABLE]
    again = [strict_key((wrap(x),)) for x in CONFUSABLE]
    assert keys == again and list(map(hash, keys)) == list(map(hash, again))
    assert len(set(keys)) == len(keys)


@given(
    st.lists(st.sampled_from(list(CONTAINERS)), max_size=4),
    st.sampled_from(CONFUSABLE),
    st.sampled_from(CONFUSABLE),
)
def test_values_that_python_calls_equal_differ_at_every_depth(containers, x, y):
    a, b = nests(containers, x, y)
    assert strictly_same(a, b) == (x is y)
    one, two = Node(0, tag=a), Node(0, tag=b)
    assert (jtu.tree_structure(one) == jtu.tree_structure(two)) == (x is y)
    groups = [
        eqx.internal.split(t, lambda leaf: "data") for t in ({"x": one}, {"x": two})
    ]
    assert (groups[0][1] == groups[1][1]) == (x is y)


# Each row is one dtype.
DTYPES = [
    [np.dtype("float32"), np.float32, jnp.float32, np.dtype("f4")],
    [np.dtype(jnp.bfloat16), ml_dtypes.bfloat16, jnp.bfloat16],
    [np.dtype("int64"), np.int64, jnp.int64],
    [np.dtype(bool), np.bool_, jnp.bool_],
]


@given(
    st.lists(st.sampled_from(list(CONTAINERS)), max_size=3),
    st.sampled_from([(row, x) for row, xs in enumerate(DTYPES) for x in xs]),
    st.sampled_from([(row, x) for row, xs in enumerate(DTYPES) for x in xs]),
)
def test_dtype_is_the_same_in_all_its_forms(containers, x, y):
    a, b = nests(containers, x[1], y[1])
    same = x[0] == y[0]
    assert strictly_same(a, b) == same
    if same:
        assert hash(strict_key([a])) == hash(strict_key([b]))
    one, two = Node(0, tag=a), Node(0, tag=b)
    assert eqx.tree_equal(one, two) is same and (one == two) is same
    treedefs = [jtu.tree_structure(node) for node in (one, two)]
    assert (treedefs[0] == treedefs[1]) == same
    groups = [eqx.internal.split(t, lambda leaf: "data") for t in (one, two)]
    assert (groups[0][1] == groups[1][1]) == same


def test_what_only_resembles_a_dtype_is_another_value():
    others = float, int, bool, "float32", "f4", np.floating, np.generic, np.number
    for dtype in itertools.chain(*DTYPES):
        for other in (*others, jax.dtypes.prng_key, np.dtype(">f4"), np.float64):
            assert not strictly_same([dtype], [other])
    assert len({strict_key([x]) for x in others}) == len(others)


def test_forms_of_a_dtype_share_a_program():
    traces = []

    @eqx.filter_jit
    def convert(x, dtype):
        traces.append(dtype)
        return x.astype(dtype.tag["to"][0])

    for dtype in DTYPES[0] + DTYPES[1]:
        y = convert(jnp.arange(2), Node(0, tag={"to": [dtype]}))
        assert y.dtype == dtype
    assert len(traces) == 2


def test_containers_differ_in_more_than_what_is_in_them():
    different = [
        [collections.deque([1]), collections.deque([1], 3), collections.deque([1], 4)],
        [collections.defaultdict(f, a=1) for f in (None, int, float)],
        [{"a": 1}, collections.OrderedDict(a=1), types.MappingProxyType({"a": 1})],
        [range(0, 3, 2), range(0, 4, 2)],
        [b"a", bytearray(b"a"), memoryview(b"a")],
    ]
    for values in different:
        assert len({strict_key((x,)) for x in values}) == len(values)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]])
def test_a_treedef_can_be_compared_with_none(wrap):
    # In JAX, `treedef == None` raises.
    one, two = Node(0, tag=wrap(jtu.tree_structure(0))), Node(0, tag=wrap(None))
    assert jtu.tree_structure(one) != jtu.tree_structure(two)
    assert not eqx.tree_equal(one, two)


@pytest.mark.parametrize("make", [Config, OfAttrs])
def test_field_that_a_dataclass_does_not_compare_is_not_compared(make):
    assert strictly_same(make(1, ignored=2), make(1, ignored=3))


def test_equality_that_a_class_of_attrs_defines_is_obeyed():
    @attrs.frozen
    class Name:
        text: str

        def __eq__(self, other):
            return self.text.lower() == other.text.lower()

        def __hash__(self):
            return hash(self.text.lower())

    assert strictly_same(Name("a"), Name("a"))
    assert not strictly_same(Name("a"), Name("b"))


def test_what_has_a_hash_of_its_own_and_no_equality_is_compared_by_identity():
    class Named:
        def __hash__(self):
            return hash("name")

    one = Named()
    assert strictly_same([one], [one]) and not strictly_same([one], [Named()])


def test_what_has_an_equality_of_its_own_is_compared_by_it():
    class Even:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return self.value % 2 == other.value % 2

        __hash__ = None

    assert strictly_same([Even(1)], [Even(3)])
    assert not strictly_same([Even(1)], [Even(2)])


class Marked(eqx.Module):
    name: str
    note: Any = 0

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Symbol(eqx.Module):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@jtu.register_pytree_node_class
class Partly:
    """Its flattened form lacks the name."""

    def __init__(self, name):
        self.name = name

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls("unknown")


class PartlyWithEquality(Partly):
    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


jtu.register_pytree_node_class(PartlyWithEquality)


def test_nodes_with_an_equality_of_their_own_are_compared_by_it():
    for make in (Marked, PartlyWithEquality):
        assert strictly_same([make("a")], [make("a")])
        assert not strictly_same([make("a")], [make("b")])
    assert strictly_same([Marked("a", 1)], [Marked("a", 2)])
    for make in (Symbol, lambda: Partly("a")):
        value = make()
        assert strictly_same([value], [value])
        assert not strictly_same([value], [make()])


def test_modules_and_partial_functions_of_jax_are_compared_as_trees():
    linear = eqx.nn.Lambda(jnp.tanh)
    assert strictly_same([linear], [eqx.nn.Lambda(jnp.tanh)])
    for make in (eqx.frozen, partial(jtu.Partial, max), Node):
        assert strictly_same([make(1)], [make(1)])
        assert not strictly_same([make(1)], [make(1.0)])


@pytest.mark.parametrize("answer", [np.ones(3), np.True_ + np.ones(1), "yes", None])
def test_value_whose_equality_is_no_bool_equals_itself_alone(answer):
    class Value:
        __hash__ = None

        def __eq__(self, other):
            return answer

    value = Value()
    assert strictly_same([value], [value]) and not strictly_same([value], [Value()])


def test_value_that_cannot_be_compared_equals_itself_alone():
    class Value:
        def __hash__(self):
            raise RuntimeError

        def __eq__(self, other):
            raise RuntimeError

    value = Value()
    assert strictly_same([value], [value]) and not strictly_same([value], [Value()])


def test_one_nan_is_like_another():
    assert strictly_same(float("nan"), float("nan"))
    assert strictly_same((1, {float("nan")}), (1, {float("nan")}))
    assert hash(strict_key([math.nan])) == hash(strict_key([-math.nan]))


def test_order_counts_in_an_ordered_dict_only():
    ab, ba = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert strictly_same(ab, ba)
    assert not strictly_same(collections.OrderedDict(ab), collections.OrderedDict(ba))


def test_arrays_of_jax_are_the_same_only_if_they_are_one_object():
    x = jnp.ones(2)
    assert strictly_same([x], [x]) and not strictly_same([x], [jnp.ones(2)])


def test_numpy_arrays_are_their_content():
    x, y = np.arange(3.0), np.array(["a"])
    assert strictly_same([x, y], [x.copy(), y.copy()])
    assert hash(strict_key([x])) == hash(strict_key([x.copy()]))
    assert not strictly_same(x, x.astype(np.float32))
    assert strictly_same(np.array([math.nan]), -np.array([math.nan]))
    assert not strictly_same(np.zeros(2), -np.zeros(2))
    masked = [np.ma.masked_array([1], [m]) for m in (0, 1)]
    assert strictly_same(*[masked[0]] * 2) and not strictly_same(*masked)


@pytest.mark.parametrize("size", [10, 5000])
def test_large_numpy_arrays_differ_in_any_place(size):
    key = strict_key([np.zeros(size)])
    for i in (0, 7, size - 1):
        other = np.zeros(size)
        other[i] = 1
        assert strict_key([other]) != key


def test_key_does_not_change_with_the_value():
    value = {"a": [1, {2}], "b": np.zeros(2)}
    key = strict_key((value,))
    value["a"][1].add(3)
    value["b"][0] = 1
    assert strict_key((value,)) != key
    assert key == strict_key(({"a": [1, {2}], "b": np.zeros(2)},))


@pytest.mark.parametrize("registry", ["ours", "JAX's"])
@pytest.mark.parametrize("x, y", [*itertools.permutations([1, 1.0, True, One.ONE], 2)])
def test_structure_equals_another_one_only_with_the_same_keys(x, y, registry):
    flatten, strict = jtu.tree_flatten, strict_treedef
    if registry == "ours":
        flatten, strict = ours.flatten, ours.strict_treedef
    for wrap in (
        lambda x: {x: 0},
        lambda x: [{"a": {(x, "b"): 0}}],
        lambda x: collections.OrderedDict([(x, 0)]),
        lambda x: collections.defaultdict(None, {x: 0}),
    ):
        ours.adopt([wrap(x)])
        known = {strict(flatten(wrap(x))[1]): "found"}
        assert known.get(flatten(wrap(x))[1]) == "found"
        assert known.get(flatten(wrap(y))[1]) is None
        assert strict(flatten(wrap(y))[1]) not in known


def test_structure_without_what_may_be_confused_is_its_own_key():
    treedef = jtu.tree_structure({"a": [1, (2, None)], "b": Node(1, tag=1.0)})
    assert strict_treedef(treedef) is treedef


def test_value_that_is_its_own_aux_data_is_compared_as_other_values():
    assert strictly_same(Registered(1), Registered(1))
    assert not strictly_same(Registered(1), Registered(1.0))
    one, same, other = (
        strict_treedef(jtu.tree_structure([Registered(tag)])) for tag in (1, 1, 1.0)
    )
    assert one == same != other and hash(one) == hash(same)
