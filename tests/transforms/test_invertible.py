"""`filter_invertible`: the gradient of the chain, and memory that does not grow with it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._transforms.inverse import derived_inverse

WIDTH = 4


class Block(eqx.Module):
    f: eqx.nn.MLP
    g: eqx.nn.Linear
    name: str = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key)
        self.f = eqx.nn.MLP(WIDTH, WIDTH, 8, 0, final_activation=jnp.sin, key=keys[0])
        self.g = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.name = "block"


def rev(block, x):
    x1, x2 = jnp.split(x, 2)
    y1 = x1 + block.f(x2)
    return jnp.concatenate([y1, x2 + jnp.tanh(block.g(y1))])


def plain(blocks, x):
    for block in blocks:
        x = rev(block, x)
    return x


def blocks_of(count, stacked):
    """Blocks that are drawn in NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)
    structs = eqx.filter_eval_shape(Block, jax.random.key(0))
    shapes, others = eqx.partition(structs, lambda x: hasattr(x, "shape"))
    arrays = jtu.tree_map(
        lambda s: rng.uniform(-0.5, 0.5, (count, *s.shape)).astype(s.dtype), shapes
    )
    if stacked:
        return eqx.combine(jtu.tree_map(jax.device_put, arrays), others)
    return [
        eqx.combine(jtu.tree_map(lambda a, i=i: jax.device_put(a[i]), arrays), others)
        for i in range(count)
    ]


def loss(chain):
    return lambda arguments: (chain(*arguments) ** 2).sum()


X = jnp.linspace(-1, 1, 2 * WIDTH)
chain = eqx.filter_invertible(rev)


def assert_close(a, b, tolerance):
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape
        assert np.abs(x - y).max() < tolerance * (1 + np.abs(y).max())


@functools.cache
def of_the_plain_chain(count, around):
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss(around(plain))))
    return gradient((blocks_of(count, stacked=False), X))


def assert_those_of_the_plain_chain(found, count, stacked, around=lambda f: f):
    value, (grads, grad_x) = found
    expected, (plain_grads, plain_grad_x) = of_the_plain_chain(count, around)
    assert abs(float(value) - float(expected)) < 1e-5 * float(expected)
    if stacked:
        arrays = [eqx.filter(g, eqx.is_array) for g in plain_grads]
        plain_grads = jtu.tree_map(lambda *gs: np.stack(gs), *arrays)
    assert_close(grads, plain_grads, 1e-5)
    assert_close(grad_x, plain_grad_x, 1e-5)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_value_and_gradient_are_those_of_the_plain_chain(stacked, jit):
    blocks = blocks_of(3, stacked)
    function = eqx.filter_value_and_grad(loss(chain))
    found = (eqx.filter_jit(function) if jit else function)((blocks, X))
    assert_those_of_the_plain_chain(found, 3, stacked)


def test_rounding_is_all_that_differs():
    with jax.enable_x64(True):
        arguments = jtu.tree_map(
            lambda x: x.astype(float) if eqx.is_inexact_array(x) else x,
            (blocks_of(3, stacked=False), X),
        )
        ours, theirs = (
            eqx.filter_jit(eqx.filter_grad(loss(f)))(arguments) for f in (chain, plain)
        )
        assert_close(ours, theirs, 1e-13)


