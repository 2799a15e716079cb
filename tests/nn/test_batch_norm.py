import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn
from equinox_like.nn._layers import batch_norm as _batch_norm

EPS = 1e-5


def make(*args, mode="batch", **kwargs):
    return nn.make_with_state(nn.BatchNorm)(*args, mode=mode, **kwargs)


@eqx.filter_jit
def run(norm, *args, **kwargs):
    """As one program, which compiles faster than its operations do one by one."""
    return norm(*args, **kwargs)


def mapped(norm, **kwargs):
    call = functools.partial(norm, **kwargs)
    apply = jax.vmap(
        lambda x, s: call(x, s), axis_name="b", in_axes=(0, None), out_axes=(0, None)
    )
    return eqx.filter_jit(apply)


def moments(x):
    """Of each channel of a batch `(batch, channels, ...)`, in double precision."""
    x = np.moveaxis(np.asarray(x, np.float64), 1, 0).reshape(x.shape[1], -1)
    return x.mean(axis=1), x.var(axis=1)


def normalised(x, mean, variance):
    spread = (1, -1) + (1,) * (x.ndim - 2)
    x = np.asarray(x, np.float64)
    return (x - mean.reshape(spread)) / np.sqrt(variance.reshape(spread) + EPS)


def test_object_that_converts_to_an_array_may_stand_for_a_parameter() -> None:
    class Doubled(eqx.Module):
        half: jax.Array

        def __jax_array__(self):
            return 2 * self.half

    norm, state = make(2)
    norm = eqx.tree_at("weight", norm, jnp.array([1.0, 3.0]))
    double = lambda x: Doubled(x / 2) if eqx.is_inexact_array(x) else x  # noqa: E731
    x = jnp.arange(6.0).reshape(3, 2)
    out, _ = run(jax.tree.map(double, norm), x, state)
    np.testing.assert_allclose(out, run(norm, x, state)[0], rtol=1e-6)


def test_results_of_mode_batch_are_those_of_the_contract() -> None:
    norm, state = make(1, "b")
    out, state = mapped(norm)(jnp.array([[0.0], [1], [5]]), state)
    expected = [-0.9258191, -0.4629096, 1.3887286]
    np.testing.assert_allclose(out[:, 0], expected, atol=1e-5)
    out, state = mapped(norm)(jnp.array([[0.0], [2], [10]]), state)
    expected = [-0.9258199, -0.4629100, 1.3887299]
    np.testing.assert_allclose(out[:, 0], expected, atol=1e-5)
    hidden = state.get(norm.batch_state_index)
    np.testing.assert_allclose(np.ravel(hidden), [0.0598, 1.2129666], atol=1e-5)
    out, _ = run(norm, jnp.ones(1), state, inference=True)
    np.testing.assert_allclose(out, -0.58613, atol=2e-4)
    peer, _ = make(1, "b", debias="peer")
    out, _ = run(peer, jnp.ones(1), state, inference=True)
    np.testing.assert_allclose(out, -0.25682, atol=1e-4)


def test_results_of_mode_ema_are_those_of_the_contract() -> None:
    norm, state = make(1, "b", mode="ema")
    _, state = mapped(norm)(jnp.array([[0.0], [1], [5]]), state)
    out, state = mapped(norm)(jnp.array([[0.0], [2], [10]]), state)
    expected = [-0.9213591, -0.0091224, 3.6398246]
    np.testing.assert_allclose(out[:, 0], expected, atol=1e-5)
    running = state.get(norm.ema_state_index)
    np.testing.assert_allclose(np.ravel(running), [2.02, 4.8066664], atol=1e-5)
    out, _ = run(norm, jnp.ones(1), state, inference=True)
    np.testing.assert_allclose(out, -0.4652407, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 2, 2)])
