"""filter_while_loop and filter_fori_loop: the carry may be anything."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given
from nests import FORWARD, agree, few, in_float64, mix, mixed_trees, nests, same_statics

import equinox_like as eqx
import equinox_like.internal as eqxi


def halved(tree):
    out = mix(tree)
    return jtu.tree_map(lambda x: x / 2 if eqx.is_inexact_array(x) else x, out)


def while_loop(tree, steps, **options):
    counted = (jnp.asarray(0), tree)
    body = lambda state: (state[0] + 1, halved(state[1]))  # noqa: E731
    cond = lambda state: state[0] < steps  # noqa: E731
    return eqx.filter_while_loop(cond, body, counted, **options)[1]


LOOPS = {
    "while": while_loop,
    "limited": lambda tree, steps: while_loop(tree, 10, max_steps=steps),
    "fori": lambda tree, steps: eqx.filter_fori_loop(
        0, steps, lambda i, tree: halved(tree), tree
    ),
    "unrolled": lambda tree, steps: eqx.filter_fori_loop(
        2, 2 + steps, lambda i, tree: halved(tree), tree, unroll=2
    ),
}
loops, counts = st.sampled_from(sorted(LOOPS)), st.integers(0, 3)


def plain(f, leaves, steps):
    for _ in range(steps):
        leaves = [x / 2 for x in f(leaves)]
    return leaves


@few
@given(mixed_trees(4), loops, counts, nests(FORWARD))
def test_is_a_python_loop(tree, name, steps, nest):
    out = nest(lambda tree: LOOPS[name](tree, steps))(tree)
    assert agree(out, in_float64(lambda f, x: plain(f, x, steps), tree))
    assert same_statics(out, tree)


@few
@given(mixed_trees(3), loops, counts)
def test_forward_mode_derivative_is_that_of_the_loop(tree, name, steps):
    tangent = jtu.tree_map(jnp.ones_like, eqx.filter(tree, eqx.is_inexact_array))
    _, found = eqx.filter_jvp(lambda x: LOOPS[name](x, steps), (tree,), (tangent,))
    reference = in_float64(
        lambda f, x, t: jax.jvp(lambda x: plain(f, x, steps), (x,), (t,))[1],
        tree,
        tangent,
    )
    assert agree(found, reference)


def test_agrees_with_jax_on_arrays():
    body, cond = lambda x: 1.5 * x, lambda x: x < 10
    x = jnp.asarray(1.0)
    assert eqx.filter_while_loop(cond, body, x) == jax.lax.while_loop(cond, body, x)
    many = jnp.asarray([1.0, 5.0, 20.0])
    f = lambda x: eqx.filter_while_loop(cond, body, x)  # noqa: E731
    g = lambda x: jax.lax.while_loop(cond, body, x)  # noqa: E731
    assert eqx.tree_equal(eqx.filter_vmap(f)(many), jax.vmap(g)(many))


def test_reverse_mode_goes_through_a_known_number_of_steps():
    def loss(x):
        return eqx.filter_fori_loop(0, 3, lambda i, s: (s[0] * x, s[1]), (x, "n"))[0]

    assert eqx.filter_grad(loss)(jnp.asarray(2.0)) == 32


@pytest.mark.parametrize("limit, expected", [(0, 1), (2, 4), (100, 16)])
def test_limit_ends_the_loop(limit, expected):
    x = jnp.asarray(1)
    out = eqx.filter_while_loop(lambda x: x < 10, lambda x: 2 * x, x, max_steps=limit)
    assert out == expected


def test_works_without_jit():
    with jax.disable_jit():
        out = LOOPS["while"]({"x": jnp.ones(2), "n": 1}, 2)
    assert out["n"] == 1


def test_compiled_function_with_a_number_that_changes_can_be_called_again():
    @jax.jit
    def halve(x):
        def body(carry):
            return carry[0] / 2, carry[1] + 1

        return eqx.filter_while_loop(lambda carry: carry[0] > 1, body, (x, 0))

    for _ in range(3):
        assert halve(jnp.asarray(8.0)) == (1, 3)


@pytest.mark.parametrize("options", [{}, {"max_steps": 9}], ids=["plain", "limited"])
def test_numbers_that_change_become_arrays_as_for_jax(options):
    def body(state):
        n, total, kept, name = state
        assert type(kept) is int
        return n + 1, total + jnp.ones(()), kept, name

    def cond(state):
        return state[0] < 3

    out = eqx.filter_while_loop(cond, body, (0, 0, 7, "name"), **options)
    assert out == (3, 3.0, 7, "name") and type(out[2]) is int
    n, total = jax.lax.while_loop(
        cond, lambda s: (s[0] + 1, s[1] + jnp.ones(())), (0, 0)
    )
    for ours, theirs in (out[0], n), (out[1], total):
        assert jax.typeof(ours) == jax.typeof(theirs)
    assert eqx.filter_fori_loop(0, 3, lambda i, s: body(s), (0, 0, 7, "")) == (
        3,
        3,
        7,
        "",
    )


class TestErrors:
    def test_static_leaf_that_changes_is_named_before_and_after(self):
        def body(state):
            return {"n": state["n"] + "b"}

        with pytest.raises(
            TypeError, match=r"`filter_while_loop` of `body`.*`carry\['n'\]`.* 'a.* 'ab"
        ):
            eqx.filter_while_loop(lambda s: True, body, {"n": "a"})
        with pytest.raises(TypeError, match=r"`filter_fori_loop` of .*`carry\['n'\]`"):
            eqx.filter_fori_loop(0, 3, lambda i, s: body(s), {"n": "a"})

    def test_condition_that_is_not_a_boolean_scalar_is_named(self):
        def goes_on(x):
            return x

        for wrong, found in (
            (jnp.ones(2), r"float32\[2\]"),
            ("a", "a str"),
            (1, "int32"),
        ):
            message = f"condition `goes_on` must return a boolean scalar; .* {found}"
            with pytest.raises(TypeError, match=message):
                eqx.filter_while_loop(goes_on, lambda x: x, wrong)

    @pytest.mark.parametrize(
        "options", [{}, {"max_steps": 3}], ids=["plain", "limited"]
    )
    def test_array_that_changes_its_type_is_named(self, options):
        message = r"`carry\[0\]` was int32\[\], and is now float32\[\]"
        body = lambda s: (s[0] + 0.5, s[1])  # noqa: E731
        init = (jnp.asarray(1, jnp.int32), "text")
        with pytest.raises(TypeError, match=message):
            eqx.filter_while_loop(lambda s: s[0] < 3, body, init, **options)
        with pytest.raises(TypeError, match=message):
            eqx.filter_fori_loop(0, 3, lambda i, s: body(s), init)

    @pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
    @pytest.mark.parametrize("start", [0, jnp.asarray(0)], ids=["number", "array"])
    @pytest.mark.parametrize("one", [1.0, jnp.float32(1)], ids=["weak", "strong"])
    def test_weakly_typed_carry_takes_the_type_of_a_step(self, kind, start, one):
        last = eqx.filter_while_loop(
            lambda x: x < 3, lambda x: x + one, start, kind=kind, max_steps=8
        )
        assert last == 3 and last.dtype == jnp.float32

    @pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
    def test_carry_after_no_step_is_checked_and_has_the_type_of_others(self, kind):
        def loop(step):
            return eqx.filter_while_loop(
                lambda x: True, step, 1, kind=kind, max_steps=0
            )

        last = loop(lambda x: x + 1)
        assert isinstance(last, jax.Array) and last == 1
        with pytest.raises(TypeError, match="must keep its shape and dtype"):
            loop(lambda x: x > 1)

    def test_condition_that_is_no_boolean_is_jaxs_to_refuse(self):
        with pytest.raises(TypeError, match="bool"):
            eqx.filter_while_loop(lambda x: x, lambda x: x, jnp.asarray(1.0))

    @pytest.mark.parametrize("limit", [-1, 2**31])
    def test_limit_out_of_range_is_refused(self, limit):
        for loop in (eqx.filter_while_loop, eqxi.while_loop):
            with pytest.raises(
                ValueError, match=r"max_steps.*between 0 and 2147483647"
            ):
                loop(
                    lambda x: x < 3,
                    lambda x: x,
                    jnp.ones(()),
                    max_steps=limit,
                    kind="lax",
                )

    def test_other_kinds_are_refused(self, without_type_checks):
        with pytest.raises(ValueError, match=r'"lax", "bounded" or .*\'other\''):
            eqx.filter_while_loop(lambda x: x, lambda x: x, None, kind="other")


def test_carry_that_starts_to_vary_over_a_mesh_is_named_with_the_fix():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def total(x, start):
        return eqx.filter_while_loop(
            lambda c: c["i"] < 3,
            lambda c: {"i": c["i"] + 1, "sum": c["sum"] + x},
            start,
        )["sum"]

    def run(f):
        specs = {"in_specs": jax.P("d"), "out_specs": jax.P("d")}
        return jax.jit(jax.shard_map(f, mesh=mesh, **specs))

    message = (
        r"`carry\['sum'\]` was .*\{V:d\}.*`jax.lax.pcast\(array, 'x', to='varying'\)"
    )
    with pytest.raises(TypeError, match=message):
        run(lambda x: total(x, {"i": 0, "sum": jnp.zeros(2)}))(jnp.arange(4.0))
    varying = lambda: jax.lax.pcast(jnp.zeros(2), ("d",), to="varying")  # noqa: E731
    out = run(lambda x: total(x, {"i": 0, "sum": varying()}))(jnp.arange(4.0))
    assert out.tolist() == [0, 3, 6, 9]


def test_carry_that_is_split_differently_is_named_with_the_fix():
    mesh = jax.make_mesh((2,), ("d",))
    split, whole = (
        jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, spec))
        for spec in (jax.P("d"), jax.P())
    )

    @jax.jit
    def run(x, start):
        return eqx.filter_scan(lambda c, _: ({"a": c["a"] + x}, None), start, length=2)

    message = r"`carry\['a'\]` was .*float32\[2@d\].*`jax.sharding.reshard`"
    with pytest.raises(TypeError, match=message):
        run(split, {"a": whole})
    assert run(split, {"a": split})[0]["a"].tolist() == [3, 3]
