"""The compiler option that saves memory is known, and one that is not does no harm."""

import jax

from equinox_like._compat import compiled as scheduler


def temporaries(options):
    def draw(key):
        return [jax.random.normal(k, (64, 64)) for k in jax.random.split(key, 8)]

    jitted = jax.jit(draw, compiler_options=options)
    return (
        jitted.lower(jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes
    )


def test_the_option_saves_memory():
    options = scheduler.least_memory("cpu")
    assert options
    assert temporaries(options) < temporaries({}) / 2


def test_an_option_that_is_not_known_is_left_out(monkeypatch):
    monkeypatch.setattr(scheduler, "_OPTION", {"xla_no_such_option": "1"})
    assert scheduler.least_memory("cpu") == {}
    assert scheduler.least_memory("gpu") == {}
