"""`eqx.inference` and `eqx.training`, and the layers that obey them."""

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import nn


def test_flag_none_obeys_the_context_under_plain_jit(key) -> None:
    layer = nn.Dropout(0.5, inference=None)
    traces = []

    @jax.jit
    def f(layer, x):
        traces.append(1)
        return layer(x, key=key)

    x = jnp.ones(50)
    assert (f(layer, x) == 0).any()
    with eqx.inference():
        assert (f(layer, x) == 1).all()
        with eqx.training():
            assert (f(layer, x) == 0).any()
    assert len(traces) == 2


@pytest.mark.parametrize("flag", [True, jnp.asarray(True)])
def test_flag_and_argument_are_obeyed_before_the_context(flag, key) -> None:
    x = jnp.ones(50)
    with eqx.training():
        assert nn.Dropout(0.5, inference=flag)(x) is x
    with eqx.inference():
        layer = nn.Dropout(0.5, inference=None)
        assert (layer(x, key=key, inference=False) == 0).any()


def test_default_flag_is_obeyed_within_inference_with_a_warning(key) -> None:
    layer = nn.Dropout(0.5)
    assert layer.inference is False
    with eqx.inference():
        with pytest.warns(UserWarning, match=r"nn.inference_mode\(model, None\)"):
            y = layer(jnp.ones(50), key=key)
        assert (y == 0).any()
        layer(jnp.ones(50), key=key, inference=False)  # no warning


def test_inference_mode_none_makes_a_whole_model_obey(key) -> None:
    model = nn.Sequential([nn.Linear(3, 3, key=key), nn.Dropout(0.9)])
    model = nn.inference_mode(model, None)
    assert model[1].inference is None
    with eqx.inference():
        assert (model(jnp.ones(3)) == model[0](jnp.ones(3))).all()
    assert nn.inference_mode(model, False)[1].inference is False


def test_batch_norm_obeys() -> None:
    norm, state = nn.make_with_state(nn.BatchNorm)(3, inference=None)
    assert norm.batch_counter is not None
    x = jax.random.normal(jax.random.key(0), (8, 3))
    _, trained = norm(x, state)
    assert trained.get(norm.batch_counter) == 1
    with eqx.inference():
        _, same = norm(x, trained)
    assert same.get(norm.batch_counter) == 1


def test_spectral_norm_obeys(key) -> None:
    def make(inference):
        linear = nn.Linear(3, 2, key=key)
        return nn.SpectralNorm(linear, "weight", inference=inference, key=key)

    layer, state = nn.make_with_state(make)(None)
    u, _ = state.get(layer.uv_index)
    with eqx.inference():
        _, state = layer(jnp.ones(3), state)
    assert (state.get(layer.uv_index)[0] == u).all()
    _, state = layer(jnp.ones(3), state)
    assert (state.get(layer.uv_index)[0] != u).any()


def test_attention_and_rnn_pass_none_to_their_dropout(key) -> None:
    attention = nn.MultiheadAttention(2, 4, dropout_p=0.5, inference=None, key=key)
    rnn = nn.RNN.build(nn.GRUCell, 3, 3, 2, dropout=0.5, inference=None, key=key)
    x = jnp.ones((4, 4))
    with eqx.inference():
        attention(x, x, x)
        rnn(jnp.ones((2, 3)))
    with pytest.raises(RuntimeError, match="key"):
        attention(x, x, x)


def test_is_inference_takes_the_first_flag_that_is_given() -> None:
    assert eqx.is_inference() is False
    assert eqx.is_inference(None, True, False) is True
    with eqx.inference():
        assert eqx.is_inference(None) is True
        assert eqx.is_inference(False) is False


def test_explain_tells_of_inference(key) -> None:
    f = eqx.filter_jit(lambda x: x)
    f(jnp.ones(3))
    with eqx.inference():
        text = str(f.explain(jnp.ones(3)))
    assert "`the context inference` was False, and is now True" in text


def test_is_inference_refuses_the_layer_itself() -> None:
    class Layer(eqx.Module):
        inference: bool | None = None

    # The layer would be returned, and so count as `True`, also in training.
    with pytest.raises(TypeError, match=r"is_inference\(layer.inference\)"):
        eqx.is_inference(Layer())
