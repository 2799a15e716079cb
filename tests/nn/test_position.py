import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@pytest.fixture
def learned(key):
    return nn.LearnedPositionalEmbedding(6, 4, key=key)


SINUSOIDAL = nn.SinusoidalPositionalEmbedding(4, theta=100.0)


def sinusoids(positions):
    """The formula of Vaswani et al. 2017."""
    table = np.empty((len(positions), 4))
    for i, position in enumerate(positions):
        for j in range(2):
            angle = position / 100.0 ** (2 * j / 4)
            table[i, 2 * j], table[i, 2 * j + 1] = np.sin(angle), np.cos(angle)
    return table


def test_rows_of_the_table_are_added(learned, draw, strict) -> None:
    x = draw(3, 4).astype(jnp.float32)
    assert (learned(x) == x + learned.weight[:3]).all()
    for offset in (3, np.int32(3), jnp.array(3, jnp.int8)):
        assert (learned(x, offset=offset) == x + learned.weight[3:]).all()
    positions = jnp.array([5, 0, 5])
    assert (learned(x, positions=positions) == x + learned.weight[positions]).all()
    compiled = jax.jit(lambda x, i: learned(x, offset=i))
    assert (compiled(x, 2) == x + learned.weight[2:5]).all()
    assert learned(x[:0], offset=6).shape == (0, 4)


def test_first_values_have_the_documented_deviation(key) -> None:
    weight = nn.LearnedPositionalEmbedding(200, 50, key=key).weight
    np.testing.assert_allclose(weight.std(), 0.02, rtol=0.05)
    ones = nn.LearnedPositionalEmbedding(2, 3, key=key, weight_init="ones")
    assert (ones.weight == 1).all()


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"offset": 4}, 6),
        ({"offset": -1}, -1),
        ({"offset": jnp.array(5)}, 6),
        ({"offset": np.int32(5)}, 6),
        ({"positions": np.array([0, 6, 1])}, 6),
        ({"positions": jnp.array([0, 1, -2])}, -2),
    ],
)
def test_position_out_of_range_is_an_error_where_it_is_known(
    options, number, learned
) -> None:
    with pytest.raises(IndexError, match=f"has 6 positions.*given position {number}"):
        learned(jnp.ones((3, 4)), **options)
    with pytest.raises(IndexError, match=f"has 6 positions.*given position {number}"):
        jax.jit(lambda x: learned(x, **options))(jnp.ones((3, 4)))


def test_table_may_be_a_numpy_array(learned) -> None:
    table = jax.tree.map(np.asarray, learned)
    run = jax.jit(lambda x, **options: table(x, **options))
    for options in ({"offset": jnp.array(2)}, {"positions": jnp.array([3, 1, 2])}):
        x = jnp.ones((3, 4))
        assert (run(x, **options) == learned(x, **options)).all()


def test_more_rows_than_positions_are_an_error_also_if_traced(learned) -> None:
    with pytest.raises(
        eqx.ShapeError, match=r"has 6 positions.*of 7 rows.*`max_length`"
    ):
        jax.jit(lambda x, i: learned(x, offset=i))(jnp.ones((7, 4)), 0)


def test_traced_position_out_of_range_is_taken_for_the_nearest(learned) -> None:
    x = jnp.zeros((3, 4))
    run = jax.jit(lambda x, p: learned(x, positions=p))
    expected = learned.weight[jnp.array([0, 5, 5])]
    assert (run(x, jnp.array([-3, 6, 100])) == expected).all()


def test_traced_position_out_of_range_is_an_error_if_bounds_are_checked(key) -> None:
    embed = nn.LearnedPositionalEmbedding(6, 4, key=key, check_bounds=True)
    run = eqx.filter_jit(embed)
    x = jnp.zeros((3, 4))
    assert (run(x, offset=jnp.array(3)) == embed.weight[3:]).all()
    for options in ({"offset": jnp.array(4)}, {"positions": jnp.array([0, 1, -1])}):
        with pytest.raises(eqx.EquinoxRuntimeError, match="has 6 positions"):
            run(x, **options)


