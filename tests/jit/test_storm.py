"""A function that is compiled again and again warns once, and says how to stop it."""

import enum
import functools
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

X = np.ones(3, np.float32)


def warnings_of(run) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [x for x in caught if issubclass(x.category, eqx.RetraceWarning)]


def storm(argument, number, **options) -> list[warnings.WarningMessage]:
    """The warnings of `number` calls, with `argument(i)` in the i-th."""

    @eqx.filter_jit(**options)
    def step(x, a):
        return jnp.sum(x)

    def run():
        for i in range(number):
            step(jnp.ones(2), argument(i))

    return warnings_of(run)


class Model(eqx.Module):
    weight: Any = 1.0
    rate: Any = eqx.field(static=True, default=0.1)


class Plain:
    pass


class Kind(enum.IntEnum):
    A, B, C, D, E, F, G, H, I, J = range(10)  # noqa: E741


@pytest.mark.parametrize(
    ("argument", "place"),
    [
        (lambda i: 0.1 * 0.9**i, "`a`"),
        (lambda i: i, "`a`"),
        (lambda i: 1 if i == 0 else 1.0 / i, "`a`"),
        (lambda i: f"step {i}", "`a`"),
        (lambda i: {"x": X, "rate": 0.1 * i}, r"`a\['rate'\]`"),
        (lambda i: Model(X, 0.1 * i), r"`a\.rate`"),
        (lambda i: [Model(X), Model(0.1 * i)], r"`a\[1\]\.weight`"),
        (lambda i: Model(X, (3, i)), r"`a\.rate`"),
        (lambda i: lambda x: x, "`a`"),
        (lambda i: functools.partial(lambda x, y: x, i), "`a`"),
        (lambda i: Model(X, jax.jit(lambda x: x)), r"`a\.rate`"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"donate": "arrays"}])
def test_the_eighth_value_at_the_same_place_is_warned_of(argument, place, options):
    assert storm(argument, 8, **options) == []
    (warning,) = storm(argument, 20, **options)
    assert warning.filename == __file__
    with pytest.raises(AssertionError, match=place):
        raise AssertionError(str(warning.message))
    assert "`step` is retraced. `a" in str(warning.message)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (lambda i: np.ones(i + 1), r"`a` was an array .*\[16\].*`bucketed`"),
        (lambda i: Model(np.ones((2, i + 1))), r"`a\.weight` was an array"),
        (lambda i: [X] * (i + 1), "`a` was a list of length 16"),
        (lambda i: {f"k{i}": X}, "`a` was a dict"),
        (lambda i: Plain(), "`a` was the static value <.*Plain"),
    ],
)
def test_the_sixteenth_shape_or_structure_is_warned_of(argument, text):
    assert storm(argument, 16) == []
    (warning,) = storm(argument, 20)
    with pytest.warns(match=text):
        warnings.warn(warning.message, stacklevel=1)


def test_the_fix_of_a_number_is_an_array():
    (warning,) = storm(lambda i: 0.1 * i, 9)
    assert "was the static value 0.7" in str(warning.message)
    assert "pass `jnp.asarray(...)`" in str(warning.message)
    assert storm(lambda i: jnp.asarray(0.1 * i, jnp.float32), 40) == []


FUNCTIONS = [jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.log, jnp.abs, jnp.tanh, jnp.sqrt]
FUNCTIONS += [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.elu, jax.nn.celu, max, min]
DTYPES = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16"]
DTYPES += ["float32", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2", "int4"]


@pytest.mark.parametrize(
    "argument",
    [
        lambda i: list(Kind)[i % 10],
        lambda i: bool(i % 2),
        lambda i: FUNCTIONS[i % len(FUNCTIONS)],
        lambda i: jnp.zeros(2, DTYPES[i % len(DTYPES)]),
        lambda i: (["train", "eval"][i % 2], np.ones(i // 2 + 1)),  # 15 shapes
        lambda i: (i % 4, np.ones(i // 4 + 1)),
        lambda i: type(f"T{i}", (), {}),
    ],
)
def test_values_of_which_there_are_few_are_not_warned_of(argument):
    assert storm(argument, 30) == []


def test_what_is_compiled_as_a_part_of_another_program_is_not_counted():
    inner = eqx.filter_jit(lambda x, i: x + i)

    @eqx.filter_jit
    def outer(x):
        for i in range(20):
            x = inner(x, i)
        return eqx.filter_scan(lambda x, _: (inner(x, 0.5), None), x, None, length=3)

    assert warnings_of(lambda: outer(jnp.ones(2))) == []
    assert warnings_of(lambda: inner(jnp.ones(2), 30)) == []


@pytest.mark.parametrize("transform", [eqx.filter_grad, eqx.filter_vmap])
def test_a_storm_under_an_eager_transformation_is_warned_of(transform):
    f = eqx.filter_jit(lambda x, i: jnp.sum(x * i))

    def call(i):
        transform(lambda x: f(x, i))(jnp.ones(2))

    (warning,) = warnings_of(lambda: list(map(call, range(12))))
    assert warning.filename == __file__


def test_stages_and_explanations_are_not_counted():
    f = eqx.filter_jit(lambda x, i: x * i)

    def run():
        for i in range(20):
            f.lower(jnp.ones(i + 1), i)
            f.eval_shape(jnp.ones(i + 1), i)
            f.explain(jnp.ones(i + 1), i)
        f(jnp.ones(1), 50)

    assert warnings_of(run) == []


def test_methods_and_functions_of_one_class_are_counted_together():
    class Net(eqx.Module):
        weight: jax.Array

        @eqx.filter_jit
        def step(self, rate):
            return self.weight * rate

    (warning,) = warnings_of(
        lambda: [Net(jnp.ones(2)).step(0.1 * i) for i in range(12)]
    )
    assert "`rate` was" in str(warning.message)


def test_what_caused_a_retrace_is_not_kept_alive():
    class Config:
        pass

    f = eqx.filter_jit(lambda x, c: x)
    configs = [Config() for _ in range(10)]
    for i in range(10):
        f(jnp.ones(2), configs[i])
    references = [weakref.ref(c) for c in configs]
    del configs
    f.clear_cache()
    gc.collect()
    assert [r() for r in references] == [None] * 10


def test_an_error_in_a_repr_is_not_the_callers():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no")

    assert storm(lambda i: Odd(), 20) == []


def test_threads_cause_one_warning():
    f = eqx.filter_jit(lambda x, i: x * i)

    def run():
        threads = [
            threading.Thread(
                target=lambda k=k: [f(jnp.ones(2), 8 * k + i) for i in range(8)]
            )
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(warnings_of(run)) == 1


def test_it_can_be_switched_off():
    code = (
        "import equinox_like as eqx, jax.numpy as jnp\n"
        "f = eqx.filter_jit(lambda x, i: x)\n"
        "for i in range(20): f(jnp.ones(2), i)"
    )
    for value, number in [("on", 1), ("off", 0)]:
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "EQX_RETRACE_WARNING": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stderr.count("RetraceWarning:") == number
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", eqx.RetraceWarning)
        f = eqx.filter_jit(lambda x, i: x)
        for i in range(20):
            f(jnp.ones(2), i)
