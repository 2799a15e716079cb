import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn
from equinox_like.nn._attention import (
    dot_product_attention,
    dot_product_attention_weights,
)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def linear(projection, x):
    weight, bias = projection.weight, projection.bias
    return np.asarray(x) @ np.asarray(weight).T + (
        0 if bias is None else np.asarray(bias)
    )


def reference(attention, query, key, value, mask=None, bias=0.0):
    """The formula of Vaswani et al. 2017, head by head, in NumPy."""
    h, shared = attention.num_heads, attention.num_kv_heads
    q = np.split(linear(attention.query_proj, query), h, axis=1)
    k = np.split(linear(attention.key_proj, key), shared, axis=1)
    v = np.split(linear(attention.value_proj, value), shared, axis=1)
    lengths = len(query), len(key)
    mask = np.broadcast_to(True if mask is None else mask, (h, *lengths))
    bias = np.broadcast_to(bias, (h, *lengths))
    heads = []
    for n in range(h):
        shared_n = n // (h // shared)
        logits = q[n] @ k[shared_n].T / np.sqrt(q[n].shape[1]) + bias[n]
        weights = softmax(np.where(mask[n] != 0, logits, -1e300))
        heads.append(weights @ v[shared_n])
    return linear(attention.output_proj, np.concatenate(heads, axis=1))


@eqx.filter_jit
def call(attention, *args, **kwargs):
    """As one program, which compiles faster than its operations do one by one."""
    return attention(*args, **kwargs)


@pytest.fixture
def inputs(x64, draw):
    return draw(4, 8), draw(6, 8), draw(6, 8)


def test_results_are_those_of_the_contract(k0) -> None:
    attention = nn.MultiheadAttention(2, 4, key=k0)
    weight = attention.query_proj.weight[0, :3]
    expected = [-0.2172800, 0.2880973, -0.1024165]
    np.testing.assert_allclose(weight, expected, atol=1e-7)
    x = jnp.arange(12.0).reshape(3, 4) / 10
    expected = [-0.3343084, -0.2847425, -0.1119308]
    np.testing.assert_allclose(attention(x, x, x)[0, :3], expected, atol=1e-5)
    attention = nn.MultiheadAttention(2, 4, dropout_p=0.5, key=k0)
    out = attention(x, x, x, key=jax.random.PRNGKey(1))
    expected = [-0.2625294, -0.1673526, -0.0842030]
    np.testing.assert_allclose(out[0, :3], expected, atol=1e-5)
    np.testing.assert_allclose(
        attention(x, x, x, inference=True)[0, 0], -0.3343084, atol=1e-5
    )


OPTIONS = {
    "plain": {},
    "sizes": {"qk_size": 3, "vo_size": 5, "output_size": 7, "key_size": 8},
    "biases": {
        "use_query_bias": True,
        "use_key_bias": True,
        "use_value_bias": True,
        "use_output_bias": True,
    },
    "one kv head": {"num_kv_heads": 1},
    "two kv heads": {"num_kv_heads": 2, "use_key_bias": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [None, 4])
def test_result_is_that_of_the_formula(options, heads, inputs, build, draw) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, **OPTIONS[options])
    shape = (4, 6) if heads is None else (heads, 4, 6)
    mask, bias = np.asarray(draw(*shape)) > -0.5, np.asarray(draw(*shape))
    out = call(attention, *inputs, mask, bias=bias)
    expected = reference(attention, *inputs, mask, bias)
    np.testing.assert_allclose(out, expected, rtol=1e-10)
    # Of one thing for all heads, and another for each.
    out = call(attention, *inputs, mask, bias=bias[..., :1, :])
    expected = reference(attention, *inputs, mask, bias[..., :1, :])
    np.testing.assert_allclose(out, expected, rtol=1e-10)


def test_default_sizes_are_not_checked_for_divisibility(build) -> None:
    attention = build(nn.MultiheadAttention, 3, 10)
    assert attention.qk_size == attention.vo_size == 3
    assert attention.query_proj.weight.shape == (9, 10)
    assert attention.output_proj.weight.shape == (10, 9)


