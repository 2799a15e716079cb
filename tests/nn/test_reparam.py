import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def spectral(layer, key=1, **kwargs):
    make = nn.make_with_state(
        lambda: nn.SpectralNorm(layer, "weight", key=jax.random.PRNGKey(key), **kwargs)
    )
    return make()


@eqx.filter_jit
def run(layer, *args, **kwargs):
    """As one program, which compiles faster than its operations do one by one."""
    return layer(*args, **kwargs)


def test_spectral_norm_is_that_of_the_contract(k0) -> None:
    layer, state = spectral(nn.Linear(3, 2, key=k0))
    u, _ = state.get(layer.uv_index)
    np.testing.assert_allclose(u, [0.7154055, -0.6987095], atol=1e-6)
    out, _ = layer(jnp.ones(3), state)
    np.testing.assert_allclose(out, [-0.9699472, -1.3054674], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_weight_is_divided_by_its_largest_singular_value(
    dtype, x64, build, draw
) -> None:
    inner = build(nn.Linear, 5, 4, use_bias=False, dtype=dtype)
    inner = eqx.tree_at(lambda m: m.weight, inner, replace_fn=spread_out)
    weight, x = np.asarray(inner.weight), np.asarray(draw(5)).astype(dtype)
    layer, state = spectral(inner)
    for _ in range(5):
        out, state = run(layer, x, state)
    largest = np.linalg.svd(weight, compute_uv=False)[0]
    np.testing.assert_allclose(out, weight @ x / largest, rtol=1e-8)


def spread_out(weight):
    """The same singular vectors, and values far from one another."""
    u, s, v = np.linalg.svd(weight, full_matrices=False)
    return jnp.asarray((u * 3.0 ** -np.arange(len(s))) @ v)


def test_kernel_is_taken_as_a_matrix(build, draw) -> None:
    inner = build(nn.Conv1d, 3, 4, 2, use_bias=False)
    layer, state = spectral(inner)
    u, v = map(np.asarray, state.get(layer.uv_index))
    assert u.shape == (4,) and v.shape == (6,)
    x = draw(3, 5)
    out, _ = run(layer, x, state, inference=True)
    sigma = u @ np.asarray(inner.weight).reshape(4, 6) @ v
    np.testing.assert_allclose(out, np.asarray(run(inner, x)) / sigma, rtol=1e-5)


def test_training_iterates_once_more_and_inference_does_not(build, draw) -> None:
    inner = build(nn.Linear, 5, 4)
    layer, state = spectral(inner, num_power_iterations=2)
    old = state.get(layer.uv_index)
    _, state = layer(jnp.ones(5), state)
    weight, (u, v) = np.asarray(inner.weight), map(np.asarray, old)
    for _ in range(2):
        u = weight @ v / np.linalg.norm(weight @ v)
        v = weight.T @ u / np.linalg.norm(weight.T @ u)
    new = state.get(layer.uv_index)
    np.testing.assert_allclose(new[0], u, rtol=1e-5)
    np.testing.assert_allclose(new[1], v, rtol=1e-5)
    at_rest = eqx.tree_inference(layer)
    _, same = at_rest(jnp.ones(5), state)
    assert eqx.tree_equal(*jax.device_get((same.get(layer.uv_index), new)))
    _, changed = at_rest(jnp.ones(5), state, inference=False)
    assert not eqx.tree_equal(*jax.device_get((changed.get(layer.uv_index), new)))


def test_gradient_flows_through_the_weight_and_sigma_only(x64, build, draw) -> None:
    inner, x = build(nn.Linear, 3, 2, use_bias=False), draw(3)
    layer, state = spectral(inner)

    def loss(layer):
        return layer(x, state, inference=True)[0].sum()

    grad = eqx.filter_jit(eqx.filter_grad(loss))(layer).layer.weight
    u, v = state.get(layer.uv_index)
    by_formula = jax.jit(jax.grad(lambda w: jnp.sum(w / (u @ w @ v) @ x)))
    expected = by_formula(inner.weight)
    np.testing.assert_allclose(grad, expected, rtol=1e-10)


def test_spectral_norm_runs_under_vmap_and_jit(build, draw) -> None:
    layer, state = spectral(build(nn.Linear, 3, 2))
    xs = draw(4, 3)
    apply = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))
    outs, new = eqx.filter_jit(apply)(xs, state)
    alone, _ = layer(np.asarray(xs)[1], state)
    np.testing.assert_allclose(np.asarray(outs)[1], alone, rtol=1e-5)
    assert new.get(layer.uv_index)[0].shape == (2,)


