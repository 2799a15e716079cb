"""`nn.precision`: each layer computes as it does under a policy of its own."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis.extra.numpy import arrays
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn
from equinox_like.nn._base.precision import saturated

K = jax.random.key(0)
X = jnp.asarray(np.linspace(-1, 1, 4, dtype=np.float32))


def stateful(make):
    layer, state = nn.make_with_state(make)()
    return layer, (np.ones((2, 4), np.float32) * X, state)


def of(build, *args):
    return lambda: (drawn(build), args)


LAYERS = {
    "Linear": of(lambda: nn.Linear(4, 2, key=K), X),
    "MLP": of(lambda: nn.MLP(4, 2, 8, 1, key=K), X),
    "Conv": of(lambda: nn.Conv1d(1, 2, 2, key=K), X[None]),
    "ConvTranspose": of(lambda: nn.ConvTranspose1d(1, 2, 2, key=K), X[None]),
    "Einsum": of(lambda: nn.Einsum("i,io->o", {"i": 4, "o": 2}, key=K), X),
    "Embedding": of(lambda: nn.Embedding(3, 2, key=K), jnp.asarray(1)),
    "Embedding.attend": lambda: (drawn(lambda: nn.Embedding(3, 4, key=K)).attend, (X,)),
    "LearnedPositional": of(
        lambda: nn.LearnedPositionalEmbedding(4, 1, key=K), X[:, None]
    ),
    "LayerNorm": lambda: (nn.LayerNorm(4), (X,)),
    "RMSNorm": lambda: (nn.RMSNorm(4), (X,)),
    "GroupNorm": lambda: (nn.GroupNorm(2, 4), (X,)),
    "BatchNorm": lambda: stateful(lambda: nn.BatchNorm(4)),
    "PReLU": lambda: (nn.PReLU(), (X,)),
    "GRUCell": of(lambda: nn.GRUCell(4, 2, key=K), X, jnp.ones(2)),
    "LSTMCell": of(lambda: nn.LSTMCell(4, 2, key=K), X, (jnp.ones(2), jnp.ones(2))),
    "RNN": of(lambda: nn.RNN.build(nn.LSTMCell, 4, 2, key=K), X[None]),
    "Attention": of(lambda: nn.MultiheadAttention(2, 4, key=K), *[X[None]] * 3),
    "LoRA": of(lambda: nn.LoRA(nn.Linear(4, 2, key=K), rank=1, key=K), X),
    "Stacked": of(lambda: nn.Stacked(lambda k: nn.Linear(4, 4, key=k), 2, key=K), X),
    "Reversible": of(
        lambda: nn.ReversibleSequential(
            [nn.ReversibleBlock(nn.Linear(2, 2, key=K), nn.Linear(2, 2, key=K))]
        ),
        X,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_computes_as_it_does_when_mixed(name) -> None:
    layer, args = LAYERS[name]()
    leaves, treedef = jax.tree.flatten(args)
    with nn.precision("compute=bf16"):
        out = eqx.filter_jit(layer)(*treedef.unflatten(leaves))
    mixed = nn.mixed(layer, "compute=bf16")
    expected = eqx.filter_jit(mixed)(*treedef.unflatten(leaves))
    arrays, wanted = (eqx.filter(t, eqx.is_inexact_array) for t in (out, expected))
    first = jax.tree.leaves(arrays)[0]
    assert first.dtype == jnp.bfloat16
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a, np.float32), np.asarray(b, np.float32)
        ),
        arrays,
        wanted,
    )


def test_plain_jit_obeys_and_gradients_have_the_dtype_of_the_parameters() -> None:
    layer = nn.Linear(4, 2, key=K)
    f = jax.jit(lambda layer, x: layer(x))
    assert f(layer, X).dtype == jnp.float32
    with nn.precision(jnp.bfloat16):
        assert f(layer, X).dtype == jnp.bfloat16
        grads = eqx.filter_grad(lambda m: m(X).sum())(layer)
    assert grads.weight.dtype == jnp.float32
    assert f(layer, X).dtype == jnp.float32


@pytest.mark.parametrize(
    ("layer", "row"),
    [
        (nn.Embedding(3, 2, key=K), lambda layer, i: layer(i)),
        (
            nn.LearnedPositionalEmbedding(3, 2, key=K),
            lambda layer, i: layer(
                jnp.zeros((1, 2), layer.weight.dtype), positions=i[None]
            )[0],
        ),
    ],
)
@pytest.mark.parametrize("where", ["precision", "mixed", "stored"])
def test_gradient_of_a_frequent_row_is_summed_in_float32(layer, row, where):
    def total(layer):
        rows = jax.vmap(lambda i: row(layer, i))(jnp.ones(1000, int))
        assert rows.dtype == jnp.bfloat16
        return rows.sum(dtype=jnp.float32)

    number = jnp.float32
    if where == "mixed":
        layer = nn.mixed(layer, "compute=bf16")
    elif where == "stored":
        layer = nn.Policy.parse("params=bf16,output=bf16").cast_params(layer)
        number = jnp.bfloat16
    with nn.precision("bfloat16" if where == "precision" else None):
        grads = eqx.filter_grad(total)(layer)
        along = eqx.filter_jvp(total, (layer,), (grads,))[1]
    assert grads.weight.dtype == number
    np.testing.assert_array_equal(grads.weight, [[0, 0], [1000, 1000], [0, 0]])
    assert along == 1000 * 1000 * 2


def test_gradient_of_a_frequent_row_is_summed_in_float32_with_lora():
    def total(layer):
        rows = jax.vmap(layer)(jnp.ones(1000, int))
        return rows.sum(dtype=jnp.float32)

    layer = nn.LoRA(nn.Embedding(3, 2, key=K), 2, key=K)
    expected = eqx.filter_grad(total)(layer).b
    grads = eqx.filter_grad(total)(nn.mixed(layer, "compute=bf16"))
    np.testing.assert_allclose(grads.layer.b, expected, rtol=0.02)


def test_precision_none_gives_layers_their_own_dtype_back() -> None:
    layer = nn.Linear(4, 2, key=K)
    with nn.precision(nn.Policy(compute_dtype=jnp.bfloat16)), nn.precision(None):
        assert layer(X).dtype == jnp.float32


def test_dtype_may_have_its_short_name() -> None:
    layer = nn.Linear(4, 2, key=K)
    with nn.precision("bf16"):
        assert layer(X).dtype == jnp.bfloat16


def test_scan_cell_takes_a_state_of_the_other_dtype() -> None:
    cell = nn.GRUCell(4, 2, key=K)
    with nn.precision("bfloat16"):
        for init in (None, jnp.ones(2)):
            outputs, _ = nn.scan_cell(cell, X[None], init)
            assert outputs.dtype == jnp.bfloat16


def test_attention_with_a_cache_keeps_the_dtype_of_the_cache() -> None:
    attention = nn.MultiheadAttention(2, 4, key=K)
    with nn.precision("bfloat16"):
        cache = attention.init_cache(3)
        out, cache = attention(X[None], X[None], X[None], cache=cache)
    assert out.dtype == jnp.bfloat16 and cache.key.dtype == jnp.float32


@pytest.mark.parametrize("policy", ["params=f32", "compute=bf16,output=f32"])
def test_policy_that_says_more_is_refused_with_the_fix(policy) -> None:
    with pytest.raises(ValueError, match=r"policy\.cast_output"):
        nn.precision(policy)


def test_dtype_that_is_not_floating_is_refused() -> None:
    with pytest.raises(ValueError, match="precision takes a real floating dtype"):
        nn.precision(int)
    with pytest.raises(ValueError, match="as `policy`; got 'nonsense'"):
        nn.precision("nonsense")


def test_cast_to_precision_casts_within_only() -> None:
    tree = {"x": X, "i": jnp.arange(3)}
    assert nn.cast_to_precision(tree) is tree
    with nn.precision("bfloat16"):
        cast = nn.cast_to_precision(tree)
    assert cast["x"].dtype == jnp.bfloat16 and cast["i"].dtype == jnp.int32


EIGHT_THOUSAND = jnp.ones((8192, 4))


def in_a_scan(model, xs):
    return jax.lax.scan(lambda total, x: (total + model(x).sum(), None), 0.0, xs)[0]


def over_devices(model, xs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays, rest = eqx.partition(model, eqx.is_array)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    def total(arrays, xs):
        return jax.lax.psum(jax.vmap(eqx.combine(arrays, rest))(xs).sum(), "data")

    return total(arrays, xs)


def on_an_explicit_mesh(model, xs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.vmap(model)(jax.sharding.reshard(xs, P("data"))).sum()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    "total",
    [
        lambda model, xs: jax.vmap(model)(xs).sum(),
        lambda model, xs: jax.vmap(jax.vmap(model))(xs.reshape(64, 128, 4)).sum(),
        in_a_scan,
        over_devices,
        on_an_explicit_mesh,
    ],
    ids=["vmap", "vmap of vmap", "scan", "shard_map", "explicit mesh"],
)
def test_gradient_of_a_bias_is_summed_in_float32(total, dtype) -> None:
    model = nn.mixed(nn.Linear(4, 2, key=K), f"params=f32,compute={dtype},output=f32")
    grads = eqx.filter_jit(eqx.filter_grad(total))(model, EIGHT_THOUSAND)
    assert grads.bias.tolist() == [8192, 8192]


def test_convolution_with_a_bias_learns_in_bfloat16(key) -> None:
    x = jax.random.normal(key, (16, 1, 16, 16))
    model = nn.mixed(nn.Conv2d(1, 1, 1, key=key), "compute=bf16,output=f32")

    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - (0.5 * x + 3)) ** 2)

    @eqx.filter_jit
    def step(model, _):
        grads = eqx.filter_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), None

    for _ in range(60):
        model, _ = step(model, None)
    assert loss(model) < 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_function_computes_half_precision_in_float32(dtype) -> None:
    seen = []

    def scaled(x, y, i):
        seen.append((x.dtype, y.dtype, i.dtype))
        return x * y * i

    x, i = jnp.ones(2, dtype), jnp.arange(2)
    out = nn.in_float32(scaled, x, x, i)
    assert seen == [("float32", "float32", i.dtype)] and out.dtype == dtype


@pytest.mark.parametrize("other", [jnp.float32(2), 2.0, jnp.arange(2), 2j])
def test_function_of_wider_numbers_gets_them_as_they_are(other) -> None:
    x = jnp.ones(2)
    out = nn.in_float32(lambda x, y: x * y + x.dtype.itemsize, x, other)
    assert out.tolist() == (x * other + 4).tolist() and out.dtype == (x * other).dtype
    mixed = nn.in_float32(jnp.add, x.astype(jnp.bfloat16), x)
    assert mixed.dtype == jnp.float32


def test_gradient_of_a_scale_of_the_users_is_summed_in_float32() -> None:
    class Scale(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return nn.in_float32(jnp.multiply, self.weight, x)

    model = nn.mixed(Scale(jnp.ones(4)), "compute=bf16,output=f32")
    loss = lambda model: jax.vmap(model)(EIGHT_THOUSAND).sum()  # noqa: E731
    assert eqx.filter_jit(eqx.filter_grad(loss))(model).weight.tolist() == [8192] * 4


# Casts to narrower floats

FLOATS = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e3m4",
    "float16",
    "bfloat16",
    "float32",
]


@given(
    arrays(np.float32, 8, elements=st.floats(width=32, allow_subnormal=False)),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.sampled_from(FLOATS),
)
def test_what_is_stored_in_a_narrower_float_saturates(values, source, target) -> None:
    with np.errstate(all="ignore"):
        x = jax.device_put(values.astype(source))
    bounds, wide = jnp.finfo(target), np.asarray(x).astype(float)
    expected = x.astype(target)  # with infinity, or NaN, for what is too large
    if bounds.max < jnp.finfo(source).max:
        clipped = np.clip(wide, float(bounds.min), float(bounds.max))
        expected = jnp.asarray(clipped, jnp.float32).astype(target)
        assert (np.isnan(np.asarray(expected, float)) == np.isnan(wide)).all()
    found = saturated(x, target)
    assert found.dtype == target
    np.testing.assert_array_equal(*(np.asarray(y, float) for y in (found, expected)))


@pytest.mark.parametrize("value", [500.0, -500.0])
def test_float8_saturates_in_all_casts_and_float16_does_not(value) -> None:
    policy = nn.Policy(*["float8_e4m3fn"] * 3)
    x, bound = jnp.full(2, value), np.copysign(448, value)
    for cast in (policy.cast_params, policy.cast_compute, policy.cast_output):
        np.testing.assert_array_equal(cast(x).astype(float), bound)
    with nn.precision("float8_e4m3fn"):
        np.testing.assert_array_equal(nn.cast_to_precision(x).astype(float), bound)
    options = {"dtype": jnp.float8_e4m3fn, "weight_init": value, "key": K}
    linear = nn.Linear(2, 2, use_bias=False, **options)
    np.testing.assert_array_equal(linear.weight.astype(float), bound)
    half = (x / 2).astype(jnp.float8_e4m3fn)
    out = nn.in_float32(lambda x: 2 * x + x, half)
    np.testing.assert_array_equal(out.astype(float), bound)
    # A loss scale looks for infinity.
    half = nn.Policy(compute_dtype="float16").cast_compute(x * 1000)
    assert jnp.isinf(half).all()