def test_grouped_heads_equal_repeated_ones(build, inputs) -> None:
    grouped = build(nn.MultiheadAttention, 4, 8, num_kv_heads=2)
    assert grouped.key_proj.weight.shape == (4, 8)

    def repeated(weight):
        weight = np.asarray(weight).reshape(2, 2, 8)
        return jax.device_put(np.repeat(weight, 2, axis=0).reshape(8, 8))

    where = lambda a: (a.key_proj.weight, a.value_proj.weight)  # noqa: E731
    full = build(nn.MultiheadAttention, 4, 8)
    full = eqx.tree_at(
        lambda a: (*where(a), a.query_proj, a.output_proj),
        full,
        (*map(repeated, where(grouped)), grouped.query_proj, grouped.output_proj),
    )
    out, expected = call(grouped, *inputs), call(full, *inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-12)


def test_keys_and_values_of_a_group_are_not_repeated(build) -> None:
    attention = build(nn.MultiheadAttention, 8, 8, num_kv_heads=1, qk_size=16)
    x = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    jaxpr = str(jax.make_jaxpr(attention.__call__)(x, x, x))
    # The one key head is never as large as all query heads would be.
    assert "f32[5,8,16]" in jaxpr and jaxpr.count("f32[5,1,16]") >= 1
    assert jaxpr.count("f32[5,8,16]") == 1


@pytest.mark.parametrize("shared", [2, 4])
def test_process_heads_sees_the_heads(shared, build, inputs) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, num_kv_heads=shared)
    seen = []

    def halve(q, k, v):
        seen.extend([q.shape, k.shape, v.shape])
        return [q / 2, k, v]

    out = call(attention, *inputs, process_heads=halve)
    assert seen == [(4, 4, 2), (6, shared, 2), (6, shared, 2)]
    halved = eqx.tree_at(lambda a: a.query_proj.weight, attention, replace_fn=_half)
    np.testing.assert_allclose(out, call(halved, *inputs), rtol=1e-10)
    with pytest.raises(eqx.ShapeError, match="`process_heads` must return"):
        call(attention, *inputs, process_heads=lambda q, k, v: (q, k[1:], v))


def _half(x):
    return x / 2


@pytest.mark.parametrize("shared", [2, 4])
def test_rotary_rotates_what_process_heads_returns(shared, build, inputs) -> None:
    rope = nn.RotaryPositionalEmbedding(2)
    attention = build(nn.MultiheadAttention, 4, 8, num_kv_heads=shared, rotary=rope)
    plain = eqx.tree_at("rotary", attention, None)

    def scale(q, k, v):
        return q * jnp.arange(2), k, v

    def by_hand(q, k, v):
        rotate = jax.vmap(rope, in_axes=1, out_axes=1)
        q, k, v = scale(q, k, v)
        return rotate(q), rotate(k), v

    batch = [jnp.stack([x, 2 * x]) for x in inputs]

    def in_batch(attention, process_heads):
        one = functools.partial(attention, process_heads=process_heads)
        return eqx.filter_jit(jax.vmap(one))(*batch)

    expected = in_batch(plain, by_hand)
    np.testing.assert_allclose(in_batch(attention, scale), expected, rtol=1e-10)
    assert not np.allclose(in_batch(plain, scale), expected)


def test_attention_without_rotary_has_the_same_leaves(build) -> None:
    plain = build(nn.MultiheadAttention, 2, 8)
    rotary = nn.RotaryPositionalEmbedding(4)
    attention = build(nn.MultiheadAttention, 2, 8, rotary=rotary)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(plain)]
    assert paths == [path for path, _ in jax.tree_util.tree_leaves_with_path(attention)]
    assert plain.rotary is None
    # As in an instance that was pickled before there was a `rotary`.
    object.__delattr__(plain, "rotary")
    assert plain.rotary is None


@pytest.mark.parametrize(
    ("rotary", "error", "message"),
    [
        (
            nn.RotaryPositionalEmbedding(8),
            ValueError,
            "a layer for heads of size 4 as `rotary`; got one of size 8. "
            r"Write `rotary=eqx.nn.RotaryPositionalEmbedding\(4\)`\.$",
        ),
        (
            nn.RotaryPositionalEmbedding,
            TypeError,
            r"a layer as `rotary`; got .* Write `rotary=.*Embedding\(4\)`\.$",
        ),
        (True, TypeError, r"a layer as `rotary`; got .* Write `rotary=.*\(4\)`\.$"),
    ],
)
def test_wrong_rotary_is_an_error(
    rotary, error, message, key, without_type_checks
) -> None:
    with pytest.raises(error, match=f"MultiheadAttention takes {message}"):
        nn.MultiheadAttention(2, 8, rotary=rotary, key=key)
    with pytest.raises(ValueError, match=r"odd size .* pass an even `qk_size`"):
        rope = nn.RotaryPositionalEmbedding(4)
        nn.MultiheadAttention(2, 8, qk_size=3, rotary=rope, key=key)


