import copy
import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

import equinox_like as eqx


class Results(eqx.Enumeration):
    success = "All is well."
    slow = "Too many steps."
    _hidden = ""


class More(Results):
    broken = "Out of order."


class Other(eqx.Enumeration):
    """Documented."""

    other = "Something else."
    slow = "Too many steps."
    annotated: int


class Both(More, Other):
    last = "The end."


NAMES = {
    Results: ["success", "slow", "_hidden"],
    More: ["success", "slow", "_hidden", "broken"],
    Other: ["other", "slow"],
    Both: ["success", "slow", "_hidden", "broken", "other", "last"],
}
enumerations = st.sampled_from(list(NAMES))
MODES = {
    "eager": lambda f, *xs: f(*xs),
    "jit": lambda f, *xs: jax.jit(f)(*xs),
    "vmap": lambda f, *xs: jtu.tree_map(
        lambda x: x[0],
        jax.vmap(f)(*jtu.tree_map(lambda x: jnp.stack([x, x]), xs)),
    ),
    "filter_jit": lambda f, *xs: eqx.filter_jit(f)(*xs),
}
modes = pytest.mark.parametrize("mode", MODES)


def item_of(enumeration, name):
    return getattr(enumeration, name)


def pair(data, enumeration):
    names = st.sampled_from(NAMES[enumeration])
    return [item_of(enumeration, data.draw(names)) for _ in range(2)]


# Laws


@modes
@given(enumerations, st.booleans(), st.data())
def test_where_is_the_one_or_the_other(mode, enumeration, pred, data):
    a, b = pair(data, enumeration)
    chosen = MODES[mode](enumeration.where, pred, a, b)
    assert isinstance(chosen, enumeration)
    assert chosen == (a if pred else b)
    assert enumeration[chosen] == enumeration[a if pred else b]


@modes
@given(st.sampled_from([(Results, More), (Results, Both), (Other, Both)]), st.data())
def test_promotion_keeps_name_and_message(mode, classes, data):
    parent, child = classes
    name = data.draw(st.sampled_from(NAMES[parent]))
    promoted = MODES[mode](child.promote, item_of(parent, name))
    assert promoted == item_of(child, name)
    assert child[promoted] == parent[item_of(parent, name)]


@modes
@given(enumerations, st.data())
def test_items_are_equal_if_they_are_the_same_one(mode, enumeration, data):
    a, b = pair(data, enumeration)
    equal, unequal = MODES[mode](lambda a, b: (a == b, a != b), a, b)
    assert equal.dtype == bool and equal.shape == ()
    assert bool(equal) is (a is b) and bool(unequal) is (a is not b)


# The class


def test_items_are_those_of_the_parents_and_then_its_own():
    for enumeration, names in NAMES.items():
        assert len(enumeration) == len(names)
        for i, name in enumerate(names):
            item = item_of(enumeration, name)
            assert item is item_of(enumeration, name)
            assert [int(leaf) for leaf in jtu.tree_leaves(item)] == [i]


def test_unknown_item_is_an_attribute_error_that_lists_the_others():
    with pytest.raises(AttributeError, match=r"no item `nope`.*success, slow, _hidden"):
        Results.nope  # noqa: B018  # pyright: ignore


def test_items_are_listed_in_the_docstring_unless_there_is_one():
    assert "- `slow`: Too many steps." in Results.__doc__
    assert "- `success`" in More.__doc__ and "- `broken`" in More.__doc__
    assert Other.__doc__ == "Documented."


def test_class_is_neither_iterable_nor_a_container_nor_can_it_be_called():
    with pytest.raises(TypeError, match="iterable"):
        iter(Results)
    with pytest.raises(TypeError, match="container"):
        Results.success in Results  # noqa: B015
    with pytest.raises(TypeError, match=r"Results\.success"):
        Results()


