import re
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from strategies import Node, trees

import equinox_like as eqx

specs = st.sampled_from(
    [True, False, eqx.is_array, eqx.is_inexact_array, lambda x: isinstance(x, int)]
)


def flatten_with_none(tree):
    return jtu.tree_flatten(tree, is_leaf=lambda x: x is None)


@given(trees(), specs)
def test_combine_undoes_partition_with_the_identical_leaves(tree, spec):
    again = eqx.combine(*eqx.partition(tree, spec))
    leaves, treedef = jtu.tree_flatten(tree)
    new_leaves, new_treedef = jtu.tree_flatten(again)
    assert treedef == new_treedef
    assert all(a is b for a, b in zip(leaves, new_leaves, strict=True))


@given(trees(), specs)
def test_each_leaf_is_kept_by_a_filter_or_its_inverse_and_never_by_both(tree, spec):
    dropped = object()
    kept = jtu.tree_leaves(eqx.filter(tree, spec, replace=dropped))
    rest = jtu.tree_leaves(eqx.filter(tree, spec, inverse=True, replace=dropped))
    for x, a, b in zip(jtu.tree_leaves(tree), kept, rest, strict=True):
        assert (a is x and b is dropped) or (a is dropped and b is x)


@given(trees(), st.data())
def test_tree_of_bools_decides_leaf_by_leaf_and_a_prefix_for_all_below(tree, data):
    leaves, treedef = jtu.tree_flatten(tree)
    n = len(leaves)
    flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    spec, dropped = treedef.unflatten(flags), object()
    parts = eqx.partition([tree, tree], [spec, True], replace=dropped)
    kept, rest = map(jtu.tree_leaves, parts)
    for x, flag, a, b in zip(
        [*leaves, *leaves], [*flags, *[True] * n], kept, rest, strict=True
    ):
        assert (a is x and b is dropped) if flag else (a is dropped and b is x)


def test_spec_may_be_a_prefix_of_the_tree():
    tree = {"a": [1, 2.0], "b": (3, "text")}
    kept, rest = eqx.partition(tree, {"a": True, "b": lambda x: isinstance(x, int)})
    assert kept == {"a": [1, 2.0], "b": (3, None)}
    assert rest == {"a": [None, None], "b": (None, "text")}


def test_is_leaf_holds_below_the_leaves_of_the_spec_and_not_above():
    def is_list(x):
        return isinstance(x, list)

    tree = {"a": [1, 2], "b": [[5]], "c": None}
    spec = {"a": [False, True], "b": is_list, "c": None}
    kept, rest = eqx.partition(tree, spec, replace=0, is_leaf=is_list)
    assert kept == {"a": [0, 2], "b": [[5]], "c": None}
    assert rest == {"a": [1, 0], "b": 0, "c": None}
    # One leaf on either side: the container of the spec is kept all the same.
    assert eqx.filter([[5]], [[False]], is_leaf=is_list) == [[None]]
    with pytest.raises(ValueError, match=re.escape("`filter_spec['a'][1]`")):
        eqx.filter({"a": [1, 2]}, {"a": [True, 1]}, is_leaf=is_list)


def test_none_in_the_spec_fits_none_that_is_a_leaf():
    tree, is_leaf = [None, 1, (None, 2)], lambda x: x is None
    parts = eqx.partition(tree, [None, True, False], replace=0, is_leaf=is_leaf)
    assert parts == ([None, 1, (0, 0)], [None, 0, (None, 2)])


def test_is_leaf_keeps_nodes_whole():
    tree = [(1, 2), (3, "text")]
    kept = eqx.filter(
        tree, lambda pair: pair[1] == 2, is_leaf=lambda x: isinstance(x, tuple)
    )
    assert kept == [(1, 2), None]


def test_concrete_array_decides_by_its_truth():
    assert eqx.filter([1, 2], lambda x: jnp.asarray(x > 1)) == [None, 2]


