"""What every layer has in common, whatever it computes."""

import dataclasses
import functools
import inspect
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn

import equinox_like as eqx
from equinox_like import nn

# For each layer: how it is built from a dtype and a key, and the shape of its input.
LAYERS = {
    "Linear": (lambda dt, k: nn.Linear(3, 2, dtype=dt, key=k), (3,)),
    "scalar Linear": (lambda dt, k: nn.Linear("scalar", 2, dtype=dt, key=k), ()),
    "Identity": (lambda dt, k: nn.Identity(), (3,)),
    "MLP": (lambda dt, k: nn.MLP(3, 2, 4, 2, jnp.tanh, dtype=dt, key=k), (3,)),
    "scan MLP": (
        lambda dt, k: nn.MLP(3, 2, 4, 2, jnp.tanh, dtype=dt, scan=True, key=k),
        (3,),
    ),
    "Conv": (lambda dt, k: nn.Conv2d(2, 3, 2, dtype=dt, key=k), (2, 3, 4)),
    "padded Conv": (
        lambda dt, k: nn.Conv1d(2, 3, 2, 1, "SAME", 2, 1, True, "REFLECT", dt, key=k),
        (2, 5),
    ),
    "Pool": (lambda dt, k: nn.MaxPool1d(2), (2, 5)),
    "AvgPool2d": (lambda dt, k: nn.AvgPool2d(2), (2, 3, 4)),
    "LayerNorm": (lambda dt, k: nn.LayerNorm((2, 3), dtype=dt), (2, 3)),
    "Dropout": (lambda dt, k: nn.Dropout(), (3,)),
    "Sequential": (
        lambda dt, k: nn.Sequential([nn.Linear(3, 2, dtype=dt, key=k), jnp.tanh]),
        (3,),
    ),
    "Lambda": (lambda dt, k: nn.Lambda(jnp.tanh), (3,)),
    "ConvTranspose": (
        lambda dt, k: nn.ConvTranspose2d(2, 3, 2, 2, dtype=dt, key=k),
        (2, 3, 4),
    ),
    "circular ConvTranspose": (
        lambda dt, k: nn.ConvTranspose1d(
            2, 4, 3, 2, 0, "SAME", 2, 2, True, "CIRCULAR", dt, key=k
        ),
        (2, 5),
    ),
    "AdaptivePool": (lambda dt, k: nn.AdaptiveAvgPool2d(2), (2, 3, 4)),
    "RMSNorm": (lambda dt, k: nn.RMSNorm((2, 3), dtype=dt), (2, 3)),
    "GroupNorm": (lambda dt, k: nn.GroupNorm(2, 4, dtype=dt), (4, 3)),
    "InstanceNorm": (lambda dt, k: nn.InstanceNorm(2, dtype=dt), (2, 3)),
    "Einsum": (
        lambda dt, k: nn.Einsum(
            "...hk,hkd->...hd", {"h": 2, "k": 3, "d": 2}, dtype=dt, key=k
        ),
        (2, 3),
    ),
    "Upsample": (lambda dt, k: nn.Upsample(1.5, method="cubic"), (2, 3, 4)),
    "LearnedPositionalEmbedding": (
        lambda dt, k: nn.LearnedPositionalEmbedding(5, 4, dt, key=k),
        (3, 4),
    ),
    "SinusoidalPositionalEmbedding": (
        lambda dt, k: nn.SinusoidalPositionalEmbedding(4),
        (3, 4),
    ),
    "PReLU": (lambda dt, k: nn.PReLU(dtype=dt), (3,)),
    "Embedding": (lambda dt, k: nn.Embedding(4, 3, dtype=dt, key=k), ()),
    "RotaryPositionalEmbedding": (
        lambda dt, k: nn.RotaryPositionalEmbedding(4, dtype=dt),
        (3, 4),
    ),
    "MultiheadAttention": (
        lambda dt, k: nn.MultiheadAttention(2, 4, dtype=dt, key=k),
        (3, 4),
    ),
    "grouped MultiheadAttention": (
        lambda dt, k: nn.MultiheadAttention(4, 4, num_kv_heads=2, dtype=dt, key=k),
        (3, 4),
    ),
    "GRUCell": (lambda dt, k: nn.GRUCell(3, 2, dtype=dt, key=k), (3,)),
    "LSTMCell": (lambda dt, k: nn.LSTMCell(3, 2, dtype=dt, key=k), (3,)),
    "ReversibleBlock": (
        lambda dt, k: nn.ReversibleBlock(nn.Linear(2, 2, dtype=dt, key=k), jnp.tanh),
        (4,),
    ),
    "plain ReversibleSequential": (  # which has a forward mode
        lambda dt, k: nn.ReversibleSequential(
            [nn.ReversibleBlock(nn.Linear(2, 2, dtype=dt, key=k), jnp.tanh)],
            memory_efficient=False,
        ),
        (4,),
    ),
}
# These take or return something other than one array, or call a layer that they are given.
NOT_IN_LAYERS = {
    nn.BatchNorm,
    nn.Bidirectional,
    nn.LoRA,
    nn.Mixed,
    nn.Quantized,
    nn.RNN,
    nn.Shared,
    nn.SpectralNorm,
    nn.Stacked,
    nn.StatefulLayer,
    nn.WeightNorm,
}
every_layer = pytest.mark.parametrize("name", LAYERS)
KEY = jax.random.key(0)


