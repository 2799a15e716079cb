"""What a message calls a value."""

import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like._tree.nodes import describe_node, with_article


@pytest.mark.parametrize(
    "text",
    [
        "a Linear",
        "an MLP",
        "an M",
        "a B",
        "an LSTMCell",
        "a GRUCell",
        "a UNet",
        "an int",
        "an _Inner",
        "a _Linear",
    ],
)
def test_article_fits_how_a_name_is_read(text):
    assert with_article(text.split()[1]) == text


def test_nodes_are_described_by_type_and_size():
    assert describe_node(None) == "None"
    assert describe_node(jnp.ones((2, 3), "float32")) == "float32[2,3]"
    assert describe_node([1, 2]) == "a list of length 2"
    assert describe_node({"a": 1}) == "a dict with the keys ['a']"
    assert describe_node(dict.fromkeys(range(100))) == "a dict of length 100"
    assert describe_node(eqx.nn.Identity()) == "an Identity"
