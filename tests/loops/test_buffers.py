"""Buffers of loops: written place by place, differentiated, batched, and nested."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, PyTree

from equinox_like import internal as eqxi

KINDS = ["lax", "bounded", "checkpointed"]
REVERSIBLE = ["bounded", "checkpointed"]


def history(x, steps, loop):
    """Each step reads what the two before it wrote."""

    def body(carry):
        i, xs, total = carry
        new = jnp.sin(xs[i - 1]) * xs[i - 2] + 0.1 * xs[jnp.asarray([0, 1])].sum()
        # What has just been written can be read at once.
        xs = xs.at[i].set(new)
        return i + 1, xs, total * xs[i]

    xs = jnp.zeros(7).at[:2].set(x)
    return loop(lambda c: c[0] < steps, body, (2, xs, 1.0))[1:]


def python(cond, body, carry):
    carry = (carry[0], *map(jnp.asarray, carry[1:]))
    while cond(carry):
        carry = body(carry)
    return carry


def with_buffer(kind, **options):
    options = {"max_steps": 6, **options}
    return functools.partial(
        eqxi.while_loop, kind=kind, buffers=lambda c: c[1], **options
    )


def loss(x, steps, loop):
    xs, total = history(x, steps, loop)
    return (xs * jnp.arange(7.0)).sum() + total


@functools.partial(jax.jit, static_argnums=1)
def unrolled(x, steps):
    return jax.value_and_grad(loss)(x, steps, python)


def close(found, wanted):
    pairs = zip(jtu.tree_leaves(found), jtu.tree_leaves(wanted), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


X = jnp.asarray([0.7, 1.4])


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_unrolled_program(kind):
    assert close(history(X, 6, with_buffer(kind)), history(X, 6, python))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "bounded", "base": 2},
        {"kind": "checkpointed", "checkpoints": 1},
        {"kind": "checkpointed", "checkpoints": 2},
        {"kind": "checkpointed", "checkpoints": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [2, 6])
def test_gradient_goes_through_what_is_read(options, steps):
    found = jax.jit(jax.grad(loss), static_argnums=2)(X, steps, with_buffer(**options))
    assert close(found, unrolled(X, steps)[1])


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_batches_write_where_they_still_go_on(kind):
    xs, steps = jnp.stack([X, 2 * X]), jnp.asarray([3, 6])
    grad = jax.value_and_grad(functools.partial(loss, loop=with_buffer(kind)))
    found = jax.jit(jax.vmap(grad))(xs, steps)
    for i in range(2):
        assert close([x[i] for x in found], unrolled(xs[i], int(steps[i])))


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_slice_from_an_array_is_an_index(kind):
    def run(x, read):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(read(c[1], c[0]).prod()))  # noqa: E731
        init = (2, jnp.zeros(6).at[:2].set(x))
        xs = with_buffer(kind)(lambda c: c[0] < 6, body, init)[1]
        return (xs * jnp.arange(6.0)).sum()

    grad = jax.jit(jax.grad(run), static_argnums=1)
    found = grad(X, lambda xs, i: xs[jax.ds(i - 2, 2)])
    assert close(found, grad(X, lambda xs, i: xs[jnp.stack([i - 2, i - 1])]))
    with pytest.raises(IndexError, match=r"must .*static"):
        grad(X, lambda xs, i: xs[i - 2 : i])


def test_second_derivative():
    def run(x, loop):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(x * c[1][c[0] - 1]))  # noqa: E731
        init = (1, jnp.zeros(3).at[0].set(x))
        return loop(lambda c: c[0] < 3, body, init)[1].sum()

    # x + x^2 + x^3
    second = jax.jit(
        jax.hessian(functools.partial(run, loop=with_buffer("checkpointed")))
    )
    assert second(2.0) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_writes_take_any_index_and_a_condition(kind):
    def body(carry):
        i, x = carry
        x = x.at[i, :2].set(i + 1.0, pred=i != 1)
        x = x.at[..., 2].set(7, pred=False)
        return i + 1, x.at[(i, jnp.asarray([3, 4]))].set(jnp.asarray([5.0, 6.0]))

    run = with_buffer(kind, max_steps=3)
    _, out = run(lambda c: True, body, (0, jnp.zeros((3, 5))))
    assert out.tolist() == [[1, 1, 0, 5, 6], [0, 0, 0, 5, 6], [3, 3, 0, 5, 6]]


@pytest.mark.parametrize("kind", KINDS)
def test_typed_keys_are_written(kind):
    keys = jax.random.split(jax.random.key(0), 4)

    def body(carry):
        i, out = carry
        return i + 1, out.at[i].set(keys[i], pred=i != 1)

    start = jax.random.split(jax.random.key(1), 4)
    _, out = with_buffer(kind, max_steps=3)(lambda c: True, body, (0, start))
    data = jax.random.key_data
    assert (
        data(out).tolist()
        == data(keys.at[1].set(start[1]).at[3].set(start[3])).tolist()
    )
    for array, value in ((keys, 0), (jnp.ones(3), keys[0]), (keys, keys[0].dtype)):
        with pytest.raises((ValueError, TypeError)):
            eqxi.buffer_at_set(array, 0, value, pred=True)
    with pytest.raises(ValueError, match=r"key<fry> cannot be .* dtype float32"):
        eqxi.buffer_at_set(jnp.ones(3), 0, keys[0], pred=jnp.array(True))


def test_condition_of_a_write_is_differentiated():
    def run(x, loop):
        def body(carry):
            i, xs = carry
            return i + 1, eqxi.buffer_at_set(xs, i, x * (i + 1), pred=i % 2 == 0)

        return loop(lambda c: c[0] < 4, body, (0, jnp.ones(5)))[1].sum()

    grad = jax.jit(jax.grad(run), static_argnums=1)
    assert grad(2.0, with_buffer("checkpointed")) == grad(2.0, python) == 4


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_within_shard_map_buffer_varies_as_what_is_written(kind):
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def written(x):
        body = lambda c: (c[0] + 1, 2 * c[1], c[2].at[c[0]].set(c[1]))  # noqa: E731
        state = 0, x, jnp.zeros((3, *x.shape))
        options = {"kind": kind, "max_steps": 4, "buffers": lambda c: c[2]}
        return eqxi.while_loop(lambda c: c[0] < 3, body, state, **options)[2]

    def run(f, out_specs):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out_specs)
        return jax.jit(mapped)(jnp.arange(4.0))

    assert run(written, P(None, "x"))[2].tolist() == [0, 4, 8, 12]
    gradient = run(jax.grad(lambda x: written(x).sum()), P("x"))
    assert gradient.tolist() == 4 * [7]
    with pytest.raises(ValueError, match="out_specs"):
        run(written, P())


def test_gradient_of_what_was_there_before_is_zero_where_it_was_overwritten():
    def run(init):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(1.0))  # noqa: E731
        return with_buffer("checkpointed")(lambda c: c[0] < 2, body, (0, init))[1]

    assert jax.grad(lambda x: run(x).sum())(jnp.zeros(4)).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_what_a_custom_rule_drops_has_no_gradient(kind):
    drop = jax.custom_vjp(lambda x: x)
    drop.defvjp(lambda x: (x, None), lambda _, cotangent: (None,))

    def run(x):
        def body(carry):
            i, xs, total = carry
            return i + 1, xs.at[i].set(total * x), total * x + xs[i]

        init = (0, jnp.zeros(1), x)
        _, xs, total = with_buffer(kind, max_steps=1)(lambda c: True, body, init)
        return 3 * x + drop(xs).sum() + drop(total)

    # Only here do the primitives of the loop get symbolic zeros as cotangents.
    with jax.disable_jit():
        assert jax.grad(run)(2.0) == 3


@pytest.mark.parametrize(
    "kind, named",
    [("checkpointed", "both"), ("checkpointed", "none"), ("bounded", "one")],
)
def test_inner_loop_takes_buffers_of_the_outer(kind, named):
    def run(x, steps, loop, inner_loop):
        def outer(carry):
            i, (xs, ys) = carry

            def inner(carry):
                j, (xs, ys), z = carry
                xs = xs.at[i, j].set(z)
                ys = ys.at[2 * i + j].set(jnp.sin(xs[i, j]))
                return j + 1, (xs, ys), z * jnp.cos(ys[2 * i + j])

            cond = lambda c: c[0] < 2  # noqa: E731
            return i + 1, inner_loop(cond, inner, (0, (xs, ys), x + i))[1]

        init = (0, (jnp.zeros((3, 2)), jnp.zeros(7)))
        xs, ys = loop(lambda c: c[0] < steps, outer, init)[1]
        return (xs**2).sum() + (ys * jnp.arange(7.0)).sum()

    def python(cond, body, carry):
        while cond(carry):
            carry = body(carry)
        return carry

    chosen = {"both": lambda c: c[1], "one": lambda c: c[1][0], "none": None}[named]
    ours = functools.partial(eqxi.while_loop, kind=kind, max_steps=3)
    loops = {
        "loop": functools.partial(ours, buffers=lambda c: c[1]),
        "inner_loop": functools.partial(ours, buffers=chosen),
    }
    found = jax.jit(jax.vmap(jax.grad(functools.partial(run, **loops))))
    xs, steps = jnp.asarray([0.3, 0.9]), jnp.asarray([3, 1])
    plain = jax.grad(functools.partial(run, loop=python, inner_loop=python))
    wanted = jax.jit(lambda xs: [plain(x, n) for x, n in zip(xs, (3, 1), strict=True)])
    assert close(found(xs, steps), np.stack(wanted(xs)))


def test_reading_within_a_branch_is_differentiated():
    def run(x, loop):
        def body(carry):
            i, xs = carry
            new = jax.lax.cond(i % 2 == 0, lambda: 2 * xs[i - 1], lambda: xs[i - 2])
            return i + 1, xs.at[i].set(new * xs[i - 1])

        xs = jnp.zeros(6).at[:2].set(x)
        return loop(lambda c: c[0] < 6, body, (2, xs))[1].sum()

    grad = jax.jit(jax.grad(run), static_argnums=1)
    assert close(grad(X, with_buffer("checkpointed")), grad(X, python))


@pytest.mark.parametrize("mapped", [False, True])
def test_buffer_and_its_cotangent_are_there_once(mapped):
    """They are written in place: XLA would have another one for a copy at each step.

    That of jax 0.10 makes copies, as it loses the order of a read and a write.
    """

    def run(x, steps, size):
        def body(carry):
            i, xs, x = carry
            old = xs[jnp.maximum(i - 1, 0)]
            return i + 1, xs.at[i].set(jnp.sin(x)), x + 0.1 * old

        init = (0, jnp.zeros(size), x)
        options = {"kind": "checkpointed", "checkpoints": 3}
        loop = functools.partial(eqxi.while_loop, buffers=lambda c: c[1], **options)
        return loop(lambda c: c[0] < steps, body, init)[1].sum()

    def cost(size):
        f = jax.grad(run)
        f = jax.vmap(f, (0, 0, None)) if mapped else f
        args = (jnp.ones(2), jnp.arange(2)) if mapped else (1.0, 9)
        compiled = jax.jit(f, static_argnums=2).lower(*args, size).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return temporary / (4 * size * (1 + mapped))

    assert cost(100_000) < (2.1 if jax.__version_info__ >= (0, 12) else 4.1)


class TestBufferObjects:
    @staticmethod
    def within(f, init=None):
        """What `f` makes of a buffer, within a loop."""
        init = jnp.zeros((3, 2)) if init is None else init
        found = []

        def body(carry):
            found.append(f(carry[1]))
            return carry

        with_buffer("lax")(lambda c: False, body, (0, init))
        return found[0]

    def test_they_tell_their_type(self):
        assert self.within(lambda b: (b.shape, b.dtype, b.size)) == (
            (3, 2),
            jnp.float32,
            6,
        )
        assert "float32[3, 2]" in self.within(repr)

    @pytest.mark.parametrize(
        "f, error",
        [
            (lambda b: b + 1, TypeError),
            (lambda b: jnp.sin(b), TypeError),
            (lambda b: next(iter(b)), TypeError),
            (lambda b: 0 in b, TypeError),
            (lambda b: b.at[0].add(1.0), AttributeError),
            (lambda b: b.T, AttributeError),
            (lambda b: b.at[0].set(1j), ValueError),
        ],
        ids=["arithmetic", "function", "iter", "in", "add", "attribute", "dtype"],
    )
    def test_they_do_nothing_else(self, f, error):
        with pytest.raises(error):
            self.within(f)

    def test_annotation_fits_what_they_hold(self):
        two, one = eqxi.MaybeBuffer[Float[Array, "a b"]], Float[Array, " a"]
        assert self.within(lambda b: isinstance(b, two))
        assert not self.within(lambda b: isinstance(b, eqxi.MaybeBuffer[one]))
        assert not self.within(
            lambda b: isinstance(b, eqxi.MaybeBuffer[Int[Array, "a b"]])
        )
        assert isinstance(jnp.ones((1, 2)), two) and not isinstance(1, two)

    def test_body_must_return_them_in_their_place(self):
        with pytest.raises(ValueError, match="same input and output structure"):
            with_buffer("lax")(
                lambda c: True, lambda c: (c[0], jnp.zeros(3)), (0, jnp.zeros(3))
            )

    def test_error_is_about_what_changes_beside_them(self):
        body = lambda c: (jnp.ones(2), c[1].at[0].set(1.0))  # noqa: E731
        with pytest.raises(ValueError, match=r"arrays:\n- `carry\[0\]` was [^`]*$"):
            with_buffer("lax")(lambda c: True, body, (0, jnp.zeros(3)))

    @pytest.mark.parametrize("pred", [jnp.asarray([True]), 1], ids=["vector", "int"])
    def test_predicate_of_a_write_must_be_a_boolean_scalar(self, pred):
        def body(carry):
            i, buffer = carry
            return i + 1, buffer.at[i].set(1.0, pred=pred)

        with pytest.raises(
            ValueError, match=r"`pred` .* must be a boolean scalar; got"
        ):
            eqxi.while_loop(
                lambda carry: carry[0] < 2,
                body,
                (0, jnp.zeros(2)),
                buffers=lambda carry: carry[1],
                kind="lax",
            )

    def test_only_arrays_can_be_buffers(self):
        with pytest.raises(ValueError, match="Only arrays"):
            eqxi.while_loop(
                lambda c: True,
                lambda c: c,
                jnp.ones(2),
                kind="lax",
                buffers=lambda c: 1,
            )

    def test_something_else_than_a_function_is_refused(self, without_type_checks):
        message = r"` takes a function as `buffers`; got an int"
        with pytest.raises(TypeError, match="`while_loop" + message):
            with_buffer("checkpointed")(bool, lambda c: c, 0, buffers=1)
        with pytest.raises(TypeError, match="`scan" + message):
            eqxi.scan(lambda c, x: (c, x), 0, X, kind="checkpointed", buffers=1)


class TestBufferAtSet:
    def test_arrays_are_written_like_buffers(self):
        x = jnp.zeros(3)
        assert eqxi.buffer_at_set(x, 1, 5).tolist() == [0, 5, 0]
        assert eqxi.buffer_at_set(x, 1, 5, pred=False).tolist() == [0, 0, 0]
        f = jax.jit(lambda p: eqxi.buffer_at_set(x, slice(1, 3), 5.0, pred=p))
        assert f(True).tolist() == [0, 5, 5] and f(False).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("pred", [True, jnp.asarray(True)])
    def test_options_are_for_the_write(self, pred):
        x = jnp.zeros(3)
        out = eqxi.buffer_at_set(x, 7, 5.0, pred=pred, mode="clip")
        assert out.tolist() == [0, 0, 5]
        assert eqxi.buffer_at_set(x, 7, 5.0, pred=pred, mode="drop").tolist() == [0] * 3

    def test_numpy_arrays_are_refused(self):
        with pytest.raises(AttributeError):
            eqxi.buffer_at_set(np.zeros(3), 1, 5.0)


class TestSelectIfVmap:
    def test_condition_counts_only_if_it_is_mapped(self):
        select = lambda p, x, y: eqxi.select_if_vmap_p.bind(p, x, y)[0]  # noqa: E731
        x, y, pred = jnp.ones(2), jnp.zeros(2), jnp.asarray([True, False])
        assert select(False, x, y).tolist() == [1, 1]
        assert jax.vmap(select, (None, 0, None))(False, x, 0.0).tolist() == [1, 1]
        assert jax.vmap(select)(pred, x, y).tolist() == [1, 0]
        outer = jax.vmap(jax.vmap(select, (None, 0, None)), (0, None, None))
        assert outer(pred, x, 0.0).tolist() == [[1, 1], [0, 0]]
        grad = jax.grad(lambda x, y: jax.vmap(select)(pred, x, y).sum(), (0, 1))
        assert [g.tolist() for g in grad(x, y)] == [[1, 0], [0, 1]]

    def test_primitives_can_be_finalised(self):
        run = lambda x: history(x, 4, with_buffer("lax"))  # noqa: E731
        final = str(jax.make_jaxpr(eqxi.finalise_fn(run))(X))
        for name in ("select_if_vmap", "maybe_set", "read_buffer"):
            assert name not in final and name in str(jax.make_jaxpr(run)(X))
        assert close(eqxi.finalise_fn(run)(X), run(X))


@pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed", "scan"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad, jax.vmap])
def test_buffer_is_a_pytree_of_jax_arrays_wherever_users_see_it(kind, transform):
    """diffrax annotates the carry of its loops so, and jaxtyping checks it."""
    found = []

    def note(buffer):
        found.append([isinstance(x, jax.Array) for x in jax.tree.leaves(buffer)])
        assert isinstance(buffer, PyTree[jax.Array])

    def body(carry, _=None):
        i, buffer = carry
        note(buffer)
        return i + 1, buffer.at[i].set(2 * buffer[i])

    def cond(carry):
        note(carry[1])
        return carry[0] < 3

    def run(x):
        init = 0, jnp.broadcast_to(x, (3,))
        options = {"buffers": lambda carry: carry[1]}
        if kind == "scan":
            step = lambda carry, _: (body(carry), None)  # noqa: E731
            options |= {"kind": "checkpointed", "checkpoints": 2}
            return eqxi.scan(step, init, None, 3, **options)[0][1].sum()
        if kind == "checkpointed":
            options["checkpoints"] = 2
        out = eqxi.while_loop(cond, body, init, kind=kind, max_steps=3, **options)
        return out[1].sum()

    if kind == "lax" and transform is jax.grad:
        with pytest.raises(ValueError, match="Reverse-mode"):
            transform(run)(1.0)
    else:
        transform(run)(jnp.ones(2) if transform is jax.vmap else 1.0)
    assert found and all(map(all, found))