def test_query_that_sees_nothing_takes_the_mean(build, inputs) -> None:
    attention = build(nn.MultiheadAttention, 2, 8)
    out, weights = call(attention, *inputs, np.zeros((4, 6), int), return_weights=True)
    np.testing.assert_allclose(weights, 1 / 6)
    assert np.isfinite(out).all()


def test_weights_are_returned_after_dropout(build, inputs, key) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, num_kv_heads=2, dropout_p=0.5)
    _, weights = call(attention, *inputs, key=key, return_weights=True)
    weights = np.asarray(weights)
    assert weights.shape == (4, 4, 6) and (weights == 0).any()
    plain = call(attention, *inputs, return_weights=True, inference=True)[1]
    plain = np.asarray(plain)
    np.testing.assert_allclose(plain.sum(-1), 1)
    kept = weights != 0
    np.testing.assert_allclose(weights[kept], 2 * plain[kept])
    for head, head_key in zip(kept, jax.random.split(key, 4), strict=True):
        drawn = jax.random.bernoulli(head_key, 0.5, (4, 6))
        np.testing.assert_array_equal(head, drawn)
    with pytest.raises(RuntimeError, match="Dropout needs a `key`"):
        call(attention, *inputs)
    with pytest.warns(UserWarning, match="`deterministic` was renamed"):
        call(attention, *inputs, deterministic=True)


def causal(q, kv, offset=0, window=None):
    i, j = np.arange(q)[:, None] + offset, np.arange(kv)
    return (j <= i) & (j > i - (window or 10**6))


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("per_head", [False, True])
def test_causal_and_window_combine_with_the_mask(
    window, per_head, build, inputs, draw
) -> None:
    attention = build(nn.MultiheadAttention, 4, 8)
    mask = np.asarray(draw(*([4] if per_head else []), 4, 6)) > -1
    out = call(attention, *inputs, mask, is_causal=True, window=window)
    expected = call(attention, *inputs, mask & causal(4, 6, window=window))
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    out = call(attention, *inputs, window=2)
    i, j = np.arange(4)[:, None], np.arange(6)
    np.testing.assert_allclose(out, call(attention, *inputs, j > i - 2))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(4, 7), (6, 8), (6, 8)], r"`query` of shape \(any, 8\)"),
        ([(4, 8), (6, 7), (6, 8)], r"`key_` of shape \(any, 8\)"),
        ([(4, 8), (6, 8), (8,)], r"`value` of shape \(any, 8\)"),
        ([(4, 8), (6, 8), (5, 8)], "as many rows of `key_` as of `value`; got 6 and 5"),
        ([(4, 8), (0, 8), (0, 8)], "at least one row"),
        (
            [(2, 4, 8), (2, 6, 8), (2, 6, 8)],
            r"`query`.*one extra leading axis.*jax\.vmap",
        ),
        ([(4, 8), (6, 8), (6, 8), (6, 4)], r"`mask` of shape \(4, 6\).*\(2, 4, 6\)"),
        ([(4, 8), (6, 8), (6, 8), (1, 4, 6)], r"`mask`.*given shape \(1, 4, 6\)"),
    ],
)
def test_wrong_shapes_name_the_argument(shapes, message, build) -> None:
    attention = build(nn.MultiheadAttention, 2, 8)
    with pytest.raises(eqx.ShapeError, match=f"MultiheadAttention takes .*{message}"):
        attention(*map(jnp.ones, shapes))


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_no_query_gives_no_rows(shared, build) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, output_size=3, num_kv_heads=shared)
    query, kv, bias = jnp.ones((0, 8)), jnp.ones((6, 8)), jnp.ones((4, 0, 6))
    assert call(attention, query, kv, kv).shape == (0, 3)
    options = {"bias": bias, "return_weights": True}
    out, weights = call(attention, query, kv, kv, np.asarray(bias) > 0, **options)
    assert out.shape == (0, 3) and weights.shape == (4, 0, 6)


