"""Checks of values while a program runs: when they fail, how, and what they leave alone."""

import itertools
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import traceback

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from strategies import static_leaves, trees

import equinox_like as eqx
from equinox_like._runtime.error_if import Check

MESSAGE = "`x` must not be negative"
GOOD, BAD = jnp.asarray(1.0), jnp.asarray(-1.0)


def twice(x):
    return eqx.error_if(x, x < 0, MESSAGE) * 2


PATTERN = re.escape(MESSAGE)
MESSAGES = ("one", "two", "three")


def raises(message=PATTERN):
    return pytest.raises(eqx.EquinoxRuntimeError, match=message)


def in_custom_jvp(f):
    g = eqx.filter_custom_jvp(f)
    g.def_jvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    return g


def in_custom_vjp(f):
    g = eqx.filter_custom_vjp(f)
    g.def_fwd(lambda perturbed, x: (f(x), None))
    g.def_bwd(lambda residuals, ct, perturbed, x: 2 * ct)
    return g


# Each makes of a function of a scalar one that does the same, once at least.
NESTS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))[1],
    "vmap of nothing": lambda f: (
        lambda x: jax.vmap(lambda _: f(x), out_axes=None, axis_size=2)(jnp.ones(2))
    ),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, 2)[1][1],
    "while": lambda f: lambda x: lax.fori_loop(0, 1, lambda i, c: f(c), x),
    "cond": lambda f: lambda x: lax.cond(x > -9, f, lambda x: x, x),
    "checkpoint": jax.checkpoint,
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "filter_scan": lambda f: (
        lambda x: eqx.filter_scan(
            lambda c, _: (f(c), None), x, None, 1, checkpoint=True
        )[0]
    ),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
    "grad": lambda f: lambda x: jax.grad(f)(x) * x,
}
nests = pytest.mark.parametrize("nest", NESTS)
# Not those where a rule of the user's own does not need the value, or where there is none.
WITHOUT = [("grad", "custom_vjp"), ("grad", "custom_jvp"), ("jvp", "custom_vjp")]
PAIRS = [p for p in itertools.permutations(NESTS, 2) if p not in WITHOUT]
pairs = pytest.mark.parametrize(("outer", "inner"), PAIRS[::5])


# What a check that does not fail leaves alone


@nests
def test_passing_check_changes_no_value(nest):
    assert NESTS[nest](twice)(GOOD) == 2
    assert eqx.filter_jit(NESTS[nest](twice))(GOOD) == 2


@pairs
def test_passing_check_changes_no_value_in_nests(outer, inner):
    assert eqx.filter_jit(NESTS[outer](NESTS[inner](twice)))(GOOD) == 2


@pytest.mark.parametrize("nest", [n for n in NESTS if n != "while"])
def test_check_is_the_identity_to_derivatives(nest):
    f = NESTS[nest](twice)
    for transform in (jax.grad, eqx.filter_grad):
        assert eqx.filter_jit(transform(f))(GOOD) == 2
    if nest != "custom_vjp":
        _, tangent = eqx.filter_jit(lambda x: jax.jvp(f, (x,), (x,)))(GOOD * 3)
        assert tangent == 6
        hessian = eqx.filter_jit(jax.grad(jax.grad(lambda x: f(x) ** 2)))(GOOD)
        assert hessian == 8


@given(
    trees(
        st.one_of(
            st.sampled_from([jnp.ones(2), np.ones(2), np.float32(1)]), static_leaves
        )
    ),
    st.booleans(),
)
def test_tree_comes_back_with_its_other_leaves_as_they_were(tree, under_jit):
    tree = [tree, jnp.ones(())]

    def check(pred):
        out = eqx.error_if(tree, pred, "never")
        for a, b in zip(jtu.tree_leaves(out), jtu.tree_leaves(tree), strict=True):
            assert isinstance(a, jax.Array) if eqx.is_array(b) else a is b
        assert jtu.tree_structure(out) == jtu.tree_structure(tree)
        return jnp.ones(())

    (jax.jit(check) if under_jit else check)(jnp.asarray(False))


def test_gradient_of_integers_passes_through():
    gradient = np.zeros(2, jax.dtypes.float0)
    out, _ = eqx.error_if((gradient, GOOD), jnp.asarray(False), "never")
    assert out is gradient