def temporary_bytes(chain, blocks):
    gradient = eqx.filter_jit(eqx.filter_grad(loss(chain)))
    compiled = gradient.lower((blocks, jnp.ones((256, 2 * WIDTH)))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_memory_of_the_gradient_does_not_grow(stacked):
    batched = eqx.filter_invertible(eqx.filter_vmap(rev, in_axes=(None, 0)))
    sizes = [temporary_bytes(batched, blocks_of(n, stacked)) for n in (4, 8)]
    assert max(sizes) <= 1.05 * min(sizes)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_nor_if_the_batch_is_around_the_chain(stacked):
    def batched(blocks, xs):
        return eqx.filter_vmap(chain, in_axes=(None, 0))(blocks, xs)

    few, many = (temporary_bytes(batched, blocks_of(n, stacked)) for n in (4, 8))
    assert many <= 1.05 * few


def test_that_of_the_plain_chain_does():
    def batched(blocks, x):
        return jax.vmap(lambda x: plain(blocks, x))(x)

    few, more = (temporary_bytes(batched, blocks_of(n, False)) for n in (2, 8))
    assert more > 2 * few


def test_own_inverse_is_used():
    used = []

    def inverse(block, y):
        used.append(block)
        return y / block["scale"] ** 2

    scaled = eqx.filter_invertible(lambda b, x: x * b["scale"] ** 2, inverse=inverse)
    blocks = ({"scale": jnp.array(2.0)}, {"scale": jnp.array(3.0)})
    gradient = jax.grad(lambda blocks: scaled(blocks, jnp.array(5.0)))(blocks)
    assert [float(g["scale"]) for g in gradient] == [5 * 9 * 4, 5 * 4 * 6]
    assert isinstance(gradient, tuple) and len(used) == 2


def test_any_tree_goes_through_the_chain():
    class State(NamedTuple):
        value: Any
        label: str
        step: Any

    def fun(block, x):
        return State(x.value + block, x.label, x.step + 1)

    x = State(jnp.ones(2), "name", jnp.array(0))
    for blocks in ([jnp.ones(2), jnp.ones(2)], jnp.ones((2, 2))):
        out = eqx.filter_invertible(fun)(blocks, x)
        assert out.label == "name" and out.step == 2 and out.value.tolist() == [3, 3]
        gradient = eqx.filter_grad(
            lambda a: eqx.filter_invertible(fun)(*a).value.sum()
        )((blocks, x))
        assert gradient[1].value.tolist() == [1, 1] and gradient[1].step is None


def test_it_works_under_vmap_and_twice_under_grad():
    blocks = blocks_of(2, stacked=False)
    xs = jnp.stack([X, 2 * X])
    out = eqx.filter_vmap(chain, in_axes=(None, 0))(blocks, xs)
    expected = eqx.filter_jit(plain)(blocks, 2 * X)
    np.testing.assert_allclose(out[1], expected, atol=1e-5)

    def curvature(chain):
        slope = jax.grad(lambda x: loss(chain)((blocks, x)))
        return jax.jit(jax.grad(lambda x: (slope(x) ** 2).sum()))(X)

    assert_close(curvature(chain), curvature(plain), 1e-4)


ROWS = jnp.asarray(np.stack([X, 2 * np.asarray(X), -np.asarray(X)]))
AROUND = {
    "x": lambda f: lambda b, x: jax.vmap(lambda x: f(b, x))(ROWS + x),
    "x twice": lambda f: lambda b, x: jax.vmap(
        lambda y: jax.vmap(lambda x: f(b, x + y))(ROWS)
    )(x),
    "other axis": lambda f: lambda b, x: jax.vmap(
        lambda x: f(b, x), in_axes=1, out_axes=1
    )(jnp.outer(x, X)),
    "blocks": lambda f: lambda b, x: jax.vmap(
        lambda s: f(jtu.tree_map(lambda w: w * s if eqx.is_inexact_array(w) else w, b), x)
    )(X),
    "gradient inside": lambda f: lambda b, x: jax.vmap(
        jax.grad(lambda x: (f(b, x) ** 2).sum())
    )(ROWS + x),
    "name": lambda f: lambda b, x: jax.vmap(lambda x: f(b, x), axis_name="i")(ROWS + x),
    "jit between": lambda f: lambda b, x: jax.vmap(jax.jit(lambda x: f(b, x)))(ROWS + x),
}  # fmt: skip


each_way = pytest.mark.parametrize("around", AROUND)


@each_way
def test_gradient_is_the_same_wherever_the_batch_is(around):
    assert_same_gradients(AROUND[around], stacked=False)


@each_way
def test_so_is_that_of_stacked_blocks(around):
    assert_same_gradients(AROUND[around], stacked=True)


def assert_same_gradients(around, stacked):
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss(around(chain))))
    found = gradient((blocks_of(2, stacked), X))
    assert_those_of_the_plain_chain(found, 2, stacked, around)