def test_the_advice_for_a_path_in_place_of_a_spec_works():
    tree = {"a": (jnp.ones(2), jnp.ones(3))}
    with pytest.raises(ValueError, match="To choose by path") as error:
        eqx.filter(tree, "['a'][1]")
    code = str(error.value).split("`")[-2]
    spec = eval(code, {"eqx": eqx, "jax": jax, "tree": tree, "path": "['a'][1]"})
    assert eqx.filter(tree, spec) == {"a": (None, tree["a"][1])}


@pytest.mark.parametrize(
    "bad", [0, 1.0, "text", jnp.asarray(True), np.True_, np.asarray(True)], ids=repr
)
def test_spec_leaf_that_is_no_bool_or_callable_is_refused_by_its_path(bad):
    with pytest.raises(ValueError, match=r"filter_spec\['a'\]\[1\]"):
        eqx.filter({"a": [1, 2]}, {"a": [True, bad]})


def test_traced_spec_is_refused():
    def run(x):
        with pytest.raises(ValueError, match=r"`filter_spec\[0\]` there is `bool\[\]`"):
            eqx.filter([x, 1], [x, True])
        return x

    jax.jit(run)(True)


def test_the_advice_for_layers_of_a_class_works():
    keys = jax.random.split(jax.random.key(0))
    model = [eqx.nn.Linear(2, 2, key=keys[0]), eqx.nn.LayerNorm(2)]
    spec = eqx.select(jax.tree.map(lambda _: False, model)).of(eqx.nn.Linear).set(True)
    kept, rest = eqx.partition(model, spec)
    assert jtu.tree_leaves(kept) == jtu.tree_leaves(model[0])
    assert eqx.tree_equal(eqx.combine(kept, rest), model)
    grads = eqx.filter_grad(lambda model: model[0](jnp.ones(2)).sum(), wrt=spec)(model)
    assert len(jtu.tree_leaves(grads)) == 2


def test_error_of_a_function_says_that_it_is_called_with_leaves():
    tree = {"a": [1.0, jnp.ones(2)]}
    for spec in (lambda t: t["a"]), {"a": lambda t: t[0][0]}:
        with pytest.raises(Exception) as caught:
            eqx.partition(tree, spec)
        (note,) = caught.value.__notes__
        assert "called with each leaf" in note and "`pytree['a'][0]`" in note
    with pytest.raises(TypeError, match="out_features") as caught:
        eqx.partition(tree, eqx.nn.Linear)
    assert "choose by class" in caught.value.__notes__[1]
    assert ".of(Linear).set(True)`" in caught.value.__notes__[1]


def test_class_is_a_callable_and_a_callable_module_is_a_subtree():
    assert eqx.filter([0.5, 0, 2], int) == [None, None, 2]

    class Callable(eqx.Module):
        flag: object

        def __call__(self, x):
            return True

    assert eqx.filter(Callable([1, 2]), Callable(True)).flag == [1, 2]
    for spec in (Callable(True), eqx.Partial(bool)):
        with pytest.raises(ValueError, match="structure"):
            eqx.filter([1, 2], spec)


def test_spec_that_is_no_prefix_is_refused_by_its_path():
    with pytest.raises(ValueError, match=r"\['a'\]"):
        eqx.filter({"a": [1, 2]}, {"a": (True, True)})


def test_none_in_a_spec_matches_none_only():
    assert eqx.filter([1, None], [True, None]) == [1, None]
    with pytest.raises(ValueError, match=r"\[1\]"):
        eqx.filter([1, 2], [True, None])


def test_traced_decision_is_refused_by_jax():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: eqx.filter([x], lambda leaf: leaf > 0))(1.0)


def test_first_value_that_is_not_none_wins():
    assert eqx.combine([None, 1, None], [2, 3, None]) == [2, 1, None]