@pytest.mark.parametrize("false", [False, 0, 0.0])
@pytest.mark.parametrize("mode", ["raise", "nan", "breakpoint", "off"])
def test_nothing_is_inserted_for_a_false_python_value(false, mode):
    x = {"a": np.ones(2), "b": "b"}
    assert eqx.error_if(x, false, "never", on_error=mode) is x
    assert eqx.error_if("no array", false, "never", on_error=mode) == "no array"
    assert eqx.branched_error_if(x, false, 7, [], on_error=mode) is x
    f = jax.make_jaxpr(lambda x: eqx.error_if(x, false, "never", on_error=mode))
    assert f(1.0).eqns == []


def test_nothing_is_inserted_for_what_numpy_knows_to_be_false():
    f = jax.make_jaxpr(lambda x: eqx.error_if(x, np.zeros(3, bool), "never"))
    assert f(1.0).eqns == []


def test_program_without_checks_compiles_to_the_same():
    def text(f):
        return jax.jit(f).lower(GOOD).as_text()

    checked = text(lambda x: eqx.error_if(x, False, "never") + 1)
    assert checked == text(lambda x: x + 1)


def test_weak_types_and_dtypes_stay():
    def check(x):
        return eqx.error_if(x, jnp.any(x != x), "never")

    for x in (1.0, 1, True, 1j, jnp.ones(2, jnp.bfloat16), jnp.ones(1, jnp.int8)):
        x = jnp.asarray(x)
        out = jax.eval_shape(check, x)
        assert (out.dtype, out.weak_type) == (x.dtype, x.weak_type)


def test_symbolic_zeros_stay_symbolic():
    seen = []

    @jax.custom_jvp
    def look(x, y):
        return x

    def rule(primals, tangents):
        seen.extend(type(t).__name__ for t in tangents)
        return primals[0], jnp.zeros(())

    look.defjvp(rule, symbolic_zeros=True)

    def f(x, y):
        y, _, x = eqx.error_if((y, 3 * jnp.ones(2, int), x), x < 0, MESSAGE)
        return look(x, y)

    for wrap in (lambda f: f, jax.jit):
        seen.clear()
        wrap(jax.grad(f))(GOOD, GOOD)
        assert seen[1] == "SymbolicZero" != seen[0]


def test_program_without_a_check_is_not_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr("equinox_like._jit.specialization.wait_for", waits.append)
    eqx.filter_jit(lambda x: eqx.error_if(x, False, MESSAGE))(GOOD)
    eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, MESSAGE, on_error="nan"))(GOOD)
    eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, MESSAGE, on_error="off"))(GOOD)
    assert waits == []
    eqx.filter_jit(twice)(GOOD)
    assert len(waits) == 1


# When it fails


@nests
def test_failing_check_raises_from_the_outermost_filter_jit(nest):
    f = eqx.filter_jit(NESTS[nest](twice))
    f(GOOD)
    for _ in range(2):
        with raises() as info:
            f(BAD)
        assert info.value.__cause__ is None
        assert info.value.__suppress_context__
    assert f(GOOD) == 2


@pairs
def test_failing_check_raises_in_nests(outer, inner):
    with raises():
        eqx.filter_jit(NESTS[outer](NESTS[inner](twice)))(BAD)


@nests
def test_gradient_alone_keeps_the_check(nest):
    if nest in ("while", "custom_vjp", "custom_jvp"):
        return  # no gradient, or one of their own
    with raises():
        eqx.filter_jit(jax.grad(NESTS[nest](twice)))(BAD)


EAGER = {
    "plain": (twice, ()),
    "vmap": (jax.vmap(jax.vmap(twice)), (1, 2)),
    "grad": (jax.grad(twice), ()),
    "grad of vmap": (jax.grad(lambda x: jax.vmap(twice)(x).sum()), (2,)),
    "vmap of grad": (jax.vmap(jax.grad(twice)), (2,)),
    "filter_vmap of filter_jit": (eqx.filter_vmap(eqx.filter_jit(twice)), (2,)),
    "filter_checkpoint": (eqx.filter_checkpoint(twice), ()),
    "vjp": (lambda x: jax.vjp(twice, x)[0], ()),
    "linearize": (lambda x: jax.linearize(twice, x)[0], ()),
    "custom_jvp": (in_custom_jvp(twice), ()),
    "custom_vjp": (in_custom_vjp(twice), ()),
}


