"""filter_jvp and filter_linearize: what has a tangent, and what has none."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from nests import Scale

import equinox_like as eqx

ONE = jnp.asarray(1.0)


def test_agrees_with_jax_on_plain_arrays():
    def f(x, y):
        return {"a": jnp.sin(x) * y["b"]}

    primals = jnp.linspace(0, 1, 3), {"b": jnp.ones(3)}
    tangents = jnp.ones(3), {"b": jnp.arange(3.0)}
    ours, theirs = eqx.filter_jvp(f, primals, tangents), jax.jvp(f, primals, tangents)
    assert eqx.tree_equal(ours, theirs)
    out, f_jvp = eqx.filter_linearize(f, *primals)
    assert eqx.tree_equal((out, f_jvp(*tangents)), theirs, rtol=1e-6)


def test_outputs_that_are_not_differentiated_come_back_as_they_are():
    marker = object()
    out, tangent = eqx.filter_jvp(lambda x: (x, marker, 2, x > 0), (ONE,), (ONE,))
    assert out[1] is marker and out[2] == 2 and out[3]
    assert tangent == (1.0, None, None, None)


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit, jax.jit])
def test_what_depends_on_nothing_perturbed_has_no_tangent(wrap):
    f = wrap(lambda x, y: (2 * x, y, 2 * y, jnp.ones(2), x * y))
    _, tangent = eqx.filter_jvp(f, (ONE, ONE), (ONE, None))
    assert tangent == (2.0, None, None, None, 1.0)


@pytest.mark.parametrize(
    "outer", [jax.jit, jax.grad, jax.vmap, jax.checkpoint, eqx.filter_jit]
)
def test_what_only_an_outer_transformation_perturbs_has_no_tangent(outer):
    def f(y):
        _, tangent = eqx.filter_jvp(lambda x: (x, y, x * y), (ONE,), (ONE,))
        assert tangent[1] is None
        return tangent[2]

    y = jnp.ones(2) if outer is jax.vmap else ONE
    assert jnp.all(outer(f)(y) == 1.0)


def test_conventions_are_the_same_at_each_level_of_a_nest():
    def inner(y):
        return eqx.filter_jvp(lambda x: (x * y, y, x, 3, x**2), (ONE,), (ONE,))

    (out, tangent), (out_dot, tangent_dot) = eqx.filter_jvp(inner, (ONE,), (ONE,))
    assert out == (1, 1, 1, 3, 1) and tangent == (1, None, 1, None, 2)
    assert out_dot == (1, 1, None, None, None)
    assert tangent_dot == (1, None, None, None, None)


def test_python_floats_may_be_perturbed():
    out, tangent = eqx.filter_jvp(lambda x, n: (n * x, n), (2.0, 3), (1.0, None))
    assert out == (6.0, 3) and tangent == (3.0, None)


def test_without_tangents_the_function_is_merely_called():
    out, tangent = eqx.filter_jvp(lambda x: (2 * x, "a"), (2.0,), (None,))
    assert out == (4.0, "a") and type(out[0]) is float and tangent == (None, None)


def test_float0_is_taken_for_none_and_never_given():
    zero = np.zeros((2,), jax.dtypes.float0)
    _, tangent = eqx.filter_jvp(
        lambda x, n: (x * n, n), (jnp.ones(2), jnp.arange(2)), (jnp.ones(2), zero)
    )
    assert tangent[0].tolist() == [0, 1] and tangent[1] is None


def test_keywords_are_not_differentiated():
    out, tangent = eqx.filter_jvp(
        lambda x, *, y, name: (x * y, name), (ONE,), (ONE,), y=ONE, name="a"
    )
    assert out == (1.0, "a") and tangent == (1.0, None)


def test_modules_have_modules_as_tangents():
    model = Scale(jnp.asarray(3.0))
    tangent = eqx.filter(model, eqx.is_inexact_array)
    assert eqx.filter_jvp(lambda m: m(ONE), (model,), (tangent,)) == (3.0, 3.0)
    with pytest.raises(ValueError, match="structure"):
        eqx.filter_jvp(lambda m: m(ONE), (model,), (Scale(ONE, "other"),))


BAD = [
    pytest.param({"w": ONE}, ValueError, "structure", id="structure"),
    pytest.param(
        {"w": jnp.ones(3), "n": None},
        ValueError,
        r"tangents\[0\]\['w'\].*\(3,\)",
        id="shape",
    ),
    pytest.param(
        {"w": jnp.ones(2, jnp.int32), "n": None},
        TypeError,
        r"\['w'\].*int32",
        id="dtype",
    ),
    pytest.param(
        {"w": "text", "n": None},
        TypeError,
        r"\['w'\].*str.*`filter\(tree, is_inexact_array\)`",
        id="foreign",
    ),
    pytest.param(
        {"w": None, "n": 1.0},
        TypeError,
        r"\['n'\].*int32.*not a floating-point or complex array.*None",
        id="integer",
    ),
]


@pytest.mark.parametrize(("tangent", "error", "message"), BAD)
def test_bad_tangents_are_named(tangent, error, message):
    primal = {"w": jnp.ones(2), "n": jnp.asarray(3)}
    with pytest.raises(error, match=message):
        eqx.filter_jvp(lambda p: p, (primal,), (tangent,))
    _, f_jvp = eqx.filter_linearize(lambda p: p, primal)
    with pytest.raises(error, match=message.replace("int32.*not", "not")):
        f_jvp(tangent)


def test_primals_must_be_a_sequence_like_the_tangents():
    with pytest.raises(TypeError, match=r"tuple or list.*`\(x,\)`"):
        eqx.filter_jvp(jnp.sin, ONE, ONE)
    with pytest.raises(ValueError, match="structure"):
        eqx.filter_jvp(jnp.sin, (ONE,), [ONE])


def test_linear_function_takes_none_for_zero_and_is_a_pytree():
    calls = []

    def f(tree, n):
        calls.append(1)
        return tree["x"] ** n, n, tree["k"]

    tree = {"x": jnp.asarray(3.0), "k": jnp.asarray(1), "y": jnp.ones(2)}
    out, f_jvp = eqx.filter_linearize(f, tree, 2)
    assert out == (9.0, 2, 1)
    tangent = {"x": ONE, "k": None, "y": None}
    assert f_jvp(tangent, None) == (6.0, None, None)
    jitted = eqx.filter_jit(lambda g, t: g(t, None))
    assert jitted(f_jvp, tangent) == (6.0, None, None)
    zero = {"x": None, "k": None, "y": None}
    assert f_jvp(zero, None) == (0.0, None, None)
    assert len(calls) == 1
    assert repr(f_jvp) == "<derivative of f>"


def test_linearizing_where_nothing_is_differentiated():
    out, f_jvp = eqx.filter_linearize(lambda n, s: (n, s), 3, "text")
    assert out == (3, "text") and f_jvp(None, None) == (None, None)


def test_linear_functions_can_be_mapped():
    _, f_jvp = eqx.filter_linearize(lambda x: x**2, jnp.arange(3.0))
    eye = jnp.eye(3)
    assert jnp.array_equal(jax.vmap(f_jvp)(eye), 2 * jnp.diag(jnp.arange(3.0)))


def test_any_callable_is_named_in_errors():
    f = functools.partial(jnp.power, 2.0)
    with pytest.raises(TypeError, match="`power`"):
        eqx.filter_jvp(f, ONE, ONE)


def test_tangent_of_a_module_output_is_a_module():
    out, tangent = eqx.filter_jvp(lambda x: Scale(2 * x), (ONE,), (ONE,))
    assert (
        isinstance(tangent, Scale) and tangent.factor == 2.0 and tangent.name == "scale"
    )
    assert jtu.tree_structure(tangent) == jtu.tree_structure(out)


@pytest.mark.parametrize(
    "value", [np.ones(2), np.float64(1.5)], ids=["array", "scalar"]
)
def test_numpy_outputs_come_back_as_they_are(value):
    out, tangent = eqx.filter_jvp(lambda x: {"x": 2 * x, "n": value}, (ONE,), (ONE,))
    assert out["n"] is value and out["x"] == 2
    assert tangent["n"] is None and tangent["x"] == 2
