"""filter_custom_jvp and filter_custom_vjp: what rules are given, and what they return."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from nests import with_own_vjp

import equinox_like as eqx

ONE, TWO = jnp.asarray(1.0), jnp.asarray(2.0)


class Scale(eqx.Module):
    factor: Any
    activation: Any = jnp.tanh

    def __call__(self, x):
        return self.factor * x


def tripled(seen=None, **kwargs):
    """`x -> 2 x`, with 3 as its derivative."""

    @eqx.filter_custom_jvp
    def f(x, *rest, **kwargs):
        """Doc."""
        return 2 * x

    def rule(primals, tangents, **kwargs):
        if seen is not None:
            seen.append((primals, tangents, kwargs))
        x, t = primals[0], tangents[0]
        return 2 * x, None if t is None else 3 * t

    f.def_jvp(rule)
    return f


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16])
def test_rules_get_numpy_arrays_as_jax_arrays(dtype):
    def double(x, y):
        return (2.0 * y) * (2.0 * x)

    f, g = eqx.filter_custom_jvp(double), eqx.filter_custom_vjp(double)
    f.def_jvp(lambda primals, tangents: (double(*primals), 3.0 * tangents[0]))
    g.def_fwd(lambda perturbed, x, y: (double(x, y), None))
    g.def_bwd(lambda res, ct, perturbed, x, y: 3.0 * ct)
    x = np.ones(2, dtype)
    for h in (f, g):
        gradient = eqx.filter_grad(lambda z, h=h: h(z, x).sum())(x)
        assert gradient.tolist() == [3, 3]
        assert gradient.dtype == jnp.asarray(x).dtype
    assert eqx.filter_jvp(f, (x, x), (x, None))[0].dtype == jnp.asarray(x).dtype


@pytest.mark.parametrize("disabled", [False, True])
def test_jvp_rule_is_used_in_both_modes_and_under_each_transformation(disabled):
    f = tripled()
    with jax.disable_jit(disabled):
        assert f(TWO) == 4.0 and f(2.0) == 4.0
        assert jax.jvp(f, (2.0,), (1.0,)) == (4.0, 3.0)
        assert eqx.filter_jvp(f, (TWO,), (ONE,)) == (4.0, 3.0)
        for grad in (jax.grad, eqx.filter_grad):
            assert grad(f)(TWO) == 3.0
            assert grad(eqx.filter_jit(f))(TWO) == 3.0
            assert jax.jit(grad(f))(TWO) == 3.0
            assert jax.vmap(grad(f))(jnp.ones(2)).tolist() == [3, 3]
            assert grad(eqx.filter_checkpoint(f))(TWO) == 3.0
            assert grad(lambda x: jax.lax.cond(x > 0, f, jnp.sin, x))(TWO) == 3.0


def test_jvp_rule_is_told_what_is_perturbed():
    seen = []
    f = tripled(seen)
    marker = object()

    def call(x, y):
        return f(x, y, marker, 3, jnp.arange(2), jax.lax.stop_gradient(x), n=4)

    assert jax.grad(call)(TWO, ONE) == 3.0
    ((primals, tangents, kwargs),) = seen
    assert primals[2] is marker and primals[3] == 3 and kwargs == {"n": 4}
    assert tangents[0] is not None and tangents[1:] == (None,) * 5


def test_jvp_rule_sees_arrays_where_python_numbers_are_differentiated():
    seen = []
    assert jax.grad(tripled(seen))(2.0) == 3.0
    assert isinstance(seen[0][0][0], jax.Array)


def test_jvp_rule_may_call_the_function_and_be_differentiated_again():
    @eqx.filter_custom_jvp
    def cube(x):
        return x**3

    def rule(primals, tangents):
        return cube(*primals), 3 * primals[0] ** 2 * tangents[0]

    cube.def_jvp(rule)
    assert eqx.filter_grad(eqx.filter_grad(cube))(TWO) == 12.0
    assert jax.jvp(jax.grad(cube), (2.0,), (1.0,)) == (12.0, 12.0)


def test_none_from_a_rule_is_a_zero_that_stays_known():
    @eqx.filter_custom_jvp
    def f(x, y):
        return {"a": x, "b": x + y, "none": None}

    f.def_jvp(
        lambda primals, tangents: (
            f(*primals),
            {"a": tangents[0], "b": None, "none": None},
        )
    )
    out, tangent = eqx.filter_jvp(f, (ONE, TWO), (ONE, None))
    assert out == {"a": 1.0, "b": 3.0, "none": None}
    assert tangent == {"a": 1.0, "b": None, "none": None}
    assert jax.grad(lambda x: f(x, x)["b"])(TWO) == 0.0


def test_arrays_of_a_callable_argument_are_perturbed():
    @eqx.filter_custom_jvp
    def apply(fn, x):
        return fn(x)

    apply.def_jvp(
        lambda primals, tangents: eqx.filter_jvp(lambda f, x: f(x), primals, tangents)
    )

    def loss(w):
        return apply(eqx.filter_closure_convert(lambda x: w * x, TWO), TWO)

    assert jax.grad(loss)(3.0) == 2.0
    gradient = eqx.filter_grad(apply)(Scale(TWO), TWO)
    assert gradient.factor == 2.0 and gradient.activation is None


def test_keywords_may_hold_arrays_but_no_tangents():
    f = tripled()
    assert jax.grad(lambda x: f(x, y=ONE))(TWO) == 3.0
    for wrap in (lambda g: g, eqx.filter_jit):
        with pytest.raises(ValueError, match=r"`f` received a keyword tangent"):
            jax.grad(wrap(lambda x: f(ONE, y=x)))(TWO)
    assert jax.grad(lambda x: f(x, y=jax.lax.stop_gradient(x)))(TWO) == 3.0


def test_arrays_of_the_wrapped_module_have_no_tangents():
    def loss(factor):
        f = eqx.filter_custom_jvp(Scale(factor))
        f.def_jvp(lambda primals, tangents: (primals[0], tangents[0]))
        return f(ONE)

    with pytest.raises(ValueError, match="`Scale` received a keyword tangent"):
        jax.grad(loss)(TWO)


def test_arrays_that_are_not_differentiated_do_not_leak():
    f = tripled()

    @eqx.filter_jit
    def run(x, n):
        return jax.lax.cond(n > 0, lambda: f(x, n, n * 2.0), lambda: x)

    gradient = eqx.filter_grad(run)
    with jax.checking_leaks():
        assert gradient(TWO, jnp.asarray(1)) == 3.0


def test_without_a_rule_the_call_raises():
    f = eqx.filter_custom_jvp(functools.partial(jnp.power, 2.0))
    with pytest.raises(AttributeError, match=r"`power` has no rule.*def_jvp"):
        f(ONE)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ((ONE, (ONE,)), ValueError, r"`f` must return a tangent with the structure"),
        ((ONE, jnp.ones(3)), TypeError, r"`f` .*`output` has shape \(\), .* \(3,\)"),
        ((ONE, 1), TypeError, "int32"),
        (("text", None), TypeError, r"`f`.*`output` is a str"),
    ],
    ids=["structure", "shape", "dtype", "text"],
)
def test_bad_results_of_a_jvp_rule(returned, error, message):
    @eqx.filter_custom_jvp
    def f(x):
        return x

    f.def_jvp(lambda primals, tangents: returned)
    with pytest.raises(error, match=message):
        jax.grad(f)(TWO)


@pytest.mark.parametrize(
    ("output", "tangent"),
    [
        (ONE, jnp.ones((), jnp.float16)),
        (ONE * 1j, ONE),
        (jnp.arange(3), jnp.ones(3)),
        (2, 1.0),
        (jnp.ones((), jnp.bfloat16), 1.0),
    ],
    ids=["half", "complex", "integers", "int", "number"],
)
def test_tangent_of_another_dtype_is_named_by_the_path_of_its_output(output, tangent):
    f = eqx.filter_custom_jvp(lambda x: {"a": [x, output]})
    f.def_jvp(lambda p, t: ({"a": [p[0], output]}, {"a": [t[0], tangent]}))
    message = (
        r"rule of `filter_custom_jvp` of `<lambda>`.*`output\['a'\]\[1\]` has shape"
    )
    with pytest.raises(TypeError, match=message):
        jax.jvp(f, (TWO,), (ONE,))


def test_rule_may_return_symbolic_zeros_of_jax():
    f = eqx.filter_custom_jvp(lambda x: {"a": 2 * x, "b": jnp.arange(3), "c": x})

    def rule(primals, tangents):
        out = f(*primals)
        zeros = jax.custom_derivatives.zero_from_primal(out, symbolic_zeros=True)
        return out, zeros | {"a": 3 * tangents[0]}

    f.def_jvp(rule)
    _, tangent = jax.jvp(f, (TWO,), (ONE,))
    assert tangent["a"] == 3 and tangent["c"] == 0
    assert tangent["b"].dtype == jax.dtypes.float0
    assert jax.grad(lambda x: sum(map(jnp.sum, f(x).values())))(TWO) == 3


def test_outputs_of_a_custom_jvp_are_arrays():
    f = eqx.filter_custom_jvp(lambda x: {"a": x, "b": "text"})
    f.def_jvp(lambda primals, tangents: None)
    with pytest.raises(TypeError, match=r"`output\['b'\]` is a str"):
        f(ONE)


def test_old_form_of_the_jvp_rule_gets_zeros():
    seen = []

    @eqx.filter_custom_jvp
    def f(x, y, n):
        return x * y

    def rule(primals, tangents):
        seen.append(tangents)
        return f(*primals), tangents[0] * primals[1] + primals[0] * tangents[1]

    with pytest.warns(UserWarning, match="`defjvp` is deprecated"):
        f.defjvp(rule)
    assert jax.grad(f)(TWO, ONE, jnp.arange(2)) == 1.0
    assert seen[0][1] == 0.0 and seen[0][2] is None
    with pytest.raises(NotImplementedError, match="def_jvp"):
        f.defjvps(rule)


def clipped(seen=None, **options):
    """The identity on the first argument, with a gradient of at most `limit`."""

    @eqx.filter_custom_vjp(**options)
    def clip(x, limit):
        """Doc."""
        return x

    def fwd(perturbed, x, limit):
        if seen is not None:
            seen.append(("fwd", perturbed, x))
        return x, "residual"

    def bwd(residuals, cotangent, perturbed, x, limit):
        assert residuals == "residual"
        if seen is not None:
            seen.append(("bwd", cotangent, perturbed))
        return jax.tree.map(lambda c: jnp.clip(c, -limit, limit), cotangent)

    clip.def_bwd(bwd)
    clip.def_fwd(fwd)
    return clip


@pytest.mark.parametrize("options", [{}, {"optimize_remat": True}], ids=["", "remat"])
@pytest.mark.parametrize("disabled", [False, True])
def test_vjp_rules_are_used_under_each_transformation(options, disabled):
    f = clipped(**options)
    with jax.disable_jit(disabled):
        assert f(TWO, 1.0) == 2.0 and f(2.0, limit=1) == 2.0

        def loss(x, limit=1.0):
            return 5 * f(x, limit)

        for grad in (jax.grad, eqx.filter_grad):
            assert grad(loss)(TWO) == 1.0
            assert grad(eqx.filter_jit(loss))(TWO) == 1.0
            assert jax.jit(grad(loss))(TWO) == 1.0
            assert jax.vmap(grad(loss))(jnp.ones(2)).tolist() == [1, 1]
            assert jax.vmap(grad(loss))(jnp.ones(2), jnp.arange(2.0)).tolist() == [0, 1]
            assert grad(eqx.filter_checkpoint(loss))(TWO) == 1.0
            assert grad(lambda x: jax.lax.cond(x > 0, loss, jnp.sin, x))(TWO) == 1.0


def test_vjp_rules_are_told_what_is_perturbed():
    seen = []
    f = clipped(seen)
    marker = object()

    def loss(x, y):
        arg = {"x": x, "y": y, "n": 3, "i": jnp.arange(2), "m": marker}
        arg["stopped"] = jax.lax.stop_gradient(x)
        return 5 * f(arg, 1.0)["x"]

    assert jax.grad(loss)(TWO, ONE) == 1.0
    (_, perturbed, x), (_, cotangent, again) = seen
    assert perturbed == again == dict.fromkeys(perturbed, False) | {"x": True}
    assert x["m"] is marker and x["n"] == 3
    assert cotangent == dict.fromkeys(perturbed) | {"x": 5.0}


def test_under_optimize_remat_nothing_is_known_to_be_zero():
    seen = []
    f = clipped(seen, optimize_remat=True)
    assert jax.grad(lambda x: f((x, ONE, 3), 1.0)[0])(TWO) == 1.0
    assert seen[0][1] == (True, True, False)
    assert seen[1][1] == (1.0, 0.0, None)


def test_optimize_remat_runs_fwd_once():
    def runs(**options):
        count = []
        f = eqx.filter_custom_vjp(lambda x: jnp.sin(x), **options)

        def fwd(perturbed, x):
            jax.debug.callback(lambda: count.append(1))
            return jnp.sin(x), jnp.cos(x)

        f.def_fwd(fwd)
        f.def_bwd(lambda cos, ct, perturbed, x: cos * ct)
        g = eqx.filter_checkpoint(lambda x: jnp.sin(f(x)))
        value = jax.jit(jax.grad(g))(TWO)
        assert jnp.allclose(value, jnp.cos(jnp.sin(2.0)) * jnp.cos(2.0), rtol=1e-5)
        jax.effects_barrier()
        return len(count)

    assert runs(optimize_remat=True) == 1


@pytest.mark.parametrize("options", [{}, {"optimize_remat": True}], ids=["", "remat"])
def test_python_float_is_differentiated_like_an_array(options):
    seen = []
    assert jax.grad(lambda x: 5 * clipped(seen, **options)(x, 1.0))(2.0) == 1.0
    assert isinstance(seen[0][2], jax.Array)


@pytest.mark.parametrize("options", [{}, {"optimize_remat": True}], ids=["", "remat"])
@pytest.mark.parametrize("wrap", [lambda g: g, eqx.filter_jit], ids=["eager", "jit"])
def test_only_the_first_argument_may_be_perturbed(options, wrap):
    f = clipped(**options)
    for call in (lambda x: f(ONE, x), lambda x: f(ONE, limit=x), lambda x: f(x, x)):
        with pytest.raises(RuntimeError, match=r"`clip`.*cannot be autodifferentiated"):
            jax.grad(wrap(call))(TWO)
    assert jax.grad(wrap(lambda x: f(x, jax.lax.stop_gradient(x))))(TWO) == 1.0


def test_arrays_of_the_wrapped_module_may_not_be_perturbed():
    def loss(factor):
        return with_own_vjp(Scale(factor))(ONE)

    with pytest.raises(RuntimeError, match=r"`Scale`.*cannot be autodifferentiated"):
        jax.grad(loss)(TWO)


def test_anything_goes_in_and_comes_out_of_a_custom_vjp():
    marker = object()

    @eqx.filter_custom_vjp
    def f(model, n):
        return {"y": model.factor * n, "marker": marker, "i": jnp.arange(2), "n": n}

    def fwd(perturbed, model, n):
        assert perturbed.factor is True and perturbed.activation is False
        return f(model, n), {"n": n, "array": model.factor, "fn": model.activation}

    def bwd(residuals, cotangent, perturbed, model, n):
        assert residuals["fn"] is model.activation is jnp.tanh
        assert set(cotangent) == {"y", "marker", "i", "n"}
        assert [cotangent[k] for k in ("marker", "i", "n")] == [None] * 3
        return Scale(residuals["n"] * cotangent["y"], None)

    f.def_fwd(fwd)
    f.def_bwd(bwd)
    out = f(Scale(TWO), 3)
    assert out["y"] == 6.0 and out["marker"] is marker and out["n"] == 3
    for wrap in (lambda g: g, eqx.filter_jit):
        gradient = wrap(eqx.filter_grad(lambda m: f(m, 3)["y"]))(Scale(TWO))
        assert gradient.factor == 3.0 and gradient.activation is None


def test_backward_rule_is_traced_once_under_jit():
    seen = []
    gradient = eqx.filter_jit(eqx.filter_grad(lambda x: clipped_once(x, 1.0)))
    clipped_once = clipped(seen)
    assert gradient(TWO) == gradient(ONE) == 1.0
    assert [name for name, *_ in seen] == ["fwd", "bwd"]


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        ((ONE,), RuntimeError, "`f`.*same structure"),
        ({"x": ONE, "n": ONE}, RuntimeError, r"`f`.*gradient\['n'\].*same structure"),
        ({"x": 1, "n": None}, TypeError, r"gradient\['x'\].*int32"),
        ({"x": 1j, "n": None}, TypeError, r"gradient\['x'\].*complex"),
        ({"x": "text", "n": None}, TypeError, r"gradient\['x'\].*str"),
        ({"x": jnp.ones(3), "n": None}, ValueError, r"gradient\['x'\].*\(3,\).*\(\)"),
    ],
    ids=["structure", "integer", "int", "complex", "text", "shape"],
)
def test_bad_gradients_of_a_backward_rule(gradient, error, message):
    @eqx.filter_custom_vjp
    def f(tree):
        return tree["x"]

    f.def_fwd(lambda perturbed, tree: (tree["x"], None))
    f.def_bwd(lambda residuals, ct, perturbed, tree: gradient)
    with pytest.raises(error, match=message):
        eqx.filter_grad(f)({"x": TWO, "n": jnp.asarray(3)})


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("gradient", [1.0, np.float64(1.0), jnp.ones((), jnp.bfloat16)])
def test_gradients_are_converted_to_the_dtype_of_the_argument(dtype, gradient):
    f = eqx.filter_custom_vjp(lambda x: x.real)
    f.def_fwd(lambda perturbed, x: (x.real, None))
    f.def_bwd(lambda residuals, ct, perturbed, x: gradient)
    out = eqx.filter_grad(f)(jnp.ones((), dtype))
    assert out.dtype == dtype and out == 1


def test_backward_rule_may_return_symbolic_zeros_of_jax():
    @eqx.filter_custom_vjp
    def f(args, number):
        return number * args["x"] * args["y"]

    @f.def_bwd
    def bwd(residuals, ct, perturbed, args, number):
        zeros = jax.custom_derivatives.zero_from_primal(args, symbolic_zeros=True)
        return zeros | {"x": 5 * ct}

    f.def_fwd(lambda perturbed, args, number: (f(args, number), None))
    args = {"x": TWO, "y": ONE, "steps": jnp.arange(2)}
    grads = eqx.filter_grad(f)(args, 3)
    assert grads["x"] == 5 and grads["y"] == 0 and grads["steps"] is None


def test_none_for_a_gradient_is_zero():
    f = eqx.filter_custom_vjp(lambda x: x)
    f.def_fwd(lambda perturbed, x: (x, None))
    f.def_bwd(lambda residuals, ct, perturbed, x: None)
    assert jax.grad(f)(TWO) == 0.0


@pytest.mark.parametrize(
    "fun",
    [lambda x: x, functools.partial(jnp.power, 2.0), Scale(ONE)],
    ids=["lambda", "partial", "module"],
)
def test_without_rules_a_custom_vjp_raises(fun):
    f = eqx.filter_custom_vjp(fun)
    with pytest.raises(
        RuntimeError, match="`def_fwd` or `def_bwd` not yet called for `"
    ):
        f(ONE)
    f.def_fwd(lambda perturbed, x: (x, None))
    with pytest.raises(RuntimeError, match="not yet called"):
        f(ONE)


def test_first_argument_is_passed_by_position():
    with pytest.raises(TypeError, match="by position"):
        clipped()(x=ONE, limit=1.0)


def test_forward_mode_is_jaxs_error():
    with pytest.raises(TypeError, match="forward-mode"):
        eqx.filter_jvp(lambda x: clipped()(x, 1.0), (TWO,), (ONE,))


def test_old_form_of_the_vjp_rules_gets_zeros():
    seen = []

    @eqx.filter_custom_vjp
    def f(x, y):
        return x * y, x + y, 3, jnp.arange(2)

    def fwd(x, y):
        return f(x, y), y

    def bwd(y, cotangent, x, again):
        seen.append(cotangent)
        return y * cotangent[0] + cotangent[1]

    with pytest.warns(UserWarning, match="`defvjp` is deprecated"):
        f.defvjp(fwd, bwd)
    assert jax.grad(lambda x: f(x, ONE)[0])(TWO) == 1.0
    assert seen == [(1.0, 0.0, None, None)]


class Layer(eqx.Module):
    weight: Any

    @eqx.filter_custom_jvp
    def forward(self, x):
        return self.weight * x

    @eqx.filter_custom_vjp
    def reverse(self, x):
        return self.weight * x


def _layer_rule(primals, tangents):
    layer, x = primals
    return layer.weight * x, None if tangents[0] is None else 7 * tangents[0].weight


Layer.forward.def_jvp(_layer_rule)
Layer.reverse.def_fwd(lambda perturbed, layer, x: (layer.weight * x, None))
Layer.reverse.def_bwd(lambda residuals, ct, perturbed, layer, x: Layer(7 * ct))


@pytest.mark.parametrize("method", ["forward", "reverse"])
def test_methods_have_custom_rules(method):
    layer = Layer(TWO)
    assert getattr(layer, method)(3.0) == 6.0
    gradient = eqx.filter_grad(lambda m: getattr(m, method)(3.0))(layer)
    assert isinstance(gradient, Layer) and gradient.weight == 7.0


@pytest.mark.parametrize("make", [tripled, clipped])
def test_wrapper_is_a_pytree_with_the_functions_name(make):
    f = make()
    assert f.__doc__ == "Doc." and f.__name__ in repr(f)
    assert next(iter(inspect.signature(f).parameters)) == "x"
    assert jax.tree.leaves(f) == []
    assert eqx.filter_jit(lambda f, x: f(x, 1.0))(f, ONE) in (1.0, 2.0)
    (leaf,) = jax.tree.leaves(
        eqx.filter(eqx.filter_custom_jvp(Scale(ONE)), eqx.is_array)
    )
    assert leaf is ONE


def twice(f):
    return lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[
        0
    ]


def scan_has_gradients():
    """Not under JAX_SCAN3 with jax 0.12."""
    try:
        return jax.grad(twice(jnp.sin))(1.0) is not None
    except NotImplementedError:
        return False


@pytest.mark.parametrize("options", [{}, {"optimize_remat": True}], ids=["", "remat"])
def test_rules_are_used_within_a_loop(options):
    assert jax.jvp(twice(tripled()), (2.0,), (1.0,)) == (8.0, 9.0)
    if scan_has_gradients():
        assert jax.grad(twice(tripled()))(TWO) == 9.0
        clip = clipped(**options)
        assert jax.grad(twice(lambda x: 5 * clip(x, 1.0)))(TWO) == 1.0


OUTPUTS = {
    "structure": (
        (lambda x: (x, x)),
        r"`output` is .* from the function, but .* tuple",
    ),
    "shape": (
        (lambda x: jnp.stack([x, x])),
        r"float32\[\] from .*, but .*float32\[2\] from",
    ),
    "dtype": (
        (lambda x: x.astype(jnp.float16)),
        r"float32\[\] from .*float16\[\] from",
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
class TestRuleThatReturnsSomethingElse:
    """JAX would return that instead, where the function is differentiated."""

    def test_jvp(self, kind):
        change, message = OUTPUTS[kind]
        f = eqx.filter_custom_jvp(lambda x: 2 * x)
        f.def_jvp(lambda primals, tangents: (change(*primals), change(*tangents)))
        error = ValueError if kind == "structure" else TypeError
        with pytest.raises(error, match=f"rule of `filter_custom_jvp`.*{message}"):
            jax.jvp(f, (TWO,), (ONE,))

    def test_vjp(self, kind):
        change, message = OUTPUTS[kind]
        f = eqx.filter_custom_vjp(lambda x: 2 * x)
        f.def_fwd(lambda perturbed, x: (change(x), None))
        f.def_bwd(lambda residuals, cotangent, perturbed, x: x)
        error = ValueError if kind == "structure" else TypeError
        with pytest.raises(error, match=f"`def_fwd`.*{message}"):
            jax.vjp(f, TWO)


def test_rule_that_returns_another_number_than_the_function():
    f = eqx.filter_custom_vjp(lambda x: (x, 2))
    f.def_fwd(lambda perturbed, x: ((x, 3), None))
    f.def_bwd(lambda residuals, cotangent, perturbed, x: cotangent[0])
    with pytest.raises(
        TypeError, match=r"`output\[1\]` is 2 from the function, but 3 from"
    ):
        jax.grad(lambda x: f(x)[0])(TWO)


def test_rules_that_return_no_pair_are_named():
    f = eqx.filter_custom_jvp(lambda x: 2 * x)
    f.def_jvp(lambda primals, tangents: primals[0])
    with pytest.raises(
        TypeError, match=r"return a pair `\(output, tangent\)`.*float32"
    ):
        jax.jvp(f, (TWO,), (ONE,))
    g = eqx.filter_custom_vjp(lambda x: 2 * x)
    g.def_fwd(lambda perturbed, x: 2 * x)
    g.def_bwd(lambda residuals, cotangent, perturbed, x: cotangent)
    with pytest.raises(TypeError, match=r"`def_fwd`.* pair `\(output, residuals\)`"):
        jax.grad(g)(TWO)


def test_function_that_needs_values_has_rules_all_the_same():
    f = eqx.filter_custom_jvp(lambda x: jnp.asarray(np.sin(float(x))))
    f.def_jvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))
    assert jax.jvp(f, (TWO,), (ONE,)) == (4, 3)
    g = eqx.filter_custom_vjp(lambda x: jnp.asarray(np.sin(float(x))))
    g.def_fwd(lambda perturbed, x: (2 * x, None))
    g.def_bwd(lambda residuals, cotangent, perturbed, x: 3 * cotangent)
    assert jax.grad(g)(TWO) == 3


@pytest.mark.parametrize("disable_jit", [False, True])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_vjp_within_a_shard_map(jit, disable_jit):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = eqx.filter_custom_vjp(lambda x, name: (2 * x, name))
    f.def_fwd(lambda perturbed, x, name: (f(x, name), None))
    f.def_bwd(lambda residuals, cotangent, perturbed, x, name: 3 * cotangent[0])

    def value(x):
        y, name = f(x, "n")
        assert name == "n"
        return y

    for each, expected in (value, 2), (jax.grad(lambda x: value(x).sum()), 3):
        mapped = jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        with jax.disable_jit(disable_jit):
            assert jit(mapped)(jnp.ones(4)).tolist() == [expected] * 4


def test_forward_mode_of_a_vjp_names_the_function_and_the_fix():
    def named(x):
        return x

    f = eqx.filter_custom_vjp(named)
    f.def_fwd(lambda perturbed, x: (x, None))
    f.def_bwd(lambda residuals, cotangent, perturbed, x: cotangent)
    with pytest.raises(
        TypeError, match=r"`named` .*no forward mode.*filter_custom_jvp"
    ):
        jax.jvp(f, (TWO,), (ONE,))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
def test_rules_of_a_vjp_may_be_differentiated_in_forward_mode(wrap):
    f = eqx.filter_custom_vjp(lambda x: x**3)
    f.def_fwd(lambda perturbed, x: (x**3, x))
    f.def_bwd(lambda x, cotangent, perturbed, _: cotangent * 3 * x**2)
    gradient = jax.grad(lambda x: wrap(f)(x[None])[0])
    assert jax.jit(jax.jacfwd(gradient))(TWO) == jax.jacrev(gradient)(TWO) == 12


@pytest.mark.parametrize("number", [2.0, 2j])
def test_gradient_of_a_number_is_not_used(number):
    def loss(f, a):
        return jnp.abs(f((a, number)))

    f = eqx.filter_custom_vjp(lambda args: args[0] * args[1])
    f.def_fwd(lambda perturbed, args: (args[0] * args[1], None))

    @f.def_bwd
    def bwd(residuals, cotangent, perturbed, args):
        assert perturbed == (True, False)
        return jnp.real(cotangent * args[1]), cotangent * args[0]

    gradient = jax.grad(functools.partial(loss, f))(TWO)
    assert gradient == jax.grad(functools.partial(loss, lambda x: x[0] * x[1]))(TWO)


@pytest.mark.parametrize("other", [3, np.asarray(3), "name", jnp.tanh])
def test_gradient_of_what_has_none_is_refused(other):
    f = eqx.filter_custom_vjp(lambda args: args[0])
    f.def_fwd(lambda perturbed, args: (args[0], None))
    f.def_bwd(lambda residuals, cotangent, perturbed, args: (cotangent, cotangent))
    with pytest.raises(RuntimeError, match=r"`gradient\[1\]` for a leaf that is not"):
        jax.grad(lambda a: f((a, other)))(TWO)


def gradient_within_shard_map(bwd):
    """The gradient of `w * x`, where all devices share `w`, and `x` is split."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = eqx.filter_custom_vjp(lambda args: args["w"] * args["x"])
    f.def_fwd(lambda perturbed, args: (args["w"] * args["x"], None))
    f.def_bwd(lambda residuals, cotangent, perturbed, args: bwd(cotangent, **args))
    mapped = jax.shard_map(
        lambda w, x: f({"w": w, "x": x}),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P("d"),
    )
    x = jnp.arange(4.0)
    return jax.jit(jax.grad(lambda w, x: mapped(w, x).sum(), (0, 1)))(TWO, x)