def test_step_may_use_the_name_of_the_axis():
    g = eqx.filter_invertible(lambda b, x: x + b * jax.lax.axis_index("i"))
    out = jax.vmap(lambda x: g([X, X], x), axis_name="i")(ROWS)
    rows, x = np.asarray(ROWS), np.asarray(X)
    np.testing.assert_allclose(out, rows + 2 * x * np.arange(3)[:, None], rtol=1e-5)


def test_step_may_close_over_what_is_mapped_or_hold_it():
    class Fun(eqx.Module):
        weight: Any

        def __call__(self, block, x):
            return x + self.weight * block

    for make in (Fun, lambda y: lambda block, x: x + y * block):
        out = jax.vmap(lambda x, y, make=make: eqx.filter_invertible(make(y))([X], x))(
            ROWS, ROWS
        )
        rows = np.asarray(ROWS)
        np.testing.assert_allclose(out, rows + rows * np.asarray(X), rtol=1e-5)


def test_integers_and_labels_go_through_a_batch():
    def fun(block, x):
        return {"x": x["x"] + block["b"], "n": x["n"] + 1, "label": x["label"]}

    g = eqx.filter_invertible(fun)
    x = {"x": X, "n": jnp.arange(2), "label": "text"}
    blocks = [{"b": X, "label": "one"}] * 2
    out = eqx.filter_vmap(lambda r: g(blocks, {**x, "x": r}))(ROWS)
    assert out["n"].tolist() == [[2, 3]] * 3 and out["label"] == "text"
    expected = np.asarray(ROWS) + 2 * np.asarray(X)
    np.testing.assert_allclose(out["x"], expected, rtol=1e-5)


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode"):
        eqx.filter_jvp(lambda x: chain(blocks_of(2, False), x), (X,), (X,))


# Inverses

own_jvp = jax.custom_jvp(lambda x: 2 * x)
own_vjp = jax.custom_vjp(lambda x: jnp.exp(x))
own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), tangents[0]))
own_vjp.defvjp(lambda x: (jnp.exp(x), None), lambda _, c: (c,))

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda b, x: b + x,
    "subtract": lambda b, x: x - b,
    "subtract from": lambda b, x: b - x,
    "multiply": lambda b, x: x * b,
    "divide": lambda b, x: x / b,
    "divide by": lambda b, x: b / x,
    "negate": lambda b, x: -x,
    "exp": lambda b, x: jnp.exp(x),
    "log": lambda b, x: jnp.log(x),
    "expm1": lambda b, x: jnp.expm1(x),
    "log1p": lambda b, x: jnp.log1p(x),
    "tanh": lambda b, x: jnp.tanh(x),
    "arctanh": lambda b, x: jnp.arctanh(x / 4),
    "sinh": lambda b, x: jnp.sinh(x),
    "arcsinh": lambda b, x: jnp.arcsinh(x),
    "sigmoid": lambda b, x: jax.nn.sigmoid(x),
    "sqrt": lambda b, x: jnp.sqrt(x),
    "rsqrt": lambda b, x: jax.lax.rsqrt(x),
    "cbrt": lambda b, x: jnp.cbrt(x),
    "cube": lambda b, x: x**3,
    "reciprocal": lambda b, x: 1 / x,
    "affine": lambda b, x: jnp.exp(b) * x + b,
    "jit": lambda b, x: jax.jit(lambda x: x + b)(x),
    "checkpoint": lambda b, x: jax.checkpoint(lambda x: x * jnp.sin(b))(x),
    "custom": lambda b, x: x + jax.nn.relu(b) + jax.nn.silu(b),
    "custom rules": lambda b, x: own_jvp(own_vjp(x)),
    "flip": lambda b, x: jnp.flip(x),
    "roll": lambda b, x: jnp.roll(x, 1),
    "reshape": lambda b, x: x.reshape(2, 2).T.reshape(4),
    "axes": lambda b, x: jnp.squeeze(x[None, :, None] * 2, (0, 2)),
    "stack of parts": lambda b, x: jnp.concatenate([x[2:] + b[0], x[:2]]),
    "every other": lambda b, x: jnp.stack([x[::2] + jnp.sin(x[1::2]), x[1::2]], 1).ravel(),
    "scan inside": lambda b, x: x + jax.lax.scan(lambda c, y: (c + y, c), 0.0, b)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_inverse_is_derived(name):
    fun = ELEMENTWISE[name]
    b, x = jnp.array([0.5, 1.5, 2.0, 3.0]), jnp.array([0.3, 0.6, 1.2, 2.5])
    inverse, y = derived_inverse(fun), fun(b, x)
    np.testing.assert_allclose(inverse(b, y), x, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(inverse)(b, y), x, rtol=1e-4)


