"""Modules that a compiled function returns are as if they had been built by hand.

They are lazy: they get their fields when somebody asks. The law of this file is that no
operation tells one from the same Module built by hand, whatever the operation is.
"""

import collections
import copy
import dataclasses
import functools
import gc
import pickle
import re
import signal
import threading
import types
import weakref
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import equinox_like as eqx
from equinox_like._tree.cached import FLAT, raw_dict
from equinox_like._tree.registry import OwnRegistry, registry

own_registry = pytest.mark.skipif(
    not isinstance(registry, OwnRegistry), reason="nothing is lazy"
)
identity = eqx.filter_jit(lambda tree: tree)


def is_unbuilt(module: Any) -> bool:
    return set(raw_dict(module)) == {FLAT}


class Leaf(eqx.Module):
    weight: Any
    rate: Any = 0.5
    size: int = eqx.field(static=True, default=3)
    kind: ClassVar[str] = "leaf"

    def __call__(self, x):
        return self.weight * x

    @property
    def doubled(self):
        return 2 * self.weight

    @functools.cached_property
    def tripled(self):
        return 3 * self.weight


class Pair(NamedTuple):
    first: Any
    second: Any


class Net(eqx.Module):
    layers: Any
    activation: Any = jax.nn.relu
    extra: Any = None
    method: Any = None


jitted = eqx.filter_jit(len)


class WithGetattr(eqx.Module):
    value: Any

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{name} of {self.value}"


class WithGetattribute(eqx.Module):
    value: Any

    def __getattribute__(self, name):
        if name == "alias":
            return object.__getattribute__(self, "value")
        return object.__getattribute__(self, name)


class Base(eqx.Module):
    x: Any = eqx.field(init=False, default=1)


class Overriding(Base):
    y: Any = 2

    @property
    def x(self):
        return self.y


class Mixin:
    shared = "of the mixin"

    def hello(self):
        return self.x


class Mixed(Mixin, Leaf):
    shared: Any = 7
    x: Any = None
    late: Any = eqx.field(kw_only=True)


class Custom:
    def __init__(self, child):
        self.child = child

    def __eq__(self, other):
        return type(other) is Custom and bool(jnp.all(self.child == other.child))

    __hash__ = None


jtu.register_pytree_node(Custom, lambda c: ((c.child,), None), lambda _, c: Custom(*c))


def array(n=2):
    return jnp.arange(float(n))


TREES = {
    "leaf": lambda: Leaf(array()),
    "defaults overridden": lambda: Leaf(array(), rate=array(1), size=4),
    "numbers": lambda: Leaf(1, rate=jnp.int32(3)),
    "list": lambda: Net([Leaf(array()), Leaf(array(3), size=1)]),
    "tuple": lambda: Net((Leaf(array()), (array(), None, ()))),
    "dict": lambda: Net({"a": Leaf(array()), "b": array()}),
    "named tuple": lambda: Net(Pair(Leaf(array()), None), extra=Pair(1, array())),
    "standard library": lambda: Net(
        collections.OrderedDict(b=array(), a=1), extra=collections.defaultdict(list)
    ),
    "custom node": lambda: Net([Leaf(array())], extra=Custom(array())),
    "frozen": lambda: Net([eqx.frozen(Leaf(array())), Leaf(eqx.frozen(array()))]),
    "partial": lambda: Net(
        eqx.Partial(jnp.add, array()), method=Leaf(array()).__call__
    ),
    "wrapped": lambda: Net(eqx.filter_vmap(Leaf(array())), jitted),
    "nothing": lambda: Net(None, None),
    "getattr": lambda: WithGetattr(array()),
    "getattribute": lambda: WithGetattribute(array()),
    "overriding": lambda: Overriding(y=array()),
    "mixed": lambda: Mixed(array(), late=array()),
    "layer": lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0)),
}


