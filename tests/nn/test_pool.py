import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn


def windows(size, kernel, stride, padding, use_ceil):
    """The ranges of padded positions, among them those outside of `[low, low + size)`."""
    low, high = padding
    starts = list(range(0, low + size + high - kernel + 1, stride))
    following = starts[-1] + stride if starts else 0
    left_over = low + size + high > (starts[-1] + kernel if starts else 0)
    if (
        use_ceil
        and left_over
        and following < low + size
        and _peer_adds(low + size + high - kernel, stride)
    ):
        starts.append(following)
    return [range(start, start + kernel) for start in starts]


def _peer_adds(room, stride):
    # A kernel larger than the input by a stride or more stays without a window.
    return room % stride != 0 and math.ceil(room / stride) >= 0


def reference(x, kernel, stride, padding, use_ceil, init, reduce):
    """One channel after the other, one window after the other."""
    spatial = [
        windows(*axis, use_ceil)
        for axis in zip(x.shape[1:], kernel, stride, padding, strict=True)
    ]
    out = np.zeros((x.shape[0], *map(len, spatial)))
    for channel, *index in np.ndindex(*out.shape):
        ranges = [axis[i] for axis, i in zip(spatial, index, strict=True)]
        values = [init]
        for offset in np.ndindex(*map(len, ranges)):
            at = tuple(
                r[j] - low
                for r, j, (low, _) in zip(ranges, offset, padding, strict=True)
            )
            inside = all(0 <= a < n for a, n in zip(at, x.shape[1:], strict=True))
            values.append(x[(channel, *at)] if inside else init)
        out[(channel, *index)] = reduce(values)
    return out


def test_examples_of_the_contract() -> None:
    x = jnp.arange(10.0)[None]
    assert nn.MaxPool1d(3, 2)(x).tolist() == [[2, 4, 6, 8]]
    assert nn.MaxPool1d(3, 2, use_ceil=True)(x).tolist() == [[2, 4, 6, 8, 9]]
    out = nn.AvgPool1d(3, 2, use_ceil=True)(x)
    np.testing.assert_allclose(out, [[1, 3, 5, 7, 5.666667]], rtol=1e-6)


