"""filter_scan and filter_map: any trees, gone through along axis 0."""

import traceback
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from nests import (
    FORWARD,
    REVERSE,
    Scale,
    agree,
    few,
    in_float64,
    inexact,
    mix,
    mixed_trees,
    nests,
    same_statics,
)

import equinox_like as eqx

STEPS = 3


def stacked(tree):
    """`STEPS` copies of each array, along a new axis 0."""
    return jtu.tree_map(
        lambda x: jnp.stack([jnp.asarray(x)] * STEPS) if eqx.is_array(x) else x, tree
    )


def row(tree, i):
    return jtu.tree_map(lambda x: x[i] if eqx.is_array(x) else x, tree)


def step(carry, x):
    """A step in which carry and `x` act on each other."""
    carry, x = mix((carry, x))
    return jtu.tree_map(lambda a: a / 2 if eqx.is_inexact_array(a) else a, carry), x


def loop(f, carry, xs, reverse=False):
    ys = []
    for i in reversed(range(STEPS)) if reverse else range(STEPS):
        carry, y = f(carry, row(xs, i))
        ys.append(y)
    if reverse:
        ys.reverse()
    return carry, jtu.tree_map(
        lambda *y: jnp.stack([*map(jnp.asarray, y)]) if eqx.is_array(y[0]) else y[0],
        *ys,
    )


@few
@given(mixed_trees(3), mixed_trees(3), st.booleans(), nests(FORWARD))
def test_scan_is_a_python_loop(carry, xs, reverse, nest):
    xs = stacked(xs)
    scan = nest(lambda trees: eqx.filter_scan(step, *trees, reverse=reverse))
    out, expected = scan((carry, xs)), loop(step, carry, xs, reverse)
    assert agree(out, [np.asarray(x) for x in inexact(expected)])
    assert same_statics(out, expected)


@few
@given(mixed_trees(3), nests(REVERSE))
def test_gradient_of_a_scan_is_that_of_the_loop(carry, nest):
    def loss(f):
        return lambda c: sum(jnp.sum(x) for x in inexact(f(c)))

    def scan(carry):
        f = nest(lambda c: step(c, None)[0])
        return eqx.filter_scan(lambda c, _: (f(c), None), carry, length=STEPS)[0]

    def plain(f, leaves):
        for _ in range(STEPS):
            leaves = [x / 2 for x in f(leaves)]
        return sum(jnp.sum(x) for x in leaves)

    reference = in_float64(lambda f, x: jax.grad(plain, 1)(f, x), carry)
    assert agree(eqx.filter_grad(loss(scan))(carry), reference)


@pytest.mark.parametrize(
    "checkpoint",
    [None, False, True, jax.checkpoint_policies.everything_saveable],
    ids=["none", "no", "yes", "policy"],
)
def test_agrees_with_jax_on_arrays(checkpoint):
    def f(c, x):
        return jnp.sin(c + x), c * x

    c, xs = jnp.asarray(0.3), jnp.arange(4.0)

    def loss(scan, options, c, xs):
        last, ys = scan(f, c, xs, **options)
        return last + ys.sum()

    plain = {"reverse": True, "unroll": 2}
    ours = plain | {"checkpoint": checkpoint}
    expected = jax.value_and_grad(partial(loss, jax.lax.scan, plain), (0, 1))(c, xs)
    found = jax.value_and_grad(partial(loss, eqx.filter_scan, ours), (0, 1))(c, xs)
    assert jtu.tree_all(jtu.tree_map(jnp.allclose, found, expected))


@pytest.mark.parametrize("unroll", [2, True])
def test_number_of_checkpoints_excludes_unrolling(unroll):
    step = lambda c, _: (c, None)  # noqa: E731
    with pytest.raises(ValueError, match=r"`unroll` cannot be .*`checkpoint=2`"):
        eqx.filter_scan(step, jnp.ones(()), length=4, unroll=unroll, checkpoint=2)
    eqx.filter_scan(step, jnp.ones(()), length=4, unroll=False, checkpoint=2)


