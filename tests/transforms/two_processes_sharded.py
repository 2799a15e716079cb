"""Run by `test_sharded.py` in two processes with four devices each, which must agree."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import equinox_like as eqx

RULES = [("**.weight", P("model")), ("**", P())]


def make(key):
    return eqx.nn.MLP(256, 256, 512, 2, key=key), jax.random.key(3), "static"


def resident_kilobytes_of(path: Path) -> int:
    """How much of the mapping of a file this process has read."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(str(path))]
    rows = (lines[j] for i in starts for j in range(i, i + 10))
    return sum(int(row.split()[1]) for row in rows if row.startswith("Rss:"))


def check_shards(tree, whole):
    for x, y in zip(
        jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)),
        jax.tree.leaves(eqx.filter(whole, eqx.is_inexact_array)),
        strict=True,
    ):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index])


class Maker(eqx.Module):
    key: jax.Array
    size: int = 4

    def __call__(self):
        return eqx.nn.Linear(self.size, self.size, key=self.key)


def check_refused(mesh, number):
    """What differs is named in both processes, also where it gives the same program."""
    same, other = jax.random.key(0), jax.random.key(number)
    raw = np.asarray(jax.random.key_data(other))
    odd = [("**.weight", [P("model"), P()][number]), ("**", P())]
    linear = eqx.nn.Linear
    one = {"a": [1.0] * (1 + number), "b": jnp.ones(2)}
    for name, make, args, kwargs in (
        ("key", linear, (8, 8), {"key": other}),
        ("key", linear, (8, 8), {"key": raw}),
        ("other", lambda: linear(8, 8, key=other), (), {}),  # it closes over it
        ("seed", lambda seed: linear(8, 8, key=jax.random.key(seed)), (number,), {}),
        ("make.key", Maker(other), (), {}),
        ("make.size", Maker(same, 8 + 8 * number), (), {}),
        ("use_bias", linear, (8, 8), {"use_bias": bool(number), "key": same}),
        ("x['a']", lambda x: jnp.ones(8), (one,), {}),
        ("x", lambda x: jnp.ones(8), (np.ones(2 + number),), {}),
        ("x", lambda x: x, (jnp.full(8, number - 0.0),), {}),
        ("rules", linear, (8, 8), {"key": same, "rules": odd}),
    ):
        try:
            eqx.Layout(mesh, kwargs.pop("rules", RULES)).init(make, *args, **kwargs)
            raise AssertionError(f"took another `{name}` from each process")
        except ValueError as error:
            text = f"`{name}` is not the same in all processes"
            assert str(error).startswith(text), error
    # What is not compared: NaN is itself, a lambda has no text, a mesh of one process.
    nan = np.full(8, np.nan, np.float32)
    take = lambda x, f: {"weight": x}  # noqa: E731
    made = eqx.Layout(mesh).init(take, nan, lambda: number)
    assert jnp.isnan(made["weight"]).all()
    own = jax.sharding.Mesh(jax.local_devices(), ("model",))
    eqx.Layout(own, RULES).init(linear, 8, 8, key=other)


def main(address, count, number, folder):
    jax.distributed.initialize(address, int(count), int(number))
    mesh = jax.make_mesh((8,), ("model",))
    key = jax.random.key(0)

    whole = eqx.filter_jit(make)(key)
    made = eqx.Layout(mesh, RULES).init(make, key)
    weight = made[0].layers[1].weight
    assert weight.shape == (512, 512) and len(weight.addressable_shards) == 4
    assert weight.addressable_shards[0].data.shape == (64, 512)
    assert made[2] == "static"
    check_shards(made, whole)

    path = Path(folder) / f"{number}.safetensors"
    like = eqx.filter_eval_shape(make, key)
    where = eqx.Layout(mesh, RULES).shardings(like)
    try:
        eqx.save(path, made)
        raise AssertionError("saved, although half of it is elsewhere")
    except eqx.LeafError as error:
        assert "filter_shard" in str(error), error
    eqx.save(path, eqx.filter_shard(made, NamedSharding(mesh, P())))
    loaded = eqx.load(path, like, shardings=where)
    check_shards(loaded, whole)
    assert loaded[1].sharding == where[1] and loaded[2] == "static"

    check_refused(mesh, int(number))
    try:
        own = {"rows": np.full((8, 2), int(number))}
        eqx.filter_shard(own, NamedSharding(mesh, P("model")))
        raise AssertionError("took other values from each process")
    except ValueError as error:
        assert "`x['rows']` (int64[8,2]) is not the same in all" in str(error), error

    # Large beside the pages that a kernel reads at a time.
    rows = {"rows": np.ones((8, 1 << 20), np.float32)}
    eqx.save(path, rows)
    like = eqx.filter_eval_shape(lambda: jax.tree.map(jnp.asarray, rows))
    where = eqx.Layout(mesh, [("**", P("model"))]).shardings(like)
    for verify in True, False:
        loaded = eqx.load(path, like, verify=verify, shardings=where)
        shards = loaded["rows"].addressable_shards
        assert all((shard.data == 1).all() for shard in shards)
        read = resident_kilobytes_of(path) * 1024 / path.stat().st_size
        print(f"read {read:.2f} of the file")
        del loaded, shards

    # Data that are damaged are a matter of the process that needs them.
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(bytes(4))
    try:
        eqx.load(path, like, shardings=where)
        print("found no damage")
    except eqx.LeafError as error:
        print(f"found damage at {error.path}")


main(*sys.argv[1:])
