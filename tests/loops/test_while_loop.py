"""`internal.while_loop` and the kinds of `filter_while_loop`, without buffers."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings

import equinox_like as eqx
from equinox_like import internal as eqxi

KINDS = ["lax", "bounded", "checkpointed"]
REVERSIBLE = ["bounded", "checkpointed"]
MATRIX = jnp.asarray([[0.3, -0.5], [0.8, 0.2]])


def step(x, z, w):
    return jnp.tanh(w @ x) + z, z * jnp.cos(x).sum()


def looped(x, z, w, steps, loop=eqxi.while_loop, **options):
    def body(carry):
        i, x, z = carry
        return i + 1, *step(x, z, w)

    return loop(lambda c: c[0] < steps, body, (jnp.asarray(0), x, z), **options)[1:]


def unrolled(x, z, w, steps):
    for _ in range(steps):
        x, z = step(x, z, w)
    return x, z


def loss(run, *args):
    x, z = run(*args)
    return (x * jnp.asarray([1.0, 2.0])).sum() + 3 * z


@functools.cache
def gradient(**options):
    """Compiled once for any number of steps."""
    run = functools.partial(looped, **options)
    return jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1, 2)))


@functools.cache
def expected(steps):
    x, z = jnp.asarray([0.3, -0.7]), jnp.asarray(0.2)
    f = jax.value_and_grad(lambda *args: loss(unrolled, *args, steps), (0, 1, 2))
    return (x, z, MATRIX), f(x, z, MATRIX)


def close(found, wanted):
    found, wanted = (
        np.concatenate([np.ravel(x) for x in jtu.tree_leaves(tree)])
        for tree in (found, wanted)
    )
    return np.allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


OPTIONS = {
    "bounded": [{"max_steps": 5, "base": 2}, {"max_steps": 7}],
    "checkpointed": [
        {"max_steps": 1},
        {"max_steps": 11, "checkpoints": 2},
        {"max_steps": 9, "checkpoints": 100},
        {"checkpoints": 1},
        {"checkpoints": 3},
    ],
}


@pytest.mark.parametrize("kind", OPTIONS)
@settings(max_examples=30)
@given(st.data(), st.integers(0, 11))
def test_gradient_is_that_of_the_unrolled_program(kind, data, steps):
    options = data.draw(st.sampled_from(OPTIONS[kind]))
    args, wanted = expected(min(steps, options.get("max_steps", steps)))
    assert close(gradient(kind=kind, **options)(*args, steps), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_jax(kind):
    args, _ = expected(0)
    found = looped(*args, 4, kind=kind, max_steps=6)
    wanted = looped(*args, 4, loop=jax.lax.while_loop)
    assert close(found, wanted)


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_public_loop_has_the_same_gradient(kind):
    args, wanted = expected(4)
    run = gradient(kind=kind, max_steps=6, loop=eqx.filter_while_loop)
    assert close(run(*args, 4), wanted)


@pytest.mark.parametrize("kind", REVERSIBLE)
@pytest.mark.parametrize("steps", [0, 3])
def test_elements_of_a_batch_stop_when_they_are_done(kind, steps):
    (x, z, w), _ = expected(0)
    xs, counts = jnp.stack([x, -x, 2 * x]), jnp.asarray([steps, 0, 5])
    grads = jax.vmap(gradient(kind=kind, max_steps=6), (0, None, None, 0))
    value, found = grads(xs, z, w, counts)
    for i, (x, n) in enumerate(zip(xs, counts.tolist(), strict=True)):
        f = jax.value_and_grad(lambda *args: loss(unrolled, *args, n), (0, 1, 2))  # noqa: B023
        assert close((value[i], [g[i] for g in found]), f(x, z, w))


def test_gradient_of_a_mapped_loop_is_that_of_the_loops():
    (x, z, w), _ = expected(0)
    xs, counts = jnp.stack([x, -x]), jnp.asarray([2, 4])

    def total(run, xs, w):
        return sum(x.sum() for x in jax.vmap(run, (0, None, None, 0))(xs, z, w, counts))

    run = functools.partial(looped, kind="checkpointed", checkpoints=2)
    found = jax.jit(jax.grad(functools.partial(total, run), (0, 1)))(xs, w)

    def one_by_one(xs, w):
        outs = [unrolled(x, z, w, n) for x, n in zip(xs, (2, 4), strict=True)]
        return sum(x.sum() for out in outs for x in out)

    assert close(found, jax.grad(one_by_one, (0, 1))(xs, w))


@pytest.mark.parametrize("kind", KINDS)
def test_condition_of_a_mapped_loop_is_one_for_all(kind):
    """Else JAX would select between the whole carries, and run all branches."""

    def run(x, limit):
        options = {"kind": kind, "max_steps": 4}
        return eqxi.while_loop(lambda x: x < limit, lambda x: 2 * x, x, **options)

    xs, limits = jnp.asarray([1.0, 3.0]), jnp.asarray([10.0, 4.0])
    jaxpr = str(jax.make_jaxpr(jax.vmap(run))(xs, limits))
    assert jax.vmap(run)(xs, limits).tolist() == [16, 6]
    assert "reduce_or" not in jaxpr


class TestHigherDerivatives:
    @staticmethod
    def of(transform, kind):
        (x, z, w), _ = expected(0)
        run = functools.partial(looped, kind=kind, max_steps=4)
        f = lambda run: lambda x: loss(run, x, z, w, 3)  # noqa: E731
        return jax.jit(transform(f(run)))(x), transform(f(unrolled))(x)

    @pytest.mark.parametrize("kind", REVERSIBLE)
    def test_forward_over_reverse(self, kind):
        assert close(*self.of(jax.hessian, kind))

    def test_reverse_over_reverse(self):
        assert close(*self.of(lambda f: jax.jacrev(jax.jacrev(f)), "bounded"))
        with pytest.raises(ValueError, match=r"Reverse-mode.*use `kind='bounded'`"):
            self.of(lambda f: jax.jacrev(jax.jacrev(f)), "checkpointed")

    @pytest.mark.parametrize("kind", ["lax", "bounded"])
    def test_forward(self, kind):
        assert close(*self.of(jax.jacfwd, kind))

    def test_forward_mode_of_a_checkpointed_loop_is_refused(self):
        with pytest.raises(TypeError, match="custom_vjp"):
            self.of(jax.jacfwd, "checkpointed")

    def test_reverse_mode_of_the_kind_lax_is_refused(self):
        with pytest.raises(ValueError, match="while_loop"):
            self.of(jax.grad, "lax")

    @pytest.mark.parametrize("kind", REVERSIBLE)
    def test_batch_of_cotangents(self, kind):
        (x, z, w), _ = expected(0)
        run = functools.partial(looped, kind=kind, max_steps=4)
        f = lambda run: lambda x: run(x, z, w, 3)  # noqa: E731
        assert close(jax.jacrev(f(run))(x), jax.jacrev(f(unrolled))(x))


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_loops_within_loops(kind):
    def run(x, loop):
        def outer(carry):
            i, x = carry
            inner = lambda c: (c[0] + 1, jnp.sin(c[1]) * x)  # noqa: E731
            return i + 1, loop(lambda c: c[0] <= i, inner, (0, x))[1]

        return loop(lambda c: c[0] < 3, outer, (0, x))[1].sum()

    def python(cond, body, carry):
        while cond(carry):
            carry = body(carry)
        return carry

    x = jnp.asarray([0.4, 1.3])
    ours = functools.partial(eqxi.while_loop, kind=kind, max_steps=4)
    found = jax.jit(jax.grad(functools.partial(run, loop=ours)))(x)
    assert close(found, jax.grad(functools.partial(run, loop=python))(x))


class TestCarry:
    @pytest.mark.parametrize("kind", KINDS)
    def test_numbers_become_arrays(self, kind):
        init = {"i": 0, "x": 1.0, "array": np.ones(2, np.float32), "none": None}

        def body(carry):
            return {**carry, "i": carry["i"] + 1, "x": carry["x"] * 2}

        run = functools.partial(eqxi.while_loop, kind=kind)
        out = run(lambda c: c["i"] < 3, body, init, max_steps=5)
        assert out["i"] == 3 and out["x"] == 8 and out["none"] is None
        assert all(isinstance(x, jax.Array) for x in jtu.tree_leaves(out))
        assert run(lambda c: True, body, init, max_steps=0)["x"] == 1
        if kind != "lax":
            zero_steps = functools.partial(run, lambda c: True, lambda x: 2 * x)
            assert jax.grad(lambda x: zero_steps(x, max_steps=0))(1.0) == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_condition_may_be_a_constant_and_arrays_empty(self, kind):
        out = eqxi.while_loop(
            lambda c: True, lambda c: c, jnp.zeros((0, 2)), kind=kind, max_steps=2
        )
        assert out.shape == (0, 2)

    def test_keys_integers_and_bools_go_round_beside_what_is_differentiated(self):
        def body(carry):
            key, flag, i, x = carry
            key, new = jax.random.split(key)
            return key, ~flag, i + 1, x * jax.random.normal(new)

        def run(x, loop):
            init = (jax.random.key(0), True, 0, x)
            return loop(lambda c: c[2] < 3, body, init)[3]

        ours = functools.partial(eqxi.while_loop, kind="checkpointed", checkpoints=2)
        found = jax.grad(functools.partial(run, loop=ours))(2.0)
        wanted = jax.jvp(
            functools.partial(run, loop=jax.lax.while_loop), (2.0,), (1.0,)
        )
        assert jnp.allclose(found, wanted[1])

    @pytest.mark.parametrize("kind", KINDS)
    def test_works_without_jit(self, kind):
        (x, z, w), _ = expected(0)
        with jax.disable_jit():
            found = looped(x, z, w, 3, kind=kind, max_steps=4)
        assert close(found, unrolled(x, z, w, 3))

    def test_anything_else_than_arrays_is_refused_by_path(self):
        init = {"x": jnp.ones(2), "f": jnp.tanh}
        with pytest.raises(TypeError, match=r"`init_val\['f'\]`.*filter_while_loop"):
            eqxi.while_loop(lambda c: True, lambda c: c, init, kind="lax", max_steps=2)

    @pytest.mark.parametrize(
        "body",
        [
            lambda c: (c[0], c[1].astype(jnp.int32)),
            lambda c: (c[0], c[1][:1]),
            lambda c: [c[0], c[1]],
            lambda c: (c[0], {"x": c[1]}),
        ],
        ids=["dtype", "shape", "node", "structure"],
    )
    def test_other_structure_is_named(self, body):
        init = (0, jnp.ones(2))
        with pytest.raises(ValueError, match=r"same input and output structure.*\n- `"):
            eqxi.while_loop(lambda c: True, body, init, kind="lax", max_steps=2)

    @pytest.mark.parametrize("out", [1, jnp.ones(2) > 0, jnp.asarray(1.0), None])
    @pytest.mark.parametrize("kind", KINDS)
    def test_condition_must_be_a_bool(self, kind, out):
        with pytest.raises(TypeError, match="condition of a loop must return a bool"):
            eqxi.while_loop(
                lambda c: out, lambda c: c, jnp.ones(2), kind=kind, max_steps=2
            )

    def test_public_loop_carries_anything_and_names_what_changes(self):
        init = {"x": jnp.asarray(1.0), "f": jnp.sin, "n": 2}

        def run(x):
            out = eqx.filter_while_loop(
                lambda c: c["x"] < 3,
                lambda c: {**c, "x": c["x"] * c["n"]},
                {**init, "x": x},
                kind="checkpointed",
                max_steps=5,
            )
            assert out["f"] is jnp.sin and out["n"] == 2
            return out["x"]

        assert jax.grad(run)(1.0) == 4
        with pytest.raises(TypeError, match=r"`carry\['x'\]` was float32\[\]"):
            eqx.filter_while_loop(
                lambda c: True,
                lambda c: {**c, "x": c["x"] > 0},
                init,
                kind="bounded",
                max_steps=5,
            )


class TestOptions:
    @pytest.mark.parametrize("limit", [np.int32(3), 3.0, True, -1])
    def test_limit_must_be_an_int(self, limit, without_type_checks):
        with pytest.raises(ValueError, match="max_steps"):
            eqxi.while_loop(
                lambda c: True, lambda c: c, 0, kind="bounded", max_steps=limit
            )

    @pytest.mark.parametrize(
        "options",
        [
            {"kind": "bounded"},
            {"kind": "checkpointed"},
            {"kind": "checkpointed", "checkpoints": 0},
            {"kind": "bounded", "max_steps": 3, "base": 1},
            {"kind": "other"},
        ],
        ids=str,
    )
    def test_what_does_not_fit_is_refused(self, options, without_type_checks):
        with pytest.raises(ValueError, match="`while_loop`"):
            eqxi.while_loop(lambda c: True, lambda c: c, 0, **options)

    @pytest.mark.parametrize("base", [2.5, "4", True])
    def test_base_must_be_an_int(self, base, without_type_checks):
        error = ValueError if base is True else TypeError
        with pytest.raises(error, match="`while_loop`: `base` must be "):
            eqxi.while_loop(
                lambda c: True, lambda c: c, 0, kind="bounded", max_steps=9, base=base
            )

    def test_public_loop_refuses_checkpoints_for_another_kind(self):
        with pytest.raises(ValueError, match="checkpoints"):
            eqx.filter_while_loop(lambda c: True, lambda c: c, None, checkpoints=2)

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_step_is_allowed(self, kind):
        options = {"kind": kind, "max_steps": 0}
        f = jax.grad(lambda x: eqxi.while_loop(lambda c: True, jnp.sin, x, **options))
        assert f(2.0) == 1


def test_what_a_compiled_function_keeps_holds_no_array():
    """A tracer kept by JAX's caches would keep alive all that it is computed from."""
    with jax.checking_leaks():
        args, _ = expected(0)
        run = functools.partial(looped, kind="checkpointed", max_steps=3)
        jax.jit(jax.grad(functools.partial(loss, run)))(*args, 2)


