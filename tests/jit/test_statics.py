"""No two static values that differ share a program, and containers are copied."""

import collections
import collections.abc
import dataclasses
import warnings
from typing import NamedTuple
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from strategies import CONFUSABLE, CONTAINERS, Node, Registered

import equinox_like as eqx
from equinox_like._tree.strict import has_hash, strictly_same


def _with_default(value):
    class WithDefault(eqx.Module):
        value: object = dataclasses.field(default_factory=lambda: value)

    return WithDefault


# Where in the arguments a static value may be.
PLACES = {
    "leaf": lambda x: (x,),
    "leaf of a Module": Node,
    "leaf of a list in a Module": lambda x: Node([{"a": x}]),
    "static field": lambda x: Node(0, tag=x),
    "static field further down": lambda x: [Node(Node(0, tag=x))],
    "value registered as static": Registered,
    "value registered as static, in a static field": lambda x: Node(
        0, tag=Registered(x)
    ),
    "dictionary key": lambda x: {x: "value"},
    "dictionary key in a Module": lambda x: Node(({x: "value"},)),
    "key of an OrderedDict": lambda x: collections.OrderedDict([(x, "value")]),
    "key of a defaultdict": lambda x: collections.defaultdict(list, {x: "value"}),
    "default factory": lambda x: collections.defaultdict(x, {"a": "value"}),
}


def is_refused(tree):
    """Whether a leaf has no hash, or keys have no order."""
    try:
        return not all(map(has_hash, jtu.tree_leaves(tree)))
    except ValueError:
        return True


@given(
    st.sampled_from(list(PLACES)),
    st.lists(st.sampled_from(list(CONTAINERS)), max_size=2),
    st.permutations(CONFUSABLE).map(lambda values: values[:2]),
)
@hypothesis.settings(max_examples=40)
def test_function_returns_the_very_kind_of_value_that_it_is_given(
    place, containers, values
):
    def made(x):
        for container in containers:
            x = CONTAINERS[container](x)
        return PLACES[place](x)

    try:
        trees = [made(x) for x in values]
    except TypeError:  # a key without a hash
        hypothesis.reject()
    hypothesis.assume(not any(map(is_refused, trees)))
    hypothesis.assume(not any(map(eqx.is_array, jtu.tree_leaves(trees))))
    # As it was at the time of the trace.
    told = eqx.filter_jit(lambda tree: (tree, repr(tree)))
    for tree in [*trees, *map(made, values)]:
        out, text = told(tree)
        assert strictly_same(out, tree) and text == repr(tree)


@pytest.mark.parametrize("x, y", [(1, True), (1.0, 1), (0.0, -0.0)])
@pytest.mark.parametrize("place", PLACES)
def test_equal_values_in_each_place(place, x, y):
    if place == "default factory":
        x, y = list, tuple
    f = eqx.filter_jit(lambda tree: repr(tree))
    made = PLACES[place]
    for value in (x, y, x, y):
        assert f(made(value)) == repr(made(value))


def test_default_of_a_field_is_a_value_like_any_other():
    class WithDefault(eqx.Module):
        value: object = 1
        tag: object = eqx.field(static=True, default=1)

    f = eqx.filter_jit(lambda m: repr((m.value, m.tag)))
    assert f(WithDefault()) == "(1, 1)"
    assert f(WithDefault(True)) == "(True, 1)"
    assert f(WithDefault(tag=1.0)) == "(1, 1.0)"
    assert f(WithDefault(1, 1)) == "(1, 1)"


def test_structure_of_nodes_from_elsewhere_is_compared_strictly():
    @jtu.register_dataclass
    @dataclasses.dataclass
    class UserNode:
        x: object
        tag: object = dataclasses.field(metadata={"static": True})

    f = eqx.filter_jit(lambda m: repr(m.tag))
    for tag in (1, True, 1.0, (0.0,), (-0.0,), 1):
        assert f(UserNode(jnp.ones(2), tag)) == repr(tag)


