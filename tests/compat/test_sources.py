"""The user's lines, with JAX's registries of files to pass over and without them."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from equinox_like._compat import errors


@pytest.mark.parametrize("name", errors._REGISTRIES)
def test_jax_has_what_is_asked_for(name):
    registry = errors.private(name)
    assert errors.find_exclusion(registry) is registry.register_exclusion


def test_without_them_nothing_is_excluded_and_nothing_fails(monkeypatch):
    for registry in (types.SimpleNamespace(), None):
        monkeypatch.setattr(errors, "private", lambda name, r=registry: r)
        errors.pass_over(["/nowhere/"])
    assert errors.private("no_such_file") is None


def test_error_says_whether_jax_has_removed_frames():
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda x: jnp.add(x, "text"))(1.0)
    assert errors.was_cut(caught.value)
    assert not errors.was_cut(TypeError())


def names(found):
    return [name for _, _, name in found]


def test_frames_are_those_of_the_innermost_trace(monkeypatch):
    found = []

    def look(x):
        found.append(errors.traced_frames(())[0])
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

    monkeypatch.setattr(errors, "_TRACER", "gone")
    jax.jit(lambda x: outer(x))(jnp.ones(2))
    assert found[-1] == ()


def test_files_are_passed_over():
    found = []
    jax.jit(lambda x: found.append(errors.traced_frames((__file__,))))(1)
    assert found == [((), False)]


def test_body_of_a_shard_map_is_told_from_what_is_traced_within():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    found = []

    def look(x):
        found.append(errors.traced_frames(())[1])
        return x

    for body, directly in (
        (look, True),
        (jax.vmap(look), True),
        (lambda x: jax.grad(lambda x: look(x).sum())(x), True),
        (jax.jit(look), False),
        (lambda x: jax.lax.cond(x.sum() > 0, look, lambda x: x, x), False),
    ):
        found.clear()
        spec = PartitionSpec("d")
        f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
        jax.jit(f)(jnp.ones(2))
        assert set(found) == {directly}
