"""Quantised weights: what they are, what is trained, and where they may be used."""

import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis.extra.numpy import arrays
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

KEY = jax.random.key(0)
FLOAT8 = "float8_e4m3fn"
every_kind = pytest.mark.parametrize("bits", [8, 4, FLOAT8])
MODES = [
    (bits, group_size, symmetric)
    for bits in (8, 4, FLOAT8)
    for group_size in (None, 2)
    for symmetric in (True, False)
    if symmetric or bits != FLOAT8
]


class Own(eqx.Module):
    """A layer of the user's, which needs a true array."""

    weight: jax.Array

    def __call__(self, x):
        return jax.lax.dot(self.weight, x)

    def first_row(self):
        return self.weight[0]


class Block(eqx.Module):
    linear: nn.Linear

    def __init__(self, key):
        self.linear = nn.Linear(4, 4, key=key)

    def __call__(self, x, *, key=None):
        return jnp.tanh(self.linear(x))


class Decoder(eqx.Module):
    embedding: nn.Embedding
    attention: nn.MultiheadAttention
    head: nn.Linear

    def __init__(self, key):
        self.embedding = nn.Embedding(11, 8, key=key)
        self.attention = nn.MultiheadAttention(2, 8, key=key)
        self.head = nn.Linear(8, 11, key=key)

    def __call__(self, tokens, cache):
        x = jax.vmap(self.embedding)(tokens)
        y, cache = self.attention(x, x, x, is_causal=True, cache=cache)
        return jax.vmap(self.head)(x + y), cache


# How each layer is built, the shape of its input, and which axes it sums over.
LAYERS: dict[str, Any] = {
    "Linear": (lambda: nn.Linear(6, 4, key=KEY), (6,), (1,)),
    "scalar Linear": (lambda: nn.Linear("scalar", 4, key=KEY), (), (1,)),
    "Embedding": (lambda: nn.Embedding(7, 4, key=KEY), None, (1,)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, key=KEY), (4, 5, 5), (1, 2, 3)),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, key=KEY),
        (4, 5),
        (1, 2),
    ),
    "Einsum": (
        lambda: nn.Einsum("...d,dhk->...hk", {"d": 6, "h": 2, "k": 3}, key=KEY),
        (5, 6),
        (0,),
    ),
    "frozen Linear": (lambda: eqx.frozen(nn.Linear(6, 4, key=KEY)), (6,), (1,)),
    "Own": (lambda: Own(jax.random.normal(KEY, (4, 6))), (6,), (1,)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def perceptron(key=KEY):
    return drawn(lambda: nn.MLP(4, 2, 8, 1, key=key))


def step_at(stored, value):
    """The distance of the two numbers around a value that can be stored."""
    scale = np.asarray(stored.scale, float)
    scale = np.repeat(scale, value.shape[1] // scale.shape[1], 1)
    if stored.values.dtype != jnp.float8_e4m3fn:
        return scale
    # Three bits of mantissa; below 2**-6 all have the same distance.
    exponent = np.floor(np.log2(np.maximum(np.abs(value / scale), 2.0**-6)))
    return scale * 2.0 ** (exponent - 3)


@pytest.mark.parametrize(("bits", "group_size", "symmetric"), MODES)
@given(
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    arrays(np.float64, (3, 6), elements=st.floats(-1, 1)),
    st.floats(0, 1),
)
def test_weight_is_within_half_a_step(
    bits, group_size, symmetric, dtype, values, exponent
) -> None:
    found = jnp.finfo(dtype)
    smallest = float(found.smallest_subnormal)
    # Of any magnitude, from the largest to the smallest number of the dtype.
    largest = float(found.max) * (smallest / float(found.max)) ** exponent
    values = np.where(np.abs(values) < 1e-6, 0, values) * largest
    with jax.enable_x64(True):
        values = np.asarray(jnp.asarray(values, dtype)).astype(float)
        own = Own(jnp.asarray(values, dtype))
        layer = nn.Quantized(own, bits, group_size, symmetric)
        stored, weight = layer.layer.weight, layer.weight
    assert weight.dtype == dtype and stored.shape == weight.shape == (3, 6)
    assert stored.scale.dtype == ("float64" if dtype == "float64" else "float32")
    assert stored.scale.shape == (3, 1 if group_size is None else 3)
    weight, work = np.asarray(weight).astype(float), np.finfo(stored.scale.dtype)
    greatest = np.maximum(np.abs(values), np.abs(weight))
    # Rounded in the product with the scale, and then to the dtype; XLA takes numbers that
    # are not normal for zero.
    rounding = greatest * (4 * work.eps + float(found.eps) / 2) + smallest + work.tiny
    error = np.abs(weight - values)
    assert (error <= step_at(stored, greatest) / 2 * (1 + 1e-5) + rounding).all()
    # And a step is no larger than the weights make it.
    groups = values.reshape(*stored.scale.shape, -1)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    limit = {8: 127, 4: 7, FLOAT8: 448}[bits]
    scale = np.maximum(high, -low) / limit
    if not symmetric:
        scale = high / (2 * limit + 1) - low / (2 * limit + 1)
    expected = np.maximum(scale, 2 * work.tiny)
    # An end of the range that is not normal counts as zero.
    allowed = 1e-6 * expected + work.tiny / limit
    assert (np.abs(np.asarray(stored.scale) - expected) <= allowed).all()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, 0.008),
        ({"symmetric": False, "group_size": 8}, 0.008),
        ({"dynamic": True}, 0.015),
        ({"bits": FLOAT8}, 0.03),
    ],
)
def test_weights_in_float16_may_be_small(options, error, size, draw) -> None:
    linear = nn.Linear(64, 16, use_bias=False, dtype=jnp.float16, key=KEY)
    # In steps that float16 has near the smallest of these sizes.
    weight = np.round(np.asarray(draw(16, 64)) * 8) * size / 8
    linear = eqx.tree_at("weight", linear, jax.device_put(weight.astype(np.float16)))
    layer, x = nn.Quantized(linear, **options), draw(64).astype(jnp.float16)
    assert layer.weight.dtype == layer(x).dtype == jnp.float16
    norm = np.linalg.norm
    of_weight = np.asarray(linear.weight, float)
    assert norm(np.asarray(layer.weight, float) - of_weight) < error * norm(of_weight)
    # The sum is one of float16, whose small numbers have few digits.
    small = float(jnp.finfo(jnp.float16).smallest_subnormal)
    expected = of_weight @ np.asarray(x, float)
    difference = norm(np.asarray(layer(x), float) - expected)
    assert difference < error * norm(expected) + 4 * small


