import collections
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import assume, given
from strategies import Pair, trees

import equinox_like as eqx

Empty = collections.namedtuple("Empty", [])


class Affine(eqx.Module):
    weight: object
    bias: object = None
    name: object = eqx.field(static=True, default="affine")

    def __call__(self, x):
        return self.weight * x + self.bias


def same(a, b):
    """Whether two trees have the same structure and the identical leaves."""
    leaves_a, treedef_a = jtu.tree_flatten(a)
    leaves_b, treedef_b = jtu.tree_flatten(b)
    return treedef_a == treedef_b and all(map(lambda x, y: x is y, leaves_a, leaves_b))


def nth_leaf(n):
    return lambda tree: jtu.tree_leaves(tree)[n]


def node_paths(tree):
    """The paths of all nodes and leaves but `None` and `()`, which are not unique."""
    paths = []

    def walk(node, path):
        if node is None or (isinstance(node, tuple) and not node):
            return
        paths.append(path)
        if jtu.all_leaves([node]):
            return
        below, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        for (key,), child in below:
            walk(child, (*path, key))

    walk(tree, ())
    return paths


def read(tree, path):
    for key in path:
        match key:
            case jtu.GetAttrKey(name):
                tree = getattr(tree, name)
            case jtu.SequenceKey(idx):
                tree = tree[idx]
            case jtu.DictKey(name):
                tree = tree[name]
    return tree


# Laws


@given(trees(), st.data())
def test_replacing_each_node_by_itself_changes_nothing(tree, data):
    paths = node_paths(tree)
    assume(paths)
    path = data.draw(st.sampled_from(paths))
    seen = []
    new = eqx.tree_at(
        lambda t: read(t, path), tree, replace_fn=lambda x: seen.append(x) or x
    )
    assert same(new, tree)
    assert len(seen) == 1 and seen[0] is read(tree, path)


@given(trees(), st.data())
def test_only_the_chosen_leaf_changes(tree, data):
    leaves, treedef = jtu.tree_flatten(tree)
    assume(leaves)
    n = data.draw(st.integers(0, len(leaves) - 1))
    new = object()
    leaves[n] = new
    assert same(eqx.tree_at(nth_leaf(n), tree, new), treedef.unflatten(leaves))


@given(trees(), st.data())
def test_only_the_chosen_leaves_of_several_change(tree, data):
    leaves, treedef = jtu.tree_flatten(tree)
    places = data.draw(st.permutations(range(len(leaves))))
    places = places[: data.draw(st.integers(0, len(leaves)))]
    new = [object() for _ in places]
    result = eqx.tree_at(
        lambda t: [jtu.tree_leaves(t)[place] for place in places], tree, new
    )
    for place, x in zip(places, new, strict=True):
        leaves[place] = x
    assert same(result, treedef.unflatten(leaves))


@given(trees(), st.data())
def test_the_second_replacement_of_a_node_overwrites_the_first(tree, data):
    leaves = jtu.tree_leaves(tree)
    assume(leaves)
    n = data.draw(st.integers(0, len(leaves) - 1))
    once = eqx.tree_at(nth_leaf(n), tree, "second")
    twice = eqx.tree_at(nth_leaf(n), eqx.tree_at(nth_leaf(n), tree, "first"), "second")
    assert same(once, twice)


@given(trees(), st.data())
def test_chosen_subtree_becomes_the_replacement_whatever_its_structure(tree, data):
    paths = node_paths(tree)
    assume(paths)
    path = data.draw(st.sampled_from(paths))
    new = {"any": [1, (2, None)]}
    result = eqx.tree_at(lambda t: read(t, path), tree, new)
    assert same(read(result, path), new)
    kept = [
        (p, x) for p, x in jtu.tree_leaves_with_path(tree) if p[: len(path)] != path
    ]
    others = dict(jtu.tree_leaves_with_path(result))
    assert all(others[p] is x for p, x in kept)
    assert len(others) == len(kept) + 2


# What is chosen


