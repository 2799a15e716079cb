"""Run by `test_sharded.py` with eight devices: what XLA says that a construction needs."""

from unittest import mock

import jax
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like._transforms import mesh_layout

LAYERS, SIZE = 16, 64


def make(key):
    keys = jax.random.split(key, LAYERS)
    return [eqx.nn.Linear(SIZE, SIZE, use_bias=False, key=k) for k in keys]


def main():
    accounts = []

    def spied(*args, **kwargs):
        jitted = eqx.filter_jit(*args, **kwargs)

        def call(key):
            accounts.append(jitted.lower(key).compile().memory_analysis())
            return jitted(key)

        return call

    mesh = jax.make_mesh((8,), ("model",))
    rules = [("**.weight", P("model"))]
    with mock.patch.object(mesh_layout, "filter_jit", spied):
        model = eqx.Layout(mesh, rules).init(make, jax.random.key(0))
    assert len(model[0].weight.addressable_shards) == 8
    (account,) = accounts
    shards = LAYERS * SIZE * SIZE * 4 / 8
    print(account.output_size_in_bytes / shards, account.temp_size_in_bytes / shards)


main()
