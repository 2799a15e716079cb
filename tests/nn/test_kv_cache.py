import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@eqx.filter_jit
def call(attention, *args, **kwargs):
    """As one program, which compiles faster than its operations do one by one."""
    return attention(*args, **kwargs)


def rotated(attention, offset):
    rope = nn.RotaryPositionalEmbedding(attention.qk_size)
    rotate = jax.vmap(lambda x: rope(x, offset=offset), in_axes=1, out_axes=1)
    return lambda q, k, v: (rotate(q), rotate(k), v)


def fed(attention, tokens, chunks, cache, **kwargs):
    """The outputs of a sequence that comes in chunks."""
    outs, start, tokens = [], 0, np.asarray(tokens)
    for chunk in chunks:
        out, cache = feed(attention, tokens[start : start + chunk], cache, **kwargs)
        outs.append(out)
        start += chunk
    return np.concatenate(outs), cache


@eqx.filter_jit
def feed(attention, x, cache, **kwargs):
    process_heads = rotated(attention, cache.length)
    return attention(
        x, x, x, is_causal=True, cache=cache, process_heads=process_heads, **kwargs
    )


@eqx.filter_jit
def at_once(attention, x, **kwargs):
    process_heads = rotated(attention, 0)
    return attention(x, x, x, is_causal=True, process_heads=process_heads, **kwargs)


@pytest.mark.parametrize("chunks", [[1] * 6, [3, 1, 1, 1], [2, 3, 1], [6]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_with_a_cache_equal_one_causal_call(chunks, dtype, build, draw) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, num_kv_heads=2, dtype=dtype)
    attention = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) / 4) if eqx.is_array(x) else x, attention
    )
    tokens = jax.device_put(np.asarray(draw(6, 8)).astype(dtype))
    whole = at_once(attention, tokens)
    out, cache = fed(attention, tokens, chunks, attention.init_cache(8))
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(
        out.astype(float),
        np.asarray(whole, float),
        atol=tolerance,
        rtol=tolerance,
    )
    assert cache.length == 6
    assert cache.position.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert cache.key.dtype == dtype


@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_rotary_positions_continue_from_the_cache(overflow, build, draw) -> None:
    rope = nn.RotaryPositionalEmbedding(2)
    options = {"num_kv_heads": 2, "rotary": rope}
    attention, tokens = build(nn.MultiheadAttention, 4, 8, **options), draw(6, 8)
    cache = attention.init_cache(6, overflow=overflow)
    outs = []
    for chunk in np.split(np.asarray(tokens), [3, 4, 5]):
        out, cache = call(attention, chunk, chunk, chunk, is_causal=True, cache=cache)
        outs.append(out)
    whole = call(attention, tokens, tokens, tokens, is_causal=True)
    np.testing.assert_allclose(np.concatenate(outs), whole, atol=1e-5)
    plain = eqx.tree_at("rotary", attention, None)
    np.testing.assert_allclose(at_once(plain, tokens), whole, atol=1e-6)


@pytest.mark.parametrize("chunks", [[1] * 9, [3, 3, 3], [1, 1, 1, 6]])
@pytest.mark.parametrize("window", [None, 2])
def test_ring_equals_a_window_over_the_whole(chunks, window, build, draw) -> None:
    attention, tokens = build(nn.MultiheadAttention, 2, 8), draw(9, 8)
    cache = attention.init_cache(4, overflow="ring")
    out, cache = fed(attention, tokens, chunks, cache, window=window)
    whole = at_once(attention, tokens, window=window or 4)
    np.testing.assert_allclose(out, whole, atol=1e-4, rtol=1e-4)
    assert sorted(cache.position.tolist()) == [5, 6, 7, 8]


def test_cache_is_a_carry_of_scan_and_vmaps_with_lengths_of_its_own(
    build, draw
) -> None:
    attention, tokens = build(nn.MultiheadAttention, 2, 8), draw(2, 5, 8)

    def step(cache, token):
        out, cache = attention(*[token[None]] * 3, cache=cache)
        return cache, out[0]

    tokens = np.asarray(tokens)
    new = fresh(attention)
    _, short = call(attention, *[tokens[1, :2]] * 3, is_causal=True, cache=new)
    caches = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), new, short)
    run = jax.vmap(lambda cache, xs: jax.lax.scan(step, cache, xs)[1])
    outs = jax.jit(run)(caches, tokens[:, 2:])
    first = call(attention, *[tokens[0, 2:]] * 3, is_causal=True)
    second = call(attention, *[tokens[1]] * 3, is_causal=True)[2:]
    np.testing.assert_allclose(outs, np.stack([first, second]), atol=1e-4)