@pytest.mark.parametrize("bits", [8, FLOAT8])
def test_casts_leave_what_is_stored(bits, draw) -> None:
    linear = eqx.tree_at("weight", nn.Linear(6, 4, key=KEY), draw(4, 6) * 1e-5)
    layer, x = nn.Quantized(linear, bits), draw(6)
    narrow = nn.mixed(layer, "params=f16,compute=f16").layer
    assert eqx.tree_equal(
        *(jax.tree.leaves(each.layer.weight) for each in (narrow, layer))
    )
    assert narrow.weight.dtype == narrow.bias.dtype == jnp.float16
    # It is rounded once, from float32.
    np.testing.assert_array_equal(narrow.weight, layer.weight.astype(jnp.float16))
    plain = layer.dequantized()
    with nn.precision("float16"):
        np.testing.assert_array_equal(layer(x), plain(x))


def test_cache_of_a_quantised_attention_has_the_dtype_of_its_weights(build) -> None:
    attention = build(nn.MultiheadAttention, 2, 8, dtype="float16")
    small = nn.quantize(attention, "**")
    x = jnp.ones((3, 8), jnp.float16)
    out, cache = small(x, x, x, cache=small.init_cache(4))
    assert out.dtype == cache.key.dtype == cache.value.dtype == jnp.float16
    cell = nn.Quantized(nn.GRUCell(4, 3, dtype=jnp.float16, key=KEY))
    assert cell.init_state().dtype == jnp.float16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_group_with_a_number_that_is_not_finite_is_nan(value, symmetric) -> None:
    weight = jnp.ones((2, 6)).at[0, 1].set(value)
    layer = nn.Quantized(Own(weight), 8, 3, symmetric)
    expected = np.ones((2, 6))
    expected[0, :3] = np.nan
    np.testing.assert_allclose(layer.weight, expected)