def test_contract_examples():
    t = {"a": (1, 2), "b": [3]}
    assert eqx.tree_at(lambda t: t["a"], t, 0) == {"a": 0, "b": [3]}
    assert eqx.tree_at(lambda t: tuple(t["a"]), t, (8, 9)) == {"a": (8, 9), "b": [3]}
    new = eqx.tree_at(lambda t: (t["b"], t["a"][0]), t, replace_fn=str)
    assert new == {"a": ("1", 2), "b": "[3]"}
    assert t == {"a": (1, 2), "b": [3]}


def test_tuple_of_the_tree_is_one_node_and_a_new_tuple_is_several():
    tree = [(1, 2), 3]
    assert eqx.tree_at(lambda t: t[0], tree, replace_fn=str) == ["(1, 2)", 3]
    assert eqx.tree_at(lambda t: tuple(t[0]), tree, replace_fn=str) == [("1", "2"), 3]


def test_list_of_the_tree_is_one_node_and_a_new_list_is_several():
    tree = [[1, 2], 3]
    assert eqx.tree_at(lambda t: t[0], tree, replace_fn=str) == ["[1, 2]", 3]
    assert eqx.tree_at(lambda t: list(t[0]), tree, replace_fn=str) == [["1", "2"], 3]


def test_nodes_given_to_replace_fn_hold_ordinary_tuples():
    tree = [(1, (2, ())), 3]
    seen = []
    eqx.tree_at(lambda t: (t[0][1], t[1]), tree, replace_fn=seen.append)
    assert type(seen[0]) is tuple and type(seen[0][1]) is tuple


def test_equal_objects_are_told_apart_by_position():
    array, shared = jnp.ones(2), [1]
    assert eqx.tree_at(lambda t: t[1], [7, 7, 7], 0) == [7, 0, 7]
    new = eqx.tree_at(lambda t: t[1], [array, array], 0)
    assert new[0] is array and new[1] == 0
    assert eqx.tree_at(lambda t: t[1], [shared, shared], 0) == [[1], 0]
    assert eqx.tree_at(lambda t: (t[1], t[2]), [shared, shared, shared], (0, 9)) == [
        [1],
        0,
        9,
    ]


def test_empty_containers_are_told_apart_by_position():
    for empty in ((), [], {}, Empty()):
        tree = [empty, empty, empty, 1]
        assert eqx.tree_at(lambda t: t[1], tree, 5) == [empty, 5, empty, 1]
        new = eqx.tree_at(lambda t: (t[2], t[0]), tree, "ab")
        assert new == ["b", empty, "a", 1]


def test_empty_answer_chooses_nothing_even_if_the_tree_holds_an_empty_tuple():
    tree = [1, (), {"a": 2}]
    assert eqx.tree_at(lambda t: (), tree, ()) == tree
    assert eqx.tree_at(lambda t: [], tree, ()) == tree
    assert eqx.tree_at(lambda t: t[1], tree, 5) == [1, 5, {"a": 2}]


def test_whole_tree_and_a_tree_that_is_a_leaf_can_be_replaced():
    assert eqx.tree_at(lambda t: t, [1, 2], "new") == "new"
    assert eqx.tree_at(lambda t: t, (), "new") == "new"
    assert eqx.tree_at(lambda t: t, 1, "new") == "new"
    assert eqx.tree_at(lambda t: [t], 1, ["new"]) == "new"
    assert eqx.tree_at(lambda t: t, None, "new") == "new"


def test_none_is_a_legal_replacement():
    assert eqx.tree_at(lambda t: t[0], [1, 2], None) == [None, 2]
    assert eqx.tree_at(lambda t: t[0], [1, 2], replace_fn=lambda _: None) == [None, 2]
    assert eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], (None, 3)) == [None, 3]


def test_none_can_be_replaced_if_it_is_the_only_one():
    assert eqx.tree_at(lambda t: t[0], [None, 2], 1) == [1, 2]


def test_none_among_several_is_refused_by_path_without_is_leaf():
    with pytest.raises(ValueError, match="does not uniquely identify") as info:
        eqx.tree_at(lambda t: t["a"], {"a": None, "b": [None, 1]}, 1)
    assert "`['a']`, `['b'][0]`" in str(info.value)


