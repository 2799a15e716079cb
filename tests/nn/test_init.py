import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def recording(shapes):
    def init(key, shape, dtype):
        shapes.append(shape)
        return jax.random.normal(key, shape, dtype)

    return init


LAYERS = {
    "Linear": (lambda **kw: nn.Linear(3, 2, **kw), "weight", (3, 2)),
    "Conv": (lambda **kw: nn.Conv2d(4, 6, (2, 3), groups=2, **kw), "weight", (2, 3, 2, 6)),
    "ConvTranspose": (lambda **kw: nn.ConvTranspose1d(4, 6, 5, **kw), "weight", (5, 4, 6)),
    "GRUCell": (lambda **kw: nn.GRUCell(3, 2, **kw), "weight_ih", (3, 2)),
    "LSTMCell": (lambda **kw: nn.LSTMCell(3, 2, **kw), "weight_ih", (3, 2)),
    "Embedding": (lambda **kw: nn.Embedding(5, 3, **kw), "weight", (5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_initialiser_is_given_the_shape_that_jax_means(name, key) -> None:
    make, field, shape = LAYERS[name]
    shapes = []
    layer = make(key=key, weight_init=recording(shapes))
    assert shapes[0] == shape
    assert getattr(layer, field).shape == getattr(make(key=key), field).shape
    if name != "Embedding":
        assert (layer.bias == make(key=key).bias).all()


def test_values_keep_their_place(key) -> None:
    def ramp(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    weight = nn.Linear(3, 2, key=key, weight_init=ramp).weight
    assert weight.tolist() == [[0, 2, 4], [1, 3, 5]]
    conv = nn.Conv1d(2, 3, 4, key=key, weight_init=ramp)
    expected = np.arange(24).reshape(4, 2, 3).transpose(2, 1, 0)
    assert (conv.weight == expected).all()


def test_gates_are_drawn_one_by_one(key) -> None:
    cell = nn.LSTMCell(3, 3, key=key, weight_init="orthogonal")
    gates = cell.weight_ih.reshape(4, 3, 3)
    for gate in gates:
        np.testing.assert_allclose(gate @ gate.T, np.eye(3), atol=1e-5)
    assert not np.allclose(gates[0], gates[1])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_orthogonal_weights_may_have_half_precision(dtype, key) -> None:
    options = {"key": key, "weight_init": "orthogonal"}
    half = nn.Linear(3, 3, dtype=dtype, **options)
    assert (half.weight == nn.Linear(3, 3, **options).weight.astype(dtype)).all()
    conv = nn.Conv1d(2, 3, 3, dtype=dtype, key=key, weight_init="delta_orthogonal")
    assert conv.weight.dtype == dtype


def test_initialiser_uses_the_key_of_its_parameter(key) -> None:
    weight_key, bias_key = jax.random.split(key)
    layer = nn.Linear(3, 2, key=key, weight_init="he_normal", bias_init="normal")
    drawn = jax.nn.initializers.he_normal()(weight_key, (3, 2), jnp.float32)
    assert (layer.weight == drawn.T).all()
    drawn = jax.nn.initializers.normal()(bias_key, (2,), jnp.float32)
    assert (layer.bias == drawn).all()


def test_numbers_arrays_and_constants(key) -> None:
    kwargs = {"weight_init": np.ones((2, 3)), "bias_init": "zeros"}
    layer = nn.Linear(3, 2, dtype=jnp.bfloat16, key=key, **kwargs)
    assert (layer.weight == 1).all() and (layer.bias == 0).all()
    assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
    assert (nn.Linear(3, 2, key=key, bias_init=3).bias == 3).all()


def test_composite_layers_hand_them_on(key) -> None:
    inits = {"weight_init": "ones", "bias_init": "zeros"}
    for scan in (False, True):
        mlp = nn.MLP(3, 2, 4, 3, scan=scan, key=key, **inits)
        assert all((layer.weight == 1).all() for layer in mlp.layers)
        assert not any(layer.bias.any() for layer in mlp.layers)
    attention = nn.MultiheadAttention(2, 4, use_query_bias=True, key=key, **inits)
    assert (attention.output_proj.weight == 1).all()
    assert not attention.query_proj.bias.any()


def test_wrong_initialiser_names_the_parameter(key) -> None:
    with pytest.raises(
        ValueError, match=r"`Linear.weight` returned .*\(3,\), but .*\(2, 3\)"
    ):
        nn.Linear(3, 2, key=key, weight_init=jnp.ones(3))
    with pytest.raises(ValueError, match=r"no initialiser 'he', .*`Linear.bias`"):
        nn.Linear(3, 2, key=key, bias_init="he")


@pytest.mark.parametrize(
    "init", ["he_normal", "constant", lambda key, shape, dtype: None]
)
def test_error_of_an_initialiser_names_the_parameter(init, key) -> None:
    with pytest.raises((ValueError, TypeError)) as info:
        nn.Linear(3, 2, bias_init=init, key=key)
    assert "`Linear.bias`" in info.value.__notes__[0]
    with pytest.raises((ValueError, TypeError)) as info:
        nn.reinit([nn.Linear(3, 2, key=key)], [("**.bias", init)], key=key)
    assert "`[0].bias`" in info.value.__notes__[0]


def test_missing_bias_is_not_drawn(key) -> None:
    assert nn.Linear(3, 2, use_bias=False, key=key, bias_init="ones").bias is None
    assert eqx.tree_equal(
        nn.Linear(3, 2, key=key, weight_init=None), nn.Linear(3, 2, key=key)
    )
