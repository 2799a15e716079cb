import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def test_first_values_are_those_of_the_contract(k0) -> None:
    embedding = nn.Embedding(4, 3, key=k0)
    expected = [1.6226422, 2.0252647, -0.4335944]
    np.testing.assert_allclose(embedding.weight[0], expected, atol=1e-7)
    half = nn.Embedding(4, 3, dtype=jnp.float16, key=k0)
    assert half.weight.dtype == jnp.float16


@pytest.mark.parametrize("index", [2, jnp.array(2), np.int8(2), np.array(2), -2])
def test_index_gives_a_row(index, key) -> None:
    embedding = nn.Embedding(4, 3, key=key)
    assert (embedding(index) == embedding.weight[2]).all()


def test_array_out_of_range_is_taken_for_the_nearest_end(key) -> None:
    embedding = nn.Embedding(4, 3, key=key)
    assert (embedding(jnp.array(9)) == embedding.weight[-1]).all()
    assert (embedding(jnp.array(-9)) == embedding.weight[0]).all()


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
@pytest.mark.parametrize("rows", [4, 300])
def test_array_out_of_range_is_an_error_if_bounds_are_checked(
    wrap, dtype, rows, key
) -> None:
    embedding = nn.Embedding(rows, 3, check_bounds=True, key=key)
    info = jnp.iinfo(dtype)
    for index in (0, 3, -4, rows - 1, -rows, rows, -rows - 1, info.min, info.max):
        if not info.min <= index <= info.max:
            continue
        array = jnp.asarray(index, dtype)
        if -rows <= index < rows:
            assert (wrap(embedding)(array) == embedding.weight[index]).all()
        else:
            with pytest.raises(eqx.EquinoxRuntimeError, match=f"has {rows} rows, but"):
                wrap(embedding)(array)


def test_bounds_are_checked_for_each_element_of_a_batch(key) -> None:
    embedding = nn.Embedding(4, 3, check_bounds=True, key=key)
    look_up = eqx.filter_jit(jax.vmap(embedding))
    assert look_up(jnp.arange(4)).shape == (4, 3)
    with pytest.raises(eqx.EquinoxRuntimeError, match="Batch element 2: Embedding has"):
        look_up(jnp.array([0, 1, 9]))
    with pytest.raises(IndexError, match="has 4 rows"):
        embedding(4)


@pytest.mark.parametrize("index", [4, -5, np.int64(4), np.array(-5)])
def test_number_out_of_range_is_an_error(index, key) -> None:
    with pytest.raises(IndexError, match=f"has 4 rows, but was given .*{index}"):
        nn.Embedding(4, 3, key=key)(index)


@pytest.mark.parametrize("index", [True, 1.0, jnp.array(True), np.float32(1)])
def test_floats_and_bools_are_refused(index, key) -> None:
    with pytest.raises(TypeError, match="takes an integer as `x`"):
        nn.Embedding(4, 3, key=key)(index)


@pytest.mark.parametrize("index", [[1, 2], "1", jnp.array([1, 2])])
def test_more_than_one_index_is_refused_with_a_hint(
    index, key, without_type_checks
) -> None:
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        nn.Embedding(4, 3, key=key)(index)


def test_weight_is_taken_as_it_is() -> None:
    table = np.arange(6.0).reshape(3, 2)
    embedding = nn.Embedding(weight=table)
    assert embedding.weight is table
    assert (embedding.num_embeddings, embedding.embedding_size) == (3, 2)
    rows = jax.vmap(embedding)(jnp.array([2, 0]))
    assert rows.tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "either a `weight`, or all of"),
        ({"num_embeddings": 3, "key": jax.random.key(0)}, "either a `weight`, or all"),
        ({"num_embeddings": 3, "embedding_size": 2}, "either a `weight`, or all of"),
        (
            {
                "num_embeddings": -1,
                "embedding_size": 2,
                "key": jax.random.key(0),
            },
            "an int >= 0 as `num_embeddings`; got -1",
        ),
        ({"weight": jnp.ones(3)}, r"got shape \(3,\)"),
        ({"weight": jnp.ones((3, 2)), "embedding_size": 3}, "embedding_size=3"),
    ],
)
def test_wrong_argument_is_an_error(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        nn.Embedding(**kwargs)


def test_empty_table_is_allowed(key) -> None:
    assert nn.Embedding(0, 3, key=key).weight.shape == (0, 3)


def test_attend_multiplies_by_the_table(key, draw) -> None:
    embedding, x = nn.Embedding(4, 3, key=key), draw(3)
    np.testing.assert_allclose(embedding.attend(x), embedding.weight @ x, rtol=1e-6)
    with pytest.raises(eqx.ShapeError, match=r"takes `x` of shape \(3,\)"):
        embedding.attend(jnp.ones(4))


def test_gradient_adds_up_over_equal_indices(key) -> None:
    embedding = nn.Embedding(4, 3, key=key)
    indices = jnp.array([1, 1, 3])
    grads = eqx.filter_grad(lambda e: jax.vmap(e)(indices).sum())(embedding)
    assert grads.weight[:, 0].tolist() == [0, 2, 0, 1]


def test_ensemble_called_as_one_is_an_error(key) -> None:
    make = eqx.filter_vmap(lambda key: nn.Embedding(4, 3, key=key))
    ensemble = make(jax.random.split(key, 5))
    for index in (2, jnp.array(2)):
        with pytest.raises(eqx.ShapeError, match=r"\(5, 4, 3\).*under `filter_vmap`"):
            ensemble(index)


@pytest.mark.parametrize("index", [1, -1, np.int64(2), np.array(-3, np.int8)])
def test_known_index_is_a_static_slice(index):
    layer = nn.Embedding(4, 2, key=jax.random.key(0))
    assert (layer(index) == layer.weight[int(index)]).all()
    assert "dynamic_slice" not in str(jax.make_jaxpr(lambda: layer(index))())
    assert "dynamic_slice" in str(jax.make_jaxpr(layer)(index))
