"""Both ways to ask whether a transformation is under way agree with what is so."""

import importlib
import threading

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat import tracing as trace_state

WAYS = {
    "in use": trace_state.at_top_level,
    "by opaque state": trace_state.by_opaque_state(),
    "without the private name": trace_state.find_top_level(object()),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def at_top_level(request):
    return request.param


def test_plain_python_is_at_top_level(at_top_level):
    assert at_top_level()
    found = []
    thread = threading.Thread(target=lambda: found.append(at_top_level()))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.vmap(f)(x),
        lambda f, x: jax.vjp(f, x),
        lambda f, x: jax.linearize(f, x),
        lambda f, x: jax.checkpoint(f)(x),
        lambda f, x: jax.eval_shape(f, x),
        lambda f, x: jax.lax.map(f, x),
    ],
)
def test_inside_a_transformation_is_not(at_top_level, transform):
    found = []

    def f(x):
        found.append(at_top_level())
        return x * 2

    transform(f, jnp.ones(3))
    assert found and not any(found)
    assert at_top_level()


def test_disabled_jit_is_no_transformation(at_top_level):
    found = []
    with jax.disable_jit():
        jax.jit(lambda x: found.append(at_top_level()))(1.0)
    assert found == [True]


@pytest.mark.parametrize("config", ["jax._src.config", "object"])
def test_context_is_what_a_trace_depends_on(config):
    found = importlib.import_module(config) if config != "object" else object()
    context = trace_state.find_context(found)
    before = context()
    with jax.enable_x64(True):
        assert context() != before
    assert context() == before


def test_settings_have_names_and_are_those_of_the_moment():
    assert trace_state.settings()["jax_enable_x64"] is False
    with jax.enable_x64(True):
        assert trace_state.settings()["jax_enable_x64"] is True


@pytest.mark.parametrize(
    ("use", "is_within"),
    [
        (lambda f: f(jnp.ones(2)), False),
        (lambda f: jax.vmap(f)(jnp.ones(2)), False),
        (lambda f: jax.grad(f)(1.0), False),
        (lambda f: jax.jit(f)(jnp.ones(2)), True),
        (lambda f: jax.jit(jax.vmap(f))(jnp.ones(2)), True),
        (lambda f: jax.vmap(jax.jit(f))(jnp.ones(2)), True),
        (lambda f: jax.lax.map(f, jnp.ones(2)), True),
        (lambda f: jax.eval_shape(f, jnp.ones(2)), True),
    ],
)
def test_whole_programs_are_told_from_what_runs_at_once(use, is_within):
    found = []

    def f(x):
        found.append(trace_state.within_program())
        return x

    use(f)
    assert set(found) == {is_within}


def test_operations_of_one_trace_are_told():
    current = trace_state.current_trace
    found = []

    def f(x):
        found.append(current() is current())
        outer = current()
        jax.lax.cond(x > 0, lambda: found.append(current() is outer), lambda: None)
        return x

    jax.jit(f)(1.0)
    assert found == [True, False]
    assert current() is current()


def test_without_the_private_name_no_two_operations_are_of_one_trace():
    current = trace_state.find_trace(object())
    assert current() is not current()


def test_scope_is_that_of_jax():
    def scoped(x):
        with trace_state.scope_type("name")("name"):
            return jnp.sin(x)

    assert "name/sin" in jax.jit(scoped).lower(1.0).as_text(debug_info=True)
