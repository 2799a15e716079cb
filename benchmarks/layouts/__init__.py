"""The lines that say how a GPT lies on a mesh, beside those of Flax NNX and Haliax.

Each program trains the same network: 12 million parameters, kept in parts on the devices
of the axis `data` and fetched when they are used, and split over `model` for computing. In
a program, a line that is there because of the mesh ends in `# mesh`. Each runs in a new
process with eight CPU devices. Memory is the largest of XLA's figures for the temporary
arrays of a compiled program: that of the step.
"""

import os
import subprocess
import sys
from pathlib import Path

MESHES = "2,4", "8,1"
PROGRAMS = {"Layout": "ours", "Flax NNX": "of_nnx", "Haliax": "of_haliax"}

_RUN = """
import runpy, sys
runpy.run_module(sys.argv[1], run_name="__main__")
import jax
executables = jax.devices()[0].client.live_executables()
stats = [x.get_compiled_memory_stats() for x in executables]
print(max(x.temp_size_in_bytes for x in stats) / 1e6)
"""


def lines_of(program: str) -> tuple[int, int]:
    """How many lines of code a program has, and how many of them are about the mesh."""
    text = Path(__file__).with_name(f"{program}.py").read_text("utf-8")
    body = text.split('"""')[2].splitlines()
    code = [line for line in body if line.strip() and line.strip()[0] != "#"]
    return len(code), sum(line.endswith("# mesh") for line in code)


def run(rounds: int) -> None:
    print(
        "\nA GPT on a mesh: lines, lines about the mesh, and for each mesh losses and MB"
    )
    for name, program in PROGRAMS.items():
        results = [_measured(program, mesh) for mesh in MESHES]
        lines, about_mesh = lines_of(program)
        print(f"{name:10}{lines:5}{about_mesh:5}   {'   '.join(results)}")


def _measured(program: str, mesh: str) -> str:
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", _RUN, f"{__name__}.{program}", mesh],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"{mesh}: {done.stderr.strip().splitlines()[-1]}"
    *losses, memory = done.stdout.split()
    return f"{mesh}: {losses[0]} to {losses[-1]}, {float(memory):.1f} MB"