@pytest.mark.parametrize("form", ["vmapped", "batched"])
def test_mode_batch_is_that_of_the_formula(shape, form, x64, draw) -> None:
    momentum = 0.9
    norm, state = make(3, "b" if form == "vmapped" else None, momentum=momentum)
    weight, bias = draw(3), draw(3)
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (weight, bias))
    apply = eqx.filter_jit(mapped(norm) if form == "vmapped" else norm)
    spread = (1, -1) + (1,) * (len(shape) - 2)
    weight, bias = (np.asarray(a).reshape(spread) for a in (weight, bias))
    mean, variance = np.zeros(3), np.zeros(3)
    for step in range(1, 4):
        x = np.asarray(draw(*shape)) * step + 1
        out, state = apply(x, state)
        m, v = moments(x)
        expected = weight * normalised(x, m, v) + bias
        np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)
        mean = momentum * mean + (1 - momentum) * m
        variance = momentum * variance + (1 - momentum) * v
    assert state.get(norm.batch_counter) == 3
    stored = state.get(norm.batch_state_index)
    np.testing.assert_allclose(stored[0], mean, rtol=1e-12)
    np.testing.assert_allclose(stored[1], variance + momentum**3, rtol=1e-12)
    out, same = apply_inference(norm, x, state, form)
    debiased = mean / (1 - momentum**3), variance / (1 - momentum**3)
    expected = weight * normalised(x, *debiased) + bias
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)
    assert eqx.tree_equal(*jax.device_get((same, state)))


def apply_inference(norm, x, state, form):
    if form == "batched":
        return run(norm, x, state, inference=True)
    return jax.jit(jax.vmap(lambda x: norm(x, state, inference=True)[0]))(x), state


def test_mode_ema_normalises_by_the_blended_averages(x64, draw) -> None:
    norm, state = make(3, "b", mode="ema", momentum=0.9, channelwise_affine=False)
    x, y = draw(6, 3, 4), draw(6, 3, 4) * 2
    out, state = mapped(norm)(x, state)
    first = moments(x)
    np.testing.assert_allclose(out, normalised(x, *first), rtol=1e-9, atol=1e-12)
    out, state = mapped(norm)(y, state)
    blended = [0.9 * a + 0.1 * b for a, b in zip(first, moments(y), strict=True)]
    np.testing.assert_allclose(out, normalised(y, *blended), rtol=1e-9, atol=1e-12)
    out = jax.vmap(lambda x: run(norm, x, state, inference=True)[0])(x)
    np.testing.assert_allclose(out, normalised(x, *blended), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_state_can_be_donated_from_the_first_step(mode) -> None:
    norm, state = make(3, mode=mode)
    step = eqx.filter_jit(lambda state, x: norm(x, state)[1], donate=("state",))
    new = step(state, jnp.ones((4, 3)))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    step(new, jnp.ones((4, 3)))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_inference_before_training(mode) -> None:
    norm, state = make(2, mode=mode)
    x = np.array([[1.0, -3.0]], np.float32)
    out, _ = norm(x, state, inference=True)
    start = 1.0 if mode == "batch" else 0.0
    np.testing.assert_allclose(out, x / np.sqrt(start + EPS), rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 1000])
def test_momentum_near_one_does_not_change_the_mean(steps) -> None:
    # In float32 0.9999 and 1 - 0.9999 do not add up to 1.
    norm, state = make(1, momentum=0.9999)
    x = jnp.array([[10.0], [30.0]])

    @jax.jit
    def train(state):
        return jax.lax.fori_loop(0, steps, lambda _, s: norm(x, s)[1], state)

    out, _ = run(norm, x, train(state), inference=True)
    np.testing.assert_allclose(out, [[-1], [1]], atol=5e-5)


def test_momentum_of_one_keeps_the_start(draw) -> None:
    norm, state = make(2, momentum=1.0)
    x = draw(4, 2)
    _, state = run(norm, x, state)
    out, _ = run(norm, x, state, inference=True)
    np.testing.assert_allclose(out, x / np.sqrt(1 + EPS), rtol=1e-5)


def test_debiased_variance_of_equal_batches_is_that_of_the_batch(draw) -> None:
    norm, state = make(3)
    x = draw(6, 3)
    for _ in range(3):
        trained, state = run(norm, x, state)
    out, _ = run(norm, x, state, inference=True)
    np.testing.assert_allclose(out, trained, atol=1e-4)


