import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn


def test_first_values_and_result_are_those_of_the_contract(k0) -> None:
    layer = nn.Linear(3, 2, key=k0)
    weight = [0.3952703, -0.3667575, -0.3150276]
    np.testing.assert_allclose(layer.weight[0], weight, atol=1e-7)
    np.testing.assert_allclose(layer.bias, [-0.5689281, -0.5532272], atol=1e-7)
    out = layer(jnp.ones(3))
    np.testing.assert_allclose(out, [-0.8554429, -1.0906777], atol=1e-5)


def test_first_values_in_bfloat16_and_complex64(k0) -> None:
    half = nn.Linear(3, 2, dtype=jnp.bfloat16, key=k0).weight[0]
    assert half.dtype == jnp.bfloat16
    assert half.astype(float).tolist() == [0.4375, -0.162109375, 0.484375]
    weight = nn.Linear(3, 2, dtype=jnp.complex64, key=k0).weight[0, :2]
    assert weight.dtype == jnp.complex64
    expected = [-0.250893 - 0.456926j, 0.332666 - 0.180148j]
    np.testing.assert_allclose(weight, expected, atol=1e-6)


def test_first_values_are_uniform_up_to_the_inverse_root_of_the_inputs(k0) -> None:
    layer = nn.Linear(5, 4, key=k0)
    kw, kb = jax.random.split(k0, 2)
    lim = 1 / np.sqrt(5)
    weight = jax.random.uniform(kw, (4, 5), minval=-lim, maxval=lim)
    bias = jax.random.uniform(kb, (4,), minval=-lim, maxval=lim)
    assert (layer.weight == weight).all() and (layer.bias == bias).all()
    unbiased = nn.Linear(5, 4, use_bias=False, key=k0)
    assert (unbiased.weight == weight).all() and unbiased.bias is None


def test_bias_without_inputs_is_uniform_up_to_one(k0) -> None:
    _, kb = jax.random.split(k0, 2)
    bias = jax.random.uniform(kb, (4,), minval=-1.0, maxval=1.0)
    assert (nn.Linear(0, 4, key=k0).bias == bias).all()


def test_raw_and_typed_keys_draw_the_same() -> None:
    raw = nn.Linear(3, 2, key=jax.random.PRNGKey(7))
    assert eqx.tree_equal(raw, nn.Linear(3, 2, key=jax.random.key(7)))


def test_result_is_that_of_the_formula(x64, k0) -> None:
    layer = nn.Linear(3, 2, key=k0)
    x = jax.random.normal(k0, (3,))
    assert layer.weight.dtype == jnp.float64
    expected = np.asarray(layer.weight) @ np.asarray(x) + np.asarray(layer.bias)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-14)
    check_grads(lambda layer, x: layer(x), (layer, x), order=1, modes=["rev"])


@pytest.mark.parametrize(
    ("sizes", "weight_shape", "in_shape", "out_shape"),
    [
        (("scalar", 2), (2, 1), (), (2,)),
        ((3, "scalar"), (1, 3), (3,), ()),
        (("scalar", "scalar"), (1, 1), (), ()),
        ((0, 2), (2, 0), (0,), (2,)),
        ((3, 0), (0, 3), (3,), (0,)),
        ((1, 1), (1, 1), (1,), (1,)),
    ],
)
def test_sizes_may_be_scalar_or_zero(
    sizes, weight_shape, in_shape, out_shape, key
) -> None:
    layer = nn.Linear(*sizes, key=key)
    assert (layer.in_features, layer.out_features) == sizes
    assert layer.weight.shape == weight_shape
    assert layer.bias is not None and layer.bias.shape == weight_shape[:1]
    x = jnp.full(in_shape, 2.0)
    out = layer(x)
    assert out.shape == out_shape
    expected = layer.weight @ x.reshape(weight_shape[1:]) + layer.bias
    np.testing.assert_allclose(out, expected.reshape(out_shape), rtol=1e-6)


