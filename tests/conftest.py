"""How the tests run: on the CPU as four devices, with the library's annotations checked.

With `TESTS_ON=cuda` in the environment, they run on a GPU, and so do those marked `gpu`,
which are skipped otherwise. With `TESTS_CHECK_TYPES=0`, no annotations are checked.

This file is read before anything imports JAX or the library.
"""

import gc
import importlib
import importlib.metadata
import os
import random
import sys
import time
from pathlib import Path
from unittest import mock

ON_GPU = os.environ.get("TESTS_ON") == "cuda"
# A GPU needs the CPU beside it, for callbacks and for what is placed there.
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if ON_GPU else "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
# Most programs here run once: compiling them takes far longer than running them. LLVM does
# little about them, therefore; what XLA does before is the same as ever.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "0" if ON_GPU else "1")
if ON_GPU:
    # By default a GPU multiplies matrices with ten bits of the mantissa, and the first
    # process takes all of its memory.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# With jax 0.10, compiling without XLA's fusion emitters takes half the time, and as one
# LLVM module a little less. Later versions have no such switch, or gain nothing by it.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"

# A program that several tests compile, here or in another worker, is compiled once, and
# kept for a week for later runs: compiling is half of the work. The workers and the
# processes that tests start inherit the folder. Each version of Python has its own, as
# JAX compresses the programs in the way that Python offers.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    programs = Path(__file__).parent.parent / ".cache" / f"programs-{version}"
    programs.mkdir(parents=True, exist_ok=True)
    for program in programs.iterdir():
        if program.stat().st_mtime < time.time() - 7 * 24 * 3600:
            program.unlink(missing_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"

import jaxtyping

# beartype looks at one item of each container, by chance; where a strategy calls the
# library it would seem to Hypothesis that the strategy used chance of its own.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    importlib.import_module("beartype")

# Each function of the library checks its arguments against its annotations, which takes
# half of the time of tests that compile nothing.
if os.environ.get("TESTS_CHECK_TYPES") != "0":
    jaxtyping.install_import_hook("equinox_like", "beartype.beartype")

import hypothesis
import jax
import jax_flags
import pytest

# Of what fails under a flag of JAX the least example is not looked for: it is expected.
phases = set(hypothesis.Phase)
if jax_flags.flags_that_are_set():
    phases -= {hypothesis.Phase.shrink, hypothesis.Phase.explain}
hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=60, derandomize=True, phases=phases
)
hypothesis.settings.load_profile("tests")


# The test functions that take long: `scripts/measure_tests` writes the list.
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().split())


def function_of(item):
    """A test without its parameters: `jit/test_jit.py::TestNames::test_it`."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    return "::".join([file, *item.nodeid.partition("[")[0].split("::")[1:]])


def pytest_collection_modifyitems(items):
    """Marks the slow tests, expects to fail what JAX makes fail under the flags that are
    set, and skips tests of a GPU elsewhere."""
    for item in items:
        if function_of(item) in SLOW:
            item.add_marker(pytest.mark.slow)
        if not ON_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and TESTS_ON=cuda"))
        _, bracket, parameters = item.nodeid.partition("[")
        fault = jax_flags.expected_fault(function_of(item) + bracket + parameters)
        if fault is not None:
            reason = f"JAX's: {fault.reproduce.__name__}"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=fault.sure))


def cpu_time():
    """The CPU time of this process, its threads and the processes that it started."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Adds the CPU time of the test to the file that `MEASURE_TESTS` names."""
    start = cpu_time()
    result = yield
    if "MEASURE_TESTS" in os.environ:
        with open(os.environ["MEASURE_TESTS"], "a") as file:
            file.write(f"{cpu_time() - start:.3f} {function_of(item)}\n")
    return result


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection():
    """Freezes all objects, those of JAX and of earlier modules, before each module.

    A full garbage collection visits every object that is not frozen. That would take up to
    a second, and some tests run dozens of collections.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def without_type_checks(monkeypatch):
    """As users run it: a wrong type meets the function's own check, not its annotation."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