def test_is_leaf_lets_each_none_be_replaced():
    def is_none(x):
        return x is None

    tree = [None, {"a": None}]
    new = eqx.tree_at(lambda t: t[1]["a"], tree, 1, is_leaf=is_none)
    assert new == [None, {"a": 1}]
    new = eqx.tree_at(lambda t: (t[1]["a"], t[0]), tree, (1, 2), is_leaf=is_none)
    assert new == [2, {"a": 1}]
    tree = [None, {"a": (), "b": ()}]
    new = eqx.tree_at(lambda t: (t[1]["b"], t[0]), tree, (1, 2), is_leaf=is_none)
    assert new == [2, {"a": (), "b": 1}]


def test_is_leaf_makes_the_inside_of_a_node_unreachable():
    def is_pair(x):
        return isinstance(x, list) and len(x) == 2

    tree = {"a": [1, 2], "b": (3, 4)}
    assert eqx.tree_at(lambda t: t["a"], tree, 0, is_leaf=is_pair)["a"] == 0
    new = eqx.tree_at(
        lambda t: (t["a"], t["b"]), tree, replace_fn=type, is_leaf=is_pair
    )
    assert new == {"a": list, "b": tuple}
    with pytest.raises(TypeError):
        eqx.tree_at(lambda t: t["a"][0], tree, 0, is_leaf=is_pair)


def test_tuple_that_is_a_leaf_can_be_one_of_several_nodes():
    tree = {"a": (1, 2), "b": 3}
    new = eqx.tree_at(
        lambda t: (t["a"], t["b"]), tree, (7, 8), is_leaf=lambda x: x == (1, 2)
    )
    assert new == {"a": 7, "b": 8}


@pytest.mark.parametrize("new", ["ab", ["a", "b"], np.array(["a", "b"])], ids=repr)
def test_anything_with_a_length_can_replace_several_nodes(new):
    assert eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], new) == ["a", "b"]


def test_named_tuples_and_partials_are_supported():
    tree = Pair(1, jax.tree_util.Partial(max, 2, key=3))
    new = eqx.tree_at(lambda t: (t.first, t.second.args[0]), tree, (8, 9))
    assert type(new) is Pair and new.first == 8
    assert new.second.args == (9,) and new.second.keywords == {"key": 3}
    assert eqx.tree_at(lambda t: Pair(t[0], t[1]), [1, 2], (8, 9)) == [8, 9]


def test_where_that_adds_a_key_is_refused():
    tree = collections.defaultdict(list, a=1)
    with pytest.raises(ValueError, match="must not change the tree"):
        eqx.tree_at(lambda t: t["missing"], tree, 5)
    assert tree == {"a": 1}


def test_tuple_that_a_node_makes_of_its_children_is_one_node():
    tree = [(0,), jax.tree_util.Partial(max, 1, 2), jax.tree_util.Partial(max, 3)]
    new = eqx.tree_at(lambda t: t[1].args, tree, (8, 9, 10))
    assert new[1].args == (8, 9, 10)
    new = eqx.tree_at(lambda t: t[2].args, tree, replace_fn=lambda args: (*args, 4))
    assert new[2].args == (3, 4) and new[1].args == (1, 2)
    new = eqx.tree_at(lambda t: (t[0], t[2].args), tree, ((), (5, 6)))
    assert new[0] == () and new[2].args == (5, 6)
    new = eqx.tree_at(lambda t: (t[1].args[0], t[1].args[1]), tree, (8, 9))
    assert new[1].args == (8, 9)


def test_module_is_changed_without_running_its_init_or_its_checks():
    calls = []

    class Checked(eqx.Module):
        value: object

        def __init__(self, value):
            calls.append("init")
            self.value = value

        def __check_init__(self):
            calls.append("check")

    module = Checked(1)
    new = eqx.tree_at(lambda m: m.value, module, "any")
    assert type(new) is Checked and new.value == "any"
    assert calls == ["init", "check"]


def test_nested_modules_keep_their_static_fields():
    model = [Affine(jnp.ones(2), name="a"), Affine(jnp.ones(3), name="b")]
    new = eqx.tree_at(lambda m: [layer.weight for layer in m], model, (1, 2))
    assert [(m.weight, m.name) for m in new] == [(1, "a"), (2, "b")]