@pytest.mark.parametrize("batch_axis", [0, 1, 2, -1])
def test_batch_axis(batch_axis, draw) -> None:
    x = draw(6, 3, 4)
    expected = run(*make(3)[:1], x, make(3)[1])
    norm, state = make(3, batch_axis=batch_axis)
    out, state = run(norm, np.moveaxis(np.asarray(x), 0, batch_axis), state)
    out = np.moveaxis(np.asarray(out), batch_axis, 0)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    # As many examples as channels are only ambiguous along axis 0.
    some = np.asarray(x)[: 6 if batch_axis == 0 else 3]
    at_rest = run(norm, np.moveaxis(some, 0, batch_axis), state, inference=True)[0]
    at_rest = np.moveaxis(np.asarray(at_rest), batch_axis, 0)
    by_rows = run(make(3)[0], x, expected[1], inference=True)[0]
    np.testing.assert_allclose(at_rest, by_rows[: len(some)], atol=1e-5)
    for one, other in zip(
        jax.tree.leaves(state), jax.tree.leaves(expected[1]), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_both_axes_are_one_batch(mode, draw) -> None:
    x = draw(6, 3, 4)
    norm, state = make(3, "b", mode=mode, batch_axis=0)
    plain, plain_state = make(3, mode=mode)
    for _ in range(2):
        shards, state = mapped(norm)(x.reshape(2, 3, 3, 4), state)
        whole, plain_state = run(plain, x, plain_state)
        np.testing.assert_allclose(shards.reshape(x.shape), whole, atol=1e-5)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_several_names_are_one_batch(draw) -> None:
    x = np.asarray(draw(2, 3, 5))
    norm, state = make(5, ["a", "b"])
    assert [leaf for leaf in jax.tree.leaves(norm) if isinstance(leaf, str)] == [
        "a",
        "b",
    ]
    inner = jax.vmap(norm, axis_name="a", in_axes=(0, None), out_axes=(0, None))
    both = jax.vmap(inner, axis_name="b", in_axes=(0, None), out_axes=(0, None))
    out, _ = eqx.filter_jit(both)(x, state)
    expected, _ = run(make(5)[0], np.reshape(x, (6, 5)), make(5)[1])
    np.testing.assert_allclose(np.reshape(out, (6, 5)), expected, atol=1e-5)


def test_other_vmaps_have_states_of_their_own(draw) -> None:
    norm, state = make(3, "b")
    outer = jax.vmap(mapped(norm), in_axes=(0, None))
    _, states = outer(draw(4, 6, 3), state)
    assert states.get(norm.batch_state_index)[0].shape == (4, 3)


@pytest.mark.parametrize("batch_axis", [None, 0])
def test_training_needs_the_name(batch_axis, draw) -> None:
    norm, state = make(3, "b", batch_axis=batch_axis)
    with pytest.raises(
        NameError, match=r"over the axis 'b'.*`jax.vmap\(..., axis_name='b'"
    ):
        norm(draw(4, 3)[0 if batch_axis is None else slice(None)], state)


@pytest.mark.parametrize("inference", [False, True])
def test_state_must_be_one(inference, draw, without_type_checks) -> None:
    norm, _ = make(3)
    with pytest.raises(
        TypeError, match="BatchNorm takes a `State` as `state`; got None"
    ):
        norm(draw(4, 3), None, inference=inference)


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("form", ["vmapped", "batched"])
def test_masked_examples_do_not_count(mode, form, draw) -> None:
    x, mask = draw(6, 3, 2), jnp.array([True, False, True, True, False, True])
    norm, state = make(3, "b" if form == "vmapped" else None, mode=mode)
    plain, plain_state = make(3, mode=mode)
    if form == "vmapped":
        apply = jax.jit(
            jax.vmap(
                lambda x, m, s: norm(x, s, mask=m),
                axis_name="b",
                in_axes=(0, 0, None),
                out_axes=(0, None),
            )
        )
    else:
        apply = lambda x, m, s: run(norm, x, s, mask=m)  # noqa: E731
    for _ in range(2):
        out, state = apply(x, mask, state)
        rows = np.asarray(mask)
        expected, plain_state = run(plain, np.asarray(x)[rows], plain_state)
        np.testing.assert_allclose(np.asarray(out)[rows], expected, atol=1e-5)
    assert eqx.tree_equal(jax.tree.structure(out), jax.tree.structure(x))
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-6)
    out, after = apply(x, jnp.zeros(6, bool), state)
    assert eqx.tree_equal(*jax.device_get((state, after)))
    expected, _ = apply_inference(norm, x, after, form)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_running_averages_in_float16_stay_finite(mode, draw) -> None:
    x = draw(6, 3) * 1e5
    norm, state = make(3, mode=mode, dtype=jnp.float16, momentum=0.5)
    for _ in range(2):
        _, state = run(norm, x, state)
    index = norm.batch_state_index if mode == "batch" else norm.ema_state_index
    mean, variance = state.get(index)
    assert mean.dtype == variance.dtype == jnp.float16
    assert np.isfinite(mean).all() and (variance == jnp.finfo(jnp.float16).max).all()
    assert np.isfinite(norm(x, state, inference=True)[0]).all()


