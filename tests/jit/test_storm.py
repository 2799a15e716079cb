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


def combinations(i):
    """Different arguments in each call, each place with few values."""
    places = [X if i >> k & 1 else None for k in range(5)]
    return places if i < 32 else [*places, X]


WEAK = [
    lambda: jnp.array(1, jnp.float32),
    lambda: jnp.array(1.0),
    lambda: 1,
    lambda: True,
]


@pytest.mark.parametrize(
    ("argument", "place"),
    [
        (lambda i: type(f"T{i}", (), {}), "`a` was the static value <class"),
        (
            lambda i: type(f"T{i}", (eqx.Module,), {"__annotations__": {}})(),
            "`a` was an? T",
        ),
        (lambda i: np.ones(i // 11 + 1, DTYPES[i % 11]), "They differ at `a`"),
        (combinations, r"They differ at (`a\[\d\]`(, )?){5}"),
        (
            lambda i: [WEAK[i // 4**k % 4]() for k in range(3)],
            r"`a\[0\]`.*`a\[1\]`",
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"donate": "arrays"}])
def test_thirty_two_traces_are_warned_of_whatever_differs(argument, place, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert storm(argument, 31, **options) == []
        (warning,) = storm(argument, 40, **options)
    text = str(warning.message)
    assert "This is trace 32 of the function, and each of them is compiled" in text
    assert "`step` is retraced." in text and "EQX_RETRACE_WARNING=off" in text
    assert warning.filename == __file__
    with pytest.raises(AssertionError, match=place):
        raise AssertionError(text)


def test_traces_of_stages_and_of_other_programs_are_not_counted_in_total():
    step = eqx.filter_jit(lambda x, a: jnp.sum(x))

    def run():
        for i in range(40):
            step.lower(X, type(f"T{i}", (), {}))
            jax.jit(lambda x, i=i: step(x, type(f"U{i}", (), {})))(X)
        for i in range(30):
            step(X, type(f"V{i}", (), {}))

    assert warnings_of(run) == []


def test_eighth_function_of_the_same_code_is_warned_of():
    def epochs(number):
        for epoch in range(number):

            @eqx.filter_jit
            def step(x):
                return x + epoch  # noqa: B023

            assert step(step(X))[0] == 1 + 2 * epoch

    code = next(x for x in epochs.__code__.co_consts if hasattr(x, "co_name"))
    (warning,) = warnings_of(lambda: epochs(20))
    text = str(warning.message)
    assert f"({__file__}:{code.co_firstlineno})" in text
    assert (
        "`step` is a new function with the code of 7 functions that were compiled"
        in text
    )
    assert (
        "define it once, outside of the loop" in text and "EQX_RETRACE_WARNING" in text
    )
    assert warning.filename == __file__


def wrapped(function):
    return eqx.filter_jit(function)(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda i: wrapped(lambda x: x),
        lambda i: wrapped(lambda x: x * i),
        lambda i: wrapped(functools.partial(lambda n, x: x * n, i)),
        lambda i: wrapped(eqx.filter_vmap(lambda x: x * i)),
        lambda i: wrapped(functools.wraps(wrapped)(lambda x: x)),
        lambda i: eqx.filter_jit(lambda x: x, donate="arrays")(jnp.ones(2)),
        lambda i: HELD.append(eqx.filter_jit(lambda x: x)) or HELD[-1](X),
    ],
)
def test_functions_of_the_same_code_are_counted_if_they_were_compiled(call):
    assert warnings_of(lambda: [call(i) for i in range(7)]) == []
    (warning,) = warnings_of(lambda: [call(i) for i in range(7)])
    assert "7 functions that were compiled before" in str(warning.message)
    assert warnings_of(lambda: [call(i) for i in range(20)]) == []


HELD: list[Any] = []


class Agent:
    def step(self, x):
        return x


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: eqx.filter_jit(Agent.step),  # one function: one program
        lambda: eqx.filter_jit(Agent().step),  # as many agents, of one method
        lambda: eqx.filter_jit(eqx.nn.Identity()),
        lambda: eqx.filter_jit(eqx.nn.Identity().__call__),
        lambda: eqx.filter_jit(jnp.sin),
        lambda: eqx.filter_jit(lambda x: x).lower(X).compile(),
    ],
)
def test_one_function_that_is_wrapped_many_times_is_not_warned_of(wrap):
    first = wrap()
    args = (Agent(), X) if getattr(first, "__wrapped__", None) is Agent.step else (X,)
    assert warnings_of(lambda: [wrap()(*args) for _ in range(20)]) == []


def test_functions_that_are_not_compiled_are_not_counted():
    def make(i):
        return eqx.filter_jit(lambda x: x * i)

    assert warnings_of(lambda: [make(i) for i in range(20)]) == []
    assert warnings_of(lambda: [make(i).eval_shape(X) for i in range(20)]) == []
    assert (
        warnings_of(lambda: [jax.jit(lambda x, i=i: make(i)(x))(X) for i in range(20)])
        == []
    )
    assert warnings_of(lambda: [make(i)(X) for i in range(7)]) == []
    assert len(warnings_of(lambda: make(7)(X))) == 1


def test_cleared_caches_and_the_next_test_start_a_new_count(monkeypatch):
    def make(i):
        return eqx.filter_jit(lambda x: x * i)

    step = make(0)
    for clear in (step.clear_cache, eqx.clear_caches):
        for _ in range(20):  # the same function is not another one
            assert warnings_of(lambda: step(X)) == []
            clear()
    for i in range(40):
        if i % 7 == 0:
            eqx.clear_caches()
        assert warnings_of(lambda i=i: make(i)(X)) == []
    for i in range(40):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test {i // 7}")
        assert warnings_of(lambda i=i: make(i)(X)) == []


def test_counted_functions_and_their_code_are_freed():
    from equinox_like._jit.retrace import _functions

    scope: dict[str, Any] = {}
    exec("def make(i):\n return lambda x: x * i", scope)
    arrays, functions = [], []
    for _ in range(5):
        array = jnp.ones(2)
        function = scope["make"](array)
        eqx.filter_jit(function)(X[:2])
        arrays.append(weakref.ref(array))
        functions.append(weakref.ref(function))
    code = weakref.ref(function.__code__)
    number = len(_functions)
    del array, function
    gc.collect()
    assert not any(ref() for ref in [*arrays, *functions])
    scope.clear()
    gc.collect()
    assert code() is None and len(_functions) == number - 1


def test_functions_of_the_same_code_are_counted_in_all_threads():
    def call(i):
        eqx.filter_jit(lambda x: x * i)(X)

    def run():
        threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(warnings_of(run)) == 1
