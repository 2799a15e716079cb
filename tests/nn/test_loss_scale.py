import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_unscale_undoes_scale_in_float32_at_least(dtype) -> None:
    scale = nn.DynamicLossScale(2.0**10)
    x = jnp.array(0.37, dtype)
    assert scale.scale(x).dtype == dtype and scale.scale(x) == x * 1024
    grads = {"a": scale.scale(x), "b": None, "c": jnp.arange(2)}
    back = scale.unscale(grads)
    assert back["a"] == x and back["a"].dtype == jnp.float32
    assert back["b"] is None and back["c"] is grads["c"]


@pytest.mark.parametrize("number", [2.0**26, 2.0**20, 1e6, 3e5, 3.0])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_inverse_of_the_scale_is_not_rounded_to_half_precision(
    dtype, number, x64, strict
) -> None:
    scale = nn.StaticLossScale(number)
    grads = jnp.array([60000.0, -1000.0, 3.0], dtype)
    got = jax.jit(lambda scale, grads: scale.unscale(grads))(scale, grads)
    assert got.dtype == ("float64" if dtype == jnp.float64 else "float32")
    exact = np.asarray(grads, np.float64) / number
    eps = max(jnp.finfo(got.dtype).eps, 2.0**-52)
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, eps)


def test_numbers_are_scaled_to_arrays_and_arrays_are_the_only_leaves() -> None:
    for scale in (nn.DynamicLossScale(4.0), nn.StaticLossScale(4.0)):
        scaled = scale.scale(0.5)
        assert isinstance(scaled, jax.Array) and scaled == 2
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(scale))


def test_unscale_takes_numpy_arrays() -> None:
    assert nn.StaticLossScale(2.0).unscale(np.ones(2)).tolist() == [0.5, 0.5]
    got = nn.StaticLossScale(2.0).unscale(jnp.array([2 + 4j]))
    assert got.dtype == jnp.complex64 and got.tolist() == [1 + 2j]


def test_gradients_that_would_vanish_are_kept() -> None:
    def loss(w, scale):
        return scale.scale(w * jnp.float16(1e-5) * jnp.float16(1e-3))

    w = jnp.float16(1)
    assert jax.grad(loss)(w, nn.NoLossScale()) == 0
    for scale in (nn.DynamicLossScale(2.0**15), nn.StaticLossScale(2.0**15)):
        grad = jax.grad(loss)(w, scale)
        assert grad > 0
        assert scale.unscale(grad.astype(jnp.float32)) == pytest.approx(1e-8, rel=0.01)


@pytest.mark.parametrize("make", [nn.DynamicLossScale, nn.StaticLossScale])
def test_unscaled_gradients_are_not_subnormal_and_train_half_precision(make) -> None:
    scale, tiny = make(2.0**15), 3e-9
    grads = {
        "w": jnp.full(2, tiny * 2.0**15, jnp.float16),
        "b": jnp.ones(2, jnp.bfloat16),
    }
    unscaled = eqx.filter_jit(lambda s, g: s.unscale(g))(scale, grads)
    np.testing.assert_allclose(unscaled["w"], tiny, rtol=1e-3)
    assert nn.all_finite(unscaled)
    assert {x.dtype for x in unscaled.values()} == {jnp.dtype("float32")}
    model = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}
    new = eqx.apply_updates(model, unscaled)
    assert eqx.tree_equal(nn.select_tree(nn.all_finite(unscaled), new, model), new)