def test_unbiased_variance_is_stored(x64, draw) -> None:
    x = draw(4, 3, 2)
    biased, unbiased = make(3), make(3, unbiased=True)
    outs = [run(norm, x, state) for norm, state in (biased, unbiased)]
    np.testing.assert_allclose(outs[0][0], outs[1][0])
    _, v = moments(x)
    stored = outs[1][1].get(unbiased[0].batch_state_index)[1]
    np.testing.assert_allclose(stored, 0.99 + 0.01 * v * 8 / 7, rtol=1e-12)
    norm, state = make(3, unbiased=True)
    _, state = run(norm, x[:2, :, 0], state, mask=jnp.array([True, False]))
    assert np.isfinite(state.get(norm.batch_state_index)[1]).all()


@pytest.mark.parametrize("axis_name", [None, "b"])
def test_batch_of_one_is_normalised_by_the_averages_in_mode_ema(axis_name) -> None:
    norm, state = make(3, axis_name, mode="ema")
    call = functools.partial(run, norm) if axis_name is None else mapped(norm)
    _, state = call(jnp.arange(12.0).reshape(4, 3), state)
    out, state = call(jnp.ones((1, 3)), state)
    # The values of Equinox.
    np.testing.assert_allclose(out[0], [-1.03827, -1.33492, -1.63156], atol=1e-4)
    mean, variance = state.get(norm.ema_state_index)
    np.testing.assert_allclose(mean, [4.465, 5.455, 6.445], rtol=1e-5)
    np.testing.assert_allclose(variance, 0.99 * 11.25, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_batch_of_one_number_of_each_channel_is_refused_in_mode_batch(
    shape, draw
) -> None:
    message = r"BatchNorm takes more than one number .* given one, .*inference=True"
    x = draw(*shape)
    norm, state = make(3)
    with pytest.raises(eqx.ShapeError, match=message):
        norm(x, state)
    named, named_state = make(3, "b")
    with pytest.raises(eqx.ShapeError, match=message):
        mapped(named)(x, named_state)
    ensemble = eqx.filter_vmap(lambda x: norm(x, state))
    with pytest.raises(eqx.ShapeError, match=message):
        ensemble(jnp.stack([x, x]))
    # Not at inference, nor with more positions, examples or devices.
    norm(x, state, inference=True)
    mapped(named, inference=True)(x, named_state)
    wide = draw(1, 3, 2)
    for batch in (jnp.concatenate([x, x + 1]), wide):
        assert np.isfinite(run(norm, batch, state)[0]).all()
    mapped(named)(wide, named_state)


def test_devices_count_as_one_batch(draw) -> None:
    norm, state = make(3, "data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run_on = jax.shard_map(
        lambda x: norm(x[0], state)[0][None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    x = draw(2, 3)
    np.testing.assert_allclose(run_on(x), normalised(x, *moments(x)), rtol=1e-4)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_mask_that_leaves_one_number_keeps_the_state(mode, draw) -> None:
    norm, state = make(3, mode=mode)
    x = draw(4, 3)
    _, state = run(norm, x, state, mask=jnp.ones(4, bool))
    out, after = run(norm, x, state, mask=jnp.arange(4) == 2)
    assert eqx.tree_equal(after, state)
    np.testing.assert_allclose(out, run(norm, x, state, inference=True)[0], rtol=1e-6)
    wide = draw(4, 3, 2)
    _, after = run(norm, wide, state, mask=jnp.arange(4) == 2)
    assert not eqx.tree_equal(after, state)


@pytest.mark.parametrize("has_mask", [False, True])
def test_count_of_a_large_batch(has_mask, without_type_checks) -> None:
    # As many numbers as there are, without their memory.
    x = np.broadcast_to(np.float32(1), (32, 1, 512, 512, 512))
    mask = jnp.ones((32, 1, 1, 1, 1), bool) if has_mask else None
    norm, _ = make(1, unbiased=True)
    count = _batch_norm._count(norm, x, _batch_norm._ChannelAxis(1, (0, 2, 3, 4), mask))
    assert float(count) == 2**32
    variance = jnp.full(1, 2.0)
    batch = _batch_norm._Moments(jnp.zeros(1), variance)
    running = _batch_norm._Running(jnp.array(0), jnp.zeros(1), jnp.ones(1))
    _, new = _batch_norm._blend(norm, running, batch, count)
    np.testing.assert_allclose(new.variance, 0.99 + 0.01 * variance)


@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_channel_without_variance_is_finite_at_inference(momentum, dtype) -> None:
    norm, state = make(2, momentum=momentum, dtype=dtype)
    x = jnp.array([[0, 0.01], [0, -0.01]] * 2, dtype)

    @jax.jit
    def step(state, _):
        _, state = norm(x, state)
        out, _ = norm(x, state, inference=True)
        return state, out

    _, outs = jax.lax.scan(step, state, length=100)
    assert np.isfinite(outs).all()


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize(
    ("dtype", "x_dtype", "out_dtype"),
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("complex64", "complex64", "complex64"),
        ("float32", "int32", "float32"),
    ],
)
def test_dtypes_of_input_and_layer_may_differ(
    mode, dtype, x_dtype, out_dtype, strict, draw
) -> None:
    norm, state = make(3, mode=mode, dtype=dtype)
    x = jax.device_put((np.asarray(draw(6, 3)) * 5).astype(x_dtype))
    reference, start = make(3, mode=mode, dtype="float32")
    if dtype != "complex64":
        expected, _ = run(reference, np.asarray(x).astype("float32"), start)
    for _ in range(2):
        out, state = run(norm, x, state)
        assert out.dtype == out_dtype
    assert run(norm, x, state, inference=True)[0].dtype == out_dtype
    if dtype != "complex64" and mode == "batch":
        np.testing.assert_allclose(np.asarray(out, float), expected, atol=0.02)
    mean = jax.tree.leaves(state)[1]
    assert mean.dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "out_dtype"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "int32", "float32"),
        ("complex64", "float32", "complex64"),
    ],
)
def test_without_parameters_the_input_decides_the_dtype(
    dtype, x_dtype, out_dtype
) -> None:
    norm, state = make(3, dtype=dtype, channelwise_affine=False)
    x = jnp.arange(12).reshape(4, 3).astype(x_dtype)
    out, state = run(norm, x, state)
    assert out.dtype == run(norm, x, state, inference=True)[0].dtype == out_dtype


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_complex_input_needs_complex_averages_in_training(mode) -> None:
    norm, state = make(2, mode=mode)
    x = jnp.array([[1, 2j], [3j, 4], [5, 6]])
    with pytest.raises(ValueError, match="imaginary part of the mean"):
        run(norm, x, state)
    assert run(norm, x, state, inference=True)[0].dtype == "complex64"


