"""`tree_at` with paths and trees of bools in place of a function."""

import dataclasses

import hypothesis.strategies as st
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given
from strategies import Node, Pair, trees

import equinox_like as eqx


class Affine(eqx.Module):
    weight: object
    bias: object = None
    name: object = eqx.field(static=True, default="affine")

    def __call__(self, x):
        return self.weight * x

    @property
    def kernel(self):
        return self.weight


@jtu.register_pytree_node_class
class Keyless:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def same(a, b):
    leaves_a, treedef_a = jtu.tree_flatten(a)
    leaves_b, treedef_b = jtu.tree_flatten(b)
    return treedef_a == treedef_b and all(map(lambda x, y: x is y, leaves_a, leaves_b))


def key_paths(tree):
    """The key paths of all nodes and leaves, `None` and `()` included."""
    paths = []
    jtu.tree_flatten_with_path(
        tree, lambda path, _: paths.append(path), is_leaf_takes_path=True
    )
    return paths


def replaced(tree, paths, new):
    """The tree with new nodes at these paths, by JAX's own means."""
    new = dict(zip(paths, new, strict=True))
    return jtu.tree_map_with_path(
        lambda path, x: new.get(path, x),
        tree,
        is_leaf=lambda path, _: path in new,
        is_leaf_takes_path=True,
    )


def is_apart(paths):
    return not any(
        a is not b and b[: len(a)] == a for a in paths for b in paths
    ) and len(set(paths)) == len(paths)


# Laws


@given(trees(), st.data())
def test_each_node_is_reached_by_its_key_path_and_by_its_text(tree, data):
    path = data.draw(st.sampled_from(key_paths(tree)))
    expected = replaced(tree, [path], ["new"])
    assert same(eqx.tree_at(path, tree, "new"), expected)
    assert same(eqx.tree_at(jtu.keystr(path), tree, "new"), expected)


@given(trees(), st.data())
def test_several_nodes_are_replaced_in_the_order_of_their_paths(tree, data):
    paths = data.draw(st.lists(st.sampled_from(key_paths(tree)), max_size=3))
    assume(is_apart(paths))
    new = [object() for _ in paths]
    expected = replaced(tree, paths, new)
    assert same(eqx.tree_at(paths, tree, new), expected)
    texts = [jtu.keystr(path) for path in paths]
    assert same(eqx.tree_at(texts, tree, new), expected)


@given(trees(), st.data())
def test_tree_of_bools_chooses_what_filter_keeps(tree, data):
    _, treedef = jtu.tree_flatten(tree)
    assume(treedef.num_leaves)
    flags = data.draw(
        st.lists(
            st.booleans(), min_size=treedef.num_leaves, max_size=treedef.num_leaves
        )
    )
    mask = treedef.unflatten(flags)
    new = eqx.tree_at(mask, tree, replace_fn=lambda x: "new")
    assert same(new, eqx.filter(tree, mask, inverse=True, replace="new"))
    chosen = [object() for flag in flags if flag]
    leaves = iter(chosen)
    expected = [
        next(leaves) if flag else x
        for flag, x in zip(flags, jtu.tree_leaves(tree), strict=True)
    ]
    assert same(eqx.tree_at(mask, tree, chosen), treedef.unflatten(expected))


# Paths


def test_path_is_written_as_python_would_read_the_node():
    table = {"a": [Affine((1, 2)), Affine(3)], "7": Pair(4, 5), "b c": 6}
    tree = Affine([table], Keyless(8))
    for text, read in [
        ("weight[0]['a'][1].weight", lambda t: t.weight[0]["a"][1].weight),
        (".weight[0]['a'][0].weight[1]", lambda t: t.weight[0]["a"][0].weight[1]),
        ("weight[-1]['a'][-1]", lambda t: t.weight[-1]["a"][-1]),
        ('weight[0]["a"]', lambda t: t.weight[0]["a"]),
        ("weight[0]['7'].second", lambda t: t.weight[0]["7"].second),
        ("weight[0]['7'][0]", lambda t: t.weight[0]["7"][0]),
        ("weight[0]['b c']", lambda t: t.weight[0]["b c"]),
        ("weight[0]['a'][0].kernel", lambda t: t.weight[0]["a"][0].kernel),
        ("bias.children[0]", lambda t: t.bias.children[0]),
        ("bias", lambda t: t.bias),
        ("", lambda t: t),
    ]:
        expected = eqx.tree_at(read, tree, "new")
        assert same(eqx.tree_at(text, tree, "new"), expected), text


