"""Run by `test_orbax.py`: saves a step, and stops for ever while it saves another.

It stops before the sums are written, or before Orbax gives the step its name."""

import sys
import time
from unittest import mock

import jax.numpy as jnp
import orbax.checkpoint as ocp

from equinox_like import orbax
from equinox_like._io import orbax_trees


def stop(*_):
    print("written, not committed", flush=True)
    time.sleep(600)


with ocp.CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, args=orbax.Save({"x": jnp.ones(8)}))
    manager.wait_until_finished()
    stage = sys.argv[2]
    holder = orbax.TreeHandler if stage == "finalize" else orbax_trees
    with mock.patch.object(holder, stage, stop):
        manager.save(2, args=orbax.Save({"x": 2 * jnp.ones(8)}))
        manager.wait_until_finished()