def test_items_of_a_class_are_fixed():
    with pytest.raises(AttributeError, match="`slow`"):
        Results.slow = "other"
    Results.note = "any"
    assert Results.note == "any"
    del Results.note


@pytest.mark.parametrize("bad", [1, None, lambda self: 1, property(len)], ids=type)
def test_item_that_is_no_string_is_refused_by_its_name(bad):
    with pytest.raises(TypeError, match=r"`Bad\.item` must be a string"):
        type(Results)("Bad", (eqx.Enumeration,), {"item": bad})


@pytest.mark.parametrize("name", ["promote", "where"])
def test_item_with_the_name_of_a_method_is_refused(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        type(Results)("Bad", (eqx.Enumeration,), {name: "text"})


def test_base_class_that_is_no_enumeration_is_refused():
    class Plain:
        note = "no item"

    class Deep(Plain):
        pass

    with pytest.raises(ValueError, match="Deep"):
        type(Results)("Bad", (Deep, eqx.Enumeration), {})
    assert len(type(Results)("Fine", (Plain, Results), {})) == 3
    with pytest.raises(TypeError, match=r"MRO|method resolution order"):
        type(Results)("Bad", (Results, More), {})


def test_another_message_for_a_name_warns_and_wins():
    with pytest.warns(UserWarning, match="`slow`.*'New.'.*'Too many steps.'") as caught:

        class Changed(Results):
            slow = "New."
            success = "All is well."

    assert caught[0].filename == __file__
    assert Changed[Changed.slow] == "New." and len(Changed) == 3
    assert int(jtu.tree_leaves(Changed.slow)[0]) == 1
    assert Results[Results.slow] == "Too many steps."


# Items


def test_item_is_a_module_with_one_integer_leaf():
    assert isinstance(Results.slow, eqx.Module)
    (leaf,) = jtu.tree_leaves(Results.slow)
    assert type(leaf) is np.ndarray and leaf.shape == () and leaf.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        leaf[...] = 0


def test_item_is_an_instance_of_its_very_class():
    assert isinstance(Results.slow, Results) and isinstance(More.slow, More)
    assert not isinstance(More.slow, Results)
    assert not isinstance(Results.slow, eqx.Enumeration)
    assert not isinstance("text", Results)


def test_items_pass_through_transformations():
    def step(item, x):
        item = Results.where(x > 1, Results.slow, item)
        return item, item

    last, all_ = jax.lax.scan(step, Results.success, jnp.arange(4))
    assert last == Results.slow
    assert (all_ == Results.where(False, last, last)).tolist() == [0, 0, 1, 1]

    def loss(x, item):
        return jnp.where(item == Results.slow, x, 2 * x)

    assert eqx.filter_grad(loss)(jnp.asarray(1.0), Results.slow) == 1
    assert jax.grad(loss)(1.0, Results.success) == 2


def test_comparison_of_known_items_is_known_inside_jit():
    known = jax.jit(lambda: Results.slow)()

    def run(x):
        assert Results.slow == Results.slow and known == Results.slow
        assert not (Results.slow != Results.slow)
        return x

    jax.jit(run)(1)


def test_batch_of_items_is_compared_one_by_one():
    batch = jtu.tree_map(lambda x: jnp.asarray([0, 1, 0]), Results.success)
    assert (batch == Results.success).tolist() == [True, False, True]
    assert (Results.slow != batch).tolist() == [True, False, True]


@pytest.mark.parametrize("other", [1, None, "slow", More.slow, Other.slow], ids=repr)
def test_comparison_with_anything_else_is_refused(other):
    for compare in (lambda a, b: a == b, lambda a, b: a != b):
        with pytest.raises(ValueError, match=r"Results with .*promote"):
            compare(Results.slow, other)


def test_message_is_read_from_the_class():
    seen = []
    assert Results[Results.slow] == "Too many steps." and Results[Results._hidden] == ""
    jax.jit(lambda item: seen.append(Results[item]))(Results.slow)
    assert seen == ["traced"]
    batch = jtu.tree_map(lambda x: jnp.asarray([0, 1]), Results.success)
    assert Results[batch] == "['All is well.' 'Too many steps.']"
    for stand_in in (None, object(), 1, 1.0, np.ones(2), np.asarray(7), np.asarray(-1)):
        unknown = jtu.tree_map(lambda _: stand_in, Results.slow)  # noqa: B023
        assert Results[unknown] == "unknown"


@pytest.mark.parametrize("other", [0, "slow", More.slow], ids=repr)
def test_message_of_anything_else_is_refused(other):
    with pytest.raises(ValueError, match=r"Results\[\.\.\.\]"):
        Results[other]


def test_item_prints_as_its_message_alone_and_in_a_tree():
    name = f"{__name__}.Results"
    assert repr(Results.slow) == str(Results.slow) == f"{name}<Too many steps.>"
    assert eqx.tree_pformat([Results.slow]) == f"[{name}<Too many steps.>]"
    seen = []
    jax.jit(lambda item: seen.append(eqx.tree_pformat((item,))))(Results.slow)
    assert seen == [f"({name}<traced>,)"]
    donated = jax.tree.map(lambda x: jnp.asarray(x) + 0, Results.slow)
    eqx.filter_jit(lambda item: item, donate="all")(donated)
    assert repr(donated) == f"{name}<deleted>"


def test_item_knows_whether_it_is_traced():
    seen = []
    jax.jit(lambda item: seen.append(item.is_traced()))(Results.slow)
    assert seen == [True] and Results.slow.is_traced() is False


@pytest.mark.parametrize("is_returned", [False, True], ids=["own", "returned"])
@pytest.mark.parametrize(
    "transport",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_item_can_be_copied_and_pickled(transport, is_returned):
    # What a program returns is equal to the item of the class, but not that object.
    before = jax.jit(lambda x: x)(Results.slow) if is_returned else Results.slow
    item = transport(before)
    assert isinstance(item, Results) and item == Results.slow
    assert jtu.tree_structure(item) == jtu.tree_structure(Results.slow)


def test_item_cannot_be_hashed():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Results.slow)


# promote


def test_known_item_stays_known_when_promoted_inside_jit():
    known = jax.jit(lambda: Results.slow)()

    def run(x):
        assert More.promote(Results.slow) is More.slow
        assert More.promote(known) is More.slow
        return x

    jax.jit(run)(1)


def test_batch_of_items_is_promoted_one_by_one():
    batch = jtu.tree_map(lambda x: jnp.asarray([0, 1]), Other.other)
    assert Both[Both.promote(batch)] == "['Something else.' 'Too many steps.']"


@pytest.mark.parametrize(
    "bad",
    [More.slow, Both.slow, Other.slow, 1, None],
    ids=["own", "child", "other", 1, 2],
)
def test_promoting_what_is_no_item_of_a_parent_is_refused(bad):
    with pytest.raises(ValueError, match=r"`More\.promote` takes an item of a parent"):
        More.promote(bad)


def test_promoting_a_stand_in_is_refused():
    item = jtu.tree_map(lambda _: None, Results.slow)
    with pytest.raises(ValueError, match="with `None` as index"):
        More.promote(item)


# where


def test_known_choice_is_one_of_the_items_themselves():
    trues = True, np.True_, np.asarray(True), jnp.asarray(True)

    def run(x):
        for true in trues:
            assert Results.where(true, Results.slow, Results.success) is Results.slow
        return x

    run(1)
    jax.jit(run)(1)


def test_same_item_twice_is_itself_even_for_a_traced_predicate():
    def run(pred):
        a = Results.slow
        b = jtu.tree_map(lambda x: x, a)
        assert Results.where(pred, a, a) is a and Results.where(pred, a, b) is a
        assert Results.where(pred, a, Results.success).is_traced()

    jax.jit(run)(True)


@pytest.mark.parametrize("pred", [1, 1.0, None, "x", np.ones(2, bool), jnp.ones(())])
def test_predicate_that_is_no_scalar_of_bool_is_refused(pred):
    with pytest.raises(ValueError, match=r"`Results\.where` takes a scalar of `bool`"):
        Results.where(pred, Results.slow, Results.success)


def test_items_of_another_class_are_refused():
    for a, b in [(Results.slow, More.slow), (More.slow, Results.slow), (1, 2)]:
        with pytest.raises(ValueError, match=r"`Results\.where` takes items of"):
            Results.where(True, a, b)


# Errors


def test_an_item_is_not_an_index_of_messages(without_type_checks):
    with pytest.raises(TypeError, match="integer; got an EnumerationItem"):
        eqx.branched_error_if(jnp.ones(2), True, Results.slow, ["fine", "slow"])


def raise_if(item, token, pred):
    return item.error_if(token, pred)


@pytest.mark.parametrize(
    "f", [raise_if, eqx.filter_jit(raise_if)], ids=["eager", "jit"]
)
@given(enumerations, st.booleans(), st.data())
def test_item_raises_its_message(f, enumeration, pred, data):
    item, _ = pair(data, enumeration)
    token = jnp.ones(2)
    if pred:
        with pytest.raises(eqx.EquinoxRuntimeError) as info:
            f(item, token, jnp.asarray(True))
        assert f"\nEquinoxRuntimeError: {enumeration[item]}\n" in str(info.value)
    else:
        assert (f(item, token, jnp.asarray(False)) == token).all()


def test_method_of_an_item_can_be_compiled():
    f = eqx.filter_jit(Results.slow.error_if)
    assert f(jnp.ones(2), jnp.asarray(False)).tolist() == [1, 1]
    with pytest.raises(eqx.EquinoxRuntimeError, match="Too many steps"):
        f(jnp.ones(2), jnp.asarray(True))


def test_items_of_a_batch_raise_each_its_own():
    def f(x):
        item = Results.where(x < 0, Results.slow, Results.success)
        return item.error_if(x, jnp.abs(x) > 1)

    assert eqx.filter_jit(jax.vmap(f))(jnp.array([1.0, -1.0])).tolist() == [1, -1]
    with pytest.raises(eqx.EquinoxRuntimeError) as info:
        eqx.filter_jit(jax.vmap(f))(jnp.array([-2.0, 1.0, 2.0]))
    expected = "Batch element 0: Too many steps.\nBatch element 2: All is well.\n"
    assert expected in str(info.value)


@pytest.mark.parametrize("wrap", [jax.jit, eqx.filter_jit, lambda f: f])
def test_item_of_a_function_with_a_rule_of_its_own_raises(wrap):
    """JAX gives its index a tangent, which has no content."""

    @eqx.filter_custom_vjp
    def solve(x):
        return 2 * x, Results.where(x < 0, Results.slow, Results.success)

    solve.def_fwd(lambda perturbed, x: (solve(x), None))
    solve.def_bwd(lambda residuals, cotangent, perturbed, x: 2 * cotangent[0])

    def loss(x):
        y, result = solve(x)
        return result.error_if(y, result != Results.success)

    gradient = wrap(jax.grad(loss))
    assert gradient(jnp.asarray(1.0)) == 2
    with pytest.raises(Exception, match="Too many steps"):
        jax.block_until_ready(gradient(jnp.asarray(-1.0)))


def test_index_has_the_name_that_libraries_read():
    class Colours(eqx.Enumeration):
        red = "Red."
        blue = "Blue."

    assert Colours.red._value == 0 and Colours.blue._value == 1
    chosen = jax.jit(lambda p: Colours.where(p, Colours.red, Colours.blue))(False)
    assert chosen._value == 1
    assert eqx.filter_jit(lambda x: x._value + 1)(Colours.blue) == 2