def test_conversion_of_dtype_is_named():
    # The output has the dtype of the input, so some conversion loses digits.
    def fun(b, x):
        return (x.astype(jnp.float32) + b).astype(x.dtype)

    b, x = jnp.ones(2), jnp.ones(2, jnp.bfloat16)
    with pytest.raises(eqx.NotInvertibleError, match="`convert_element_type`"):
        derived_inverse(fun)(b, fun(b, x))


def test_steps_may_depend_on_each_other_in_any_way():
    def fun(b, x):
        p, q, r = x["p"], x["q"], x["r"]
        p = p * jnp.exp(jnp.sin(q)) + r
        q = q + jnp.cos(p) * b
        r = r - p * q
        return {"p": q, "q": r, "r": p}

    x = {"p": jnp.ones(2), "q": jnp.arange(2.0), "r": -jnp.ones(2)}
    b = jnp.array(0.3)
    assert_close(derived_inverse(fun)(b, fun(b, x)), x, 1e-5)


@pytest.mark.parametrize(
    ("fun", "primitive"),
    [
        (lambda b, x: jnp.sin(x), "sin"),
        (lambda b, x: jnp.cumsum(x), "cumsum"),
        (lambda b, x: b @ x, "dot_general"),
        (lambda b, x: x + jnp.sin(x), "add"),
        (lambda b, x: x**2, "integer_pow"),
        (lambda b, x: jnp.concatenate([x[:2], x[:2]]), "slice"),
    ],
)
def test_step_that_cannot_be_undone_is_named(fun, primitive):
    g = eqx.filter_invertible(fun)
    assert g([jnp.eye(4)], jnp.ones(4)).shape == (4,)  # only the gradient needs it
    with pytest.raises(
        eqx.NotInvertibleError, match=f"primitive `{primitive}`"
    ) as info:
        jax.grad(lambda x: g([jnp.eye(4)], x).sum())(jnp.ones(4))
    assert "inverse=" in str(info.value) and isinstance(info.value, ValueError)


@pytest.mark.parametrize("step", [jax.lax.mul, jax.lax.div])
def test_products_and_quotients_of_integers_cannot_be_undone(step):
    g = eqx.filter_invertible(lambda b, x: (step(x[0], 2), x[1] + b * x[0]))
    with pytest.raises(eqx.NotInvertibleError, match=f"primitive `{step.__name__}`"):
        jax.grad(lambda b: g([b, b], (jnp.array(7), jnp.array(0.5)))[1])(1.0)


def test_step_is_named_without_the_colours_that_jax_prints_in_a_terminal(monkeypatch):
    monkeypatch.setattr("jax._src.pretty_printer.CAN_USE_COLOR", True)
    with pytest.raises(eqx.NotInvertibleError, match=r"as in `a:f32\[4\] = cumsum"):
        jax.grad(
            lambda x: eqx.filter_invertible(lambda b, x: jnp.cumsum(x))([1], x).sum()
        )(jnp.ones(4))


