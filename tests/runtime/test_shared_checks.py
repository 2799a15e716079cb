"""The checks of a program share one function and one callback."""

import gc
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.interpreters import mlir

import equinox_like as eqx
from equinox_like import internal as eqxi
from equinox_like._compat import host
from equinox_like._compat.primitives import Primitive
from equinox_like._runtime.error_if import Check


def checked(count, first=0, on_error="raise"):
    def f(x):
        for i in range(first, first + count):
            x = jnp.sin(eqx.error_if(x, x < -i, f"check {i}", on_error=on_error)) - 1
        return x

    return f


def raises(message):
    return pytest.raises(eqx.EquinoxRuntimeError, match=message)


FORMS = {
    "plain": lambda f: f,
    "vmap": jax.vmap,
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0],
    "while": lambda f: lambda x: lax.fori_loop(0, x.shape[0], lambda _, c: f(c), x),
    "cond": lambda f: lambda x: lax.cond(x.sum() > 9, f, lambda x: x, x),
    "checkpoint": jax.checkpoint,
    "gradient of a scan": lambda f: jax.grad(
        lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0].sum()
    ),
    "internal scan": lambda f: jax.grad(
        lambda x: eqxi.scan(lambda c, _: (f(c), None), x, None, 3, kind="checkpointed")[
            0
        ].sum()
    ),
}


@pytest.mark.parametrize("mode", ["raise", "nan"])
@pytest.mark.parametrize("form", FORMS)
def test_one_function_serves_all_checks_of_arrays_of_the_same_types(form, mode):
    few, many = (
        jax.jit(FORMS[form](checked(n, on_error=mode)))
        .lower(jnp.ones((2, 2)))
        .as_text()
        for n in (5, 20)
    )
    assert many.count("stablehlo.custom_call") == few.count("stablehlo.custom_call")
    assert many.count("func.func") == few.count("func.func")
    assert many.count("stablehlo.case") == few.count("stablehlo.case")


def test_twenty_checks_of_a_scalar_take_few_lines():
    text = jax.jit(checked(20)).lower(jnp.ones(())).as_text()
    assert text.count("stablehlo.custom_call") == 1
    assert len(text.splitlines()) < 201  # as many as Equinox takes for equal messages


@pytest.mark.parametrize("form", [name for name in FORMS if name != "cond"])
def test_the_message_is_that_of_the_check_that_fails(form):
    for i in (0, 7, 13):
        f = eqx.filter_jit(FORMS[form](lambda x, i=i: broken(x, i)))
        with raises(f"check {i}\n"):
            f(jnp.ones((2, 2)))


def broken(x, broken_one):
    for i in range(14):
        x = eqx.error_if(x, (x < 5) & (i == broken_one), f"check {i}")
    return x**3


def test_checks_of_all_types_of_arrays_have_numbers_of_their_own():
    @eqx.filter_jit
    def f(xs, bad):
        return [
            eqx.error_if(x, jnp.asarray(i) == bad, f"array {i}")
            for i, x in enumerate(xs)
        ]

    key = jax.random.key(0)
    xs = [jnp.ones(()), jnp.ones(3), jnp.ones(3, int), key, jnp.ones(()), (key, key)]
    f(xs, -1)
    for i in range(len(xs)):
        with raises(f"array {i}\n"):
            f(xs, i)


def test_failed_elements_are_those_of_the_check_that_fails():
    f = eqx.filter_jit(jax.vmap(lambda x: checked(3)(x)))
    with raises("2 of 3 elements of a batch failed.\nBatch element 0: check 0\n"):
        f(jnp.asarray([-1.0, 1.0, -1.0]))
    with raises("1 of 3 elements of a batch failed.\nBatch element 1: check 1\n"):
        f(jnp.asarray([3.0, 1.5 * jnp.pi, 3.0]))


def test_frames_are_those_of_the_check_that_fails():
    def first(x):
        return eqx.error_if(x, x < 0, "first")

    def second(x):
        return eqx.error_if(x, x < 1, "second")

    f = eqx.filter_jit(lambda x: second(first(x)))
    for x, inside, outside in [(-1.0, "first", "second"), (0.5, "second", "first")]:
        with raises(inside) as info:
            f(jnp.asarray(x))
        assert f", in {inside}\n" in str(info.value)
        assert f", in {outside}\n" not in str(info.value)


def test_programs_that_share_a_traced_function_have_numbers_of_their_own():
    inner = jax.jit(checked(2, first=3))
    one = eqx.filter_jit(lambda x: inner(x))
    two = eqx.filter_jit(lambda x: inner(checked(3, first=7)(x)))
    one(jnp.ones(()))
    two(jnp.ones(()))
    with raises("check 3\n"):
        one(jnp.asarray(-4.0))
    with raises("check 7\n"):
        two(jnp.asarray(-8.0))


