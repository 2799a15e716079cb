import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def test_draws_are_those_of_the_contract(k0) -> None:
    assert nn.Dropout()(jnp.ones(6), key=k0).tolist() == [0, 0, 2, 2, 0, 2]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kept_elements_are_those_of_bernoulli_and_scaled(p, key) -> None:
    x = jnp.linspace(1, 2, 60).reshape(3, 20)
    mask = jax.random.bernoulli(key, 1 - p, x.shape)
    out = nn.Dropout(p)(x, key=key)
    np.testing.assert_array_equal(out != 0, mask)
    np.testing.assert_allclose(out, np.where(mask, x / (1 - p), 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("layer", "kwargs"),
    [
        (nn.Dropout(0.5, inference=True), {}),
        (nn.Dropout(0.5, inference=True), {"key": jax.random.key(0)}),
        (nn.Dropout(0.5), {"inference": True}),
        (nn.Dropout(0.0), {}),
        (nn.Dropout(0), {"inference": False}),
    ],
)
def test_inference_returns_the_object_it_was_given(layer, kwargs) -> None:
    x = np.ones(3)
    assert layer(x, **kwargs) is x


def test_argument_wins_over_the_field(key) -> None:
    layer = nn.Dropout(0.5, inference=True)
    assert (layer(jnp.ones(50), key=key, inference=False) == 0).any()


def test_key_is_needed_outside_of_inference() -> None:
    with pytest.raises(RuntimeError, match=r"needs a `key`.*`inference=True`"):
        nn.Dropout()(jnp.ones(3))
    with pytest.raises(RuntimeError, match="`key`"):
        nn.Dropout(inference=True)(jnp.ones(3), inference=False)


@pytest.mark.parametrize(
    "p", [0.5, jnp.float32(0.5), np.float32(0.5), 1, jnp.asarray(1)]
)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.float32),
        (jnp.complex64, jnp.complex64),
        (jnp.int8, jnp.float32),
    ],
)
def test_dtype_is_that_of_the_input(p, dtype, out_dtype, key, strict) -> None:
    assert nn.Dropout(p)(jnp.ones(3, dtype), key=key).dtype == out_dtype


@pytest.mark.parametrize("p", [1, 1.0, jnp.float32(1.0)])
def test_p_of_one_gives_zeros_and_zero_gradients(p, key) -> None:
    layer = nn.Dropout(p)
    x = jnp.ones(3)
    assert layer(x, key=key).tolist() == [0, 0, 0]
    assert jax.grad(lambda x: layer(x, key=key).sum())(x).tolist() == [0, 0, 0]


def test_gradient_is_the_scaled_mask_and_none_for_p(key) -> None:
    x = jnp.arange(1.0, 5.0)
    mask = jax.random.bernoulli(key, 0.75, x.shape)

    def f(x, p):
        return nn.Dropout(p)(x, key=key).sum()

    grad_x, grad_p = jax.grad(f, (0, 1))(x, jnp.float32(0.25))
    np.testing.assert_allclose(grad_x, mask / 0.75, rtol=1e-6)
    assert grad_p == 0


@pytest.mark.parametrize("p", [-0.1, 1.5, -1, 2, float("nan")])
def test_p_out_of_range_is_an_error(p, key) -> None:
    with pytest.raises(ValueError, match="`p` between 0 and 1; got"):
        nn.Dropout(p)
    layer = eqx.tree_at(lambda d: d.p, nn.Dropout(), p)
    with pytest.raises(ValueError, match="`p` between 0 and 1; got"):
        layer(jnp.ones(3), key=key)


def test_p_and_inference_are_leaves() -> None:
    assert jax.tree.leaves(nn.Dropout(0.25, True)) == [0.25, True]


def test_deterministic_is_an_old_name_of_inference() -> None:
    x = jnp.ones(3)
    with pytest.warns(UserWarning, match="pass `inference` instead") as record:
        layer = nn.Dropout(0.5, deterministic=True)
    assert layer.inference is True and layer.deterministic is True
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="pass `inference` instead") as record:
        assert nn.Dropout()(x, deterministic=True) is x
    assert record[0].filename == __file__
    changed = eqx.tree_at(lambda d: d.deterministic, nn.Dropout(), True)
    assert changed.inference is True


def test_traced_flag_is_an_error_but_not_under_filter_jit(key) -> None:
    def f(layer, x):
        return layer(x, key=key)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(f)(nn.Dropout(), jnp.ones(3))
    out = eqx.filter_jit(f)(nn.Dropout(), jnp.ones(3))
    assert (out == f(nn.Dropout(), jnp.ones(3))).all()


@pytest.mark.parametrize("axes", [(1, 2), (-1, 1), [0], (0, 1, 2)])
def test_draws_are_shared_along_broadcast_axes(axes, key) -> None:
    out = nn.Dropout(broadcast_axes=axes)(jnp.ones((4, 3, 5)), key=key)
    first = [slice(None)] * 3
    shape = [4, 3, 5]
    for axis in axes:
        first[axis] = slice(0, 1)
        shape[axis] = 1
    assert (out == out[tuple(first)]).all()
    mask = jax.random.bernoulli(key, 0.5, shape)
    assert (out[tuple(first)] == 2 * mask).all()


def test_number_of_numpy_does_not_change_the_dtype(key, strict) -> None:
    x = jnp.ones(4, jnp.bfloat16)
    out = nn.Dropout(np.float64(0.5))(x, key=key)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, nn.Dropout(0.5)(x, key=key))


@pytest.mark.parametrize("axes", [1, "a", ["a"]])
def test_broadcast_axes_are_a_sequence_of_ints(axes, without_type_checks) -> None:
    with pytest.raises(ValueError, match=r"sequence of ints as `broadcast_axes`; got"):
        nn.Dropout(broadcast_axes=axes)


@pytest.mark.parametrize("p", ["a", None, [0.5]])
def test_p_that_is_not_a_number_is_an_error(p, without_type_checks) -> None:
    with pytest.raises(ValueError, match="Dropout takes a `p` between 0 and 1; got"):
        nn.Dropout(p)


def test_missing_broadcast_axis_is_an_error(key) -> None:
    with pytest.raises(eqx.ShapeError, match=r"shape \(3,\), which has no axis 1"):
        nn.Dropout(broadcast_axes=(1,))(jnp.ones(3), key=key)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("p", [0.001, 0.1])
def test_p_in_half_precision_is_the_probability(p, dtype, key) -> None:
    p, n = jnp.asarray(p, dtype), 1_000_000
    dropped = nn.Dropout(p)(jnp.ones(n, dtype), key=key) == 0
    deviation = (float(p) * (1 - float(p)) / n) ** 0.5
    assert abs(float(dropped.mean(dtype=jnp.float32)) - float(p)) < 5 * deviation