@pytest.mark.parametrize("size", [1e-30, 1e-38])
def test_inputs_of_a_dynamic_product_may_be_small(size, draw) -> None:
    linear = drawn(lambda: nn.Linear(6, 4, use_bias=False, key=KEY))
    layer, x = nn.Quantized(linear, dynamic=True), draw(6) * size
    weight, x = np.asarray(layer.weight, float), np.asarray(x)
    # XLA takes numbers that are not normal for zero.
    step = np.abs(x).max() / 127 + 2 * np.finfo(np.float32).tiny
    error = np.abs(np.asarray(layer(x), float) - weight @ x.astype(float))
    assert (error <= np.abs(weight).sum(1) * step).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@every_layer
def test_each_output_channel_has_a_scale(name, symmetric, bits) -> None:
    build, _, axes = LAYERS[name]
    layer = drawn(build)
    weight = np.asarray(layer.weight)
    stored = nn.Quantized(layer, bits, symmetric=symmetric).layer.weight
    low = np.minimum(weight.min(axes, keepdims=True), 0)
    high = np.maximum(weight.max(axes, keepdims=True), 0)
    largest = 2 ** (bits - 1) - 1
    scale = np.maximum(high, -low) / largest
    if not symmetric:
        scale = (high - low) / (2 * largest + 1)
        np.testing.assert_array_equal(
            np.asarray(stored.zero, int), np.round(-low / scale) - largest - 1
        )
    np.testing.assert_allclose(stored.scale, scale, rtol=1e-6)


@every_kind
@every_layer
def test_layer_computes_with_the_weight_that_it_shows(name, bits, draw) -> None:
    build, shape, _ = LAYERS[name]
    layer = drawn(build)
    x = 3 if shape is None else draw(*shape)
    quantised = nn.Quantized(layer, bits)
    assert quantised.weight.shape == layer.weight.shape
    plain = eqx.tree_at(lambda m: m.weight, layer, quantised.weight)
    np.testing.assert_allclose(quantised(x), plain(x), rtol=1e-5, atol=1e-6)
    error = np.abs(np.asarray(quantised(x)) - layer(x)).max()
    assert 0 < error < 0.2 * np.abs(layer(x)).max()


def test_methods_and_fields_are_those_of_the_layer(draw) -> None:
    layer = nn.Quantized(Own(draw(4, 6)))
    np.testing.assert_array_equal(layer.first_row(), layer.weight[0])
    linear = nn.Quantized(drawn(lambda: nn.Linear(6, 4, key=KEY)))
    assert linear.in_features == 6 and linear.bias is linear.layer.bias
    assert isinstance(linear.dequantized(), nn.Linear)
    with pytest.raises(AttributeError, match="weigth"):
        _ = linear.weigth


@pytest.mark.parametrize("build", [nn.GRUCell, nn.LSTMCell])
def test_all_matrices_of_a_cell_are_quantised(build, draw) -> None:
    cell = drawn(lambda: build(4, 3, key=KEY))
    quantised = nn.Quantized(cell, group_size=1)
    for name in ("weight_ih", "weight_hh"):
        assert getattr(quantised.layer, name).values.dtype == jnp.int8
    x = draw(4)
    ours, plain = (c(x, c.init_state()) for c in (quantised, cell))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    one = nn.Quantized(cell, weight_name="weight_hh").layer
    assert eqx.is_array(one.weight_ih) and one.weight_hh.values.dtype == jnp.int8