@pytest.mark.parametrize("use", EAGER)
def test_eager_use_raises_the_same(use):
    f, shape = EAGER[use]
    x = jnp.ones(shape)
    f(x)
    with raises():
        f(-x)


def test_eager_use_without_jit_raises():
    with jax.disable_jit(), raises():
        eqx.filter_jit(twice)(BAD)


@pytest.mark.parametrize("true", [np.True_, np.asarray([False, True]), jnp.ones(2)])
def test_known_array_fails_at_run_time(true):
    def f(x, taken):
        return lax.cond(taken, lambda x: eqx.error_if(x, true, "no"), lambda x: x, x)

    f = eqx.filter_jit(f)
    assert f(GOOD, jnp.asarray(False)) == 1
    with raises("no"):
        f(GOOD, jnp.asarray(True))
    with raises("no"):
        eqx.error_if(GOOD, true, "no")


ON_TRACE = {
    "eager": lambda f: f(GOOD),
    "filter_jit": lambda f: eqx.filter_jit(f)(GOOD),
    "jax.jit": lambda f: jax.jit(f)(GOOD),
    "lower": lambda f: eqx.filter_jit(f).lower(GOOD),
    "eval_shape": lambda f: jax.eval_shape(f, GOOD),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(GOOD),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(f)(GOOD),
    "checkpoint": lambda f: jax.checkpoint(f)(GOOD),
    "scan": lambda f: lax.scan(lambda c, _: (f(c), None), GOOD, length=2),
    "not taken": lambda f: eqx.filter_jit(lambda x: lax.cond(x > 9, f, lambda x: x, x))(
        GOOD
    ),
    "unused": lambda f: eqx.filter_jit(lambda x: (f(x), x)[1])(GOOD),
}


def traced(message):
    return pytest.raises(
        eqx.EquinoxTracetimeError, match=rf"^{message}\n.*Python value"
    )


@pytest.mark.parametrize("use", ON_TRACE)
@pytest.mark.parametrize("true", [True, 1, 0.5, -1j])
def test_python_value_fails_while_the_program_is_traced(use, true):
    with traced("no"):
        ON_TRACE[use](lambda x: eqx.error_if(x, true, "no"))
    with traced("two"):
        ON_TRACE[use](lambda x: eqx.branched_error_if(x, true, 1, MESSAGES))
    with traced("A check failed with the invalid index 3: .* was given 3 messages."):
        ON_TRACE[use](lambda x: eqx.branched_error_if(x, true, 3, MESSAGES))


@pytest.mark.parametrize("x", [GOOD, np.ones(2), {"a": 1, "b": jnp.ones(2, int)}])
def test_failure_at_once_is_that_of_the_predicate_and_the_index(x):
    for function in eqx.error_if, eqx.internal.error_if:
        with traced("no"):
            function(x, True, "no")
    for index in (np.int32(1), jnp.asarray(1), np.asarray([0, 1])):
        with pytest.raises(eqx.EquinoxRuntimeError, match="two") as caught:
            eqx.branched_error_if(x, True, index, MESSAGES)
        assert caught.type is eqx.EquinoxRuntimeError


def test_python_value_goes_on_in_the_other_modes():
    def f(x, mode):
        return eqx.error_if(x, True, "no", on_error=mode)

    for use in (f, eqx.filter_jit(f), jax.jit(f, static_argnums=1)):
        assert jnp.isnan(use(GOOD, "nan"))
        assert use(GOOD, "off") == GOOD


@pytest.mark.parametrize("pred", [np.True_, jnp.asarray(True)])
def test_check_in_a_loop_that_takes_no_step_does_not_fail(pred):
    """XLA may move what does not change out of a loop, and so run what was not to run."""

    @eqx.filter_jit
    def f(x, steps, pred):
        return lax.while_loop(
            lambda c: c[0] < steps,
            lambda c: (c[0] + 1, eqx.error_if(x, pred, "no") + c[1]),
            (0, x),
        )[1]

    assert f(GOOD, 0, pred) == 1
    assert f(GOOD, jnp.asarray(0), pred) == 1
    with raises("no"):
        f(GOOD, jnp.asarray(1), pred)