def test_half_precision_is_computed_in_float32() -> None:
    norm, state = make(1, dtype="float16")
    x = np.array([[1000.0], [1001.0], [3000.0]], np.float16)
    out, _ = norm(x, state)
    expected = normalised(np.asarray(x), *moments(x))
    np.testing.assert_allclose(out, expected, atol=2e-3)


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_flow_through_the_statistics(mode, trained, x64, draw) -> None:
    norm, state = make(2, mode=mode, momentum=0.9)
    if trained:
        _, state = run(norm, draw(5, 2, 3), state)
    leaves, treedef = jax.tree.flatten(state)
    weight = draw(5, 2, 3)

    @jax.jit
    def loss(norm_arrays, x):
        model = eqx.combine(norm_arrays, rest)
        out, _ = model(x, jax.tree.unflatten(treedef, leaves))
        return jnp.sum(out * weight)

    arrays, rest = eqx.partition(norm, eqx.is_inexact_array)
    check_grads(loss, (arrays, draw(5, 2, 3)), order=1, modes=["rev"])


def test_state_is_no_parameter(draw) -> None:
    norm, state = make(3)
    norm_with_init = nn.BatchNorm(3)
    leaves = jax.tree.leaves(eqx.filter(norm, eqx.is_inexact_array))
    assert [x.shape for x in leaves] == [(3,), (3,)]
    assert len(jax.tree.leaves(norm_with_init)) == 6

    def loss(norm):
        return norm(draw(4, 3), state)[0].sum()

    assert eqx.filter_jit(eqx.filter_grad(loss))(norm).weight.shape == (3,)


