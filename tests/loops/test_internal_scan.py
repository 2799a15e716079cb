"""`internal.scan`, `scan_trick`, and `filter_scan` with a number of checkpoints."""

import functools
import operator

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import internal as eqxi


def step(c, x):
    c = {"a": jnp.sin(c["a"]) + x["v"].sum(), "i": c["i"] + 1}
    return c, (c["a"] * x["v"], c["i"])


INIT = {"a": jnp.asarray([0.1, 0.5]), "i": 0}
XS = {"v": jnp.linspace(-1.0, 1.0, 10).reshape(5, 2), "k": np.arange(5)}


def loss(init, v, scan):
    c, (y, _) = scan(step, {**INIT, "a": init}, {**XS, "v": v})
    return c["a"].sum() + (y * jnp.arange(5.0)[:, None]).sum()


def close(found, wanted):
    pairs = zip(jtu.tree_leaves(found), jtu.tree_leaves(wanted), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def unrolled(f, carry, xs, reverse=False):
    ys = [None] * 5
    for i in reversed(range(5)) if reverse else range(5):
        carry, ys[i] = f(carry, jtu.tree_map(operator.itemgetter(i), xs))
    return carry, jtu.tree_map(lambda *y: jnp.stack(y), *ys)


def checkpointed(checkpoints):
    return functools.partial(eqxi.scan, kind="checkpointed", checkpoints=checkpoints)


@pytest.mark.parametrize("checkpoints", [1, 2, None, "all"])
def test_gradient_is_that_of_the_unrolled_loop(checkpoints):
    grad = jax.value_and_grad(loss, (0, 1))
    found = jax.jit(grad, static_argnums=2)(
        INIT["a"], XS["v"], checkpointed(checkpoints)
    )
    assert close(found, grad(INIT["a"], XS["v"], unrolled))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("checkpoint", [2, "all"])
def test_public_scan_has_the_same_gradient(checkpoint, reverse):
    grad = jax.value_and_grad(loss, (0, 1))
    ours = functools.partial(eqx.filter_scan, checkpoint=checkpoint, reverse=reverse)
    init = {**INIT, "i": jnp.asarray(0)}

    def with_arrays(f, _, xs):
        return ours(f, {**init, "a": _["a"]}, xs)

    plain = functools.partial(unrolled, reverse=reverse)
    found = jax.jit(grad, static_argnums=2)(INIT["a"], XS["v"], with_arrays)
    assert close(found, grad(INIT["a"], XS["v"], plain))


def test_public_scan_takes_anything():
    def f(carry, x):
        c, name = carry
        return (c * x["v"], name), (c, x["f"])

    def run(c):
        xs = {"v": jnp.asarray([2.0, 3.0]), "f": jnp.sin}
        (c, name), (cs, fun) = eqx.filter_scan(f, (c, "n"), xs, checkpoint=1)
        assert name == "n" and fun is jnp.sin
        return c + cs.sum()

    assert jax.grad(run)(1.0) == 6 + 1 + 2


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.parametrize("length", [0, 3])
def test_values_are_those_of_lax_scan(kind, length):
    xs = jax.tree.map(lambda x: x[:length], XS)
    found = eqxi.scan(step, INIT, xs, kind=kind)
    assert close(found, jax.lax.scan(step, INIT, xs))
    f = lambda c, _: (2 * c, None)  # noqa: E731
    out, ys = eqxi.scan(f, 1, None, length, kind=kind)
    assert out == 2**length and ys is None


def test_batches_and_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    f = lambda c, k: (c * jax.random.normal(k), k)  # noqa: E731

    def run(c, kind):
        return eqxi.scan(f, c, keys, kind=kind)[0]

    cs = jnp.asarray([1.0, 2.0])
    grads = [jax.vmap(jax.grad(run), (0, None))(cs, k) for k in ("lax", "checkpointed")]
    assert close(*grads)
    assert eqx.tree_equal(eqxi.scan(f, 1.0, keys, kind="checkpointed")[1], keys)


def test_buffers_of_the_carry():
    def f(carry, i):
        x, xs = carry
        return (2 * x, xs.at[i].set(x)), None

    def run(x):
        options = {"kind": "checkpointed", "buffers": lambda c: c[1]}
        init = (x, jnp.zeros(3))
        return eqxi.scan(f, init, jnp.arange(3), **options)[0][1].sum()

    assert jax.grad(run)(1.0) == 7


def on_a_mesh(f, axis_type):
    """`f` of a carry and of what is scanned, both split over the axis `x` of a mesh."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        carry = jax.device_put(jnp.linspace(0.5, 1.5, 8), P("x"))
        xs = jax.device_put(jnp.linspace(0.0, 1.0, 24).reshape(3, 8), P(None, "x"))
        return jax.jit(f)(carry, xs)


def scanned(carry, xs, **options):
    def step(c, x):
        return c * x + 1, c * jnp.cos(x)

    return eqx.filter_scan(step, carry, xs, **options)


@pytest.mark.parametrize("checkpoint", [2, "all"])
def test_inputs_and_outputs_may_be_split_over_explicit_axes(checkpoint):
    def run(carry, xs, **options):
        loss = lambda *args: scanned(*args, **options)[1].sum()  # noqa: E731
        return scanned(carry, xs, **options), jax.grad(loss, (0, 1))(carry, xs)

    ours = functools.partial(run, checkpoint=checkpoint)
    found = on_a_mesh(ours, AxisType.Explicit)
    assert found[0][1].sharding.spec == P(None, "x")
    assert close(found, on_a_mesh(run, AxisType.Explicit))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_gradient_within_shard_map(axis_type):
    def run(carry, xs, **options):
        def body(w, carry, xs):
            loss = lambda *args: scanned(args[0] * args[1], xs, **options)[1].sum()  # noqa: E731
            return jax.grad(loss, (0, 1))(w, carry)

        specs = (P(), P("x"), P(None, "x"))
        mapped = jax.shard_map(body, in_specs=specs, out_specs=specs[:2])
        return mapped(jnp.asarray(2.0), carry, xs)

    ours = functools.partial(run, checkpoint=2)
    assert close(on_a_mesh(ours, axis_type), on_a_mesh(run, axis_type))


def test_outputs_within_shard_map_differ_between_devices():
    def run(carry, xs):
        body = lambda *args: scanned(*args, checkpoint=2)[1]  # noqa: E731
        specs = (P("x"), P(None, "x"))
        return jax.shard_map(body, in_specs=specs, out_specs=P())(carry, xs)

    with pytest.raises(ValueError, match="out_specs"):
        on_a_mesh(run, AxisType.Auto)


def test_cotangents_of_inputs_and_outputs_are_added_in_place():
    """XLA would have another array for a copy at each step, as that of jax 0.10 has."""
    size = 100_000

    def run(xs):
        f = lambda c, x: (jnp.sin(c + x), c)  # noqa: E731
        return eqxi.scan(f, 1.0, xs, kind="checkpointed", checkpoints=3)[1].sum()

    compiled = jax.jit(jax.grad(run)).lower(jnp.ones(size)).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes / (4 * size)
    assert temporary < (1.1 if jax.__version_info__ >= (0, 12) else 3.1)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"kind": "bounded"}, "kind"),
        ({"kind": "checkpointed", "checkpoints": 0}, "checkpoints"),
        ({"kind": "checkpointed", "length": 4}, "lengths differ"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        eqxi.scan(step, INIT, XS, **options)


@pytest.mark.parametrize(
    "options",
    [{"checkpoint": 0}, {"checkpoint": 2, "unroll": 2}, {"checkpoint": "some"}],
)
def test_public_scan_refuses_what_does_not_fit(options, without_type_checks):
    with pytest.raises(ValueError, match="checkpoint"):
        eqx.filter_scan(lambda c, x: (c, x), jnp.ones(2), jnp.ones(3), **options)


def test_other_structure_is_named():
    with pytest.raises(ValueError, match="same input and output structure"):
        eqxi.scan(lambda c, x: ((c,), x), 1.0, jnp.ones(3), kind="checkpointed")


class TestScanTrick:
    def test_function_is_traced_once(self):
        traces = []

        def double(x):
            traces.append(x)
            return {"x": 2 * x["x"]}

        add = [lambda x, n=n: {"x": x["x"] + n} for n in (1, 10)]
        out = eqxi.scan_trick(double, add, {"x": jnp.asarray([1, 2])})
        assert out["x"].tolist() == [32, 40] and len(traces) == 1
        assert eqxi.scan_trick(double, [], {"x": jnp.asarray(1)})["x"] == 2

    def test_gradient(self):
        run = lambda x: eqxi.scan_trick(jnp.sin, [jnp.cos], x)  # noqa: E731
        plain = lambda x: jnp.sin(jnp.cos(jnp.sin(x)))  # noqa: E731
        assert jnp.allclose(jax.grad(run)(0.3), jax.grad(plain)(0.3))


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_step_that_returns_no_pair_is_named(kind):
    with pytest.raises(TypeError, match=r"`step` must return a pair.*float32\[\]"):

        def step(c, x):
            return c

        eqxi.scan(step, 1.0, jnp.arange(3.0), kind=kind)


@pytest.mark.parametrize(
    "scan",
    [
        functools.partial(eqxi.scan, kind="checkpointed"),
        functools.partial(eqx.filter_scan, checkpoint=2),
    ],
)
def test_messages_of_jax_name_the_users_function_and_the_leaf(scan):
    def step(total, x):
        return total + x["a"] if x["a"] > 0 else total, None

    with pytest.raises(
        jax.errors.TracerBoolConversionError,
        match=r"function step at \S*test_internal_scan.*x\['a'\]",
    ):
        scan(step, jnp.asarray(0.0), {"a": jnp.ones(3)})