def test_state_is_valid_after_an_error_of_the_layer(build) -> None:
    layer, state = spectral(build(nn.Linear, 3, 2))
    with pytest.raises(eqx.ShapeError):
        layer(jnp.ones(5), state)
    layer(jnp.ones(3), state)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_weight_of_zeros_stays_zero_until_it_changes(dtype, build, draw) -> None:
    inner = build(nn.Linear, 3, 2, use_bias=False, dtype=dtype)
    weight, x = inner.weight, np.asarray(draw(3)).astype(dtype)
    zeros = jax.device_put(np.zeros((2, 3), dtype))
    inner = eqx.tree_at(lambda m: m.weight, inner, zeros)
    layer, state = spectral(inner)
    leaves, treedef = jax.tree.flatten(state)

    def loss(layer):
        return layer(x, jax.tree.unflatten(treedef, leaves))[0].real.sum()

    grad = np.asarray(eqx.filter_jit(eqx.filter_grad(loss))(layer).layer.weight)
    assert np.isfinite(grad).all() and grad.any()
    out, state = run(layer, x, state)
    assert not np.any(out)
    layer = eqx.tree_at(lambda m: m.layer.weight, layer, weight)
    for _ in range(30):
        out, state = run(layer, x, state)
    weight = np.asarray(weight)
    largest = np.linalg.svd(weight, compute_uv=False)[0]
    np.testing.assert_allclose(out, weight @ x / largest, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norms_in_half_precision_are_computed_in_float32(
    scale, dtype, strict, build, draw
) -> None:
    inner = build(nn.Linear, 16, 8, use_bias=False)
    weight = (np.asarray(inner.weight) * scale).astype(dtype)
    x = jax.device_put(np.asarray(draw(16)).astype(dtype))
    inner = eqx.tree_at(lambda m: m.weight, inner, jax.device_put(weight))
    wide, expected = weight.astype("float32"), np.asarray(inner(x), "float32")
    layer = nn.WeightNorm(inner)
    out = layer(x)
    assert layer.g.dtype == out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, "float32"), expected, rtol=0.05)
    layer, state = spectral(inner, num_power_iterations=30)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(dtype)}
    out, state = layer(x, state)
    assert out.dtype == dtype
    largest = np.linalg.svd(wide, compute_uv=False)[0]
    out = np.asarray(out, "float32")
    np.testing.assert_allclose(out, expected / largest, rtol=0.05)


def test_spectral_norm_of_a_weight_without_rows() -> None:
    layer, state = spectral(nn.Linear(3, 0, key=jax.random.key(0)))
    assert layer(jnp.ones(3), state)[0].shape == (0,)


def test_numbers_are_validated(build, key, without_type_checks) -> None:
    inner = build(nn.Linear, 3, 2)
    message = "SpectralNorm takes an int >= 0 as `num_power_iterations`; got -1"
    with pytest.raises(ValueError, match=message):
        nn.SpectralNorm(inner, "weight", -1, key=key)
    for eps in (-1.0, "small"):
        with pytest.raises(
            ValueError, match="SpectralNorm takes a number >= 0 as `eps`"
        ):
            nn.SpectralNorm(inner, "weight", eps=eps, key=key)