def test_wrapped_module_is_reached_through_the_transformation():
    wrapped = eqx.filter_jit(Affine(1, 2))
    new = eqx.tree_at(lambda f: f.__wrapped__.weight, wrapped, 5)
    assert (new.__wrapped__.weight, new.__wrapped__.bias) == (5, 2)
    assert new(10) == 52 and wrapped(10) == 12


def test_tracers_can_be_replaced_inside_jit():
    @jax.jit
    def run(x):
        return eqx.tree_at(lambda t: t["a"], {"a": x, "b": x + 1}, x * 10)

    assert run(2.0) == {"a": 20.0, "b": 3.0}


def test_where_is_called_twice_on_rebuilt_trees():
    seen = []
    tree = [1, (2,)]
    eqx.tree_at(lambda t: seen.append(t) or t[0], tree, 5)
    eqx.tree_at(lambda t: seen.append(t) or (t[0], t[1]), tree, (5, 6))
    assert len(seen) == 4
    assert all(t is not tree for t in seen)


# What is refused


def test_exactly_one_of_replace_and_replace_fn_is_required():
    with pytest.raises(ValueError, match="`replace` and `replace_fn`"):
        eqx.tree_at(lambda t: t[0], [1])
    with pytest.raises(ValueError, match="`replace` and `replace_fn`"):
        eqx.tree_at(lambda t: t[0], [1], 1, replace_fn=str)


def test_node_named_twice_is_refused_by_its_path():
    tree = {"a": [1, ()], "b": (2,)}
    for where, path in [
        (lambda t: (t["a"][0], t["a"][0]), "`['a'][0]`"),
        (lambda t: (t["b"], t["a"], t["b"]), "`['b']`"),
        (lambda t: (t["a"][1], t["a"][1]), "`['a'][1]`"),
    ]:
        with pytest.raises(ValueError, match="twice") as info:
            eqx.tree_at(where, tree, replace_fn=str)
        assert path in str(info.value)


@pytest.mark.parametrize("order", [1, -1])
def test_node_inside_another_chosen_node_is_refused_by_both_paths(order):
    tree = {"a": [1, (2, 3)], "b": 4}
    with pytest.raises(ValueError, match="inside") as info:
        eqx.tree_at(
            lambda t: (t["a"], t["a"][1][0])[::order], tree, replace_fn=lambda x: x
        )
    assert "`['a'][1][0]`, which lies inside" in str(info.value)
    assert "at `['a']`" in str(info.value)


def test_neighbours_of_a_chosen_node_are_not_inside_it():
    tree = [[1, [2]], 3, [[4], 5]]
    new = eqx.tree_at(lambda t: (t[2][0], t[0], t[1]), tree, "abc")
    assert new == ["b", "c", ["a", 5]]


@pytest.mark.parametrize(
    "foreign", [5, None, "text", object()], ids=lambda x: type(x).__name__
)
def test_foreign_leaf_is_a_type_error(foreign):
    with pytest.raises(TypeError, match="which is not in `pytree`"):
        eqx.tree_at(lambda t: foreign, [1, 2], 0)
    with pytest.raises(TypeError, match="which is not in `pytree`"):
        eqx.tree_at(lambda t: (t[0], foreign), [1, 2], (0, 0))


def test_method_is_named_without_its_instance():
    mlp = eqx.nn.MLP(1, 1, 1, 0, key=jax.random.key(0))
    message = r"`where` returned the method `MLP.__call__`, which is not in `pytree`"
    with pytest.raises(TypeError, match=message):
        eqx.tree_at(lambda m: m.__call__, mlp, 0)


def test_leaf_of_another_tree_is_a_type_error():
    others = []
    eqx.tree_at(lambda t: others.append(t) or t[0], [1], 0)
    with pytest.raises(TypeError, match="a tree other than `pytree`"):
        eqx.tree_at(lambda t: others[0][0], [1, 2], 0)


