"""`select`: choosing nodes by conditions, and rewriting them."""

import functools
import operator

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import assume, given
from strategies import ARRAYS, Node, Pair, same, trees

import equinox_like as eqx
from equinox_like import nn


@pytest.fixture(scope="module")
def model():
    return nn.MLP(3, 2, 4, 2, key=jax.random.key(0))


def paths(selection):
    return [path for path, _ in selection]


def double(x):
    return 2 * x


# Which nodes


def test_all_nodes_and_leaves_are_chosen_at_first():
    tree = {"a": [1, None], "b": (2,)}
    expected = ["", "['a']", "['a'][0]", "['a'][1]", "['b']", "['b'][0]"]
    assert paths(eqx.select(tree)) == expected
    assert eqx.select(tree).get()[0] is tree


def test_conditions_narrow_in_any_order(model):
    conditions = {
        "of": lambda s: s.of(nn.Linear, jax.Array),
        "at": lambda s: s.at("layers[*].weight", "**.bias"),
        "where": lambda s: s.where(lambda x: x.ndim == 2),
        "within": lambda s: s.within("layers[1]"),
    }
    start = eqx.select(model).of(jax.Array)
    for order in (list(conditions), list(conditions)[::-1]):
        chosen = start
        for name in order:
            chosen = conditions[name](chosen)
        assert paths(chosen) == ["layers[1].weight"]
    assert len(start) == 6  # as it was


def test_a_predicate_takes_a_node_or_a_path_and_a_node(model):
    linears = eqx.select(model).of(nn.Linear)
    assert paths(linears.where(lambda layer: layer.out_features == 2)) == ["layers[2]"]
    assert paths(linears.where(lambda path, _: path[-2] in "02")) == [
        "layers[0]",
        "layers[2]",
    ]
    without_name = functools.partial(operator.is_, jax.nn.relu)
    assert eqx.select(model).where(without_name).count(1)


def test_within_takes_a_selection_a_class_or_a_pattern(model):
    arrays = eqx.select(model).of(jax.Array)
    by_selection = arrays.within(eqx.select(model).at("layers[0]"))
    assert paths(by_selection) == ["layers[0].weight", "layers[0].bias"]
    assert by_selection.get() == arrays.within("layers[0]").get()
    assert len(arrays.within(nn.Linear)) == 6
    assert paths(eqx.select(model).of(nn.MLP).within(nn.MLP)) == []


def test_within_a_selection_of_another_tree_is_an_error(model):
    copy = eqx.select(model).of(jax.Array).apply(double)
    with pytest.raises(ValueError, match="a selection of the same tree"):
        eqx.select(model).within(eqx.select(copy))


def test_the_tree_itself_is_chosen_by_its_class_and_by_the_empty_path(model):
    assert eqx.select(model).of(nn.MLP).get() == (model,)
    assert eqx.select(model).at("").get() == (model,)
    assert paths(eqx.select(model).at("*")) == [
        "layers",
        "activation",
        "final_activation",
    ]
    assert len(eqx.select(model).at("**")) == len(eqx.select(model))


def test_each_path_is_one_that_tree_at_takes(model):
    for path, node in eqx.select(model):
        found = []
        eqx.tree_at(path, model, replace_fn=found.append)
        assert found[0] is node


def test_of_takes_classes_alone(model):
    for classes in (nn.Linear | nn.MLP, (nn.Linear, (nn.MLP,))):
        assert eqx.select(model).of(classes).count(4)
    with pytest.raises(TypeError, match="To choose by a path, use `at`"):
        eqx.select(model).of("layers[0]")


def test_count_names_what_was_found(model):
    linears = eqx.select(model).of(nn.Linear)
    assert linears.count(3) is linears
    with pytest.raises(ValueError, match=r"Expected 2 nodes, but 3 .*`layers\[1\]`"):
        linears.count(2)
    with pytest.raises(ValueError, match=r"`\.of\(Linear\)` leaves 3, `\.at\('x'\)`"):
        linears.at("x").count(1)


def test_repr_names_conditions_and_nodes(model):
    text = repr(eqx.select(model).of(nn.Linear).within("layers"))
    assert text == (
        "<select(MLP).of(Linear).within(.at('layers')): 3 nodes, `layers[0]`, "
        "`layers[1]`, `layers[2]`>"
    )
    assert "more" not in repr(eqx.select([0] * 9))
    assert repr(eqx.select([0] * 10)).endswith("`[8]` and 1 more>")


# Rewriting


def test_apply_rewrites_what_is_chosen_and_leaves_the_rest(model):
    new = eqx.select(model).at("**.bias").apply(jnp.ones_like)
    assert all((layer.bias == 1).all() for layer in new.layers)
    assert all(
        a.weight is b.weight for a, b in zip(new.layers, model.layers, strict=True)
    )


def test_apply_goes_by_order_and_hands_out_paths():
    tree = {"b": [1, 2], "a": 3}
    seen = []
    eqx.select(tree).of(int).apply(lambda path, x: seen.append((path, x)))
    assert seen == [("['a']", 3), ("['b'][0]", 1), ("['b'][1]", 2)]
    numbers = iter("xyz")
    assert eqx.select(tree).of(int).apply(lambda _: next(numbers)) == {
        "a": "x",
        "b": ["y", "z"],
    }


def test_a_parameter_with_a_default_is_not_for_the_path():
    assert eqx.select([1]).of(int).apply(lambda x, by=10: x + by) == [11]
    assert eqx.select([1]).of(int).apply(str) == ["1"]