def test_outputs_that_differ_in_their_keys_alone():
    @eqx.filter_jit
    def f(x):
        return {(1, True, 1.0)[x.shape[0]]: x}

    for size, kind in enumerate((int, bool, float)):
        for _ in range(2):
            assert [*map(type, f(jnp.ones(size)))] == [kind]


def test_rest_of_a_closure_has_the_same_keys():
    closed = eqx.filter_closure_convert(
        lambda d: next(iter(d.values())) + 1, {1: jnp.ones(2)}
    )
    assert closed({1: jnp.ones(2)}).tolist() == [2, 2]
    with pytest.raises(ValueError):
        closed({True: jnp.ones(2)})


class TestValuesThatCannotBeCompared:
    """They are compared by identity, and break no call of another function."""

    def check(self, make):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A JAX array is being set as static")
            modules = [Node(jnp.ones(2), tag=make()) for _ in range(3)]
        for m in modules:
            for _ in range(2):
                assert eqx.filter_jit(lambda m: m.child + 1)(m).tolist() == [2, 2]
                f = eqx.filter_jit(lambda m: (m, m.child))
                assert f(m)[0].tag is m.tag
        assert jtu.tree_structure(modules[0]) == jtu.tree_structure(modules[0])
        assert jtu.tree_structure(modules[0]) != jtu.tree_structure(modules[1])
        assert not eqx.tree_equal(*modules)

    def test_arrays_of_jax(self):
        self.check(lambda: jnp.ones(3))

    def test_arrays_within_a_container(self):
        self.check(lambda: (jnp.ones(3),))

    def test_objects_whose_equality_is_an_array(self):
        class Odd:
            def __eq__(self, other):
                return np.ones(2)

            def __hash__(self):
                return 1

        self.check(Odd)
        f = eqx.filter_jit(lambda odd, x: (odd, x + 1))
        for odd in (Odd(), Odd()):
            for _ in range(2):
                assert f(odd, jnp.ones(()))[0] is odd

    def test_object_arrays_are_compared_by_what_is_in_them(self):
        modules = [
            Node(jnp.ones(2), tag=np.array([1, x, None], object)) for x in (2, 2.0, 2)
        ]
        kept = [eqx.filter_jit(lambda m: m.tag[1])(m) for m in modules]
        assert [*map(type, kept)] == [int, float, int]
        assert jtu.tree_structure(modules[0]) == jtu.tree_structure(modules[2])


class FrozenDict(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")

    def __hash__(self):
        return hash(tuple(self.items()))

    def __copy__(self):
        return self


class FrozenDictWithoutCopy(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")

    def __copy__(self):
        raise TypeError("no copy")


class FrozenDictWithEquality(FrozenDict):
    def __eq__(self, other):
        return dict(self) == dict(other)

    __hash__ = FrozenDict.__hash__


@dataclasses.dataclass(eq=True)  # without a hash
class WithoutCopy:
    a: object

    def __copy__(self):
        raise TypeError("no copy")


@pytest.mark.parametrize(
    "kind", [FrozenDict, FrozenDictWithEquality, FrozenDictWithoutCopy, WithoutCopy]
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, [1])])
def test_static_value_may_be_immutable_or_without_copies(kind, wrap):
    traces = []

    @eqx.filter_jit
    def f(node):
        traces.append(node.tag)
        return node

    for value in (1, 1.0, 1, 1.0, True):
        tag = wrap(kind(a=value))
        assert strictly_same(f(Node(jnp.ones(2), tag=tag)).tag, tag)
    assert len(traces) == 3


MUTABLE = {
    "list": (lambda: [1, 2], lambda x: x.append(3)),
    "list in a tuple": (lambda: (0, [1, 2]), lambda x: x[1].append(3)),
    "dict": (lambda: {"b": 1, "a": 2}, lambda x: x.update(c=2)),
    "nested dict": (lambda: {"a": {"b": 1}}, lambda x: x["a"].update(c=2)),
    "list in a named tuple": (lambda: Pair(0, [1]), lambda x: x.b.append(3)),
    "set": (lambda: {1, 2}, lambda x: x.add(3)),
    "deque": (lambda: collections.deque([1], 4), lambda x: x.append(3)),
    "list in a deque": (lambda: collections.deque([[1]]), lambda x: x[0].append(3)),
    "bytearray": (lambda: bytearray(b"ab"), lambda x: x.append(3)),
    "defaultdict": (lambda: collections.defaultdict(list), lambda x: x["a"]),
    "OrderedDict": (lambda: collections.OrderedDict(b=1), lambda x: x.update(a=2)),
    "Counter": (lambda: collections.Counter("ab"), lambda x: x.update("c")),
}


