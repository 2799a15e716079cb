import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def reference(x, theta=10_000.0, interleaved=False, positions=None):
    """Each pair of features as a complex number, multiplied by a phase."""
    x = np.asarray(x, np.float64)
    rows, d = x.shape
    positions = np.arange(rows) if positions is None else np.asarray(positions)
    angles = positions[:, None] / theta ** (2 * np.arange(d // 2) / d)
    first, second = (
        (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, : d // 2], x[:, d // 2 :])
    )
    rotated = (first + 1j * second) * np.exp(1j * angles)
    if interleaved:
        return np.stack([rotated.real, rotated.imag], axis=-1).reshape(rows, d)
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def test_result_is_that_of_the_contract() -> None:
    out = nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 4)))
    expected = [-1.3254442, 0.9798014, 0.4931506, 1.0197986]
    np.testing.assert_allclose(out[2], expected, atol=1e-5)


@pytest.mark.parametrize("theta", [10_000.0, 100.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_result_is_that_of_the_formula(theta, interleaved, x64, draw) -> None:
    rope = nn.RotaryPositionalEmbedding(6, theta, interleaved=interleaved)
    x = draw(5, 6)
    np.testing.assert_allclose(rope(x), reference(x, theta, interleaved), rtol=1e-11)
    at = [7, 0, 3, 3, 100]
    expected = reference(x, theta, interleaved, at)
    np.testing.assert_allclose(rope(x, positions=jnp.array(at)), expected, rtol=1e-10)


def test_offset_is_added_to_the_row_and_may_be_traced(draw) -> None:
    rope = nn.RotaryPositionalEmbedding(4)
    x = draw(5, 4)
    shifted = jax.jit(lambda offset: rope(x[2:], offset=offset))(2)
    ones = jnp.ones((5, 4))
    assert np.allclose(rope(ones)[2:], rope(ones[2:], offset=2), atol=1e-6)
    np.testing.assert_allclose(shifted, rope(x)[2:], atol=1e-5)


def test_products_depend_on_the_difference_of_positions(draw) -> None:
    rope, q, k = nn.RotaryPositionalEmbedding(8), draw(1, 8), draw(1, 8)
    near = rope(q, offset=5) @ rope(k, offset=3).T
    far = rope(q, offset=105) @ rope(k, offset=103).T
    np.testing.assert_allclose(near, far, rtol=1e-3)


def test_offset_and_positions_exclude_one_another() -> None:
    rope = nn.RotaryPositionalEmbedding(4)
    x, positions = jnp.ones((3, 4)), jnp.arange(3)
    with pytest.raises(ValueError, match="`offset` or `positions`, not both"):
        rope(x, offset=1, positions=positions)
    with pytest.raises(eqx.ShapeError, match=r"`positions` of shape \(3,\)"):
        rope(x, positions=jnp.arange(4))


@pytest.mark.parametrize("interleaved", [False, True])
def test_sequence_may_be_empty(interleaved) -> None:
    rope = nn.RotaryPositionalEmbedding(4, interleaved=interleaved)
    assert rope(jnp.ones((0, 4))).shape == (0, 4)


@pytest.mark.parametrize("offset", [jnp.arange(3), jnp.ones((2, 1), int)])
def test_offset_is_a_scalar(offset, without_type_checks) -> None:
    message = r"RotaryPositionalEmbedding takes a scalar as `offset`.* shape \(\d"
    with pytest.raises(eqx.ShapeError, match=message):
        nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 4)), offset=offset)


def test_two_of_one_size_have_angles_of_their_own(draw) -> None:
    x = draw(3, 4)
    one, other = (nn.RotaryPositionalEmbedding(4, theta)(x) for theta in (10.0, 1e4))
    np.testing.assert_allclose(one, reference(x, 10.0), atol=1e-5)
    np.testing.assert_allclose(other, reference(x, 1e4), atol=1e-5)


def test_it_has_no_leaves_and_can_be_hashed() -> None:
    rope = nn.RotaryPositionalEmbedding(4)
    assert jax.tree.leaves(rope) == []
    assert rope == nn.RotaryPositionalEmbedding(4, dtype=jnp.float32)
    assert rope.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32])
