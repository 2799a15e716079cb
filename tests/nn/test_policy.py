import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn

HALF = nn.Policy(compute_dtype=jnp.bfloat16, output_dtype=jnp.float32)


def test_casts_touch_real_floating_arrays_only(key) -> None:
    state = nn.State(nn.StateIndex(jnp.ones(1)))
    others = {
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "complex": jnp.ones(1, jnp.complex64),
        "number": 1.5,
        "key": key,
        "state": state,
        "index": nn.StateIndex(jnp.ones(1)),
        "function": jnp.tanh,
        "none": None,
    }
    cast = HALF.cast_compute({"x": jnp.ones(2), "np": np.ones(2), **others})
    assert cast.pop("x").dtype == cast.pop("np").dtype == jnp.bfloat16
    assert all(cast[name] is others[name] for name in others)
    assert HALF.cast_params(others) is others
    assert HALF.cast_output(jnp.ones(1, jnp.float16)).dtype == jnp.float32


def test_policy_is_hashable_and_has_no_leaves() -> None:
    assert jax.tree.leaves(HALF) == []
    assert HALF == nn.Policy(None, "bfloat16", np.float32)
    assert hash(HALF) == hash(nn.Policy(None, "bfloat16", np.float32))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("params=f32,compute=bf16,output=f32", ("float32", "bfloat16", "float32")),
        (" compute = half ", (None, "float16", None)),
        ("params=f64, output=float8_e4m3fn", ("float64", None, "float8_e4m3fn")),
        ("", (None, None, None)),
    ],
)
def test_policy_is_read_from_text(text, expected) -> None:
    assert nn.Policy.parse(text) == nn.Policy(*expected)


@pytest.mark.parametrize(
    "text",
    [
        "compute",
        "weights=f32",
        "compute=f32,compute=f16",
        "compute=int32",
        "params=f33",
    ],
)
def test_wrong_text_is_an_error(text) -> None:
    with pytest.raises(ValueError, match=r"policy is written as|real floating dtype"):
        nn.Policy.parse(text)


def test_dtypes_have_short_names_as_well() -> None:
    assert nn.Policy("f32", "bf16") == nn.Policy("float32", "bfloat16")


def test_text_in_place_of_dtypes_is_an_error() -> None:
    text = "params=f32,compute=bf16"
    with pytest.raises(ValueError, match=f"dtype as `param_dtype`; got '{text}'"):
        nn.Policy(text)
    with pytest.raises(ValueError, match=f"dtype as `compute_dtype`; got '{text}'"):
        nn.Policy(compute_dtype=text)


def test_policy_is_parsed_from_text(without_type_checks) -> None:
    with pytest.raises(TypeError, match=r"takes text such as .*; got an int"):
        nn.Policy.parse(3)


def test_dtype_is_not_a_policy(key, without_type_checks) -> None:
    with pytest.raises(TypeError, match=r"`mixed` takes a `Policy`.*compute=bf16"):
        nn.mixed(nn.Linear(2, 2, key=key), jnp.bfloat16)  # pyright: ignore[reportArgumentType]


def test_layer_computes_in_the_compute_dtype(key) -> None:
    seen = []

    class Spy(eqx.Module):
        weight: jax.Array

        def __call__(self, x, i, *, scale):
            seen.append((self.weight.dtype, x.dtype, i.dtype, scale.dtype))
            return x * self.weight, i

    layer = nn.mixed(Spy(jnp.ones(3)), HALF)
    y, i = layer(jnp.ones(3), jnp.arange(3), scale=jnp.ones(1, jnp.float16))
    assert seen == [(jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16)]
    assert y.dtype == jnp.float32 and i.dtype == jnp.int32
    assert layer.weight.dtype == jnp.float32


def test_gradients_have_the_dtype_of_the_parameters(key) -> None:
    mlp = nn.MLP(3, 2, 4, 2, key=key)
    model = nn.mixed(mlp, "compute=bf16,output=f32")
    x = jnp.ones(3)
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: m(x).sum()))(model)
    expected = eqx.filter_grad(lambda m: m(x).sum())(mlp)
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, e, atol=0.05)


def test_parameters_are_cast_once() -> None:
    model = nn.mixed(nn.LayerNorm(3), "params=f16")
    assert model.layer.weight.dtype == jnp.float16
    kept = nn.mixed([nn.LayerNorm(3), jnp.ones(1)], "params=f16", keep=nn.LayerNorm)
    assert kept.layer[0].weight.dtype == jnp.float32
    assert kept.layer[1].dtype == jnp.float16