class Pair(NamedTuple):
    a: object
    b: object


@pytest.mark.parametrize("kind", MUTABLE)
def test_container_in_a_static_field_is_copied(kind):
    make, change = MUTABLE[kind]
    given = make()
    f = eqx.filter_jit(lambda m, x: (m, repr(m.tag)))
    node = Node(0, tag=given)
    for step in range(3):  # the last call is a retrace
        out, text = f(node, jnp.ones(2 + step // 2))
        assert strictly_same(out.tag, make()) and text == repr(make())
        change(given)
    assert f(Node(0, tag=given), jnp.ones(2))[1] == repr(given) != text


def test_immutable_value_in_a_static_field_is_not_copied():
    tag = (1, ("a", Pair(1, frozenset({2}))))
    assert Node(0, tag=tag).tag is tag


class ByElement:
    """As tables of other libraries, it compares its elements."""

    def __init__(self, value):
        self.value = np.asarray(value)

    def __eq__(self, other):
        return self.value == other.value


class CopyThatDiffers:
    def __eq__(self, other):
        return self is other


@dataclasses.dataclass
class Labelled:
    """As a named array of penzai."""

    values: np.ndarray
    labels: list

    def __eq__(self, other):
        return self.values == other.values


class Views(collections.abc.Mapping):
    """As the coordinates of xarray, it makes each item when that is read."""

    def __getitem__(self, key):
        return ByElement([1, 2])

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class Columns(Views):
    """As `xarray.Dataset`."""

    def __eq__(self, other):
        return self["a"] == other["a"]

    __hash__ = None


class Indexed(dict):
    """As `sortedcontainers.SortedDict`, it holds methods of what only it holds."""

    def __init__(self, items):
        super().__init__(items)
        self.order = list(items)
        self.index = self.order.index

    def __copy__(self):
        return Indexed(self)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ByElement([1, 2]),
        CopyThatDiffers,
        lambda: Labelled(np.ones(2), ["a"]),
        Views,
        Columns,
        lambda: Indexed({"a": 1}),
    ],
)
def test_object_that_equals_no_copy_of_it_is_kept_itself(make):
    tag, traces = make(), []

    @eqx.filter_jit
    def f(m):
        traces.append(m.tag)
        return m

    for _ in range(2):
        m = f(Node(jnp.ones(2), tag=tag))
        assert m.tag is tag
        assert jax.lax.scan(lambda m, _: (m, None), m, length=2)[0].tag is tag
    assert len(traces) == 1 and traces[0] is tag


def test_field_that_is_set_behind_our_back_is_seen_by_jax():
    m = Node(0, tag=1)
    jtu.tree_structure(m)
    object.__setattr__(m, "tag", True)
    assert jtu.tree_map(lambda x: x, m).tag is True
    assert jax.jit(lambda m: m.tag is True)(m)


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    size: object = dataclasses.field(compare=False)


@pytest.mark.parametrize("place", ["leaf", "leaf of a Module", "static field"])
def test_each_trace_has_its_own_static_outputs_even_if_they_are_equal(place):
    f = eqx.filter_jit(lambda x: PLACES[place](Named("a", x.shape)))
    for size in (2, 3, 2):
        out = f(jnp.ones(size))
        named = out[0] if place == "leaf" else out.child
        named = out.tag if place == "static field" else named
        assert named.size == (size,)


def test_mock_in_a_model_causes_no_retrace():
    function = mock.MagicMock(return_value=1.0)

    @eqx.filter_jit
    def f(x, function):
        return x + function()

    for _ in range(3):
        assert f(jnp.ones(()), function) == 2.0
    assert function.call_count == 1