CASES = [
    ((2, 7), (3,), (1,), ((0, 0),), False),
    ((1, 8), (3,), (2,), ((1, 2),), False),
    ((1, 8), (3,), (2,), ((0, 0),), True),
    ((2, 5, 6), (2, 3), (2, 1), ((1, 0), (0, 1)), False),
    ((1, 5, 6), (2, 3), (3, 2), ((1, 0), (0, 1)), True),
    ((1, 3, 4, 3), (2, 2, 2), (1, 2, 1), ((0, 0), (0, 0), (0, 0)), False),
]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "use_ceil"), CASES)
def test_result_is_that_of_the_definition(
    shape, kernel, stride, padding, use_ceil, x64, draw
) -> None:
    x = draw(*shape)
    options = kernel, stride, padding, use_ceil
    n = len(kernel)
    max_pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[n - 1](*options)
    expected = reference(np.asarray(x), *options, -np.inf, max)
    np.testing.assert_array_equal(max_pool(x), expected)
    avg_pool = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[n - 1](*options)
    expected = reference(np.asarray(x), *options, 0, sum) / math.prod(kernel)
    np.testing.assert_allclose(avg_pool(x), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("cls", [nn.MaxPool2d, nn.AvgPool2d])
def test_gradient_is_that_of_finite_differences(cls, x64) -> None:
    pool = cls((2, 3), 2, 1, use_ceil=True)
    x = jnp.asarray(np.random.default_rng(0).permutation(20).reshape(1, 4, 5) / 2.0)
    check_grads(pool.__call__, (x,), order=1, modes=["rev"])


@given(
    size=st.integers(0, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    use_ceil=st.booleans(),
)
def test_windows_are_those_that_fit_and_one_for_what_is_left(
    size, kernel, stride, padding, use_ceil
) -> None:
    pool = nn.MaxPool1d(kernel, stride, [padding], use_ceil)
    x = jax.ShapeDtypeStruct((2, size), jnp.float32)
    if max(padding) > kernel:
        with pytest.raises(RuntimeError, match="`padding` of at most the kernel size"):
            jax.eval_shape(pool.__call__, x)
        return
    expected = windows(size, kernel, stride, padding, use_ceil)
    if size == 0 or not expected:
        with pytest.raises(eqx.ShapeError, match=rf"MaxPool1d .*shape \(2, {size}\)"):
            jax.eval_shape(pool.__call__, x)
        return
    out = jax.eval_shape(pool.__call__, x)
    assert out.shape == (2, len(expected))
    if use_ceil and size >= kernel <= stride:
        covered = set().union(*expected)
        missed = set(range(padding[0], padding[0] + size)) - covered
        # Only what lies between two windows is in none of them.
        assert all(i % stride >= kernel for i in missed)


@pytest.mark.parametrize(
    ("pool", "shape", "message"),
    [
        (
            nn.MaxPool2d(4, 4),
            (1, 3, 8),
            "axis 1 the window spans 4 .* there are 3 with",
        ),
        (nn.AvgPool2d((1, 5)), (2, 3, 4), "axis 2 the window spans 5 .* there are 4 "),
        (nn.MaxPool1d(6, padding=1), (1, 3), "window spans 6 .* there are 5 with"),
        (
            nn.MaxPool1d(4, 1, use_ceil=True),
            (1, 3),
            "window spans 4 .* there are 3 with",
        ),
        (nn.AvgPool3d((1, 2, 1)), (1, 1, 1, 1), "axis 2 the window spans 2 .* are 1 "),
        (nn.Pool(0, jax.lax.add, 1, 2), (1, 1), "window spans 2 .* there are 1 with"),
        (nn.AvgPool1d(1), (1, 0), r"empty spatial axes.*\(1, 0\)\."),
        (nn.MaxPool2d(1, padding=1), (1, 3, 0), r"empty spatial axes.*\(1, 3, 0\)\."),
    ],
)
def test_window_that_does_not_fit_is_an_error(pool, shape, message) -> None:
    given = f"{type(pool).__name__} takes an `x` .*{message}"
    with pytest.raises(eqx.ShapeError, match=given):
        pool(jnp.ones(shape))
    with pytest.raises(eqx.ShapeError, match=given):
        jax.vmap(pool)(jnp.ones((2, *shape)))


def test_use_ceil_pads_by_what_the_last_window_needs() -> None:
    x = jnp.arange(15.0)[None]
    assert nn.MaxPool1d(2, 3, use_ceil=True)(x).tolist() == [[1, 4, 7, 10, 13]]
    x = jnp.arange(16.0)[None]
    assert nn.MaxPool1d(2, 3, use_ceil=True)(x).tolist() == [[1, 4, 7, 10, 13, 15]]
    # The window that would start at the third element lies in the padding.
    x = jnp.arange(2.0)[None]
    assert nn.MaxPool1d(1, 2, [(0, 1)], use_ceil=True)(x).tolist() == [[0, -jnp.inf]]
    assert nn.MaxPool1d(2, 3, [(0, 2)], use_ceil=True)(x).tolist() == [[1]]


def test_stride_is_one_unless_given() -> None:
    pool = nn.MaxPool2d(3)
    assert pool.kernel_size == (3, 3) and pool.stride == (1, 1)
    assert pool.padding == ((0, 0), (0, 0)) and pool.use_ceil is False
    assert nn.AvgPool3d([1, 2, 3], padding=[1, 2, 3]).padding == (
        (1, 1),
        (2, 2),
        (3, 3),
    )


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.int8, jnp.uint8, jnp.bool_]
)
def test_max_keeps_the_dtype(dtype, strict) -> None:
    x = jnp.array([[0, 1, 0, 0]]).astype(dtype)
    out = nn.MaxPool1d(2, padding=2)(x)
    assert out.dtype == dtype
    assert out[0, 1:-1].tolist() == [0, 1, 1, 0, 0]
    least = {"i": -128, "u": 0, "b": False}.get(np.dtype(dtype).kind, -jnp.inf)
    assert out[0, 0] == out[0, -1] == least


