import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn

PROBABILITIES = jnp.array([0.05, 0.4, 0.15, 0.1, 0.3])


def frequencies(probabilities, **options):
    """How often each token is drawn."""
    logits, number = jnp.log(probabilities), 4000
    keys = jax.random.split(jax.random.key(0), number)
    draw = jax.jit(jax.vmap(lambda key: nn.sample_logits(logits, key, **options)))
    return jnp.bincount(draw(keys), length=len(logits)) / number


def expected(kept):
    weights = np.where(np.isin(np.arange(5), kept), PROBABILITIES, 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.5}, [1, 4]),
        ({"top_p": 0.8}, [1, 4, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        # Of the two that are left, 0.4 / 0.7 is more than 0.5.
        ({"top_k": 2, "top_p": 0.5}, [1]),
    ],
)
def test_tokens_are_drawn_as_often_as_is_likely(options, kept) -> None:
    np.testing.assert_allclose(
        frequencies(PROBABILITIES, **options), expected(kept), atol=0.03
    )


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        weights = PROBABILITIES ** (1 / temperature)
        np.testing.assert_allclose(
            frequencies(PROBABILITIES, temperature=temperature),
            weights / weights.sum(),
            atol=0.03,
        )


def test_temperature_zero_is_greedy_and_needs_no_key(key) -> None:
    logits = jnp.array([0.0, 7.0, 7.0, 1.0])
    assert nn.sample_logits(logits, temperature=0) == 1
    assert nn.sample_logits(logits, temperature=0.0, top_k=3, top_p=0.5) == 1
    draw = jax.jit(lambda t: nn.sample_logits(logits, key, temperature=t))
    assert draw(0.0) == 1 and draw(-1.0) == 1
    assert draw(1e-30) in (1, 2)


def test_arrays_that_a_compiled_function_captures_are_checked(key) -> None:
    half, nothing = jnp.asarray(0.5), jnp.asarray(0.0)

    @jax.jit
    def sample(logits):
        return nn.sample_logits(logits, key=key, temperature=half, top_p=half)

    assert sample(jnp.asarray([0.0, 9.0])) == 1
    with pytest.raises(ValueError, match="a `top_p` that is above 0"):
        jax.jit(lambda x: nn.sample_logits(x, key=key, top_p=nothing))(jnp.zeros(2))


def test_top_k_takes_the_first_of_equals() -> None:
    drawn = frequencies(jnp.full(5, 0.2), top_k=2)
    assert drawn[:2].sum() == 1 and drawn[2:].sum() == 0


