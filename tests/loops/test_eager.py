"""Loops and branches at top level: compiled once for each function."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

ROWS = jnp.arange(3.0)
ONE = jnp.asarray(1.0)
factor = 2.0


def calls_of(f):
    """A call of each loop with `f`, a function of one array, and what it returns."""

    def step(carry, x):
        return f(carry), x

    def ends(carry):
        return carry < 8

    def body(_, carry):
        return f(carry)

    def same(x):
        return x

    return {
        "scan": lambda: eqx.filter_scan(step, ONE, ROWS)[0],
        "map": lambda: eqx.filter_map(f, ROWS)[1],
        "while": lambda: eqx.filter_while_loop(ends, f, ONE),
        "checkpointed": lambda: eqx.filter_while_loop(
            ends, f, ONE, max_steps=9, kind="checkpointed"
        ),
        "fori": lambda: eqx.filter_fori_loop(0, 3, body, ONE),
        "cond": lambda: eqx.filter_cond(ONE > 0, f, same, ONE),
        "switch": lambda: eqx.filter_switch(jnp.asarray(1), [same, f], ONE),
    }


NAMES = list(calls_of(lambda x: x))


@pytest.mark.parametrize("name", NAMES)
def test_function_is_traced_once(name):
    traces = []

    def f(x):
        traces.append(x)
        return 2 * x

    call = calls_of(f)[name]
    first = call()
    count = len(traces)
    assert count and call() == first == (2 if name in ("map", "cond", "switch") else 8)
    assert len(traces) == count
    with jax.disable_jit():
        assert call() == first
    assert len(traces) > count
    eqx.clear_caches()
    count = len(traces)
    assert call() == first and len(traces) > count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_cycle", [False, True])
def test_all_is_freed_with_the_function(name, in_cycle):
    def call():
        weights, hooks = jnp.ones(7), []

        def f(x):
            return x * (1 + weights[0] + len(hooks))

        if in_cycle:  # a list has no weak references
            hooks.append(f)
        calls_of(f)[name]()
        return weakref.ref(weights), weakref.ref(f)

    references = call()
    gc.collect()
    if in_cycle:  # the collector has freed the function, and then what was compiled
        gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_branch_that_is_jitted_is_kept_like_a_plain_one():
    traces = []

    def plain(x):
        traces.append(x)
        return x

    jitted = jax.jit(lambda x: 2 * x)
    assert eqx.filter_cond(ONE > 0, jitted, plain, ONE) == 2
    count = len(traces)
    assert count and eqx.filter_cond(ONE > 0, jitted, plain, ONE) == 2
    assert len(traces) == count
    reference = weakref.ref(jitted)
    del jitted
    gc.collect()
    assert reference() is None


def test_variable_that_a_function_reads_is_a_constant():
    step = 1.0

    def add(carry):
        return carry + step

    assert eqx.filter_cond(ONE > 0, add, add, ONE) == 2
    step = 10.0
    assert eqx.filter_cond(ONE > 0, add, add, ONE) == 2
    eqx.clear_caches()
    assert eqx.filter_cond(ONE > 0, add, add, ONE) == 11


def test_static_values_select_what_is_compiled():
    traces = []

    def step(carry, x):
        traces.append(x)
        state, name = carry
        return (state + len(name), name), None

    for name, expected in [("a", 3), ("ab", 6), ("a", 3)]:
        (total, same), _ = eqx.filter_scan(step, (0 * ONE, name), ROWS)
        assert total == expected and same == name
    assert len(traces) == 2


def test_what_has_no_hash_is_passed_on():
    class NoHash:
        __hash__ = None

    x, y = eqx.filter_cond(
        ONE > 0, lambda x, y: (x, y), lambda x, y: (-x, y), ONE, NoHash
    )
    assert x == 1 and y is NoHash
    thing = NoHash()
    out = eqx.filter_scan(lambda c, x: (c, x), (ONE, thing), ROWS)[0][1]
    assert out is thing


def test_errors_name_the_parameters():
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(RuntimeError, match=r"`init\['x'\]` .*deleted"):
        eqx.filter_scan(lambda c, x: (c, x), {"x": x}, ROWS)


def test_numbers_of_steps_may_be_arrays():
    two = jnp.array(2)
    assert eqx.filter_scan(lambda c, _: (c + 1, None), ONE, None, two)[0] == 3
    options = {"kind": "checkpointed", "max_steps": two}
    assert eqx.filter_while_loop(lambda c: c < 9, lambda c: c + 1, ONE, **options) == 3


@pytest.mark.parametrize(
    "loop",
    [
        lambda n: eqx.filter_scan(lambda c, _: (c, None), ONE, None, n),
        lambda n: eqx.filter_while_loop(lambda c: c < 9, lambda c: c, ONE, max_steps=n),
    ],
)
def test_number_of_steps_that_is_traced_is_named(loop):
    with pytest.raises(jax.errors.TracerIntegerConversionError, match="argument n"):
        jax.jit(loop)(2)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_options_may_be_numbers_of_numpy(wrap, without_type_checks):
    def step(carry, x):
        return carry + x, carry

    def scan(**options):
        return wrap(lambda: eqx.filter_scan(step, ONE, ROWS, **options))()

    assert eqx.tree_equal(scan(reverse=np.True_), scan(reverse=True))
    for options in ({"unroll": np.True_}, {"checkpoint": np.int64(2)}):
        assert eqx.tree_equal(scan(**options), scan())
    out = wrap(lambda: eqx.filter_fori_loop(0, 3, step_of_fori, ONE, unroll=np.True_))()
    assert out == 4
    loop = wrap(
        lambda: eqx.filter_while_loop(
            lambda x: x < 8, double, ONE, kind="checkpointed", checkpoints=np.int64(2)
        )
    )
    assert loop() == 8


def step_of_fori(_, carry):
    return carry + 1


def double(x):
    return 2 * x


@pytest.mark.parametrize("number", [0, 0.5, "two"])
def test_number_of_checkpoints_is_a_positive_integer(number, without_type_checks):
    with pytest.raises((TypeError, ValueError), match="`checkpoint` must be") as error:
        eqx.filter_scan(lambda c, x: (c, x), ONE, ROWS, checkpoint=number)
    assert isinstance(error.value, TypeError) == (number == 0.5)
    message = "`checkpoints` must be (an integer|at least 1); got "
    with pytest.raises((TypeError, ValueError), match=message):
        eqx.filter_while_loop(
            lambda x: x < 8, double, ONE, kind="checkpointed", checkpoints=number
        )


def test_number_of_checkpoints_may_be_in_an_array(without_type_checks):
    two = jnp.asarray(2)
    last, _ = eqx.filter_scan(lambda c, x: (c + x, x), ONE, ROWS, checkpoint=two)
    assert last == ONE + ROWS.sum()
    out = eqx.filter_while_loop(
        lambda x: x < 8, double, ONE, kind="checkpointed", checkpoints=two
    )
    assert out == 8
