"""A Python number in the carry that a step changes: the first trace is not used."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


def _scan(step, init, **options):
    return eqx.filter_scan(lambda c, x: (step(c), x), init, jnp.arange(3), **options)[0]


def _while(step, init, **options):
    return eqx.filter_while_loop(lambda c: c[1] < 3, step, init, **options)


LOOPS = {
    "scan": _scan,
    "scan-checkpoint": lambda *args: _scan(*args, checkpoint=True),
    "scan-checkpoints": lambda *args: _scan(*args, checkpoint=2),
    "while": _while,
    "bounded": lambda *args: _while(*args, kind="bounded", max_steps=4),
    "checkpointed": lambda *args: _while(*args, kind="checkpointed", max_steps=4),
    "fori": lambda step, init: eqx.filter_fori_loop(0, 3, lambda i, c: step(c), init),
}
EACH = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


@EACH
@pytest.mark.parametrize("transform", ["eager", "jit", "filter_jit", "disable_jit"])
def test_value_is_that_of_a_python_loop(loop, transform):
    def f(x):
        return loop(lambda c: (2 * c[0] + c[1], c[1] + 1), (x, 0))

    x = jnp.ones(())
    if transform == "disable_jit":
        with jax.disable_jit():
            out = f(x)
    else:
        out = {"eager": f, "jit": jax.jit(f), "filter_jit": eqx.filter_jit(f)}[
            transform
        ](x)
    assert out[0] == 12 and out[1] == 3


@EACH
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_no_array_is_kept_alive(loop, transform):
    assert is_freed(loop, transform)


# A loop without a bound has no gradient in reverse mode.
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "while"])
def test_no_array_is_kept_alive_by_a_gradient(name):
    assert is_freed(LOOPS[name], jax.grad)


def is_freed(loop, transform):
    """Whether the array that the step of a loop closes over is freed after a call."""

    def run():
        captured = jnp.full((3,), 0.5)
        f = transform(
            lambda x: loop(lambda c: (c[0] * captured[0], c[1] + 1), (x, 0))[0]
        )
        assert jnp.isfinite(f(2.0 * jnp.ones(())))
        return weakref.ref(captured)

    reference = run()
    jax.clear_caches()
    gc.collect()
    return reference() is None


@EACH
def test_jax_finds_no_leaked_tracers(loop):
    def f(w):
        return loop(lambda c: (w @ c[0], c[1] + 1), (jnp.ones(2), 0))

    with jax.checking_leaks():
        assert jax.jit(f)(jnp.eye(2))[1] == 3


@EACH
def test_effects_of_the_unused_trace_do_not_happen(loop, capfd):
    def step(c):
        jax.debug.print("number {}", c[1])
        return c[0], c[1] + 1

    jax.block_until_ready(jax.jit(lambda x: loop(step, (x, 0)))(jnp.ones(())))
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")
    assert [line for line in lines if line] == [f"number {i}" for i in range(3)]
