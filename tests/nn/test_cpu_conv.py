"""Convolutions that take another form on a CPU, beside the one of other platforms."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from equinox_like import internal as eqxi, nn
from equinox_like.nn._layers import conv as of_layers, cpu_conv

CASES = {
    "depthwise": (nn.Conv2d, (4, 6, 7), {"kernel_size": 3, "groups": 4, "padding": 1}),
    "depthwise, to more channels": (
        nn.Conv1d,
        (3, 9),
        {"kernel_size": 4, "groups": 3, "stride": 2, "dilation": 2, "padding": "SAME"},
    ),
    "groups": (nn.Conv2d, (4, 5, 6), {"kernel_size": (3, 2), "groups": 2}),
    "groups, strided": (
        nn.Conv2d,
        (4, 6, 6),
        {"kernel_size": 3, "groups": 2, "stride": (2, 1), "padding": ((1, -1), (2, 0))},
    ),
    "circular": (
        nn.Conv1d,
        (4, 6),
        {"kernel_size": 3, "groups": 2, "padding": 1, "padding_mode": "CIRCULAR"},
    ),
    "3d": (nn.Conv3d, (2, 4, 5, 4), {"kernel_size": 3, "padding": "SAME"}),
    "3d, groups": (
        nn.Conv3d,
        (4, 4, 5, 4),
        {"kernel_size": (2, 3, 1), "stride": (2, 1, 1), "groups": 2, "dilation": 1},
    ),
    "3d, depthwise": (nn.Conv3d, (2, 3, 3, 4), {"kernel_size": 2, "groups": 2}),
    "transposed": (
        nn.ConvTranspose2d,
        (2, 4, 3),
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    ),
    "transposed, groups": (
        nn.ConvTranspose1d,
        (4, 5),
        {"kernel_size": 3, "stride": 3, "groups": 2, "dilation": 2},
    ),
    "transposed, depthwise": (
        nn.ConvTranspose2d,
        (3, 3, 4),
        {"kernel_size": 3, "stride": 2, "groups": 3, "padding": "SAME"},
    ),
    "transposed, 3d": (
        nn.ConvTranspose3d,
        (2, 3, 4, 3),
        {"kernel_size": (3, 2, 3), "stride": (2, 1, 2), "padding": 1},
    ),
}


def as_elsewhere(monkeypatch):
    """From here on layers compute as on other platforms."""
    monkeypatch.setattr(of_layers, "convolve", cpu_conv._by_xla)


def made(case, build, draw):
    cls, shape, options = CASES[case]
    return build(cls, shape[0], 2 * shape[0], **options), draw(3, *shape)


def on_a_batch(layer, xs):
    return jax.vmap(layer)(xs)


def loss(layer, xs):
    return jnp.sum(jnp.sin(on_a_batch(layer, xs)))


def gradient(layer, xs):
    return jax.grad(loss, (0, 1))(layer, xs)


def derivatives(layer, xs):
    """Of first and second order, in forward and reverse mode."""
    return (
        jax.jvp(on_a_batch, (layer, xs), (layer, jnp.cos(xs))),
        jax.jvp(gradient, (layer, xs), (layer, jnp.cos(xs))),
        jax.grad(lambda *args: jnp.sum(gradient(*args)[1] ** 2), (0, 1))(layer, xs),
        jax.grad(jax.checkpoint(lambda *args: loss(*args)), (0, 1))(layer, xs),
    )


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_other_platforms(
    case, build, draw, monkeypatch
) -> None:
    layer, xs = made(case, build, draw)

    def both(layer, xs):
        return on_a_batch(layer, xs), gradient(layer, xs)

    found = jax.jit(lambda *args: both(*args))(layer, xs)
    as_elsewhere(monkeypatch)
    wanted = jax.jit(lambda *args: both(*args))(layer, xs)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == jnp.float32
        assert jnp.abs(one - other).max() <= 2e-6 * jnp.abs(other).max()


@pytest.mark.parametrize("case", ["depthwise", "groups", "3d", "transposed"])
def test_derivatives_are_those_of_other_platforms(
    case, x64, build, draw, monkeypatch
) -> None:
    layer, xs = made(case, build, draw)
    found = jax.jit(lambda *args: derivatives(*args))(layer, xs)
    as_elsewhere(monkeypatch)
    wanted = jax.jit(lambda *args: derivatives(*args))(layer, xs)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_ensembles_and_calls_without_jit(build, draw) -> None:
    layer, xs = made("groups", build, draw)
    several = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), layer)
    found = jax.vmap(gradient, (0, None))(several, xs)
    for i, factor in enumerate((1, 2)):
        one = jax.tree.map(lambda w, factor=factor: factor * w, layer)
        wanted = jax.jit(gradient)(one, xs)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4)


def simplified(lowered):
    """The text of a program, without the branch that `platform_dependent` leaves."""
    passes = importlib.import_module("jaxlib.mlir.passmanager").PassManager
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        passes.parse("builtin.module(inline,canonicalize,cse)").run(module.operation)
    return str(module)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
@pytest.mark.parametrize("case", ["depthwise", "groups, strided", "3d", "transposed"])
def test_programs_of_other_platforms_are_as_before(
    case, platform, build, draw, monkeypatch
) -> None:
    layer, xs = made(case, build, draw)

    def text():
        step = jax.jit(jax.value_and_grad(lambda *args: loss(*args), (0, 1)))
        traced = step.trace(layer, xs)
        return simplified(traced.lower(lowering_platforms=(platform,)))

    found = text()
    as_elsewhere(monkeypatch)
    assert (found == text()) == (platform != "cpu")


def test_gradient_keeps_the_input_and_the_weight_alone(build, draw) -> None:
    layer, xs = made("depthwise", build, draw)

    def kept(x):
        return jax.tree.leaves(jax.vjp(lambda layer, x: layer(x), layer, x)[1])

    sizes = [math.prod(x.shape) for x in jax.eval_shape(kept, xs[0])]
    assert sum(sizes) <= 2 * layer.weight.size + xs[0].size


def test_long_kernels_and_dense_layers_take_one_form(key) -> None:
    def has_branches(layer, *shape):
        return "platform_index" in str(jax.make_jaxpr(layer.__call__)(jnp.ones(shape)))

    assert has_branches(nn.Conv1d(2, 2, 64, groups=2, key=key), 2, 80)
    assert not has_branches(nn.Conv1d(2, 2, 65, groups=2, key=key), 2, 80)
    assert not has_branches(nn.Conv2d(2, 2, 3, stride=2, key=key), 2, 9, 9)
    assert not has_branches(nn.ConvTranspose2d(2, 2, 3, 2, key=key), 2, 9, 9)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("cls", [nn.Conv1d, nn.ConvTranspose1d])
def test_half_precision_is_summed_in_float32(cls, dtype, key, strict) -> None:
    layer = cls(2, 2, 3, 2, groups=2, dtype=dtype, key=key)
    size = 2001 if cls is nn.Conv1d else 1000
    xs = jnp.ones((2, size), dtype)
    weight = jax.grad(lambda layer: layer(xs).sum())(layer).weight
    assert weight.dtype == dtype and (weight == 1000).all()
    assert layer(xs).dtype == dtype


def test_preferred_element_type_is_wide_enough(x64, build, draw) -> None:
    options = {"groups": 2, "use_bias": False, "dtype": jnp.float32}
    layer = build(nn.Conv1d, 64, 2, 1, preferred_element_type=jnp.float64, **options)
    x = draw(64, 2).astype(jnp.float32)
    products = np.asarray(layer.weight, float) * np.asarray(x, float).reshape(2, 32, 2)
    expected = products.sum(1).astype(np.float32)
    assert layer(x).dtype == jnp.float32
    assert (layer(x) == expected).all()


def test_layer_without_outputs(build, draw) -> None:
    for cls, shape in ((nn.Conv2d, (4, 6, 6)), (nn.Conv3d, (4, 6, 6, 6))):
        layer = build(cls, 4, 0, 3, groups=2)
        assert layer(draw(*shape)).shape == (0, *(4,) * (len(shape) - 1))


def test_numbers_of_one_group_do_not_reach_another(key) -> None:
    layer = nn.Conv2d(4, 4, 3, groups=2, padding=1, key=key)
    out = layer(jnp.ones((4, 5, 5)).at[0].set(jnp.nan))
    assert jnp.isnan(out[:2]).all() and jnp.isfinite(out[2:]).all()


def test_gradient_of_groups_is_right_on_any_mesh(build, draw) -> None:
    layer, xs = made("groups", build, draw)
    xs = jnp.concatenate([xs, xs[:1]])
    mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    found = jax.jit(gradient)(jax.device_put(layer, whole), jax.device_put(xs, rows))
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(gradient(layer, xs)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_gradient_is_right_in_a_shard_map(build, draw) -> None:
    layer, xs = made("3d", build, draw)
    xs = jnp.concatenate([xs, xs[:1]])
    mesh = jax.make_mesh((4,), ("data",))
    rows = NamedSharding(mesh, P("data"))

    def mapped(layer, xs):
        return jax.lax.psum(loss(layer, xs), "data")

    total = jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found = jax.jit(jax.grad(total))(layer, jax.device_put(xs, rows))
    wanted = jax.grad(loss)(layer, xs)
    np.testing.assert_allclose(found.weight, wanted.weight, rtol=1e-4, atol=1e-5)


def test_exported_program_is_a_convolution(build, draw) -> None:
    layer, xs = made("groups", build, draw)
    jaxpr = str(jax.make_jaxpr(eqxi.finalise_fn(jax.jit(layer.__call__)))(xs[0]))
    assert "conv_general_dilated" in jaxpr
    assert "cond" not in jaxpr and "platform_index" not in jaxpr
    number = nn.summary(layer, xs[0]).total_operations
    assert number == 2 * layer.weight.size * math.prod(layer(xs[0]).shape[1:])


def test_program_for_several_platforms_holds_both_forms(build, draw) -> None:
    pytest.importorskip("flatbuffers")
    layer, xs = made("depthwise", build, draw)
    export = jax.export.export(jax.jit(layer.__call__), platforms=("cpu", "cuda"))
    exported = export(xs[0])
    assert "stablehlo.convolution" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(xs[0]), layer(xs[0]), rtol=1e-6)
