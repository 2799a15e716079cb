import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def test_causal_mask_lets_no_query_attend_to_a_later_key(strict) -> None:
    i, j = np.arange(4)[:, None], np.arange(6)
    np.testing.assert_array_equal(nn.causal_mask(4), (j <= i)[:, :4])
    np.testing.assert_array_equal(nn.causal_mask(4, 6), j <= i)
    later = jax.jit(lambda n: nn.causal_mask(4, 6, offset=n, window=2))(jnp.array(2))
    np.testing.assert_array_equal(later, (j <= i + 2) & (j > i))
    assert nn.causal_mask(0).shape == (0, 0)


def test_padding_mask_allows_the_first_keys(strict) -> None:
    assert nn.padding_mask(2, 3).tolist() == [[True, True, False]] * 3
    assert nn.padding_mask(2, 3, 1).tolist() == [[True, True, False]]
    batch = jax.vmap(lambda n: nn.padding_mask(n, 3, 1))(jnp.array([0, 3]))
    assert batch.tolist() == [[[False] * 3], [[True] * 3]]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32])
def test_number_of_keys_may_be_of_any_integer_dtype(dtype, strict) -> None:
    assert nn.padding_mask(dtype(100), 300, 1).sum() == 100
    assert nn.causal_mask(1, 300, offset=dtype(99)).sum() == 100


def test_masks_combine_by_and(strict) -> None:
    a = jnp.array([[True, False], [True, True]])
    by_head = jnp.array([[[1, 1], [0, 2]], [[0, 1], [1, 1]]])
    combined = nn.combine_masks(a, None, by_head)
    np.testing.assert_array_equal(combined, np.asarray(a) & np.asarray(by_head, bool))
    assert combined.dtype == bool
    assert nn.combine_masks(None, a) is not None
    assert nn.combine_masks() is None and nn.combine_masks(None, None) is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.causal_mask(-1), ValueError, "`query_length`; got -1"),
        (lambda: nn.causal_mask(2, 1.5), ValueError, "`key_length`; got 1.5"),
        (
            lambda: nn.causal_mask(2, window=0),
            ValueError,
            "int >= 1 as `window`; got 0",
        ),
        (lambda: nn.causal_mask(2, window="a"), ValueError, "as `window`; got 'a'"),
        (lambda: nn.causal_mask(2, offset=1.5), TypeError, "as `offset`; .* float32"),
        (lambda: nn.padding_mask(1.5, 3), TypeError, "as `length`; .* dtype float32"),
        (lambda: nn.padding_mask(1, -2), ValueError, "`key_length`; got -2"),
        (
            lambda: nn.padding_mask(jnp.array([1, 2]), 3),
            eqx.ShapeError,
            r"`length`; got shape \(2,\)",
        ),
        (
            lambda: nn.combine_masks(jnp.ones((2, 3)), jnp.ones((3, 2))),
            eqx.ShapeError,
            r"\(2, 3\), \(3, 2\)",
        ),
        (
            lambda: nn.combine_masks(None, [True]),
            TypeError,
            r"as `masks\[1\]`; got a list of length 1",
        ),
    ],
)
def test_wrong_mask_is_an_error(call, error, message, without_type_checks) -> None:
    with pytest.raises(error, match=message):
        call()
