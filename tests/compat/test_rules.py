"""Primitives with rules of their own: what their rules are asked, and when."""

import jax
import jax.numpy as jnp

from equinox_like._compat import primitives
from equinox_like._compat.primitives import identity


def doubled():
    """A primitive that doubles its input, and the names that its batching rule gets."""
    names = []
    primitive = primitives.new_primitive("doubled")
    primitive.def_impl(lambda x: [2 * x])
    primitive.def_abstract_eval(lambda x: [x])

    def rule(name, args, axes):
        names.append(name)
        return primitive.bind(*args), axes

    primitives.register_batching(primitive, rule)
    return lambda x: primitive.bind(x)[0], names


def test_batch_is_that_of_the_rule():
    f, names = doubled()
    x = jnp.arange(6.0).reshape(2, 3)
    assert (jax.vmap(f, 1, 1, axis_name="batch")(x) == 2 * x).all()
    assert names == ["batch"]
    # What has no batch axis is not batched.
    once = jax.vmap(lambda _: f(jnp.ones(())), out_axes=None, axis_name="batch")
    assert once(x) == 2 and len(names) == 1


asked = []


def jvp(primals, tangents, tag):
    asked.append(("jvp", len(primals), sorted(tangents), tag))
    return twin_p.bind(*primals, tag=tag), {i: 2 * t for i, t in tangents.items()}


def transpose(cotangents, tag):
    asked.append(("transpose", sorted(cotangents), tag))
    return {i: 3 * t for i, t in cotangents.items()}


def batch(arrays, axes, tag):
    asked.append(("batch", [x.shape for x in arrays], list(axes), tag))
    return twin_p.bind(*arrays, tag=tag), axes


twin_p = identity(
    "twin",
    jvp=jvp,
    transpose=transpose,
    batch=batch,
    on_stage=lambda stage, tag: asked.append((stage, tag)),
)


def twin(*arrays):
    asked.clear()
    return twin_p.bind(*arrays, tag="t")


def test_arrays_come_back_and_stages_are_told():
    x, key = jnp.ones(2), jax.random.key(0)
    out, new_key = twin(x, key)
    assert (out == x).all() and new_key.dtype == key.dtype
    assert asked == [("impl", "t")]
    jax.jit(twin)(x, key)
    assert asked == [("abstract", "t"), ("mlir", "t")]


def test_jvp_is_asked_with_the_tangents_that_are_not_zero():
    x, n = jnp.ones(2), jnp.arange(2)
    (_, out), (_, tangent) = jax.jvp(lambda x: twin(n, x), (x,), (x,))
    assert (out == x).all() and (tangent == 2).all()
    assert asked[0] == ("jvp", 2, [1], "t")
    jax.jvp(lambda x: twin(n), (x,), (x,))
    assert asked == [("impl", "t")]


def test_transpose_is_asked_with_the_cotangents_that_are_not_zero():
    x = jnp.ones(2)
    (back,) = jax.linear_transpose(lambda x: twin(x, x)[1], x)(x)
    assert (back == 3).all()
    assert asked[-1] == ("transpose", [1], "t")
    (back,) = jax.linear_transpose(lambda x: twin(jnp.ones(3), x)[1], x)(x)
    assert (back == 3).all()


def test_transpose_is_not_asked_if_all_are_zero():
    x = jnp.ones(2)
    (back,) = jax.linear_transpose(lambda x: (twin(x), x)[1], x)(x)
    assert (back == 1).all() and asked == [("abstract", "t")]


def test_batch_is_told_the_axes():
    x = jnp.ones((2, 3))
    jax.vmap(lambda x: twin(x, jnp.ones(4)), in_axes=1, out_axes=0)(x)
    assert asked == [("batch", [(2, 3), (4,)], [1, None], "t"), ("impl", "t")]
