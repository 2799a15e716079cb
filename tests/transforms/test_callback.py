"""filter_pure_callback and filter_io_callback: any pytrees to Python and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

ONE = jnp.asarray(1.0)
BOTH = pytest.mark.parametrize(
    "callback", [eqx.filter_pure_callback, eqx.filter_io_callback]
)
WRAPS = pytest.mark.parametrize(
    "wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"]
)


@BOTH
@WRAPS
def test_anything_goes_in_and_comes_out(callback, wrap):
    marker = object()
    seen = []

    def on_host(tree, n, *, name):
        seen.append((type(tree["x"]).__name__, tree["m"], n, name))
        return {"y": np.asarray(tree["x"]) * n, "name": name, "none": None}

    def f(x):
        shapes = {
            "y": jax.ShapeDtypeStruct((2,), jnp.float32),
            "name": "a",
            "none": None,
        }
        tree = {"x": x, "m": marker}
        return callback(on_host, tree, 3, name="a", result_shape_dtypes=shapes)

    out = wrap(f)(jnp.ones(2))
    assert out["y"].tolist() == [3, 3] and out["name"] == "a" and out["none"] is None
    assert isinstance(out["y"], jax.Array)
    assert set(seen) == {("ArrayImpl", marker, 3, "a")}


@BOTH
@WRAPS
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("returns_numbers", [True, False])
def test_typed_keys_go_in_as_numbers_and_come_out(
    callback, wrap, impl, returns_numbers
):
    seen = []

    def on_host(key, keys):
        seen.append((key.dtype, key.tolist()))
        if returns_numbers:
            return keys[::-1]
        return jax.random.wrap_key_data(keys, impl=impl)[::-1]

    def f(key, keys):
        return callback(on_host, key, keys, result_shape_dtypes=keys)

    key = jax.random.key(0, impl=impl)
    keys = jax.random.split(key, 3)
    out = wrap(f)(key, keys)
    assert out.dtype == keys.dtype and (out == keys[::-1]).all()
    # A seed of NumPy, as with `jax.pure_callback`.
    assert seen == [(np.uint32, jax.random.key_data(key).tolist())]


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_typed_keys_are_mapped(method):
    def f(key):
        return eqx.filter_pure_callback(
            lambda key: key, key, result_shape_dtypes=key, vmap_method=method
        )

    keys = jax.random.split(jax.random.key(0), 3)
    assert (eqx.filter_vmap(f)(keys) == keys).all()


@BOTH
def test_other_numbers_than_those_of_the_announced_key_are_a_runtime_error(callback):
    def f(key):
        return callback(lambda key: key[:1], key, result_shape_dtypes=key)

    with pytest.raises(RuntimeError, match=r"shape \(1,\) as `result`.* has \(2,\)"):
        jax.block_until_ready(eqx.filter_jit(f)(jax.random.key(0)))


@BOTH
@WRAPS
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((np.float32(1), "b"), r"`on_host` returned 'b' as `result\[1\]`.*'a'"),
        ((1.0, "a"), r"a float as `result\[0\]`"),
        ((np.int32(1), "a"), r"dtype int32 as `result\[0\]`.*float32"),
        ([np.float32(1), "a"], "did not return the structure"),
        ((np.ones(2, np.float32), "a"), r"shape \(2,\) as `result\[0\]`.*has \(\)"),
    ],
    ids=["static", "float", "dtype", "structure", "shape"],
)
def test_what_was_not_announced_is_a_runtime_error(callback, wrap, returned, message):
    def on_host(x):
        return returned

    def f(x):
        return callback(on_host, x, result_shape_dtypes=(x, "a"))

    with pytest.raises(RuntimeError, match=rf"(?s){message}"):
        jax.block_until_ready(wrap(f)(ONE))


@BOTH
def test_shapes_are_required_by_keyword(callback):
    with pytest.raises(TypeError, match="result_shape_dtypes"):
        callback(lambda x: x, ONE)


@BOTH
@WRAPS
def test_result_of_64_bits_needs_x64(callback, wrap):
    def f():
        wide = np.zeros(2)
        return callback(lambda: {"y": wide}, result_shape_dtypes={"y": wide})

    with pytest.raises(ValueError, match=r"`result_shape_dtypes\['y'\]`.*float64"):
        wrap(f)()
    with jax.enable_x64(True):
        assert wrap(f)()["y"].dtype == np.float64


def test_pure_callback_needs_a_method_to_be_mapped():
    def f(x, **options):
        return eqx.filter_pure_callback(
            lambda x, n: np.asarray(x) * n, x, 2, result_shape_dtypes=x, **options
        )

    x = jnp.arange(3.0)
    with pytest.raises(NotImplementedError):
        eqx.filter_vmap(f)(x)
    for method in ("sequential", "expand_dims", "broadcast_all"):
        assert eqx.filter_vmap(functools.partial(f, vmap_method=method))(
            x
        ).tolist() == [
            0,
            2,
            4,
        ]
    with pytest.raises(TypeError, match="vmap_method"):
        f(x, vectorized=True)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_result_of_another_shape_is_named_under_a_map(method):
    def on_host(x, y):
        return {"y": np.ones((*np.shape(x)[:-1], 2), np.float32)}

    def f(x):
        wanted = {"y": jax.ShapeDtypeStruct((3,), jnp.float32)}
        return eqx.filter_pure_callback(
            on_host, x, ONE, result_shape_dtypes=wanted, vmap_method=method
        )

    with pytest.raises(
        RuntimeError, match=r"2,?\) as `result\['y'\]`.*has \(3,\) there"
    ):
        jax.block_until_ready(jax.vmap(f)(jnp.ones((4, 3))))


@BOTH
def test_callbacks_are_not_differentiated(callback):
    with pytest.raises(ValueError):
        jax.grad(lambda x: callback(np.sin, x, result_shape_dtypes=x))(1.0)


def test_ordered_callbacks_run_in_order_and_each_time():
    seen = []

    @eqx.filter_jit
    def f(x):
        for name in ("a", "b"):
            eqx.filter_io_callback(
                lambda name, x: seen.append((name, float(x))),
                name,
                x,
                result_shape_dtypes=None,
                ordered=True,
            )

    f(ONE)
    f(2 * ONE)
    jax.effects_barrier()
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
