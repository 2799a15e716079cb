"""`str2jax`: a tree without leaves that is shown as a text."""

import jax
import jax.tree_util as jtu

import equinox_like as eqx
from equinox_like.internal import str2jax


def test_it_is_shown_as_its_text():
    text = str2jax("It did not work!")
    assert str(text) == repr(text) == eqx.tree_pformat(text) == "It did not work!"
    assert type(text).__name__ == "It did not work!"
    assert eqx.tree_pformat([text]) == "[It did not work!]"


def test_transformations_take_and_return_it():
    text = str2jax("text")
    assert isinstance(text, eqx.Module) and jtu.tree_leaves(text) == []
    for jit in (jax.jit, eqx.filter_jit):
        x, out = jit(lambda text, x: (x + 1, text))(text, 1.0)
        assert x == 2 and out == text and str(out) == "text"


def test_it_is_equal_to_itself_alone():
    text = str2jax("text")
    assert text == text and hash(text) == hash(text)
    assert text != str2jax("text")
