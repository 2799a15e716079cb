import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

from equinox_like import internal as eqxi

SHAPES = []  # that a rule has seen


def make(name="weighted"):
    """`(w * x @ v, x.sum())`, linear in `x`, with a static `by`."""

    def impl(w, x, v, *, by):
        SHAPES.append((w.shape, x.shape, v.shape))
        return [by * w * (x @ v), x.sum()]

    def abstract_eval(w, x, v, *, by):
        shape = jax.core.ShapedArray((x.shape[0],), x.dtype)
        return [shape, jax.core.ShapedArray((), x.dtype)]

    def jvp(primals, tangents, *, by):
        w, x, v = primals
        t_w, t_x, t_v = tangents
        assert type(t_v) is ad.Zero  # not differentiated in these tests
        out = prim.bind(w, x, v, by=by)
        parts = []
        if type(t_x) is not ad.Zero:
            parts.append(prim.bind(w, t_x, v, by=by))
        if type(t_w) is not ad.Zero:
            parts.append([by * t_w * (x @ v), ad.Zero(jax.typeof(out[1]))])
        tangents_out = parts[0]
        for part in parts[1:]:
            tangents_out = [
                ad.add_tangents(a, b) for a, b in zip(tangents_out, part, strict=True)
            ]
        return out, tangents_out

    def transpose(cotangents, w, x, v, *, by):
        assert ad.is_undefined_primal(x) and not ad.is_undefined_primal(w)
        ct_y, ct_s = cotangents
        ct = jnp.zeros(x.aval.shape)
        if type(ct_y) is not ad.Zero:
            ct += by * jnp.outer(w * ct_y, v)
        if type(ct_s) is not ad.Zero:
            ct += ct_s
        return [None, ct, None]

    prim = eqxi.create_vprim(name, impl, abstract_eval, jvp, transpose)
    return prim


PRIM = make()


def ours(w, x, v):
    return tuple(PRIM.bind(w, x, v, by=2.0))


def plain(w, x, v):
    return 2.0 * w * (x @ v), x.sum()


def sample(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


W, X, V = (3,), (3, 2), (2,)


def widened(shape, axis, size):
    return shape if axis is None else (*shape[:axis], size, *shape[axis:])


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6), a, b
    )


AXES = [(0, 0, 0), (None, 1, None), (0, None, None), (None, 2, 1), (0, None, 0)]


@pytest.mark.parametrize("axes", AXES)
def test_batch_is_the_function_for_each_element(axes):
    args = sample(*(widened(s, i, 4) for s, i in zip((W, X, V), axes, strict=True)))
    for wrap in (lambda f: f, jax.jit):
        close(wrap(jax.vmap(ours, axes))(*args), jax.vmap(plain, axes)(*args))
    assert set(SHAPES) == {(W, X, V)}


@pytest.mark.parametrize("axes, inner", [*itertools.product(AXES[:3], AXES[1:4])])
def test_batches_nest(axes, inner):
    shapes = [widened(s, i, 4) for s, i in zip((W, X, V), inner, strict=True)]
    args = sample(*(widened(s, i, 5) for s, i in zip(shapes, axes, strict=True)))

    def nested(f):
        return jax.vmap(jax.vmap(f, inner), axes)

    close(nested(ours)(*args), nested(plain)(*args))
    shape = jax.eval_shape(nested(ours), *args)
    assert [s.shape for s in shape] == [(5, 4, 3), (5, 4)]


@pytest.mark.parametrize("axes", AXES)
def test_batch_is_differentiated_in_both_modes(axes):
    args = sample(*(widened(s, i, 4) for s, i in zip((W, X, V), axes, strict=True)))
    w, x, v = args

    def loss(f):
        def of(x):
            y, s = jax.vmap(f, axes)(w, x, v)
            return (y**2).sum() + jnp.sin(s).sum()

        return of

    close(jax.grad(loss(ours))(x), jax.grad(loss(plain))(x))
    tangent = jnp.cos(x)
    close(jax.jvp(loss(ours), (x,), (tangent,)), jax.jvp(loss(plain), (x,), (tangent,)))

    def only(f):
        return lambda x: jax.vmap(f, axes)(w, x, v)[1].sum()

    close(jax.grad(only(ours))(x), jax.grad(only(plain))(x))


def test_nested_batches_are_differentiated():
    w, x, v = sample((4, 3), (3, 2, 5), (2,))

    def nested(f):
        return jax.vmap(jax.vmap(f, (None, 2, None)), (0, None, None))

    def loss(f):
        return lambda w, x: (nested(f)(w, x, v)[0] ** 2).sum()

    close(jax.grad(loss(ours), 1)(w, x), jax.grad(loss(plain), 1)(w, x))
    pushed = [jax.jvp(loss(f), (w, x), (w, x)) for f in (ours, plain)]
    close(*pushed)


def test_rule_may_give_no_cotangent():
    def impl(x, y):
        return [y]

    def jvp(primals, tangents):
        return prim.bind(*primals), [tangents[1]]

    def transpose(cotangents, x, y):
        return [None, cotangents[0]]

    prim = eqxi.create_vprim("second", impl, lambda x, y: [y], jvp, transpose)
    f = jax.vmap(lambda x, y: prim.bind(x, y)[0])
    x = jnp.arange(3.0)
    found = jax.linear_transpose(f, x, x)(x)
    assert [ct.tolist() for ct in found] == [[0, 0, 0], [0, 1, 2]]


def test_gradient_can_be_batched():
    w, x, v = sample((3,), (4, 3, 2), (2,))

    def grad(f):
        return jax.vmap(jax.grad(lambda x: (f(w, x, v)[0] ** 2).sum()))

    close(grad(ours)(x), grad(plain)(x))