def test_keys_of_dictionaries_may_be_any_literal():
    tree = {(0, "x"): 1, (1, "y"): [2]}
    assert eqx.tree_at("[0, 'x']", tree, 5) == {(0, "x"): 5, (1, "y"): [2]}
    assert eqx.tree_at("[(1, 'y')][0]", tree, 5) == {(0, "x"): 1, (1, "y"): [5]}
    assert eqx.tree_at("[7]", {7: 1, 8: 2}, 5) == {7: 5, 8: 2}


def test_each_of_several_none_is_reached_by_its_path():
    model = [Affine(1), Affine(2)]
    new = eqx.tree_at("[1].bias", model, 5)
    assert (new[0].bias, new[1].bias) == (None, 5)
    new = eqx.tree_at(["[1].bias", "[0].bias"], model, "ab")
    assert (new[0].bias, new[1].bias) == ("b", "a")


def test_tuple_of_texts_chooses_several_and_the_empty_tuple_is_the_whole_tree():
    assert eqx.tree_at(("[0]", "[1]"), [1, 2], "ab") == ["a", "b"]
    assert eqx.tree_at((), [1, 2], "new") == "new"
    assert eqx.tree_at([], [1, 2], []) == [1, 2]


def test_nodes_without_keys_of_their_own_are_reached_by_jax_key_paths():
    tree = [Keyless(1, (2, 3))]
    ((path, _), *_) = jtu.tree_leaves_with_path(tree)
    assert eqx.tree_at(path, tree, "new")[0].children == ("new", (2, 3))
    paths = (jtu.SequenceKey(0), jtu.FlattenedIndexKey(1))
    assert eqx.tree_at(paths, tree, "new")[0].children == (1, "new")


def test_wrapped_module_is_reached_through_the_transformation():
    new = eqx.tree_at("__wrapped__.weight", eqx.filter_jit(Affine(1)), 5)
    assert new(10) == 50


def test_replace_fn_and_is_leaf_serve_paths_too():
    tree = {"a": [1, 2], "b": (3,)}
    assert eqx.tree_at("['a']", tree, replace_fn=sum) == {"a": 3, "b": (3,)}
    with pytest.raises(ValueError, match=r"`pytree\['a'\]` is a leaf"):
        eqx.tree_at("['a'][0]", tree, 0, is_leaf=lambda x: isinstance(x, list))


def test_path_that_leads_nowhere_is_refused_where_it_ends():
    tree = {"layers": [Affine(1)]}
    for path, above, step in [
        ("['layers'][3].weight", "pytree['layers']` is a list", "[3]"),
        ("['layers'][0].wieght", "pytree['layers'][0]` is an Affine", ".wieght"),
        ("['layers'][0].weight.T", "pytree['layers'][0].weight` is a leaf", ".T"),
        ("layers", "pytree` is a dict", ".layers"),
        ((jtu.DictKey("layers"), jtu.SequenceKey(3)), "pytree['layers']`", "[3]"),
        ((jtu.GetAttrKey("layers"),), "`pytree` is a dict", ".layers"),
    ]:
        with pytest.raises(ValueError, match="leads to no node") as info:
            eqx.tree_at(path, tree, 0)
        assert above in str(info.value) and f"has no `{step}`" in str(info.value)


@pytest.mark.parametrize(
    "text", ["a b", "f()", "a[i]", "a[0:1]", "a +", "1", "[[]]", "[{}]", "a;b", "\n"]
)
def test_text_that_is_no_path_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a valid path: \(0, 1\)"):
        eqx.tree_at((0, 1), {"a": 1}, 0)
    with pytest.raises(ValueError, match="is not a valid path"):
        eqx.tree_at(text, {"a": 1}, 0)


