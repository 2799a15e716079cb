"""filter_shard and filter_device_put: where arrays go, and what shares memory."""

import contextlib
import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from strategies import same, trees

import equinox_like as eqx

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO)]
every_mesh = pytest.mark.parametrize("kinds", KINDS, ids=lambda k: "".join(map(str, k)))


class Model(eqx.Module):
    weight: Any
    name: str = eqx.field(static=True, default="model")
    extra: Any = None


def mesh_of(kinds):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)


def is_split(x, spec, mesh):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def same_trees(a, b):
    (xs, one), (ys, other) = map(jtu.tree_flatten, (a, b))
    return one == other and all(
        same(jnp.asarray(x), jnp.asarray(y)) if eqx.is_array(x) else same(x, y)
        for x, y in zip(xs, ys, strict=True)
    )


@settings(max_examples=30)
@given(trees(), st.booleans())
def test_values_are_unchanged(tree, jitted):
    sharding = NamedSharding(mesh_of((AUTO, AUTO)), P())
    shard = lambda tree: eqx.filter_shard(tree, sharding)  # noqa: E731
    out = (eqx.filter_jit(shard) if jitted else shard)(tree)
    assert same_trees(out, tree)
    for x in jtu.tree_leaves(out):
        if eqx.is_array(x):
            assert isinstance(x, jax.Array) and x.sharding.is_fully_replicated
    assert same_trees(eqx.filter_device_put(tree, sharding), tree)


@every_mesh
@pytest.mark.parametrize("by_name", [False, True], ids=["sharding", "spec"])
@pytest.mark.parametrize(
    "spec", [P("x", "y"), P(("x", "y")), P(None, "x"), P()], ids=str
)
def test_arrays_are_split_in_and_out_of_jit(kinds, by_name, spec):
    if spec == P(("x", "y")) and kinds == (AUTO, EXPLICIT):
        spec = P(("y", "x"))  # in one dimension explicit axes come first
    mesh = mesh_of(kinds)
    model = Model(jnp.arange(16.0).reshape(4, 4), extra="text")
    # Arrays on one device enter a jit with explicit axes under their mesh only.
    in_use = by_name or EXPLICIT in kinds
    context = jax.set_mesh(mesh) if in_use else contextlib.nullcontext()
    where = spec if by_name else NamedSharding(mesh, spec)
    with context:
        eager = eqx.filter_shard(model, where)
        jitted = eqx.filter_jit(lambda model: eqx.filter_shard(model, where))(model)
        again = eqx.filter_jit(lambda model: eqx.filter_shard(model, where))(
            eqx.filter_shard(model, P("y") if by_name else NamedSharding(mesh, P("y")))
        )
        moved = eqx.filter_device_put(model, where)
    for out in (eager, jitted, again, moved):
        assert is_split(out.weight, spec, mesh) and out.extra == "text"
        assert np.array_equal(out.weight, model.weight)


@every_mesh
def test_gradients_go_through(kinds):
    mesh = mesh_of(kinds)

    def loss(model, x):
        sharding = NamedSharding(mesh, P("x"))
        return (eqx.filter_shard(model, sharding).weight * x).sum()

    with jax.set_mesh(mesh):
        model, x = (
            eqx.filter_shard(y, P("x")) for y in (Model(jnp.ones(4)), jnp.arange(4.0))
        )
        for gradient in (eqx.filter_grad(loss), eqx.filter_jit(eqx.filter_grad(loss))):
            assert gradient(model, x).weight.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("given", ["spec", "sharding"])
