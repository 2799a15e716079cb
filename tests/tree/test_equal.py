import copy
import math
import time

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as hnp
from strategies import leaves, trees

import equinox_like as eqx


class Affine(eqx.Module):
    weight: object
    name: object = eqx.field(static=True, default="affine")


def rebuilt(tree):
    return jtu.tree_map(lambda x: copy.copy(x) if eqx.is_array(x) else x, tree)


def has_nan(tree):
    return any(isinstance(x, float) and math.isnan(x) for x in jtu.tree_leaves(tree))


# Laws


@given(trees())
def test_tree_equals_its_copy(tree):
    assume(not has_nan(tree))
    assert eqx.tree_equal(tree)
    assert eqx.tree_equal(tree, rebuilt(tree))
    assert eqx.tree_equal(tree, rebuilt(tree), rebuilt(tree), typematch=True)
    assert eqx.tree_equal(tree, rebuilt(tree), rtol=1e-3, atol=1e-3)


@given(trees())
def test_one_changed_leaf_makes_trees_unequal(tree):
    whole, treedef = jtu.tree_flatten(tree)
    for n in range(len(whole)):
        changed = treedef.unflatten([*whole[:n], object(), *whole[n + 1 :]])
        assert eqx.tree_equal(tree, changed) is False
        assert eqx.tree_equal(changed, tree) is False
        assert eqx.tree_equal(changed, changed, tree) is False


@given(trees(), trees())
def test_trees_of_different_structure_are_unequal(a, b):
    assume(jtu.tree_structure(a) != jtu.tree_structure(b))
    assert eqx.tree_equal(a, b) is False


@given(leaves, leaves)
def test_comparison_is_symmetric(a, b):
    for typematch in (False, True):
        there = eqx.tree_equal([a], [b], typematch=typematch)
        back = eqx.tree_equal([b], [a], typematch=typematch)
        assert bool(there) == bool(back)


# Arrays


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("other", [[1.0, 3.0], [1.0, 2.0, 3.0], [[1.0, 2.0]]], ids=repr)
def test_shape_and_values_count(kind, other):
    a = kind(np.array([1.0, 2.0], np.float32))
    b = kind(np.array(other, np.float32))
    assert not eqx.tree_equal(a, b)
    assert eqx.tree_equal(b, b)


def test_dtype_counts_and_weak_type_does_not():
    assert eqx.tree_equal(jnp.ones(2), jnp.ones(2, jnp.int32)) is False
    assert eqx.tree_equal(np.ones(2), np.ones(2, np.float32)) is False
    assert eqx.tree_equal(jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32))


def test_numpy_and_jax_arrays_of_the_same_contents_are_equal():
    a = np.arange(3, dtype=np.float32)
    assert eqx.tree_equal([a], [jnp.asarray(a)])
    assert not eqx.tree_equal([a], [jnp.asarray(a) + 1])
    assert eqx.tree_equal(np.float32(1), np.array(1, np.float32)) is True


def test_array_differs_from_what_is_none():
    for array in (jnp.asarray(1), np.asarray(1), np.int32(1)):
        assert eqx.tree_equal(array, 1) is False
        assert eqx.tree_equal(1, array) is False


def test_numpy_constants_of_a_jaxpr_equal_ordinary_arrays():
    constant = np.arange(3, dtype=np.float32)
    (found,) = jax.make_jaxpr(lambda x: x + constant)(constant).consts
    assert eqx.tree_equal(found, constant)
    assert eqx.tree_equal(jnp.asarray(constant), found)


def test_nan_differs_from_nan():
    for nan in (math.nan, np.float32(math.nan), jnp.asarray(math.nan)):
        assert not eqx.tree_equal([nan], [nan + 0])
        assert not eqx.tree_equal([nan], [nan + 0], atol=1.0)


def test_typed_keys_are_compared_by_value():
    key = jax.random.key
    assert eqx.tree_equal(key(0), key(0))
    assert not eqx.tree_equal(key(0), key(1))
    assert eqx.tree_equal(key(0), key(0, impl="rbg")) is False


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_small_dtypes_are_compared(dtype):
    for module in (np, jnp):
        a = module.ones(2, getattr(ml_dtypes, dtype))
        assert eqx.tree_equal(a, a + a - a)
        assert not eqx.tree_equal(a, a + a)
        assert not eqx.tree_equal(a, a + a, rtol=0.1)
        assert bool(eqx.tree_equal(a, a + a, rtol=0.5)) is (dtype != "int4")