def test_input_that_is_lost_is_an_error():
    g = eqx.filter_invertible(lambda b, x: {"a": x["a"], "b": x["a"]})
    x = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(eqx.NotInvertibleError, match="an input that it does not use"):
        jax.grad(lambda x: g([None], x)["a"].sum())(x)


# Checking


def test_check_lets_a_true_inverse_pass():
    checked = eqx.filter_invertible(rev, check=True)
    for blocks in map(blocks_of, (3, 3), (False, True)):
        expected = eqx.filter_jit(chain)(blocks, X)
        np.testing.assert_allclose(checked(blocks, X), expected, rtol=1e-5, atol=1e-8)
        gradient = eqx.filter_jit(eqx.filter_grad(loss(checked)))((blocks, X))
        assert gradient[1].shape == X.shape


def test_check_finds_an_inverse_that_is_none():
    wrong = eqx.filter_invertible(
        lambda b, x: x + b, inverse=lambda b, y: y - b / 2, check=True
    )
    with pytest.raises(
        eqx.NotInvertibleError, match=r"is wrong: .* up to 0\.5, "
    ) as info:
        wrong([jnp.ones(2)], jnp.ones(2))
    assert float(str(info.value).split("up to ")[2].split()[0]) > 100
    with pytest.raises(Exception, match="The inverse of `<lambda>` is wrong"):
        jax.block_until_ready(jax.jit(wrong)([jnp.ones(2)], jnp.ones(2)))
        jax.effects_barrier()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_compiled_check_raises_the_largest_error(stacked, batched):
    wrong = eqx.filter_invertible(
        lambda b, x: x * b, inverse=lambda b, y: y / b - 0.25, check=True
    )
    blocks = 2 * jnp.ones((2, 2)) if stacked else [2 * jnp.ones(2)] * 2
    x = jnp.ones((3, 2)) if batched else jnp.ones(2)
    call = jax.vmap(wrong, (None, 0)) if batched else wrong
    gradient = jax.grad(lambda b, x: call(b, x).sum())
    for f in map(eqx.filter_jit, (call, gradient)):
        for _ in range(2):
            message = r"by up to 0\.25, and by up to .* rounding"
            with pytest.raises(eqx.NotInvertibleError, match=message):
                f(blocks, x)


def test_check_finds_nan():
    zero = eqx.filter_invertible(lambda b, x: x * b, check=True)
    with pytest.raises(eqx.NotInvertibleError, match="nan"):
        zero([jnp.zeros(2)], jnp.zeros(2))


# Misuse


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (lambda b, x: {"y": x["x"]}, "must return a tree like its second argument"),
        (lambda b, x: {"x": x["x"][:1]}, r"`x\['x'\]` was float32\[2\].*float32\[1\]"),
        (lambda b, x: {"x": x["x"] > 0}, r"`x\['x'\]` was float32\[2\].*bool\[2\]"),
        (lambda b, x: {"x": "text"}, r"`x\['x'\]` was an array, and is now 'text'"),
    ],
)
def test_output_must_be_of_the_form_of_the_input(fun, text):
    with pytest.raises(ValueError, match=text):
        eqx.filter_invertible(fun)([1.0], {"x": jnp.ones(2)})


@pytest.mark.parametrize("blocks", [[2.0, 3.0], jnp.asarray([2.0, 3.0])])
def test_block_that_changes_a_static_value_is_an_error(blocks):
    g = eqx.filter_invertible(lambda b, x: {"x": x["x"] * b, "n": x["n"] + 1})
    with pytest.raises(
        ValueError, match=r"`x\['n'\]` was the static value 0, and is now 1"
    ):
        g(blocks, {"x": jnp.ones(2), "n": 0})


def test_stacked_blocks_are_of_one_number():
    g = eqx.filter_invertible(lambda b, x: x)
    with pytest.raises(ValueError, match=r"`blocks\['a'\]` of shape \(2,\), .*'b'"):
        g({"a": jnp.ones(2), "b": jnp.ones(3)}, X)
    with pytest.raises(ValueError, match=r"`blocks\['a'\]` of shape \(\)"):
        g({"a": jnp.ones(())}, X)
    with pytest.raises(ValueError, match="there are no arrays"):
        g({"a": "text"}, X)