def test_each_layer_or_a_sibling_is_in_the_list_above() -> None:
    layers = {
        value
        for value in vars(nn).values()
        if isinstance(value, type)
        and issubclass(value, eqx.Module)
        and "__call__" in dir(value)
    }
    built = [
        eqx.filter_eval_shape(build, jnp.dtype("float32"), KEY)
        for build, _ in LAYERS.values()
    ]
    # `Conv3d` is tested by `Conv2d`, as both are a `Conv`.
    tested = {base for layer in built for base in type(layer).__mro__}
    tested -= {*nn.StatefulLayer.__mro__, Generic}
    missing = {layer for layer in layers if tested.isdisjoint(layer.__mro__)}
    assert missing == NOT_IN_LAYERS


@functools.cache
def make(name):
    build, shape = LAYERS[name]
    x = np.random.default_rng(0).normal(size=shape)
    return build(jnp.float32, KEY), jax.device_put(np.asarray(x, np.float32))


def call(layer, x):
    """Calls any of the layers with one array."""
    key = jax.random.key(2)
    match layer:
        case nn.Embedding():
            return layer(2, key=key) + jnp.reshape(x, (1,))
        case nn.MultiheadAttention():
            return layer(x, x, x, key=key)
        case nn.GRUCell():
            return layer(x, jnp.stack([x[0], -x[1]]), key=key)
        case nn.LSTMCell():
            hidden = jnp.stack([x[0], -x[1]])
            return jnp.concatenate(layer(x, (hidden, -hidden), key=key))
    return layer(x, key=key)


compiled = eqx.filter_jit(call)


@every_layer
def test_key_is_keyword_only_and_optional(name) -> None:
    layer, _ = make(name)
    parameter = inspect.signature(layer).parameters["key"]
    assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None


@every_layer
def test_key_by_position_is_answered(name, without_type_checks) -> None:
    layer, x = make(name)
    number = {"MultiheadAttention": 3, "GRUCell": 2, "LSTMCell": 2}
    arrays = [x] * number.get(name.split()[-1], 1)
    with pytest.raises(TypeError, match=r"by name: `.*key=key"):
        layer(*arrays, jax.random.key(0))


