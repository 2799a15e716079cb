"""filter_shard_map: parts on devices, collectives between them."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from nests import Scale, agree, in_float64, inexact, mix, mixed_trees, same_statics

import equinox_like as eqx

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
every_kind = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)


def mesh_of(kind=AUTO):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


def split(x, spec, mesh):
    return eqx.filter_shard(x, NamedSharding(mesh, spec))


def stacked(tree, n=4):
    return jtu.tree_map(
        lambda x: jnp.stack([jnp.asarray(x)] * n) if eqx.is_array(x) else x, tree
    )


@settings(max_examples=10)
@given(mixed_trees(3))
def test_parts_are_those_of_a_map(tree):
    def f(rows):
        return eqx.filter_vmap(mix)(rows)

    g = eqx.filter_shard_map(
        f, mesh=mesh_of(), in_specs=P(("x", "y")), out_specs=P(("x", "y"))
    )
    rows = stacked(tree)
    out, expected = g(rows), f(rows)
    assert agree(out, [np.asarray(x) for x in inexact(expected)])
    assert same_statics(out, expected)


@settings(max_examples=10)
@given(mixed_trees(3))
def test_gradients_are_summed_over_the_devices(tree):
    def loss(f, x):
        return sum(jnp.sum(y) for y in inexact(f(x)))

    total = eqx.filter_shard_map(
        lambda x: lax.psum(loss(mix, x), ("x", "y")) / 4,
        mesh=mesh_of(),
        in_specs=None,
        out_specs=P(),
        check_vma=False,
    )
    assert jnp.allclose(total(tree), loss(mix, tree), rtol=1e-5)
    mapped = eqx.filter_shard_map(
        lambda rows: lax.psum(loss(eqx.filter_vmap(mix), rows), ("x", "y")),
        mesh=mesh_of(),
        in_specs=P(("x", "y")),
        out_specs=P(),
    )
    gradient = eqx.filter_grad(mapped)(stacked(tree))
    one = jtu.tree_map(lambda x: x[0], gradient)
    assert agree(one, in_float64(lambda f, x: jax.grad(loss, 1)(f, x), tree))


@every_kind
@pytest.mark.parametrize("in_use", [False, True], ids=["given", "in use"])
def test_agrees_with_jax_on_arrays(kind, in_use):
    mesh = mesh_of(kind)

    def f(x, y):
        return lax.psum(x @ y, "y"), x

    specs = {"in_specs": (P("x", "y"), P("y")), "out_specs": (P("x"), P("x", "y"))}
    x, y = jnp.arange(16.0).reshape(4, 4), jnp.arange(8.0).reshape(4, 2)
    x, y = split(x, P("x", "y"), mesh), split(y, P("y"), mesh)
    with jax.set_mesh(mesh):
        expected = jax.shard_map(f, mesh=mesh, **specs)(x, y)
        out = eqx.filter_shard_map(f, mesh=None if in_use else mesh, **specs)(x, y)
    assert jtu.tree_all(jtu.tree_map(jnp.array_equal, out, expected))
    assert jnp.allclose(out[0], np.asarray(x) @ np.asarray(y))
    for a, b in zip(out, expected, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, 2)


@every_kind
def test_collectives(kind):
    mesh = mesh_of(kind)
    x = split(jnp.arange(16.0).reshape(4, 4), P(("x", "y")), mesh)

    def run(f, out_specs):
        g = eqx.filter_shard_map(
            f, mesh=mesh, in_specs=P(("x", "y")), out_specs=out_specs
        )
        with jax.set_mesh(mesh):
            return np.asarray(g(x))

    both, rows = ("x", "y"), np.arange(16.0).reshape(4, 4)
    assert np.array_equal(run(lambda x: lax.psum(x, both), P()), rows.sum(0)[None])
    one = run(lambda x: lax.psum(x, "x"), P("y"))
    assert np.array_equal(one, rows.reshape(2, 2, 4).sum(0))
    transposed = run(lambda x: lax.all_to_all(x, both, 1, 0, tiled=True), P(None, both))
    assert np.array_equal(transposed, rows)
    moved = run(
        lambda x: lax.ppermute(x, both, [(i, (i + 1) % 4) for i in range(4)]), P(both)
    )
    assert np.array_equal(moved, np.roll(rows, 1, 0))
    scattered = run(lambda x: lax.psum_scatter(x[0], both, tiled=True), P(both))
    assert np.array_equal(scattered, rows.sum(0))


def test_sum_within_a_branch():
    def f(x, pred, name):
        total = eqx.filter_cond(
            pred,
            lambda x: (lax.psum(x, ("x", "y")), name),
            lambda x: (lax.psum(-x, ("x", "y")), name),
            x,
        )
        return total[0], total[1]

    g = eqx.filter_shard_map(
        f, mesh=mesh_of(), in_specs=(P(("x", "y")), None, None), out_specs=P()
    )
    for pred, expected in ((True, 6), (False, -6)):
        out, name = g(jnp.arange(4.0), jnp.asarray(pred), "name")
        assert out.tolist() == [expected] and name == "name"


def test_sum_within_a_loop():
    def f(x):
        step = lambda c, _: (c + lax.psum(x, "x"), "text")  # noqa: E731
        return eqx.filter_scan(step, jnp.zeros_like(x), length=3)[0]

    g = eqx.filter_shard_map(
        f, mesh=mesh_of(), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    assert g(jnp.arange(4.0)).tolist() == [6, 12, 6, 12]


def test_what_is_no_array_is_static():
    model = Scale(jnp.asarray(2.0), "double")

    def f(model, x, *, fun, n):
        assert model.name == "double" and n == 3 and x.shape == (1,)
        return {"y": fun(model(x)), "n": n, "fun": fun, "model": model}

    g = eqx.filter_shard_map(
        f,
        mesh=mesh_of(),
        in_specs={"x": P(("x", "y"))},
        out_specs={"y": P(("x", "y")), "n": None, "fun": None, "model": P()},
    )
    out = g(model, fun=jnp.negative, x=jnp.arange(4.0), n=3)
    assert out["y"].tolist() == [0, -2, -4, -6] and out["n"] == 3
    assert out["fun"] is jnp.negative and eqx.tree_equal(out["model"], model)


def test_arrays_of_the_callable_are_the_same_everywhere():
    f = eqx.filter_shard_map(
        Scale(jnp.asarray([2.0])), mesh=mesh_of(), in_specs=P("x"), out_specs=P("x")
    )
    assert f(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]
    gradient = eqx.filter_grad(lambda f, x: f(x).sum())(f, jnp.arange(4.0))
    assert [x.tolist() for x in inexact(gradient)] == [[6]]


def test_some_axes_stay_automatic():
    def f(x):
        assert x.shape == (2, 4)
        return eqx.filter_shard(2 * x, P(None, "y"))

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        g = eqx.filter_shard_map(f, in_specs=P("x"), out_specs=P("x"), axis_names=["x"])
        out = g(jnp.ones((4, 4)))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)


def test_spec_with_an_automatic_axis_is_refused_by_path():
    options = {"mesh": mesh_of(), "axis_names": {"x"}}
    for in_specs, out_specs, path in [
        ({"x": P("x", "y")}, P("x"), r"in_specs.*`x\['a'\]`"),
        ({"x": P("x")}, {"a": P("x", "y")}, r"out_specs.*`out\['a'\]`"),
    ]:
        f = eqx.filter_shard_map(
            lambda x: x, in_specs=in_specs, out_specs=out_specs, **options
        )
        with pytest.raises(
            ValueError, match=f"{path}, but the axis 'y' is not in `axis_n"
        ):
            f({"a": jnp.ones((4, 4))})


def test_axis_that_the_mesh_does_not_have_is_refused_by_the_path():
    for in_specs, out_specs, path in [
        (P("z"), P("x"), r"in_specs.*`x\['a'\]`"),
        (P("x"), {"a": P("x", ("y", "z"))}, r"out_specs.*`out\['a'\]`"),
    ]:
        f = eqx.filter_shard_map(
            lambda x: x, mesh=mesh_of(), in_specs=in_specs, out_specs=out_specs
        )
        with pytest.raises(
            ValueError, match=f"{path}.* has no axis 'z'. Its axes: 'x'"
        ):
            f({"a": jnp.ones((4, 4))})


def test_a_string_in_place_of_the_set_of_axis_names_is_refused():
    specs = {"in_specs": P("x"), "out_specs": P("x")}
    with pytest.raises(TypeError, match=r"a set of names, such as \{'x'\}; got 'x'"):
        eqx.filter_shard_map(lambda x: x, mesh=mesh_of(), axis_names="x", **specs)


def test_nested():
    def inner(x):
        return lax.psum(x, "y")

    def outer(x):
        g = eqx.filter_shard_map(
            inner, in_specs=P("y"), out_specs=P(), axis_names={"y"}
        )
        return g(x)

    with jax.set_mesh(mesh_of()):
        f = eqx.filter_shard_map(
            outer, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
        )
        out = f(jnp.arange(4.0))
    assert out.tolist() == [1, 5]


def test_methods_options_and_stages():
    traces = []

    class Model(eqx.Module):
        factor: Any

        @eqx.filter_shard_map(mesh=mesh_of(), in_specs=(None, P("x")), out_specs=P("x"))
        def __call__(self, x):
            """Doc."""
            traces.append(x.shape)
            return self.factor * x

    model = Model(jnp.asarray(2.0))
    assert Model.__call__.__doc__ == "Doc."
    for _ in range(2):
        assert model(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]
    assert traces == [(2,)]
    f = eqx.filter_shard_map(
        lambda x: x, mesh=mesh_of(), in_specs=P("x"), out_specs=P("x")
    )
    assert f.lower(jnp.ones(4)).compile()(jnp.ones(4)).tolist() == [1, 1, 1, 1]


def test_donated_arrays_are_gone():
    mesh = mesh_of()
    f = eqx.filter_shard_map(
        lambda state, x: state + x,
        mesh=mesh,
        in_specs=P(("x", "y")),
        out_specs=P(("x", "y")),
        donate=("state",),
    )
    state, x = (split(jnp.ones(4), P(("x", "y")), mesh) for _ in range(2))
    assert f(state, x).tolist() == [2] * 4
    assert state.is_deleted() and not x.is_deleted()
    with pytest.raises(eqx.DonationError, match="`state`"):
        f(state, x)


def test_static_arguments_need_no_spec():
    def f(x, mode="a", *, name="b"):
        return x, mode + name

    mapped = eqx.filter_shard_map(
        f, mesh=mesh_of(), in_specs=(P("x"),), out_specs=(P("x"), None)
    )
    x = jnp.arange(4.0)
    assert mapped(x)[1] == "ab"
    assert mapped(x, mode="c", name="d")[1] == mapped(x, "c", name="d")[1] == "cd"


class TestErrors:
    def mapped(self, f, in_specs, out_specs, mesh=None):
        mesh = mesh_of() if mesh is None else mesh
        return eqx.filter_shard_map(
            f, mesh=mesh, in_specs=in_specs, out_specs=out_specs
        )

    def test_array_that_cannot_be_split_is_named(self):
        f = self.mapped(lambda model, x: x, P("x"), P("x"))
        with pytest.raises(
            ValueError, match=r"`model.factor` \(float32\[3\]\).*2 devices"
        ):
            f(Scale(jnp.ones(3)), jnp.ones(2))
        with pytest.raises(
            ValueError, match=r"`x\[0\]` \(float32\[\]\), which has 0 dimensions"
        ):
            f(None, [jnp.asarray(1.0)])

    def test_specs_that_do_not_fit_are_refused(self):
        with pytest.raises(
            ValueError, match="`in_specs` must be a prefix of `the arguments`"
        ):
            self.mapped(lambda x: x, (P(), P()), P())(jnp.ones(2))
        with pytest.raises(ValueError, match="`out_specs` must be a prefix of `out`"):
            self.mapped(lambda x: x, P(), (P(), P()))(jnp.ones(2))
        with pytest.raises(ValueError, match=r"`in_specs` names \['z'\].*\['x'\]"):
            self.mapped(lambda x: x, {"z": P()}, P())(jnp.ones(2))
        with pytest.raises(ValueError, match=r"has no entry for \['n'\]"):
            self.mapped(lambda x, *, n: x, (P(),), P())(jnp.ones(2), n=jnp.ones(2))
        with pytest.raises(ValueError, match=r"`in_specs` gives 'x' for `x`"):
            self.mapped(lambda x: x, "x", P())(jnp.ones(2))
        sharding = NamedSharding(mesh_of(), P("x"))
        with pytest.raises(
            ValueError, match=r"`out_specs` gives Named.* for `out\['a'\]`: it must be"
        ):
            self.mapped(lambda x: {"a": x}, P("x"), {"a": sharding})(jnp.ones(2))
        with pytest.raises(
            ValueError, match=r"`out_specs` gives .* for `out\['a'\]`.*0 d"
        ):
            self.mapped(lambda x: {"a": x.sum()}, P("x"), P("x"))(jnp.ones(2))

    def test_output_that_differs_is_named_with_the_axes(self):
        f = self.mapped(lambda x: {"loss": x.sum(), "n": 1}, P("x"), P())
        with pytest.raises(
            ValueError, match=r"for `out\['loss'\]` \(float32\[\]\).*\['x'\].*psum"
        ):
            f(jnp.ones(4))

    def test_explicit_sharding_that_is_another_is_named(self):
        mesh = mesh_of(EXPLICIT)
        f = self.mapped(lambda a, x: x, (None, P("x")), P("x"), mesh)
        x = split(jnp.ones(4), P("y"), mesh)
        with (
            jax.set_mesh(mesh),
            pytest.raises(
                ValueError,
                match=r"P\('x',?\) for `x` \(float32\[4\]\).*P\('y',?\).*_shard",
            ),
        ):
            f(1, x)

    def test_unknown_axis_is_refused_with_the_path(self):
        message = r"P\('q',?\) for `x\['a'\]`.*no axis 'q'. Its axes: 'x', 'y'"
        options = {"in_specs": P("q"), "out_specs": P()}
        x, mesh = {"a": jnp.ones(4)}, mesh_of()
        with pytest.raises(ValueError, match=message):
            eqx.filter_shard_map(lambda x: x, mesh=mesh, **options)(x)
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            eqx.filter_shard_map(lambda x: x, **options)(x)

    def test_no_mesh_is_refused(self):
        f = eqx.filter_shard_map(lambda x: x, in_specs=P(), out_specs=P())
        with pytest.raises(ValueError, match=r"has no mesh.*set_mesh"):
            f(jnp.ones(2))