def test_none_may_face_a_subtree():
    assert eqx.combine([None, 1], [{"a": 2}, None]) == [{"a": 2}, 1]


def test_subtree_may_not_face_none():
    with pytest.raises(ValueError, match=r"\[0\]"):
        eqx.combine([{"a": 2}], [None])


def test_combining_other_structures_names_the_place():
    with pytest.raises(ValueError, match=r"\['a'\]"):
        eqx.combine({"a": [1]}, {"a": (None,)})


def test_combining_nothing_is_refused():
    with pytest.raises(TypeError, match="combine"):
        eqx.combine()


def test_combining_other_static_fields_is_refused():
    with pytest.raises(ValueError, match="Node"):
        eqx.combine(Node(1), Node(None, tag="other"))


def test_further_leaves_are_combined_whole():
    pairs = eqx.combine(
        [None, (1, None)], [(None, 4), None], is_leaf=lambda x: isinstance(x, tuple)
    )
    assert pairs == [(None, 4), (1, None)]


def test_one_tree_is_returned_as_it_is():
    assert eqx.combine([1, None]) == [1, None]
    leaves, _ = flatten_with_none(eqx.combine({"a": None}))
    assert leaves == [None]


class Tagged(eqx.Module):
    x: Any
    tag: int = eqx.field(static=True)


@pytest.mark.parametrize(
    ("call", "one", "other"),
    [
        (lambda a, b: eqx.filter(a, b), "pytree", "filter_spec"),
        (lambda a, b: eqx.partition(a, b), "pytree", "filter_spec"),
        (lambda a, b: eqx.combine(a, b), r"pytrees\[0\]", r"pytrees\[1\]"),
        (lambda a, b: eqx.apply_updates(a, b), "model", "updates"),
    ],
    ids=["filter", "partition", "combine", "apply_updates"],
)
def test_statics_that_differ_are_named_with_argument_and_path(call, one, other):
    trees = [1, Tagged(True, 1)], [True, Tagged(True, 2)]
    with pytest.raises(ValueError) as caught:
        call(*trees)
    for name, static in (one, 1), (other, 2):
        pattern = rf"`{name}\[1\]` has (the static fields )?tag={static}"
        assert re.search(pattern, str(caught.value))


def test_jax_prints_the_statics_of_a_module():
    one, other = Tagged(1.0, 1), Tagged(1.0, 2)
    with pytest.raises(ValueError, match=r"tag=1[^$]*tag=2"):
        jax.tree.map(lambda a, b: a, one, other)
    with pytest.raises(TypeError, match=r"tag=1.*tag=2"):
        jax.lax.cond(True, lambda: one, lambda: other)
    with pytest.raises(TypeError, match=r"tag=1.*tag=2"):
        jax.lax.scan(lambda carry, x: (other, x), one, jnp.ones(2))
    with pytest.raises(ValueError) as caught:
        jax.tree.map(lambda a, b: a, eqx.filter_jit(one.__repr__), eqx.filter_jit(len))
    assert " at 0x" not in str(caught.value).replace(repr(one.__repr__), "")


@given(trees(), st.sampled_from([eqx.is_array, eqx.is_inexact_array, callable]))
def test_hashable_partition_is_undone_by_its_inverse(tree, is_dynamic):
    dynamic, (static, treedef) = eqx.internal.hashable_partition(tree, is_dynamic)
    assert isinstance(dynamic, tuple) and isinstance(static, tuple)
    leaves = jtu.tree_leaves(tree)
    for leaf, d, s in zip(leaves, dynamic, static, strict=True):
        chosen, other = (d, s) if is_dynamic(leaf) else (s, d)
        assert chosen is leaf and other is None
    again = eqx.internal.hashable_combine(dynamic, (static, treedef))
    assert jtu.tree_structure(again) == jtu.tree_structure(tree)
    assert all(a is b for a, b in zip(jtu.tree_leaves(again), leaves, strict=True))