def test_tolerance_may_be_larger_than_what_a_small_dtype_holds():
    for module in (np, jnp):
        a = module.asarray(448, ml_dtypes.float8_e4m3fn)
        assert eqx.tree_equal(a, -a, atol=1000.0)
        assert not eqx.tree_equal(a, -a, atol=800.0)


# What the answer is


def test_answer_is_a_python_bool_unless_jax_arrays_were_compared():
    assert eqx.tree_equal([1, np.ones(2)], [1, np.ones(2)]) is True
    assert eqx.tree_equal([1, np.ones(2)], [1, np.zeros(2)]) is False
    answer = eqx.tree_equal([1, jnp.ones(2)], [1, jnp.ones(2)])
    assert isinstance(answer, jax.Array)
    assert answer.shape == () and answer.dtype == bool and answer
    answer = eqx.tree_equal([jnp.ones(2)], [jnp.zeros(2)])
    assert isinstance(answer, jax.Array) and not answer


def test_python_mismatch_anywhere_is_a_plain_false():
    a = [jnp.ones(2), 1, jnp.ones(2)]
    for b in [[jnp.ones(2), 2, jnp.ones(2)], [jnp.ones(2), 1, jnp.ones(3)]]:
        assert eqx.tree_equal(a, b) is False
        assert eqx.tree_equal(a, a, b) is False


def test_traced_arrays_give_a_traced_answer():
    @jax.jit
    def run(x, y):
        assert eqx.tree_equal(np.ones(2), np.ones(2)) is True
        assert eqx.tree_equal([x, 1], [x, 2]) is False
        assert eqx.tree_equal(x, y[:1]) is False
        return eqx.tree_equal({"a": x, "b": np.ones(2)}, {"a": y, "b": np.ones(2)})

    assert run(jnp.ones(2), jnp.ones(2))
    assert not run(jnp.ones(2), jnp.zeros(2))


# Options


def test_typematch_tells_types_apart():
    array = np.ones(2, np.float32)
    for a, b in [
        (1, 1.0),
        (1, True),
        (array, jnp.asarray(array)),
        (np.float32(1), np.array(1, np.float32)),
    ]:
        assert eqx.tree_equal(a, b)
        assert eqx.tree_equal(a, b, typematch=True) is False


def test_typematch_does_not_tell_a_tracer_from_an_array():
    constant = jnp.ones(2)
    run = jax.jit(lambda x: eqx.tree_equal(x, constant, typematch=True))
    assert run(jnp.ones(2))


@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
def test_tolerances_serve_inexact_arrays_only(module):
    a, b = module.asarray([1.0, 2.0]), module.asarray([1.0, 2.01])
    assert not eqx.tree_equal(a, b)
    assert not eqx.tree_equal(a, b, atol=0.001)
    assert eqx.tree_equal(a, b, atol=0.02)
    assert eqx.tree_equal(a, b, rtol=0.01)
    assert eqx.tree_equal(a, b, rtol=np.float32(0.01), atol=jnp.asarray(0.0))
    assert not eqx.tree_equal(module.asarray(1), module.asarray(2), atol=5.0)
    assert eqx.tree_equal(1.0, 1.001, atol=5.0) is False


def test_tolerances_may_be_traced():
    @jax.jit
    def run(atol):
        return [
            eqx.tree_equal(module.asarray([1.0]), module.asarray([1.5]), atol=atol)
            for module in (np, jnp)
        ]

    assert run(1.0) == [True, True]
    assert run(0.1) == [False, False]


def test_tolerances_respect_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        a = jnp.ones(2, jnp.bfloat16)
        assert eqx.tree_equal(a, a, rtol=np.float64(0.1), atol=0.1)