@pytest.mark.parametrize("keep", [(), (nn.BatchNorm,), (nn.Conv1d,), nn.BatchNorm])
def test_batch_norm_between_convolutions(keep, key) -> None:
    def make():
        layers = [nn.Conv1d(2, 3, 2, key=key), nn.BatchNorm(3, "b", mode="batch")]
        layers += [jax.nn.relu, nn.Conv1d(3, 2, 2, key=key)]
        return nn.Sequential(layers)

    plain, plain_state = nn.make_with_state(make)()
    model, state = nn.make_with_state(lambda: nn.mixed(make(), HALF, keep=keep))()
    x = jax.random.normal(key, (4, 2, 6))

    def apply(model):
        return eqx.filter_jit(
            jax.vmap(model, axis_name="b", in_axes=(0, None), out_axes=(0, None))
        )

    out, new = apply(model)(x, state)
    expected, expected_state = apply(plain)(x, plain_state)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=0.1)
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(expected_state), strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=0.05)


def test_running_averages_stay_in_float32_and_converge(key) -> None:
    def make():
        return nn.mixed(nn.BatchNorm(1, momentum=0.999), "params=bf16,compute=bf16")

    norm, state = nn.make_with_state(make)()
    x = 10 + jax.random.normal(key, (8, 1))
    step = eqx.filter_jit(lambda state: norm(x, state)[1])
    for _ in range(100):
        state = step(state)
    mean, _ = state.get(norm.batch_state_index)
    exact = x.astype(jnp.bfloat16).astype(jnp.float32).mean() * (1 - 0.999**100)
    np.testing.assert_allclose(mean[0], exact, rtol=1e-4)
    assert norm.weight.dtype == jnp.bfloat16


NORMS = {
    "BatchNorm": lambda key: nn.BatchNorm(
        3, "b", mode="batch", channelwise_affine=False
    ),
    "ema": lambda key: nn.BatchNorm(3, "b", mode="ema", channelwise_affine=False),
    "SpectralNorm": lambda key: nn.SpectralNorm(
        nn.Conv1d(3, 3, 1, key=key), "weight", key=key
    ),
    "WeightNorm": lambda key: nn.WeightNorm(nn.Conv1d(3, 3, 1, key=key)),
}