@every_kind
def test_only_the_bias_is_trained(bits, draw) -> None:
    model = nn.quantize(perceptron(), "**", bits)
    grads = eqx.filter_grad(lambda m: m(draw(4)).sum())(model)
    assert [g.shape for g in jax.tree.leaves(grads)] == [(8,), (2,)]
    assert len(jax.tree.leaves(eqx.filter(model, eqx.trainable))) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_qlora_trains_its_matrices_alone(dynamic, draw) -> None:
    small = nn.quantize(perceptron(), "**", 4, 2, dynamic=dynamic)
    model = nn.add_lora(small, nn.Linear, 2, key=KEY)
    x = draw(4)
    np.testing.assert_array_equal(model(x), small(x))
    optimiser = optax.adamw(0.1)
    state = optimiser.init(eqx.filter(model, eqx.trainable))
    assert {a.shape for a in jax.tree.leaves(state[0].mu)} == {
        (2, 4),
        (8, 2),
        (2, 8),
        (2, 2),
    }

    @eqx.filter_jit(donate=("model", "state"))
    def step(model, state, x):
        loss = lambda model: jnp.sum((model(x) - 1) ** 2)  # noqa: E731
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimiser.update(
            grads, state, eqx.filter(model, eqx.trainable)
        )
        return eqx.apply_updates(model, updates), state, value

    before, losses = eqx.tree_copy(model), []
    for _ in range(8):
        model, state, value = step(model, state, x)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    for new, old in zip(model.layers, before.layers, strict=True):
        assert eqx.tree_equal(new.layer, old.layer)
        assert not np.array_equal(new.b, old.b)
    merged = nn.merge_lora(model)
    assert type(merged.layers[0]) is nn.Linear
    if not dynamic:
        np.testing.assert_allclose(merged(x), model(x), rtol=1e-4, atol=1e-5)


def test_lora_of_one_matrix_of_a_cell_leaves_the_other_quantised(draw) -> None:
    cell = nn.Quantized(drawn(lambda: nn.GRUCell(4, 3, key=KEY)))
    lora = nn.LoRA(cell, 2, weight_name="weight_ih", key=KEY)
    x, h = draw(4), draw(3)
    np.testing.assert_allclose(lora(x, h), cell(x, h), rtol=1e-6)
    np.testing.assert_allclose(nn.merge_lora(lora)(x, h), cell(x, h), rtol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_quantised_layer_in_a_lora_is_that_of_the_model(dynamic, draw) -> None:
    lora = nn.add_lora(perceptron(), "**", 2, key=KEY)
    small = nn.quantize(lora, "**", dynamic=dynamic)
    assert isinstance(small.layers[0], nn.LoRA)
    assert isinstance(small.layers[0].layer, nn.Quantized)
    expected = nn.quantize(perceptron(), "**", dynamic=dynamic)
    x = draw(4)
    np.testing.assert_array_equal(small(x), expected(x))


@every_kind
def test_files_keep_the_stored_values(bits, tmp_path) -> None:
    model = nn.quantize(perceptron(), "**", bits)
    other = nn.quantize(drawn(perceptron, seed=1), "**", bits)
    assert not eqx.tree_equal(model, other)
    eqx.save(tmp_path / "model", model)
    assert eqx.tree_equal(eqx.load(tmp_path / "model", other), model)
    eqx.tree_serialise_leaves(tmp_path / "leaves", model)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "leaves", other)
    assert eqx.tree_equal(loaded, model)


@every_kind
def test_state_dict_has_the_stored_values(bits) -> None:
    model = nn.quantize(perceptron(), "**", bits)
    found = eqx.state_dict(model)
    values = found["layers.0.layer.weight.values"]
    assert values.dtype == model.layers[0].layer.weight.values.dtype
    other = nn.quantize(drawn(perceptron, seed=1), "**", bits)
    assert eqx.tree_equal(eqx.load_state_dict(other, found), model)


@every_kind
def test_stored_values_are_donated_and_reused(bits, draw) -> None:
    model = nn.quantize(perceptron(), "**", bits)
    values = model.layers[0].layer.weight.values

    @eqx.filter_jit(donate=("model",))
    def step(model, x):
        return model, model(x)

    model, _ = step(model, draw(4))
    assert values.is_deleted()
    assert not model.layers[0].layer.weight.values.is_deleted()


