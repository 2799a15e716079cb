"""Run by `test_orbax.py` in two processes with two devices each."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P

import equinox_like as eqx
from equinox_like import orbax


def make(key):
    return eqx.nn.MLP(4, 4, 8, 1, key=key), jax.random.split(key, 4), "name", 0.5


def check_refused(manager, tree, mesh):
    """What is on the devices of one process is refused in all, and nothing is written."""
    own = jax.sharding.Mesh(jax.local_devices(), ("x",))
    first = jax.sharding.Mesh(jax.devices()[:2], ("x",))  # of process 0
    for x in (
        jnp.zeros((), jnp.int32),
        jax.random.key(0),
        jax.device_put(jnp.ones(4), NamedSharding(own, P("x"))),
        jax.device_put(jnp.ones(4), NamedSharding(first, P())),
    ):
        try:
            manager.save(2, args=orbax.Save({"model": tree, "step": x}))
            raise AssertionError("saved an array of one process")
        except eqx.LeafError as error:
            assert "`['step']` (" in str(error) and "filter_shard" in str(error), error
            assert error.path == (jax.tree_util.DictKey("step"),)
        manager.wait_until_finished()
    names = [path.name for path in manager.directory.iterdir()]
    assert names == ["1"], names
    step = eqx.filter_shard(jnp.zeros(()), NamedSharding(mesh, P()))
    for i, x in enumerate([step, 3, np.float32(2), np.arange(2), jnp.zeros((0, 2))]):
        manager.save(2 + i, args=orbax.Save({"model": tree, "step": x}))
    manager.wait_until_finished()


def main(address, count, number, folder):
    jax.distributed.initialize(address, int(count), int(number))
    key = jax.random.key(0)
    rules = [("**.weight", P("x")), ("[1]", P("x")), ("**", P())]
    mesh = jax.make_mesh((4,), ("x",))
    other = jax.make_mesh((2, 2), ("y", "x"))
    tree = eqx.Layout(mesh, rules).init(make, key)
    like = eqx.filter_eval_shape(make, key)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=orbax.Save(tree))
        manager.wait_until_finished()
        where = eqx.Layout(other, rules).shardings(like)
        again = manager.restore(1, args=orbax.Restore(like, where))
        check_refused(manager, tree, mesh)
    whole = eqx.filter_jit(make)(key)
    weight = again[0].layers[0].weight
    assert weight.sharding == where[0].layers[0].weight
    for shard in weight.addressable_shards:
        expected = np.asarray(whole[0].layers[0].weight)[shard.index]
        np.testing.assert_array_equal(shard.data, expected)
    keys = np.asarray(jax.random.key_data(whole[1]))
    assert again[1].dtype == whole[1].dtype
    for shard in jax.random.key_data(again[1]).addressable_shards:
        np.testing.assert_array_equal(shard.data, keys[shard.index])
    assert again[2:] == ("name", 0.5)
    print("as saved")


main(*sys.argv[1:])