def test_scale_grows_after_a_period_and_shrinks_at_once() -> None:
    scale = nn.DynamicLossScale(8.0, period=3, max_scale=16.0, min_scale=4.0)
    seen = []
    for finite in [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1]:
        scale = scale.adjust(jnp.array(finite, bool))
        seen.append((float(scale.loss_scale), int(scale.good_steps)))
    assert seen == [
        (8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (8, 0), (8, 1), (8, 2), (16, 0),
        (8, 0), (4, 0), (4, 0), (4, 1),
    ]  # fmt: skip


def test_one_object_runs_through_jit_and_scan() -> None:
    traces = []

    @eqx.filter_jit
    def run(scale, finite):
        traces.append(None)
        return jax.lax.scan(lambda s, f: (s.adjust(f), s.loss_scale), scale, finite)

    scale = nn.DynamicLossScale(period=2)
    for _ in range(2):
        scale, _ = run(scale, jnp.array([True, True, False]))
    assert len(traces) == 1
    assert scale.loss_scale.dtype == jnp.float32 and scale.good_steps.dtype == jnp.int32


def test_scales_are_no_parameters() -> None:
    for scale in (nn.DynamicLossScale(), nn.StaticLossScale(2.0), nn.NoLossScale()):
        assert jax.tree.leaves(eqx.filter(scale, eqx.trainable)) == []
    for scale in (nn.StaticLossScale(2.0), nn.NoLossScale()):
        assert scale.adjust(False) is scale


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"factor": 1.0}, "a number above 1 as `factor`; got 1.0"),
        ({"period": 0}, "an int >= 1 as `period`; got 0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "at most `max_scale`; got 4.0 and 2.0"),
        ({"min_scale": 0.0}, "a `min_scale` above 0 and of at most `max_scale`; got 0"),
    ],
)
def test_wrong_argument_is_an_error(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        nn.DynamicLossScale(**kwargs)


def test_all_finite_looks_at_inexact_arrays() -> None:
    assert nn.all_finite([jnp.ones(2), jnp.arange(2), None, "text"])
    assert nn.all_finite([])
    for bad in (jnp.nan, jnp.inf, -jnp.inf, complex(0, jnp.nan)):
        assert not jax.jit(nn.all_finite)([jnp.ones(2), jnp.array([1, bad])])


def test_select_tree_chooses_whole_trees() -> None:
    one, other = {"a": jnp.ones(2), "f": jnp.sin}, {"a": jnp.zeros(2), "f": jnp.sin}
    for flag, chosen in ((True, one), (False, other)):
        assert eqx.tree_equal(nn.select_tree(flag, one, other), chosen)
        assert eqx.tree_equal(nn.select_tree(jnp.array(flag), one, other), chosen)


def test_numbers_of_numpy_do_not_change_the_dtype_of_the_scale(x64, strict) -> None:
    scale = nn.DynamicLossScale(
        8.0,
        period=1,
        factor=np.float64(2),
        min_scale=np.float64(1),
        max_scale=np.float64(64),
    )
    for finite, expected in (True, 16), (False, 8):
        scale = scale.adjust(jnp.array(finite))
        assert scale.loss_scale.dtype == jnp.float32
        assert scale.loss_scale == expected


def test_selected_trees_have_arrays_of_equal_types() -> None:
    pred, tree = jnp.array(True), {"a": [jnp.ones(2), 1.0]}
    for other, shown in (
        (jnp.ones(2, jnp.float16), r"float16\[2\]"),
        (jnp.ones(3), r"float32\[3\]"),
        (1.0, "a float"),
        (None, "None"),
    ):
        message = (
            r"`on_true\['a'\]\[0\]` is float32\[2\], and "
            rf"`on_false\['a'\]\[0\]` {shown}"
        )
        with pytest.raises(ValueError, match=message):
            nn.select_tree(pred, tree, {"a": [other, 1.0]})
    with pytest.raises(ValueError, match=r"`on_true\['a'\]\[1\]` is a float, and"):
        nn.select_tree(pred, tree, {"a": [jnp.ones(2), jnp.ones(())]})
    message = r"`on_true\['a'\]` is a list .* `on_false\['a'\]` is a tuple"
    with pytest.raises(ValueError, match=message):
        nn.select_tree(pred, tree, {"a": (jnp.ones(2), 1.0)})
    keys = jax.random.split(jax.random.key(0))
    assert nn.select_tree(pred, *keys) == keys[0]
    # A float64 of NumPy becomes float32 in JAX.
    assert nn.select_tree(pred, {"a": np.ones(2)}, {"a": jnp.ones(2)})["a"].shape == (
        2,
    )


@pytest.mark.parametrize("pred", [jnp.array([True, False]), np.ones((1, 2), bool), 1])
def test_select_tree_takes_a_scalar_bool(pred) -> None:
    # A vector would choose each element of a vector of that length by itself.
    tree = [jnp.ones(2), jnp.ones(2)]
    with pytest.raises(TypeError, match="`select_tree` takes a scalar bool"):
        nn.select_tree(pred, tree, tree)


def test_a_tree_in_place_of_a_bool_is_refused(without_type_checks) -> None:
    tree = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match=r"scalar bool as `finite`; .*all_finite"):
        nn.DynamicLossScale().adjust(tree)
    with pytest.raises(TypeError, match="scalar bool as `pred`"):
        nn.select_tree(tree, tree, jnp.array(True))