def test_penalty_is_for_what_was_seen() -> None:
    logits = jnp.array([2.0, 1.5, -1.0, -1.5])
    seen = jnp.array([True, False, True, False])
    call = {"temperature": 0, "repetition_penalty": 2.0}
    assert nn.sample_logits(logits, seen=seen, **call) == 1
    assert nn.sample_logits(logits[2:], seen=seen[2:], **call) == 1
    # Below 1 it is a reward.
    call["repetition_penalty"] = 0.5
    assert nn.sample_logits(logits[1:], seen=jnp.roll(seen, 1)[1:], **call) == 0


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_forbidden_tokens_are_not_drawn(options, key) -> None:
    logits = jnp.array([-jnp.inf, 1.0, -jnp.inf, -jnp.inf])
    for temperature in (0.0, 0.7):
        token = nn.sample_logits(logits, key, temperature=temperature, **options)
        assert token == 1 and token.dtype == jnp.int32
    forced = jnp.array([0.0, jnp.inf, 1.0])
    tokens = jax.vmap(lambda key: nn.sample_logits(forced, key, **options))(
        jax.random.split(key, 8)
    )
    assert (tokens == 1).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_forced_token_is_drawn_without_a_nan(options, key) -> None:
    with jax.debug_nans(True):
        token = nn.sample_logits(jnp.array([0.0, jnp.inf, 1.0]), key, **options)
    assert token == 1


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("number", [jnp.nan, -jnp.inf])
def test_there_is_no_token_to_draw(options, temperature, number, key) -> None:
    logits = jnp.full(4, -jnp.inf).at[2].set(number)
    draw = lambda x, t: nn.sample_logits(x, key, temperature=t, **options)  # noqa: E731
    message = "no token to draw: a logit is NaN, or all are -inf"
    with pytest.raises(ValueError, match=message):
        draw(logits, temperature)
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda x: draw(x, temperature))(jnp.stack([jnp.zeros(4), logits]))
    assert jax.jit(draw)(logits, temperature) == -1
    finite = jnp.zeros(4).at[2].set(jnp.nan)
    assert jax.jit(draw)(finite, temperature) == -1


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_p": 1.0}])
@pytest.mark.parametrize("temperature", [jnp.inf, 1e38, 1.0, 1e-38, 0.0])
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_forbidden_tokens_are_not_drawn_at_any_temperature(
    options, temperature, scale
) -> None:
    logits = scale * jnp.array([-jnp.inf, 1.0, -jnp.inf, 0.5, -1.0, -jnp.inf])
    keys = jax.random.split(jax.random.key(0), 200)
    draw = jax.jit(
        lambda t: jax.vmap(
            lambda key: nn.sample_logits(logits, key, temperature=t, **options)
        )(keys)
    )
    tokens = set(np.asarray(draw(temperature)).tolist())
    assert tokens <= {1, 3, 4}
    if temperature == jnp.inf and scale == 1 and "top_p" not in options:
        assert tokens == {1, 3, 4}


def test_half_precision_and_strict_promotion(strict, key) -> None:
    logits = jnp.array([0.0, 20.0], "bfloat16")
    seen = jnp.array([True, False])
    token = nn.sample_logits(
        logits, key, temperature=0.5, top_p=0.9, repetition_penalty=1.2, seen=seen
    )
    assert token == 1


def test_logits_may_be_of_numpy(key, without_type_checks) -> None:
    logits = np.array([0.0, 50.0])
    assert nn.sample_logits(logits, key) == nn.sample_logits(jnp.asarray(logits), key)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"temperature": -0.1},
            ValueError,
            "`temperature` that is .* 0 or more; got -0.1",
        ),
        ({"temperature": float("inf")}, ValueError, "`temperature` that is finite"),
        ({"top_k": 0}, ValueError, "`top_k` must be at least 1; got 0"),
        ({"top_k": 1.5}, TypeError, "`top_k` must be an integer; got 1.5"),
        ({"top_p": 0.0}, ValueError, "`top_p` that is above 0 and at most 1; got 0.0"),
        ({"top_p": 1.1}, ValueError, "`top_p`"),
        (
            {"repetition_penalty": 0.0, "seen": jnp.ones(3, bool)},
            ValueError,
            "`repetition_penalty` that is above 0",
        ),
        ({"repetition_penalty": 2.0}, ValueError, "`seen` together"),
        ({"seen": jnp.ones(3, bool)}, ValueError, "`seen` together"),
        (
            {"repetition_penalty": 2.0, "seen": jnp.ones(2, bool)},
            eqx.ShapeError,
            r"`seen`.*\(3,\), but was given shape \(2,\)",
        ),
        ({"temperature": jnp.ones(2)}, eqx.ShapeError, r"scalar as `temperature`"),
        ({"key": None}, ValueError, "needs a `key`"),
        ({"logits": jnp.ones((2, 3))}, eqx.ShapeError, r"\(2, 3\).*jax\.vmap"),
        (
            {"logits": [1.0, 2.0]},
            TypeError,
            "array as `logits`; got a list of length 2",
        ),
        (
            {"logits": jnp.ones(3, int)},
            TypeError,
            "floating array as `logits`; .*int32",
        ),
    ],
)
def test_wrong_argument_is_named(
    options, error, message, key, without_type_checks
) -> None:
    with pytest.raises(error, match=message):
        nn.sample_logits(**{"logits": jnp.ones(3), "key": key} | options)