def test_result_has_the_dtype_of_the_input(dtype) -> None:
    assert nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 4), dtype)).dtype == dtype


def test_strict_promotion_names_both_dtypes(strict) -> None:
    rope = nn.RotaryPositionalEmbedding(4)
    error = jax.dtypes.TypePromotionError
    with pytest.raises(error, match=r"dtype float32, but was given.*float16"):
        rope(jnp.ones((3, 4), jnp.float16))
    half = nn.RotaryPositionalEmbedding(4, dtype=jnp.float16)
    assert half(jnp.ones((3, 4), jnp.float16)).dtype == jnp.float16


@pytest.mark.parametrize("dtype", [int, "nonsense"])
def test_dtype_is_floating_or_complex(dtype, without_type_checks) -> None:
    message = "takes a floating or complex dtype as `dtype`; got"
    with pytest.raises(ValueError, match=message):
        nn.RotaryPositionalEmbedding(4, dtype=dtype)


def test_theta_is_a_number(without_type_checks) -> None:
    for layer in nn.RotaryPositionalEmbedding, nn.SinusoidalPositionalEmbedding:
        message = f"{layer.__name__} takes a number > 0 as `theta`; got 'a'"
        with pytest.raises(ValueError, match=message):
            layer(4, theta="a")


@pytest.mark.parametrize("interleaved", [False, True])
def test_frequencies_take_the_place_of_the_powers_of_theta(
    interleaved, x64, draw
) -> None:
    x = draw(5, 6)
    powers = 100.0 ** (-np.arange(3) / 3)
    for frequencies in powers / 8, jnp.asarray(powers / 8), (powers / 8).tolist():
        rope = nn.RotaryPositionalEmbedding(
            6, interleaved=interleaved, frequencies=frequencies
        )
        expected = reference(x, 100.0, interleaved, np.arange(5) / 8)
        np.testing.assert_allclose(rope(x), expected, rtol=1e-11)
        assert hash(rope) == hash(rope) and not jax.tree.leaves(rope)


@pytest.mark.parametrize("frequencies", [[1.0], [1.0, 2.0, 3.0], [1.0, np.nan], 1.0])
def test_frequencies_are_one_number_for_each_pair(
    frequencies, without_type_checks
) -> None:
    with pytest.raises(ValueError, match="2 finite numbers as `frequencies`, one for"):
        nn.RotaryPositionalEmbedding(4, frequencies=frequencies)


def test_theta_of_numpy_does_not_change_the_dtype(
    x64, strict, without_type_checks
) -> None:
    x = jnp.ones((3, 4), jnp.float32)
    rope = nn.RotaryPositionalEmbedding(4, np.float32(100), jnp.float32)
    expected = nn.RotaryPositionalEmbedding(4, 100.0, jnp.float32)
    assert rope == expected
    np.testing.assert_array_equal(rope(x), expected(x))


@pytest.mark.parametrize("size", [-2, 3])
def test_negative_or_odd_size_is_an_error(size) -> None:
    with pytest.raises(ValueError, match=f"`embedding_size`; got {size}"):
        nn.RotaryPositionalEmbedding(size)


def test_static_methods() -> None:
    x = jnp.arange(4.0)
    assert nn.RotaryPositionalEmbedding.rotate_half(x).tolist() == [-2, -3, 0, 1]
    precompute = nn.RotaryPositionalEmbedding.precompute_freqs_cis
    cos, sin = precompute(6, 9, 1000.0, jnp.float16)
    assert cos.shape == sin.shape == (9, 3) and cos.dtype == jnp.float16
    angles = np.arange(9)[:, None] / 1000.0 ** (np.arange(3) / 3)
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-3)


def test_cosines_are_computed_once_for_a_batch() -> None:
    rope = nn.RotaryPositionalEmbedding(8)
    run = jax.jit(jax.vmap(lambda x, offset: rope(x, offset=offset), (0, None)))
    program = run.lower(jnp.ones((37, 16, 8)), 1).compile().as_text()
    # XLA prints each fused computation as a paragraph.
    with_cosine = [part for part in program.split("\n\n") if " cosine(" in part]
    assert with_cosine and not any("[37," in part for part in with_cosine)