def fresh(attention):
    return attention.init_cache(6)


def test_mask_with_a_cache_has_the_slots_first(build, draw) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), draw(3, 8)
    x = np.asarray(x)
    _, cache = call(attention, *[x[:2]] * 3, cache=attention.init_cache(4))
    # Of slot 0 and the new token: slots 2 and 3 are empty.
    mask = jnp.array([[True, False, True, True, True]])
    out, _ = call(attention, *[x[2:]] * 3, mask, cache=cache)
    expected = call(attention, x[2:], x[::2], x[::2])
    np.testing.assert_allclose(out, expected, atol=1e-5)
    out, _ = call(attention, *[x[2:]] * 3, mask, cache=cache, implementation="xla")
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_error_of_a_mask_without_the_new_tokens_says_what_the_keys_are(
    name, build
) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), jnp.ones((3, 8))
    message = (
        r"shape \(3, 7\).*given shape \(3, 4\)\. With a cache the keys are its 4 slots, "
        r"whose positions are `cache\.position`, and then the 3 new tokens\."
    )
    with pytest.raises(eqx.ShapeError, match=message):
        attention(x, x, x, cache=attention.init_cache(4), **{name: jnp.ones((3, 4))})


def test_overflow_is_an_error(build) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), jnp.ones((3, 8))
    _, cache = attention(x, x, x, cache=attention.init_cache(4))
    with pytest.raises(RuntimeError, match="slots for 4 tokens, holds 3 and was given"):
        attention(x, x, x, cache=cache)
    with pytest.raises(eqx.ShapeError, match="4 tokens, holds 3 and was given 5 more"):
        attention(*[jnp.ones((5, 8))] * 3, cache=cache)
    message = "slots for 4 tokens, but was given more.*`overflow='ring'`"
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        call(attention, x, x, x, cache=cache)
    out, _ = call(attention, x[:1], x[:1], x[:1], cache=cache)
    assert np.isfinite(out).all()


def test_cache_that_a_compiled_function_captures_is_checked(build, draw) -> None:
    layer = build(nn.MultiheadAttention, 2, 8)
    x = draw(3, 8)
    _, cache = layer(x, x, x, cache=layer.init_cache(4))
    call = jax.jit(lambda x: layer(x, x, x, cache=cache))
    out, expected = call(x[:1])[0], layer(x[:1], x[:1], x[:1], cache=cache)[0]
    np.testing.assert_allclose(out, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="holds 3 and was given 2 more"):
        call(x[:2])


@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_cache_may_hold_numpy_arrays(overflow, build, draw) -> None:
    layer = build(nn.MultiheadAttention, 2, 8)
    x = draw(3, 8)
    cache = layer.init_cache(4, overflow=overflow)
    expected = layer(x, x, x, cache=cache)
    out = layer(x, x, x, cache=jax.device_get(cache))
    assert eqx.tree_equal(*jax.device_get((out, expected)))


def test_overflow_in_a_loop_is_an_error_and_a_full_cache_is_none(build) -> None:
    attention = build(nn.MultiheadAttention, 2, 8)

    @eqx.filter_jit
    def run(cache, tokens):
        def step(cache, token):
            out, cache = attention(*[token[None]] * 3, cache=cache)
            return cache, out[0]

        return jax.lax.scan(step, cache, tokens)

    tokens = np.ones((4, 8), np.float32)
    cache, outs = run(attention.init_cache(4), tokens)
    assert cache.length == 4 and np.isfinite(outs).all()
    with pytest.raises(eqx.EquinoxRuntimeError, match="slots for 4 tokens"):
        run(cache.truncate(1), tokens)
    ring, _ = run(attention.init_cache(4, overflow="ring"), tokens)
    assert np.isfinite(run(ring, tokens)[1]).all()