@pytest.mark.parametrize("returned", [None, 3.0])
def test_process_heads_must_return_three_arrays(returned, build, inputs) -> None:
    attention = build(nn.MultiheadAttention, 2, 8)
    with pytest.raises(ValueError, match=r"`process_heads` must return .* it returned"):
        attention(*inputs, process_heads=lambda q, k, v: returned)


def test_mask_must_be_an_array(build, inputs, without_type_checks) -> None:
    attention = build(nn.MultiheadAttention, 2, 8)
    with pytest.raises(TypeError, match="takes an array as `mask`; got a list"):
        attention(*inputs, [[True] * 6] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "a divisor of 4 heads as `num_kv_heads`; got 3"),
        ({"num_kv_heads": 0}, "a divisor of 4 heads"),
        ({"implementation": "flash"}, "'auto' as `implementation`; got 'flash'"),
        ({"num_kv_heads": 2.0}, "an int >= 0 as `num_kv_heads`; got 2.0"),
        ({"query_size": -1}, "an int >= 0 as `query_size`"),
        ({"key_size": -1}, "an int >= 0 as `key_size`; got -1"),
        ({"value_size": "scalar"}, "an int >= 0 as `value_size`; got 'scalar'"),
        ({"output_size": 1.5}, "an int >= 0 as `output_size`; got 1.5"),
        ({"qk_size": -1}, "an int >= 0 as `qk_size`; got -1"),
        ({"vo_size": 2.0}, "an int >= 0 as `vo_size`; got 2.0"),
    ],
)
def test_wrong_argument_is_an_error(options, message, key, without_type_checks) -> None:
    with pytest.raises(ValueError, match=f"MultiheadAttention takes .*{message}"):
        nn.MultiheadAttention(**{"num_heads": 4, "query_size": 8} | options, key=key)


def test_number_of_heads_zero_is_an_error(key) -> None:
    with pytest.raises(ZeroDivisionError, match="int >= 1 as `num_heads`; got 0"):
        nn.MultiheadAttention(0, 4, key=key)


# The attention of one head, which other libraries import


def test_one_head_is_that_of_the_formula(x64, draw) -> None:
    q, k, v = draw(4, 3), draw(6, 3), draw(6, 5)
    mask = np.asarray(draw(4, 6)) > -0.5
    logits = np.where(mask, np.asarray(q) @ np.asarray(k).T / np.sqrt(3), -1e300)
    mask = jax.device_put(mask)
    weights = dot_product_attention_weights(q, k, mask)
    np.testing.assert_allclose(weights, softmax(logits), rtol=1e-12, atol=1e-15)
    out = dot_product_attention(q, k, v, mask)
    np.testing.assert_allclose(out, softmax(logits) @ v, rtol=1e-11)


def test_softmax_of_half_precision_runs_in_float32() -> None:
    q = jnp.array([[1.0]], jnp.float16)
    k = jnp.array([[0.0], [-8.0], [-9.0]], jnp.float16)
    weights = dot_product_attention_weights(q, k)
    assert weights.dtype == jnp.float16
    expected = softmax(np.array([[0.0, -8.0, -9.0]]))
    np.testing.assert_allclose(weights, expected, rtol=2e-3)
    assert weights[0, 2] > 0


def test_one_head_drops_weights(key, draw) -> None:
    q, k, v = draw(4, 3), draw(6, 3), draw(6, 5)
    dropout = nn.Dropout(0.5)
    one_head = eqx.filter_jit(dot_product_attention)
    out = one_head(q, k, v, dropout=dropout, key=key)
    weights = eqx.filter_jit(dot_product_attention_weights)(q, k)
    weights = np.asarray(dropout(weights, key=key))
    np.testing.assert_allclose(out, weights @ np.asarray(v), rtol=1e-5)
    out = one_head(q, k, v, dropout=dropout, inference=True)
    np.testing.assert_allclose(out, one_head(q, k, v), rtol=1e-6)


