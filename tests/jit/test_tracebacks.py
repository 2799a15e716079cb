"""Whom an error speaks of: the user's function, line and argument, never our frames."""

import operator
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._core.base import hide_frames

PACKAGE = Path(eqx.__file__).parent


def files(error: BaseException) -> list[str]:
    return [f.filename for f in traceback.extract_tb(error.__traceback__)]


def ours(error: BaseException) -> list[str]:
    private = tuple(
        str(PACKAGE / name)
        for name in ("_core", "_jit", "_loops", "_transforms", "_module", "_tree")
    )
    return [f for f in files(error) if f.startswith(private)]


class MyError(Exception):
    pass


def fail(model, x):
    raise MyError


ARGS = {"w": jnp.ones(2)}, jnp.ones(2)


class Failing(eqx.Module):
    w: jax.Array

    def method(self, x):
        fail(self, x)

    @eqx.filter_jit
    def jitted(self, x):
        fail(self, x)


@pytest.mark.parametrize(
    "call",
    [
        eqx.filter_jit(fail).trace,
        eqx.filter_jit(fail).lower,
        eqx.filter_jit(fail).eval_shape,
        eqx.filter_jit(fail).donation_report,
        lambda *args: eqx.filter_closure_convert(lambda *_, c=ARGS: fail(*c), *args),
        eqx.filter_export(fail),
        lambda *args: eqx.internal.cached_filter_eval_shape(fail, *args),
        lambda _, x: Failing(x).method(x),
        lambda _, x: Failing(x).jitted(x),
        lambda _, x: eqx.filter_jit(Failing(x).method)(x),
    ],
)
def test_stages_and_methods_show_none_of_our_frames(call):
    with pytest.raises(MyError) as caught:
        call(*ARGS)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.name == "fail" and ours(caught.value) == []


@pytest.mark.parametrize(
    "call",
    [
        eqx.filter_jit(fail),
        lambda *args: eqx.filter_jit(lambda *args: eqx.filter_jit(fail)(*args))(*args),
        lambda *args: jax.jit(eqx.filter_jit(fail))(*args),
    ],
    ids=["call", "nested", "under jit"],
)
def test_call_shows_the_users_frames_and_none_of_ours(call):
    with pytest.raises(MyError) as caught:
        call(*ARGS)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.name == "fail" and last.filename == __file__
    assert ours(caught.value) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda *args: eqx.filter_jit(fail).lower(*args),
        lambda *args: eqx.filter_jit(fail).eval_shape(*args),
        lambda *args: eqx.filter_export(fail)(*args),
    ],
    ids=["lower", "eval_shape", "export"],
)
def test_no_frame_of_ours_is_between_jax_and_the_user(call):
    with pytest.raises(MyError) as caught:
        call(*ARGS)
    names = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "fail" and "traced" not in names


def test_frames_are_kept_where_jax_keeps_its_own():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(MyError) as caught:
            eqx.filter_jit(fail)({"w": jnp.ones(2)}, jnp.ones(2))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert ours(caught.value)


def test_last_frame_is_kept_whosever_it_is():
    namespace = {}
    code = "def outer(): inner()\ndef inner(): raise ValueError"
    exec(compile(code, str(PACKAGE / "_tree" / "made_up.py"), "exec"), namespace)
    with pytest.raises(ValueError) as caught:
        namespace["outer"]()
    hide_frames(caught.value)
    names = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["inner"]
    hide_frames(MyError())  # one that was never raised


def test_last_frame_is_not_ours_if_jax_has_removed_those_below():
    with pytest.raises(TypeError, match="must return a boolean scalar") as caught:
        eqx.filter_while_loop(lambda x: x, lambda x: x, 1.0)
    assert ours(caught.value) == []


def test_layers_stay_visible():
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    with pytest.raises(eqx.ShapeError) as caught:
        eqx.filter_jit(lambda layer, x: layer(x))(layer, jnp.ones(3))
    assert any("_layers/linear.py" in name for name in files(caught.value))