def test_wrong_cache_is_an_error(build, without_type_checks) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), jnp.ones((3, 8))
    message = "KVCache as `cache`; got a list of length 1.*`init_cache`"
    with pytest.raises(TypeError, match=message):
        attention(x, x, x, cache=[attention.init_cache(4)])
    other = build(nn.MultiheadAttention, 4, 8).init_cache(4)
    with pytest.raises(eqx.ShapeError, match=r"a `key` of shape \(4, 2\).*\(2, 4\)"):
        attention(x, x, x, cache=other)
    with pytest.raises(ValueError, match="an int >= 1 as `max_length`; got 0"):
        attention.init_cache(0)
    with pytest.raises(ValueError, match="an int >= 1 as `max_length`; got 'a'"):
        attention.init_cache("a")
    with pytest.raises(ValueError, match="an int >= 1 as `window`; got 0"):
        attention(x, x, x, window=0)
    with pytest.raises(ValueError, match="an int >= 1 as `window`; got 'a'"):
        attention(x, x, x, window="a")


# Its dtype and its devices


def test_output_has_the_dtype_that_it_has_without_a_cache(build, draw, strict) -> None:
    attention = build(nn.MultiheadAttention, 2, 8, dtype="bfloat16")
    x = jax.device_put(np.asarray(draw(3, 8)).astype("bfloat16"))
    cache = attention.init_cache(4, dtype="float32")
    assert cache.key.dtype == jnp.float32
    for tokens in (x, x[:1]):
        out, cache = call(attention, tokens, tokens, tokens, cache=cache)
        assert out.dtype == jnp.bfloat16 and cache.value.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_narrow_cache_keeps_its_largest_number_for_a_larger_one(
    overflow, dtype, build, draw
) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), draw(3, 8)
    bound = float(jnp.finfo(dtype).max)
    large = np.array([500, -1e6, np.inf, np.nan], np.float32)
    held = [min(500, bound), -bound if bound < 1e6 else -1e6, bound, np.nan]

    def process(q, k, v):
        return q, jnp.broadcast_to(large, k.shape), jnp.broadcast_to(-large, v.shape)

    cache = attention.init_cache(4, dtype=dtype, overflow=overflow)
    for tokens in (x, x[:1]):
        _, cache = attention(tokens, *(tokens,) * 2, cache=cache, process_heads=process)
    held = np.asarray(held).astype(dtype).astype(float)
    for slot in range(4):
        for found, expected in ((cache.key, held), (cache.value, -held)):
            np.testing.assert_array_equal(found[slot, 0].astype(float), expected)
    _, cache = attention(
        x,
        x,
        x,
        cache=attention.init_cache(4, dtype=dtype),
        process_heads=lambda q, k, v: (q, k.at[0].set(1e6), v.at[0].set(-1e6)),
    )
    out, _ = attention(x[:1], x[:1], x[:1], cache=cache)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("overflow", ["error", "ring"])
