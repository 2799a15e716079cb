"""A registry of our own where JAX allows one, and JAX's where it does not."""

import os
import subprocess
import sys

import jax.tree_util as jtu
import pytest

from equinox_like._compat import registry
from equinox_like._tree.registry import OwnRegistry, PublicRegistry


def test_this_jax_allows_one():
    assert registry.new_registry() is not None


@pytest.mark.parametrize("what", ["constructor", "behaviour"])
def test_without_what_is_private_there_is_none(monkeypatch, what):
    def refuse():
        raise TypeError("other parameters")

    class Other:
        def register_node(self, *_):
            pass

        def flatten(self, tree):
            return jtu.tree_flatten(tree)

    monkeypatch.setattr(registry, "_make", refuse if what == "constructor" else Other)
    assert registry.new_registry() is None


@pytest.mark.parametrize("kind", ["own", "public"])
def test_environment_chooses(kind):
    code = "import equinox_like._tree.registry as r; print(type(r.registry).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"EQX_REGISTRY": kind},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = OwnRegistry if kind == "own" else PublicRegistry
    assert done.stdout.strip() == wanted.__name__