def test_invalid_number_of_checkpoints_names_the_parameter():
    with pytest.raises(ValueError, match=r"`checkpoint` must be .* got 0"):
        eqx.filter_scan(lambda c, _: (c, None), jnp.ones(()), length=4, checkpoint=0)


def memory_of_gradient(loss):
    gradient = jax.jit(jax.grad(loss)).lower(jnp.ones((4, 64)))
    return gradient.compile().memory_analysis().temp_size_in_bytes


def test_checkpoint_keeps_nothing_of_a_step_but_its_carry():
    def residuals(checkpoint):
        step = lambda c, _: (jnp.sin(jnp.sin(jnp.sin(c))), None)  # noqa: E731
        scan = partial(eqx.filter_scan, step, length=8, checkpoint=checkpoint)
        return memory_of_gradient(lambda c: scan(c)[0].sum())

    assert residuals(True) < 0.7 * residuals(None)


@pytest.mark.parametrize("unroll", [8, True])
def test_checkpoint_keeps_as_little_if_the_loop_is_unrolled(unroll):
    w = jnp.eye(4)

    def step(c, _):
        return jnp.sin(w @ jnp.sin(w @ jnp.sin(w @ c))), None

    options = {"length": 8, "unroll": unroll}
    ours = partial(eqx.filter_scan, step, checkpoint=True, **options)
    plain = partial(jax.lax.scan, jax.checkpoint(step), **options)
    found, expected = (
        memory_of_gradient(lambda c, scan=scan: scan(c)[0].sum())
        for scan in (ours, plain)
    )
    assert found == expected


def test_layers_of_a_stacked_module_are_applied_one_by_one():
    layers = Scale(jnp.asarray([2.0, 3.0]), "two")
    names = []

    def f(x, layer):
        names.append(layer.name)
        return layer(x), (layer, "text")

    x, (out, text) = eqx.filter_scan(f, jnp.ones(2), layers)
    assert x.tolist() == [6, 6] and set(names) == {"two"}
    assert eqx.tree_equal(out, layers) and text == "text"


def test_carry_may_hold_anything_that_stays_what_it_is():
    marker = object()
    carry = (Scale(jnp.ones(2)), jnp.tanh, marker, 3, None)

    def f(carry, _):
        model, fun, marker, n, none = carry
        return (Scale(fun(model.factor), model.name), fun, marker, n, none), None

    out, ys = eqx.filter_scan(f, carry, length=2)
    assert out[1:] == carry[1:] and out[2] is marker and ys is None
    assert jnp.allclose(out[0].factor, jnp.tanh(jnp.tanh(1.0)))


@pytest.mark.parametrize("checkpoint", [False, True, 2])
def test_scan_without_steps_returns_the_first_carry(checkpoint):
    f = lambda c, _: (c + 1, c)  # noqa: E731
    out, ys = eqx.filter_scan(f, jnp.ones(3), length=0, checkpoint=checkpoint)
    assert out.tolist() == [1, 1, 1] and ys.shape == (0, 3)


def test_number_becomes_an_array_where_there_was_one():
    out, _ = eqx.filter_scan(lambda c, _: (2, None), jnp.asarray(1), length=3)
    assert isinstance(out, jax.Array) and out == 2


def test_weak_type_may_be_lost_on_the_way():
    f = lambda c, x: (c + x, None)  # noqa: E731
    out, _ = eqx.filter_scan(f, jnp.asarray(1.0), jnp.ones(3))
    assert out == 4


def test_output_of_a_checkpointed_scan_keeps_a_weak_dtype():
    step = lambda c, x: (c / 2, {"weak": 2 * c, "strong": c * x})  # noqa: E731
    _, out = eqx.filter_scan(step, jnp.asarray(1.0), jnp.ones(3), checkpoint=2)
    assert out["weak"].weak_type and not out["strong"].weak_type


