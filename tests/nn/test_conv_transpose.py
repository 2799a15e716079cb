import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn


def reference(x, weight, bias, stride, padding, dilation, output_padding):
    """One axis, by the definition: each input adds the kernel to the output."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out_channels, in_channels, k = weight.shape
    low, high = padding
    reach = dilation * (k - 1)
    n = x.shape[1]
    # Room for all that is added, before the padding is cropped.
    y = np.zeros((out_channels, stride * (n - 1) + 1 + reach + output_padding))
    for o, c, i, j in np.ndindex(out_channels, in_channels, n, k):
        y[o, stride * i + reach - dilation * j] += weight[o, c, j] * x[c, i]
    return y[:, low : y.shape[1] - high] + np.asarray(bias)


def test_result_is_that_of_the_contract(k0) -> None:
    conv = nn.ConvTranspose2d(2, 3, 3, stride=2, key=k0)
    out = conv(jnp.ones((2, 2, 2))).ravel()[:3]
    np.testing.assert_allclose(out, [-0.1050457, -0.2904181, 0.1111748], atol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
def test_first_values_are_those_of_conv(use_bias, k0) -> None:
    args = 1, 6, 4, 5
    conv = nn.Conv(*args, groups=2, use_bias=use_bias, key=k0)
    transposed = nn.ConvTranspose(*args, groups=2, use_bias=use_bias, key=k0)
    assert (transposed.weight == conv.weight).all()
    assert eqx.tree_equal(transposed.bias, conv.bias)


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "output_padding"),
    [
        (1, 0, 1, 0),
        (2, 1, 1, 1),
        (3, 2, 2, 2),
        (2, 0, 3, 0),
        (4, 1, 1, 3),
        (1, 0, 3, 2),
        (2, 1, 4, 3),
    ],
)
def test_result_is_that_of_the_formula(
    stride, padding, dilation, output_padding, x64, build, draw
) -> None:
    conv = build(nn.ConvTranspose1d, 2, 3, 3, stride, output_padding, padding, dilation)
    x = draw(2, 5)
    expected = reference(
        x, conv.weight, conv.bias, stride, (padding,) * 2, dilation, output_padding
    )
    n = stride * 4 + 1 + 2 * dilation - 2 * padding + output_padding
    assert expected.shape == (3, n)
    np.testing.assert_allclose(conv(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("word", ["SAME", "SAME_LOWER", "VALID"])
def test_output_padding_below_the_dilation_with_words(word, x64, build, draw) -> None:
    # Per axis: only the first has more than its stride.
    options = {"stride": (1, 2), "dilation": (3, 1), "output_padding": (2, 1)}
    conv = build(nn.ConvTranspose2d, 1, 1, (3, 1), padding=word, **options)
    x = draw(1, 5, 3)
    full = build(nn.ConvTranspose2d, 1, 1, (3, 1), **options | {"output_padding": 0})
    full = eqx.tree_at(lambda c: (c.weight, c.bias), full, (conv.weight, conv.bias))
    added = jnp.pad(
        full(x), ((0, 0), (0, 2), (0, 1)), constant_values=conv.bias[0, 0, 0]
    )
    found = conv(x)
    if word == "VALID":
        np.testing.assert_allclose(found, added, rtol=1e-12)
        return
    assert found.shape == (1, 5 - 2, 2 * 3 - 1)
    # What is left of the full result: the odd element goes to the end, or to the start.
    total = full(x).shape[1] - 3
    low = total // 2 if word == "SAME" else (total + 1) // 2
    np.testing.assert_allclose(
        found[:, :, :5], full(x)[:, low : low + 3, :5], rtol=1e-12
    )


def test_derivative_with_an_output_padding_above_the_stride(x64, build, draw) -> None:
    conv = build(nn.ConvTranspose1d, 1, 2, 3, dilation=3, output_padding=2)
    assert conv(jnp.ones((1, 4))).shape == (2, 12)
    check_grads(lambda c, x: c(x), (conv, draw(1, 4)), order=1, modes=["fwd", "rev"])


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (2, 3), "stride": (1, 3), "dilation": 2},
        {"kernel_size": 3, "stride": 2, "padding": ((1, 0), (0, 2)), "groups": 2},
    ],
)
def test_it_is_the_linear_transpose_of_conv(options, x64, build, draw) -> None:
    options = options | {"use_bias": False}
    conv = build(nn.Conv2d, 4, 6, **options)
    # A size which that many steps of the stride fill, so that no output padding is due.
    x = jax.ShapeDtypeStruct((4, 9, 13), float)
    y = draw(*jax.eval_shape(conv.__call__, x).shape)
    (expected,) = jax.linear_transpose(conv, x)(y)

    groups = conv.groups
    transposed = build(nn.ConvTranspose2d, 6, 4, **options)
    weight = conv.weight[..., ::-1, ::-1].reshape(groups, 6 // groups, 4 // groups, -1)
    weight = jnp.swapaxes(weight, 1, 2).reshape(transposed.weight.shape)
    transposed = eqx.tree_at(lambda c: c.weight, transposed, weight)
    out = transposed(y)
    missing = [n - m for n, m in zip((9, 13), out.shape[1:], strict=True)]
    out = jnp.pad(out, [(0, 0), *((0, m) for m in missing)])
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


def jacobian(layer, shape):
    ones = eqx.tree_at(lambda c: c.weight, layer, replace_fn=jnp.ones_like)
    jac = jax.jacobian(ones)(jnp.zeros(shape))
    rows = int(np.prod(jax.eval_shape(ones.__call__, jnp.zeros(shape)).shape))
    return jac.reshape(rows, -1)


@pytest.mark.parametrize("word", ["SAME", "SAME_LOWER"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "output_padding", "mode"),
    [
        (8, 3, 2, 1, 0, "ZEROS"),
        (9, 3, 2, 1, 1, "ZEROS"),
        (9, 4, 3, 2, 0, "ZEROS"),
        (10, 2, 5, 1, 0, "ZEROS"),
        (9, 1, 5, 1, 1, "ZEROS"),
        (8, 3, 2, 1, 0, "CIRCULAR"),
        (9, 4, 3, 2, 0, "CIRCULAR"),
    ],
)
def test_words_give_the_transposed_jacobian(
    word, size, kernel, stride, dilation, output_padding, mode, build
) -> None:
    options = {"padding": word, "dilation": dilation, "padding_mode": mode}
    options |= {"use_bias": False, "kernel_size": kernel, "stride": stride}
    conv = build(nn.Conv1d, 1, 1, **options)
    forward = jacobian(conv, (1, size))
    up = build(nn.ConvTranspose1d, 1, 1, output_padding=output_padding, **options)
    n = -(-size // stride)
    assert up(jnp.ones((1, n))).shape == (1, stride * n - output_padding)
    assert (jacobian(up, (1, n)) == forward.T).all()


def test_valid_is_no_padding(key, draw) -> None:
    options = {"kernel_size": 3, "stride": 2, "output_padding": 1, "key": key}
    x = draw(2, 5)
    none, valid = (
        nn.ConvTranspose1d(2, 3, padding=p, **options)(x) for p in (0, "VALID")
    )
    assert none.shape == (3, 2 * (5 - 1) + 3 + 1) and (none == valid).all()


def test_named_forms_take_output_padding_before_padding(build) -> None:
    classes = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    for n, cls in enumerate(classes, start=1):
        make = functools.partial(cls, 2, 4, 3, 2, 1, 0, 1, 2, False)
        conv = jax.eval_shape(lambda key, make=make: make(key=key), jax.random.key(0))
        general = build(nn.ConvTranspose, n, 2, 4, 3, 2, 0, 1, 1, 2, False)
        assert isinstance(conv, nn.ConvTranspose)
        assert conv.output_padding == (1,) * n and conv.padding == ((0, 0),) * n
        for field in dataclasses.fields(nn.ConvTranspose):
            if field.name != "weight":
                one, other = getattr(conv, field.name), getattr(general, field.name)
                assert one == other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"output_padding": (1, 3), "stride": 2, "dilation": (1, 3)},
            r"less than the stride or the dilation; got \(1, 3\) for the stride \(2, 2\) "
            r"and the dilation \(1, 3\)\.",
        ),
        ({"output_padding": -1}, "an int >= 0 as `output_padding`; got -1"),
        (
            {"in_channels": 3, "groups": 2},
            "a multiple of `groups`, 2, as `in_channels`; got 3",
        ),
        (
            {"out_channels": 3, "groups": 2},
            "a multiple of `groups`, 2, as `out_channels`; got 3",
        ),
        ({"padding": "FULL"}, "one of SAME, SAME_LOWER, VALID as `padding`"),
    ],
)
def test_wrong_argument_is_an_error(options, message, key) -> None:
    arguments = {"in_channels": 4, "out_channels": 4, "kernel_size": 3} | options
    with pytest.raises(ValueError, match=f"ConvTranspose2d takes .*{message}"):
        nn.ConvTranspose2d(**arguments, key=key)


@pytest.mark.parametrize(
    "options",
    [
        {"padding_mode": "REFLECT"},
        {"padding_mode": "replicate", "padding": "SAME"},
        {"padding_mode": "CIRCULAR"},
        {
            "padding_mode": "CIRCULAR",
            "padding": "SAME",
            "stride": 2,
            "output_padding": 1,
        },
    ],
)
def test_padding_mode_without_a_transpose_is_refused(options, key) -> None:
    with pytest.raises(NotImplementedError, match="takes ZEROS as `padding_mode`"):
        nn.ConvTranspose1d(1, 1, 3, **options, key=key)


def test_preferred_element_type_keeps_the_dtype_of_the_input(build, draw) -> None:
    options = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}
    conv = build(nn.ConvTranspose1d, 2, 1, 3, **options)
    x = draw(2, 4).astype(jnp.bfloat16)
    assert conv(x).dtype == jnp.bfloat16
    assert "preferred_element_type=float32" in str(jax.make_jaxpr(conv.__call__)(x))


def test_kernel_may_be_replaced_by_a_larger_one(key) -> None:
    conv = nn.ConvTranspose1d(1, 1, 3, padding="SAME", key=key)
    conv = eqx.tree_at(lambda c: c.weight, conv, jnp.ones((1, 1, 5)))
    assert conv(jnp.ones((1, 8))).shape == (1, 8)
