"""Run by `test_layout.py` in several processes, which are killed while they save together.

Arguments after those of `run_together`: the folder, and the mesh. The first time two steps
are trained and saved, and a third one is saved for ever; from then on, it goes on from the
last step that was saved. Prints the losses.
"""

import sys
import time
from unittest import mock

import jax
import layout_net as t
import orbax.checkpoint as ocp

import equinox_like as eqx
from equinox_like import orbax


def stop(*_):
    print("written, not committed", flush=True)
    time.sleep(600)


def main(address, processes, number, folder, mesh):
    jax.distributed.initialize(address, int(processes), int(number))
    layout = t.layout_of(mesh)
    step = layout.jit(t.train, donate=("model", "state"))
    size = t.BATCH // int(processes)
    own = slice(int(number) * size, (int(number) + 1) * size)

    def train(held, steps):
        for i in steps:
            rows = layout.batch(tuple(x[own] for x in t.rows(i)))
            *held, value = step(*held, *rows)
            print("loss", float(value), flush=True)
        return tuple(held)

    key = jax.random.key(0)
    with ocp.CheckpointManager(folder) as manager:
        last = manager.latest_step()
        if last is None:
            held = train(layout.init(t.make, key), range(2))
            manager.save(2, args=orbax.Save(held))
            manager.wait_until_finished()
            held = train(held, [2])
            with mock.patch.object(orbax.TreeHandler, "finalize", stop):
                manager.save(3, args=orbax.Save(held))
                manager.wait_until_finished()
        like = eqx.filter_eval_shape(t.make, key)
        where = layout.shardings(like)
        held = manager.restore(last, args=orbax.Restore(like, shardings=where))
        weight = held[0].blocks.layers.first.weight
        assert weight.sharding == where[0].blocks.layers.first.weight
        held = train(held, range(last, 4))
        manager.save(4, args=orbax.Save(held))
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [2, 4]


main(*sys.argv[1:])
