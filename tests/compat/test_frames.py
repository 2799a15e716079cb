"""The user's lines within the innermost function that JAX traces as a whole."""

import jax
import jax.numpy as jnp

from equinox_like._compat import frames


def names(found):
    return [name for _, _, name in found]


def test_frames_are_those_of_the_innermost_trace(monkeypatch):
    found = []

    def look(x):
        found.append(frames.traced_frames(()))
        return x

    def inner(x):
        return jax.vmap(look)(x)

    def outer(x):
        look(x)
        return jax.jit(inner)(x)

    jax.jit(outer)(jnp.ones(2))
    assert list(map(names, found)) == [["outer", "look"], ["inner", "look"]]
    (filename, line, _), *_ = found[0]
    assert filename == __file__
    assert line == outer.__code__.co_firstlineno + 1
    look(1)
    assert found[-1] == ()

    monkeypatch.setattr(frames, "_TRACER", "gone")
    jax.jit(lambda x: outer(x))(jnp.ones(2))
    assert found[-1] == ()


def test_files_are_passed_over():
    found = []
    jax.jit(lambda x: found.append(frames.traced_frames((__file__,))))(1)
    assert found == [()]