def described(x: Any) -> Any:
    """A value that compares by content, for whatever an operation returned."""
    if isinstance(x, jax.Array | np.ndarray):
        return "array", str(x.dtype), np.asarray(x).tolist()
    if isinstance(x, eqx.Module):
        leaves, treedef = jtu.tree_flatten(x)
        return type(x), treedef, [described(leaf) for leaf in leaves]
    if isinstance(x, dict):
        return type(x), {k: described(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return type(x), [described(v) for v in x]
    if isinstance(x, Custom):
        return Custom, described(x.child)
    if isinstance(x, functools.partial | jtu.Partial) or callable(x):
        return getattr(x, "__qualname__", repr(type(x)))
    return re.sub("0x[0-9a-f]+", "0x", x) if isinstance(x, str) else x


def attempt(operation, tree):
    try:
        return described(operation(tree))
    except Exception as e:
        return type(e), re.sub("0x[0-9a-f]+", "0x", str(e))


def names(tree):
    return [f.name for f in dataclasses.fields(tree)]


def matched(tree):
    match tree:
        case Leaf(weight=weight):
            return weight
        case Net(layers=[first, *_]):
            return first
        case eqx.Module():
            return "another Module"


OPERATIONS = {
    "vars": vars,
    "dict": lambda t: t.__dict__,
    "dir": dir,
    "repr": repr,
    "str": str,
    "equal to itself": lambda t: bool(t == t),
    # Arrays of a Partial count by their identity.
    "hash": lambda t: hash(t) == hash(jtu.tree_map(lambda x: x, t)),
    "type": type,
    "class": lambda t: t.__class__,
    "isinstance": lambda t: [isinstance(t, k) for k in (eqx.Module, Leaf, Net, Mixin)],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "state": lambda t: t.__getstate__(),
    "fields": names,
    "field values": lambda t: [getattr(t, name) for name in names(t)],
    "fields backwards": lambda t: [getattr(t, name) for name in names(t)[::-1]],
    "asdict": lambda t: list(dataclasses.asdict(t)),
    "replace": lambda t: dataclasses.replace(t),
    "hasattr": lambda t: [
        hasattr(t, n) for n in (*names(t), "kind", "nothing", "__x__")
    ],
    "getattr with a default": lambda t: getattr(t, "nothing", "a default"),
    "missing attribute": lambda t: t.nothing,
    "class variable": lambda t: t.kind,
    "property": lambda t: t.doubled,
    "cached property": lambda t: (t.tripled, t.tripled, t),
    "method": lambda t: t(array()),
    "bound method": lambda t: t.__call__,
    "alias": lambda t: t.alias,
    "mixin": lambda t: (t.shared, t.hello()),
    "set": lambda t: setattr(t, names(t)[0], 1),
    "delete": lambda t: delattr(t, names(t)[0]),
    "leaves": jtu.tree_leaves,
    "structure": jtu.tree_structure,
    "leaves with paths": lambda t: [
        (jtu.keystr(p), x) for p, x in jtu.tree_leaves_with_path(t)
    ],
    "map": lambda t: jtu.tree_map(lambda x: x, t),
    "all leaves": lambda t: jtu.all_leaves([t]),
    "one level": lambda t: eqx.internal and list(eqx.tree_flatten_one_level(t)),
    "partition": lambda t: eqx.combine(*eqx.partition(t, eqx.is_array)),
    "tree_at": lambda t: eqx.tree_at(lambda m: getattr(m, names(t)[0]), t, 5.0),
    "format": eqx.tree_pformat,
    "compiled again": identity,
    "compiled within a Module": lambda t: identity(Net(t, extra=(t, 1))),
    "plain jit": lambda t: jax.jit(lambda m: jtu.tree_leaves(m)[:1])(t),
    "matching": matched,
    "weakref": lambda t: weakref.ref(t)() is t,
    "identity of a field": lambda t: all(
        getattr(t, n) is getattr(t, n) for n in names(t) if n in vars(t)
    ),
}


# Each tree is a new one, with a method of its own.
@pytest.mark.filterwarnings("ignore::equinox_like.RetraceWarning")
@pytest.mark.parametrize("tree", TREES)
def test_no_operation_tells_it_from_one_built_by_hand(tree):
    for name, operation in OPERATIONS.items():
        wanted = attempt(operation, TREES[tree]())
        once = identity(TREES[tree]())
        twice = identity(once)
        assert (name, attempt(operation, once)) == (name, wanted)
        assert (name, attempt(operation, twice)) == (name, wanted)


@pytest.mark.parametrize("tree", TREES)
def test_it_equals_the_one_built_by_hand_in_both_orders(tree):
    by_hand = TREES[tree]()
    assert bool(identity(by_hand) == by_hand) and bool(by_hand == identity(by_hand))


values = st.recursive(
    st.sampled_from([1, 0.5, "text", None, jnp.ones(2), True]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.builds(Leaf, inner, rate=inner, size=st.integers(0, 2)),
        st.builds(Net, inner, extra=inner),
        st.builds(eqx.frozen, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=20)
@given(st.builds(Net, values, extra=values), st.sampled_from(sorted(OPERATIONS)))
def test_any_tree(tree, operation):
    # As JAX does, a dictionary returns with its keys in order.
    wanted = attempt(OPERATIONS[operation], jax.tree.map(lambda x: x, tree))
    assert attempt(OPERATIONS[operation], identity(tree)) == wanted


@own_registry
@pytest.mark.parametrize("tree", ["leaf", "list", "dict", "frozen", "layer", "mixed"])
def test_it_is_lazy_until_a_field_is_asked_for(tree):
    returned = identity(identity(TREES[tree]()))
    assert is_unbuilt(returned)
    getattr(returned, names(returned)[0])
    assert not is_unbuilt(returned) and vars(returned).keys() >= set(names(returned))


@own_registry
def test_what_is_in_it_is_lazy_in_turn():
    returned = identity(Net([Leaf(array()), Leaf(array())]))
    assert [is_unbuilt(layer) for layer in returned.layers] == [True, True]


def test_list_that_is_changed_in_place_is_seen_by_the_next_call():
    count = eqx.filter_jit(lambda net: [layer.weight.sum() for layer in net.layers])
    for net in (Net([Leaf(array())]), identity(Net([Leaf(array())]))):
        assert len(count(net)) == 1
        net.layers.append(Leaf(array(3)))
        assert [float(x) for x in count(net)] == [1, 3]
        net.layers[0] = Leaf(array(4))
        assert [float(x) for x in count(identity(net))] == [6, 3]
        del net.layers[0]
        assert [float(x) for x in count(net)] == [3]


def test_threads_that_read_it_at_once_see_the_same_objects():
    for _ in range(20):
        returned = identity(Net([Leaf(array()) for _ in range(5)], extra=Leaf(array())))
        found: list[Any] = [None] * 8
        start = threading.Barrier(len(found))

        def work(i, returned=returned, found=found, start=start):
            start.wait()
            found[i] = (returned.extra, returned.layers, returned.layers[0].weight)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({tuple(map(id, x)) for x in found}) == 1


def test_interrupt_while_it_is_built_leaves_it_whole():
    class Interrupt(BaseException):
        pass

    is_armed = False

    def interrupt(*_):
        if is_armed:  # Python may call this some time after the signal
            raise Interrupt

    net = Net([Leaf(array()) for _ in range(60)], extra=[Leaf(array())] * 60)
    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    gc.disable()  # raised in a callback of the collector, `Interrupt` would be lost
    try:
        for i in range(40):
            returned = identity(net)
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (i + 1))
                jtu.tree_leaves(returned)
                is_armed = False
            except Interrupt:
                is_armed = False
                interrupted += 1
            assert len(jtu.tree_leaves(returned)) == len(jtu.tree_leaves(net))
            assert jtu.tree_structure(returned) == jtu.tree_structure(net)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupted > 0


def test_error_while_a_node_of_the_user_is_built_comes_from_the_call():
    class Fragile:
        pass

    failing = []

    def unflatten(_, children):
        if failing and not isinstance(children[0], jax.core.Tracer):
            raise KeyError("cannot be built")
        return Fragile()

    jtu.register_pytree_node(Fragile, lambda _: ((array(),), None), unflatten)
    assert isinstance(identity(Net(Fragile())).layers, Fragile)
    failing.append(True)
    with pytest.raises(KeyError, match="cannot be built"):
        identity(Net(Fragile()))


def test_part_of_it_keeps_only_its_own_arrays():
    returned = identity(Net([Leaf(array()), Leaf(array())]))
    other = weakref.ref(returned.layers[1].weight)
    part = returned.layers[0]
    del returned
    gc.collect()
    assert other() is None and part.weight.shape == (2,)


def test_array_that_was_replaced_in_a_list_is_freed():
    returned = identity(Net([array(), array()]))
    eqx.filter_jit(lambda net: None)(returned)
    replaced = weakref.ref(returned.layers[0])
    returned.layers[0] = None
    gc.collect()
    assert replaced() is None


def test_attribute_that_is_set_behind_its_back_stays_set():
    returned = identity(Leaf(array()))
    object.__setattr__(returned, "rate", "set")
    assert returned.rate == "set" and returned.weight.shape == (2,)
    assert returned.size == 3


@pytest.mark.parametrize("count", [0, 1, 2])
@own_registry
def test_type_that_becomes_a_node_after_it_was_used_is_refused(count):
    class Late:
        pass

    net = Net(Late())
    assert identity(net).layers is net.layers
    jtu.register_pytree_node(Late, lambda _: ([0] * count, None), lambda *_: Late())
    with pytest.raises(
        TypeError, match=r"`.*Late` was registered .* Register a class b"
    ):
        eqx.filter_jit(lambda net: None)(net)
    assert isinstance(eqx.filter_jit(lambda x: x)(Net(Late())).layers, Late)


def test_namedtuple_that_is_registered_with_jax_is_flattened_as_registered():
    class Special(NamedTuple):
        data: Any
        note: Any

    jtu.register_pytree_node(
        Special, lambda s: ((s.data,), s.note), lambda note, c: Special(c[0], note)
    )
    f = eqx.filter_jit(lambda s, net: (s, net))
    for net in (Net(Special(array(), "b")), identity(Net(Special(array(), "b")))):
        out, returned = f(Special(array(), "a"), net)
        assert out.note == "a" and returned.layers.note == "b"
        assert len(jtu.tree_leaves(returned)) == len(jtu.tree_leaves(net))


def test_donated_model_is_replaced_and_the_old_one_tells():
    step = eqx.filter_jit(
        lambda net: jtu.tree_map(lambda x: x + 1 if eqx.is_array(x) else x, net),
        donate="all",
    )
    first = identity(Net([Leaf(array()), Leaf(array())]))
    second = step(first)
    third = step(second)
    assert third.layers[1].weight.tolist() == [2, 3]
    assert first.layers[0].weight.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        step(second)


class Swapped(NamedTuple):
    a: Any
    b: Any


jtu.register_pytree_node(
    Swapped, lambda s: ((s.b, s.a), Swapped), lambda kind, c: kind(c[1], c[0])
)


def test_namedtuple_that_is_registered_with_itself_as_aux_data_is_in_order():
    zero, one = jnp.zeros(2), jnp.ones(2)
    a, b = eqx.filter_jit(lambda s: (s.a, s.b))(Swapped(zero, one))
    assert a.tolist() == [0, 0] and b.tolist() == [1, 1]
    returned = identity(Net(Swapped(zero, one))).layers
    assert returned.a.tolist() == [0, 0] and returned.b.tolist() == [1, 1]


def test_outputs_have_the_statics_of_their_own_function():
    def returned(static):
        return eqx.filter_jit(lambda x: Net({static: x}, extra=Leaf(x, size=static)))

    kept = []
    for static in (1, True, 1.0, -0.0, 0.0):
        out = returned(static)(array())
        kept.append(out)
        (key,) = out.layers
        assert type(key) is type(static) and str(key) == str(static)
        assert type(out.extra.size) is type(static)


def test_static_value_of_an_output_is_the_very_object_that_was_returned():
    sizes = types.SimpleNamespace(n=1), types.SimpleNamespace(n=1)
    kept = [eqx.filter_jit(lambda x, s=s: Leaf(x, size=s))(array()) for s in sizes]
    assert kept[0].size is sizes[0] and kept[1].size is sizes[1]


def test_default_and_method_further_up_are_found_through_a_field():
    class First(eqx.Module):
        x: int = 3

    class Second(First):
        x: int

        def __init__(self):
            pass

    class Plain:
        n = 5

    class Third(Plain, eqx.Module):
        n: int

        def __init__(self):
            pass

    class Fourth(Third):
        n: int

    assert Second.x == Second().x == 3 and Third().n == Fourth().n == 5
    assert identity(Second()).x == 3 and identity(Third()).n == 5
    assert isinstance(Net.layers, types.MemberDescriptorType)


def test_class_that_lets_its_instances_change_is_flattened_in_each_call():
    class Mutable(eqx.Module):
        x: Any

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    f = eqx.filter_jit(lambda net: net.layers.x.sum())
    inner = Mutable(array())
    net = Net(inner)
    assert f(net) == 1
    inner.x = array(3)
    assert f(net) == 3 and f(identity(net)) == 3


def test_old_state_within_a_module_raises():
    index = eqx.nn.StateIndex(jnp.array(0.0))
    state = eqx.nn.State(index)
    f = eqx.filter_jit(lambda net: net.layers.get(index))
    for net in (Net(state), identity(Net(state))):
        assert f(net) == 0
        net.layers.set(index, jnp.array(7.0))
        with pytest.raises(ValueError, match="This State is out of date"):
            f(net)
        state = eqx.nn.State(index)


def test_module_under_construction_is_flattened_in_each_call():
    around = []
    f = eqx.filter_jit(lambda net: net.layers.w)

    class Calls(eqx.Module):
        w: Any

        def __init__(self):
            self.w = jnp.array(1.0)
            around.append(Net(self))
            assert f(around[0]) == 1
            self.w = jnp.array(2.0)

    Calls()
    assert f(around[0]) == 2


def test_mutable_node_that_looks_like_a_named_tuple_is_flattened_in_each_call():
    class Box:
        _fields = ("x",)

        def __init__(self, x):
            self.x = x

    jtu.register_pytree_node(Box, lambda b: ((b.x,), None), lambda _, c: Box(*c))
    f = eqx.filter_jit(lambda net: net.layers.x.sum())
    for net in (Net(Box(array())), identity(Net(Box(array())))):
        assert f(net) == 1
        net.layers.x = array(3)
        assert f(net) == 3


def test_class_attributes_may_change():
    class Net(eqx.Module):
        x: Any
        y: Any = 3

    returned = identity(Net(array()))
    Net.y = 4
    assert Net.y == 4 and returned.y == 3
    del Net.y
    assert isinstance(Net.y, types.MemberDescriptorType)
    assert identity(Net(array(), 5)).y == 5
    Net.x = property(lambda self: 42)
    assert returned.x == 42


def test_field_may_have_the_name_of_what_wraps_a_function():
    class Named(eqx.Module):
        x: Any
        __name__: str

        def __init__(self, x):
            self.x = x
            self.__name__ = "named"

    assert identity(Named(array())).__name__ == "named"


def test_deeply_nested_modules_can_be_called():
    net = Leaf(array())
    for _ in range(60):
        net = Net(net)
    assert identity(identity(net)).layers.layers.activation is jax.nn.relu
