"""Eight threads at once, on the same and on different functions.

For three seconds, or as long as `STRESS_SECONDS` says; `.ci/run` says 30.
"""

import gc
import os
import random
import sys
import threading
import time
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._compat.tracing import settings

SECONDS = float(os.environ.get("STRESS_SECONDS", "3"))
MODES = ["none", "arrays", "all-except-first", "warn", "strict", ("model",)]


class Model(eqx.Module):
    weight: jax.Array
    rate: float = eqx.field(static=True)

    @eqx.filter_jit
    def apply(self, x):
        return self.rate * self.weight.sum() + x


def step(model, x, name):
    return eqx.tree_at(lambda m: m.weight, model, model.weight + x.sum()), name


SHARED = {mode: eqx.filter_jit(step, donate=mode) for mode in MODES}


def make(rng):
    size, rate = rng.randint(1, 4), rng.choice([1, 1.0, True, 2.5])
    return Model(jnp.full(size, 2.0), rate), size, rate


def call_shared(rng):
    model, size, rate = make(rng)
    mode, name = rng.choice(MODES), rng.choice(["a", "b"])
    kept = rng.random() < 0.5
    given = eqx.tree_copy(model) if kept else model
    # Something that no output can take would be an error in the strict mode.
    x = np.ones(3, np.float32)
    out, again = SHARED[mode](given, x, name)
    assert again == name and type(out.rate) is type(rate) and out.rate == rate
    assert out.weight.tolist() == [5.0] * size
    donated = mode in ("arrays", "warn", "strict", ("model",))
    assert given.weight.is_deleted() == donated
    if kept:
        assert model.weight.tolist() == [2.0] * size


def call_a_method(rng):
    model, size, rate = make(rng)
    assert model.apply(1.0) == rate * 2.0 * size + 1.0


def wrap_anew(rng):
    k = rng.randint(0, 3)
    f = eqx.filter_jit(lambda x: x * k, donate=rng.choice(["none", "arrays"]))
    assert f(jnp.ones(2)).tolist() == [k, k]


def use_what_is_gone(rng):
    model, _, _ = make(rng)
    SHARED["arrays"](model, np.ones(3, np.float32), "a")
    try:
        SHARED["arrays"](model, np.ones(3, np.float32), "a")
    except eqx.DonationError as error:
        assert "`model.weight`" in str(error)
    else:
        raise AssertionError("an array that is gone was taken")


def explain(rng):
    model, _, _ = make(rng)
    SHARED["none"](model, np.ones(3, np.float32), "a")
    found = SHARED["none"].explain(model, np.ones(3, np.float32), "a")
    # Another thread may have emptied the cache.
    assert found is None or not found.differences or "model" in str(found)


def clear(rng):
    if rng.random() < 0.02:
        SHARED[rng.choice(MODES)].clear_cache()
    if rng.random() < 0.01:
        eqx.clear_caches()


WORK = [call_shared] * 5 + [call_a_method] * 2
WORK += [wrap_anew, use_what_is_gone, explain, clear]


def state():
    return {
        "filters": list(warnings.filters),
        "settings": settings(),
        "collects": gc.isenabled(),
        "switch": sys.getswitchinterval(),
    }


# Each of the shared functions is compiled for more than 32 calls.
@pytest.mark.filterwarnings("ignore::equinox_like.RetraceWarning")
def test_threads_do_not_disturb_each_other_nor_the_process():
    failures, counts = [], []
    end = time.monotonic() + SECONDS

    def work(seed):
        rng, count = random.Random(seed), 0
        try:
            while time.monotonic() < end and not failures:
                rng.choice(WORK)(rng)
                count += 1
        except BaseException:
            failures.append(traceback.format_exc())
        counts.append(count)

    before = state()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert min(counts) > 0
    assert state() == before


def test_caches_can_be_cleared_while_another_thread_wraps():
    is_done, are_many = threading.Event(), threading.Event()

    def wrap():
        kept = []
        while not is_done.is_set():
            kept.append(eqx.filter_jit(lambda x: x))
            if len(kept) > 1000:
                del kept[:100]
                are_many.set()

    thread, interval = threading.Thread(target=wrap), sys.getswitchinterval()
    thread.start()
    try:
        assert are_many.wait(60)
        sys.setswitchinterval(1e-6)
        for _ in range(200):
            eqx.clear_caches()
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        thread.join()