def test_gradient_for_what_devices_share_must_be_summed_over_them():
    def alone(cotangent, w, x):
        return {"w": (cotangent * x).sum(), "x": cotangent * w}

    with pytest.raises(
        ValueError, match=r"`gradient\['w'\]` .* along 'd', .*psum\(\.\.\., \('d',\)\)"
    ):
        gradient_within_shard_map(alone)

    def summed(cotangent, w, x):
        return {"w": jax.lax.psum((cotangent * x).sum(), "d"), "x": cotangent * w}

    of_w, of_x = gradient_within_shard_map(summed)
    assert of_w == 6 and of_x.tolist() == [2] * 4


def test_gradient_for_what_differs_may_be_the_same_on_all_devices():
    def constant(cotangent, w, x):
        return {"w": None, "x": jnp.ones(2)}

    of_w, of_x = gradient_within_shard_map(constant)
    assert of_w == 0 and of_x.tolist() == [1] * 4


def batched_elsewhere(kind):
    """`x -> A @ x`, with a rule whose result JAX batches along another axis."""
    a = jnp.arange(9.0).reshape(3, 3)
    if kind == "jvp":
        f = eqx.filter_custom_jvp(lambda x: a @ x)
        f.def_jvp(lambda primals, tangents: (primals[0] @ a.T, tangents[0] @ a.T))
        return f
    f = eqx.filter_custom_vjp(lambda x: a @ x, optimize_remat=kind == "remat")
    f.def_fwd(lambda perturbed, x: (x @ a.T, None))
    f.def_bwd(lambda residuals, ct, perturbed, x: a.T @ ct)
    return f


