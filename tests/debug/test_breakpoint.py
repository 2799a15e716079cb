"""`breakpoint_if`: when the debugger opens, and where."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


@pytest.fixture
def stops(monkeypatch):
    found = []

    def stop(**kwargs):
        jax.debug.callback(lambda: found.append(sorted(kwargs)))

    monkeypatch.setattr(jax.debug, "breakpoint", stop)
    return found


USES = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, -abs(x)])),
    "jit of vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(jnp.stack([x, -abs(x)]))),
    "grad": jax.grad,
}


@pytest.mark.parametrize("use", USES)
def test_debugger_opens_once_where_the_predicate_is_true(use, stops):
    def f(x):
        eqx.debug.breakpoint_if(x > 0)
        return x * 2

    f = USES[use](f)
    f(jnp.asarray(-1.0))
    jax.effects_barrier()
    assert stops == []
    f(jnp.asarray(1.0))
    jax.effects_barrier()
    assert len(stops) == 1


def test_one_true_element_suffices(stops):
    eqx.debug.breakpoint_if(jnp.asarray([False, False]))
    eqx.debug.breakpoint_if(jnp.asarray([False, True]), num_frames=3)
    jax.effects_barrier()
    assert stops == [["num_frames", "token"]]


def test_token_comes_back(stops):
    assert eqx.debug.breakpoint_if(False) is None
    token = jnp.arange(2)
    for pred in (False, True):
        assert eqx.debug.breakpoint_if(pred, token=token).tolist() == [0, 1]


def test_debugger_opens_at_the_users_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import equinox_like as eqx, jax\n"
        "def f(x):\n"
        "    eqx.debug.breakpoint_if(x > 0)  # here\n"
        "    return x\n"
        "jax.jit(f)(1.0)\n"
        "jax.effects_barrier()\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        input="l\nc\n",
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "eqx.debug.breakpoint_if(x > 0)  # here" in done.stdout