@pytest.mark.parametrize("checkpoint", [2, "all"])
def test_output_of_a_checkpointed_scan_has_the_dtype_that_a_weak_carry_gets(checkpoint):
    f = lambda c, x: (c + x, c)  # noqa: E731
    _, out = eqx.filter_scan(f, 0, jnp.full(3, 0.5), checkpoint=checkpoint)
    assert out.tolist() == [0, 0.5, 1]


def test_keys_are_gone_through():
    keys = jax.random.split(jax.random.key(0), 3)
    _, out = eqx.filter_scan(lambda c, k: (c, jax.random.normal(k)), None, keys)
    assert eqx.tree_equal(out, jax.vmap(jax.random.normal)(keys))


class TestScanErrors:
    def test_static_leaf_that_changes_is_named_before_and_after(self):
        def counting(carry, _):
            return {"n": carry["n"] + "b", "x": carry["x"]}, None

        with pytest.raises(
            TypeError,
            match=r"`filter_scan` of `counting`.*`carry\['n'\]`.* 'a'.* 'ab'.*array",
        ):
            eqx.filter_scan(counting, {"n": "a", "x": jnp.ones(2)}, length=2)

    def test_structure_that_changes_is_named_before_a_number_that_may(self):
        step = lambda c, _: ((c[0] + 1, c[1][:1]), None)  # noqa: E731
        with pytest.raises(TypeError, match=r"`carry\[1\]` was .* of length 2"):
            eqx.filter_scan(step, (0, [jnp.ones(2)] * 2), length=2)

    def test_fix_for_a_structure_that_changes_is_not_about_numbers(self):
        # A number that changes becomes an array by itself.
        for start, end in ((None, jnp.ones(2)), (0.0, None), ((0.0,), [0.0])):
            step = lambda c, _, end=end: (end, None)  # noqa: E731
            with pytest.raises(TypeError, match="return the structure of the initial"):
                eqx.filter_scan(step, start, length=2)

    def test_number_that_changes_its_type_only_becomes_an_array(self):
        for start, end in ((1, 1.0), (0.0, -0.0), (1, 2), (1, jnp.ones(()))):
            step = lambda c, _, end=end: ((end,), None)  # noqa: E731
            (ours,), _ = eqx.filter_scan(step, (start,), length=2)
            (theirs,), _ = jax.lax.scan(step, (start,), length=2)
            assert jax.typeof(ours) == jax.typeof(theirs) and ours == theirs
            assert jnp.signbit(ours) == jnp.signbit(theirs)

    def test_static_field_that_changes_is_named(self):
        f = lambda c, _: (Scale(c.factor, "other"), None)  # noqa: E731
        with pytest.raises(TypeError, match=r"`carry.name`.*'scale'.*'other'"):
            eqx.filter_scan(f, Scale(jnp.ones(2)), length=2)

    @pytest.mark.parametrize(
        "change, now",
        [
            (lambda x: x.astype(jnp.int32), r"int32\[2\]"),
            (lambda x: x[:1], r"float32\[1\]"),
        ],
        ids=["dtype", "shape"],
    )
    def test_array_that_changes_its_type_is_named_before_and_after(self, change, now):
        f = lambda c, _: ([change(c[0]), c[1]], None)  # noqa: E731
        with pytest.raises(
            TypeError, match=rf"`carry\[0\]` was float32\[2\], and is now {now}"
        ):
            eqx.filter_scan(f, [jnp.ones(2), jnp.ones(3)], length=2)

    def test_structure_that_changes_is_named(self):
        with pytest.raises(TypeError, match=r"`carry\['a'\]`.*length 1.*length 2"):
            eqx.filter_scan(
                lambda c, _: ({"a": [*c["a"], jnp.ones(1)]}, None),
                {"a": [jnp.ones(1)]},
                length=2,
            )

    def test_what_is_no_pair_is_refused(self):
        with pytest.raises(TypeError, match=r"pair `\(carry, y\)`.*float32\[1\]"):
            eqx.filter_scan(lambda c, _: c, jnp.ones(1), length=2)
        with pytest.raises(TypeError, match=r"pair `\(carry, y\)`.*list"):
            eqx.filter_scan(lambda c, _: [c, c, c], jnp.ones(1), length=2)

    def test_a_list_of_two_is_a_pair_as_for_jax(self):
        out = eqx.filter_scan(lambda c, _: [c, c], jnp.ones(1), length=2)
        assert eqx.tree_equal(out, (jnp.ones(1), jnp.ones((2, 1))))

    def test_lengths_that_differ_are_named_with_their_paths(self):
        xs = {"a": jnp.ones(2), "b": [jnp.ones(3), "text"]}
        with pytest.raises(
            ValueError, match=r"`xs\['a'\]` has 2, `xs\['b'\]\[0\]` has 3"
        ):
            eqx.filter_scan(lambda c, x: (c, None), None, xs)
        with pytest.raises(ValueError, match=r"`xs` has 2; `length` is 4"):
            eqx.filter_scan(lambda c, x: (c, None), None, jnp.ones(2), length=4)

    def test_nothing_to_go_through_is_refused(self):
        for xs in (None, "text"):
            with pytest.raises(ValueError, match=r"no array in `xs`.*no `length`"):
                eqx.filter_scan(lambda c, x: (c, None), jnp.ones(2), xs)
        with pytest.raises(ValueError, match=r"`xs\[1\]` is a scalar"):
            eqx.filter_scan(
                lambda c, x: (c, None), None, (jnp.ones(2), jnp.asarray(1.0))
            )

    def test_error_of_the_step_itself_is_the_users(self):
        def f(c, _):
            raise TypeError("mine")

        with pytest.raises(TypeError, match=r"^mine"):
            eqx.filter_scan(f, jnp.ones(2), length=2)


