"""`orbax.Save` and `orbax.Restore` beside Orbax's own `StandardSave` and `StandardRestore`.

The arrays hold random numbers, which cannot be compressed, and are split over all devices.
"""

import functools
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ._measure import Row, show, spread


def run(rounds: int) -> None:
    try:
        import orbax.checkpoint as ocp

        from equinox_like import orbax
    except ImportError:
        print("\nCheckpoints: needs the package orbax-checkpoint")
        return
    tree = _arrays(16, (1024, 4096))
    contenders = {
        "Orbax": (ocp.args.StandardSave, ocp.args.StandardRestore),
        "ours": (orbax.Save, orbax.Restore),
    }
    times: dict[Any, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        turn = functools.partial(_turn, tree, folder)
        for key in contenders:
            turn(*contenders[key])  # the first one compiles
        for i in range(max(3, rounds // 4)):
            for key in list(contenders)[:: -1 if i % 2 else 1]:
                for name, seconds in turn(*contenders[key]).items():
                    times[name, key].append(seconds)
    rows = []
    for name, goal in _GOALS.items():
        base, own = (np.array(times[name, key]) for key in contenders)
        rows.append(
            Row(name, "Orbax", spread(base), {"ours": spread(own / base)}, goal)
        )
    show(f"Checkpoints: 268 MB in 16 arrays, on {jax.device_count()} devices", rows)


_GOALS = {
    "`manager.save` returns": "2, and 27 ms",
    "the step is finished": "",
    "`manager.restore`": "1.3",
}


def _arrays(count: int, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    where = jax.NamedSharding(mesh, PartitionSpec(None, "x"))
    make = np.random.default_rng(0).random
    return {
        f"w{i}": jax.device_put(make(shape, "float32"), where) for i in range(count)
    }


def _turn(tree: Any, folder: str, save: Any, restore: Any) -> dict[str, float]:
    import orbax.checkpoint as ocp

    def like(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    with ocp.CheckpointManager(Path(folder, "steps")) as manager:
        start = time.perf_counter()
        manager.save(0, args=save(tree))
        saved = time.perf_counter()
        manager.wait_until_finished()
        finished = time.perf_counter()
        jax.block_until_ready(
            manager.restore(0, args=restore(jax.tree.map(like, tree)))
        )
        seconds = saved - start, finished - start, time.perf_counter() - finished
        manager.delete(0)
    return dict(zip(_GOALS, seconds, strict=True))