@pytest.mark.parametrize("kind", ["jvp", "vjp", "remat"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stage", [jax.jit, jax.checkpoint])
def test_gradient_of_a_compiled_map_is_that_of_the_map(kind, axis, stage):
    f, xs = batched_elsewhere(kind), jnp.arange(9.0).reshape(3, 3)
    mapped = jax.vmap(f, in_axes=axis, out_axes=axis)

    def loss(mapped, xs):
        return jnp.vdot(mapped(xs), xs**2)

    wanted = jax.grad(loss, 1)(mapped, xs)
    assert jax.grad(loss, 1)(stage(mapped), xs).tolist() == wanted.tolist()


def waves(p):
    """The second output does not depend on the first argument."""
    return jnp.sin(p[0] * p[1]), {"second": jnp.cos(p[1])}, jnp.ones(())


def with_vjp(optimize_remat):
    @functools.partial(eqx.filter_custom_vjp, optimize_remat=optimize_remat)
    def function(p):
        return waves(p)

    @function.def_fwd
    def fwd(perturbed, p):
        return waves(p), None

    @function.def_bwd
    def bwd(residuals, cotangent, perturbed, p):
        leaves = jax.tree.leaves(cotangent, is_leaf=lambda x: x is None)
        first, second, constant = (0.0 if c is None else c for c in leaves)
        x, w = p
        # The rule is free to use the cotangent of an output that depends on nothing.
        ones = jnp.ones_like(w) * (first * x * jnp.cos(x * w) - second * jnp.sin(w))
        return jnp.ones_like(x) * first * w * jnp.cos(x * w), ones + constant * w

    return function


def with_jvp():
    @eqx.filter_custom_jvp
    def function(p):
        return waves(p)

    @function.def_jvp
    def rule(primals, tangents):
        ((x, w),), ((dx, dw),) = primals, tangents
        dx, dw = (0.0 if t is None else t for t in (dx, dw))
        second = {"second": -jnp.sin(w) * dw + jnp.zeros_like(w)}
        return waves((x, w)), (jnp.cos(x * w) * (w * dx + x * dw), second, None)

    return function


def number(w):
    """One, whose derivative is `w`, as `bwd` says of the third output."""
    half = w**2 / 2
    return 1 + half - jax.lax.stop_gradient(half)


def expected(p):
    first, second, _ = waves(p)
    return first, second, number(p[1])


def summed(f, x, w):
    return sum(map(jnp.sum, jax.tree.leaves(f((x, w)))))


MAPS = {
    "map": lambda f, xs, w: jax.vmap(lambda x: summed(f, x, w))(xs).sum(),
    "filter_vmap": lambda f, xs, w: eqx.filter_vmap(lambda x: summed(f, x, w))(
        xs
    ).sum(),
    "unmapped axis": lambda f, xs, w: jax.vmap(
        lambda x, w: summed(f, x, w), in_axes=(0, None)
    )(xs, w).sum(),
    "second output": lambda f, xs, w: jax.vmap(lambda x: f((x, w))[1]["second"])(
        xs
    ).sum(),
    "outputs": lambda f, xs, w: sum(
        map(jnp.sum, jax.tree.leaves(jax.vmap(lambda x: f((x, w)), out_axes=-1)(xs)))
    ),
    "compiled": lambda f, xs, w: jax.jit(jax.vmap(lambda x: summed(f, x, w)))(xs).sum(),
    "nested": lambda f, xs, w: jax.vmap(
        lambda y: jax.vmap(lambda x: summed(f, x * y, w))(xs)
    )(xs).sum(),
    "nested, one axis each": lambda f, xs, w: jax.vmap(
        lambda y: jax.vmap(lambda x: summed(f, x, w * y))(xs)
    )(xs).sum(),
    "checkpoint": lambda f, xs, w: jax.vmap(jax.checkpoint(lambda x: summed(f, x, w)))(
        xs
    ).sum(),
    "map of a branch": lambda f, xs, w: jax.vmap(
        lambda x: jax.lax.cond(x > 0.5, lambda: summed(f, x, w), lambda: x * w)
    )(xs).sum(),
    "closure": lambda f, xs, w: jax.vmap(
        lambda x: eqx.filter_closure_convert(lambda x: summed(f, x, w), x)(x)
    )(xs).sum(),
}


LOOPS = {
    "scan of a map": lambda f, xs, w: jax.lax.scan(
        lambda c, y: (c + jax.vmap(lambda x: summed(f, x * y, w))(xs).sum(), None),
        0.0,
        xs,
    )[0],
    "map of a scan": lambda f, xs, w: jax.vmap(
        lambda x: jax.lax.scan(lambda c, _: (c + summed(f, x, w), None), 0.0, None, 2)[
            0
        ]
    )(xs).sum(),
}


@pytest.mark.parametrize("place", MAPS)
@pytest.mark.parametrize("compiled", [False, True])
def test_output_that_depends_on_nothing_mapped_has_the_right_gradient(place, compiled):
    check_gradients(MAPS[place], compiled)


@pytest.mark.parametrize("place", LOOPS)
@pytest.mark.parametrize("compiled", [False, True])
def test_output_that_depends_on_nothing_mapped_in_a_loop(place, compiled):
    check_gradients(LOOPS[place], compiled)


def check_gradients(mapped, compiled):
    xs, w = jnp.array([0.3, 1.3, 2.3]), jnp.array(0.7)
    forms = (with_vjp(False), expected), (with_vjp(True), expected), (with_jvp(), waves)
    for function, plain in forms:
        found, wanted = (
            jax.grad(lambda xs, w, f=f: mapped(f, xs, w), (0, 1))
            for f in (function, plain)
        )
        found = jax.jit(found) if compiled else found
        for a, b in zip(found(xs, w), wanted(xs, w), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_gradient_of_shared_weights_is_that_of_the_plain_function():
    f = eqx.filter_custom_vjp(lambda p: (jnp.sin(p[0] * p[1]), jnp.cos(p[1])))
    f.def_fwd(lambda perturbed, p: (f.__wrapped__(p), None))
    f.def_bwd(lambda _, c, perturbed, p: jax.vjp(f.__wrapped__, p)[1](c)[0])

    def loss(function):
        return lambda xs, w: jax.vmap(lambda x: sum(function((x, w))))(xs).sum()

    args = jnp.array([0.1, 0.5, 2.0]), jnp.array(0.8)
    for found, wanted in zip(
        jax.grad(loss(f), (0, 1))(*args),
        jax.grad(loss(f.__wrapped__), (0, 1))(*args),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_output_is_mapped_if_an_argument_is():
    function = with_vjp(False)
    xs, w = jnp.arange(3.0), jnp.array(0.7)
    out = jax.vmap(lambda x: function((x, w)))(xs)
    assert [x.shape for x in jax.tree.leaves(out)] == [(3,)] * 3
    with pytest.raises(ValueError, match="out_axes"):
        jax.vmap(lambda x: function((x, w)), out_axes=(0, None, None))(xs)
    alone = jax.vmap(lambda x: (x, function((w, w))), out_axes=(0, None))(xs)[1]
    assert [x.shape for x in jax.tree.leaves(alone)] == [()] * 3


def test_optimize_remat_has_forward_over_reverse_mode_only():
    f = eqx.filter_custom_vjp(lambda x: jnp.sin(x), optimize_remat=True)
    f.def_fwd(lambda perturbed, x: (jnp.sin(x), None))
    f.def_bwd(lambda _, cotangent, perturbed, x: jnp.cos(x) * cotangent)
    x = jnp.array(1.0)
    assert jnp.allclose(eqx.filter_hessian(f)(x), -jnp.sin(x))
    try:
        second = eqx.filter_grad(eqx.filter_grad(f))(x)
    except ValueError as error:
        assert "Linearization failed" in str(error)
    else:  # under the flag `JAX_CUSTOM_VJP3`
        assert jnp.allclose(second, -jnp.sin(x))