def test_leaked_tracer_is_told_by_function_and_line():
    leaked = []

    @eqx.filter_jit
    def leaker(model, x):
        leaked.append(model["w"] * x)  # this line
        return x

    leaker({"w": jnp.ones(2)}, jnp.ones(2))
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        leaked[0] + 1
    message = str(caught.value)
    assert re.search(r"leaked was leaker at .*test_tracebacks\.py:\d+ traced", message)
    (line,) = (
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# this line")
    )
    assert f"created on line {__file__}:{line}" in message
    assert str(PACKAGE) not in message


def test_concretization_error_names_the_argument():
    @eqx.filter_jit
    def to_float(model, x):
        return float(model["w"][0])

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        to_float({"w": jnp.ones(2)}, jnp.ones(2))
    message = str(caught.value)
    assert "to_float at " in message and "model['w']" in message
    assert str(PACKAGE) not in message and ours(caught.value) == []


@pytest.mark.parametrize("fun", [np.exp, operator.truth], ids=["exp", "truth"])
@pytest.mark.parametrize("wrap", [eqx.filter_jit, eqx.filter_checkpoint])
def test_function_without_code_is_named(wrap, fun):
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        eqx.filter_jit(wrap(fun))(jnp.ones(()))
    assert f"function {fun.__name__} at <built-in>" in str(caught.value)
    assert str(PACKAGE) not in str(caught.value)


def test_shape_error_inside_ends_in_the_users_line():
    @eqx.filter_jit
    def add(model, x):
        return model["w"] + x

    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        add({"w": jnp.ones(2)}, jnp.ones(3))
    ended = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert "add" in ended and ours(caught.value) == []


def test_uncaught_error_shows_no_frame_of_ours():
    code = (
        "import equinox_like as eqx\n"
        "def user_function(x):\n"
        "    return x.nothing\n"
        "eqx.filter_jit(user_function)(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "user_function" in done.stderr and "AttributeError" in done.stderr
    assert "_transforms" not in done.stderr and "_jit/" not in done.stderr


def loss(weight, x):
    return (weight @ x).sum()


WEIGHT, ROWS = jnp.ones((5, 2, 2)), jnp.ones((5, 3))
custom = eqx.filter_custom_jvp(loss)
custom.def_jvp(lambda primals, tangents: (loss(*primals), None))
TRANSFORMED = {
    "jit": eqx.filter_jit(loss),
    "grad": eqx.filter_grad(loss),
    "jit of grad": eqx.filter_jit(eqx.filter_grad(loss)),
    "vmap": eqx.filter_vmap(loss),
    "jvp": lambda *args: eqx.filter_jvp(loss, args, args),
    "vjp": lambda *args: eqx.filter_vjp(loss, *args),
    "linearize": lambda *args: eqx.filter_linearize(loss, *args),
    "jacfwd": eqx.filter_jacfwd(loss),
    "hessian": eqx.filter_hessian(loss),
    "checkpoint": eqx.filter_checkpoint(loss),
    "custom_jvp": custom,
    "custom_vmap": eqx.filter_custom_vmap(loss),
    "invertible": lambda *args: eqx.filter_invertible(loss)([args[0]], args[1]),
    "scan": lambda w, x: eqx.filter_scan(lambda c, _: (loss(w, c), None), x, length=2),
    "map": lambda w, x: eqx.filter_map(lambda w: loss(w, x[0]), w),
    "cond": lambda *args: eqx.filter_cond(args[0].sum() > 0, loss, loss, *args),
    "fori_loop": lambda w, x: eqx.filter_fori_loop(0, 2, lambda i, c: loss(w, c), x),
    "eval_shape": lambda *args: eqx.filter_eval_shape(loss, *args),
    "make_jaxpr": eqx.filter_make_jaxpr(loss),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_transformation_hides_its_frames(name):
    with pytest.raises(TypeError) as caught:
        TRANSFORMED[name](WEIGHT, ROWS)
    assert files(caught.value).count(__file__) >= 2
    assert not ours(caught.value)
