"""Loops under `jax.vmap` on several devices: the batch, or each element, is split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import internal as eqxi

W = jnp.linspace(0.5, 0.8, 4)
X = jnp.linspace(0.0, 1.0, 64).reshape(4, 4, 4)


def unrolled(w, x):
    c, ys = x[0], []
    for s in x:
        ys.append(c * s)
        c = jnp.sin(c * w + s)
    return c, jnp.stack(ys)


def scan(w, x, **options):
    return eqx.filter_scan(lambda c, s: (jnp.sin(c * w + s), c * s), x[0], x, **options)


def while_loop(w, x, kind, **options):
    def body(carry):
        i, c, ys = carry
        return i + 1, jnp.sin(c * w + x[i]), ys.at[i].set(c * x[i])

    init = (0, x[0], jnp.zeros_like(x))
    last = eqxi.while_loop(
        lambda carry: carry[0] < 4,
        body,
        init,
        kind=kind,
        max_steps=5,
        buffers=lambda carry: carry[2],
        **options,
    )
    return last[1], last[2]


LOOPS = {
    "scan": functools.partial(scan, checkpoint=2),
    "scan, all": functools.partial(scan, checkpoint="all"),
    "while": functools.partial(while_loop, kind="checkpointed", checkpoints=2),
    "bounded": functools.partial(while_loop, kind="bounded"),
}


def batched_loss(loop):
    batch = jax.vmap(loop, (None, 0))
    return jax.grad(lambda w, x: sum(y.sum() for y in batch(w, x)), (0, 1))


def loss_by_element(loop):
    gradient = jax.grad(lambda w, x: sum(y.sum() for y in loop(w, x)), (0, 1))
    return jax.vmap(gradient, (None, 0))


FUNCTIONS = {
    "values": lambda loop: jax.vmap(loop, (None, 0)),
    "gradient of a batch": batched_loss,
    "batch of gradients": loss_by_element,
}


@functools.cache
def of_the_unrolled(function):
    return jax.jit(FUNCTIONS[function](unrolled))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("split", ["batch", "weight"])
def test_batch_or_weight_may_be_split_over_explicit_axes(loop, function, split):
    of_w, of_x = (P(), P("a")) if split == "batch" else (P("a"), P(None, None, "a"))
    with jax.set_mesh(jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))):
        args = jax.device_put(W, of_w), jax.device_put(X, of_x)
        found = jax.jit(FUNCTIONS[function](LOOPS[loop]))(*args)
        wanted = of_the_unrolled(function)(*args)
    close(found, wanted)
    assert list(map(jax.typeof, found)) == list(map(jax.typeof, wanted))


def on_each_device(f):
    """`f(w, x)` of each element, half of which are on each of two devices."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    batch = jax.vmap(f, (None, 0))
    specs = {"in_specs": (P(), P("a")), "out_specs": P("a")}
    return jax.jit(jax.shard_map(batch, mesh=mesh, **specs))


def value_and_gradients(mapped):
    loss = lambda w, x: sum(y.sum() for y in jax.tree.leaves(mapped(w, x)))  # noqa: E731
    return mapped(W, X), jax.grad(loss, (0, 1))(W, X)


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, a, b)


@pytest.mark.parametrize("loop", LOOPS)
def test_batch_within_shard_map(loop):
    found = value_and_gradients(on_each_device(LOOPS[loop]))
    close(found, of_each_element())


@functools.cache
def of_each_element():
    return jax.jit(lambda: value_and_gradients(jax.vmap(unrolled, (None, 0))))()


def steps_differ(w, x, kind):
    """The first device takes two steps, the second three."""

    def cond(carry):
        return carry[0] < jnp.where(x[0, 0] < 0.5, 2, 3)

    def body(carry):
        return carry[0] + 1, jnp.sin(carry[1] * w)

    return eqx.filter_while_loop(cond, body, (0, x[0]), kind=kind, max_steps=4)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_number_of_steps_may_differ_between_devices(kind):
    def marked(w, x):
        return run(lax.pcast(w, "a", to="varying"), x)

    def run(w, x):
        return steps_differ(w, x, kind)[1]

    wanted = value_and_gradients(jax.vmap(run, (None, 0)))
    close(value_and_gradients(on_each_device(marked)), wanted)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_shared_array_of_a_loop_whose_steps_differ_is_refused(kind):
    """The devices would wait for each other, until JAX ends the process."""
    mapped = on_each_device(lambda w, x: steps_differ(w, x, kind)[1])
    mapped(W, X)
    message = r"same on all of them: float32\[4\].*pcast\(x, \('a',\), to='varying'\)"
    with pytest.raises(ValueError, match=message):
        value_and_gradients(mapped)


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_counter_of_a_loop_whose_steps_differ_differs_too(kind):
    count = on_each_device(lambda w, x: steps_differ(w, x, kind)[0])(W, X)
    assert count.tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("loop", LOOPS)
def test_collectives_over_a_name_of_vmap(loop):
    """The backward pass runs under the `jax.vmap` again, with its name."""

    def centred(run):
        def mapped(w, x):
            x = x - 0.5 * lax.pmean(x, "batch")
            return run(lambda c: jnp.sin(c - 0.1 * lax.pmean(c, "batch")) * w, x)

        batch = jax.vmap(mapped, (None, 0), axis_name="batch")
        return jax.grad(lambda w, x: (batch(w, x) ** 2).sum(), (0, 1))(W, X[0])

    def plain(step, x):
        return step(step(step(x)))

    def ours(step, x):
        if loop.startswith("scan"):
            checkpoint = LOOPS[loop].keywords["checkpoint"]
            return eqx.filter_scan(
                lambda c, _: (step(c), None), x, length=3, checkpoint=checkpoint
            )[0]
        return eqxi.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, step(c[1])),
            (0, x),
            max_steps=4,
            **LOOPS[loop].keywords,
        )[1]

    close(centred(ours), centred(plain))