def test_threads_get_their_own_messages():
    functions = [eqx.filter_jit(checked(3, first=10 * i)) for i in range(4)]
    found = {}

    def run(i):
        for _ in range(20):
            try:
                functions[i](jnp.asarray(-10.0 * i - 1))
            except eqx.EquinoxRuntimeError as e:
                found.setdefault(i, set()).add(
                    str(e).partition("Error: ")[2].split()[1]
                )

    threads = [threading.Thread(target=run, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: {str(10 * i)} for i in range(4)}


def checks_alive():
    gc.collect()
    return sum(isinstance(x, Check) for x in gc.get_objects())


def test_checks_live_as_long_as_their_programs():
    jax.clear_caches()
    before = checks_alive()
    compiled = jax.jit(checked(9)).lower(jnp.ones(())).compile()
    jax.clear_caches()
    assert checks_alive() == before + 9
    with pytest.raises(Exception, match="check 0"):
        jax.block_until_ready(compiled(jnp.asarray(-1.0)))
    del compiled
    jax.clear_caches()
    assert checks_alive() == before


def test_messages_are_right_where_jax_has_no_list_of_what_a_program_keeps(monkeypatch):
    items = []
    monkeypatch.setattr(host, "_items_of", lambda context: items)
    for first in (0, 7):
        with raises(f"check {first}\n"):
            eqx.filter_jit(checked(2, first))(jnp.asarray(-9.0))
    assert len(items) == 4


def test_jax_has_a_list_of_what_a_program_keeps():
    primitive = Primitive("test_keeps")
    primitive.def_abstract_eval(lambda x: x)
    found = []

    def lower(context, x):
        found.append(host._items_of(context))
        return [x]

    mlir.register_lowering(primitive, lower)
    jax.jit(primitive.bind).lower(1.0)
    assert found[0] is not host._ITEMS


# `on_error="nan"` under `jax.vmap`


def to_nan(x, pred):
    return eqx.error_if(x, pred, "never", on_error="nan")


PREDS = jnp.asarray([True, False, True])
ARRAYS = jnp.arange(12.0).reshape(3, 2, 2)
CASES = {
    "batch": (ARRAYS, PREDS, (0, 0)),
    "scalars": (ARRAYS[:, 0, 0], PREDS, (0, 0)),
    "shared array": (ARRAYS[0], PREDS, (None, 0)),
    "shared predicate": (ARRAYS, jnp.asarray(True), (0, None)),
    "another axis": (jnp.moveaxis(ARRAYS, 0, 2), PREDS, (2, 0)),
    "array of predicates": (
        ARRAYS,
        jnp.outer(PREDS, jnp.asarray([False, True])),
        (0, 0),
    ),
    "integers": (ARRAYS.astype(int), PREDS, (0, 0)),
    "no failure": (ARRAYS, ~jnp.ones(3, bool), (0, 0)),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_nan_mode_replaces_the_elements_that_failed_only(case, wrap):
    x, pred, axes = CASES[case]
    out = wrap(jax.vmap(to_nan, in_axes=axes))(x, pred)
    for i in range(3):
        alone = to_nan(
            x if axes[0] is None else jnp.take(x, i, axes[0]),
            pred if axes[1] is None else pred[i],
        )
        assert jnp.array_equal(out[i], alone, equal_nan=True)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nan_mode_in_nested_batches_and_loops(wrap):
    preds = jnp.asarray([[True, False], [False, False]])
    f = jax.vmap(jax.vmap(to_nan, in_axes=(None, 0)), in_axes=(None, 0))
    assert (jnp.isnan(wrap(f)(jnp.ones(()), preds)) == preds).all()

    def loop(x, pred):
        return lax.fori_loop(0, 2, lambda _, x: to_nan(x, pred), x)

    assert (jnp.isnan(wrap(jax.vmap(loop))(jnp.ones(3), PREDS)) == PREDS).all()


def test_nan_mode_in_a_batch_keeps_the_gradient():
    f = jax.grad(lambda x: jax.vmap(to_nan)(x, PREDS).sum())
    assert (jax.jit(f)(ARRAYS) == 1).all() and (f(ARRAYS) == 1).all()


def test_breakpoint_mode_replaces_the_elements_that_failed_only(monkeypatch):
    monkeypatch.setattr(jax.debug, "breakpoint", lambda **_: None)
    f = jax.vmap(lambda x, p: eqx.error_if(x, p, "no", on_error="breakpoint"))
    for wrap in (lambda f: f, jax.jit):
        assert (jnp.isnan(wrap(f)(jnp.ones(3), PREDS)) == PREDS).all()
