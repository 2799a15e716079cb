import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn


def reference(x, eps=1e-5, weight=1.0, bias=0.0):
    """The formula of Ba et al. 2016, in double precision."""
    x = np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    mean = x.sum() / x.size
    variance = (np.abs(x - mean) ** 2).sum() / x.size
    return np.asarray(weight) * (x - mean) / np.sqrt(variance + eps) + np.asarray(bias)


@pytest.mark.parametrize(("shape", "eps"), [((), 0.1), ((5,), 1e-5), ((2, 3), 0.1)])
def test_result_is_that_of_the_formula(shape, eps, x64, draw) -> None:
    affine = draw(*shape), draw(*shape)
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), nn.LayerNorm(shape, eps), affine)
    x = 3 + 2 * draw(*shape)
    expected = reference(x, eps, norm.weight, norm.bias)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-11)
    check_grads(lambda n, x: n(x), (norm, x), order=1, modes=["rev"])


def test_parameters_start_as_ones_and_zeros() -> None:
    norm = nn.LayerNorm((2, 3), dtype=jnp.float16)
    assert (norm.weight == jnp.ones((2, 3))).all() and norm.weight.dtype == jnp.float16
    assert (norm.bias == jnp.zeros((2, 3))).all() and norm.bias.dtype == jnp.float16
    assert nn.LayerNorm(3).shape == (3,)
    norm = nn.LayerNorm([3], use_weight=False, use_bias=False)
    assert norm.weight is None and norm.bias is None
    x = jnp.arange(3.0)
    np.testing.assert_allclose(norm(x), reference(x), rtol=1e-5)


def test_default_dtype_is_that_of_the_moment(x64) -> None:
    assert nn.LayerNorm(3).weight.dtype == jnp.float64


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_float32(dtype) -> None:
    x = jnp.asarray([1000.0, 1001.0, 1002.0, 3000.0], dtype)
    out = nn.LayerNorm(4)(x)
    assert out.dtype == dtype
    # In float16 the squares would be infinite.
    expected = jnp.asarray(reference(x.astype(jnp.float32)), dtype)
    assert (out == expected).all()


def test_integers_give_integers() -> None:
    out = nn.LayerNorm(4)(jnp.array([0, 0, 0, 100]))
    assert out.dtype == jnp.int32 and out.tolist() == [0, 0, 0, 1]


def test_complex_numbers_have_a_real_variance() -> None:
    x = jnp.array([1 + 2j, 3 - 1j, -2 + 0.5j])
    out = nn.LayerNorm(3)(x)
    assert out.dtype == jnp.complex64
    np.testing.assert_allclose(out, reference(x), rtol=1e-5)


def test_constant_input_has_finite_value_and_gradient() -> None:
    value, grad = jax.value_and_grad(lambda x: nn.LayerNorm(3)(x).sum())(jnp.ones(3))
    assert value == 0 and jnp.isfinite(grad).all()


@pytest.mark.parametrize("state", [None, 3, "state"])
def test_state_is_returned_if_it_was_passed(state) -> None:
    norm = nn.LayerNorm(3)
    x = jnp.arange(3.0)
    out, same = norm(x, state)
    assert same is state and (out == norm(x)).all()
    assert norm(x, state=state)[1] is state


@pytest.mark.parametrize("flag", [True, False])
def test_elementwise_affine_sets_both_flags_and_warns(flag) -> None:
    with pytest.warns(UserWarning, match="`use_weight` and `use_bias`") as record:
        norm = nn.LayerNorm(3, elementwise_affine=flag)
    assert norm.use_weight is flag and norm.use_bias is flag
    assert (norm.weight is not None) is flag and (norm.bias is not None) is flag
    assert record[0].filename == __file__


def test_negative_size_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="LayerNorm takes an int >= 0 as `shape`; got -1"
    ):
        nn.LayerNorm((2, -1))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_shape_may_be_a_numpy_array(norm, without_type_checks) -> None:
    assert norm(np.array([2, 3])).shape == (2, 3)
    assert norm(np.int64(3)).shape == (3,)


def test_weight_of_another_size_decides_what_is_taken() -> None:
    norm = nn.LayerNorm(3)
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (jnp.ones(7), jnp.zeros(7)))
    assert norm(jnp.ones(7)).shape == (7,)


def weight_of(norm, scale):
    return eqx.tree_at(
        "layer.weight" if hasattr(norm, "layer") else "weight",
        norm,
        replace_fn=lambda w: scale * w,
    )


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm((4, 2)),
    "RMSNorm": lambda: nn.RMSNorm((4, 2)),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "InstanceNorm": lambda: nn.InstanceNorm(4),
    "BatchNorm": lambda: nn.make_with_state(nn.BatchNorm)(2),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_whose_squares_are_infinite_give_nan_and_not_zeros(name, dtype) -> None:
    norm = NORMS[name]()

    @eqx.filter_jit
    def run(norm, x):
        return norm[0](x, norm[1])[0] if isinstance(norm, tuple) else norm(x)

    x = jnp.arange(1.0, 9.0, dtype=dtype).reshape(4, 2)
    expected = run(norm, x * 1e5).astype("float32")
    assert jnp.abs(expected).max() > 0.1
    large = run(norm, x * jnp.asarray(1e17, dtype)).astype("float32")
    np.testing.assert_allclose(large, expected, rtol=0.02, atol=0.02)
    assert jnp.isnan(run(norm, x * jnp.asarray(1e30, dtype))).all()
    grad = eqx.filter_grad(lambda x: run(norm, x).sum())(x * jnp.asarray(1e30, dtype))
    assert jnp.isnan(grad).all()


def test_weights_whose_squares_are_infinite_give_nan_and_not_zeros(key) -> None:
    linear = nn.Linear(2, 2, use_bias=False, key=key)
    make = nn.make_with_state(lambda: nn.SpectralNorm(linear, "weight", key=key))
    spectral, state = make()
    x = jnp.ones(2)
    assert jnp.isnan(weight_of(spectral, 1e25)(x, state)[0]).all()
    weight = nn.WeightNorm(linear)
    np.testing.assert_allclose(weight_of(weight, 1e15)(x), weight(x), rtol=1e-5)
    assert jnp.isnan(weight_of(weight, 1e25)(x)).all()