def unused(x):
    return (twice(x), x)[1]


@pytest.mark.parametrize("nest", [n for n in NESTS if n not in ("while", "custom_jvp")])
def test_check_of_what_is_not_used_is_dropped(nest):
    assert eqx.filter_jit(NESTS[nest](unused))(BAD) == -1


@pytest.mark.parametrize("used", ["a", "b", "c"])
def test_any_array_of_the_tree_keeps_the_check(used):
    @eqx.filter_jit
    def f(x):
        tree = {"a": x, "b": np.arange(2), "c": jax.random.key(0)}
        return eqx.error_if(tree, x < 0, MESSAGE)[used]

    f(GOOD)
    with raises():
        f(BAD)


def test_losses_by_donation_are_told():
    f = eqx.filter_jit(lambda x, y: (twice(x), y + 1), donate=("y",))
    y = jnp.ones(2)
    f(GOOD, y)
    assert y.is_deleted()
    with raises() as info:
        f(BAD, jnp.ones(2))
    assert "lost: `y`" in info.value.__notes__[0]


def test_compiled_ahead_of_time_it_raises_the_same():
    compiled = eqx.filter_jit(twice).lower(GOOD).compile()
    assert compiled(GOOD) == 2
    with raises():
        compiled(BAD)


def test_one_check_fails_of_several():
    @eqx.filter_jit
    def f(x, y):
        return eqx.error_if(x, x < 0, "first") + eqx.error_if(y, y < 0, "second")

    with raises("first"):
        f(BAD, GOOD)
    with raises("second"):
        f(GOOD, BAD)
    with raises("first|second"):
        f(BAD, BAD)


def test_under_plain_jit_the_error_of_jax_has_the_message_and_a_hint():
    with pytest.raises(Exception, match=MESSAGE) as info:
        jax.jit(twice)(BAD).block_until_ready()
    assert isinstance(info.value, RuntimeError | ValueError)
    assert not isinstance(info.value, eqx.EquinoxRuntimeError)
    assert "equinox_like.filter_jit" in str(info.value)


def test_other_errors_stay_what_they_are():
    def fail(x):
        raise ValueError("something else")

    @eqx.filter_jit
    def f(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), twice(x))

    with pytest.raises(Exception, match="something else") as info:
        f(GOOD)
    assert not isinstance(info.value, eqx.EquinoxRuntimeError)


# What it says


def test_text_has_frames_message_and_advice():
    def inner(x):
        return twice(x)

    @eqx.filter_jit
    def outer(x):
        return inner(x)

    with raises() as info:
        outer(BAD)
    first, *_ = text = str(info.value).splitlines()
    assert "above are those outside of JIT" in first
    places = [line.rpartition(", in ")[2] for line in text if line.startswith("  File")]
    assert places == ["outer", "inner", "twice"]
    assert "    return eqx.error_if(x, x < 0, MESSAGE) * 2" in text
    assert f"EquinoxRuntimeError: {MESSAGE}" in text
    assert "EQX_ON_ERROR" in str(info.value)
    shown = "".join(traceback.format_exception(info.value))
    assert "\nEquinoxRuntimeError: " in shown
    assert "JaxRuntimeError" not in shown


def test_frames_of_another_call_are_not_shown():
    inner = jax.jit(twice)

    def first(x):
        return inner(x)

    def second(x):
        return inner(x)

    eqx.filter_jit(first)(GOOD)
    with raises() as info:
        eqx.filter_jit(second)(BAD)
    assert ", in twice" in str(info.value)
    assert ", in first" not in str(info.value)
    twice(GOOD)
    with raises() as info:
        twice(BAD)
    assert "  File" not in str(info.value)


def test_traceback_of_an_eager_failure_has_the_users_frames_only():
    with raises() as info:
        twice(BAD)
    frames = traceback.extract_tb(info.value.__traceback__)
    package = os.path.dirname(eqx.__file__)
    (ours,) = [f for f in frames if f.filename.startswith(package)]
    assert ours is frames[-1]
    assert "twice" in [f.name for f in frames]


@pytest.mark.parametrize("message", ["", "ä ☃", "a\nb", "50 %s {x}", "long" * 5000])
def test_any_message_arrives(message):
    with raises(None) as info:
        eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, message))(BAD)
    assert f"\nEquinoxRuntimeError: {message}\n" in str(info.value)