def test_min_of_integers_starts_from_the_largest() -> None:
    pool = nn.Pool(jnp.inf, jax.lax.min, 1, 2, padding=2)
    assert pool(jnp.array([[3]], jnp.int8)).tolist() == [[127, 3, 3, 127]]


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.complex64, jnp.complex64),
        (jnp.int32, jnp.float32),
    ],
)
def test_average_of_integers_is_a_float(dtype, out_dtype, strict) -> None:
    out = nn.AvgPool1d(2)(jnp.array([[0, 1, 2]]).astype(dtype))
    assert out.dtype == out_dtype and out.tolist() == [[0.5, 1.5]]


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, bool])
def test_sum_of_small_integers_does_not_overflow(dtype, strict) -> None:
    largest = 1 if dtype is bool else jnp.iinfo(dtype).max
    x = jnp.array([[largest, largest, 0]], dtype)
    out = nn.AvgPool1d(2)(x)
    assert out.dtype == jnp.float32 and out.tolist() == [[largest, largest / 2]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_average_of_a_large_window_is_summed_in_float32(dtype, strict) -> None:
    x = jnp.full((1, 2048), 100, dtype)
    out, pull = jax.vjp(nn.AvgPool1d(2048), x)
    assert out.dtype == pull(out)[0].dtype == dtype
    assert (out == 100).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_maximum_of_few_bits_needs_no_infinity(dtype) -> None:
    x = jnp.arange(-4, 4).astype(dtype)[None]
    out, pull = jax.vjp(nn.MaxPool1d(2, 2), x)
    assert out.dtype == dtype and out.tolist() == [[-3, -1, 1, 3]]
    assert pull(out)[0].tolist() == [[0, -3, 0, -1, 0, 1, 0, 3]]


def test_pool_reduces_by_any_operation() -> None:
    x = jnp.arange(1.0, 5.0)[None]
    assert nn.Pool(1, jax.lax.mul, 1, 2)(x).tolist() == [[2, 6, 12]]
    assert nn.Pool(jnp.asarray(1.0), jax.lax.mul, 1, 2)(x).tolist() == [[2, 6, 12]]
    grad = jax.grad(lambda x: nn.Pool(jnp.inf, jax.lax.min, 1, 2)(x).sum())(x)
    assert grad.tolist() == [[1, 1, 1, 0]]


def test_init_and_operation_are_leaves() -> None:
    assert jax.tree.leaves(nn.MaxPool1d(2)) == [-jnp.inf, jax.lax.max]
    assert jax.tree.leaves(nn.AvgPool1d(2)) == [0, jax.lax.add]
    assert nn.MaxPool1d(2) == nn.MaxPool1d(2)


def test_named_forms_are_pools() -> None:
    for n in (1, 2, 3):
        for cls in (getattr(nn, f"MaxPool{n}d"), getattr(nn, f"AvgPool{n}d")):
            pool = cls(2)
            assert isinstance(pool, nn.Pool) and pool.num_spatial_dims == n


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kernel_size": 2.5},
            "an int or a sequence of 2 ints as `kernel_size`; got 2.5",
        ),
        ({"kernel_size": 0}, "an int >= 1 as `kernel_size`; got 0"),
        ({"stride": "2"}, "an int >= 1 as `stride`; got '2'"),
        (
            {"padding": "SAME"},
            "an int, a sequence of 2 ints.* as `padding`; got 'SAME'",
        ),
        ({"padding": (1, 2, 3)}, r"an int.* as `padding`; got \(1, 2, 3\)"),
    ],
)
def test_wrong_argument_is_an_error(options, message, without_type_checks) -> None:
    with pytest.raises(ValueError, match=f"MaxPool2d takes .*{message}"):
        nn.MaxPool2d(**{"kernel_size": 2} | options)


@pytest.mark.parametrize("options", [{"kernel_size": (2, 2)}, {"stride": (1, 1)}])
def test_wrong_number_of_sizes_is_an_error_at_the_call(options) -> None:
    pool = nn.MaxPool1d(**{"kernel_size": 2} | options)
    with pytest.raises(
        TypeError, match="MaxPool1d takes one value for each spatial axis"
    ):
        pool(jnp.ones((1, 4)))


@pytest.mark.parametrize("use_ceil", [False, True])
def test_padding_larger_than_the_kernel_is_an_error(use_ceil) -> None:
    pool = nn.AvgPool1d(2, padding=3, use_ceil=use_ceil)
    with pytest.raises(RuntimeError, match=r"AvgPool1d takes a `padding` of at most"):
        pool(jnp.ones((1, 8)))
    assert eqx.is_array(nn.AvgPool1d(2, padding=2)(jnp.ones((1, 8))))
