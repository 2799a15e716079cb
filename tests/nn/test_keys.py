"""A key that is not one: the error names the layer."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import nn
from equinox_like.nn._base.init import split_key

LAYERS = """
    nn.Linear(1, 1, key=key)
    nn.MLP(1, 1, 1, 1, key=key)
    nn.Conv1d(1, 1, 1, key=key)
    nn.ConvTranspose1d(1, 1, 1, key=key)
    nn.Embedding(1, 1, key=key)
    nn.Einsum("i,io->o", {"i": 1, "o": 1}, key=key)
    nn.GRUCell(1, 1, key=key)
    nn.LSTMCell(1, 1, key=key)
    nn.MultiheadAttention(1, 1, key=key)
    nn.Stacked(nn.Identity, 1, key=key)
    nn.SpectralNorm(nn.Linear(1, 1, key=jax.random.key(0)), "weight", key=key)
    nn.Dropout()(jnp.ones(1), key=key)
"""


def test_number_as_a_key_is_refused_by_each_layer():
    # In a process of its own, as annotations are checked in this one.
    program = """
        import jax
        import jax.numpy as jnp
        from equinox_like import nn

        key = 0
        for call in LAYERS:
            try:
                eval(call)
            except TypeError as error:
                name = call.removeprefix("nn.").partition("(")[0]
                assert f"`key` of {name} must be one PRNG key" in str(error), call
                assert "got 0." in str(error), call
            else:
                raise AssertionError(call)
    """
    calls = [line.strip() for line in LAYERS.strip().splitlines()]
    text = f"LAYERS = {calls}\n" + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("key", "error", "shown"),
    [
        (None, TypeError, "None"),
        (jnp.ones(2), TypeError, r"float32\[2\]"),
        (jax.random.split(jax.random.key(0), 3), ValueError, r"key<fry>\[3\]"),
    ],
    ids=["none", "floats", "many"],
)
def test_what_was_given_is_shown(key, error, shown):
    layer = eqx.nn.Identity()
    with pytest.raises(error, match=f"`key` of Identity must be one.*got {shown}"):
        split_key(key, 2, layer)


@pytest.mark.parametrize(
    "use",
    [
        lambda key: nn.Linear(1, 1, key=key),
        lambda key: nn.Embedding(1, 1, key=key),
        lambda key: nn.Dropout()(jnp.ones(1), key=key),
    ],
    ids=["Linear", "Embedding", "Dropout"],
)
def test_key_that_is_used_twice_is_reported_as_such(use):
    def twice(key):
        use(key)
        return use(key)

    with jax.debug_key_reuse(True):
        with pytest.raises(jax.errors.KeyReuseError, match="Previously-consumed key"):
            twice(jax.random.key(0))
        with pytest.raises(jax.errors.KeyReuseError, match="already consumed"):
            jax.jit(twice)(jax.random.key(0))


def test_key_is_not_blamed_for_another_argument():
    with pytest.raises(ValueError, match="shapes"):
        nn.Dropout(jnp.ones(3))(jnp.ones(2), key=jax.random.key(0))
    with pytest.raises(ValueError, match="dtype"):
        nn.Embedding(2, 2, dtype=jnp.int32, key=jax.random.key(0))


def test_error_of_jax_that_takes_no_message_names_the_layer(without_type_checks):
    def init(key, shape, dtype):
        if jax.random.key_data(key).sum() > 0:  # a tracer has no value
            return jnp.ones(shape, dtype)

    def build(key):
        return nn.LearnedPositionalEmbedding(3, 2, key=key, weight_init=init).weight

    with pytest.raises(
        TypeError, match="`key` of LearnedPositionalEmbedding must be one"
    ):
        jax.jit(build)(jax.random.split(jax.random.key(0)))