@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
def test_dtypes_may_be_disregarded(module):
    ones, halves = module.ones(2, np.int32), module.full(2, 0.5, np.float32)
    assert eqx.tree_equal(ones, ones.astype(np.float32)) is False
    for dtype in (np.float32, np.int8, bool, np.complex64, ml_dtypes.bfloat16):
        assert eqx.tree_equal(ones, ones.astype(dtype), check_dtype=False)
    assert not eqx.tree_equal(halves, ones, check_dtype=False)
    assert eqx.tree_equal(halves, ones, check_dtype=False, atol=0.5)
    assert eqx.tree_equal(ones[:1], ones, check_dtype=False) is False


def test_numpy_arrays_of_64_bits_are_compared_without_a_warning():
    a = np.asarray([0.1, 0.2])  # as from another framework
    assert eqx.tree_equal(a, jnp.asarray(a), check_dtype=False)
    assert not eqx.tree_equal(a, jnp.asarray(a) + 1, check_dtype=False, rtol=0.1)


def test_disregarded_dtypes_need_no_promotion_by_the_user():
    with jax.numpy_dtype_promotion("strict"):
        a = jnp.ones(2, jnp.int32)
        assert eqx.tree_equal(a, a.astype(jnp.bfloat16), check_dtype=False)


def test_keys_and_text_have_no_dtype_to_disregard():
    key, data = jax.random.key(0), jnp.zeros((), jnp.uint32)
    assert eqx.tree_equal(key, data, check_dtype=False) is False
    assert (
        eqx.tree_equal(key, jax.random.key(0, impl="rbg"), check_dtype=False) is False
    )
    assert eqx.tree_equal(np.asarray("a"), np.asarray(1), check_dtype=False) is False


def test_weak_types_matter_if_asked_for():
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    assert eqx.tree_equal([weak], [strong], check_weak_type=True) is False
    assert eqx.tree_equal([weak], [np.float32(1)], check_weak_type=True) is False
    assert eqx.tree_equal([weak], [weak + 0.0], check_weak_type=True)
    assert eqx.tree_equal([strong], [np.float32(1)], check_weak_type=True)


# Where the arrays are


def test_leaves_on_different_devices_are_compared():
    first, second, third, _ = jax.devices()
    a = [jax.device_put(x, first) for x in (jnp.ones(2), jnp.arange(3))]
    b = [jax.device_put(a[0], second), jax.device_put(a[1], third)]
    assert eqx.tree_equal(a, b) and eqx.tree_equal(b, a) and eqx.tree_equal(b, b, a)
    assert not eqx.tree_equal(a, [b[0], b[1] + 1])
    free = jnp.ones(4)  # computed wherever the others are
    assert eqx.tree_equal([free, *b], [free, *b])
    assert eqx.tree_equal([b[0], free, b[1]], [b[0], free, b[1]])
    assert eqx.tree_equal(np.ones(2, np.float32), b[0])
    keys = [jax.device_put(jax.random.key(0), device) for device in (first, second)]
    assert eqx.tree_equal([keys[0], a[0]], [keys[1], b[0]])


def test_differently_sharded_leaves_are_compared():
    mesh = jax.make_mesh((4,), ("x",))
    shardings = [
        jax.NamedSharding(mesh, jax.P("x")),
        jax.NamedSharding(mesh, jax.P()),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ]
    trees = [jax.device_put([jnp.arange(4), jnp.ones(8)], s) for s in shardings]
    assert eqx.tree_equal(*trees)
    assert eqx.tree_equal([trees[0][0], trees[2][1]], [trees[1][0], trees[0][1]])
    assert not eqx.tree_equal(trees[2], trees[0], [trees[1][0], trees[1][1] + 1])


# Other leaves and structures


def test_other_leaves_are_compared_by_the_truth_of_their_equality():
    class Odd:
        def __eq__(self, other):
            return "yes" if isinstance(other, Odd) else ""

        __hash__ = None

    assert eqx.tree_equal([Odd()], [Odd()]) is True
    assert eqx.tree_equal([Odd()], [1]) is False
    assert eqx.tree_equal([1], [1.0]) is True


def test_static_fields_count_as_structure():
    assert eqx.tree_equal(Affine(1), Affine(1)) is True
    assert eqx.tree_equal(Affine(1), Affine(1.0)) is True
    assert eqx.tree_equal(Affine(1), Affine(1, "other")) is False
    assert eqx.tree_equal([1], (1,)) is False
    assert eqx.tree_equal([1, [2]], [[1], 2]) is False
    constant = np.ones(())
    assert eqx.tree_equal(Affine(1, constant), Affine(1, 1.0)) is False
    assert eqx.tree_equal({"a": 1}, {"b": 1}) is False


