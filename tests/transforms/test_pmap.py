"""filter_pmap: a row for each of the four devices."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from nests import Scale, agree, inexact, mix, mixed_trees, same_statics

import equinox_like as eqx


def stacked(tree, n=4):
    return jtu.tree_map(
        lambda x: jnp.stack([jnp.asarray(x)] * n) if eqx.is_array(x) else x, tree
    )


@settings(max_examples=15)
@given(mixed_trees(3), st.sampled_from([2, 4]))
def test_is_vmap_on_several_devices(tree, n):
    rows = stacked(tree, n)
    out, expected = eqx.filter_pmap(mix)(rows), eqx.filter_vmap(mix)(rows)
    assert agree(out, [np.asarray(x) for x in inexact(expected)])
    assert same_statics(out, expected)
    assert all(len(x.sharding.device_set) == n for x in inexact(out))


@settings(max_examples=15)
@given(st.data())
def test_axes_are_those_of_vmap(data):
    shape = data.draw(st.lists(st.integers(1, 3), max_size=2))
    place = data.draw(st.integers(-len(shape) - 1, len(shape)))
    out_axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    shape.insert(place if place >= 0 else len(shape) + 1 + place, 4)
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    axes = {"in_axes": place, "out_axes": out_axis}
    out = eqx.filter_pmap(lambda x: 2 * x, **axes)(x)
    assert eqx.tree_equal(out, eqx.filter_vmap(lambda x: 2 * x, **axes)(x))


def test_agrees_with_jax_on_arrays():
    f = lambda x, y: (x + lax.psum(y, "i"), lax.axis_index("i"))  # noqa: E731
    x, y = jnp.arange(4.0), jnp.ones((4, 2))
    expected = jax.pmap(f, axis_name="i")(x, y)
    out = eqx.filter_pmap(f, axis_name="i")(x, y)
    assert jtu.tree_all(jtu.tree_map(jnp.array_equal, out, expected))
    assert eqx.filter_jit(eqx.filter_pmap(f, axis_name="i"))(x, y)[1].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_ensemble_is_made_and_trained():
    models = eqx.filter_pmap(lambda key: Scale(jax.random.normal(key)))(
        jax.random.split(jax.random.key(0), 4)
    )
    assert models.factor.shape == (4,) and models.name == "scale"

    @eqx.filter_pmap(axis_name="i", in_axes={"x": None}, out_axes=(0, None))
    def step(model, x):
        loss, gradient = eqx.filter_value_and_grad(lambda m: m(x))(model)
        return gradient.factor, lax.pmean(loss, "i")

    gradient, loss = step(models, jnp.asarray(3.0))
    assert gradient.tolist() == [3] * 4 and jnp.allclose(loss, 3 * models.factor.mean())
    by_keyword, _ = step(x=jnp.asarray(3.0), model=models)
    assert by_keyword.tolist() == [3] * 4


def test_loops_need_no_more_than_under_jax():
    f = lambda x: eqx.filter_scan(lambda c, _: (c + x, None), 0.0 * x, length=3)[0]  # noqa: E731
    g = lambda x: lax.fori_loop(0, 3, lambda i, c: c + x, jnp.zeros(()))  # noqa: E731
    for fun in (f, g):
        assert eqx.filter_pmap(fun)(jnp.arange(4.0)).tolist() == [0, 3, 6, 9]


def test_gradients_go_through():
    def loss(model, x):
        f = eqx.filter_pmap(lambda m, x: m(x), in_axes=(None, 0))
        return f(model, x).sum()

    gradient = eqx.filter_grad(loss)(Scale(jnp.asarray(2.0)), jnp.arange(4.0))
    assert gradient.factor == 6


@pytest.mark.parametrize("out_axes", [0, None])
def test_gradients_for_what_is_not_mapped_are_those_of_each_row(out_axes):
    def gradient(m, x):
        return lax.pmean(jax.grad(lambda f: f * x)(m.factor), "i")

    options = {"axis_name": "i", "out_axes": out_axes}
    model, x = Scale(jnp.asarray(2.0)), jnp.arange(4.0)
    of_argument = eqx.filter_pmap(gradient, in_axes=(None, 0), **options)(model, x)
    of_closure = eqx.filter_pmap(lambda x: gradient(model, x), **options)(x)
    of_callable = eqx.filter_pmap(eqx.Partial(gradient, model), **options)(x)
    for found in (of_argument, of_closure, of_callable):
        assert jnp.all(found == x.mean())


def test_model_that_is_not_mapped_is_trained():
    @eqx.filter_pmap(axis_name="i", in_axes=(None, 0), out_axes=None)
    def step(model, x):
        gradient = eqx.filter_grad(lambda m: m(x))(model)
        updates = jax.tree.map(lambda g: -lax.pmean(g, "i"), gradient)
        return model, eqx.apply_updates(model, updates)

    old, new = step(Scale(jnp.asarray(2.0)), jnp.arange(4.0))
    assert old.factor == 2 and new.factor == 2 - 1.5


def test_sizes_and_devices():
    assert eqx.filter_pmap(lambda: jnp.ones(2), axis_size=3)().shape == (3, 2)
    devices = jax.devices()[2:]
    out = eqx.filter_pmap(lambda x: x, devices=devices)(jnp.arange(2))
    assert out.sharding.device_set == set(devices)
    assert eqx.filter_pmap(lambda x: x, backend="cpu")(jnp.arange(2)).tolist() == [0, 1]


def test_donation_and_stages():
    f = eqx.filter_pmap(lambda x: x + 1, donate="all")
    x = eqx.filter_pmap(lambda x: x)(jnp.arange(4.0))
    assert f(x).tolist() == [1, 2, 3, 4] and x.is_deleted()
    compiled = eqx.filter_pmap(lambda x, n: (x, n)).lower(jnp.ones(4), 3).compile()
    assert compiled(jnp.zeros(4), 3)[0].tolist() == [0] * 4


class TestErrors:
    def test_too_many_rows_are_named_with_the_devices(self):
        with pytest.raises(
            ValueError,
            match=r"`batch\['x'\]`: 8 rows cannot be split over 4 devices, one row each",
        ):
            eqx.filter_pmap(lambda batch: batch)({"n": 1, "x": jnp.ones((8, 2))})
        with pytest.raises(
            ValueError, match="`x`: 3 rows cannot be split over 2 devices"
        ):
            eqx.filter_pmap(lambda x: x, devices=jax.devices()[:2])(jnp.ones(3))
        with pytest.raises(
            ValueError, match="`x`: 1 rows cannot be split over 2 devices"
        ):
            eqx.filter_pmap(lambda x: x, devices=jax.devices()[:2])(jnp.ones(1))

    def test_sizes_that_differ_are_named(self):
        with pytest.raises(
            ValueError,
            match=r"`filter_pmap` of.*`model.factor` has size 2.*`x` has size 4",
        ):
            eqx.filter_pmap(lambda model, x: x)(Scale(jnp.ones(2)), jnp.ones(4))
        with pytest.raises(ValueError, match=r"`x` has shape \(\)"):
            eqx.filter_pmap(lambda x: x)(jnp.asarray(1.0))

    def test_output_that_differs_and_is_returned_once_is_named(self):
        with pytest.raises(
            ValueError, match=r"`out\[1\].factor` \(float32\[\]\).*psum"
        ):
            eqx.filter_pmap(lambda x: (x, Scale(x)), out_axes=(0, None))(
                jnp.arange(4.0)
            )

    def test_gradient_of_one_row_is_not_returned_once(self):
        step = eqx.filter_pmap(eqx.filter_grad(Scale.__call__), in_axes=(None, 0))
        assert step(Scale(jnp.ones(())), jnp.arange(4.0)).factor.tolist() == [
            0,
            1,
            2,
            3,
        ]
        step = eqx.filter_pmap(
            eqx.filter_grad(Scale.__call__), in_axes=(None, 0), out_axes=None
        )
        with pytest.raises(
            ValueError, match=r"`out.factor` \(float32\[\]\) may differ"
        ):
            step(Scale(jnp.ones(())), jnp.arange(4.0))

    def test_nothing_mapped_is_refused(self):
        with pytest.raises(ValueError, match="no argument is mapped"):
            eqx.filter_pmap(lambda x: x, in_axes=None)(jnp.ones(4))

    def test_output_axis_out_of_range_is_refused(self):
        with pytest.raises(ValueError):
            eqx.filter_pmap(lambda x: x, out_axes=2)(jnp.ones(4))

    @pytest.mark.parametrize("name", ["static_broadcasted_argnums", "donate_argnums"])
    def test_numbers_of_arguments_are_refused(self, name):
        with pytest.raises(ValueError, match=name):
            eqx.filter_pmap(lambda x: x, **{name: 0})

    def test_unknown_options_are_refused(self):
        with pytest.raises(TypeError, match=r"unexpected.*'other'"):
            eqx.filter_pmap(lambda x: x, other=0)
        with pytest.raises(ValueError, match="donate"):
            eqx.filter_pmap(lambda x: x, donate="some")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_another_mesh_in_use_is_refused(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    double = eqx.filter_pmap(lambda x: 2 * x)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"match the mesh passed|on another mesh"):
            double(jnp.arange(4.0))
        with pytest.raises(ValueError, match=r"match the mesh passed|on another mesh"):
            jax.jit(double)(jnp.arange(4.0))
    assert double(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()], ids=str)
def test_arrays_on_an_explicit_mesh_are_refused_by_path(spec):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    first = eqx.filter_pmap(lambda tree: tree["a"])
    tree = {"a": jax.device_put(jnp.arange(4.0), NamedSharding(mesh, spec))}
    with pytest.raises(
        ValueError, match=r"`tree\['a'\]` \(float32\[4\]\) is on another"
    ):
        first(tree)
    assert first(jax.device_get(tree)).tolist() == [0, 1, 2, 3]


def test_no_tracer_is_kept():
    with jax.checking_leaks():
        assert eqx.filter_pmap(lambda x: 2 * x)(jnp.ones(4)).tolist() == [2] * 4