def test_only_the_rows_that_are_used_have_a_gradient(learned) -> None:
    x = jnp.ones((3, 4))
    grads = eqx.filter_grad(lambda m: m(x, positions=jnp.array([1, 1, 4])).sum())(
        learned
    )
    assert grads.weight.sum(axis=1).tolist() == [0, 8, 0, 0, 4, 0]


def test_sinusoids_are_those_of_the_paper(x64, draw) -> None:
    x = draw(5, 4)
    embed = nn.SinusoidalPositionalEmbedding(4, theta=100.0)
    np.testing.assert_allclose(embed(x), x + sinusoids(range(5)), rtol=1e-12)
    shifted = embed(x, offset=jnp.array(-7))
    np.testing.assert_allclose(shifted, x + sinusoids(range(-7, -2)), rtol=1e-12)
    times = np.array([0.5, 2, 3.25, 8, 1e4])
    np.testing.assert_allclose(
        embed(x, positions=times), x + sinusoids(times), rtol=1e-9
    )


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("bfloat16",) * 2, ("float16",) * 2, ("complex64",) * 2, ("int32", "float32")],
)
def test_sinusoids_have_the_dtype_of_the_input(dtype, out_dtype, strict) -> None:
    out = SINUSOIDAL(jnp.zeros((3, 4), dtype), offset=1000)
    assert out.dtype == out_dtype
    # Computed in float32: an angle of 1002 has no sense in half precision.
    wide = np.asarray(out).astype(complex).real
    np.testing.assert_allclose(wide, sinusoids([1000, 1001, 1002]), atol=0.005)


def test_far_position_by_a_small_offset(learned) -> None:
    x = jnp.zeros((200, 4))
    offset = jnp.array(100, jnp.int8)
    expected = SINUSOIDAL(x, offset=100)
    np.testing.assert_allclose(SINUSOIDAL(x, offset=offset), expected, atol=1e-6)
    rope = nn.RotaryPositionalEmbedding(4)
    x = jnp.ones((200, 4))
    np.testing.assert_allclose(rope(x, offset=offset), rope(x, offset=100), atol=1e-6)


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_wrong_argument_is_an_error(kind, learned) -> None:
    embed = learned if kind == "learned" else SINUSOIDAL
    name = type(embed).__name__
    with pytest.raises(eqx.ShapeError, match=rf"{name} takes `x` of shape \(any, 4\)"):
        embed(jnp.ones((3, 5)))
    with pytest.raises(eqx.ShapeError, match="one extra leading axis"):
        embed(jnp.ones((2, 3, 4)))
    x, positions = jnp.ones((3, 4)), jnp.arange(2)
    with pytest.raises(
        eqx.ShapeError, match=rf"{name} takes `positions` of shape \(3,\)"
    ):
        embed(x, positions=positions)
    with pytest.raises(ValueError, match=f"{name} takes `offset` or `positions`"):
        embed(x, positions=jnp.arange(3), offset=1)


def test_positions_of_a_table_are_integers(learned) -> None:
    with pytest.raises(
        TypeError, match="takes integers as `positions`; got dtype float32"
    ):
        learned(jnp.ones((3, 4)), positions=jnp.ones(3))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("check_bounds", [False, True])
def test_positions_of_a_small_dtype_fit_any_table(
    dtype, check_bounds, key, strict
) -> None:
    embed = nn.LearnedPositionalEmbedding(40_000, 2, key=key, check_bounds=check_bounds)
    x, positions = jnp.zeros((2, 2)), jnp.array([1, 127], dtype)
    expected = embed.weight[jnp.array([1, 127])]
    assert (embed(x, positions=positions) == expected).all()
    compiled = jax.jit(lambda positions: embed(x, positions=positions))
    assert (compiled(positions) == expected).all()


def test_wrong_size_is_an_error(key) -> None:
    with pytest.raises(ValueError, match="even number as `embedding_size`; got 3"):
        nn.SinusoidalPositionalEmbedding(3)
    with pytest.raises(ValueError, match="int >= 0 as `max_length`; got -1"):
        nn.LearnedPositionalEmbedding(-1, 3, key=key)