@pytest.mark.parametrize("pattern", ["layers[*].weight", "**.weight"])
def test_patterns_are_referred_to_select(pattern):
    with pytest.raises(ValueError, match=r"select\(tree\)\.at\(...\)` takes patterns"):
        eqx.tree_at(pattern, {"a": 1}, 0)


def test_what_can_be_read_but_is_no_node_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"`pytree\.name`.*static"):
        eqx.tree_at("name", Affine(1), 0)
    with pytest.raises(ValueError, match="does not uniquely identify") as info:
        eqx.tree_at("weight[-1]", Affine([1, None]), 0)
    assert "`.weight[1]`, `.bias`" in str(info.value)


def test_nested_and_repeated_paths_are_refused_by_both():
    tree = {"a": [1, (2,)]}
    with pytest.raises(ValueError, match="twice") as info:
        eqx.tree_at(["['a'][0]", "['a'][-2]"], tree, "xy")
    assert "`['a'][0]`" in str(info.value)
    with pytest.raises(ValueError, match="inside") as info:
        eqx.tree_at(["['a'][1][0]", "['a']"], tree, "xy")
    assert "`['a'][1][0]`, which lies inside" in str(info.value)


def test_key_path_leads_through_a_frozen_part():
    tree = {"a": [1, eqx.frozen({"b": 2, "c": 3})]}
    (path,) = [p for p, leaf in jtu.tree_leaves_with_path(tree) if leaf == 3]
    changed = eqx.tree_at(path, tree, 4)
    assert jtu.tree_leaves(changed) == [1, 2, 4]
    assert eqx.tree_equal(eqx.tree_at("['a'][1]['c']", tree, 4), changed)
    with pytest.raises(
        ValueError, match=r"leads to no node: `pytree\['a'\]\[1\]` .*'d'"
    ):
        eqx.tree_at((*path[:-1], jtu.DictKey("d")), tree, 4)
    tree = eqx.frozen([None, None])  # told apart by their paths alone
    assert eqx.tree_equal(eqx.tree_at("[1]", tree, 1), eqx.frozen([None, 1]))


@pytest.mark.parametrize(
    "where", [1, None, {"a": 1}, [1], Affine("weight"), {"a": jnp.ones(2)}], ids=repr
)
def test_what_selects_nothing_is_a_type_error(where):
    if callable(where):
        where = [where]
    with pytest.raises(TypeError, match="must be a function, a path"):
        eqx.tree_at(where, {"a": 1}, 0)


# Trees of bools


def test_tree_of_bools_may_be_a_prefix_and_a_module():
    tree = Node(Affine(1, [2, 3]), (4, 5))
    new = eqx.tree_at(Node(Affine(False, True), False), tree, ["new"])
    assert same(new, Node(Affine(1, "new"), (4, 5)))
    new = eqx.tree_at(Affine(True, False), Affine(1, 2), ["new"])
    assert same(new, Affine("new", 2))
    assert eqx.tree_at(True, [1, 2], ["new"]) == "new"
    assert eqx.tree_at([False, False], [1, 2], ()) == [1, 2]


def test_none_and_empty_containers_are_chosen_by_true():
    assert eqx.tree_at([True, False, True], [None, None, ()], "ab") == ["a", None, "b"]


def test_several_replacements_are_wanted_even_for_one_true():
    with pytest.raises(TypeError, match="no length"):
        eqx.tree_at([True, False], [1, 2], 5)
    with pytest.raises(ValueError, match="1 nodes, but `replace` has 2"):
        eqx.tree_at([True, False], [1, 2], "ab")


def test_tree_of_bools_of_another_structure_is_refused_by_its_path():
    with pytest.raises(ValueError, match=r"\['a'\]"):
        eqx.tree_at({"a": (True, False)}, {"a": [1, 2]}, [0])
    with pytest.raises(ValueError, match="Affine"):
        eqx.tree_at(Affine(True, False, "other"), Affine(1, 2), [0])


def test_module_that_can_be_called_is_a_function_unless_it_holds_bools_only():
    class Weight(eqx.Module):
        index: object = eqx.field(static=True)

        def __call__(self, tree):
            return tree[self.index]

    assert eqx.tree_at(Weight(1), [1, 2], "new") == [1, "new"]
    assert eqx.tree_at(eqx.Partial(lambda i, t: t[i], 1), [1, 2], "new") == [1, "new"]


