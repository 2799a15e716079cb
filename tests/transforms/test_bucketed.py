"""`bucketed`: one compilation for each bucket, and the results of the true lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import equinox_like as eqx


def is_true(x, n, axis=0):
    """Which elements along an axis are within the true length."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return (jnp.arange(x.shape[axis]) < n).reshape(shape)


def masked_sum(x, lengths):
    return jnp.where(is_true(x, lengths["x"][0]), x, 0).sum(axis=0)


def counted(fun, axes, **options):
    traced = eqx.debug.assert_max_traces(fun, max_traces=None)
    return eqx.bucketed(traced, axes, **options), traced


def test_each_bucket_is_compiled_once():
    f, traced = counted(masked_sum, {"x": {0: [4, 8]}})
    for length in (1, 4, 2, 3, 5, 8, 6, 4):
        np.testing.assert_allclose(f(np.ones((length, 2))), [length, length])
    assert eqx.debug.get_num_traces(traced) == 2


total = eqx.bucketed(masked_sum, {"x": {0: "powers-of-two"}})
largest = eqx.bucketed(
    lambda x, lengths: jnp.where(
        is_true(x, lengths["x"][0]) & is_true(x, lengths["x"][1], 1), x, -jnp.inf
    ).max(),
    {"x": {0: [3, 9], 1: [9]}},
)


# Each number of columns is compiled for each bucket of rows.
@pytest.mark.filterwarnings("ignore::equinox_like.RetraceWarning")
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([np.asarray, jnp.asarray]))
def test_masked_reductions_are_those_of_the_arrays_themselves(n, m, asarray):
    x = asarray(np.random.default_rng(n * m).normal(size=(n, m)).astype(np.float32))
    np.testing.assert_allclose(total(x), x.sum(axis=0), rtol=1e-5, atol=1e-6)
    assert largest(x) == x.max()


def test_sizes_are_powers_of_two_a_sequence_or_a_function():
    for sizes, expected in (
        ("powers-of-two", [1, 1, 2, 4, 4, 8]),
        ([8, 4], [4, 4, 4, 4, 4, 8]),
        ([*np.array([4, 8])], [4, 4, 4, 4, 4, 8]),
        (lambda n: n + 1, [1, 2, 3, 4, 5, 6]),
    ):
        f = eqx.bucketed(masked_sum, {"x": {0: sizes}})
        found = [f.pad(np.ones(n))[0][0].shape[0] for n in range(6)]
        assert found == expected


def test_padded_elements_have_the_value_of_fill():
    f = eqx.bucketed(lambda x, lengths: x, {"x": {0: [4]}}, fill=-1)
    assert f(np.ones(2, np.int32)).tolist() == [1, 1, -1, -1]
    assert f(jnp.ones(2)).tolist() == [1, 1, -1, -1]
    f = eqx.bucketed(lambda x, lengths: x, {"x": {0: [4]}}, fill=0.1)
    assert f(jnp.ones(2, jnp.bfloat16)).tolist() == [1, 1, 0.10009765625, 0.10009765625]
    f = eqx.bucketed(lambda x, lengths: x, {"x": {0: [4]}}, fill=-np.inf)
    assert f(jnp.ones(2, jnp.float16)).tolist() == [1, 1, -np.inf, -np.inf]


@pytest.mark.parametrize(
    "fill, dtype",
    [
        (-1, "uint8"),
        (300, "int8"),
        (np.nan, "int32"),
        (0.5, "int32"),
        (2, "bool"),
        (1j, "float32"),
        (1e9, "float16"),
        (-np.inf, "float8_e4m3fn"),
        (np.nan, "float4_e2m1fn"),
        (None, "float32"),
        (np.zeros(3), "float32"),
    ],
)
@pytest.mark.parametrize("length", [2, 4])
def test_fill_that_a_dtype_does_not_hold_is_refused_by_path(fill, dtype, length):
    f = eqx.bucketed(lambda x, lengths: x, {"x": {0: [4]}}, fill=fill)
    with pytest.raises(ValueError, match=rf"`x\['a'\]` is .*=.*dtype {dtype} does not"):
        f({"a": np.ones(length, dtype)})


def test_structs_stand_for_arrays_when_a_call_is_explained():
    f = eqx.bucketed(masked_sum, {"x": {0: [4, 8]}})
    f(np.ones(3, np.float32))
    assert f.explain(jax.ShapeDtypeStruct((2,), jnp.float32)) is None
    text = str(f.explain(jax.ShapeDtypeStruct((5,), jnp.float32)))
    assert "`x` was an array float32[4], and is now float32[8]." in text
    assert f.pad(jax.ShapeDtypeStruct((5,), jnp.int32))[0][0].shape == (8,)


def test_outputs_are_cropped_where_it_is_asked_for():
    def fun(x, lengths):
        return 2 * x, x.shape[0]

    f = eqx.bucketed(
        fun, {"x": {0: [8]}}, crop=lambda out, n: (out[0][: n["x"][0]], out[1])
    )
    doubled, size = f(np.ones(3))
    assert doubled.tolist() == [2, 2, 2] and size == 8


