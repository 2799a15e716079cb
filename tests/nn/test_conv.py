import dataclasses
import functools
import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn

CONVS = [
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
]
NUMPY_MODES = {
    "ZEROS": "constant",
    "REFLECT": "reflect",
    "REPLICATE": "edge",
    "CIRCULAR": "wrap",
}


def same_padding(size, kernel, stride, dilation, odd_at_start=False):
    """Padding such that the output has ceil(size / stride) elements."""
    out = math.ceil(size / stride)
    total = max((out - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    low, high = total // 2, total - total // 2
    return (high, low) if odd_at_start else (low, high)


def padded(x, padding, mode="ZEROS"):
    for axis, (low, high) in enumerate(padding, start=1):
        width = [(0, 0)] * x.ndim
        width[axis] = (max(low, 0), max(high, 0))
        x = np.pad(x, width, NUMPY_MODES[mode])
        start, stop = max(-low, 0), x.shape[axis] - max(-high, 0)
        x = np.take(x, range(start, stop), axis)
    return x


def reference(x, weight, bias, stride, dilation, groups):
    """The sum of the definition, in NumPy and in double precision, of a padded `x`."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out_channels, per_group, *kernel = weight.shape
    out_shape = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[1:], kernel, stride, dilation, strict=True)
    ]
    y = np.zeros((out_channels, *out_shape))
    for o, *position in np.ndindex(*y.shape):
        group = o // (out_channels // groups)
        for c, *offset in np.ndindex(per_group, *kernel):
            at = zip(position, offset, stride, dilation, strict=True)
            element = tuple(s * i + d * j for i, j, s, d in at)
            y[(o, *position)] += (
                weight[(o, c, *offset)] * x[(group * per_group + c, *element)]
            )
    return y + np.asarray(bias)


def test_first_values_and_result_are_those_of_the_contract(k0) -> None:
    conv = nn.Conv2d(2, 3, 3, key=k0)
    weight = [0.1613684, -0.1497281, -0.1286095]
    np.testing.assert_allclose(conv.weight.ravel()[:3], weight, atol=1e-7)
    bias = [-0.2322639, -0.2258541, 0.0383848]
    np.testing.assert_allclose(conv.bias.ravel(), bias, atol=1e-7)
    out = conv(jnp.ones((2, 4, 4)))
    np.testing.assert_allclose(out[0, 0, 0], -0.5852190, atol=1e-5)


def test_first_values_are_uniform_up_to_the_inverse_root_of_the_fan_in(k0) -> None:
    conv = nn.Conv1d(6, 4, 5, groups=2, key=k0)
    kw, kb = jax.random.split(k0, 2)
    lim = 1 / np.sqrt(3 * 5)
    weight = jax.random.uniform(kw, (4, 3, 5), minval=-lim, maxval=lim)
    bias = jax.random.uniform(kb, (4, 1), minval=-lim, maxval=lim)
    assert (conv.weight == weight).all() and (conv.bias == bias).all()
    unbiased = nn.Conv1d(6, 4, 5, groups=2, use_bias=False, key=k0)
    assert (unbiased.weight == weight).all() and unbiased.bias is None


CASES = {
    "plain": ((2, 7), {"kernel_size": 3}),
    "stride": ((2, 8), {"kernel_size": 3, "stride": 2}),
    "dilation": ((2, 9), {"kernel_size": 3, "dilation": 2, "stride": 3}),
    "padding": ((2, 5), {"kernel_size": 3, "padding": 2}),
    "cropping": ((2, 8), {"kernel_size": 3, "padding": [(-1, -2)]}),
    "groups": ((4, 5), {"kernel_size": 2, "groups": 2}),
    "depthwise": ((4, 5), {"kernel_size": 2, "groups": 4, "use_bias": False}),
    "2d": (
        (2, 6, 7),
        {
            "kernel_size": (2, 3),
            "stride": (1, 2),
            "padding": (1, 0),
            "dilation": (2, 1),
        },
    ),
    "2d pairs": ((2, 4, 4), {"kernel_size": 3, "padding": ((0, 2), (1, -1))}),
    "3d": ((1, 3, 4, 3), {"kernel_size": 2, "stride": (1, 2, 1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_result_is_that_of_the_formula(case, x64, build, draw) -> None:
    (channels, *sizes), options = CASES[case]
    conv = build(nn.Conv, len(sizes), channels, 4, **options)
    x = draw(channels, *sizes)
    bias = 0 if conv.bias is None else conv.bias
    expected = reference(
        padded(np.asarray(x), conv.padding),
        conv.weight,
        bias,
        conv.stride,
        conv.dilation,
        conv.groups,
    )
    out = conv(x)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-13)
    if case in ("dilation", "2d"):
        check_grads(lambda conv, x: conv(x), (conv, x), order=1, modes=["rev"])


@pytest.mark.parametrize("mode", NUMPY_MODES)
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", [(2, -2)]])
def test_padding_modes_and_words_pad_as_numpy_does(
    mode, padding, x64, build, draw
) -> None:
    stride, dilation = 2, 3
    conv = build(nn.Conv1d, 1, 2, 2, stride, padding, dilation, padding_mode=mode)
    x = draw(1, 7)
    pairs = {
        "SAME": [same_padding(7, 2, stride, dilation)],
        "SAME_LOWER": [same_padding(7, 2, stride, dilation, odd_at_start=True)],
        "VALID": [(0, 0)],
    }.get(padding if isinstance(padding, str) else "", padding)
    x_padded = padded(np.asarray(x), pairs, mode)
    expected = reference(x_padded, conv.weight, conv.bias, (stride,), (dilation,), 1)
    np.testing.assert_allclose(conv(x), expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("ZEROS", "001234500"),
        ("reflect", "321234543"),
        ("Replicate", "111234555"),
        ("CIRCULAR", "451234512"),
    ],
)
def test_padding_modes_by_example(mode, expected, key) -> None:
    conv = nn.Conv1d(1, 1, 1, padding=2, use_bias=False, padding_mode=mode, key=key)
    conv = eqx.tree_at(lambda c: c.weight, conv, jnp.ones((1, 1, 1)))
    out = conv(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    assert "".join(str(int(x)) for x in out[0]) == expected


sizes = st.integers(1, 9)


def shape_of_result(*args, size, **kwargs):
    def run(key, x):
        return nn.Conv1d(1, *args, **kwargs, key=key)(x)

    return jax.eval_shape(run, jax.random.key(0), jnp.ones((1, size))).shape


@settings(max_examples=25)
@given(
    size=sizes,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    padding=st.sampled_from(["same", "SAME_LOWER"]),
    mode=st.sampled_from(["ZEROS", "CIRCULAR"]),
)
def test_output_size_of_same_depends_on_the_stride_alone(
    size, kernel, stride, dilation, padding, mode
) -> None:
    options = kernel, stride, padding, dilation
    out = shape_of_result(1, *options, padding_mode=mode, size=size)
    assert out == (1, math.ceil(size / stride))


def test_arguments_are_stored_for_each_axis(build) -> None:
    conv = build(nn.Conv3d, 1, 2, 3, padding=[1, 2, 0], padding_mode="circular")
    assert conv.kernel_size == (3, 3, 3) and conv.stride == conv.dilation == (1, 1, 1)
    assert conv.padding == ((1, 1), (2, 2), (0, 0))
    assert conv.padding_mode == "CIRCULAR" and conv.num_spatial_dims == 3
    lower = build(nn.Conv2d, 1, 2, [3, 1], padding="same_lower")
    assert lower.padding == "SAME_LOWER" and lower.kernel_size == (3, 1)
    assert conv.weight.shape == (2, 1, 3, 3, 3) and conv.bias.shape == (2, 1, 1, 1)


def test_named_forms_are_conv_of_that_many_axes(build) -> None:
    options = 2, 4, 3, 2, 1, 1, 2, False, "REFLECT", jnp.float16
    for n, cls in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
        make = functools.partial(cls, *options)
        conv = jax.eval_shape(lambda key, make=make: make(key=key), jax.random.key(0))
        general = build(nn.Conv, n, *options)
        assert isinstance(conv, nn.Conv)
        for field in dataclasses.fields(nn.Conv):
            one, other = getattr(conv, field.name), getattr(general, field.name)
            if field.name == "weight":
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
            else:
                assert one == other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kernel_size": (3, 3, 3)},
            "one value for each spatial axis as `kernel_size`: 2",
        ),
        ({"stride": (1,)}, "one value for each spatial axis as `stride`: 2 in all"),
        (
            {"kernel_size": 2.5},
            "an int or a sequence of 2 ints as `kernel_size`; got 2.5",
        ),
        ({"kernel_size": 0}, "an int >= 1 as `kernel_size`; got 0"),
        ({"stride": 0}, "an int >= 1 as `stride`; got 0"),
        ({"dilation": (1, -1)}, "an int >= 1 as `dilation`; got -1"),
        ({"padding": 1.5}, "an int, a sequence of 2 ints, or.*; got 1.5"),
        ({"padding": (1, 2, 3)}, r"an int.* as `padding`; got \(1, 2, 3\)"),
        (
            {"padding": ((1, 2), 3)},
            r"2 pairs \(before, after\) as `padding`; got \(\(1, 2\), 3\)",
        ),
        (
            {"padding": "FULL"},
            "one of SAME, SAME_LOWER, VALID as `padding`; got 'FULL'",
        ),
        (
            {"padding_mode": "MIRROR"},
            "ZEROS, REFLECT.* as `padding_mode`; got 'MIRROR'",
        ),
        (
            {"in_channels": 3, "groups": 2},
            "a multiple of `groups`, 2, as `in_channels`; got 3",
        ),
        (
            {"out_channels": 3, "groups": 2},
            "a multiple of `groups`, 2, as `out_channels`; got 3",
        ),
        ({"in_channels": 0}, "an int >= 1 as `in_channels`; got 0"),
        ({"out_channels": -1}, "an int >= 0 as `out_channels`; got -1"),
        ({"groups": 0}, "an int >= 1 as `groups`; got 0"),
    ],
)
def test_wrong_argument_is_an_error(options, message, key, without_type_checks) -> None:
    arguments = {"in_channels": 4, "out_channels": 4, "kernel_size": 3} | options
    with pytest.raises(ValueError, match=f"Conv2d takes .*{message}"):
        nn.Conv2d(**arguments, key=key)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32])
def test_another_dtype_than_the_weights_is_an_error(dtype, key) -> None:
    with pytest.raises(TypeError, match="of the dtype of its weight"):
        nn.Conv1d(1, 1, 2, key=key)(jnp.ones((1, 4), dtype))


def test_preferred_element_type_adds_up_in_that_dtype(build, draw) -> None:
    def make(preferred):
        options = {"dtype": jnp.bfloat16, "preferred_element_type": preferred}
        return build(nn.Conv1d, 64, 1, 1, use_bias=False, **options)

    conv = make(jnp.float32)
    assert conv.preferred_element_type == jnp.float32
    assert make(None).preferred_element_type is None
    jaxpr = str(jax.make_jaxpr(conv.__call__)(jnp.ones((64, 2), jnp.bfloat16)))
    assert "preferred_element_type=float32" in jaxpr
    x = draw(64, 2).astype(jnp.bfloat16)
    out = conv(x)
    assert out.dtype == jnp.bfloat16
    exact = reference(x.astype(float), conv.weight.astype(float), 0, (1,), (1,), 1)
    assert (out == jnp.asarray(exact, jnp.bfloat16)).all()
    grad = jax.grad(lambda x: conv(x).astype(jnp.float32).sum())(x)
    assert grad.dtype == jnp.bfloat16
    assert (grad == conv.weight[0]).all()


def test_kernel_may_be_replaced_by_a_larger_one(key) -> None:
    conv = nn.Conv1d(1, 1, 3, padding="SAME", key=key)
    conv = eqx.tree_at(lambda c: c.weight, conv, jnp.ones((1, 1, 5)))
    assert conv(jnp.ones((1, 8))).shape == (1, 8)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_any_number_of_spatial_axes(n, build, draw) -> None:
    conv = build(nn.Conv, n, 2, 3, 1)
    x = draw(2, *itertools.repeat(4, n))
    expected = jnp.einsum("oi...,i...->o...", conv.weight, x) + conv.bias
    np.testing.assert_allclose(conv(x), expected, rtol=1e-5)


def gradient_on_a_mesh(axes, groups):
    """The weight gradient for a batch that is split over these axes of a mesh."""

    @jax.jit
    def gradient(weight, x):
        def loss(weight):
            y = jax.lax.conv_general_dilated(
                x, weight, (1,), "SAME", feature_group_count=groups
            )
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(weight)

    weight, x = jnp.ones((4, 4 // groups, 3)), jnp.arange(96.0).reshape(4, 4, 6)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P(axes)))
    found = gradient(jax.device_put(weight, whole), jax.device_put(x, rows))
    return np.asarray(found), np.asarray(gradient(weight, x))


def test_weight_gradient_is_right_if_the_batch_is_split_over_all_axes():
    for axes, groups in [(("data", "model"), 4), (("data",), 1)]:
        found, wanted = gradient_on_a_mesh(axes, groups)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_xla_counts_the_weight_gradient_of_groups_twice_otherwise():
    """If this fails, XLA was repaired: remove the advice in `docs/distributed.md` and in
    the docstring of `Conv`."""
    found, wanted = gradient_on_a_mesh(("data",), 4)
    np.testing.assert_allclose(found, 2 * wanted, rtol=1e-3, atol=1e-3)


# A window that is larger than its input

AXIS = st.tuples(
    st.integers(0, 5),  # the size of the input
    st.integers(1, 4),  # of the kernel
    st.integers(1, 3),  # the stride
    st.integers(1, 3),  # the dilation
    st.tuples(st.integers(-2, 3), st.integers(-2, 3)),
)


def new_size(size, kernel, stride, dilation, padding, is_transposed):
    """The size of the output along one axis, which is negative if nothing fits."""
    reach, is_word = dilation * (kernel - 1), isinstance(padding, str)
    if is_word and padding != "VALID":
        return stride * size if is_transposed else math.ceil(size / stride)
    total = 0 if is_word else sum(padding)
    if is_transposed:
        return stride * (size - 1) + 1 + reach - total
    return (size + total - reach - 1) // stride + 1


@given(
    st.lists(AXIS, min_size=1, max_size=3),
    st.sampled_from([None, "SAME", "SAME_LOWER", "VALID"]),
    st.sampled_from(["ZEROS", "REFLECT", "REPLICATE", "CIRCULAR"]),
    st.booleans(),
)
def test_size_is_that_of_the_formula_or_an_error(
    axes, word, mode, is_transposed
) -> None:
    size, kernel, stride, dilation, padding = zip(*axes, strict=True)
    is_circular = mode == "CIRCULAR" and word in ("SAME", "SAME_LOWER")
    assume(mode == "ZEROS" or is_circular or not is_transposed)
    cls = CONVS[is_transposed][len(axes) - 1]
    options = {"padding": word or padding, "padding_mode": mode, "dilation": dilation}
    x = jax.ShapeDtypeStruct((2, *size), jnp.float32)

    def run(key, x):
        return cls(2, 3, kernel, stride, key=key, **options)(x)

    paddings = [word] * len(axes) if word else padding
    each = zip(size, kernel, stride, dilation, paddings, strict=True)
    expected = tuple(new_size(*axis, is_transposed) for axis in each)
    if min(size) > 0 and min(expected) > 0:
        assert jax.eval_shape(run, jax.random.key(0), x).shape == (3, *expected)
        return
    with pytest.raises(eqx.ShapeError, match=f"{cls.__name__} takes an `x` .*shape"):
        jax.eval_shape(run, jax.random.key(0), x)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (
            lambda key: nn.Conv1d(1, 2, 5, key=key),
            (1, 3),
            r"Conv1d .*shape \(1, 3\)\. Along axis 1 the window spans 5 elements, and "
            "there are 3 with the padding.* change the `kernel_size` or `padding` of",
        ),
        (
            lambda key: nn.Conv2d(1, 2, (1, 3), padding=1, dilation=4, key=key),
            (1, 9, 6),
            "Along axis 2 the window spans 9 elements, and there are 8 with the padding",
        ),
        (
            lambda key: nn.Conv3d(1, 2, 2, padding=-1, key=key),
            (1, 4, 4, 1),
            "Along axis 3 the window spans 2 elements, and there are 0 with the padding",
        ),
        (
            lambda key: nn.Conv(1, 1, 2, 1, padding="SAME", key=key),
            (1, 0),
            r"Conv takes an `x` without empty spatial axes, but was given shape \(1, 0\)",
        ),
        (
            lambda key: nn.ConvTranspose1d(1, 2, 3, padding=2, key=key),
            (1, 2),
            r"ConvTranspose1d .*shape \(1, 2\)\. .*spans 3 elements, and there are 2 with "
            "the padding",
        ),
    ],
)
def test_window_that_does_not_fit_is_an_error(layer, shape, message, key) -> None:
    conv = layer(key)
    with pytest.raises(eqx.ShapeError, match=message):
        conv(jnp.ones(shape))
    with pytest.raises(eqx.ShapeError, match=message):
        jax.vmap(conv)(jnp.ones((2, *shape)))