@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")])
def test_rules_split_values_and_scales(spec, draw) -> None:
    model = nn.quantize(perceptron(), "**", 4)
    x = draw(4)
    expected = model(x)
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    rules = [("**.weight.*", spec), ("**", P())]
    if spec[0] is None:  # a scale for all elements of the axis that is split
        with pytest.raises(ValueError, match=r"layers\[0\]\.layer\.weight\.scale"):
            eqx.Layout(mesh, rules).shardings(model)
        rules.insert(0, ("**.scale", P()))
    shardings = eqx.Layout(mesh, rules).shardings(model)
    model = eqx.filter_device_put(model, shardings)
    assert model.layers[0].layer.weight.values.sharding.spec == spec
    y = eqx.filter_jit(lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")])
def test_weight_may_be_split_over_explicit_axes(spec, draw) -> None:
    linear = drawn(lambda: nn.Linear(4, 8, key=KEY))
    x = np.asarray(draw(4))
    expected = nn.Quantized(linear)(x)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        weight = jax.device_put(np.asarray(linear.weight), NamedSharding(mesh, spec))
        layer = nn.Quantized(eqx.tree_at("weight", linear, weight))
        assert jax.typeof(layer.layer.weight.values).sharding.spec == spec
        x = jax.device_put(x, NamedSharding(mesh, P(spec[1])))
        np.testing.assert_allclose(eqx.filter_jit(layer)(x), expected, rtol=1e-5)


@every_kind
def test_each_layer_of_a_stacked_has_its_own_scales(bits, draw) -> None:
    stacked = drawn(lambda: nn.Stacked(Block, 3, key=KEY))
    small = nn.quantize(stacked, "**", bits)
    assert small.layers.linear.layer.weight.scale.shape == (3, 4, 1)
    for i in range(3):
        alone = nn.quantize(stacked[i], "**", bits)
        assert eqx.tree_equal(small[i].linear, alone.linear)
    x = draw(4)
    y = x
    for layer in small.unstack():
        y = layer(y)
    np.testing.assert_allclose(small(x), y, rtol=1e-5)


def test_each_member_of_an_ensemble_has_its_own_scales(draw) -> None:
    make = eqx.filter_vmap(lambda key: nn.Linear(4, 2, key=key))
    ensemble = drawn(lambda: make(jax.random.split(KEY, 3)))
    small = nn.quantize(ensemble, "**")
    assert small.layer.weight.scale.shape == (3, 2, 1)
    x = draw(4)
    ys = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(small, x)
    one = jax.tree.map(lambda a: a[1], small)
    np.testing.assert_allclose(ys[1], one(x), rtol=1e-5)


@pytest.mark.parametrize("bits", [8, 4, FLOAT8])
def test_tokens_are_those_of_the_dequantised_model(bits) -> None:
    model = nn.quantize(drawn(lambda: Decoder(KEY)), "**", bits)
    assert isinstance(model.embedding, nn.Quantized)

    def whole(node):
        return node.dequantized() if isinstance(node, nn.Quantized) else node

    plain = jax.tree.map(whole, model, is_leaf=lambda x: isinstance(x, nn.Quantized))
    tokens = [
        nn.generate(m, jnp.array([3, 1]), m.attention.init_cache(12), 8, temperature=0)
        for m in (model, plain)
    ]
    assert tokens[0].tokens.tolist() == tokens[1].tokens.tolist()


def test_summary_counts_what_is_stored() -> None:
    model = nn.quantize(perceptron(), "**", 4)
    rows = {row.path: row for row in nn.summary(model).rows}
    row = rows["layers[0].layer.weight.values"]
    assert (row.dtype, row.bytes, row.status) == ("int4", 8 * 4 // 2, "frozen")


@pytest.mark.parametrize(("bits", "size"), [(8, 1), (4, 0.5), (FLOAT8, 1)])
def test_program_reads_as_many_bytes_as_are_stored(bits, size) -> None:
    layer = nn.Quantized(nn.Linear(64, 32, use_bias=False, key=KEY), bits)
    compiled = eqx.filter_jit(layer).lower(jnp.ones(64)).compile()
    read = compiled.memory_analysis().argument_size_in_bytes
    assert read == 64 * 32 * size + 32 * 4 + 64 * 4


@pytest.mark.parametrize(
    ("build", "shape", "weight"),
    [
        (lambda: nn.Linear(24, 24, key=KEY), (24,), "[24,24]"),
        (lambda: nn.Conv1d(5, 5, 3, padding=1, key=KEY), (5, 7), "[5,5,3]"),
    ],
)
def test_weights_are_not_computed_before_a_loop(build, shape, weight) -> None:
    layers = [nn.Quantized(drawn(build, seed=i)) for i in range(2)]

    @eqx.filter_jit
    def run(layers, x):
        def step(x, _):
            for layer in layers:
                x = jnp.tanh(layer(x))
            return x, None

        return jax.lax.scan(step, x, None, 5)[0]

    text = run.lower(layers, jnp.ones(shape)).compile().as_text()
    before_the_loop = text[text.index("ENTRY") :]
    assert f"s8{weight}" in before_the_loop
    assert f"f32{weight}" not in before_the_loop


@pytest.mark.parametrize("group_size", [None, 3])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_dynamic_product_is_one_of_integers(bits, symmetric, group_size, draw) -> None:
    linear = drawn(lambda: nn.Linear(6, 4, key=KEY))
    layer = nn.Quantized(linear, bits, group_size, symmetric, dynamic=True)
    xs = draw(5, 6)
    stored, groups = layer.layer.weight, layer.layer.weight.scale.shape[1]
    values = np.asarray(stored.values, int).reshape(4, groups, -1)
    if not symmetric:
        values = values - np.asarray(stored.zero, int)[..., None]
    expected = []
    for x in np.asarray(xs):
        step = np.abs(x).max() / np.float32(127)
        rounded = np.round(x / step).astype(int).reshape(groups, -1)
        sums = np.einsum("gi,ogi->og", rounded, values)
        expected.append((sums * np.asarray(stored.scale)).sum(1) * step + linear.bias)
    np.testing.assert_allclose(jax.vmap(layer)(xs), expected, rtol=1e-5, atol=1e-6)
    text = str(jax.make_jaxpr(layer)(xs[0]))
    assert "preferred_element_type=int32" in text
    assert not np.array_equal(layer(xs[0]), nn.Quantized(linear, bits)(xs[0]))
    np.testing.assert_array_equal(layer(0 * xs[0]), linear.bias)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"symmetric": False}])