def test_call_and_field_switch_to_inference(draw) -> None:
    norm, state = make(3)
    x = draw(4, 3)
    at_rest = eqx.nn.inference_mode(norm)
    assert at_rest.inference is True
    _, same = run(at_rest, x, state)
    assert eqx.tree_equal(*jax.device_get((same, state)))
    _, new = run(at_rest, x, state, inference=False)
    assert new.get(norm.batch_counter) == 1


def test_mode_is_resolved() -> None:
    with pytest.warns(UserWarning, match="`mode='batch'`") as record:
        assert nn.BatchNorm(3, "b").mode == "ema"
    assert record[0].filename == __file__
    assert nn.BatchNorm(3).mode == "batch" and nn.BatchNorm(3).batch_axis == 0
    assert nn.BatchNorm(3, "b", mode="batch").batch_axis is None


def test_wrong_argument_is_an_error(without_type_checks) -> None:
    with pytest.raises(ValueError, match="'batch' or 'ema' as `mode`; got 'other'"):
        nn.BatchNorm(3, "b", mode="other")
    with pytest.raises(ValueError, match="'exact' or 'peer' as `debias`"):
        nn.BatchNorm(3, debias="none")
    with pytest.raises(ValueError, match="BatchNorm takes an int as `batch_axis`"):
        nn.BatchNorm(3, batch_axis="a")


@pytest.mark.parametrize(
    ("args", "shape", "message"),
    [
        ((3,), (4, 2), r"takes `x` of shape \(any, 3\), but was given shape \(4, 2\)"),
        ((3,), (3,), "takes a whole batch in training.*examples along axis 0 and 3"),
        # As under a `jax.vmap` over the examples.
        (
            (3,),
            (3, 4, 4),
            r"takes a whole batch .*`jax.vmap\(..., axis_name=\"batch\"\)`",
        ),
        ((3, "b"), (6, 4), r"takes `x` of shape \(3,\), but was given shape \(4,\)"),
        ((3, "b"), (6, 5, 3), r"\(3,\).*given shape \(5, 3\).*one extra leading axis"),
    ],
)
def test_wrong_shape_is_an_error(args, shape, message) -> None:
    norm, state = make(*args)
    apply = norm if len(args) == 1 else mapped(norm)
    with pytest.raises(eqx.ShapeError, match=message):
        apply(jnp.ones(shape), state)
    with pytest.raises(eqx.ShapeError, match=r"takes `mask` of shape \(4,\)"):
        make(3)[0](jnp.ones((4, 3)), make(3)[1], mask=jnp.ones(3, bool))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("keep", [[0, 2], [1]])
def test_state_of_another_size_is_an_error_until_it_is_pruned(
    keep, inference, draw
) -> None:
    norm, state = make(3)
    x = np.asarray(draw(8, 3))
    _, state = run(norm, x, state)
    want, _ = run(norm, x, state, inference=inference)
    kept = np.array(keep)
    pruned = eqx.tree_at(["weight", "bias"], norm, replace_fn=lambda a: a[kept])
    message = rf"given {len(keep)} channels, but .* have shape \(3,\).*`state.update\("
    with pytest.raises(eqx.ShapeError, match=message):
        pruned(x[:, kept], state, inference=inference)
    part = jax.tree.map(lambda a: a[kept] if a.ndim else a, state.substate(pruned))
    y, _ = pruned(x[:, kept], state.update(part), inference=inference)
    np.testing.assert_allclose(y, want[:, kept], atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 3, 4), (6, 3)])
