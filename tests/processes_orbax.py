"""Run by `test_orbax.py` in several processes, with four devices together."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import equinox_like as eqx
from equinox_like import orbax


def make(key):
    mlp = eqx.nn.MLP(4, 4, 8, 1, dtype=jnp.bfloat16, key=key)
    return eqx.nn.MLP(4, 4, 8, 1, key=key), jax.random.split(key, 4), mlp, "name", 0.5


STEPS = 1, 20
RULES = [
    ("[2].**.weight", P(None, "x")),  # whose shards are not runs of the array
    ("**.weight", P("x")),
    ("[1]", P("x")),
    ("**", P()),
]


def check_as_expected(tree, where):
    """Each process has its shards of what `make` returns, in the given shardings."""
    whole = eqx.filter_jit(make)(jax.random.key(0))
    assert jax.tree.structure(tree) == jax.tree.structure(whole)
    arrays, shardings = map(jax.tree.leaves, (eqx.filter(tree, eqx.is_array), where))
    expected = jax.tree.leaves(eqx.filter(whole, eqx.is_array))
    for x, sharding, y in zip(arrays, shardings, expected, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim) and x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index])
    assert tree[3:] == ("name", 0.5)


def check_refused(manager, tree, mesh):
    """What is not on the devices of all processes is refused, and nothing is written."""
    key = jax.random.key(0)
    own = Mesh(jax.local_devices(), ("x",))
    some = [Mesh(jax.devices()[:n], ("x",)) for n in (1, 2, 3)]
    for x in (
        jnp.zeros((), jnp.int32),
        key,
        jax.device_put(jnp.ones(4), NamedSharding(own, P("x"))),
        *(jax.device_put(np.ones(4), NamedSharding(each, P())) for each in some),
    ):
        if len({device.process_index for device in x.devices()}) == jax.process_count():
            continue
        try:
            manager.save(2, args=orbax.Save({"model": tree, "step": x}))
            raise AssertionError("saved an array that is not in all processes")
        except eqx.LeafError as error:
            assert "`['step']` (" in str(error) and "filter_shard" in str(error), error
            assert error.path == (jax.tree_util.DictKey("step"),)
        manager.wait_until_finished()
    names = [path.name for path in manager.directory.iterdir()]
    assert names == ["1"], names
    step = eqx.filter_shard(jnp.zeros(()), NamedSharding(mesh, P()))
    for i, x in enumerate([step, 3, np.float32(2), np.arange(2), jnp.zeros((0, 2))]):
        manager.save(2 + i, args=orbax.Save({"model": tree, "step": x}))
    manager.save(10, args=orbax.Save({"step": np.arange(2)}))  # nothing of process 1
    manager.wait_until_finished()
    like = {"step": np.zeros(2, int)}
    again = manager.restore(10, args=orbax.Restore(like))
    assert again["step"].tolist() == [0, 1]


class Damaging(ocp.PyTreeCheckpointHandler):
    """Reads something else in one process: with another bit, or not at all."""

    def __init__(self, process, name, bit=None):
        super().__init__()
        self.process, self.name, self.bit = process, name, bit

    def restore(self, directory, args):
        read = super().restore(directory, args=args)
        if jax.process_index() != self.process or self.name not in read:
            return read
        if self.bit is None:
            raise OSError("cannot be reached")
        x = read[self.name]
        shards = x.addressable_shards
        data = [np.array(shard.data) for shard in shards]
        own = [shard.replica_id for shard in shards].index(0)
        words = data[own].reshape(-1).view(np.uint8)
        words[self.bit // 8 % words.size] ^= 1 << self.bit % 8
        put = [jax.device_put(d, s.device) for d, s in zip(data, shards, strict=True)]
        rebuilt = jax.make_array_from_single_device_arrays(x.shape, x.sharding, put)
        return read | {self.name: rebuilt}


def check_damage_is_found(folder):
    """One process finds a damage, and all raise the same error."""
    like = eqx.filter_eval_shape(make, jax.random.key(0))
    where = eqx.Layout(jax.make_mesh((4,), ("x",)), RULES).shardings(like)
    rng = np.random.default_rng(0)
    names = ["[0].layers[0].weight", "[1]", "[2].layers[1].weight"]
    for process, name in itertools.product(range(jax.process_count()), names):
        for bit in [None, *rng.integers(0, 1 << 16, 3).tolist()]:
            handler = orbax.TreeHandler(Damaging(process, name, bit))
            with ocp.Checkpointer(handler) as checkpointer:
                try:
                    path = epath.Path(folder) / "1" / "default"
                    checkpointer.restore(path, args=orbax.Restore(like, where))
                    raise AssertionError(f"{name} {bit} was not found")
                except eqx.LeafError as error:
                    assert f"`{name}` is damaged: " in str(error), error
                    assert str(error).count("is damaged") == 1, error
                    assert error.path, error


def check_restored(folder):
    """The steps are restored onto two meshes, and onto one device of each process."""
    like = eqx.filter_eval_shape(make, jax.random.key(0))
    mesh, local = jax.make_mesh((4,), ("x",)), jax.local_devices()[0]
    meshes = mesh, jax.make_mesh((2, 2), ("y", "x")), Mesh([local], "x")
    with ocp.CheckpointManager(folder) as manager:
        for step in STEPS:
            for each in meshes:
                where = eqx.Layout(each, RULES).shardings(like)
                with jax.set_mesh(mesh):
                    again = manager.restore(step, args=orbax.Restore(like, where))
                check_as_expected(again, where)


def save(folder):
    key, mesh = jax.random.key(0), jax.make_mesh((4,), ("x",))
    with ocp.CheckpointManager(folder) as manager:
        for step, shape in zip(STEPS, [(1, 4), (2, 2)], strict=True):
            each = jax.make_mesh(shape, ("y", "x"))
            tree = eqx.Layout(each, RULES).init(make, key)
            manager.save(step, args=orbax.Save(tree))
            manager.wait_until_finished()
            if step == 1:
                check_refused(manager, tree, mesh)


def main(address, count, number, folder, task):
    jax.distributed.initialize(address, int(count), int(number))
    if task == "save":
        save(folder)
        check_damage_is_found(folder)
    check_restored(folder)
    print("as saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