@pytest.mark.parametrize("group_size", [None, 1])
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_sizes_may_be_zero(sizes, group_size, options) -> None:
    linear = drawn(lambda: nn.Linear(*sizes, key=KEY))
    layer = nn.Quantized(linear, 8, group_size, **options)
    np.testing.assert_array_equal(layer(np.ones(sizes[0], np.float32)), linear.bias)


def test_derivative_of_a_dynamic_product_is_that_of_the_weight(draw) -> None:
    layer = nn.Quantized(drawn(lambda: nn.Linear(6, 4, key=KEY)), dynamic=True)
    found = jax.jacobian(layer)(draw(6))
    np.testing.assert_allclose(found, layer.weight, rtol=1e-6)


def test_precision_applies(draw) -> None:
    model = nn.quantize(perceptron(), "**")
    x = draw(4)
    with nn.precision("bfloat16"):
        y = model(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y, model(x), atol=0.1)


@every_kind
def test_policy_applies_to_a_model_that_was_quantised_last(bits, draw) -> None:
    mixed = nn.mixed(perceptron(), "params=f32,compute=bf16,output=f32")
    small = nn.quantize(mixed, "**", bits)
    x = draw(4)
    assert small(x).dtype == jnp.float32
    np.testing.assert_allclose(small(x), mixed(x), atol=0.3)


def test_what_was_frozen_stays_frozen() -> None:
    model = nn.quantize(eqx.frozen(perceptron()), "layers[0]")
    assert isinstance(model.value.layers[0], nn.Quantized)
    one = eqx.tree_at("layers[0]", perceptron(), replace_fn=eqx.frozen)
    one = nn.quantize(one, "**")
    assert isinstance(one.layers[0].value, nn.Quantized)
    assert len(jax.tree.leaves(eqx.filter(one, eqx.trainable))) == 1


