"""What JAX keeps of a failed call, with the private names and without them."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like._compat import errors
from equinox_like._compat.errors import forget_calls
from equinox_like._jit import checks


class Failing:
    """Raises as often as it is told while it is traced."""

    def __init__(self, times):
        self.times = times

    def __call__(self, x):
        if self.times:
            self.times -= 1
            raise ValueError("not yet")
        return x + 1


def calls_within_jax(function, *args):
    """The functions of JAX, in Python, that run in a second call."""
    found = []

    def look(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("jax."):
            found.append(frame.f_code.co_name)

    function(*args)
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return found


def test_jax_takes_the_slow_path_after_a_failure_and_can_be_made_to_forget():
    f = jax.jit(Failing(1))
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="not yet"):
        f(x)
    assert calls_within_jax(f, x), "JAX has been repaired: the shim may go"
    forget_calls(f)
    assert not calls_within_jax(f, x)
    assert f(x).tolist() == [2, 2, 2]


def test_without_the_private_name_nothing_happens():
    forget_calls(types.SimpleNamespace())


@pytest.mark.parametrize("donate", ["none", "arrays", "warn", "strict", ("x",)])
def test_calls_of_filter_jit_are_quick_after_a_failure(donate):
    def calls(times):
        f = eqx.filter_jit(Failing(times), donate=donate)
        for _ in range(times):
            with pytest.raises(ValueError, match="not yet"):
                f(jnp.ones(3))
        xs = [jnp.ones(3) + i for i in range(3)]
        assert f(xs.pop()).tolist() == [4, 4, 4]
        return calls_within_jax(lambda: f(xs.pop()))

    calls(0)  # the first arrays that are made like this do not share their sharding
    assert calls(1) == calls(0)
    assert len(calls(0)) < 10


def fail_on_all_devices():
    f = eqx.filter_pmap(lambda x: eqx.error_if(x, x < 0, "negative"))
    with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
        f(-jnp.ones(4))


def test_the_error_does_not_come_again():
    fail_on_all_devices()
    jax.effects_barrier()


def test_without_the_private_name_it_does(monkeypatch):
    monkeypatch.setattr(checks, "runtime_tokens", None)
    fail_on_all_devices()
    with pytest.raises(jax.errors.JaxRuntimeError, match="negative"):
        jax.effects_barrier()
    errors.forget_failed(errors.runtime_tokens)


def test_tokens_of_other_programs_are_kept():
    class Token:
        def __init__(self, fails):
            self.fails = fails

        def block_until_ready(self):
            if self.fails:
                raise RuntimeError

    good, bad = Token(False), Token(True)
    known = types.SimpleNamespace(
        current_tokens={0: bad}, output_runtime_tokens={1: good, 2: bad}
    )
    errors.forget_failed(known)
    assert known.current_tokens == {} and known.output_runtime_tokens == {1: good}