DEFAULTS = [0.1, None, False, (), (1, 2), "text", eqx.nn.Lambda(jnp.tanh), len]


@given(
    st.lists(st.sampled_from(DEFAULTS), min_size=1, max_size=4),
    st.sets(st.integers(0, 3)),
    st.data(),
)
def test_default_that_was_not_assigned_is_refused_by_its_path(defaults, assigned, data):
    """And an assigned field is replaced, though another one has the same default."""
    names = [f"f{i}" for i in range(len(defaults))]

    def init(self):
        for i, name in enumerate(names):
            if i in assigned:
                setattr(self, name, getattr(self, name))

    body = dict(zip(names, defaults, strict=True)) | {
        "__annotations__": dict.fromkeys(names, object),
        "__init__": init,
    }
    cls = type(eqx.Module)("Drawn", (eqx.Module,), body)
    name = data.draw(st.sampled_from(names))
    tree = {"a": [Affine(1.0), cls()], "b": None}
    before = jtu.tree_structure(tree)
    wheres = (
        f"['a'][1].{name}",
        lambda t: getattr(t["a"][1], name),
        lambda t: [t["a"][0].weight, getattr(t["a"][1], name)],
    )
    for where in wheres:
        new = (10, 10) if where is wheres[2] else 10
        if names.index(name) in assigned:
            is_none = lambda x: x is None  # noqa: E731 (there may be several)
            made = eqx.tree_at(where, tree, new, is_leaf=is_none)
            assert getattr(made["a"][1], name) == 10
            assert all(
                getattr(made["a"][1], other) == getattr(tree["a"][1], other)
                for other in names
                if other != name
            )
        else:
            text = (
                rf"`pytree\['a'\]\[1\]\.{name}` cannot be set: defaults in the class "
            )
            text += rf"that `__init__` did not .* In Drawn, assign `self\.{name}` in"
            with pytest.raises(TypeError, match=text):
                eqx.tree_at(where, tree, new)
            with pytest.raises(TypeError, match=text):
                eqx.tree_at(where, tree, replace_fn=str, is_leaf=lambda x: x is None)
    assert jtu.tree_structure(tree) == before


def test_default_of_none_is_not_taken_for_another_none():
    class Model(eqx.Module):
        bias: object = None
        extra: object = None
        more: int = 1

        def __init__(self):
            self.extra = None

    for where in (lambda m: m.bias, "bias", lambda m: [m.bias], ["bias"]):
        with pytest.raises(TypeError, match=r"`pytree\.bias` .* `self\.bias`"):
            eqx.tree_at(where, Model(), replace_fn=str)
    made = eqx.tree_at(lambda m: m.extra, Model(), 5)
    assert vars(made)["extra"] == 5 and "bias" not in vars(made)


def test_path_through_a_default_is_refused():
    class Model(eqx.Module):
        norm: Affine = Affine(2.0)

        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"`pytree\.norm` .* assign `self\.norm` in"):
        eqx.tree_at("norm", Model(), 1.0)
    for where in ("norm.weight", lambda m: m.norm.weight):
        with pytest.raises(
            TypeError, match="defaults in the class that `__init__` did"
        ):
            eqx.tree_at(where, Model(), 1.0)


def test_static_node_with_a_default_is_not_changed():
    @jtu.register_static
    @dataclasses.dataclass(frozen=True)
    class Fixed:
        size: int = dataclasses.field(default=2, init=False)

        def __init__(self):
            pass

    tree = [Fixed(), 1]
    with pytest.raises(TypeError, match="returned 2, which is not in `pytree`"):
        eqx.tree_at(lambda t: t[0].size, tree, 1.0)
    assert vars(tree[0]) == {}


def test_where_may_fail_on_another_value_of_a_default():
    class Model(eqx.Module):
        size: int = 2

        def __init__(self):
            pass

    with pytest.raises(TypeError, match="returned 4, which is not in `pytree`"):
        eqx.tree_at(lambda m: m.size + 2, Model(), 1.0)