@pytest.mark.parametrize("message", ["a\0b", "a\ud800b"])
def test_characters_that_no_error_can_carry_are_escaped(message):
    with raises(r"a\\(0|ud800)b"):
        eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, message))(BAD)


check_batch = jax.vmap(
    lambda x, pred, index: eqx.branched_error_if(x, pred, index, MESSAGES),
    in_axes=(None, 0, 0),
    out_axes=None,
)


@pytest.mark.parametrize(
    "f", [check_batch, eqx.filter_jit(check_batch)], ids=["eager", "jit"]
)
@given(st.lists(st.tuples(st.booleans(), st.integers(-2, 4)), min_size=4, max_size=5))
def test_each_failing_element_of_a_batch_is_listed_with_its_message(f, elements):
    preds, indices = map(jnp.asarray, zip(*elements, strict=True))
    if not preds.any():
        assert f(GOOD, preds, indices) == 1
        return
    with raises(None) as info:
        f(GOOD, preds, indices)
    lines = str(info.value).splitlines()
    for i, (pred, index) in enumerate(elements):
        (*line,) = [x for x in lines if x.startswith(f"Batch element {i}: ")]
        assert len(line) == pred
        if pred and 0 <= index < 3:
            assert line[0].endswith(f": {MESSAGES[index]}")
        elif pred:
            assert f"invalid index {index}" in line[0]


def test_elements_of_nested_batches_are_listed_outermost_first():
    x = jnp.ones((2, 3)).at[1, 2].set(-1)
    f = jax.vmap(jax.vmap(twice), in_axes=1, out_axes=1)
    with raises(r"Batch element \(2, 1\): `x` must"):
        eqx.filter_jit(f)(x)
    with raises(r"Batch element \(2, 1\): `x` must"):
        f(x)


def test_long_lists_are_cut():
    with raises("1000 of 1000 elements of a batch failed") as info:
        jax.vmap(twice)(-jnp.ones(1000))
    assert "Batch element 9:" in str(info.value)
    assert "Batch element 10:" not in str(info.value)
    assert "... and 990 more." in str(info.value)


def test_array_of_indices_gives_each_element_its_message():
    pred, index = jnp.asarray([[True], [False]]), jnp.asarray([1, 2])
    with raises(None) as info:
        eqx.branched_error_if(GOOD, pred, index, MESSAGES)
    assert "(0, 0): two\nBatch element (0, 1): three\n\n" in str(info.value)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32, jnp.int32])
def test_index_of_any_integer_dtype(dtype):
    f = eqx.filter_jit(lambda i: eqx.branched_error_if(i, i > 1, i, MESSAGES))
    assert f(jnp.asarray(1, dtype)) == 1
    with raises("three"):
        f(jnp.asarray(2, dtype))
    with raises("invalid index 100.*3 messages"):
        f(jnp.asarray(100, dtype))


@pytest.mark.parametrize("index", [-1, 3])
def test_invalid_index_is_told_at_run_time(index):
    f = eqx.filter_jit(lambda x: eqx.branched_error_if(x, x < 0, index, MESSAGES))
    assert f(GOOD) == 1
    with raises(f"invalid index {index}"):
        f(BAD)


def test_threads_do_not_mix_messages():
    wrong = []

    def work(n):
        def f(x):
            x = lax.fori_loop(0, 100, lambda i, x: jnp.sin(x), x)
            return eqx.error_if(x, x.sum() != 0, f"<thread {n}>")

        f = eqx.filter_jit(f)
        for _ in range(20):
            try:
                f(jnp.ones((50, 50)))
            except eqx.EquinoxRuntimeError as e:
                if f"<thread {n}>" in str(e) and str(e).count("<thread") == 2:
                    continue
            wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nothing_is_logged(caplog, capfd):
    with caplog.at_level(logging.DEBUG), raises():
        eqx.filter_jit(twice)(BAD)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert capfd.readouterr().err == ""


def test_errors_are_what_code_out_there_expects():
    assert issubclass(eqx.EquinoxRuntimeError, RuntimeError)
    assert issubclass(eqx.EquinoxTracetimeError, eqx.EquinoxRuntimeError)
    error = pickle.loads(pickle.dumps(eqx.EquinoxRuntimeError("text")))
    assert type(error) is eqx.EquinoxRuntimeError
    assert error.args == ("text",)


