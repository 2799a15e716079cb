"""Run by `test_orbax.py` in two processes with two devices each."""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like import orbax


def make(key):
    return eqx.nn.MLP(4, 4, 8, 1, key=key), jax.random.split(key, 4), "name", 0.5


def main(address, count, number, folder):
    jax.distributed.initialize(address, int(count), int(number))
    key = jax.random.key(0)
    rules = [("**.weight", P("x")), ("[1]", P("x")), ("**", P())]
    mesh = jax.make_mesh((4,), ("x",))
    other = jax.make_mesh((2, 2), ("y", "x"))
    tree = eqx.make_sharded(make, key, mesh=mesh, rules=rules)
    like = eqx.filter_eval_shape(make, key)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=orbax.Save(tree))
        manager.wait_until_finished()
        where = eqx.shardings(like, other, rules)
        again = manager.restore(1, args=orbax.Restore(like, where))
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