def test_carry_may_be_split_over_the_axes_of_a_mesh():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("a",), axis_types=explicit)

    def run(x, loop):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]))  # noqa: E731
        return loop(lambda c: c[0] < 3, body, (0, x))[1].sum()

    with jax.set_mesh(mesh):
        split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
        x = jax.device_put(jnp.linspace(0.0, 1.0, 8), split)
        ours = functools.partial(eqxi.while_loop, kind="checkpointed", checkpoints=2)
        found = jax.jit(jax.grad(functools.partial(run, loop=ours)))(x)
    assert found.sharding.spec == split.spec
    plain = jnp.sin(jnp.linspace(0.0, 1.0, 8))
    wanted = (
        jnp.cos(jnp.linspace(0.0, 1.0, 8)) * jnp.cos(plain) * jnp.cos(jnp.sin(plain))
    )
    assert close(found, wanted)


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_key_in_the_carry_is_not_reported_as_used_twice(kind):
    def run(next_of, x, key):
        def body(carry):
            x, key = carry
            next_key, step_key = jax.random.split(key)
            return x * jax.random.normal(step_key), next_of(key, next_key)

        options = {"kind": kind, "max_steps": 3}
        return eqx.filter_while_loop(lambda c: c[0] != 0, body, (x, key), **options)[0]

    gradient = jax.jit(jax.grad(run, 1), static_argnums=0)
    with jax.debug_key_reuse(True):
        assert gradient(lambda key, new: new, 1.0, jax.random.key(0)) != 0
        with pytest.raises(jax.errors.KeyReuseError):
            gradient(lambda key, new: key, 1.0, jax.random.key(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", [eqx.filter_while_loop, eqxi.while_loop])
def test_messages_of_jax_name_the_users_function_and_the_leaf(loop, kind):
    def halve(state):
        return {"x": state["x"] / 2 if state["x"] > 1 else state["x"]}

    def goes_on(state):
        return bool(state["x"] > 1)

    state = {"n": jnp.ones(2), "x": jnp.asarray(5.0)}
    for cond, body in [(goes_on, lambda state: state), (lambda _: True, halve)]:
        fun = goes_on if cond is goes_on else halve
        with pytest.raises(
            jax.errors.TracerBoolConversionError,
            match=rf"function {fun.__name__} at \S*test_while_loop.*state\['x'\]",
        ):
            loop(cond, body, state, kind=kind, max_steps=3)
