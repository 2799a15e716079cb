import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@pytest.fixture
def mlp(key):
    return nn.MLP(3, 2, 8, 1, key=key)


def test_each_array_is_a_row(mlp) -> None:
    mlp = eqx.tree_at("layers[0].bias", mlp, replace_fn=eqx.frozen)
    table = nn.summary(mlp)
    assert table.rows == [
        ("layers[0].weight", "Linear", (8, 3), "float32", 24, 96, "trainable", None),
        ("layers[0].bias", "Linear", (8,), "float32", 8, 32, "frozen", None),
        ("layers[1].weight", "Linear", (2, 8), "float32", 16, 64, "trainable", None),
        ("layers[1].bias", "Linear", (2,), "float32", 2, 8, "trainable", None),
    ]
    assert table.total_params == 50 and table.trainable_params == 42
    assert table.total_bytes == 200
    lines = str(table).splitlines()
    assert lines[0].split() == "path layer shape dtype params bytes status".split()
    assert lines[2].split()[:2] == ["layers[0].weight", "Linear"]
    assert lines[-1] == "50 parameters, 42 trainable, 200 bytes"
    assert repr(table) == str(table)


def test_depth_sums_up(mlp) -> None:
    mlp = eqx.tree_at("layers[0].bias", mlp, replace_fn=lambda x: x.astype(jnp.float16))
    rows = nn.summary(mlp, depth=2).rows
    assert rows == [
        ("layers[0]", "Linear", None, "mixed", 32, 112, "trainable", None),
        ("layers[1]", "Linear", None, "float32", 18, 72, "trainable", None),
    ]
    assert [row.params for row in nn.summary(mlp, depth=1).rows] == [50]
    assert nn.summary(mlp, depth=3).rows == nn.summary(mlp).rows
    assert "of these 42 float32, 8 float16" in str(nn.summary(mlp, depth=1))


@pytest.mark.parametrize(
    "where", [lambda m: m.layers[1], "layers[1]"], ids=["function", "pattern"]
)
def test_where_restricts(where, mlp) -> None:
    table = nn.summary(mlp, where=where)
    assert [row.path for row in table.rows] == ["layers[1].weight", "layers[1].bias"]
    assert table.total_params == 18
    assert nn.summary([mlp, jnp.ones(3)], where=nn.MLP).total_params == 50


def test_structs_and_numpy_arrays_count(key) -> None:
    huge = eqx.filter_eval_shape(nn.Linear, 10**6, 10**6, key=key)
    table = nn.summary(huge)
    assert table.total_params == 10**12 + 10**6 == table.trainable_params
    assert nn.summary({"a": np.ones((2, 3))}).rows[0].dtype == "float64"
    assert nn.summary([1.0, "text", None, jnp.tanh]).rows == []


def test_tied_arrays_count_once(key) -> None:
    weight = jnp.ones((2, 2))
    table = nn.summary([weight, {"a": weight}])
    assert [row.tied_to for row in table.rows] == [None, "[0]"]
    assert table.total_params == 4 and "trainable, = [0]" in str(table)
    pair = nn.Embedding(4, 3, key=key), nn.Linear(3, 4, use_bias=False, key=key)
    shared = nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
    assert nn.summary(shared).total_params == 12


@pytest.mark.parametrize(
    ("array", "params", "size"),
    [
        (jnp.zeros(5, jnp.int4), 5, 3),
        (jnp.zeros(3, jnp.complex64), 3, 24),
        (jnp.zeros(3, bool), 3, 3),
        (jnp.zeros((), jnp.float8_e4m3fn), 1, 1),
        (jax.random.split(jax.random.key(0), 3), 6, 24),
        (jnp.zeros((0, 3)), 0, 0),
    ],
    ids=["int4", "complex64", "bool", "float8", "key", "empty"],
)
def test_bytes_are_those_of_the_dtype(array, params, size) -> None:
    row = nn.summary(array).rows[0]
    assert (row.params, row.bytes) == (params, size)


def test_state_is_marked() -> None:
    norm, state = nn.make_with_state(nn.BatchNorm)(3)
    rows = nn.summary((norm, state)).rows
    assert [row.status for row in rows] == ["trainable"] * 2 + ["state"] * 3
    assert rows[2].layer == "State"
    assert rows[2].path == "[1]['batch_counter']"
    assert nn.summary(nn.BatchNorm(3)).rows[-1].status == "state"


def test_it_sees_into_stacked_layers(key) -> None:
    stacked = nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 4, key=key)
    assert nn.summary(stacked).rows[0][:3] == ("layers.weight", "Linear", (4, 3, 3))
