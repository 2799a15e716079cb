"""Guards: identities that refuse to be differentiated, transposed or batched."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

import equinox_like as eqx
from equinox_like import internal

GUARDS = {
    "nontraceable": internal.nontraceable,
    "nondifferentiable": internal.nondifferentiable,
    "nondifferentiable_backward": internal.nondifferentiable_backward,
    "nonbatchable": internal.nonbatchable,
}
guards = pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
batchable = pytest.mark.parametrize(
    "guard", [internal.nondifferentiable, internal.nondifferentiable_backward]
)
X = jnp.arange(3.0)


def jvp(f, x=X):
    return jax.jvp(f, (x,), (x,))


@guards
def test_tree_comes_back_as_it_is(guard):
    class Model(eqx.Module):
        weight: jax.Array
        name: str

    key = jax.random.key(0)
    tree = {"model": Model(X, "m"), "rest": (1.0, True, None, jnp.tanh, key)}
    for wrap in (lambda f: f, eqx.filter_jit):
        out = wrap(guard)(tree)
        assert eqx.tree_equal(out, tree)
    assert guard("text") == "text" and guard(()) == ()


@guards
def test_numpy_arrays_are_taken(guard):
    assert guard(np.ones(2, np.float32)).tolist() == [1, 1]
    float0 = np.zeros(2, jax.dtypes.float0)
    assert guard((float0, X))[0] is float0


@guards
def test_compiled_program_has_nothing_of_it(guard):
    def text(f):
        return jax.jit(lambda x: f(x)).lower(X).compile().as_text()

    assert text(guard).count("=") == text(lambda x: x).count("=")


@guards
def test_unperturbed_and_unbatched_arrays_pass(guard):
    def f(y):
        x, n, _ = guard((X, jnp.arange(3), lax.stop_gradient(X)))
        return y * x.sum() + n.sum()

    assert jax.grad(f)(1.0) == 3
    assert jax.vmap(f)(X).tolist() == [3, 6, 9]
    assert jax.vmap(jax.grad(f))(X).tolist() == [3, 3, 3]


@guards
def test_it_survives_a_jaxpr(guard):
    again = jaxpr_as_fun(jax.make_jaxpr(guard)(X))
    assert (again(X)[0] == X).all()
    with pytest.raises((RuntimeError, ValueError)):
        jax.vmap(jax.grad(lambda x: jax.jit(again)(x)[0].sum()))(jnp.stack([X, X]))


@guards
def test_message_names_the_array_where_there_are_several(guard):
    tree = {"weight": X, "bias": jnp.arange(3.0), "count": jnp.arange(3)}

    def f(weight):
        return guard(tree | {"weight": weight})["weight"].sum()

    if guard is internal.nonbatchable:
        with pytest.raises(ValueError, match=r"\(x\['weight'\]\)"):
            jax.vmap(f)(X)
    elif guard is not internal.nontraceable:
        with pytest.raises(RuntimeError, match=r"\(x\['weight'\]\)"):
            jax.grad(f)(X)


@guards
def test_it_stands_in_the_body_of_a_shard_map(guard):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")
    f = jax.shard_map(guard, mesh=mesh, in_specs=spec, out_specs=spec)
    assert (jax.jit(f)(jnp.arange(4.0)) == jnp.arange(4.0)).all()


# nontraceable


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nontraceable_names_what_it_met(wrap):
    def f(x):
        return internal.nontraceable(x, name="my solver")

    f = wrap(f)
    with pytest.raises(RuntimeError, match="Detected differentiation of my solver"):
        jvp(f)
    with pytest.raises(RuntimeError, match="Detected transposition of my solver"):
        jax.linear_transpose(f, X)(X)
    with pytest.raises(RuntimeError, match="Detected batching of my solver"):
        jax.vmap(f)(X)
    with pytest.raises(RuntimeError, match="of nontraceable operation"):
        jax.vmap(internal.nontraceable)(X)


# nondifferentiable


@pytest.mark.parametrize(
    "derivative", [jvp, lambda f: jax.grad(lambda x: f(x).sum())(X)]
)
def test_nondifferentiable_has_no_derivative(derivative):
    with pytest.raises(
        RuntimeError, match=r"Unexpected tangent\. This operation cannot"
    ):
        derivative(internal.nondifferentiable)
    with pytest.raises(RuntimeError, match="my solver cannot be autodifferentiated"):
        derivative(lambda x: internal.nondifferentiable(x, name="my solver"))
    with pytest.raises(RuntimeError, match=r"^my text(\n|$)"):
        derivative(lambda x: internal.nondifferentiable((x, x), msg="my text")[0])


def test_nondifferentiable_in_a_loop_meets_the_tangent_of_a_later_step():
    def f(x):
        def body(carry, _):
            _, b = carry
            return (internal.nondifferentiable(b), x), None

        return lax.scan(body, (0.0, 0.0), None, 3)[0][0]

    with pytest.raises(RuntimeError, match="Unexpected tangent"):
        jax.grad(f)(1.0)


@batchable
def test_batch_keeps_its_axis(guard):
    x = jnp.arange(6.0).reshape(2, 3)
    out = jax.vmap(guard, in_axes=1, out_axes=1)(x)
    assert (out == x).all()
    with pytest.raises(RuntimeError, match="Unexpected"):
        jax.grad(lambda x: jax.vmap(guard)(x).sum())(x)


# nondifferentiable_backward


def test_nondifferentiable_backward_is_the_identity_forward():
    out, tangent = jvp(internal.nondifferentiable_backward)
    assert (out == X).all() and (tangent == X).all()
    assert (jax.jacfwd(internal.nondifferentiable_backward)(X) == jnp.eye(3)).all()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nondifferentiable_backward_refuses_cotangents(wrap):
    def gradient(**kwargs):
        def f(x):
            return internal.nondifferentiable_backward(x, **kwargs).sum()

        return wrap(jax.grad(f))(X)

    match = r"Unexpected cotangent\. This operation cannot be reverse-mode"
    with pytest.raises(RuntimeError, match=match):
        gradient()
    with pytest.raises(RuntimeError, match="my solver cannot be reverse-mode"):
        gradient(name="my solver")
    with pytest.raises(RuntimeError, match=r"^my text(\n|$)"):
        gradient(msg="my text")


def test_nondifferentiable_backward_names_the_array_that_has_the_cotangent():
    def f(x, y):
        _, x, y = internal.nondifferentiable_backward((jnp.arange(2), x, y))
        return y.sum() + lax.stop_gradient(x).sum()

    for argnums in (1, (0, 1)):
        with pytest.raises(RuntimeError, match=r"\(x\[2\]\)"):
            jax.grad(f, argnums)(X, X)
    assert (jax.grad(f, 0)(X, X) == 0).all()


def test_unused_result_of_nondifferentiable_backward_is_fine():
    def f(x):
        internal.nondifferentiable_backward(x)
        return (x**2).sum()

    assert (jax.grad(f)(X) == 2 * X).all()


def test_values_of_cotangents_are_checked_if_asked_for():
    @eqx.filter_jit
    @jax.grad
    def gradient(x, y):
        x = internal.nondifferentiable_backward(x, name="my solver", symbolic=False)
        return x * y

    assert gradient(1.0, 0.0) == 0
    for bad in (2.0, jnp.nan):
        with pytest.raises(
            eqx.EquinoxRuntimeError, match="my solver cannot be reverse"
        ):
            gradient(1.0, bad)


# nonbatchable


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nonbatchable_refuses_a_batch(wrap):
    with pytest.raises(ValueError, match=r"Unexpected batch tracer\. This operation"):
        jax.vmap(wrap(internal.nonbatchable))(X)
    with pytest.raises(ValueError, match="my step cannot be vmap'd"):
        jax.vmap(wrap(lambda x: internal.nonbatchable(x, name="my step")))(X)
    with pytest.raises(ValueError, match=r"^my text(\n|$)"):
        jax.vmap(wrap(lambda x: internal.nonbatchable((x, x), msg="my text")))(X)


def test_nonbatchable_is_the_identity_to_derivatives():
    def f(x):
        return (internal.nonbatchable(x) ** 2).sum()

    assert (jax.grad(f)(X) == 2 * X).all()
    assert (jax.hessian(f)(X) == 2 * jnp.eye(3)).all()
    (back,) = jax.linear_transpose(internal.nonbatchable, X)(X)
    assert (back == X).all()


CONSTANT = [
    (jnp.full(3, 2.0), jnp.asarray([2.0, 2.0, 3.0])),
    (jnp.full(3, jnp.nan), jnp.asarray([jnp.nan, jnp.nan, 0.0])),
    (jnp.full(3, 2), jnp.asarray([2, 2, 1])),
    (jnp.full(3, True), jnp.asarray([True, True, False])),
    (jnp.stack([jax.random.key(0)] * 3), jax.random.split(jax.random.key(0), 3)),
]


@pytest.mark.parametrize(("constant", "other"), CONSTANT)
def test_constant_batch_comes_out_unbatched(constant, other):
    def one(x):
        return internal.nonbatchable((x,), allow_constant_across_batch=True)[0]

    f = eqx.filter_jit(jax.vmap(one, out_axes=None))
    assert str(f(constant)) == str(constant[0])
    with pytest.raises(eqx.EquinoxRuntimeError, match="Nonconstant batch"):
        f(other)

    empty = f(constant[:0])
    assert (empty.shape, empty.dtype) == ((), constant.dtype)

    nested = eqx.filter_jit(jax.vmap(jax.vmap(one, out_axes=None), out_axes=None))
    assert str(nested(jnp.stack([constant, constant]))) == str(constant[0])
    with pytest.raises(eqx.EquinoxRuntimeError, match="Nonconstant batch"):
        nested(jnp.stack([constant, jnp.stack([other[2]] * 3)]))


def test_constant_batch_of_vectors_needs_no_rank_promotion():
    def one(x):
        return internal.nonbatchable(x, allow_constant_across_batch=True)

    with jax.numpy_rank_promotion("raise"):
        out = jax.vmap(one, out_axes=None)(jnp.ones((2, 3)))
        keys = jnp.stack([jax.random.key(0)] * 2)
        assert jax.vmap(one, out_axes=None)(keys) == keys[0]
    assert out.tolist() == [1, 1, 1]


# materialise_zeros


@pytest.mark.parametrize("allow_struct", [False, True])
def test_zeros_are_of_the_tangents_type(allow_struct):
    zeros = internal.materialise_zeros
    for primal in (X, np.ones(2, np.float32), 1.0, jnp.bfloat16(1), 1j):
        zero = zeros(primal, None, allow_struct=allow_struct)
        assert zero.dtype == jnp.result_type(primal) and zero.shape == jnp.shape(primal)
        assert not zero.any()
    for primal in (jnp.arange(2), 1, True):
        zero = zeros(primal, None, allow_struct=allow_struct)
        assert zero.dtype == jax.dtypes.float0 and zero.shape == jnp.shape(primal)
    assert zeros("text", None, allow_struct) is None
    assert zeros(X, X, allow_struct) is X


def test_zeros_of_a_struct_are_made_if_allowed():
    for primal in (X, jnp.arange(2)):
        struct = jax.ShapeDtypeStruct(primal.shape, primal.dtype)
        assert internal.materialise_zeros(struct, None) is None
        zero = internal.materialise_zeros(struct, None, allow_struct=True)
        expected = internal.materialise_zeros(primal, None)
        assert zero.shape == expected.shape and zero.dtype == expected.dtype


def test_filled_tangents_are_what_jax_takes():
    primals = (X, jnp.arange(3))
    tangents = jtu.tree_map(lambda x: internal.materialise_zeros(x, None), primals)
    _, out = jax.jvp(lambda x, n: x * n, primals, tangents)
    assert (out == 0).all()
