"""Where arrays go that were saved from several devices: never to one without a word."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from strategies import same

import equinox_like as eqx
from equinox_like import orbax

MESH = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
SPLIT, COPIED = NamedSharding(MESH, P("x")), NamedSharding(MESH, P())


def save_in_orbax(path, tree):
    with ocp.Checkpointer(orbax.TreeHandler()) as checkpointer:
        checkpointer.save(path, args=orbax.Save(tree))


def load_from_orbax(path, like, **options):
    with ocp.Checkpointer(orbax.TreeHandler()) as checkpointer:
        return checkpointer.restore(path, args=orbax.Restore(like, **options))


PAIRS = {
    "m.safetensors": (eqx.save, eqx.load),
    "m.eqx": (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
    "m": (save_in_orbax, load_from_orbax),
}
formats = pytest.mark.parametrize("name", PAIRS)
placements = pytest.mark.parametrize("where", [SPLIT, COPIED], ids=["split", "copied"])


def is_at(array, where):
    return array.sharding.is_equivalent_to(where, array.ndim)


def make(where=None) -> Any:
    tree = {"free": jnp.ones(3), "key": jax.random.split(jax.random.key(0), 4)}
    tree["x"] = jnp.arange(8.0)
    if where is not None:
        tree = tree | jax.device_put({name: tree[name] for name in ("key", "x")}, where)
    return tree


def structs(where=None):
    """The shapes of `make()`, with a sharding for what was on the mesh."""
    like: Any = eqx.filter_eval_shape(make)
    for name in ("key", "x") if where is not None else ():
        shape, dtype = like[name].shape, like[name].dtype
        like[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    return like


@formats
@placements
def test_template_that_does_not_say_where_is_an_error(tmp_path, name, where):
    save, load = PAIRS[name]
    tree = make(where)
    save(tmp_path / name, tree)
    for like in eqx.filter_eval_shape(lambda: tree), structs():
        match = r"from several devices.*Layout\(mesh, rules\).shardings\(like\)`"
        with pytest.raises(eqx.LeafError, match=match) as e:
            load(tmp_path / name, like)
        assert jtu.keystr(e.value.path) == "['key']" and "['key']" in str(e.value)
        if name != "m.eqx":
            assert "`['x']`" in str(e.value) and "['free']" not in str(e.value)


@formats
@placements
@pytest.mark.parametrize("is_struct", [False, True])
def test_arrays_go_where_like_says(tmp_path, name, where, is_struct):
    save, load = PAIRS[name]
    tree = make(where)
    save(tmp_path / name, tree)
    for wanted in where, SPLIT, jax.sharding.SingleDeviceSharding(jax.devices()[2]):
        like = structs(wanted) if is_struct else make(wanted)
        again = load(tmp_path / name, like)
        assert all(is_at(again[k], wanted) for k in ("key", "x"))
        assert not again["free"].committed
        assert all(map(same, *map(jax.tree.leaves, (again, tree))))
    # An array on the default device says where, too.
    assert load(tmp_path / name, make())["x"].devices() == {jax.devices()[0]}


@pytest.mark.parametrize("name", ["m.safetensors", "m"])
@pytest.mark.parametrize("wanted", [SPLIT, jax.devices()[1], jax.devices()[0]])
def test_arrays_go_where_shardings_say(tmp_path, name, wanted):
    save, load = PAIRS[name]
    tree = make(SPLIT)
    save(tmp_path / name, tree)
    where = {"free": None, "key": wanted, "x": wanted}
    again = load(tmp_path / name, structs(), shardings=where)
    devices = wanted.device_set if wanted is SPLIT else {wanted}
    assert again["key"].devices() == again["x"].devices() == devices
    assert all(map(same, *map(jax.tree.leaves, (again, tree))))


@formats
def test_what_was_on_one_device_goes_to_the_default_device(tmp_path, name):
    save, load = PAIRS[name]
    save(tmp_path / name, make() | {"x": jax.device_put(jnp.ones(8), jax.devices()[1])})
    again = load(tmp_path / name, structs())
    assert all(x.devices() == {jax.devices()[0]} for x in again.values())


@formats
def test_one_device_leaves_no_choice(tmp_path, name, monkeypatch):
    save, load = PAIRS[name]
    save(tmp_path / name, make(SPLIT))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    again = load(tmp_path / name, structs())
    assert again["x"].devices() == {jax.devices()[0]}


@formats
def test_numpy_array_of_like_is_on_no_device(tmp_path, name):
    save, load = PAIRS[name]
    save(tmp_path / name, {"x": make(SPLIT)["x"]})
    assert same(
        load(tmp_path / name, {"x": np.zeros(8, "f4")})["x"], np.arange(8.0, dtype="f4")
    )


def test_record_of_a_stream_goes_where_like_says():
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, make(SPLIT))
    for like in make(SPLIT), structs(SPLIT):
        file.seek(0)
        again = eqx.tree_deserialise_leaves(file, like)
        assert again["x"].sharding == again["key"].sharding == SPLIT
    file.seek(0)  # does not say where the arrays were
    assert eqx.tree_deserialise_leaves(file, structs())["x"].devices() == {
        jax.devices()[0]
    }


def test_own_function_may_place_arrays_anywhere(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "m", make(SPLIT))

    def read(file, like):
        struct = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=COPIED)
        return eqx.default_deserialise_filter_spec(file, struct)

    again = eqx.tree_deserialise_leaves(tmp_path / "m", structs(), read)
    assert all(is_at(x, COPIED) for x in again.values())


def test_explicit_axes_of_a_template_are_those_of_the_mesh_in_use(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    where = NamedSharding(mesh, P("x"))
    tree = make(where)
    like = eqx.filter_eval_shape(lambda: tree)
    for name, (save, load) in PAIRS.items():
        save(tmp_path / name, tree)
        with pytest.raises(eqx.LeafError, match=r"\['key'\].*`jax.set_mesh\(mesh\)`"):
            load(tmp_path / name, like)
        with jax.set_mesh(mesh):
            assert load(tmp_path / name, like)["x"].sharding == where


def test_state_dict_keeps_where_its_values_are():
    values = eqx.state_dict({"x": make(SPLIT)["x"]})
    like = eqx.filter_eval_shape(lambda: {"x": jnp.zeros(8)})
    assert eqx.load_state_dict(like, values)["x"].sharding == SPLIT
    for wanted in SPLIT, COPIED:
        like = {"x": jax.device_put(jnp.zeros(8), wanted)}
        assert eqx.load_state_dict(like, values)["x"].sharding == wanted