def test_an_order_of_axes_that_jax_would_not_keep_is_refused_by_path(given):
    mesh = mesh_of((AUTO, EXPLICIT))
    spec = P(None, ("x", "y"))
    spec = spec if given == "spec" else NamedSharding(mesh, spec)
    model = Model(jnp.ones((2, 4)))
    message = r"`x.weight` \(float32\[2,4\]\).*Write \('y', 'x'\) for dimension 1"
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=message):
            eqx.filter_jit(lambda model: eqx.filter_shard(model, spec))(model)
        # At top level it is kept.
        out = eqx.filter_shard(model, spec).weight
        assert is_split(out, P(None, ("x", "y")), mesh)
        with pytest.raises(
            ValueError, match=r"`out_shardings` gives .* for `out.weight`"
        ):
            eqx.filter_jit(lambda x: x, out_shardings=lambda x: spec)(model)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_within_shard_map_it_is_about_the_other_axes(kind):
    mesh = mesh_of((kind, kind))

    def body(x):
        by_spec = eqx.filter_shard({"x": x, "n": 1}, P("y"))["x"]
        return eqx.filter_shard(by_spec, NamedSharding(mesh, P("y")))

    f = jax.shard_map(
        body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    with jax.set_mesh(mesh):
        x = eqx.filter_shard(jnp.arange(8.0), P("x"))
        out = jax.jit(f)(x)
    assert is_split(out, P(("x", "y")), mesh) and np.array_equal(out, x)


def test_devices_and_prefix_trees():
    first, second = jax.devices()[:2]
    tree = {"a": jnp.ones(2), "b": [np.ones(3), "text", jax.random.key(0)]}
    for move in (eqx.filter_shard, eqx.filter_device_put):
        out = move(tree, {"a": first, "b": second})
        assert out["a"].devices() == {first} and out["a"].committed
        assert out["b"][0].devices() == out["b"][2].devices() == {second}
        assert out["b"][1] == "text"
        assert jax.random.normal(out["b"][2]).devices() == {second}
    on_second = eqx.filter_jit(lambda x: eqx.filter_shard(x, second))
    assert on_second(jnp.ones(2)).devices() == {second}
    with jax.set_mesh(jax.make_mesh((1,), "x", (EXPLICIT,), devices=[second])):
        assert on_second(jnp.ones(2)).devices() == {second}


def test_memory_of_the_host_and_back_under_jit_keeps_shardings():
    mesh = mesh_of((AUTO, AUTO))
    x = eqx.filter_shard(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    kept = eqx.filter_device_put(Model(x), host)

    @eqx.filter_jit(donate="all")
    def step(model):
        model = eqx.filter_device_put(model, device)
        doubled = Model(2 * model.weight)
        return eqx.filter_device_put(doubled, host)

    out = step(kept)
    for model in (kept, out):
        assert model.weight.sharding.memory_kind == "pinned_host"
        assert model.weight.sharding.shard_shape((8,)) == (4,)
    back = eqx.filter_device_put(out, device)
    assert back.weight.sharding.memory_kind == "device"
    assert back.weight.tolist() == [2.0 * i for i in range(8)]


def shardings_of(memory):
    """One of each kind that can name a memory, over the first devices."""
    first = jax.devices()[0]
    named = [NamedSharding(mesh_of((AUTO, AUTO)), s) for s in (P("x"), P())]
    for sharding in (jax.sharding.SingleDeviceSharding(first), *named):
        yield sharding.with_memory_kind(memory)


MEMORIES = ["device", "pinned_host", "unpinned_host"]
TRANSFORMATIONS = {
    "nothing": lambda f: f,
    "filter_jit": eqx.filter_jit,
    "jax.jit": jax.jit,
    "filter_vmap": lambda f: lambda m: eqx.filter_vmap(f, axis_size=3, in_axes=None)(m),
    "filter_grad": lambda f: lambda m: eqx.filter_grad(lambda m: f(m).weight.sum())(m),
}


@pytest.mark.parametrize("to", MEMORIES)
@pytest.mark.parametrize("start", ["device", "pinned_host"])
@pytest.mark.parametrize("within", TRANSFORMATIONS)
@pytest.mark.parametrize("move", [eqx.filter_shard, eqx.filter_device_put])
def test_memory_is_that_of_the_sharding_or_an_error_names_what_moves(
    move, within, start, to
):
    for start_sharding, sharding in zip(
        shardings_of(start), shardings_of(to), strict=True
    ):
        model = Model(jax.device_put(jnp.arange(8.0), start_sharding))
        found = []

        def moved(model, sharding=sharding, found=found):
            model = move(model, sharding)
            found.append(jax.typeof(model.weight).memory_space)
            return model

        try:
            out = TRANSFORMATIONS[within](moved)(model)
        except ValueError as error:
            assert within != "nothing"
            if "filter_device_put" in str(error):
                may_move = move is eqx.filter_device_put and to != "unpinned_host"
                assert ".weight` (float32[8]), which is in the memory" in str(error)
                assert start != to and not may_move
            else:  # JAX has no gradient of a sum on the host
                assert within == "filter_grad" and "float32<host>" in str(error)
            continue
        if within != "filter_grad":  # where it is the gradient, in the input's memory
            assert out.weight.sharding.memory_kind == to
            expected = np.broadcast_to(np.arange(8.0), out.weight.shape)
            np.testing.assert_array_equal(np.asarray(out.weight), expected)
        host = jax.memory.Space.Host
        assert all((space == host) == (to == "pinned_host") for space in found)


@every_mesh
def test_device_put_under_jit_splits_as_it_does_outside(kinds):
    """JAX ignores the automatic axes."""
    mesh = mesh_of(kinds)
    x = jnp.arange(16.0).reshape(4, 4)
    with jax.set_mesh(mesh):
        for spec in (P("x", "y"), P(None, "x"), P()):
            for sharding in (spec, NamedSharding(mesh, spec)):
                put = functools.partial(eqx.filter_device_put, device=sharding)
                for f in (put, eqx.filter_jit(put)):
                    assert is_split(f(x), spec, mesh) and (f(x) == x).all()
                loss = lambda x, put=put: (put(x) ** 2).sum()  # noqa: E731
                assert (eqx.filter_grad(loss)(put(x)) == 2 * x).all()


def test_keys_on_a_mesh_are_split_under_jit_and_not_moved_to_the_host_silently():
    sharding = NamedSharding(mesh_of((AUTO, AUTO)), P("x"))
    keys = jax.random.split(jax.random.key(0), 4)
    put = functools.partial(eqx.filter_device_put, device=sharding)
    for out in (put(keys), eqx.filter_jit(put)(keys)):
        assert out.sharding.is_equivalent_to(sharding, 1) and (out == keys).all()
    on_host = sharding.with_memory_kind("pinned_host")
    put = functools.partial(eqx.filter_device_put, device=on_host)
    assert put(keys).sharding.memory_kind == "pinned_host"
    with pytest.raises(ValueError, match=r"`tree` \(key.*`filter_device_put` outside"):
        eqx.filter_jit(put)(keys)


class TestErrors:
    @pytest.mark.parametrize("move", [eqx.filter_shard, eqx.filter_device_put])
    def test_sharding_that_does_not_fit_is_refused_by_the_path(self, move):
        mesh = mesh_of((AUTO, AUTO))
        model = Model(jnp.ones(3))
        with pytest.raises(ValueError, match=r"weight` \(float32\[3\]\), whose dim"):
            move(model, NamedSharding(mesh, P("x")))
        with pytest.raises(
            ValueError, match=r"weight` \(float32\[3\]\), which has 1 dimension\."
        ):
            move(model, NamedSharding(mesh, P(None, "x")))
        with pytest.raises(ValueError, match=r"weight` .*no mesh.*set_mesh"):
            move(model, P("x"))
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match=r"weight` .* names the axis 'x' twice"),
        ):
            move(Model(jnp.ones((2, 2))), P("x", "x"))
        with pytest.raises(ValueError, match="must be a prefix"):
            move({"a": model}, {"b": mesh.devices.flat[0]})

    @pytest.mark.parametrize("move", [eqx.filter_shard, eqx.filter_device_put])
    def test_array_of_strings_is_refused_by_the_path(self, move):
        batch = {"x": np.ones(2), "text": np.asarray(["a", "b"])}
        with pytest.raises(
            TypeError, match=r"`\w+\['text'\]` \(str32\[2\]\) cannot be"
        ):
            move(batch, jax.devices()[0])

    def test_what_is_no_sharding_is_refused_by_the_path(self):
        for bad in (None, "x", 1):
            with pytest.raises(
                ValueError, match=r"`x.weight` \(float32\[3\]\).*must be"
            ):
                eqx.filter_shard(Model(jnp.ones(3)), bad)
        with pytest.raises(ValueError, match=r"`tree.weight`.*must be"):
            eqx.filter_device_put(Model(jnp.ones(3)), "x")
        assert eqx.filter_shard("text", None) == "text"