def test_norms_and_shared_weights_are_computed_from_the_quantised_ones(draw) -> None:
    linear = nn.Quantized(drawn(lambda: nn.Linear(6, 4, key=KEY)))
    x = draw(6)
    np.testing.assert_allclose(nn.WeightNorm(linear)(x), linear(x), rtol=1e-5)

    def tied():
        embedding = nn.Embedding(7, 4, key=KEY)
        head = nn.Linear(4, 7, use_bias=False, key=KEY)
        return nn.Shared((embedding, head), where="[1].weight", get="[0].weight")

    shared = nn.quantize(drawn(tied), nn.Embedding)
    embedding, head = shared()
    np.testing.assert_array_equal(head.weight, embedding.weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nn.quantize(perceptron(), "**", 8, 3),
            r"^At `layers\[0\]`: .*axis of 4 elements .* a Linear sums .*Pass "
            r"`group_size=2`, or `None` for one scale for each output channel\.$",
        ),
        (
            lambda: nn.quantize(perceptron(), "**", 5),
            r'`quantize` takes 8, 4 or "float8_e4m3fn" as `bits`; got 5\.',
        ),
        (
            lambda: nn.Quantized(nn.Linear(2, 2, key=KEY), "float8_e4m3"),  # pyright: ignore[reportArgumentType]
            r"Did you mean 'float8_e4m3fn'\?$",
        ),
        (
            lambda: nn.Quantized(nn.Linear(2, 2, key=KEY), FLOAT8, symmetric=False),
            "takes 8 or 4, if `dynamic` or not `symmetric`, as `bits`; got 'float8_",
        ),
        (
            lambda: nn.quantize(perceptron(), "**", 8, 0),
            "`quantize` takes an int >= 1 as `group_size`; got 0",
        ),
        (
            lambda: nn.quantize(perceptron(), "layer[*]"),
            r"found no weight .*Correct `where`.* Did you mean `layers\[\*\]`\?$",
        ),
        (
            lambda: nn.quantize(nn.quantize(perceptron(), "layers[1]"), "**"),
            r"^At `layers\[1\]`: .* not quantised .*Choose other layers, or pass "
            r"`layer\.dequantized\(\)`\.$",
        ),
        (
            lambda: nn.quantize([nn.Conv1d(2, 2, 2, key=KEY)], "**", dynamic=True),
            r"^At `\[0\]`: .*a Linear, a GRUCell or an LSTMCell.*; got a Conv1d\. "
            "Pass `dynamic=False`",
        ),
        (
            lambda: nn.Quantized(nn.LayerNorm(3)),
            r"this LayerNorm has none\. Quantise its inner layers instead, by "
            r"`quantize\(layer, \"\*\*\"\)`, or pass `weight_name`\.$",
        ),
        (
            lambda: nn.Quantized(nn.LoRA(nn.Linear(2, 2, key=KEY), 1, key=KEY)),
            "this LoRA has none. Quantise its inner layers",
        ),
        (
            lambda: nn.quantize(nn.Linear(2, 2, dtype=jnp.complex64, key=KEY), "**"),
            "^At `<root>`: Quantized takes a layer with a real floating array",
        ),
        (lambda: nn.Quantized(nn.Linear), "got the class Linear"),
    ],
)
def test_misuse_is_an_error_that_says_what_to_do(call, message, without_type_checks):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_group_is_along_the_longest_axis_that_is_summed_over() -> None:
    conv = drawn(lambda: nn.Conv1d(6, 4, 3, key=KEY))
    stored = nn.Quantized(conv, group_size=2).layer.weight
    assert stored.scale.shape == (4, 3, 3)
    heads = drawn(
        lambda: nn.Einsum("...hk,hkd->...d", {"h": 2, "k": 6, "d": 4}, key=KEY)
    )
    stored = nn.Quantized(heads, group_size=3).layer.weight
    assert stored.scale.shape == (2, 2, 4)
    assert math.prod(stored.scale.shape) * 3 == math.prod(stored.shape)
    ensemble = eqx.tree_at("weight", heads, jnp.stack([heads.weight] * 5))
    several = nn.quantize(ensemble, "**", group_size=3).layer.weight
    assert eqx.tree_equal(jax.tree.map(lambda x: x[0], several), stored)
