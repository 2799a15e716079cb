import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn


class Slope(eqx.Module):
    """An activation that holds an array: max(x, 0) + slope * min(x, 0)."""

    slope: jax.Array = eqx.field(converter=jnp.asarray)

    def __call__(self, x):
        assert x.shape == self.slope.shape == ()
        return jnp.where(x >= 0, x, self.slope * x)


def reference(linears, x, activation, final_activation):
    """The formula in NumPy, in float64."""
    h = np.atleast_1d(np.asarray(x, np.float64))
    for i, layer in enumerate(linears):
        h = np.asarray(layer.weight, np.float64) @ h
        if layer.bias is not None:
            h = h + np.asarray(layer.bias, np.float64)
        h = activation(i, h) if i < len(linears) - 1 else final_activation(h)
    return h


def test_first_values_and_result_are_those_of_the_contract(k0) -> None:
    mlp = nn.MLP(3, 2, 4, 2, key=k0)
    first = [-0.2508934, 0.3326661, -0.1182604]
    last = [-0.4311490, -0.3052335, -0.2501005]
    np.testing.assert_allclose(mlp.layers[0].weight[0], first, atol=1e-7)
    np.testing.assert_allclose(mlp.layers[2].weight[0, :3], last, atol=1e-7)
    out = mlp(jnp.ones(3))
    np.testing.assert_allclose(out, [0.2004411, -0.2097608], atol=1e-5)


def test_layer_i_is_the_linear_of_key_i(k0) -> None:
    mlp = nn.MLP(3, 2, 4, 3, use_bias=False, key=k0)
    keys = jax.random.split(k0, 4)
    expected = (
        nn.Linear(3, 4, use_bias=False, key=keys[0]),
        nn.Linear(4, 4, use_bias=False, key=keys[1]),
        nn.Linear(4, 4, use_bias=False, key=keys[2]),
        nn.Linear(4, 2, key=keys[3]),
    )
    assert eqx.tree_equal(mlp.layers, expected)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_scan_stacks_the_same_values(depth, impl) -> None:
    key = jax.random.key(1, impl=impl)
    loop = nn.MLP(3, 2, 4, depth, key=key)
    first, stacked, last = nn.MLP(3, 2, 4, depth, scan=True, key=key).layers
    assert eqx.tree_equal((first, last), (loop.layers[0], loop.layers[-1]))
    assert stacked.weight.shape == (depth - 1, 4, 4)
    for i, layer in enumerate(loop.layers[1:-1]):
        assert (stacked.weight[i] == layer.weight).all()
        assert (stacked.bias[i] == layer.bias).all()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_result_is_that_of_the_formula(depth, scan, x64, k0, draw) -> None:
    mlp = nn.MLP(3, 2, 4, depth, jnp.tanh, jnp.sin, scan=scan, key=k0)
    linears = nn.MLP(3, 2, 4, depth, key=k0).layers
    assert len(mlp.layers) == (3 if scan and depth else depth + 1)
    x = draw(3)
    expected = reference(linears, x, lambda _, h: np.tanh(h), np.sin)
    np.testing.assert_allclose(mlp(x), expected, rtol=1e-12)
    arrays, rest = eqx.partition(mlp, eqx.is_array)
    check_grads(
        lambda a, x: eqx.combine(a, rest)(x), (arrays, x), order=1, modes=["rev"]
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_scan_runs_without_jit(depth, key) -> None:
    with jax.disable_jit():
        mlp = nn.MLP(3, 2, 4, depth, scan=True, key=key)
        out = mlp(jnp.ones(3))
    expected = nn.MLP(3, 2, 4, depth, key=key)(jnp.ones(3))
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_scan_compiles_as_much_for_any_depth(key) -> None:
    def equations(depth):
        mlp = nn.MLP(3, 2, 4, depth, scan=True, key=key)
        return len(jax.make_jaxpr(mlp.__call__)(jnp.ones(3)).eqns)

    assert equations(2) == equations(20)


@pytest.mark.parametrize("scan", [False, True])
def test_activation_with_arrays_is_copied_for_each_neuron(scan, k0) -> None:
    def build(activation, final_activation):
        return nn.MLP(3, 2, 4, 3, activation, final_activation, scan=scan, key=k0)

    mlp = build(Slope(0.25), Slope(0.5))
    assert mlp.activation.slope.shape == (3, 4)
    assert mlp.final_activation.slope.shape == (2,)
    slopes = jnp.linspace(0.1, 0.9, 12).reshape(3, 4)
    mlp = eqx.tree_at(lambda m: m.activation.slope, mlp, slopes)
    linears = nn.MLP(3, 2, 4, 3, key=k0).layers
    expected = reference(
        linears,
        np.ones(3),
        lambda i, h: np.where(h >= 0, h, np.asarray(slopes)[i] * h),
        lambda h: np.where(h >= 0, h, 0.5 * h),
    )
    np.testing.assert_allclose(mlp(jnp.ones(3)), expected, rtol=1e-5)
    grads = eqx.filter_grad(lambda m: m(jnp.ones(3)).sum())(mlp)
    assert grads.activation.slope.shape == (3, 4)
    assert grads.final_activation.slope.shape == (2,)
    assert jnp.abs(grads.activation.slope).sum() > 0


def test_copies_of_an_array_gain_leading_axes(key) -> None:
    class Polynomial(eqx.Module):
        coefficients: jax.Array

        def __call__(self, x):
            return jnp.polyval(self.coefficients, x)

    activation = Polynomial(jnp.array([2.0, 1.0]))
    mlp = nn.MLP(3, 2, 4, 2, activation, activation, key=key)
    assert mlp.activation.coefficients.shape == (2, 4, 2)
    assert mlp.final_activation.coefficients.shape == (2, 2)
    same = nn.MLP(3, 2, 4, 2, lambda x: 2 * x + 1, lambda x: 2 * x + 1, key=key)
    np.testing.assert_allclose(mlp(jnp.ones(3)), same(jnp.ones(3)), rtol=1e-6)


def test_copies_of_a_weakly_typed_slope_stay_weak(key) -> None:
    mlp = nn.MLP(3, 2, 4, 1, Slope(0.25), Slope(0.5), dtype=jnp.float16, key=key)
    assert mlp(jnp.ones(3, jnp.float16)).dtype == jnp.float16


def test_default_activation_is_shared_unchanged(key) -> None:
    assert nn.MLP(3, 2, 4, 2, key=key).activation is jax.nn.relu


@pytest.mark.parametrize("scan", [False, True])
def test_sizes_may_be_scalar(scan, key) -> None:
    shapes = []
    mlp = nn.MLP(
        "scalar",
        "scalar",
        4,
        2,
        final_activation=lambda x: (shapes.append(x.shape), x + 1)[1],
        scan=scan,
        key=key,
    )
    assert mlp(2.0).shape == () and shapes == [()]
    slope = nn.MLP(3, "scalar", 4, 2, final_activation=Slope(0.5), key=key)
    assert slope.final_activation.slope.shape == ()


def test_depth_zero_applies_the_final_activation(key) -> None:
    mlp = nn.MLP(3, 2, 4, 0, final_activation=lambda x: x + 10, key=key)
    (linear,) = mlp.layers
    assert (mlp(jnp.ones(3)) == linear(jnp.ones(3)) + 10).all()
    assert nn.MLP(3, 2, 4, 0, use_final_bias=False, key=key).layers[0].bias is None


def test_width_zero_gives_the_final_bias(key) -> None:
    mlp = nn.MLP(3, 2, 0, 2, key=key)
    assert (mlp(jnp.ones(3)) == mlp.layers[-1].bias).all()


def test_activation_sees_single_neurons_only(key) -> None:
    with pytest.raises(ValueError, match=r"axis -1 is out of bounds"):
        nn.MLP(3, 2, 4, 1, activation=jax.nn.softmax, key=key)(jnp.ones(3))


def test_layers_may_be_any_callables(key) -> None:
    mlp = nn.MLP(3, 2, 4, 1, key=key)
    mlp = eqx.tree_at(lambda m: m.layers, mlp, (jnp.negative, jnp.square))
    assert mlp(jnp.array([1.0, -2.0, 3.0])).tolist() == [0.0, 4.0, 0.0]
    scanned = nn.MLP(3, 2, 4, 3, key=key, scan=True)
    layers = (jnp.negative, lambda x: x + 1, jnp.square)
    scanned = eqx.tree_at(lambda m: m.layers, scanned, layers)
    assert scanned(jnp.array([1.0, -2.0, 3.0])).tolist() == [4.0, 16.0, 4.0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 2, 4, -1), "MLP takes an int >= 0 as `depth`; got -1"),
        ((3, 2, -4, 1), "MLP takes an int >= 0 as `width_size`; got -4"),
        ((-3, 2, 4, 1), "MLP takes an int >= 0 as `in_size`; got -3"),
        ((3, -2, 4, 1), "MLP takes an int >= 0 as `out_size`; got -2"),
    ],
)
def test_negative_size_is_an_error(sizes, message, key) -> None:
    with pytest.raises(ValueError, match=message):
        nn.MLP(*sizes, key=key)