STATICS = [1, 1.0, True, 0.0, -0.0, math.nan, np.float64(1.0), 1 + 0j, "1", b"1", None]
STATICS += [(1,), (1.0,), [1], [True], {"a": 1}, {"a": 1.0}, {1: 2}, {True: 2}, (0.0,)]
STATICS += [(-0.0,), frozenset({1}), frozenset({True}), slice(1), slice(1.0)]
STATICS += [jnp.float32, np.dtype("float32"), (1, (2, math.nan)), (1, (2.0, math.nan))]
STATICS += [
    np.ones(2),
    np.ones(2, np.int32),
    np.array([0.0, -0.0]),
    np.array([0.0, 0.0]),
]


@pytest.mark.parametrize("one", STATICS, ids=str)
def test_static_fields_are_equal_where_filter_jit_shares_a_program(one):
    compiled = eqx.filter_jit(lambda x: 1)
    compiled(Affine(1, one))
    for other in map(copy.deepcopy, STATICS):
        shares = compiled.explain(Affine(1, other)) is None
        a, b = [Affine(1, one), Affine(2, one)], [Affine(1, other), Affine(2, other)]
        assert eqx.tree_equal(a, b) is shares
        assert eqx.tree_equal(a, b, typematch=True) is shares
        assert (a[0] == b[0]) is shares
        assert (jtu.tree_structure(a) == jtu.tree_structure(b)) or not shares
        assert eqx.tree_equal(a, [*b, 1]) is False
        assert eqx.tree_equal(a, [b[1], b[0]]) is False
    assert eqx.tree_equal(Affine(1, [one, 2]), Affine(1, [one, 3])) is False


def test_keys_and_wrapped_callables_obey_the_same_rule():
    assert eqx.tree_equal({1: 2}, {1: 2}) is True
    assert eqx.tree_equal({1: 2}, {True: 2}) is False
    assert eqx.tree_equal({0.0: 2}, {-0.0: 2}) is False
    one, other = Affine(1, {1: "a"}), Affine(1, {True: "a"})
    assert one != other and eqx.tree_equal([one], [other]) is False
    assert eqx.tree_equal(one, one, other) is False
    assert eqx.tree_equal(one, copy.deepcopy(one), one) is True


@pytest.mark.filterwarnings("ignore:.*static:UserWarning")
def test_arrays_of_jax_in_static_fields_are_compared_by_identity():
    one, two = jnp.ones(2), jnp.ones(2)
    with pytest.warns(UserWarning, match="being set as static"):
        module, other = Affine(1, one), Affine(1, two)
    assert eqx.tree_equal(module, other) is False
    assert eqx.tree_equal(module, jtu.tree_map(lambda x: x, module)) is True


def test_no_tree_is_a_type_error_that_names_the_function():
    with pytest.raises(TypeError, match="tree_equal"):
        eqx.tree_equal()


SCALARS = st.sampled_from("? i1 i4 i8 u4 f2 f4 f8 c8 M8[s] M8[D]".split()).flatmap(
    lambda kind: hnp.from_dtype(np.dtype(kind))
)


@given(SCALARS, SCALARS)
def test_scalars_of_numpy_are_compared_as_arrays_are(a, b):
    for other in (a, b, copy.copy(a)):
        same = a.dtype == other.dtype
        expected = same and bool(np.all(np.asarray(a) == np.asarray(other)))
        assert eqx.tree_equal([a], [other]) is expected
        assert eqx.tree_equal([a], [other], typematch=True) is expected
        assert eqx.tree_equal([np.asarray(a)], [np.asarray(other)]) is expected


def test_many_scalars_of_numpy_take_little_longer_than_numbers():
    def seconds(make):
        one, other = ([make(i) for i in range(20_000)] for _ in range(2))
        times = []
        for _ in range(5):
            start = time.process_time()
            assert eqx.tree_equal(one, other)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(np.float32) < 2.5 * seconds(float)  # it was 4 times as long
