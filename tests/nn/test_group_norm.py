import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 2), (3, 2, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_is_that_of_the_formula(shape, affine, x64, draw) -> None:
    norm = nn.InstanceNorm(3, eps=1e-3, channelwise_affine=affine)
    x, weight, bias = draw(*shape), draw(3), draw(3)
    spatial = tuple(range(1, len(shape)))
    mean = np.mean(x, spatial, keepdims=True)
    expected = (x - mean) / np.sqrt(np.var(x, spatial, keepdims=True) + 1e-3)
    if affine:
        norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (weight, bias))
        spread = (3,) + (1,) * len(spatial)
        expected = expected * weight.reshape(spread) + bias.reshape(spread)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-9, atol=1e-12)


def test_instance_norm_is_a_group_norm_of_single_channels(draw) -> None:
    x = draw(4, 3, 5)
    expected = nn.GroupNorm(4, 4)(x)
    np.testing.assert_allclose(nn.InstanceNorm(4)(x), expected, rtol=1e-5, atol=1e-6)
    plain = nn.InstanceNorm(channelwise_affine=False)
    assert plain.channels is plain.weight is plain.bias is None
    np.testing.assert_allclose(plain(x), expected, rtol=1e-5, atol=1e-6)


def test_instance_norm_computes_in_float32_at_least() -> None:
    x = jnp.array([[1000.0, 1001, 3000]], jnp.float16)
    out = nn.InstanceNorm(1, dtype=jnp.float16)(x)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(out, (wide - wide.mean()) / wide.std(), atol=2e-3)
    assert out.dtype == jnp.float16


def test_instance_norm_passes_a_state_on(draw) -> None:
    y, state = nn.InstanceNorm(2)(draw(2, 3), "state")
    assert y.shape == (2, 3) and state == "state"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (4, 5),
            r"InstanceNorm takes `x` of shape \(3, any\), but was given .*\(4, 5\)",
        ),
        ((3,), r"more than one number in each channel.*\(3,\)"),
        ((3, 1, 1), r"more than one number in each channel.*\(3, 1, 1\)"),
        ((2, 3, 5), "one extra leading axis"),
    ],
)
def test_wrong_shape_of_instance_norm_is_an_error(shape, message) -> None:
    with pytest.raises(eqx.ShapeError, match=message):
        nn.InstanceNorm(3)(jnp.ones(shape))


def test_channels_must_be_a_multiple_of_the_groups() -> None:
    with pytest.raises(ValueError, match="multiple of `groups`; got 4, with 3 groups"):
        nn.GroupNorm(3, 4)
    norm = nn.GroupNorm(3, channelwise_affine=False)
    with pytest.raises(eqx.ShapeError, match=r"multiple of its 3 groups.*\(4, 2\)"):
        norm(jnp.ones((4, 2)))


def test_instance_norm_needs_its_channels() -> None:
    with pytest.raises(ValueError, match="InstanceNorm needs to know `channels`"):
        nn.InstanceNorm()
    with pytest.raises(ValueError, match="int >= 0 as `channels`; got -1"):
        nn.InstanceNorm(-1)


def test_instance_norm_trains(draw) -> None:
    grads = eqx.filter_grad(lambda n, x: (jax.vmap(n)(x) ** 3).sum())(
        nn.InstanceNorm(2), draw(4, 2, 3)
    )
    assert grads.weight.any() and grads.bias.any()


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)])
def test_group_of_one_number_is_refused(shape) -> None:
    message = r"GroupNorm takes .* more than one number in each group, .*shape \(4,"
    with pytest.raises(eqx.ShapeError, match=message):
        nn.GroupNorm(4, 4)(jnp.ones(shape))
    assert nn.GroupNorm(2, 4)(jnp.ones(shape)).shape == shape
    assert nn.GroupNorm(4, 4)(jnp.ones((4, 2))).shape == (4, 2)
