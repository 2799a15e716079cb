"""After a check has failed, JAX raises its error once: with the private name."""

import types

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like._compat import tokens
from equinox_like._jit import checks


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
    tokens.forget_failed(tokens.runtime_tokens)


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
    tokens.forget_failed(known)
    assert known.current_tokens == {} and known.output_runtime_tokens == {1: good}