def test_arrays_of_the_function_are_not_differentiated():
    class Fun(eqx.Module):
        weight: jax.Array

        def __call__(self, block, x):
            return x + self.weight * block

    g = eqx.filter_invertible(Fun(jnp.ones(2)))
    assert jax.grad(lambda b: g([b], X[:2]).sum())(jnp.ones(2)).tolist() == [1, 1]
    with pytest.raises(
        RuntimeError, match=r"^The arrays of `Fun` itself, .* cannot be au"
    ):
        eqx.filter_grad(lambda g: g([jnp.ones(2)], X[:2]).sum())(g)


def test_no_blocks_are_the_identity():
    assert chain([], X).tolist() == X.tolist()
    assert eqx.filter_invertible(chain, check=True)([], X).tolist() == X.tolist()
    assert np.asarray(jax.grad(lambda x: chain([], x).sum())(X)).tolist() == [1] * 8


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="inverse"):
        eqx.filter_invertible(rev, inverse=3)
    assert repr(eqx.filter_invertible(inverse=rev)(rev)) == "<filter_invertible of rev>"


def test_forward_mode_is_refused_by_name():
    for forward in (jax.jvp, eqx.filter_jvp):
        with pytest.raises(
            TypeError, match=r"`filter_invertible` of `rev` .*no forward"
        ):
            forward(lambda x: chain(blocks_of(2, False), x), (X,), (X,))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_chain_within_a_shard_map(stacked, jit):
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    blocks = [{"a": jnp.asarray(0.5)}, {"a": jnp.asarray(2.0)}]
    blocks = jax.tree.map(lambda *a: jnp.stack(a), *blocks) if stacked else blocks
    x = jnp.arange(4.0), jnp.ones(4)

    def couple(block, x):
        y = x[0] + jnp.tanh(block["a"] * x[1])
        return y, x[1] + jnp.sin(block["a"] * y)

    coupled = eqx.filter_invertible(couple)

    def mapped(f):
        specs = {"in_specs": (P(), P("d")), "out_specs": P("d")}
        return jit(jax.shard_map(f, mesh=mesh, **specs))(blocks, x)

    assert_close(mapped(coupled), jax.jit(coupled)(blocks, x), 1e-5)
    gradient = jax.grad(lambda blocks, x: coupled(blocks, x)[1].sum(), 1)
    assert_close(mapped(gradient), jax.jit(gradient)(blocks, x), 1e-5)


def test_list_of_blocks_on_explicit_axes():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    blocks, x = [jnp.arange(4.0), jnp.ones(4)], (jnp.ones(4), jnp.ones(4))

    def couple(block, x):
        return x[0] + jnp.tanh(block * x[1]), x[1]

    gradient = jax.grad(lambda b, x: eqx.filter_invertible(couple)(b, x)[0].sum())
    expected = jax.jit(gradient)(blocks, x)
    with jax.set_mesh(mesh):
        found = gradient(*jax.device_put((blocks, x), split))
    for a, b in zip(found, expected, strict=True):
        assert jax.typeof(a).sharding.spec == split.spec
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("stacked", [False, True])
def test_typed_key_goes_through_the_chain(stacked):
    def block(b, x):
        x, key = x
        return x + b * jax.random.normal(key, (2,)), key

    def run(chain):
        def loss(blocks):
            y, key = chain(blocks, (jnp.ones(2), jax.random.key(0)))
            assert key.dtype == jax.random.key(0).dtype
            return (y**2).sum()

        blocks = jnp.arange(6.0).reshape(3, 2)
        return jax.value_and_grad(loss)(blocks if stacked else [*blocks])

    def plain(blocks, x):
        for b in blocks:
            x = block(b, x)
        return x

    found, expected = (
        jax.jit(lambda f=f: run(f))() for f in (eqx.filter_invertible(block), plain)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