# JAX's own kernels


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("name", ["xla", "auto"])
def test_jax_kernel_agrees_with_the_formula(name, shared, build, draw) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, num_kv_heads=shared)
    q, kv = draw(4, 8), draw(6, 8)
    mask, bias = np.asarray(draw(4, 4, 6)) > -1, draw(4, 6)
    rest = {"bias": bias, "is_causal": True}
    expected = call(attention, q, kv, kv, mask, **rest)
    out = call(attention, q, kv, kv, mask, implementation=name, **rest)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert attention.implementation is None


def test_layer_and_call_choose_the_implementation(build, draw) -> None:
    attention = build(nn.MultiheadAttention, 2, 8, implementation="xla")
    x = draw(4, 8)
    with pytest.raises(
        ValueError, match="'xla' of attention cannot be used for this call"
    ):
        attention(x, x, x, return_weights=True)
    _, weights = attention(x, x, x, implementation="auto", return_weights=True)
    assert weights.shape == (2, 4, 4)


@pytest.mark.parametrize(
    ("options", "call", "obstacle"),
    [
        ({"vo_size": 3}, {}, "its queries have size 4 and its values size 3"),
        ({"dropout_p": 0.5}, {"key": jax.random.key(0)}, "its dropout is active"),
        ({}, {"return_weights": True}, "does not return the weights"),
    ],
)
def test_obstacle_to_an_implementation_is_named(
    options, call, obstacle, build, draw
) -> None:
    attention = build(nn.MultiheadAttention, 2, 8, **options)
    x = draw(4, 8)
    with pytest.raises(ValueError, match=obstacle):
        attention(x, x, x, implementation="xla", **call)
    attention(x, x, x, implementation="auto", **call)


@pytest.mark.parametrize("biased", ["query", "key", "value", "output"])
def test_bias_of_a_projection_needs_no_rank_promotion(biased, strict, build, draw):
    options = {f"use_{biased}_bias": True}
    attention = build(nn.MultiheadAttention, 2, 4, **options)
    x = draw(3, 4).astype(jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        expected = attention(x, x, x)
    np.testing.assert_allclose(eqx.filter_jit(attention)(x, x, x), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [None, (3, 3), (2, 3, 3)])
def test_jax_kernel_runs_under_strict_promotion(dtype, shape, strict, build, draw):
    attention = build(nn.MultiheadAttention, 2, 4, dtype=dtype, implementation="xla")
    x = draw(3, 4).astype(dtype)
    bias = None if shape is None else draw(*shape).astype(dtype)
    options = {"is_causal": True, "bias": bias}
    # Traced, not run: promotion is decided while tracing.
    out = eqx.filter_eval_shape(attention, x, x, x, **options)
    assert out.dtype == dtype


@pytest.mark.parametrize(
    ("replace", "dtype"),
    [
        (nn.WeightNorm, "float16"),
        (eqx.frozen, "float16"),
        (lambda projection: nn.Sequential([projection, nn.Identity()]), "float16"),
        (lambda projection: nn.Lambda(lambda x: x), "float32"),
    ],
)
def test_cache_of_a_wrapped_projection_has_its_dtype(replace, dtype, build):
    attention = build(nn.MultiheadAttention, 2, 4, dtype="float16")
    attention = eqx.tree_at(lambda a: a.key_proj, attention, replace_fn=replace)
    assert attention.init_cache(3).key.dtype == dtype


@pytest.mark.parametrize("chunks", [[1] * 6, [4, 2]])
@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_softcap_and_sinks_are_the_same_with_a_cache(
    chunks, overflow, build, draw
) -> None:
    kwargs = {"num_kv_heads": 2, "softcap": 0.5, "use_sinks": True}
    attention = build(nn.MultiheadAttention, 4, 8, **kwargs)
    x, window = draw(6, 8).astype("float32"), 4 if overflow == "ring" else None
    expected = call(attention, x, x, x, is_causal=True, window=window)
    cache, rows = attention.init_cache(window or 6, overflow=overflow), []
    for part in np.split(np.asarray(x), np.cumsum(chunks)[:-1]):
        row, cache = call(attention, part, part, part, is_causal=True, cache=cache)
        rows.append(row)
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-5)
    plain = eqx.tree_at("sinks", attention, None, is_leaf=lambda x: x is None)
    assert abs(expected - call(plain, x, x, x, is_causal=True)).max() > 1e-2


