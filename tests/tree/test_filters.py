import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import equinox_like as eqx

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.complex64]


@pytest.mark.parametrize(
    "x",
    [
        jnp.ones(2),
        jax.random.key(0),
        np.ones(2),
        np.float32(1),
        np.array("text"),
        np.array(None),
    ],
    ids=repr,
)
def test_jax_and_numpy_arrays_are_arrays(x):
    assert eqx.is_array(x) and eqx.is_array_like(x)


@pytest.mark.parametrize("x", [True, 1, 1.0, 1j])
def test_python_numbers_are_only_like_arrays(x):
    assert not eqx.is_array(x) and eqx.is_array_like(x)


@pytest.mark.parametrize(
    "x",
    [None, "text", [1.0], jax.ShapeDtypeStruct((), jnp.float32), jnp.tanh],
    ids=lambda x: type(x).__name__,
)
def test_nothing_else_is_an_array(x):
    assert not eqx.is_array_like(x)
    assert not eqx.is_inexact_array_like(x)


def test_tracers_are_arrays_and_are_judged_by_their_dtype():
    def check(x, i):
        assert eqx.is_array(x) and eqx.is_inexact_array(x)
        assert eqx.is_inexact_array_like(x) and not eqx.is_inexact_array_like(i)
        return x

    jax.jit(check)(1.0, 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_inexact_alike_in_jax_and_numpy(dtype):
    assert eqx.is_inexact_array(jnp.zeros(2, dtype))
    assert eqx.is_inexact_array(np.zeros(2, dtype))
    assert eqx.is_inexact_array(np.zeros((), dtype)[()])


@pytest.mark.parametrize(
    "x",
    [
        jnp.arange(2),
        np.array([True]),
        jax.random.key(0),
        np.zeros(2, jax.dtypes.float0),
        np.zeros(2, ml_dtypes.int4),
        np.array("text"),
        np.array([None]),
        np.zeros(2, [("a", "f4")]),
        np.datetime64("2020-01-01"),
        1.0,
    ],
    ids=repr,
)
def test_integers_keys_and_python_numbers_are_not_inexact(x):
    assert not eqx.is_inexact_array(x)


def test_python_floats_are_like_inexact_arrays():
    assert eqx.is_inexact_array_like(1.0) and eqx.is_inexact_array_like(1j)
    assert not eqx.is_inexact_array_like(1) and not eqx.is_inexact_array_like(True)


def test_object_is_judged_by_what_it_converts_to():
    class Wrapper:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return self.value

    assert eqx.is_array_like(Wrapper(jnp.ones(2)))
    assert eqx.is_inexact_array_like(Wrapper(jnp.ones(2)))
    assert not eqx.is_inexact_array_like(Wrapper(jnp.arange(2)))


@pytest.mark.parametrize(
    ("number", "is_inexact"), [(1.0, True), (1j, True), (1, False)]
)
def test_object_that_converts_to_a_number_is_judged_by_the_number(number, is_inexact):
    class Wrapper:
        def __jax_array__(self):
            return number

    assert eqx.is_inexact_array_like(Wrapper()) is is_inexact


def test_what_the_conversion_raises_propagates():
    class Broken:
        def __jax_array__(self):
            raise RuntimeError("broken")

    assert eqx.is_array_like(Broken()) and not eqx.is_array(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        eqx.is_inexact_array_like(Broken())


def test_class_of_convertible_objects_is_not_like_an_array():
    class Wrapper:
        def __jax_array__(self):
            return jnp.ones(2)

    assert not eqx.is_array_like(Wrapper) and not eqx.is_inexact_array_like(Wrapper)


def test_constants_that_jax_captures_are_arrays():
    value = np.float32(2.5)
    jaxpr = jax.make_jaxpr(lambda x: x + value + np.ones(2, np.float32))(1.0)
    literals = [
        v.val for e in jaxpr.eqns for v in e.invars if type(v).__name__ == "Literal"
    ]
    assert literals and jaxpr.consts
    for constant in [*literals, *jaxpr.consts]:
        assert eqx.is_array(constant) and eqx.is_inexact_array(constant)


def test_their_argument_may_be_passed_by_keyword():
    assert eqx.is_array(element=jnp.ones(2)) and eqx.is_array_like(element=1)
    assert eqx.is_inexact_array(element=jnp.ones(2))
    assert eqx.is_inexact_array_like(element=1.0)