def test_single_example_is_taken_at_inference(shape, draw) -> None:
    norm, state = make(3)
    x = np.asarray(draw(*shape))
    _, state = run(norm, x, state)
    whole, _ = run(norm, x, state, inference=True)
    one, _ = run(norm, x[0], state, inference=True)
    np.testing.assert_allclose(one, whole[0], atol=1e-6)


@pytest.mark.parametrize("form", ["plain", "vmapped"])
def test_what_may_be_a_batch_or_one_example_is_an_error(form, draw) -> None:
    norm, state = make(4)
    call = lambda x: run(norm, x, state, inference=True)[0]  # noqa: E731
    message = (
        r"shape \(4, 4, 4\) at inference.*batch of 4 .*`num_spatial_dims=1`.*`num_spa"
    )
    with pytest.raises(eqx.ShapeError, match=message):
        call(draw(4, 4, 4)) if form == "plain" else jax.vmap(call)(draw(6, 4, 4, 4))


def test_number_of_spatial_axes_tells_a_batch_from_one_example(draw) -> None:
    norm, state = make(4, num_spatial_dims=2)
    x = np.asarray(draw(6, 4, 4, 4)) * np.arange(1, 5)[:, None, None]
    _, state = run(norm, x, state)
    whole, _ = run(norm, x, state, inference=True)
    one, _ = run(norm, x[0], state, inference=True)
    np.testing.assert_allclose(one, whole[0], atol=1e-6)
    each = jax.vmap(lambda x: run(norm, x, state, inference=True)[0])(x)
    np.testing.assert_allclose(each, whole, atol=1e-6)
    # A batch as large as the number of channels.
    four, _ = run(norm, x[:4], state, inference=True)
    np.testing.assert_allclose(four, whole[:4], atol=1e-6)
    with pytest.raises(eqx.ShapeError, match="takes a whole batch in training"):
        run(norm, x[0], state)
    with pytest.raises(eqx.ShapeError, match=r"shape \(any, 4, any, any\)"):
        run(norm, x[None], state)
    with pytest.raises(ValueError, match="int >= 0 as `num_spatial_dims`; got -1"):
        make(4, num_spatial_dims=-1)


def test_mask_tells_a_batch_from_one_example(draw) -> None:
    norm, state = make(4)
    x = np.asarray(draw(4, 4, 4)) * np.arange(1, 5)[:, None]
    _, state = run(norm, x, state)
    expected = jax.vmap(lambda x: run(norm, x, state, inference=True)[0])(x[..., :3])
    mask = jnp.ones(4, bool)
    out, _ = run(norm, x, state, inference=True, mask=mask)
    np.testing.assert_allclose(np.asarray(out)[..., :3], expected, atol=1e-6)


def test_one_channel_is_read_alike_in_both_ways(draw) -> None:
    norm, state = make(1)
    x = np.asarray(draw(6, 1, 3))
    _, state = run(norm, x, state)
    whole, _ = run(norm, x, state, inference=True)
    one, _ = run(norm, x[:1], state, inference=True)
    np.testing.assert_allclose(one, whole[:1], atol=1e-6)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_state_from_before_x64_was_enabled_can_be_used(mode, draw) -> None:
    with jax.enable_x64(False):
        norm, state = make(3, mode=mode)
    dtypes = [x.dtype for x in jax.tree.leaves(state)]
    with jax.enable_x64(True):
        _, state = run(norm, draw(6, 3).astype(jnp.float32), state)
    assert [x.dtype for x in jax.tree.leaves(state)] == dtypes