def test_foreign_container_is_a_value_error():
    for where in [
        lambda t: {"a": t[0]},
        lambda t: [[t[0]], t[1]],
        lambda t: [(t[0], t[1])],
        lambda t: Affine(t[0]),
    ]:
        with pytest.raises(ValueError, match="not in `pytree`"):
            eqx.tree_at(where, [1, 2], 0)


@pytest.mark.parametrize("name", ["text", None, 3, (1, 2)], ids=repr)
def test_static_field_cannot_be_reached(name):
    with pytest.raises(TypeError, match="static"):
        eqx.tree_at(lambda m: m.name, Affine(1, 2, name), 0)


def test_operation_on_a_leaf_fails():
    with pytest.raises(TypeError):
        eqx.tree_at(lambda t: t[0] + 1, [1], 0)
    with pytest.raises(AttributeError):
        eqx.tree_at(lambda t: t[0].sum(), [jnp.ones(2)], 0)


def test_where_that_looks_at_leaves_is_refused():
    for where in [
        lambda t: t[0] if t[0] else t[1],
        lambda t: t[0] if isinstance(t[0], int) else t[1],
        lambda t: [x for x in t[:2] if isinstance(x, int)],
        lambda t: t[2] if isinstance(t[0], int) else t[3],
        lambda t: (t[0], t[1]) if isinstance(t[0], int) else t[2],
        lambda t: t[2] if isinstance(t[0], int) else (t[0], t[1]),
        lambda t: (t[0], t[1]) if isinstance(t[0], int) else (t[1], t[0]),
    ]:
        with pytest.raises(ValueError, match="structure of"):
            eqx.tree_at(where, [0, 2, (3,), (4,)], replace_fn=lambda x: x)


def test_error_of_a_where_that_looks_at_shapes_names_what_may():
    def is_matrix(x):
        return eqx.is_array(x) and x.ndim == 2

    tree = [jnp.ones((2, 2)), jnp.ones(2)]
    for where in [
        lambda t: [x for x in t if is_matrix(x)],
        lambda t: t[0] if t[0].ndim == 2 else t[1],
    ]:
        with pytest.raises(Exception, match=r"equinox_like\.select\(tree\)\.where\("):
            eqx.tree_at(where, tree, replace_fn=jnp.zeros_like)
    zeroed = eqx.select(tree).where(is_matrix).apply(jnp.zeros_like)
    assert [float(x.sum()) for x in zeroed] == [0, 2]


def test_replacements_must_be_as_many_as_the_nodes():
    with pytest.raises(ValueError, match="2 nodes, but `replace` has 3"):
        eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], (1, 2, 3))
    with pytest.raises(TypeError, match="no length"):
        eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], 5)
    for unordered in {"a": 3, "b": 4}, {3, 4}:
        with pytest.raises(TypeError, match="same length, in their order"):
            eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], unordered)
    with pytest.raises(TypeError, match="no length"):
        eqx.tree_at(lambda t: (t[0], t[1]), [1, 2], np.asarray(5))


def test_error_of_where_propagates():
    with pytest.raises(KeyError, match="missing"):
        eqx.tree_at(lambda t: t["missing"], {"a": 1}, 0)


def test_functions_with_state_need_no_care():
    function = functools.partial(max, 1)
    assert eqx.tree_at(lambda t: t[1], [function, 2], 3) == [function, 3]


@pytest.mark.parametrize(
    ("where", "error", "what"),
    [
        (lambda t: t["a"].shape, AttributeError, "no attribute 'shape'"),
        (lambda t: t["a"] + 1, TypeError, "unsupported operand"),
        (lambda t: t["a"][0], TypeError, "not subscriptable"),
        (lambda t: list(t["a"]), TypeError, "not iterable"),
        (lambda t: t["a"](), TypeError, "not callable"),
    ],
)
def test_where_that_uses_a_leaf_is_told_so(where, error, what):
    with pytest.raises(error, match=f"structure alone.*{what}.*`replace_fn`"):
        eqx.tree_at(where, {"a": jnp.ones(2)}, 1)


def test_other_errors_of_where_are_left_alone():
    with pytest.raises(AttributeError, match=r"^'dict' object has no attribute 'b'$"):
        eqx.tree_at(lambda t: t.b, {"a": 1}, 1)
