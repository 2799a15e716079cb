"""The compiler option that saves memory."""

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


def test_other_platforms_need_no_option():
    assert scheduler.least_memory("gpu") == {}