def test_argument_may_be_a_tree_with_leaves_that_are_no_arrays():
    def fun(rate, lengths, *, batch):
        n = lengths["batch"][0]
        return rate * jnp.where(is_true(batch["x"], n), batch["x"], 0).sum(), n

    f = eqx.bucketed(fun, {"batch": {0: [4]}})
    batch = {"x": np.ones(3), "y": jnp.zeros((3, 2)), "name": "train"}
    value, length = f(2.0, batch=batch)
    assert value == 6 and length == 3


def test_lengths_may_stand_before_other_parameters():
    f = eqx.bucketed(lambda x, lengths, y: (lengths["x"][0], y), {"x": {0: [4]}})
    assert f(np.ones(3), 7) == (3, 7)
    with pytest.raises(TypeError, match="lengths"):
        f(np.ones(3), 7, lengths={})


def test_options_of_filter_jit_are_kept():
    def step(total, x, lengths):
        return total + masked_sum(x, lengths)

    f = eqx.bucketed(eqx.filter_jit(step, donate=("total",)), {"x": {0: [4]}})
    before = jnp.zeros(2)
    assert f(before, np.ones((3, 2))).tolist() == [3, 3]
    assert before.is_deleted()


def test_gradients_and_vmap_go_through():
    f = eqx.bucketed(masked_sum, {"x": {0: [4]}})
    x = jnp.arange(3.0)
    assert jax.grad(lambda x: f(x * x))(x).tolist() == [0, 2, 4]
    assert jax.vmap(f)(jnp.ones((5, 3))).tolist() == [3] * 5
    assert jax.jit(f)(x) == 3


def test_method_is_bucketed():
    class Model(eqx.Module):
        weight: jax.Array

        def total(self, x, lengths):
            return self.weight * masked_sum(x, lengths)

        total = eqx.bucketed(total, {"x": {0: [4]}})

    assert Model(jnp.asarray(2.0)).total(np.ones(3)) == 6


def test_explain_tells_of_a_new_bucket():
    f = eqx.bucketed(masked_sum, {"x": {0: [4, 8]}})
    f(np.ones(3))
    assert f.explain(np.ones(2)) is None
    text = str(f.explain(np.ones(5)))
    assert "`x` was an array float32[4], and is now float32[8]." in text
    assert "Each shape is compiled separately" in text


def test_length_beyond_the_last_bucket_is_refused_by_path():
    f = eqx.bucketed(masked_sum, {"x": {0: [4, 8]}})
    with pytest.raises(ValueError, match=r"`x\['a'\]` has length 9 along axis 0") as e:
        f({"a": np.ones(9)})
    assert "the largest bucket is 8" in str(e.value)
    f = eqx.bucketed(masked_sum, {"x": {0: lambda n: n - 1}})
    with pytest.raises(ValueError, match=r"`x` has length 9 .* largest bucket is 8"):
        f(np.ones(9))


def test_arrays_of_one_argument_have_one_length():
    f = eqx.bucketed(lambda x, lengths: x, {"x": {0: [4]}})
    with pytest.raises(
        ValueError, match=r"`x\['a'\]` has length 3, and `x\['b'\]` has 2"
    ):
        f({"a": np.ones(3), "b": np.ones(2)})


@pytest.mark.parametrize(
    "value, message",
    [
        (lambda: np.ones(()), r"`x\[0\]` is to be padded along axis 0, but has shape"),
        (
            lambda: jax.random.key(0),
            r"`x\[0\]` is to be padded along axis 0, but has shape",
        ),
        (
            lambda: jax.random.split(jax.random.key(0), 3),
            r"`x\[0\]` is padded with `fill=0`, which its dtype key<fry> does not hold",
        ),
        (lambda: np.ma.zeros(3), r"`x\[0\]` is a masked array: .* `x\[0\].filled\(\)`"),
        (lambda: 1.0, "`x` is to be padded, but holds no array"),
    ],
)
def test_what_cannot_be_padded_is_refused_by_path(value, message):
    f = eqx.bucketed(lambda x, lengths: x, {"x": {0: [4]}})
    with pytest.raises(ValueError, match=message):
        f([value()])


def test_function_without_lengths_is_refused():
    with pytest.raises(TypeError, match="no parameter `lengths`"):
        eqx.bucketed(lambda x: x, {"x": {0: [4]}})


def test_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match=r"names \['y'\].* are \['x'\]"):
        eqx.bucketed(masked_sum, {"y": {0: [4]}})
    with pytest.raises(ValueError, match=r"names \['lengths'\].* are \['x'\]"):
        eqx.bucketed(masked_sum, {"lengths": {0: [4]}})


@pytest.mark.parametrize("sizes", [[], [0], "powers", 4, [1.5]])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"`axes\['x'\]\[0\]` is .*; sizes are"):
        eqx.bucketed(masked_sum, {"x": {0: sizes}})


def test_copies_by_flattening_are_equal():
    f = eqx.bucketed(masked_sum, {"x": {0: [4, 8]}})
    leaves, treedef = jax.tree.flatten(f)
    assert treedef == jax.tree.structure(jax.tree.unflatten(treedef, leaves))
    assert eqx.filter_jit(lambda f, x: f(x))(f, np.ones(3)) == 3
