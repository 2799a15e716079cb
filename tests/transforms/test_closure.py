"""filter_closure_convert: captured arrays become leaves."""

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

Y = jnp.arange(3)


class Scale(eqx.Module):
    factor: Any

    def __call__(self, x):
        return self.factor * x


def multiplier(y):
    return lambda x, n, *, name="text": (x * y * n, n, name)


def plain(x, n):
    return x * n, n


def test_captured_arrays_are_the_very_leaves():
    f = eqx.filter_closure_convert(multiplier(Y), jnp.ones(3), 2)
    assert len(f.consts) == 1 and f.consts[0] is Y
    assert [x is Y for x in jax.tree.leaves(eqx.filter(f, eqx.is_array))] == [True]
    out, n, name = f(jnp.ones(3), 2)
    assert out.tolist() == [0, 2, 4] and n == 2 and name == "text"
    assert repr(f).startswith("<closure-converted <lambda>, consts=[")


@pytest.mark.parametrize(
    "fun",
    [
        Scale(Y),
        Scale(Y).__call__,
        functools.partial(jnp.multiply, Y),
        eqx.Partial(jnp.multiply, Y),
        eqx.filter_jit(Scale(Y)),
        lambda x, y=Y: x * y,
    ],
    ids=["module", "method", "partial", "Partial", "jit", "default"],
)
def test_every_callable_is_converted(fun):
    f = eqx.filter_closure_convert(fun, jnp.ones(3))
    assert [x is Y for x in f.consts] == [True]
    assert f(2 * jnp.ones(3)).tolist() == [0, 2, 4]


def test_captured_tracers_cross_a_boundary():
    @eqx.filter_custom_vjp
    def apply(f, x):
        return f(x)

    apply.def_fwd(lambda perturbed, f, x: eqx.filter_vjp(lambda f: f(x), f))
    apply.def_bwd(lambda pullback, ct, perturbed, f, x: pullback(ct)[0])

    def loss(w):
        return apply(eqx.filter_closure_convert(lambda x: w * x, 2.0 * w), jnp.ones(()))

    assert jax.grad(loss)(3.0) == 1.0
    assert jax.jit(jax.grad(loss))(3.0) == 1.0


def test_plain_functions_are_called_and_not_traced():
    calls = []

    def f(x, n):
        calls.append(x)
        return x * n, n

    assert f.__closure__ is not None
    converted = eqx.filter_closure_convert(plain, jnp.ones(3), 2)
    assert converted.consts == [] and jax.tree.leaves(converted) == []
    x = jnp.ones(3)
    assert converted(x, 2)[0].tolist() == [2, 2, 2]
    eqx.filter_closure_convert(f, jnp.ones(3), 2)
    assert len(calls) == 1


@pytest.mark.parametrize("fun", [plain, multiplier(Y)], ids=["plain", "closure"])
def test_structures_are_known(fun):
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    f = eqx.filter_closure_convert(fun, struct, n=2)
    assert f.in_struct == ((struct,), {"n": 2})
    assert f.out_struct[0] == struct and f.out_struct[1] == 2
    assert f(jnp.ones(3), n=2)[0].shape == (3,)


@pytest.mark.parametrize("fun", [plain, multiplier(Y)], ids=["plain", "closure"])
@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((jnp.ones(2), 1), {}, "`args[0]` was float32[3], and is now float32[2]"),
        ((jnp.ones(3, jnp.int32), 1), {}, "and is now int32[3]"),
        (([jnp.ones(3)], 1), {}, "`args[0]` was an array, and is now a list"),
        ((jnp.ones(3),), {"n": 1}, "`args` was a tuple"),
        ((jnp.ones(3), jnp.asarray(1)), {}, "`args[1]` was 1, and is now an array"),
        ((jnp.ones(3), 2), {}, "`args[1]` was the static value 1, and is now 2"),
        ((jnp.ones(3), 1.0), {}, "the static value 1, and is now 1.0"),
        ((jnp.ones(3), True), {}, "the static value 1, and is now True"),
    ],
    ids=["shape", "dtype", "tree", "keyword", "kind", "value", "float", "bool"],
)
def test_other_arguments_than_the_examples_are_refused(fun, args, kwargs, message):
    f = eqx.filter_closure_convert(fun, jnp.ones(3), 1)
    with pytest.raises(ValueError, match=f"`{f._name}` takes only arguments") as info:
        f(*args, **kwargs)
    assert message in str(info.value)


def test_weak_types_and_numpy_arrays_match():
    f = eqx.filter_closure_convert(Scale(Y), jnp.ones(()))
    assert f(jnp.asarray(2.0)).tolist() == [0, 2, 4]
    assert f(np.float32(2.0)).tolist() == [0, 2, 4]
    plain = eqx.filter_closure_convert(lambda x: x * 2, np.ones(2))  # float64
    assert plain(jnp.ones(2)).tolist() == plain(np.ones(2)).tolist() == [2, 2]


def test_converted_functions_can_be_transformed():
    f = eqx.filter_closure_convert(Scale(jnp.asarray(2.0)), jnp.ones(()))
    x = jnp.asarray(3.0)
    assert eqx.filter_jit(f)(x) == 6.0
    assert eqx.filter_grad(lambda f: f(x))(f).consts == [3.0]
    assert jax.vmap(f)(jnp.arange(2.0)).tolist() == [0, 2]
    assert eqx.filter_jit(lambda f, x: f(x))(f, x) == 6.0


def test_replaced_constants_are_freed() -> None:
    constant = jnp.arange(3.0)
    alive = weakref.ref(constant)
    converted = eqx.filter_closure_convert(lambda x, c=constant: c * x, jnp.ones(3))
    converted = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, converted)
    del constant
    gc.collect()
    assert alive() is None
    assert converted(jnp.ones(3)).tolist() == [1, 2, 3]


def test_converted_function_in_a_custom_vjp_passes_checking_leaks() -> None:
    @eqx.filter_custom_vjp
    def call(fun, x):
        return fun(x)

    @call.def_fwd
    def fwd(perturbed, fun, x):
        return fun(x), None

    @call.def_bwd
    def bwd(residuals, cotangent, perturbed, fun, x):
        return eqx.filter_vjp(lambda fun: fun(x), fun)[1](cotangent)[0]

    @jax.grad
    def gradient(w):
        return call(eqx.filter_closure_convert(lambda x: w * x, x), x).sum()

    x = jnp.arange(3.0)
    with jax.checking_leaks():
        assert gradient(jnp.ones(3)).tolist() == x.tolist()
