"""Threads read arrays that the main thread donates, in each way to donate them.

`python reading_threads.py SECONDS NAME...`: for so many seconds in all. It prints each
name before, so that one knows where the process has ended.
"""

import io
import logging
import sys
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx

MESH = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Auto,))
LOG = logging.getLogger("reading")
LOG.addHandler(logging.StreamHandler(io.StringIO()))
LOG.propagate = False
logging.raiseExceptions = False  # a deleted array cannot be logged


class Model(eqx.Module):
    w: Any
    steps: Any


def new(spec=None) -> Model:
    model = Model(jnp.ones((4, 250)), jnp.arange(4))
    if spec is None:
        return model
    return eqx.filter_device_put(model, jax.NamedSharding(MESH, spec))


def grow(model):
    return jax.tree.map(lambda x: x + 1, model)


def by_mode(mode):
    return eqx.filter_jit(grow, donate=mode)


def all_except_first():
    step = eqx.filter_jit(lambda x, model: grow(model), donate="all-except-first")
    return lambda model: step(0.0, model)


def unusable():
    @eqx.filter_jit(donate=("model",))
    def total(model):
        return jax.tree.map(jnp.sum, model)

    return lambda model: (total(model), new())[1]


def compiled():
    return by_mode("arrays").lower(new()).compile()


def failing():
    @eqx.filter_jit(donate="arrays")
    def step(model):
        return eqx.error_if(grow(model), model.w[0, 0] > 0, "always")

    def call(model):
        try:
            step(model)
        except eqx.EquinoxRuntimeError:
            return new()
        raise AssertionError("it did not fail")

    return call


def device_put():
    step = jax.jit(grow)
    return lambda model: step(eqx.filter_device_put(model, donate=True))


def pmap():
    return eqx.filter_pmap(grow, donate="arrays")


def shard_map():
    return eqx.filter_shard_map(
        grow, mesh=MESH, in_specs=P("d"), out_specs=P("d"), donate="arrays"
    )


# How to make the model, and what returns a new one and donates the old.
WAYS = {
    **{
        str(mode): (new, lambda mode=mode: by_mode(mode))
        for mode in ("arrays", "all", "warn", "strict", ("model",))
    },
    "all-except-first": (new, all_except_first),
    "unusable": (new, unusable),
    "compiled": (new, compiled),
    "failing": (new, failing),
    "device_put": (new, device_put),
    "device_put, sharded": (lambda: new(P("d")), device_put),
    "pmap": (lambda: new(P("d")), pmap),
    "shard_map": (lambda: new(P("d")), shard_map),
    "sharded": (lambda: new(P("d")), lambda: by_mode("arrays")),
    "replicated": (lambda: new(P()), lambda: by_mode("arrays")),
}
READERS = [
    lambda model: np.asarray(model.w).sum(),
    lambda model: eqx.save(io.BytesIO(), model),
    lambda model: (str(model), eqx.tree_pformat(model, short_arrays=False)),
    lambda model: LOG.warning("%s %r", model.w, model.steps),
]


def run(make, step, seconds):
    use = eqx.filter_jit(lambda model: grow(model))
    step(use(make()))  # compiles
    models, is_done, reads = [make()], threading.Event(), [0]

    def read(reader):
        pause = 0 if reader is READERS[0] else 1e-4
        while not is_done.wait(pause):
            try:
                reader(models[0])
            except Exception:  # of many kinds: JAX deletes it while it is read
                continue
            reads[0] += 1

    threads = [threading.Thread(target=read, args=(reader,)) for reader in READERS]
    for thread in threads:
        thread.start()
    end, calls = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end or not reads[0]:
            old = models[0]
            models[0] = step(old)
            calls += 1
            if old.w.is_deleted() and calls % 50 == 0:
                try:
                    use(old)
                except eqx.DonationError:
                    continue
                raise AssertionError("a deleted array was used")
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    print(f"{calls} calls, {reads[0]} reads", flush=True)


def main(seconds, *names):
    sys.setswitchinterval(1e-5)
    warnings.simplefilter("ignore", eqx.DonationWarning)
    names = names or tuple(WAYS)
    for name in names:
        print(name, end=": ", flush=True)
        make, step_of = WAYS[name]
        run(make, step_of(), float(seconds) / len(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