@pytest.mark.parametrize("chunks", [[1] * 6, [2, 3, 1]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int8_cache_is_within_half_a_step(overflow, chunks, dtype, key, draw) -> None:
    options = {"num_kv_heads": 2, "dtype": dtype}
    attention = nn.MultiheadAttention(4, 32, **options, key=key)
    x = jnp.asarray(draw(6, 32), dtype)
    exact = attention.init_cache(4 if overflow == "ring" else 6, overflow=overflow)
    cache = attention.init_cache(len(exact.key), dtype=jnp.int8, overflow=overflow)
    for part in jnp.split(x, np.cumsum(chunks)[:-1]):
        expected, exact = call(attention, *[part] * 3, is_causal=True, cache=exact)
        out, cache = call(attention, *[part] * 3, is_causal=True, cache=cache)
        assert out.dtype == dtype
        error = np.abs(out.astype("float32") - expected.astype("float32")).max()
        bound = 0.01 if dtype == "float32" else 0.02
        assert 0 < error < bound * np.abs(expected.astype("float32")).max()
    assert cache.key.dtype == cache.value.dtype == "int8"
    for name in ("key", "value"):
        stored = getattr(cache, name).astype("float32")
        scale = getattr(cache, f"{name}_scale").astype("float32")
        wanted = getattr(exact, name).astype("float32")
        assert scale.shape == wanted.shape[:2]
        error = jnp.abs(stored * scale[..., None] - wanted)
        assert (error <= 0.501 * scale[..., None]).all()
        largest = jnp.abs(wanted).max(-1)
        np.testing.assert_allclose(scale, largest / 127, rtol=2.0**-8)
    np.testing.assert_array_equal(cache.position, exact.position)


def test_int8_cache_takes_a_quarter_of_the_memory(build) -> None:
    attention = build(nn.MultiheadAttention, 4, 256)

    def size(cache):
        arrays = cache.key, cache.value, cache.key_scale, cache.value_scale
        return sum(x.nbytes for x in jax.tree.leaves(arrays))

    wide, small = attention.init_cache(512), attention.init_cache(512, dtype=jnp.int8)
    for other in ("int8", np.int8, np.dtype("int8")):
        assert eqx.tree_equal(small, attention.init_cache(512, dtype=other))
    assert size(small) / size(wide) == (64 + 2) / (64 * 4)
    program = compiled(by_layer(attention), small, np.ones(256, np.float32))
    written = sum(x.nbytes for x in jax.tree.leaves(small))
    assert program.memory_analysis().alias_size_in_bytes == written


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_int8_cache_holds_extreme_numbers(dtype, build, draw) -> None:
    with jax.enable_x64(dtype == "float64"):
        attention = build(nn.MultiheadAttention, 4, 16, dtype=dtype)
        most, tiny = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)
        bound = min(most, float(jnp.finfo("float32").max))
        heads = np.array([[most, -most, 0, 1], [tiny] * 4, [0] * 4, [np.nan, 1, 0, 0]])
        heads[0, 1] = -np.inf

        def process(q, k, v):
            given = jnp.broadcast_to(jnp.asarray(heads, k.dtype), k.shape)
            return q, given, -given

        x = jnp.asarray(draw(1, 16), dtype)
        cache = attention.init_cache(2, dtype=jnp.int8)
        out, cache = attention(x, x, x, cache=cache, process_heads=process)
        assert np.isnan(np.asarray(out, float)).any()
        scales = np.asarray(cache.value_scale[0], "float32")
        held = np.asarray(cache.value[0], "float32") * scales[:, None]
        np.testing.assert_allclose(held[0], [-bound, bound, 0, 0], rtol=2.0**-8)
        assert np.abs(held[1] + tiny).max() <= max(tiny / 254, 2.4e-38)
        assert (held[2] == 0).all() and np.isnan(scales[3])


def test_int8_cache_of_a_batch_of_stacked_layers_is_truncated(key) -> None:
    stacked = nn.Stacked(lambda key: nn.MultiheadAttention(2, 8, key=key), 3, key=key)

    def empty(dtype):
        make = lambda _: stacked.layers.init_cache(5, dtype=dtype)  # noqa: E731
        return jax.vmap(lambda _: jax.vmap(make)(jnp.arange(3)))(jnp.arange(2))

    class Layer(eqx.Module):
        attention: nn.MultiheadAttention

        def __call__(self, x, xs):
            return self.attention(x, x, x, is_causal=True, cache=xs)

    layers = eqx.tree_at("layers", stacked, Layer(stacked.layers))
    run = eqx.filter_jit(jax.vmap(lambda x, cache: layers(x, xs=cache)))
    x = jax.random.normal(key, (2, 4, 8))
    outs = []
    for dtype in (jnp.int8, jnp.float32):
        _, cache = run(x[:, :3], empty(dtype))
        out, cache = run(x[:, 3:], cache.truncate(jnp.array([[2], [3]])))
        outs.append(out)
    assert cache.length.tolist() == [[3] * 3, [4] * 3]
    error = jnp.abs(outs[0] - outs[1]).max()
    assert 0 < error < 0.02 * jnp.abs(outs[1]).max()


@pytest.mark.parametrize("wide", ["qk", "q", "v"])
def test_one_token_has_the_dtype_of_a_call_without_a_cache(wide, build, draw) -> None:
    attention = build(nn.MultiheadAttention, 4, 8, num_kv_heads=2, dtype=jnp.bfloat16)
    x = jax.device_put(np.asarray(draw(1, 8)).astype("bfloat16"))

    def widened(**heads):
        return tuple(
            x.astype(jnp.float32) if name in wide else x for name, x in heads.items()
        )

    def process(q, k, v):
        return widened(q=q, k=k, v=v)

    options = {"process_heads": process, "return_weights": True}
    expected = call(attention, x, x, x, **options)
    cache = attention.init_cache(3)
    out, _, weights = call(attention, x, x, x, cache=cache, **options)
    assert (out.dtype, weights.dtype) == (expected[0].dtype, expected[1].dtype)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected[0], rtol=0.01)