@pytest.mark.parametrize("name", ["activation", "final_activation"])
def test_activation_must_be_callable(name, key, without_type_checks) -> None:
    with pytest.raises(TypeError, match=rf"MLP takes a function as `{name}`.*a str"):
        nn.MLP(1, 1, 2, 1, **{name: "relu"}, key=key)  # pyright: ignore[reportArgumentType]


def test_width_may_not_be_scalar(key, without_type_checks) -> None:
    with pytest.raises(ValueError, match="`width_size`; got 'scalar'"):
        nn.MLP(3, 2, "scalar", 1, key=key)  # pyright: ignore


@pytest.mark.parametrize("scan", [False, True])
def test_ensemble_agrees_with_its_members(scan, key) -> None:
    def build(key):
        return nn.MLP(3, 2, 4, 2, scan=scan, key=key)

    keys = jax.random.split(key, 3)
    ensemble = eqx.filter_jit(eqx.filter_vmap(build))(keys)
    call = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    expected = [build(k)(jnp.ones(3)) for k in keys]
    out = eqx.filter_jit(call)(ensemble, jnp.ones(3))
    np.testing.assert_allclose(out, expected, rtol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("out_size", "name"),
    [(2, "final_activation"), ("scalar", "final_activation"), (2, "activation")],
)
def test_function_of_a_whole_vector_is_told_where_to_go(scan, out_size, name, key):
    options = {name: jax.nn.softmax, "scan": scan, "key": key}
    mlp = nn.MLP(3, out_size, 4, 2, **options)
    with pytest.raises(ValueError) as info:
        mlp(jnp.ones(3))
    note = info.value.__notes__[-1]
    assert f"`{name}` of an MLP" in note and "eqx.nn.Sequential([mlp, jax" in note