def test_numbers_and_numpy_arrays_are_inputs_too(key) -> None:
    layer = nn.Linear("scalar", 2, key=key)
    assert (layer(2.0) == layer(jnp.asarray(2.0))).all()
    layer = nn.Linear(3, 2, key=key)
    assert (layer(np.ones(3, np.float32)) == layer(jnp.ones(3))).all()


def test_list_is_no_input(key, without_type_checks) -> None:
    with pytest.raises(TypeError, match=r"Linear takes an array as `x`; got a list"):
        nn.Linear(3, 2, key=key)([1.0, 2.0, 3.0])  # pyright: ignore


def test_dtypes_promote_as_in_jax(key) -> None:
    layer = nn.Linear(3, 2, key=key)
    assert layer(jnp.ones(3, jnp.float16)).dtype == jnp.float32
    half = nn.Linear(3, 2, dtype="bfloat16", key=key)
    assert half(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
    assert half(jnp.ones(3, jnp.float32)).dtype == jnp.float32


def test_integer_dtype_is_an_error(key) -> None:
    with pytest.raises(ValueError, match="dtype"):
        nn.Linear(3, 2, dtype=jnp.int32, key=key)


def test_key_is_required() -> None:
    with pytest.raises(TypeError, match="key"):
        nn.Linear(3, 2)  # pyright: ignore


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 2), r"Linear takes an int >= 0 as `in_features`; got -1"),
        ((3, -2), r"Linear takes an int >= 0 as `out_features`; got -2"),
        ((3.0, 2), r"Linear takes an int >= 0 as `in_features`; got 3\.0"),
        (("vector", 2), r"int >= 0 or \"scalar\" as `in_features`; got 'vector'"),
    ],
)
def test_wrong_size_is_an_error(sizes, message, key, without_type_checks) -> None:
    with pytest.raises(ValueError, match=message):
        nn.Linear(*sizes, key=key)


def test_numpy_size_becomes_an_int(key, without_type_checks) -> None:
    assert type(nn.Linear(np.int64(3), 2, key=key).in_features) is int  # pyright: ignore


def test_weight_may_be_replaced_by_one_of_another_size(key) -> None:
    layer = eqx.tree_at(lambda m: m.weight, nn.Linear(3, 5, key=key), jnp.ones((5, 7)))
    assert layer(jnp.ones(7)).shape == (5,)
    with pytest.raises(
        eqx.ShapeError, match=r"shape \(7,\), but was given shape \(3,\)"
    ):
        layer(jnp.ones(3))


def test_bias_may_be_replaced_by_none(key) -> None:
    layer = nn.Linear(3, 2, key=key)
    unbiased = eqx.tree_at(lambda m: m.bias, layer, None)
    assert (unbiased(jnp.ones(3)) == layer.weight @ jnp.ones(3)).all()


def test_weight_may_be_any_object_that_multiplies(key) -> None:
    class Doubling:
        def __matmul__(self, x):
            return 2 * x

    layer = eqx.tree_at(lambda m: m.weight, nn.Linear(2, 2, key=key), Doubling())
    layer = eqx.tree_at(lambda m: m.bias, layer, None)
    assert layer(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_identity_returns_the_object_it_was_given() -> None:
    layer = nn.Identity(3, anything=4)
    x = object()
    assert layer(x) is x
    assert layer(x, key=jax.random.key(0)) is x


def test_identities_are_equal_and_have_no_leaves() -> None:
    assert nn.Identity(1) == nn.Identity(2, use_bias=True)
    assert hash(nn.Identity(1)) == hash(nn.Identity())
    assert jax.tree.leaves(nn.Identity(1)) == []


def test_bias_that_is_put_in_is_added(build, draw) -> None:
    layer = build(nn.Linear, 3, 2, use_bias=False)
    bias = draw(2)
    with_bias = eqx.tree_at(lambda m: m.bias, layer, bias, is_leaf=lambda x: x is None)
    x = draw(3)
    np.testing.assert_allclose(with_bias(x), layer(x) + bias, rtol=1e-6)
    assert with_bias.use_bias is False