@pytest.mark.parametrize("wrap", [lambda x: nn.Sequential([x]), eqx.frozen])
def test_cache_of_a_wrapped_projection_has_the_dtype_of_its_parameters(
    wrap, build
) -> None:
    attention = build(nn.MultiheadAttention, 2, 8, dtype="bfloat16")
    for name in ("key_proj", "value_proj"):
        attention = eqx.tree_at(
            lambda a, name=name: getattr(a, name), attention, replace_fn=wrap
        )
    cache = attention.init_cache(4)
    assert cache.key.dtype == cache.value.dtype == jnp.bfloat16
    x = jnp.ones((1, 8), jnp.bfloat16)
    out, _ = call(attention, x, x, x, cache=cache)
    assert out.dtype == jnp.bfloat16


def test_cache_of_a_projection_without_parameters_has_the_default_dtype(build) -> None:
    attention = build(nn.MultiheadAttention, 1, 4)
    identity = nn.Identity()
    attention = eqx.tree_at(
        lambda a: (a.key_proj, a.value_proj), attention, (identity, identity)
    )
    assert attention.init_cache(4).key.dtype == jnp.float32


def test_cache_of_integers_is_an_error(build) -> None:
    attention = build(nn.MultiheadAttention, 2, 8)
    with pytest.raises(ValueError, match="complex dtype as `dtype`; got 'int32'"):
        attention.init_cache(4, dtype="int32")


def test_cache_of_stacked_layers_can_be_made_from_their_stack(key) -> None:
    stacked = eqx.filter_eval_shape(
        lambda key: nn.Stacked(
            lambda key: nn.MultiheadAttention(2, 8, key=key), depth=3, key=key
        ),
        key,
    )
    make = jax.vmap(lambda _: stacked.layers.init_cache(5))
    assert make(jnp.arange(3)).key.shape == (3, 5, 2, 4)


# In place