def test_weights_are_those_of_the_softcap_and_the_sinks(build, draw) -> None:
    attention = build(nn.MultiheadAttention, 2, 8, softcap=2.0, use_sinks=True)
    x = draw(3, 8).astype("float32")
    _, weights = call(attention, x, x, x, return_weights=True)
    q, k = (
        np.asarray(jax.vmap(p)(x)).reshape(3, 2, 4)
        for p in (attention.query_proj, attention.key_proj)
    )
    e = np.exp(2 * np.tanh(np.einsum("qhd,khd->hqk", q, k) / 4))
    sink = np.exp(np.asarray(attention.sinks))[:, None, None]
    np.testing.assert_allclose(
        weights, e / (e.sum(-1, keepdims=True) + sink), rtol=1e-5
    )


def test_sinks_start_as_zero_and_are_trained(key, draw) -> None:
    attention = nn.MultiheadAttention(2, 8, use_sinks=True, dtype="bfloat16", key=key)
    assert attention.sinks.tolist() == [0, 0] and attention.sinks.dtype == "bfloat16"
    x = draw(3, 8).astype("bfloat16")
    grads = eqx.filter_grad(lambda layer: layer(x, x, x).astype("float32").sum())(
        attention
    )
    assert (grads.sinks != 0).all() and grads.sinks.dtype == "bfloat16"
    assert nn.MultiheadAttention(2, 8, key=key).sinks is None


def test_attention_of_ones_own_gets_what_is_not_the_default(build, draw) -> None:
    given = []

    def attend(query, key_, value, mask=None, dropout=None, **options):
        given.append({"mask": mask, "dropout": dropout} | options)
        return nn.dot_product_attention(query, key_, value, mask, dropout, **options)

    options = {"num_kv_heads": 2, "softcap": 0.5, "use_sinks": True, "dropout_p": 0.5}
    plain = build(nn.MultiheadAttention, 4, 8, **options)
    own = eqx.tree_at("attention", plain, attend, is_leaf=lambda x: x is None)
    x, key = draw(6, 8).astype("float32"), jax.random.key(0)
    for call in (
        {"inference": True},
        {"key": key, "is_causal": True, "window": 2, "bias": draw(6, 6)},
        {"key": key, "mask": np.asarray(draw(4, 6, 6)) > 0, "implementation": "auto"},
    ):
        np.testing.assert_array_equal(own(x, x, x, **call), plain(x, x, x, **call))
    names = [{n for n, x in each.items() if x is not None} for each in given]
    assert names[0] == {"softcap", "sinks"}
    assert names[1] == names[0] | {
        *("dropout", "key", "is_causal", "window", "bias"),
    }
    assert names[2] == names[0] | {"dropout", "key", "mask", "implementation"}


def test_attention_of_ones_own_gets_a_cache_as_keys_and_a_mask(build, draw) -> None:
    def attend(query, key_, value, mask):
        return nn.dot_product_attention(query, key_, value, mask)

    own = build(nn.MultiheadAttention, 2, 8, attention=attend)
    x = draw(5, 8).astype("float32")
    _, cache = call(own, x[:3], x[:3], x[:3], is_causal=True, cache=own.init_cache(8))
    out, _ = call(own, x[3:], x[3:], x[3:], is_causal=True, cache=cache)
    plain = eqx.tree_at("attention", own, None)
    expected = call(plain, x, x, x, is_causal=True)[3:]
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_wrong_attention_of_ones_own_is_an_error(
    build, draw, key, without_type_checks
) -> None:
    with pytest.raises(TypeError, match="takes a function as `attention`; got"):
        nn.MultiheadAttention(2, 8, attention="ring", key=key)
    x = draw(3, 8)
    own = build(nn.MultiheadAttention, 2, 8, attention=nn.dot_product_attention)
    with pytest.raises(ValueError, match="`attention` of your own cannot return the"):
        own(x, x, x, return_weights=True)
    own = build(nn.MultiheadAttention, 2, 8, attention=lambda q, k, v: v[:, 0])
    message = (
        r"shape \(3, 2, 4\), in \(queries, heads, size\); it returned shape \(3, 4\)"
    )
    with pytest.raises(eqx.ShapeError, match=message):
        own(x, x, x)