@few
@given(mixed_trees(4), nests(FORWARD))
def test_map_is_vmap_and_a_python_loop(tree, nest):
    xs = stacked(tree)
    out = nest(lambda xs: eqx.filter_map(mix, xs))(xs)
    expected = loop(lambda c, x: (c, mix(x)), None, xs)[1]
    assert agree(out, [np.asarray(x) for x in inexact(expected)])
    assert same_statics(out, expected)
    assert agree(eqx.filter_vmap(mix)(xs), [np.asarray(x) for x in inexact(expected)])


def test_map_in_batches_is_the_same():
    xs = (jnp.arange(5.0), "n")
    f = lambda x: {"square": x[0] ** 2, "name": x[1]}  # noqa: E731
    out = eqx.filter_map(f, xs, batch_size=2)
    assert out["square"].tolist() == [0, 1, 4, 9, 16] and out["name"] == "n"
    assert eqx.tree_equal(out, eqx.filter_map(f, xs))


def test_map_of_nothing_is_refused():
    message = r"`filter_map` of `<lambda>`.*no array in `xs` to iterate over\."
    with pytest.raises(ValueError, match=message):
        eqx.filter_map(lambda x: x, "text")


@pytest.mark.parametrize(
    "loop",
    [
        lambda body: eqx.filter_scan(
            lambda c, _: (body(c), None), jnp.ones(2), None, 2
        ),
        lambda body: eqx.filter_while_loop(lambda c: c[0] < 2, body, jnp.ones(2)),
    ],
    ids=["scan", "while"],
)
def test_error_of_a_carry_that_changes_is_at_the_line_of_the_user(loop):
    with pytest.raises(TypeError, match=r"was float32\[2\], and is now float32") as e:
        loop(lambda c: jnp.concatenate([c, c]))
    files = [f.filename for f in traceback.extract_tb(e.value.__traceback__)]
    # The checks of types in the tests add frames of jaxtyping.
    assert [f for f in files if "jaxtyping" not in f][-1] == __file__
