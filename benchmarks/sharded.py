"""The peak memory and the time of building a model of 1 GB in 16 shards.

Each contender runs in a new process with 16 CPU devices. The memory that the process had
before is subtracted, and the rest is divided by the size of the model.
"""

import os
import subprocess
import sys

_HEAD = """
import sys, time
import equinox_like as eqx, jax
from jax.sharding import PartitionSpec as P

def peak():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

class Net(eqx.Module):
    layers: list

    def __init__(self, width, key):
        keys = jax.random.split(key, 32)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]

rules = [("**.weight", P(None, "model")), ("**", P("model"))]
layout = eqx.Layout("model=16", rules)
key = jax.random.key(0)

def measure(width):
    before, start = peak(), time.perf_counter()
    model = jax.block_until_ready(make(width))
    size = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    print((peak() - before) / size, time.perf_counter() - start, size)

def main():
    jax.block_until_ready(make(64))
    measure(int(sys.argv[1]))
"""
_CONTENDERS = {
    "Layout.init": """
def make(width):
    return layout.init(Net, width, key)
""",
    "construct, then filter_shard": """
def make(width):
    model = Net(width, key)
    # Else parts of it are freed while others are being split: how many is up to chance.
    return jax.block_until_ready(eqx.filter_shard(model, layout.shardings(model)))
""",
}


def run(rounds: int) -> None:
    if not sys.platform.startswith("linux"):
        print("\nSharded construction: needs Linux's /proc")
        return
    width = 2896 if rounds >= 40 else 1024
    print(
        "\nBuilding a model in 16 shards: peak memory in copies of the model, and time"
    )
    for name, code in _CONTENDERS.items():
        copies, seconds, size = _measured(_HEAD + code + "\nmain()", width)
        print(f"{name:34}{copies:8.2f} x {size / 2**30:.2f} GiB{seconds:10.1f} s")


def _measured(code: str, width: int) -> list[float]:
    flags = "--xla_force_host_platform_device_count=16"
    done = subprocess.run(
        [sys.executable, "-c", code, str(width)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(each) for each in done.stdout.split()]
