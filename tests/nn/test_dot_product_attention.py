import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn


def by_formula(q, k, v, visible=True, bias=0.0, scale=None, softcap=None, sinks=None):
    """In float64, of shapes (length, heads, size), with a head of keys for each query's."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    logits = np.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(visible, logits + bias, -1e300)
    if sinks is not None:  # a last key, whose value is zero
        column = np.broadcast_to(
            np.asarray(sinks)[:, None, None], logits[..., :1].shape
        )
        logits = np.concatenate([logits, column], -1)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


compiled = eqx.filter_jit(nn.dot_product_attention)


@pytest.fixture
def heads(draw):
    return draw(3, 4, 6), draw(5, 4, 6), draw(5, 4, 2)


@pytest.mark.parametrize("shape", [(4, 1, 5), (1, 3, 5), (3, 1)])
def test_result_is_that_of_the_formula(shape, heads, draw, strict) -> None:
    mask = np.random.default_rng(0).random((3, 5)) < 0.6
    mask[:, 0] = True
    mask = jax.device_put(mask)
    bias = draw(*shape)
    out = nn.dot_product_attention(*heads, mask, bias=bias, scale=0.3)
    expected = by_formula(*heads, np.asarray(mask), np.asarray(bias), 0.3)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    i, j = np.arange(3)[:, None], np.arange(5)
    out = nn.dot_product_attention(*heads, is_causal=True, window=2)
    expected = by_formula(*heads, (j <= i) & (j > i - 2))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_arrays_without_an_axis_of_heads_are_those_of_one(heads) -> None:
    all_heads = np.asarray(compiled(*heads))
    one = compiled(*(np.asarray(x)[:, 1] for x in heads))
    np.testing.assert_allclose(one, all_heads[:, 1], atol=1e-6)


def test_groups_of_heads_share_keys_and_values(heads) -> None:
    q, k, v = heads
    k, v = np.asarray(k)[:, :2], np.asarray(v)[:, :2]
    out = compiled(q, k, v)
    repeated = (np.repeat(x, 2, axis=1) for x in (k, v))
    np.testing.assert_allclose(out, by_formula(q, *repeated), atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "xla", "auto"])
def test_query_that_attends_to_nothing_takes_the_mean(implementation, draw) -> None:
    q, k, v = draw(2, 1, 4), draw(3, 1, 4), draw(3, 1, 4)
    mask = jnp.array([[True, False, False], [False] * 3])
    out = compiled(q, k, v, mask, implementation=implementation)
    out, v = np.asarray(out), np.asarray(v)
    np.testing.assert_allclose(out[0], v[0], atol=1e-5)
    np.testing.assert_allclose(out[1], v.mean(0), atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("mask", [None, [[True] * 3, [True, True, False]]])
def test_bias_of_minus_infinity_gives_a_finite_result_and_gradient(
    mask, implementation, draw
) -> None:
    q, k, v = draw(2, 4), draw(3, 4), draw(3, 4)
    bias = jnp.array([[0.0, -jnp.inf, 0.0], [-jnp.inf] * 3])
    mask = None if mask is None else jnp.array(mask)

    def run(q):
        return nn.dot_product_attention(
            q, k, v, mask, bias=bias, implementation=implementation
        )

    @jax.jit
    @jax.grad
    def gradient(q):
        return run(q).sum()

    out, grads = np.asarray(jax.jit(run)(q)), gradient(q)
    expected = compiled(*(np.asarray(x) for x in (q[:1], k[::2], v[::2])))
    np.testing.assert_allclose(out[:1], expected, atol=1e-5)
    np.testing.assert_allclose(out[1], np.asarray(v).mean(0), atol=1e-5)
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_half_precision_runs_under_strict_promotion(
    dtype, implementation, heads, strict
) -> None:
    q, k, _ = (jax.device_put(np.asarray(x).astype(dtype)) for x in heads)
    out = nn.dot_product_attention(q, k, k, scale=0.5, implementation=implementation)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(out, "float32"), by_formula(q, k, k, scale=0.5), atol=4e-2
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_auto_takes_a_kernel_that_can_be_compiled(dtype, heads) -> None:
    q, k, _ = (np.asarray(x).astype(dtype) for x in heads)
    out, expected = (
        np.asarray(compiled(q, k, k, scale=0.5, implementation=name), "float32")
        for name in ("auto", None)
    )
    np.testing.assert_allclose(out, expected, atol=4e-2)


def test_auto_takes_a_kernel_whose_gradient_keeps_dtypes(heads, strict) -> None:
    q, k, _ = (x.astype("bfloat16") for x in heads)

    def loss(q, implementation):
        out = nn.dot_product_attention(q, k, k, implementation=implementation)
        return out.astype("float32").sum()

    grad = jax.grad(loss)
    assert eqx.tree_equal(grad(q, "auto"), grad(q, None))


def test_auto_keeps_double_precision(x64, draw) -> None:
    q, k, v = draw(4, 8), draw(6, 8), draw(6, 8)
    out = compiled(q, k, v, implementation="auto")
    np.testing.assert_allclose(out, compiled(q, k, v), rtol=1e-13)


def test_function_in_place_of_a_dropout_is_called(draw, without_type_checks) -> None:
    def half(weights, *, key, inference):
        return weights / 2

    q, k, v = draw(4, 8), draw(6, 8), draw(6, 8)
    expected = np.asarray(compiled(q, k, v)) / 2
    for implementation in (None, "auto"):
        out = compiled(q, k, v, dropout=half, implementation=implementation)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_softmax_is_computed_in_float32() -> None:
    q, k = np.ones((1, 1), jnp.bfloat16), np.zeros((3000, 1), jnp.bfloat16)
    out = compiled(q, k, np.ones((3000, 1), jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(out, "float32"), 1, atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_large_bias_is_not_rounded_in_half_precision(dtype) -> None:
    # In bfloat16 1000 to 1002 are one number; only their differences matter.
    bias = np.array([[0.0, 0.6, 1.3, 2.0]], np.float32)
    query, key, value = np.ones((1, 3)), np.ones((4, 3)), np.eye(4)
    half = (x.astype(dtype) for x in (query, key, value))
    weights = compiled(*half, bias=1000 + bias)
    expected = np.exp(bias) / np.exp(bias).sum()
    np.testing.assert_allclose(weights, expected, rtol=1e-2)


def test_dropout_acts_on_the_weights(heads, key) -> None:
    dropout = nn.Dropout(0.5)
    out = nn.dot_product_attention(*heads, dropout=dropout, key=key)
    kept = nn.dot_product_attention(*heads, dropout=dropout, inference=True)
    np.testing.assert_allclose(kept, by_formula(*heads), atol=1e-5)
    assert not np.allclose(out, kept)
    with pytest.raises(RuntimeError, match="Dropout needs a `key`"):
        nn.dot_product_attention(*heads, dropout=dropout)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 6), (5, 1, 6), (5, 1, 6)], r"\(3, 6\), \(5, 1, 6\)"),
        ([(2, 3, 4, 6)] * 3, r"wrap it in `jax\.vmap`"),
        ([(3, 4, 6), (5, 4, 5), (5, 4, 6)], "queries of size 6 and keys of size 5"),
        ([(3, 4, 6), (5, 4, 6), (4, 4, 6)], r"\(5, 4\) and \(4, 4\)"),
        ([(3, 4, 6), (5, 3, 6), (5, 3, 6)], "4 heads of queries and 3 of keys"),
        ([(3, 4, 6), (0, 4, 6), (0, 4, 6)], "no keys"),
        ([(3, 6), (5, 6), (5, 6), (5, 3)], r"`mask` of shape \(3, 5\)"),
    ],
)
def test_wrong_shapes_are_an_error(shapes, message) -> None:
    with pytest.raises(eqx.ShapeError, match=message):
        nn.dot_product_attention(*map(jnp.ones, shapes))


def test_wrong_options_are_errors(heads, without_type_checks) -> None:
    with pytest.raises(ValueError, match="an int >= 1 as `window`; got 0"):
        nn.dot_product_attention(*heads, window=0)
    with pytest.raises(ValueError, match="as `implementation`; got 'flash'"):
        nn.dot_product_attention(*heads, implementation="flash")
    with pytest.raises(TypeError, match="an array as `mask`; got a list"):
        nn.dot_product_attention(*heads, [[True]])


# The choice of cuDNN, on a pretended GPU. `tests/test_gpu.py` runs it on one.


@pytest.fixture
def gpu(monkeypatch):
    """A device that JAX seems to compute on, and what cuDNN is then asked for."""
    device = types.SimpleNamespace(
        platform="gpu",
        client=types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000"),
        compute_capability="9.0",
        asked=[],
    )
    of_jax = jax.nn.dot_product_attention

    def attention(q, k, v, *, implementation, **options):
        if implementation != "cudnn":
            return of_jax(q, k, v, implementation=implementation, **options)
        device.asked.append(options)
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    monkeypatch.setattr(
        "equinox_like.nn._attention.dot_product.default_device", lambda: device
    )
    monkeypatch.setattr("equinox_like.nn._attention.dot_product._CAN_BE_MAPPED", True)
    with jax.default_device(jax.devices("cpu")[0]):
        yield device


def of_size(draw, lengths=(4, 6), size=8, dtype="bfloat16"):
    q, k = (
        jax.device_put(np.asarray(draw(length, 2, size)).astype(dtype))
        for length in lengths
    )
    return q, k, k


def attend(q, k, v, mask=None, implementation="auto", **options):
    call = functools.partial(
        nn.dot_product_attention, implementation=implementation, **options
    )
    return np.asarray(jax.jit(call)(q, k, v, mask), "float32")


@pytest.mark.parametrize("window", [None, 2])
def test_cudnn_applies_causality_and_a_window_of_it(window, gpu, draw) -> None:
    given = of_size(draw, (4, 4))
    options = {"is_causal": True, "window": window}
    out = attend(*given, **options)
    (asked,) = gpu.asked
    assert asked["mask"] is asked["bias"] is None
    assert asked["is_causal"]
    assert asked["local_window_size"] == (None if window is None else (1, 0))
    # The program is compiled for the CPU, which takes the other branch.
    expected = attend(*given, implementation=None, **options)
    np.testing.assert_allclose(out, expected, atol=4e-2)


@pytest.mark.parametrize(
    ("lengths", "mask", "bias"),
    [((4, 4), True, None), ((4, 4), None, (4, 4)), ((4, 6), None, None)],
)
def test_window_beside_others_is_a_mask(lengths, mask, bias, gpu, draw) -> None:
    mask = None if mask is None else jnp.ones(lengths, bool)
    bias = None if bias is None else draw(*bias)
    options = {"bias": bias, "is_causal": True, "window": 2}
    given = of_size(draw, lengths)
    out = attend(*given, mask, **options)
    (asked,) = gpu.asked
    assert asked["is_causal"] and asked["local_window_size"] is None
    assert asked["mask"].shape == (1, 2, *lengths)
    expected = attend(*given, mask, implementation=None, **options)
    np.testing.assert_allclose(out, expected, atol=4e-2)


def test_cudnn_gets_masks_and_biases_for_each_head(gpu, draw) -> None:
    mask, bias = jnp.ones((4, 6), bool), draw(1, 6)
    attend(*of_size(draw), mask, bias=bias, window=2)
    (asked,) = gpu.asked
    assert asked["mask"].shape == asked["bias"].shape == (1, 2, 4, 6)
    assert asked["bias"].dtype == jnp.bfloat16
    assert not asked["is_causal"] and asked["local_window_size"] is None


def test_cudnn_gets_a_mask_of_the_positions_in_a_cache(gpu, build, draw) -> None:
    options = {"dtype": jnp.bfloat16, "implementation": "auto"}
    layer = build(nn.MultiheadAttention, 2, 16, **options)
    x = jax.device_put(np.asarray(draw(4, 16)).astype("bfloat16"))
    cache = layer.init_cache(8)
    out = jax.jit(lambda x: layer(x, x, x, is_causal=True, cache=cache)[0])(x)
    (asked,) = gpu.asked
    assert asked["mask"].shape == (1, 2, 4, 8) and not asked["is_causal"]
    expected = eqx.filter_jit(layer)(x, x, x, is_causal=True, implementation="xla")
    out, expected = (np.asarray(y, "float32") for y in (out, expected))
    np.testing.assert_allclose(out, expected, atol=4e-2)


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({"lengths": (3, 6)}, {}),
        ({"lengths": (4, 5)}, {}),
        ({"size": 12}, {}),
        ({"size": 136}, {}),
        ({"dtype": "float32"}, {}),
        ({}, {"compute_capability": "7.5"}),
        ({}, {"client": types.SimpleNamespace(platform_version="rocm 70")}),
        ({}, {"platform": "tpu"}),
    ],
)
def test_auto_does_not_ask_cudnn_for_what_it_cannot_do(
    given, device, gpu, draw
) -> None:
    vars(gpu).update(device)
    given = of_size(draw, **given)
    out = attend(*given, is_causal=True)
    assert not gpu.asked
    expected = attend(*given, is_causal=True, implementation=None)
    np.testing.assert_allclose(out, expected, atol=4e-2)


def test_auto_does_not_ask_cudnn_where_it_cannot_be_mapped(
    gpu, draw, monkeypatch
) -> None:
    monkeypatch.setattr("equinox_like.nn._attention.dot_product._CAN_BE_MAPPED", False)
    attend(*of_size(draw))
    assert not gpu.asked


def test_arrays_that_are_on_the_cpu_stay_there(gpu, draw) -> None:
    given = of_size(draw)
    call = functools.partial(nn.dot_product_attention, implementation="auto")
    out = call(*given)
    jax.vmap(jax.grad(lambda *heads: call(*heads).sum()))(*(x[None] for x in given))
    assert not gpu.asked
    expected = attend(*given, implementation=None)
    np.testing.assert_allclose(out.astype("float32"), expected, atol=4e-2)


def test_dtypes_that_differ_are_left_to_the_formula(draw) -> None:
    q, k, v = of_size(draw)
    out = nn.dot_product_attention(q, k.astype("float32"), v, implementation="auto")
    assert out.dtype == "float32"
    message = "dtypes bfloat16, float32 and bfloat16"
    with pytest.raises(ValueError, match=message):
        nn.dot_product_attention(q, k.astype("float32"), v, implementation="xla")


# The products of queries and keys are large numbers, and their differences matter.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"is_causal": True}])
@pytest.mark.parametrize("size", [64, 48])
def test_half_precision_agrees_with_float64(dtype, options, size, draw) -> None:
    q, k, v = (np.asarray(draw(8, 2, size)).astype(dtype) for _ in range(3))
    q, k = 4 * q, 4 * k
    with jax.enable_x64(True):
        exact = nn.dot_product_attention(
            *(x.astype("float64") for x in (q, k, v)), **options
        )
        exact = np.asarray(exact)
    given = [jnp.asarray(x) for x in (q, k, v)]
    atol = 3 * float(jnp.finfo(dtype).eps) * np.abs(v.astype("float64")).max()
    for run in (nn.dot_product_attention, compiled):
        out = np.asarray(run(*given, **options), "float64")
        np.testing.assert_allclose(out, exact, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradient_in_half_precision_agrees_with_float32(dtype, draw) -> None:
    heads = [3 * jnp.asarray(draw(16, 2, 48), dtype) for _ in range(3)]

    def loss(scale, *heads):
        out = nn.dot_product_attention(*heads, scale=scale)
        return jnp.sum(out.astype("float32") ** 2)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    found = grad(jnp.asarray(0.3, dtype), *heads)
    exact = grad(
        jnp.asarray(0.3, dtype).astype("float32"), *(x.astype("float32") for x in heads)
    )
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        error = jnp.linalg.norm(one.astype("float32") - other) / jnp.linalg.norm(other)
        assert error < 2 * jnp.finfo(dtype).eps


def test_products_may_be_larger_than_float16_holds() -> None:
    signs = jnp.array([1, 1, -1, 1], jnp.float16)[:, None, None]
    q = 100 * signs * jnp.ones((4, 1, 64), jnp.float16)
    assert (nn.dot_product_attention(q, q, q) == q).all()

    q, k = jnp.full((1, 1), 300, jnp.float16), jnp.array([[300], [299]], jnp.float16)
    value, (dq, dk) = jax.value_and_grad(
        lambda q, k: nn.dot_product_attention(q, k, k).sum(), argnums=(0, 1)
    )(q, k)
    assert value == 300 and dq == 0 and dk.tolist() == [[1], [0]]
    weights = nn.MultiheadAttention(1, 1, dtype="float16", key=jax.random.key(0))
    assert np.isfinite(weights(k * 100, k * 100, k * 100).astype("float32")).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decoding_in_half_precision_agrees_with_the_whole(dtype, draw) -> None:
    layer = nn.MultiheadAttention(2, 96, dtype=dtype, key=jax.random.key(1))
    layer = eqx.tree_at(
        ("query_proj.weight", "key_proj.weight"), layer, replace_fn=lambda w: 8 * w
    )
    x = jnp.asarray(draw(6, 96), dtype)
    whole = layer(x, x, x, is_causal=True)
    cache, rows = layer.init_cache(6), []
    for i in range(6):
        row, cache = layer(*[x[i : i + 1]] * 3, is_causal=True, cache=cache)
        rows.append(row)
    rows = np.concatenate(rows).astype("float64")
    atol = 2 * float(jnp.finfo(dtype).eps) * np.abs(rows).max()
    np.testing.assert_allclose(rows, np.asarray(whole, "float64"), rtol=0, atol=atol)


def test_float16_with_xla_on_a_cpu_is_an_error_of_jax() -> None:
    x = jnp.ones((4, 1, 8), jnp.float16)
    with pytest.raises(ValueError, match=r"'F16_F16_F32' is not supported .* on CPU"):
        compiled(x, x, x, implementation="xla")


# A softcap, and sinks.

CAPS = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([0.5, -3.0, 4.0, 0.0], np.float32)},
}
CAPS["both"] = CAPS["softcap"] | CAPS["sinks"]


def masks(name, draw):
    """What is passed, and which query then attends to which key."""
    i, j = np.arange(5)[:, None], np.arange(7)
    mask = np.asarray(draw(4, 5, 7)) > -0.5
    bias = np.array(draw(4, 1, 7))
    bias[..., 3] = -np.inf
    return {
        "none": ({}, True, 0.0),
        "mask": ({"mask": jnp.asarray(mask)}, mask, 0.0),
        "bias": ({"bias": jnp.asarray(bias)}, True, bias),
        "window": ({"is_causal": True, "window": 2}, (j <= i) & (j > i - 2), 0.0),
        "all": (
            {
                "mask": jnp.asarray(mask[0]),
                "bias": jnp.asarray(bias[0]),
                "is_causal": True,
            },
            mask[0] & (j <= i),
            bias[0],
        ),
    }[name]


MASKS = ["none", "mask", "bias", "window", "all"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("caps", "dtype"),
    [
        ("softcap", "float32"),
        ("sinks", "float32"),
        *(("both", each) for each in DTYPES),
    ],
)
def test_caps_and_sinks_are_those_of_the_formula(
    caps, mask, dtype, draw, strict
) -> None:
    shared = 4 if mask == "none" else 2
    with jax.enable_x64(dtype == "float64"):
        shapes = (5, 4, 6), (7, shared, 6), (7, shared, 3)
        q, k, v = (jnp.asarray(np.asarray(draw(*s))).astype(dtype) for s in shapes)
        q = 3 * q
        given, visible, bias = masks(mask, draw)
        out = compiled(q, k, v, **given, **CAPS[caps])
        assert out.dtype == dtype
        k, v = (np.repeat(np.asarray(x, "float64"), 4 // shared, 1) for x in (k, v))
        with np.errstate(invalid="ignore"):
            expected = by_formula(q, k, v, visible, bias, **CAPS[caps])
        eps = float(jnp.finfo(dtype).eps)
        sees = np.broadcast_to(visible & np.isfinite(bias), (4, 5, 7)).any(-1).T
        if "sinks" in CAPS[caps]:  # a query that sees nothing else gets zeros
            sees[:] = True
        np.testing.assert_allclose(
            np.asarray(out, "float64")[sees], expected[sees], rtol=0, atol=16 * eps
        )


@pytest.mark.parametrize(("caps", "order"), [("softcap", 1), ("sinks", 1), ("both", 2)])
def test_derivatives_of_caps_and_sinks_are_those_of_finite_differences(
    caps, order, x64, draw
) -> None:
    q, k, v = 2 * draw(5, 4, 6), draw(7, 2, 6), draw(7, 2, 3)
    given, _, _ = masks("all", draw)
    caps = dict(CAPS[caps])
    sinks = [jnp.asarray(caps.pop("sinks"), float)] if "sinks" in caps else []

    def loss(q, k, v, *sinks):
        more = {"sinks": sinks[0]} if sinks else {}
        return jnp.sin(nn.dot_product_attention(q, k, v, **given, **caps, **more)).sum()

    check_grads(jax.jit(loss), (q, k, v, *sinks), order=order, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize(
    ("dtype", "run"),
    [
        ("float32", "forward"),
        ("float32", "backward"),
        ("float32", "backward through a scan"),
        ("bfloat16", "forward"),
        ("bfloat16", "backward through a scan"),
    ],
)
def test_caps_and_sinks_need_no_more_memory(caps, dtype, run) -> None:
    def memory(options):
        def attend(q, k, v, options):
            return nn.dot_product_attention(q, k, v, is_causal=True, **options)

        def layers(q, k, v, options):
            def step(q, _):
                return attend(q, k, v, options), None

            return jax.lax.scan(step, q, None, length=3)[0]

        def loss(q, k, v, options):
            layer = layers if "scan" in run else attend
            return layer(q, k, v, options).astype("float32").sum()

        softcap = {n: x for n, x in options.items() if n == "softcap"}
        sinks = {n: x for n, x in options.items() if n == "sinks"}
        whole = attend if run == "forward" else jax.grad(loss, (0, 1, 2))

        def call(q, k, v, sinks):
            return whole(q, k, v, softcap | sinks)

        x = jax.ShapeDtypeStruct((512, 4, 16), dtype)
        program = jax.jit(call).lower(x, x, x, sinks).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert memory(CAPS[caps]) <= 1.03 * memory({})


def test_extreme_sinks_and_caps_are_finite(heads) -> None:
    q, k, v = (x.astype("float32") for x in heads)
    mask = jnp.zeros((3, 5), bool).at[0].set(True)
    sinks = jnp.array([-jnp.inf, -1e30, 1e30, 0.0])

    def run(q, sinks, bias):
        return nn.dot_product_attention(
            q, k, v, mask, bias=bias, softcap=1e-3, sinks=sinks
        )

    bias = jnp.zeros((3, 5)).at[0, :2].set(-jnp.inf)
    out = run(q, sinks, bias)
    grads = jax.jit(jax.grad(lambda *x: run(*x).sum(), (0, 1, 2)))(q, sinks, bias)
    assert all(np.isfinite(x).all() for x in (out, *grads))
    # Without a sink, the query that sees nothing takes the mean.
    expected = np.stack([v.mean(0)[0]] + [np.zeros(2)] * 3)
    np.testing.assert_allclose(out[1], expected, atol=1e-6)
    assert (out[:, 2] == 0).all()


@pytest.mark.parametrize("name", ["xla", "cudnn"])
@pytest.mark.parametrize(
    ("caps", "what"), [("softcap", "a softcap"), ("sinks", "sinks")]
)
def test_kernels_of_jax_refuse_caps_and_sinks(name, caps, what, heads) -> None:
    q, k, _ = heads
    with pytest.raises(ValueError, match=f"{name}.*: it has {what}. Use"):
        nn.dot_product_attention(q, k, k, **CAPS[caps], implementation=name)
    out = nn.dot_product_attention(q, k, k, **CAPS[caps], implementation="auto")
    assert (out == nn.dot_product_attention(q, k, k, **CAPS[caps])).all()


def test_wrong_caps_and_sinks_are_errors(heads, without_type_checks) -> None:
    for softcap in (0, -1.0, jnp.inf, jnp.nan, "50"):
        with pytest.raises(
            ValueError, match="a finite number > 0, or None as `softcap`"
        ):
            nn.dot_product_attention(*heads, softcap=softcap)
    message = r"takes shape \(4,\) as `sinks`; got shape \(3,\)"
    with pytest.raises(eqx.ShapeError, match=message):
        nn.dot_product_attention(*heads, sinks=jnp.ones(3))
