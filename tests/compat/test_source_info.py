"""Which frame JAX takes for the user's: with the private registries and without them."""

import types

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat import source_info


@pytest.mark.parametrize("name", source_info._REGISTRIES)
def test_jax_has_what_is_asked_for(name):
    registry = source_info.private(name)
    assert source_info.find(registry) is registry.register_exclusion


def test_without_them_nothing_is_excluded_and_nothing_fails(monkeypatch):
    for registry in (types.SimpleNamespace(), None):
        monkeypatch.setattr(source_info, "private", lambda name, r=registry: r)
        source_info.pass_over(["/nowhere/"])
    assert source_info.private("no_such_file") is None


def test_error_says_whether_jax_has_removed_frames():
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda x: jnp.add(x, "text"))(1.0)
    assert source_info.was_cut(caught.value)
    assert not source_info.was_cut(TypeError())