ARRAYS = {
    "jax": lambda: jnp.arange(8.0),
    "numpy": lambda: np.arange(8.0, dtype=np.float32),
    "key": lambda: jax.random.split(jax.random.key(0), 8),
    "split": lambda: eqx.filter_shard(jnp.arange(8.0), split("x")),
}


def split(*axes):
    return NamedSharding(mesh_of((AUTO, AUTO)), P(axes))


PLACES = {
    "nowhere": lambda: None,
    "same": lambda: jax.devices()[0],
    "other": lambda: jax.devices()[1],
    "copies": lambda: NamedSharding(mesh_of((AUTO, AUTO)), P()),
    "split": lambda: split("x"),
    "finer": lambda: split("x", "y"),
    "host": lambda: jax.memory.Space.Host,
}


def pointers(x):
    if isinstance(x, np.ndarray):
        return {x.ctypes.data}
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def content(x):
    is_key = not isinstance(x, np.ndarray) and jnp.issubdtype(
        x.dtype, jax.dtypes.prng_key
    )
    return np.array(jax.random.key_data(x) if is_key else x)


class TestMemory:
    @pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
    @pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
    def test_result_shares_nothing_if_it_may_not(self, array, place):
        x, where = array(), place()
        before, old = content(x), pointers(x)
        out = eqx.filter_device_put({"x": x, "n": 1}, where, may_alias=False)["x"]
        assert old.isdisjoint(pointers(out))
        if isinstance(x, np.ndarray):
            x[:] = -1
        else:
            x.delete()
        assert np.array_equal(content(out), before)

    @pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
    @pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
    def test_donated_arrays_are_gone(self, array, place):
        x, where = array(), place()
        before = content(x)
        out = eqx.filter_device_put([x, x, "text"], where, donate=True)
        assert isinstance(x, np.ndarray) or x.is_deleted()
        assert out[2] == "text"
        for y in out[:2]:
            assert np.array_equal(content(y), before)
            if isinstance(where, jax.Device | jax.sharding.Sharding):
                assert y.sharding.device_set == _devices(where)

    def test_nothing_is_copied_without_need(self):
        x = jnp.ones(3)
        for options in ({}, {"may_alias": True}):
            assert pointers(eqx.filter_device_put(x, **options)) == pointers(x)
        assert not x.is_deleted()

    def test_array_that_was_deleted_is_named(self):
        model = Model(jnp.ones(3))
        eqx.filter_device_put(model, donate=True)
        with pytest.raises(
            eqx.DonationError, match=r"`tree\[0\].weight` \(float32\[3\]\)"
        ):
            eqx.filter_device_put([model])

    def test_donating_and_sharing_is_refused(self):
        with pytest.raises(ValueError, match="cannot both be true"):
            eqx.filter_device_put(jnp.ones(2), donate=True, may_alias=True)

    def test_donating_under_a_trace_is_refused(self):
        x = jnp.ones(2)
        put = lambda x: eqx.filter_device_put(x, donate=True).sum()  # noqa: E731
        for transformed in (jax.jit(put), jax.grad(put), jax.vmap(put)):
            with pytest.raises(ValueError, match=r"transformation.*donate=True"):
                transformed(x)
        assert not x.is_deleted()
        plain = lambda x: eqx.filter_device_put(x, jax.devices()[0]).sum()  # noqa: E731
        assert jax.jit(jax.grad(plain))(x).tolist() == [1, 1]


def _devices(where):
    return {where} if isinstance(where, jax.Device) else where.device_set
