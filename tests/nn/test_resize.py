import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def linear_in_numpy(row, number, antialias):
    """Weights of a triangle around each new point; those that there are sum to 1."""
    n = len(row)
    width = max(n / number, 1) if antialias else 1
    at = (np.arange(number) + 0.5) * n / number - 0.5
    weights = np.maximum(1 - abs(at[:, None] - np.arange(n)) / width, 0)
    return weights / weights.sum(axis=1, keepdims=True) @ row


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("number", [1, 3, 5, 8, 15])
def test_linear_is_that_of_the_formula(number, antialias, draw) -> None:
    x = np.asarray(draw(2, 5), np.float32)
    y = nn.resize(x, size=number, method="linear", antialias=antialias)
    expected = [linear_in_numpy(row, number, antialias) for row in x]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [2, 5, 7, 10])
def test_nearest_takes_the_point_below_the_centre(number, draw) -> None:
    x = draw(2, 5)
    index = np.floor((np.arange(number) + 0.5) * 5 / number).astype(int)
    assert (nn.resize(x, size=number) == x[:, index]).all()


@pytest.mark.parametrize(
    "method", ["nearest", "linear", "cubic", "lanczos3", "lanczos5"]
)
@pytest.mark.parametrize("antialias", [True, False])
def test_it_is_that_of_jax(method, antialias, draw) -> None:
    x = draw(3, 5, 4).astype(jnp.float32)
    y = nn.resize(x, size=(3, 9), method=method, antialias=antialias)
    expected = jax.image.resize(x, (3, 3, 9), method, antialias)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    layer = nn.Upsample(size=(3, 9), method=method, antialias=antialias)
    assert (layer(x) == y).all() and jax.tree.leaves(layer) == []


@pytest.mark.parametrize(
    ("scale", "shape"),
    [(2, (8, 10)), (0.5, (2, 2)), ((1.5, 1), (6, 5)), ([2, 0.3], (8, 1)), (1, (4, 5))],
)
def test_scale_multiplies_the_sizes(scale, shape) -> None:
    assert nn.resize(jnp.ones((3, 4, 5)), scale=scale).shape == (3, *shape)
    assert nn.Upsample(scale)(jnp.ones((3, 4, 5))).shape == (3, *shape)


def test_scaled_sizes_are_those_of_exact_numbers() -> None:
    assert nn.resize(jnp.ones((1, 100)), scale=0.29).shape == (1, 29)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32(dtype, strict, draw) -> None:
    x = (draw(2, 9) * 100).astype(dtype)
    y = nn.resize(x, size=7, method="cubic")
    assert y.dtype == dtype
    expected = nn.resize(x.astype(jnp.float32), size=7, method="cubic")
    # Rounded once.
    assert (y == expected.astype(dtype)).all()


def test_integers_stay_with_nearest_and_become_floats_else(strict) -> None:
    x = jnp.arange(4, dtype=jnp.uint8)[None]
    assert nn.resize(x, scale=2).dtype == jnp.uint8
    assert nn.resize(x, scale=2, method="linear").dtype == jnp.float32


def test_linear_has_its_transpose_as_gradient(draw) -> None:
    x, y = draw(2, 5), draw(2, 8)
    f = lambda x: nn.resize(x, size=8, method="linear")  # noqa: E731
    (back,) = jax.vjp(f, x)[1](y)
    np.testing.assert_allclose((f(x) * y).sum(), (x * back).sum(), rtol=1e-5)


@pytest.mark.parametrize("make", [nn.resize, nn.Upsample])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "takes either `size` or `scale`"),
        ({"size": 3, "scale": 2}, "takes either `size` or `scale`"),
        ({"size": 0}, "takes ints >= 1 as `size`; got 0"),
        ({"scale": (1, -2)}, r"takes numbers > 0 as `scale`; got \(1, -2\)"),
        ({"scale": float("inf")}, "takes numbers > 0"),
        ({"size": 3, "method": "bilinear"}, "one of 'nearest', 'linear', .*'bilinear'"),
    ],
)
def test_wrong_option_is_an_error(make, options, message, without_type_checks) -> None:
    args = [jnp.ones((2, 3))] if make is nn.resize else []
    with pytest.raises(ValueError, match=f"`{make.__name__}` .*{message}"):
        make(*args, **options)


def test_sizes_and_scales_of_numpy_are_taken(strict, without_type_checks) -> None:
    x = jnp.ones((2, 4))
    assert nn.resize(x, size=np.int64(3)).shape == (2, 3)
    assert nn.Upsample(scale=[np.float32(1.5)])(x).shape == (2, 6)
    assert nn.Upsample(scale=np.int32(2))(x).shape == (2, 8)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {"size": 2}, r"one spatial axis or more.*given shape \(3,\)"),
        ((3, 0), {"size": 2}, "none of them empty"),
        ((3, 4, 5), {"size": (2,)}, r"as `size`: 2 in all; got \(2,\)"),
        ((3, 4, 5), {"scale": 0.1}, "would leave an empty axis"),
    ],
)
def test_wrong_shape_is_an_error(shape, options, message) -> None:
    with pytest.raises(eqx.ShapeError, match=message):
        nn.resize(jnp.ones(shape), **options)
    with pytest.raises(eqx.ShapeError, match=message):
        nn.Upsample(**options)(jnp.ones(shape))