@every_layer
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtype_is_kept_under_strict_promotion(name, dtype) -> None:
    build, shape = LAYERS[name]

    def run(key, x):
        layer = build(jnp.dtype(dtype), key)
        return eqx.filter(layer, eqx.is_inexact_array), call(layer, x)

    # The variance of complex numbers is real.
    norms = ("LayerNorm", "GroupNorm", "InstanceNorm")
    mixes = name in norms and dtype == "complex64"
    promotion = jax.numpy_dtype_promotion("standard" if mixes else "strict")
    # Traced, not run: promotion is decided while tracing.
    with promotion, jax.numpy_rank_promotion("raise"):
        dtypes = {x.dtype for x in eval_static(run, shape, dtype)}
    assert dtypes == {jnp.dtype(dtype)}


@every_layer
def test_parameters_are_cast_to_the_precision_of_the_context(name) -> None:
    layer, x = make(name)
    x = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    with nn.precision("compute=bf16"):
        out = jax.eval_shape(lambda x: call(layer, x), x)
    assert out.dtype == jnp.bfloat16


def eval_static(run, shape, dtype):
    """The leaves of the result of `run(key, x)`, as shapes and dtypes."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(lambda key, x: jax.tree.leaves(run(key, x)), KEY, x)


@every_layer
def test_jit_and_vmap_agree_with_the_plain_call(name) -> None:
    layer, x = make(name)
    plain = call(layer, x)
    np.testing.assert_allclose(compiled(layer, x), plain, rtol=1e-6)
    stacked = jax.jit(jax.vmap(lambda x: call(layer, x)))(np.stack([x, x]))
    np.testing.assert_allclose(stacked, np.stack([plain, plain]), rtol=1e-5)


class Doubled(eqx.Module):
    """Stands for the array with twice these values."""

    half: jax.Array

    def __jax_array__(self):
        return 2 * self.half


@every_layer
def test_object_that_converts_to_an_array_may_stand_for_a_parameter(name) -> None:
    layer, x = make(name)
    double = lambda x: Doubled(x / 2) if eqx.is_inexact_array(x) else x  # noqa: E731
    out = compiled(jax.tree.map(double, layer), x)
    wanted = np.asarray(compiled(layer, x))
    # Where XLA computes the conversion within a sum, the sum may be rounded otherwise.
    rounding = np.finfo(wanted.dtype).eps * np.abs(wanted).max()
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=rounding)


@every_layer
def test_gradient_has_an_entry_for_each_parameter(name) -> None:
    layer, x = make(name)
    loss = eqx.filter_grad(lambda model: jnp.sum(call(*model)))
    grads = jax.jit(lambda x: jax.tree.leaves(loss((layer, x))))(x)
    inexact = jax.tree.leaves(eqx.filter((layer, x), eqx.is_inexact_array))
    assert [g.shape for g in grads] == [p.shape for p in inexact]
    assert all(np.isfinite(g).all() for g in grads)


# What Dropout draws depends on the dtype of JAX's default.
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Dropout"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lower_precision_agrees_with_float64(name, dtype) -> None:
    layer, x = make(name)
    # The same numbers in both, so that only the arithmetic differs.
    layer, x = cast((layer, x), dtype)
    low = compiled(layer, x)
    with jax.enable_x64(True):
        high = compiled(*cast((layer, x), "float64"))
    assert low.dtype == dtype
    tolerance = {"bfloat16": 0.05, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(
        np.asarray(low, np.float64), high, rtol=tolerance, atol=tolerance
    )


@every_layer
def test_gradients_are_those_of_finite_differences(name) -> None:
    layer, x = make(name)
    rng, step = np.random.default_rng(1), 1e-4
    with jax.enable_x64(True):
        model = cast((layer, x), "float64")
        arrays, rest = eqx.partition(jax.device_get(model), eqx.is_inexact_array)
        direction = jax.tree.map(lambda a: rng.normal(size=a.shape), arrays)

        def moved(by):
            return jax.tree.map(
                lambda a, d: jax.device_put(a + by * d), arrays, direction
            )

        def f(arrays):
            return call(*eqx.combine(arrays, rest))

        @jax.jit
        def derivatives(arrays, direction, cotangent):
            _, tangent = jax.jvp(f, (arrays,), (direction,))
            return tangent, jax.vjp(f, arrays)[1](cotangent)[0]

        # The programs that other tests of the layer run in float64.
        more, less = (compiled(*eqx.combine(moved(h), rest)) for h in (step, -step))
        expected = (np.asarray(more) - np.asarray(less)) / (2 * step)
        cotangent = rng.normal(size=expected.shape)
        tangent, gradients = derivatives(arrays, direction, cotangent)
    np.testing.assert_allclose(tangent, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
    along = sum(np.vdot(gradient, d) for gradient, d in pairs)
    np.testing.assert_allclose(
        along, np.vdot(cotangent, expected), rtol=1e-5, atol=1e-5
    )


def cast(tree, dtype):
    def each(leaf):
        if not eqx.is_inexact_array(leaf):
            return leaf
        return jax.device_put(np.asarray(leaf).astype(dtype))

    tree = jax.tree.map(each, tree)
    if isinstance(tree[0], nn.RotaryPositionalEmbedding):
        return nn.RotaryPositionalEmbedding(4, dtype=dtype), tree[1]
    return tree


@every_layer
def test_constructor_can_be_traced(name) -> None:
    build, _ = LAYERS[name]

    def arrays(key):
        return jax.tree.leaves(eqx.filter(build(jnp.float32, key), eqx.is_array))

    expected = arrays(KEY)
    structs = jax.eval_shape(arrays, KEY)
    assert [s.shape for s in structs] == [e.shape for e in expected]


@every_layer
def test_call_runs_in_a_scope_of_its_name(name) -> None:
    layer, x = make(name)
    lowered = jax.jit(lambda x: call(layer, x + 1)).lower(x).as_text(debug_info=True)
    scope = f"eqx.nn.{name.split()[-1]}/"
    assert (scope in lowered) is (name not in ("Lambda", "Identity"))


def test_avg_pool_nests_the_scope_of_pool() -> None:
    layer, x = make("AvgPool2d")
    lowered = jax.jit(layer.__call__).lower(x).as_text(debug_info=True)
    assert "eqx.nn.AvgPool2d/eqx.nn.Pool/" in lowered


@every_layer
def test_layer_is_frozen(name) -> None:
    layer, _ = make(name)
    for field in dataclasses.fields(layer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layer, field.name, None)


@pytest.mark.parametrize(
    ("cls", "dynamic", "static"),
    [
        (nn.Linear, "weight bias", "in_features out_features use_bias"),
        (nn.Identity, "", ""),
        (
            nn.MLP,
            "layers activation final_activation",
            "use_bias use_final_bias in_size out_size width_size depth scan",
        ),
        (
            nn.Conv2d,
            "weight bias",
            "num_spatial_dims in_channels out_channels kernel_size stride padding "
            "dilation groups use_bias padding_mode preferred_element_type",
        ),
        (
            nn.MaxPool1d,
            "init operation",
            "num_spatial_dims kernel_size stride padding use_ceil",
        ),
        (
            nn.ConvTranspose2d,
            "weight bias",
            "num_spatial_dims in_channels out_channels kernel_size stride padding "
            "output_padding dilation groups use_bias padding_mode "
            "preferred_element_type",
        ),
        (nn.AdaptiveAvgPool1d, "operation", "target_shape"),
        (nn.LayerNorm, "weight bias", "shape eps use_weight use_bias"),
        (nn.RMSNorm, "weight bias", "shape eps use_weight use_bias"),
        (nn.GroupNorm, "weight bias", "groups channels eps channelwise_affine"),
        (nn.InstanceNorm, "weight bias", "channels eps channelwise_affine"),
        (nn.Einsum, "weight bias", "equation use_bias"),
        (nn.Upsample, "", "size scale method antialias"),
        (
            nn.LearnedPositionalEmbedding,
            "weight",
            "max_length embedding_size check_bounds",
        ),
        (nn.SinusoidalPositionalEmbedding, "", "embedding_size theta"),
        (nn.EMA, "average steps weight", "decay debias _skeleton"),
        (nn.PReLU, "negative_slope", ""),
        (nn.Embedding, "weight", "num_embeddings embedding_size check_bounds"),
        (
            nn.RotaryPositionalEmbedding,
            "",
            "embedding_size theta dtype interleaved frequencies",
        ),
        (
            nn.MultiheadAttention,
            "query_proj key_proj value_proj output_proj dropout rotary attention sinks",
            "num_heads query_size key_size value_size output_size qk_size vo_size "
            "use_query_bias use_key_bias use_value_bias use_output_bias num_kv_heads "
            "implementation softcap",
        ),
        (
            nn.GRUCell,
            "weight_ih weight_hh bias bias_n",
            "input_size hidden_size use_bias",
        ),
        (
            nn.LSTMCell,
            "weight_ih weight_hh bias",
            "input_size hidden_size use_bias",
        ),
        (
            nn.BatchNorm,
            "weight bias ema_first_time_index ema_state_index batch_counter "
            "batch_state_index axis_name inference",
            "input_size eps channelwise_affine momentum mode batch_axis debias unbiased "
            "num_spatial_dims",
        ),
        (
            nn.SpectralNorm,
            "layer uv_index inference",
            "weight_name num_power_iterations eps",
        ),
        (nn.WeightNorm, "layer g", "weight_name axis"),
        (nn.Shared, "pytree where get", ""),
        (nn.StateIndex, "init", "marker"),
        (nn.Dropout, "p inference", "broadcast_axes"),
        (nn.Sequential, "layers", ""),
        (nn.Lambda, "fn", ""),
        (nn.ReversibleBlock, "f g", "split_axis"),
        (nn.ReversibleSequential, "blocks", "memory_efficient"),
    ],
)
def test_fields_are_those_of_the_contract_in_order(cls, dynamic, static) -> None:
    fields = dataclasses.fields(cls)
    names = {True: [], False: []}
    for field in fields:
        names[bool(field.metadata.get("static"))].append(field.name)
    assert names[False] == dynamic.split() and names[True] == static.split()


def test_scan_is_off_on_the_class() -> None:
    assert nn.MLP.scan is False


def test_layers_may_be_subclassed(key) -> None:
    class Scaled(nn.Linear):
        scale: float

        def __init__(self, size, *, key):
            super().__init__(size, size, key=key)
            self.scale = 2.0

        def __call__(self, x, *, key=None):
            return self.scale * super().__call__(x)

    layer = Scaled(3, key=key)
    assert (layer(jnp.ones(3)) == 2 * nn.Linear(3, 3, key=key)(jnp.ones(3))).all()
    with pytest.raises(eqx.ShapeError, match=r"^Scaled takes"):
        layer(jnp.ones(4))


def test_names_of_the_peer_are_there() -> None:
    names = (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d "
        "AdaptiveMaxPool2d AdaptiveMaxPool3d AdaptivePool AvgPool1d AvgPool2d AvgPool3d "
        "BatchNorm Conv Conv1d Conv2d Conv3d ConvTranspose ConvTranspose1d "
        "ConvTranspose2d ConvTranspose3d delete_init_state Dropout Embedding GroupNorm "
        "GRUCell Identity inference_mode Lambda LayerNorm Linear LSTMCell "
        "make_with_state MaxPool1d MaxPool2d MaxPool3d MLP MultiheadAttention Pool PReLU "
        "RMSNorm RotaryPositionalEmbedding Sequential Shared SpectralNorm State "
        "StatefulLayer StateIndex WeightNorm"
    )
    assert set(names.split()) <= set(dir(nn))
    for name in ("BatchNorm", "SpectralNorm", "Sequential", "Stacked", "Mixed"):
        assert issubclass(getattr(nn, name), nn.StatefulLayer)


def attention(**options):
    layer = drawn(lambda: nn.MultiheadAttention(2, 4, key=KEY))
    return lambda x: layer(x, x, x, **options)


# Functions of an array of shape (n, 4), or (4, n), for any `n`.
OF_ANY_LENGTH = {
    "attention": attention(),
    "causal attention": attention(is_causal=True, window=2),
    "masked attention": lambda x: attention(mask=nn.causal_mask(len_of(x)))(x),
    "padded attention": lambda x: attention(mask=nn.padding_mask(2, len_of(x)))(x),
    "weights": attention(return_weights=True),
    "XLA's attention": attention(implementation="xla"),
    "dot_product_attention": lambda x: nn.dot_product_attention(x, x, x),
    "RotaryPositionalEmbedding": nn.RotaryPositionalEmbedding(4),
    "SinusoidalPositionalEmbedding": nn.SinusoidalPositionalEmbedding(4),
    "LearnedPositionalEmbedding": lambda x: learned(x, offset=1),
    "Conv": drawn(lambda: nn.Conv1d(4, 2, 3, 2, padding="SAME", key=KEY)),
    "MaxPool": nn.MaxPool1d(2, 2, use_ceil=True),
    "Upsample": nn.Upsample(2),
}
learned = drawn(lambda: nn.LearnedPositionalEmbedding(9, 4, key=KEY))


def len_of(x):
    return x.shape[0]


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_length_may_be_a_symbolic_dimension(name, without_type_checks):
    f = OF_ANY_LENGTH[name]
    is_spatial = name in ("Conv", "MaxPool", "Upsample")
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 2", "n <= 8"])
    shape = (4, n) if is_spatial else (n, 4)
    exported = eqx.filter_export(f)(jax.ShapeDtypeStruct(shape, jnp.float32))
    for length in (2, 5):
        x = np.random.default_rng(length).normal(size=(length, 4)).astype(np.float32)
        x = jax.device_put(x.T if is_spatial else x)
        out, expected = exported(x), eqx.filter_jit(f)(x)
        out, expected = jax.device_get((out, expected))
        assert eqx.tree_equal(out, expected, rtol=1e-5, atol=1e-6)


# Gradients in half precision

NUMBER = 4096  # of positions; in bfloat16, a sum of ones stops at 256
MORE_LAYERS = {
    "vector PReLU": (lambda dt, k: nn.PReLU(jnp.full((2, 1), 0.25), dtype=dt), (2, 3)),
    "grouped Conv": (
        lambda dt, k: nn.Conv1d(4, 4, 3, groups=4, padding=1, dtype=dt, key=k),
        (4, 5),
    ),
    "biased attention": (
        lambda dt, k: nn.MultiheadAttention(
            2,
            4,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            dtype=dt,
            key=k,
        ),
        (3, 4),
    ),
    "RNN": (
        lambda dt, k: nn.RNN.build(
            nn.LSTMCell, 3, 2, bidirectional=True, dtype=dt, key=k
        ),
        (3, 3),
    ),
    "LoRA": (
        lambda dt, k: nn.LoRA(
            nn.GRUCell(3, 2, dtype=dt, key=k),
            2,
            weight_name=("weight_ih", "weight_hh"),
            key=k,
        ),
        (3,),
    ),
    "WeightNorm": (
        lambda dt, k: nn.WeightNorm(nn.Conv1d(2, 3, 2, dtype=dt, key=k)),
        (2, 5),
    ),
    "Stacked": (
        lambda dt, k: nn.Stacked(lambda k: nn.Linear(3, 3, dtype=dt, key=k), 2, key=k),
        (3,),
    ),
    "BatchNorm": (lambda dt, k: nn.make_with_state(nn.BatchNorm)(3, dtype=dt), (3, 2)),
}


class Called(eqx.Module):
    """A layer that is called with a batch of arrays."""

    layer: object

    def __call__(self, xs):
        if isinstance(self.layer, tuple):
            return self.layer[0](xs, self.layer[1])[0]
        return jax.vmap(self._of_one)(xs)

    def _of_one(self, x):
        match self.layer:
            case nn.Embedding():  # `call` adds a row to `x`, outside of the layer
                return nn.in_float32(jnp.add, self.layer(2), x.reshape(1))
            case nn.RNN():
                return self.layer(x)[0]
            case nn.LoRA():
                return self.layer(x, jnp.stack([x[0], -x[1]]))
        return call(self.layer, x)


@functools.cache
def built(name, dtype=jnp.float32):
    build, shape = (LAYERS | MORE_LAYERS)[name]
    return Called(build(dtype, KEY)), shape


def gradients(layer, policy, *args):
    """By `loss(layer, xs, factors)`; the factors keep XLA from folding constants."""
    params, rest = eqx.partition(layer, eqx.is_inexact_array)

    def loss(params, xs, factors):
        model = eqx.combine(params, rest)
        model = model if policy is None else nn.mixed(model, policy)
        out = model(xs).astype(jnp.float32)
        return jnp.sum(out * factors.reshape(-1, *[1] * (out.ndim - 1)))

    return jax.grad(loss)(params, *args)


compiled_gradients = eqx.filter_jit(gradients)


def each_pair(grads, others):
    paths = jax.tree_util.tree_leaves_with_path(grads)
    for (path, one), other in zip(paths, jax.tree.leaves(others), strict=True):
        yield path, np.asarray(one, np.float64), np.asarray(other, np.float64)


@pytest.mark.parametrize("name", LAYERS | MORE_LAYERS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gradient_on_ones_is_that_of_float32(name, dtype) -> None:
    layer, shape = built(name)
    # Less than 1, because sums of more than 65504 are infinite in float16.
    args = jnp.ones((NUMBER, *shape)), jnp.full(NUMBER, 0.125)
    policy = f"params=f32,compute={dtype},output=f32"
    # Several layers, or steps, round one after the other.
    tolerance = 0.03 if name in ("MLP", "scan MLP", "RNN") else 0.01
    for path, found, exact in each_pair(
        compiled_gradients(layer, policy, *args), compiled_gradients(layer, None, *args)
    ):
        atol = tolerance * np.abs(exact).max() + 1e-6 * NUMBER
        np.testing.assert_allclose(found, exact, 0, atol, err_msg=str(path))


# In BatchNorm, the examples depend on each other.
@pytest.mark.parametrize("name", sorted({*LAYERS, *MORE_LAYERS} - {"BatchNorm"}))
@pytest.mark.parametrize("stored", [False, True])
def test_gradient_is_the_sum_of_those_of_all_examples(name, stored) -> None:
    layer, shape = built(name, jnp.bfloat16 if stored else jnp.float32)
    policy = "compute=bf16,output=f32"
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.normal(size=(NUMBER // 4, *shape)), jnp.float32)
    factors = jnp.asarray(rng.normal(size=NUMBER // 4), jnp.float32)

    def of_each(layer, xs, factors):
        each = lambda x, f: gradients(layer, policy, x[None], f[None])  # noqa: E731
        return jax.vmap(each)(xs, factors)

    whole = compiled_gradients(layer, policy, xs, factors)
    parts = eqx.filter_jit(of_each)(layer, xs, factors)
    for path, found, each in each_pair(whole, parts):
        # Each example's gradient is rounded, and so is the result. Where it is zero, as
        # that of a bias of keys, there is only the rounding of its terms.
        error = np.abs(found - each.sum(0))
        limit = 2**-6 * (np.abs(found) + np.sqrt((each**2).sum(0))) + 0.05
        assert (error <= limit).all(), (path, error, limit)