@pytest.mark.parametrize("params", ["f32", "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_layer_returns_the_compute_dtype_to_a_convolution(name, params, key) -> None:
    def make():
        return nn.Sequential([NORMS[name](key), nn.Conv1d(3, 2, 2, key=key)])

    def apply(model, state):
        mapped = jax.vmap(model, (0, None), (0, None), axis_name="b")
        return mapped(jnp.linspace(0, 1, 24).reshape(4, 3, 2), state)

    expected, _ = apply(*nn.make_with_state(make)())
    policy = f"params={params},compute=bf16"
    model, state = nn.make_with_state(lambda: nn.mixed(make(), policy))()
    dtypes = [x.dtype for x in jax.tree.leaves(state)]
    out, state = apply(model, state)
    assert out.dtype == jnp.bfloat16
    assert [x.dtype for x in jax.tree.leaves(state)] == dtypes
    np.testing.assert_allclose(out.astype(float), expected, atol=0.05)
    out, _ = apply(eqx.nn.inference_mode(model), state)
    assert out.dtype == jnp.bfloat16


def test_mixed_stands_in_a_sequential(key) -> None:
    class NoKey(eqx.Module):
        def __call__(self, x):
            return x

    model = nn.Sequential([nn.mixed(NoKey(), HALF), nn.mixed(nn.Dropout(), HALF)])
    assert not model.is_stateful()
    assert model(jnp.ones(3), key=key).dtype == jnp.float32
    norm, state = nn.make_with_state(lambda: nn.mixed(nn.BatchNorm(3), HALF))()
    model = nn.Sequential([norm])
    assert model.is_stateful()
    out, state = model(jnp.ones((4, 3)), state)
    assert out.dtype == jnp.float32
    with pytest.raises(AttributeError, match="nothing"):
        norm.nothing  # noqa: B018


class TwoWays(eqx.Module):
    embedding: nn.Embedding
    linear: nn.Linear
    activation: object

    def __init__(self, key):
        self.activation = jnp.tanh
        self.embedding = nn.Embedding(4, 3, key=key)
        self.linear = nn.Linear(3, 2, key=key)

    def __call__(self, x):
        return self.linear(x)

    def encode(self, x, *, scale=1):
        assert x.dtype == self.linear.weight.dtype
        return scale * self.activation(self.linear(x))

    @eqx.filter_jit
    def compiled(self, x):
        return self.encode(x)

    def attend(self, x):
        return self.embedding.attend(x)

    @staticmethod
    def plain(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x


def test_methods_compute_in_the_compute_dtype_too(key) -> None:
    model = TwoWays(key)
    mixed = nn.mixed(model, HALF)
    x = jnp.linspace(0, 1, 3)
    expected = 2 * model.encode(x)
    y = mixed.encode(x, scale=2)
    assert y.dtype == jnp.float32
    # Rounded to 8 bits, and so not computed in full precision.
    np.testing.assert_allclose(y, expected, rtol=0.05)
    assert (y != expected).any() and (y == y.astype(jnp.bfloat16)).all()
    np.testing.assert_allclose(mixed.compiled(x), mixed.encode(x))
    for wrapped in (eqx.frozen(mixed), nn.mixed(eqx.frozen(model), HALF)):
        assert (wrapped.encode(x) == mixed.encode(x)).all()
    assert nn.mixed(mixed, "output=f16").encode(x).dtype == jnp.float16


def test_what_is_no_method_of_the_instance_is_left_alone(key) -> None:
    mixed = nn.mixed(TwoWays(key), HALF)
    x = jnp.ones(3) / 3
    assert mixed.plain(x) is x and mixed.of_class(x) is x
    assert mixed.activation is jnp.tanh
    assert mixed.linear(x).dtype == jnp.float32 and mixed.linear is mixed.layer.linear


def test_method_is_a_pytree_with_the_parameters(key) -> None:
    mixed = nn.mixed(TwoWays(key), HALF)
    xs = jnp.ones((4, 3))
    assert jax.vmap(mixed.encode)(xs).shape == (4, 2)
    assert eqx.filter_jit(mixed.encode)(xs[0]).dtype == jnp.float32
    grads = eqx.filter_grad(lambda m: m.encode(xs[0]).sum())(mixed)
    assert grads.linear.weight.dtype == jnp.float32 and grads.linear.weight.any()
    assert len(jax.tree.leaves(eqx.filter(mixed.encode, eqx.is_array))) == 3


def test_method_of_a_kept_layer_computes_in_its_own_dtype(key) -> None:
    mixed = nn.mixed(TwoWays(key), "compute=bf16", keep=nn.Embedding)
    x = jnp.linspace(0, 1, 3)
    assert mixed.attend(x).dtype == jnp.bfloat16
    exact = mixed.layer.embedding.attend(x.astype(jnp.bfloat16).astype(jnp.float32))
    assert (mixed.attend(x) == exact.astype(jnp.bfloat16)).all()


def test_default_state_of_a_cell_has_the_dtype_of_its_output(key) -> None:
    for cls in (nn.GRUCell, nn.LSTMCell):
        for policy in ("compute=bf16", HALF):
            cell = nn.mixed(cls(3, 4, key=key), policy)
            outputs, _ = nn.scan_cell(cell, jnp.ones((5, 3)))
            assert outputs.dtype == cell(jnp.ones(3), cell.init_state())[0].dtype


def test_layers_of_a_stack_keep_their_parameters(key) -> None:
    stacked = nn.Stacked(lambda key: nn.Linear(3, 3, key=key), 2, key=key)
    first, _ = nn.mixed(stacked, HALF).unstack()
    assert eqx.tree_equal(first, stacked[0])


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_caches_pass_through_unchanged(dtype, key) -> None:
    attention = nn.MultiheadAttention(2, 8, key=key)
    model = nn.mixed(attention, HALF)
    cache = model.init_cache(4, dtype=dtype)
    assert cache.key.dtype == cache.value.dtype == (dtype or "bfloat16")

    def step(cache, x):
        out, cache = model(x[None], x[None], x[None], is_causal=True, cache=cache)
        return cache, out[0]

    xs = jax.random.normal(key, (3, 8))
    final, outs = jax.lax.scan(step, cache, xs)
    assert final.key.dtype == cache.key.dtype and outs.dtype == jnp.float32
    expected = attention(xs, xs, xs, is_causal=True)
    np.testing.assert_allclose(outs, expected, atol=3e-2)


def test_state_to_start_from_has_the_compute_dtype(key) -> None:
    cell = nn.mixed(nn.LSTMCell(2, 3, key=key), HALF)
    assert all(x.dtype == jnp.bfloat16 for x in cell.init_state())
    assert cell.init_state(dtype="float32")[0].dtype == jnp.float32
    with pytest.raises(AttributeError, match="init_cache"):
        cell.init_cache  # noqa: B018