def by_hand(attention, ring):
    """One token with plain arrays, which `dynamic_update_slice` updates."""

    def step(cache, x):
        keys, values, length = cache
        slots, heads = keys.shape[:2]
        q, k, v = (
            (getattr(attention, f"{name}_proj").weight @ x).reshape(-1, keys.shape[2])
            for name in ("query", "key", "value")
        )
        start = length % slots if ring else length
        keys = jax.lax.dynamic_update_slice(keys, k[None], (start, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[None], (start, 0, 0))
        # As sums of products: a product of matrices would transpose the whole cache.
        q = q.reshape(heads, -1, q.shape[-1]) / np.sqrt(q.shape[-1])
        logits = (q * keys[:, :, None]).sum(-1)
        filled = jnp.arange(slots) <= length
        logits = jnp.where(filled[:, None, None], logits, -1e30)
        weights = jax.nn.softmax(logits, axis=0)
        mixed = (weights[..., None] * values[:, :, None]).sum(0)
        out = attention.output_proj.weight @ mixed.reshape(-1)
        return (keys, values, length + 1), out

    return step


def by_layer(attention):
    def step(cache, x):
        out, cache = attention(x[None], x[None], x[None], is_causal=True, cache=cache)
        return cache, out[0]

    return step


def compiled(step, *args):
    return jax.jit(step, donate_argnums=0).lower(*args).compile()


def bytes_accessed(program):
    return program.cost_analysis()["bytes accessed"]


SLOTS = 512


@pytest.mark.parametrize("overflow", ["error", "ring"])
@pytest.mark.parametrize(
    ("batch", "kv_heads"),
    [("one", 4), ("one", 1), ("own lengths", 4), ("one length", 1)],
)
def test_a_token_costs_what_an_update_in_place_costs(
    overflow, batch, kv_heads, build
) -> None:
    attention = build(
        nn.MultiheadAttention, 4, 32, qk_size=32, vo_size=32, num_kv_heads=kv_heads
    )
    cache = attention.init_cache(SLOTS, overflow=overflow)
    x = np.ones(32, np.float32)
    plain = cache.key, cache.value, cache.length
    ours, theirs = by_layer(attention), by_hand(attention, overflow == "ring")
    if batch != "one":
        length = 0 if batch == "own lengths" else None
        structure = jax.tree.structure(cache)
        axes = structure.unflatten([0, 0, length, length]), (0, 0, length)
        cache, plain = (
            jax.tree.map(
                lambda axis, a: a if axis is None else np.stack([a] * 3),
                axis,
                tree,
                is_leaf=lambda x: x is None,
            )
            for axis, tree in zip(axes, (cache, plain), strict=True)
        )
        x = np.stack([x] * 3)
        ours, theirs = (
            jax.vmap(step, in_axes=(axis, 0), out_axes=(axis, 0))
            for step, axis in zip((ours, theirs), axes, strict=True)
        )
    program = compiled(ours, cache, x)
    assert bytes_accessed(program) <= 1.1 * bytes_accessed(compiled(theirs, plain, x))
    memory = program.memory_analysis()
    size = sum(a.nbytes for a in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < size / 4


@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_a_loop_copies_no_cache(overflow, build) -> None:
    attention = build(nn.MultiheadAttention, 4, 32)

    def run(cache, xs):
        return jax.lax.scan(by_layer(attention), cache, xs)

    cache, xs = attention.init_cache(SLOTS, overflow=overflow), np.ones((3, 32))
    memory = compiled(run, cache, xs).memory_analysis()
    assert memory.temp_size_in_bytes < cache.key.nbytes / 2
    text = str(jax.make_jaxpr(run)(cache, xs))
    assert f"f32[{SLOTS + 1}" not in text


@pytest.mark.parametrize("chunks", [[1, 1, 2, 1], [2, 2, 1]])
@pytest.mark.parametrize("overflow", ["error", "ring"])
@pytest.mark.parametrize("per_head", [False, True])
def test_mask_bias_and_weights_of_a_cached_call_have_the_slots_first(
    chunks, overflow, per_head, build, draw
) -> None:
    attention, tokens = build(nn.MultiheadAttention, 2, 8), draw(5, 8)
    heads = (2,) if per_head else ()
    # Of each token to each other one, and of each to itself.
    mask = np.random.default_rng(1).random((*heads, 5, 5)) < 0.7
    mask = mask | np.eye(5, dtype=bool)
    tokens, bias = np.asarray(tokens), np.asarray(draw(*heads, 5, 5))
    options = {"is_causal": True, "return_weights": True}
    whole, weights = map(
        np.asarray, call(attention, *[tokens] * 3, mask, bias=bias, **options)
    )
    cache, start = attention.init_cache(7, overflow=overflow), 0
    for n in chunks:
        rows, stop = slice(start, start + n), start + n
        spread = [
            np.concatenate(
                [
                    x[..., rows, :start],
                    np.zeros((*heads, n, 7 - start), x.dtype),
                    x[..., rows, rows],
                ],
                axis=-1,
            )
            for x in (mask, bias)
        ]
        out, cache, shares = call(
            attention,
            *[tokens[rows]] * 3,
            spread[0],
            bias=spread[1],
            cache=cache,
            **options,
        )
        shares = np.asarray(shares)
        np.testing.assert_allclose(out, whole[rows], atol=1e-5)
        assert shares.shape == (2, n, 7 + n)
        np.testing.assert_allclose(
            shares[..., :start], weights[:, rows, :start], atol=1e-5
        )
        np.testing.assert_allclose(shares[..., 7:], weights[:, rows, rows], atol=1e-5)
        assert not shares[..., start:7].any()
        start = stop


def test_dropout_of_a_cached_token_acts_on_its_weights(build, draw, key) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8, dropout_p=0.5), draw(4, 8)
    x, cache = np.asarray(x), attention.init_cache(6)
    _, cache = call(attention, *[x[:3]] * 3, inference=True, cache=cache)
    options = {"cache": cache, "return_weights": True}
    _, _, kept = call(attention, *[x[3:]] * 3, inference=True, **options)
    out, _, weights = call(attention, *[x[3:]] * 3, key=key, **options)
    kept, weights = np.asarray(kept), np.asarray(weights)
    dropped = weights == 0
    assert 0 < (dropped & (kept > 0)).sum() < (kept > 0).sum()
    np.testing.assert_allclose(weights, np.where(dropped, 0, 2 * kept), atol=1e-6)
    assert np.isfinite(out).all()
    with pytest.raises(RuntimeError, match="Dropout needs a `key`"):
        call(attention, *[x[3:]] * 3, cache=cache)


def test_overflow_is_an_error_whichever_output_is_used(build) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), jnp.ones((3, 8))
    _, cache = call(attention, x, x, x, cache=attention.init_cache(4))
    for i in (0, 1):
        one = eqx.filter_jit(lambda cache, i=i: attention(x, x, x, cache=cache)[i])
        with pytest.raises(eqx.EquinoxRuntimeError, match="slots for 4 tokens"):
            one(cache)


