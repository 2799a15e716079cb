"""Train one model on several processes, each with its part of the data.

Started without options it is the only process. As one of several, on one host or many:

    python examples/data_parallel.py --coordinator HOST:PORT --processes 2 --process 0
    python examples/data_parallel.py --coordinator HOST:PORT --processes 2 --process 1

All of them run the same program. The batch is split over all devices of all processes, the
model is whole on each, and the compiler puts the sum of the gradients in between.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import equinox_like as eqx


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit(donate=("model",))
def step(model, x, y, rate):
    value, gradient = eqx.filter_value_and_grad(loss)(model, x, y)
    updates = jax.tree_util.tree_map(lambda g: -rate * g, gradient)
    return eqx.apply_updates(model, updates), value, gradient


def batch(number, size):
    """The whole batch, as each process can make it for itself."""
    x = np.random.default_rng(number).normal(size=(size, 4)).astype(np.float32)
    return x, np.sin(x).sum(1, keepdims=True)


def split(array, sharding):
    """The array, of which this process gives the rows of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def train(steps, size):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    # The same key everywhere, so the same model.
    model = eqx.nn.MLP(4, 1, 16, 2, key=jax.random.key(0))
    model = eqx.filter_shard(model, NamedSharding(mesh, P()))
    for number in range(steps):
        x, y = (split(a, rows) for a in batch(number, size))
        model, value, gradient = step(model, x, y, jnp.float32(0.05))
    return model, float(value), gradient


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", help="address of process 0, as host:port")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="the number of this one")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, help="where to write model and gradient")
    options = parser.parse_args()
    if options.processes > 1:
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process
        )
    model, value, gradient = train(options.steps, options.batch)
    print(
        f"process {jax.process_index()} of {jax.process_count()}, "
        f"{jax.local_device_count()} of {jax.device_count()} devices, loss {value:.6f}"
    )
    if options.out is not None and jax.process_index() == 0:
        arrays = jax.tree_util.tree_leaves(eqx.filter((model, gradient), eqx.is_array))
        np.savez(options.out, *map(np.asarray, arrays))


if __name__ == "__main__":
    main()