# Modes

SPOILT = [
    (jnp.ones(2), np.isnan),
    (jnp.ones(2, jnp.bfloat16), lambda x: np.isnan(np.float32(x))),
    (jnp.ones(2, jnp.float8_e4m3fn), lambda x: np.isnan(np.float32(x))),
    (jnp.ones(2, jnp.float8_e5m2), lambda x: np.isnan(np.float32(x))),
    (jnp.ones(2) * 1j, np.isnan),
    (jnp.ones(2, jnp.int32), lambda x: x == 2**31 - 1),
    (jnp.ones(2, jnp.uint8), lambda x: x == 255),
    (jnp.zeros(2, bool), lambda x: x),
    (np.ones(2, np.float32), np.isnan),
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_nan_mode_replaces_every_array_and_nothing_else(wrap, known):
    key = jax.random.key(3)
    tree = ([x for x, _ in SPOILT], key, "static", None, 3)

    def f(pred):
        return eqx.error_if(tree, known or pred, MESSAGE, on_error="nan")

    arrays, new_key, *rest = wrap(f)(jnp.asarray(True))
    for new, (old, is_spoilt) in zip(arrays, SPOILT, strict=True):
        assert new.dtype == old.dtype
        assert np.all(is_spoilt(np.asarray(new)))
    assert (jax.random.key_data(new_key) == jax.random.key_data(key)).all()
    assert rest == ["static", None, 3]


def test_nan_mode_replaces_elements_of_a_batch_and_keeps_the_gradient():
    def f(x):
        return eqx.error_if(x, x < 0, MESSAGE, on_error="nan")

    x = jnp.asarray([1.0, -1.0])
    for wrap in (jax.jit, lambda f: f):
        assert jnp.isnan(wrap(jax.vmap(f))(x)).tolist() == [False, True]
        assert wrap(jax.grad(lambda x: jax.vmap(f)(x).sum()))(x).tolist() == [1, 1]
    assert jax.vmap(f)(abs(x)).tolist() == [1, 1]


def test_nan_mode_of_branches():
    def f(x, pred):
        return eqx.branched_error_if(x, pred, 1, MESSAGES, on_error="nan")

    assert jnp.isnan(f(GOOD, jnp.asarray(True)))
    assert f(GOOD, np.asarray(False)) == GOOD


def test_nan_mode_gives_no_warning_and_debug_nans_no_error():
    with jax.debug_nans(True):
        assert jax.vmap(twice)(jnp.ones(2)).tolist() == [2, 2]
        assert jax.jit(twice)(GOOD) == 2


def test_off_mode_checks_nothing():
    x = np.ones(2)
    assert eqx.error_if(x, True, MESSAGE, on_error="off") is x
    assert eqx.error_if("no array", True, MESSAGE, on_error="off") == "no array"


@pytest.mark.parametrize("pred", [False, True, jnp.asarray(False)])
def test_unknown_mode_is_an_error(pred):
    with pytest.raises(RuntimeError, match=r"'raise', 'nan', .* got 'foo'"):
        eqx.error_if(GOOD, pred, MESSAGE, on_error="foo")


NESTED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))[0],
    "jit of vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(jnp.stack([x, x]))[0]),
    "jit of scan": lambda f: jax.jit(
        lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 1)[0]
    ),
    "jit of grad": lambda f: jax.jit(lambda x: jax.value_and_grad(f)(x)[0]),
}


@pytest.mark.parametrize("nest", NESTED)
def test_breakpoint_mode_prints_opens_the_debugger_and_goes_on(
    nest, monkeypatch, capsys
):
    stops = []

    def stop(**kwargs):
        jax.debug.callback(lambda: stops.append(kwargs))

    monkeypatch.setattr(jax.debug, "breakpoint", stop)
    f = NESTED[nest](
        lambda x: eqx.error_if(x, x < 0, MESSAGE, on_error="breakpoint") * 2
    )
    assert f(GOOD) == 2
    jax.effects_barrier()
    assert stops == []
    assert jnp.isnan(f(BAD))
    jax.effects_barrier()
    assert stops == [{"num_frames": 1}]
    assert MESSAGE in capsys.readouterr().err