# Truncation


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit])
@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_truncated_padding_is_not_attended_to(jit, overflow, build, draw) -> None:
    attention, tokens = build(nn.MultiheadAttention, 2, 8), draw(3, 8)
    tokens = np.asarray(tokens)
    padded = jnp.asarray(np.concatenate([tokens[:1], 100 * np.ones((2, 8))]))

    @jit
    def run(padded, rest, n):
        cache = attention.init_cache(4, overflow=overflow)
        _, cache = attention(*[padded] * 3, is_causal=True, cache=cache)
        cache = cache.truncate(n)
        return attention(*[rest] * 3, is_causal=True, cache=cache)

    out, cache = run(padded, jnp.asarray(tokens[1:]), jnp.array(1))
    whole = call(attention, *[tokens] * 3, is_causal=True)
    np.testing.assert_allclose(out, whole[1:], atol=1e-5)
    assert cache.length == 3 and cache.position.tolist() == [0, 1, 2, -1]


def test_rows_and_layers_are_truncated_with_their_own_lengths(build) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), jnp.ones((2, 3, 8))

    @jax.jit
    @jax.vmap
    def filled(x):
        return attention(x, x, x, cache=attention.init_cache(4))[1]

    caches = filled(x)
    n = jnp.array([1, 3])
    cut = caches.truncate(n)
    assert cut.length.tolist() == [1, 3]
    assert cut.position.tolist() == [[0, -1, -1, -1], [0, 1, 2, -1]]
    truncate = lambda caches, n: caches.truncate(n)  # noqa: E731
    each = jax.jit(jax.vmap(truncate))(caches, n)
    assert eqx.tree_equal(*jax.device_get((each, cut)))
    layers = jax.tree.map(lambda x: jnp.asarray(np.stack([x] * 3)), caches)
    assert jax.jit(truncate)(layers, n).length.tolist() == [[1, 3]] * 3
    with pytest.raises(eqx.ShapeError, match=r"broadcast to shape \(2,\).*\(3,\)"):
        caches.truncate(jnp.array([1, 2, 3]))


def test_wrong_truncation_is_an_error(build) -> None:
    attention, x = build(nn.MultiheadAttention, 2, 8), jnp.ones((6, 8))
    _, cache = call(attention, *[x[:3]] * 3, cache=attention.init_cache(4))
    for n in (-1, 4):
        for jit in (lambda f: f, eqx.filter_jit):
            with pytest.raises(eqx.EquinoxRuntimeError, match="`n` from 0 to"):
                jit(nn.KVCache.truncate)(cache, jnp.array(n))
    with pytest.raises(TypeError, match="an integer as `n`; got float32"):
        cache.truncate(1.0)
    ring = attention.init_cache(4, overflow="ring")
    _, ring = call(attention, *[x] * 3, cache=ring)
    # The next query would attend to 4 tokens, itself among them, and these are there.
    assert sorted(ring.truncate(5).position.tolist()) == [-1, 2, 3, 4]
    with pytest.raises(eqx.EquinoxRuntimeError, match="it has overwritten"):
        ring.truncate(4)
    with pytest.raises(eqx.EquinoxRuntimeError, match="it has overwritten"):
        ring.truncate(5).truncate(4)  # one token is gone, and one overwritten
