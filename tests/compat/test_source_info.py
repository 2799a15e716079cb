"""Which frame JAX takes for the user's: with the private registry and without it."""

import types

from equinox_like._compat import source_info


def test_jax_has_what_is_asked_for():
    registry = source_info._source_info()
    assert source_info.find(registry) is registry.register_exclusion


def test_without_it_nothing_is_excluded_and_nothing_fails(monkeypatch):
    monkeypatch.setattr(source_info, "_source_info", lambda: types.SimpleNamespace())
    source_info.pass_over(["/nowhere/"])
    monkeypatch.setattr(source_info, "_source_info", lambda: None)
    source_info.pass_over(["/nowhere/"])