def test_a_node_within_a_chosen_one_is_rewritten_first():
    tree = Pair(Pair(1, 2), 3)
    summed = eqx.select(tree).of(Pair).apply(lambda p: p.first + p.second)
    assert summed == 6


def test_set_puts_one_value_everywhere(model):
    new = eqx.select(model).where(lambda x: x is jax.nn.relu).set(jnp.tanh)
    x = jnp.ones(3)
    expected = nn.MLP(3, 2, 4, 2, activation=jnp.tanh, key=jax.random.key(0))
    assert (new(x) == expected(x)).all()
    assert eqx.select([1, 2, [3]]).of(int).set([0]) == [[0], [0], [[0]]]


def test_predicate_that_returns_an_array_is_named_with_the_path(model):
    weights = eqx.select(model).at("**.weight")
    with pytest.raises(ValueError, match=r"`where` returned bool\[4,3\] for `layers"):
        weights.where(lambda x: x > 0)
    assert weights.where(lambda x: (x < 10).all()).count(3)


def test_set_refuses_a_node_within_a_chosen_one(model):
    with pytest.raises(
        ValueError, match=r"`layers\[0\]\.weight` and the one that contains it"
    ):
        eqx.select(model).of(nn.Linear, jax.Array).set(None)


def test_an_empty_selection_reads_as_nothing_and_cannot_be_rewritten(model):
    empty = eqx.select(model).of(nn.Linear).at("layer[*]")
    assert not empty and empty.get() == () and list(empty) == []
    for rewrite in (empty.apply, empty.set):
        with pytest.raises(ValueError, match=r"`\.at\('layer\[\*\]'\)` leaves 0"):
            rewrite(double)


def test_no_list_is_in_both_trees():
    tree = {"changed": 1, "other": [2]}
    new = eqx.select(tree).at("['changed']").set(0)
    new["other"].append(3)
    assert tree["other"] == [2]


def test_one_leaf_object_at_two_places_is_two_nodes():
    x = jnp.ones(2)
    new = eqx.select([x, x]).at("[1]").apply(double)
    assert new[0] is x and new[1].sum() == 4


def test_a_frozen_part_and_its_content_are_told_apart_by_class(model):
    frozen = eqx.select(model).at("layers[0]").apply(eqx.frozen)
    assert eqx.filter(frozen, eqx.trainable).layers[0].weight is None
    assert [path for path, _ in eqx.select(eqx.frozen(jnp.ones(2)))] == [""]
    at = eqx.select(frozen).at("layers[0]")
    assert len(at) == 1 and eqx.tree_equal(at.apply(eqx.unfrozen), model)
    halved = at.of(nn.Linear).apply(lambda layer: jax.tree.map(double, layer))
    assert eqx.filter(halved, eqx.trainable).layers[0].weight is None
    assert (halved.layers[0].weight == 2 * model.layers[0].weight).all()
    assert paths(eqx.select(frozen).of(nn.Linear).within("layers[0]")) == []


def test_a_shared_node_is_chosen_where_it_is_kept(key):
    pair = nn.Embedding(5, 3, key=key), nn.Linear(3, 5, key=key)
    tied = nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
    arrays = eqx.select(tied).at("**.weight").of(jax.Array)
    assert paths(arrays) == ["pytree[0].weight"]
    embedding, linear = arrays.apply(double)()
    assert embedding.weight is linear.weight
    assert (linear.weight == 2 * pair[0].weight).all()


def test_selection_works_on_traced_trees(model):
    @eqx.filter_jit
    def doubled(model):
        return eqx.select(model).of(jax.Array).apply(double)

    expected = eqx.select(model).of(jax.Array).apply(double)
    assert eqx.tree_equal(doubled(model), expected)


@given(trees(), st.data())
def test_apply_of_the_identity_is_the_tree(tree, data):
    assume(not isinstance(tree, type))  # a class is refused
    selection = eqx.select(tree)
    kinds = st.sampled_from([object, list, dict, Node, Pair, *map(type, ARRAYS)])
    chosen = selection.of(*data.draw(st.lists(kinds, min_size=1, max_size=3)))
    if not chosen:
        return
    new = chosen.apply(lambda node: node)
    assert jax.tree.structure(new) == jax.tree.structure(tree)
    leaves = zip(jax.tree.leaves(new), jax.tree.leaves(tree), strict=True)
    assert all(a is b for a, b in leaves)
    assert all(map(same, *map(jax.tree.leaves, (new, tree))))


# What it is used for


def test_weight_decay_mask_for_optax(model):
    params = eqx.filter(model, eqx.is_inexact_array)
    mask = jax.tree.map(lambda _: False, params)
    mask = eqx.select(mask).at("**.weight").set(True)
    decay = optax.add_decayed_weights(0.5, mask=mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = decay.update(zeros, decay.init(params), params)
    assert (updates.layers[0].weight == params.layers[0].weight / 2).all()
    assert (updates.layers[0].bias == 0).all()


def test_class_in_place_of_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="`tree` is the class `Linear`"):
        eqx.select(nn.Linear)


KEYS = ["*", "**", "a*", "?", "[", "]", "[0]", ".", "a.b", "it's", '"', "'"]
KEYS += ["\\", "\\*", ""]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_can_be_selected_alone(key):
    tree = {k: {"x": i} for i, k in enumerate(KEYS)}
    path = f"[{key!r}]".replace("*", r"\*")
    assert eqx.select(tree).at(path).get() == (tree[key],)
    assert eqx.select(tree).at(f"{path}**").within(path).get() == (tree[key]["x"],)
    assert eqx.select(tree).at(f"{path}['x']").get() == (tree[key]["x"],)
