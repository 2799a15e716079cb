import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def reference(x, target, reduce):
    """Bin by bin, axis by axis."""
    x = np.asarray(x)
    for axis, t in enumerate(target, start=1):
        x = np.stack(
            [reduce(part, axis) for part in np.array_split(x, t, axis)], axis=axis
        )
    return x


@pytest.mark.parametrize(
    ("cls", "shape", "target"),
    [
        (nn.AdaptiveAvgPool1d, (2, 10), (4,)),
        (nn.AdaptiveAvgPool2d, (2, 6, 7), (3, 2)),
        (nn.AdaptiveAvgPool3d, (1, 4, 5, 3), (4, 2, 1)),
        (nn.AdaptiveMaxPool1d, (2, 9), (3,)),
        (nn.AdaptiveMaxPool2d, (2, 6, 7), (4, 7)),
        (nn.AdaptiveMaxPool3d, (1, 4, 5, 3), (2, 2, 2)),
    ],
)
def test_result_is_that_of_the_formula(cls, shape, target, draw) -> None:
    x = draw(*shape)
    reduce = np.max if "Max" in cls.__name__ else np.mean
    out = cls(target)(x)
    assert isinstance(cls(target), nn.AdaptivePool)
    assert out.shape == (shape[0], *target)
    np.testing.assert_allclose(out, reference(x, target, reduce), rtol=1e-5)


def test_first_bins_are_the_larger_ones() -> None:
    x = jnp.arange(10.0)[None]
    assert nn.AdaptiveAvgPool1d(4)(x).tolist() == [[1, 4, 6.5, 8.5]]
    assert nn.AdaptiveMaxPool1d(4)(x).tolist() == [[2, 5, 7, 9]]
    assert (nn.AdaptiveAvgPool1d(10)(x) == x).all()


def test_there_may_be_no_channels() -> None:
    assert nn.AdaptiveAvgPool2d((2, 3))(jnp.ones((0, 4, 7))).shape == (0, 2, 3)


def test_int_target_is_that_of_each_axis() -> None:
    assert nn.AdaptiveAvgPool3d(2).target_shape == (2, 2, 2)
    assert nn.AdaptivePool([3], 1, jnp.max).target_shape == (3,)


@pytest.mark.parametrize("size", [8, 9])
def test_operation_is_applied_once(size) -> None:
    def plus_one(x):
        assert x.ndim == 1
        return x.sum() + 1

    out = nn.AdaptivePool(4, 1, plus_one)(jnp.zeros((1, size)))
    assert out.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("target", [0, 4])
def test_axis_that_cannot_be_divided_is_an_error(target) -> None:
    pool = nn.AdaptiveAvgPool2d((1, target))
    message = rf"AdaptiveAvgPool2d splits axis 2 .* into {target} bins.*3 elements"
    with pytest.raises(eqx.ShapeError, match=message):
        pool(jnp.ones((1, 2, 3)))
    with pytest.raises(eqx.ShapeError, match=rf"At `layers\[0\]`: {message}"):
        nn.Sequential([pool])(jnp.ones((1, 2, 3)))


def test_target_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="for each spatial axis as `target_shape`"):
        nn.AdaptiveMaxPool2d((1, 2, 3))