def test_it_runs_in_a_scan_of_training_steps(draw) -> None:
    norm, state = make(3)
    xs = draw(4, 6, 3)

    def step(state, x):
        out, state = norm(x, state)
        return state, out

    final, _ = jax.lax.scan(step, state, xs)
    for x in np.asarray(xs):
        _, state = run(norm, x, state)
    pairs = zip(jax.tree.leaves(final), jax.tree.leaves(state), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_sharded_batch_has_statistics_of_the_whole(draw) -> None:
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.P("data"))
    norm, state = make(3)
    x = np.asarray(draw(8, 3))
    expected, _ = run(norm, x, state)
    out, _ = run(norm, jax.device_put(x, spec), state)
    np.testing.assert_allclose(out, expected, atol=1e-5)

    sharded, state = make(3, "data", batch_axis=0)
    mapped = jax.shard_map(
        lambda x, s: sharded(x, s),
        mesh=mesh,
        in_specs=(jax.P("data"), jax.P()),
        out_specs=(jax.P("data"), jax.P()),
    )
    out, state = jax.jit(mapped)(x, state)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_values_that_do_not_count_reach_no_gradient(
    mode, inference, value, draw
) -> None:
    mask = jnp.array([True, False, True, True])
    x = np.asarray(draw(4, 3, 2))
    norm, state = make(3, mode=mode)
    leaves, treedef = jax.tree.flatten(state)

    @eqx.filter_jit
    def value_and_gradient(norm, x):
        def loss(norm_and_x):
            norm, x = norm_and_x
            state = jax.tree.unflatten(treedef, leaves)
            out, state = norm(x, state, mask=mask, inference=inference)
            return (out[mask] ** 3).sum(), state

        return eqx.filter_value_and_grad(loss, has_aux=True)((norm, x))

    def holding(number):
        changed = np.array(x)
        changed[1, 0] = number
        return changed

    found = value_and_gradient(norm, holding(value))
    expected = value_and_gradient(norm, holding(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        jax.tree.leaves(found),
        jax.tree.leaves(expected),
    )
    assert np.isfinite(run(norm, holding(value), state, mask=mask)[0]).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", ["batch", "vmap"])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_empty_batch_leaves_the_state_as_it_is(mode, form, masked, draw) -> None:
    axes = {"axis_name": "b"} if form == "vmap" else {}
    norm, state = make(3, mode=mode, **axes)
    mask = jnp.ones(0, bool) if masked else None

    def apply(x, state, mask):
        if form == "batch":
            return norm(x, state, mask=mask)
        one = lambda x, s, m: norm(x, s, mask=m)  # noqa: E731
        in_axes = (0, None, 0 if masked else None)
        return jax.vmap(one, in_axes, (0, None), axis_name="b")(x, state, mask)

    _, state = (
        run(norm, draw(4, 3), state)
        if form == "batch"
        else mapped(norm)(draw(4, 3), state)
    )
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    with jax.debug_nans(True):
        out, state = apply(jnp.ones((0, 3)), state, mask)
    assert out.shape == (0, 3)
    for old, new in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("names", [("b", "d"), ("d", "b"), ("b",)])
@pytest.mark.parametrize("mapping", ["pmap", "shard_map"])
def test_names_of_a_vmap_and_of_a_mesh(mapping, names, masked, draw) -> None:
    x = np.asarray(draw(4, 2, 3, 2))
    mask = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool).reshape(4, 2)
    norm, state = make(3, names, momentum=0.9)

    def per_device(state, x, mask):
        def one(state, x, mask):
            return norm(x, state, mask=mask if masked else None)

        mapped = jax.vmap(one, (None, 0, 0), (0, None), axis_name="b")
        out, state = mapped(state, x, mask)
        # The state is the same on all devices only if the statistics are over them.
        return (out, state) if "d" in names else (out, None)

    if mapping == "pmap":
        run = eqx.filter_pmap(
            per_device, axis_name="d", in_axes=(None, 0, 0), out_axes=(0, None)
        )
        out, state = run(state, x, mask)
    else:
        mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,))
        run = eqx.filter_shard_map(
            per_device,
            mesh=mesh,
            in_specs=(P(), P("d"), P("d")),
            out_specs=(P("d"), P()),
        )
        out, state = run(state, x.reshape(8, 3, 2), mask.reshape(8))
    devices = [slice(0, 4)] if "d" in names else [slice(i, i + 1) for i in range(4)]
    for rows in devices:
        batch = np.reshape(x[rows], (-1, 3, 2))
        counted = batch[mask[rows].ravel()] if masked else batch
        mean, variance = moments(counted)
        found = np.asarray(out).reshape(4, 2, 3, 2)[rows].reshape(batch.shape)
        np.testing.assert_allclose(found, normalised(batch, mean, variance), atol=1e-4)
    if "d" in names:
        stored = state.get(norm.batch_state_index)
        np.testing.assert_allclose(stored[0], 0.1 * mean, atol=1e-5)
        np.testing.assert_allclose(stored[1], 0.9 + 0.1 * variance, rtol=1e-5)