def test_on_tpu_the_message_is_shown_and_the_user_asked(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    check = Check((MESSAGE,), (), goes_on=False)
    check.fail_on_tpu(np.asarray(True), np.asarray(0))
    assert f"EquinoxRuntimeError: {MESSAGE}" in capsys.readouterr().err
    assert len(asked) == 1 and "Press enter" in asked[0]


# Wrong use


@pytest.mark.parametrize("pred", [True, jnp.asarray(False), np.asarray(True)])
def test_no_array_is_an_error(pred):
    with pytest.raises(ValueError, match=r"^No arrays .*'must not be'"):
        eqx.error_if(("a", 1), pred, "must not be")


def test_wrong_types_are_errors(without_type_checks):
    with pytest.raises(TypeError, match="must be a bool or an array; got a str"):
        eqx.error_if(GOOD, "x", MESSAGE)
    with pytest.raises(TypeError, match="`error_if` takes a string as its message"):
        eqx.error_if(GOOD, True, 3)
    with pytest.raises(TypeError, match="list or tuple of strings"):
        eqx.branched_error_if(GOOD, True, 0, "abc")
    with pytest.raises(TypeError, match="must be an integer; got a float"):
        eqx.branched_error_if(GOOD, True, 0.0, ["abc"])
    with pytest.raises(TypeError, match="must be an integer; got None"):
        eqx.branched_error_if(GOOD, True, None, ["abc"])
    two, three = jnp.arange(2) < 1, jnp.arange(3)
    with pytest.raises(ValueError, match=r"Incompatible shapes.*\(2,\), \(3,\)"):
        eqx.branched_error_if(GOOD, two, three, MESSAGES)


# Several devices


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_are_checked_on_all_devices(kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("d")))
    with jax.set_mesh(mesh):
        f = eqx.filter_jit(lambda x: twice(x).sum() + x)
        assert f(x).shape == (8,)
        with raises():
            f(x - 3)
        with raises("Batch element 0: .*\nBatch element 1: "):
            eqx.filter_jit(jax.vmap(twice))(x - 2)
        step = eqx.filter_jit(
            lambda x: lax.scan(lambda c, _: (twice(c) - c.sum(), None), x, None, 3)
        )
        with raises():
            step(x)
        assert f(x).shape == (8,)


@pytest.mark.parametrize("check_vma", [True, False])
def test_check_within_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")

    def f(x, y):
        y = eqx.error_if(y, y < 0, "the same on all devices")
        return twice(x) + eqx.error_if(y, x > 90, "too large")

    f = eqx.filter_shard_map(
        f,
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
        check_vma=check_vma,
    )
    f = eqx.filter_jit(f)
    assert f(jnp.arange(8.0), GOOD).tolist() == (2 * np.arange(8) + 1).tolist()
    with raises():
        f(jnp.arange(8.0) - 1, GOOD)
    with raises("too large"):
        f(jnp.arange(8.0) + 99, GOOD)
    with raises("the same on all devices"):
        f(jnp.arange(8.0), BAD)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("map_over", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_devices_do_not_wait_for_one_that_has_failed(check_vma, map_over):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def f(x, pred):
        x = map_over(
            lambda x: eqx.branched_error_if(x, pred | (x > 6), 2, MESSAGES) * 2
        )(x)
        return lax.psum(x, ("a", "b"))

    f = eqx.filter_jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(PartitionSpec(("a", "b")), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
    )
    assert f(jnp.arange(4.0), jnp.asarray(False)) == 12
    with raises("three"):
        f(jnp.arange(4.0) + 4, jnp.asarray(False))
    with raises("three"):
        f(jnp.arange(4.0), jnp.asarray(True))


def test_check_within_pmap():
    f = eqx.filter_pmap(lambda x: lax.psum(twice(x), "d"), axis_name="d")
    assert f(jnp.arange(4.0)).tolist() == [12] * 4
    with raises():
        f(jnp.arange(4.0) - 1)


# The process


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        input="p x\nc\n",
    )