def test_wrong_weight_is_an_error(key) -> None:
    with pytest.raises(ValueError, match=r"at least two axes; `bias` has shape \(2,\)"):
        nn.SpectralNorm(nn.Linear(3, 2, key=key), "bias", key=key)
    with pytest.raises(AttributeError):
        nn.SpectralNorm(nn.Linear(3, 2, key=key), "kernel", key=key)
    with pytest.raises(AttributeError):
        nn.WeightNorm(nn.Linear(3, 2, key=key), "kernel")


@pytest.mark.parametrize(("axis", "shape"), [(0, (2, 1)), (-1, (1, 3)), (None, (1, 1))])
def test_weight_norm_is_that_of_the_formula(axis, shape, x64, build, draw) -> None:
    inner, x = build(nn.Linear, 3, 2), draw(3)
    layer = nn.WeightNorm(inner, axis=axis)
    assert layer.g.shape == shape
    np.testing.assert_allclose(run(layer, x), run(inner, x), rtol=1e-12)
    layer = eqx.tree_at(lambda m: m.g, layer, draw(*shape))
    others = {0: 1, -1: 0, None: (0, 1)}[axis]
    g, weight, bias = map(np.asarray, (layer.g, inner.weight, inner.bias))
    norm = np.sqrt((weight**2).sum(others, keepdims=True))
    expected = g * weight / norm @ np.asarray(x) + bias
    np.testing.assert_allclose(run(layer, x), expected, rtol=1e-12)


@pytest.mark.parametrize("axis", [2, -3, 0.5])
def test_axis_that_the_weight_lacks_is_an_error(axis, build, without_type_checks):
    message = rf"WeightNorm takes .* `axis`.* got {axis}, .* shape \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        nn.WeightNorm(build(nn.Linear, 3, 2), axis=axis)


def test_weight_norm_of_a_kernel_and_of_complex_numbers(build, draw) -> None:
    inner, x = build(nn.Conv2d, 2, 3, 2), draw(2, 4, 4)
    layer = nn.WeightNorm(inner)
    assert layer.g.shape == (3, 1, 1, 1)
    np.testing.assert_allclose(layer(x), inner(x), rtol=1e-4)
    inner = nn.Linear(3, 2, dtype=jnp.complex64, key=jax.random.key(0))
    layer = nn.WeightNorm(inner)
    assert layer.g.dtype == jnp.float32
    x = jnp.ones(3, jnp.complex64)
    np.testing.assert_allclose(layer(x), inner(x), rtol=1e-5)


def test_zero_row_has_finite_value_and_gradient(build) -> None:
    inner = build(nn.Linear, 3, 2)
    weight = np.array(inner.weight)
    weight[0] = 0
    inner = eqx.tree_at(lambda m: m.weight, inner, jax.device_put(weight))
    layer, x = nn.WeightNorm(inner), jnp.ones(3)
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: m(x).sum()))
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(gradient(layer)))
    assert np.asarray(layer(x))[0] == np.asarray(inner.bias)[0]


def test_two_of_a_kind_are_equal_and_share_one_trace(build) -> None:
    inner, traces = build(nn.Linear, 3, 2), []

    @eqx.filter_jit
    def call(layer, x):
        traces.append(None)
        return layer(x)

    one, other = nn.WeightNorm(inner), nn.WeightNorm(inner)
    assert eqx.tree_equal(one, other)
    call(one, jnp.ones(3)), call(other, jnp.ones(3))
    assert len(traces) == 1


@pytest.mark.parametrize(("dtype", "state_dtype"), [("bf16", "f32"), ("f32", "bf16")])
def test_weight_and_state_may_have_different_dtypes(dtype, state_dtype, strict) -> None:
    names = {"bf16": jnp.bfloat16, "f32": jnp.float32}
    inner = nn.Linear(3, 2, dtype=names[state_dtype], key=jax.random.key(0))
    layer, state = spectral(inner)
    layer = nn.Policy(names[dtype]).cast_params(layer)
    out, new = layer(jnp.ones(3, names[dtype]), state)
    assert out.dtype == names[dtype]
    assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(names[state_dtype])}