def test_no_backend_is_started_for_a_false_python_value():
    done = run(
        "import equinox_like as eqx, numpy as np\n"
        "from jax._src import xla_bridge\n"
        "x = np.ones(2)\n"
        "assert eqx.error_if(x, False, 'never') is x\n"
        "assert eqx.branched_error_if(x, False, 3, ['never']) is x\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


FAILING = """
import equinox_like as eqx, jax.numpy as jnp
f = eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, 'oh') * 2)
print(f(jnp.asarray(-1.0)))
"""


def test_environment_chooses_the_mode():
    done = run(FAILING, EQX_ON_ERROR="nan")
    assert (done.stdout, done.stderr) == ("nan\n", "")
    done = run(FAILING, EQX_ON_ERROR="off")
    assert (done.stdout, done.stderr) == ("-2.0\n", "")
    done = run(FAILING, EQX_ON_ERROR="raise")
    assert done.stdout == ""
    assert "\nEquinoxRuntimeError: oh\n" in done.stderr
    assert "JaxRuntimeError" not in done.stderr


def test_environment_is_read_when_the_library_is_imported():
    for name, value in (
        ("EQX_ON_ERROR", "foo"),
        ("EQX_ON_ERROR_BREAKPOINT_FRAMES", "many"),
    ):
        done = run("import equinox_like", **{name: value})
        error = done.stderr.splitlines()[-1]
        assert error.startswith("ValueError: ")
        assert name in error and repr(value) in error
    done = run("import equinox_like", EQX_ON_ERROR="breakpoint")
    assert "EQX_ON_ERROR=breakpoint opens a debugger" in done.stderr


def test_debugger_opens_at_the_users_line():
    code = f"import warnings; warnings.simplefilter('ignore')\n{FAILING}"
    done = run(code, EQX_ON_ERROR="breakpoint", PYTHONWARNINGS="ignore")
    assert "EquinoxRuntimeError: oh" in done.stderr
    assert "(jdb)" in done.stdout
    assert "Array(-1., dtype=float32)" in done.stdout
    assert done.stdout.endswith("nan\n")


# assert_dce


def with_assertion(x, is_used):
    y = eqx.internal.assert_dce((jnp.sin(x), "text"), MESSAGE)[0]
    return x + y if is_used else x


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_value_that_should_have_been_removed_is_an_error_if_it_is_used(wrap):
    f = eqx.filter_jit(lambda x, is_used: wrap(lambda x: with_assertion(x, is_used))(x))
    x = jnp.ones(2)
    assert (f(x, False) == 1).all()
    with raises():
        f(x, True)


def test_value_that_xla_finds_to_be_unused_counts_as_removed():
    def f(x):
        def body(carry):
            return carry[0] + 1, eqx.internal.assert_dce(carry[1], MESSAGE)

        return lax.while_loop(lambda carry: carry[0] < 3, body, (x, x))[0]

    assert eqx.filter_jit(f)(GOOD) == 3


def test_nothing_is_asserted_outside_of_jit():
    x = [np.ones(2), "text"]
    assert eqx.internal.assert_dce(x, MESSAGE) is x
    assert jax.vmap(lambda x: with_assertion(x, True))(jnp.ones(2)).shape == (2,)
    with jax.disable_jit():
        assert eqx.filter_jit(with_assertion)(GOOD, True) > 1


def test_assertion_has_the_modes_of_a_check():
    def f(x, on_error):
        return eqx.internal.assert_dce(x, MESSAGE, on_error=on_error)

    f = eqx.filter_jit(f)
    assert f(GOOD, "off") == GOOD
    assert jnp.isnan(f(GOOD, "nan"))
    with pytest.raises(RuntimeError, match="got 'foo'"):
        f(GOOD, "foo")


def test_values_are_not_computed_anew_for_each_check():
    def f(x, check):
        for _ in range(20):
            x = jnp.sin(x)
            x = eqx.error_if(x, x > 50, MESSAGE) if check else x
        return x

    def sines(check):
        compiled = jax.jit(f, static_argnums=1).lower(jnp.ones(8), check).compile()
        return compiled.cost_analysis()["transcendentals"]

    # A check may share its fusion with the step that it looks at, but with no other.
    assert sines(True) <= 2 * sines(False)


@pytest.mark.parametrize("mode", ["raise", "nan"])
def test_program_branches_once_for_each_check(mode):
    def f(x):
        return eqx.error_if(x, x > 50, MESSAGE, on_error=mode) + 1

    text = jax.jit(f).lower(jnp.ones(8)).compile().as_text()
    assert text.count(" conditional(") == 1
