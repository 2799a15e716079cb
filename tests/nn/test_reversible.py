"""`ReversibleBlock` and `ReversibleSequential`: what they compute is what plain automatic
differentiation would, and what they keep does not grow with the depth."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn

import equinox_like as eqx
from equinox_like import nn

WIDTH = 4
X = jax.device_put(np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32))


def make(key, p=0.0, **options):
    """A block whose `f` takes a key, and whose `g` takes none."""
    kf, kg = jax.random.split(key)
    f = nn.Sequential([nn.Linear(WIDTH, WIDTH, key=kf), nn.Dropout(p)])
    g = nn.Sequential([nn.Linear(WIDTH, WIDTH, key=kg), jnp.tanh])
    return nn.ReversibleBlock(f, g, **options)


@functools.cache
def stacked_of(depth, p=0.0):
    key = jax.random.key(0)
    stacked = drawn(lambda: nn.Stacked(functools.partial(make, p=p), depth, key=key))
    # Small enough for a chain that is as deep as any here.
    arrays, rest = eqx.partition(stacked, eqx.is_inexact_array)
    arrays = jax.tree.map(lambda a: jax.device_put(np.asarray(a) / 2), arrays)
    return eqx.combine(arrays, rest)


@functools.cache
def listed(depth, p=0.0):
    arrays, rest = eqx.partition(stacked_of(depth, p).layers, eqx.is_array)
    arrays = jax.device_get(arrays)
    return [
        eqx.combine(jax.tree.map(lambda a, i=i: jax.device_put(a[i]), arrays), rest)
        for i in range(depth)
    ]


def blocks_of(kind, depth, p=0.0):
    return stacked_of(depth, p) if kind == "stacked" else list(listed(depth, p))


each_kind = pytest.mark.parametrize("kind", ["list", "stacked"])


def plain(blocks, x, key=None):
    """What the layer is to do, written down."""
    blocks = blocks.unstack() if isinstance(blocks, nn.Stacked) else blocks
    keys = [None] * len(blocks) if key is None else jax.random.split(key, len(blocks))
    for block, k in zip(blocks, keys, strict=True):
        kf, kg = (None, None) if k is None else jax.random.split(k)
        x1, x2 = jnp.split(x, 2, block.split_axis)
        y1 = x1 + block.f(x2, key=kf)
        x = jnp.concatenate([y1, x2 + block.g(y1, key=kg)], block.split_axis)
    return x


def assert_close(a, b, tolerance=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = 1 + np.abs(y).max(initial=0.0)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def value_and_gradients(apply, blocks):
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(arguments):
        return (apply(*arguments) ** 2).sum()

    return run((blocks, X))


@pytest.mark.parametrize(
    ("kind", "depth", "p", "memory_efficient"),
    [
        ("list", 3, 0.0, True),
        ("list", 3, 0.5, True),
        ("list", 3, 0.5, False),
        ("stacked", 3, 0.5, True),
        ("stacked", 3, 0.5, False),
    ],
)
def test_value_and_gradients_are_those_of_plain_autodiff(
    kind, depth, p, memory_efficient, key
) -> None:
    def apply(blocks, x):
        model = nn.ReversibleSequential(blocks, memory_efficient=memory_efficient)
        return model(x, key=key if p else None)

    def other(blocks, x):
        return plain(blocks, x, key if p else None)

    value, (grads, grad_x) = value_and_gradients(apply, blocks_of(kind, depth, p))
    expected = value_and_gradients(other, blocks_of("list", depth, p))
    if kind == "stacked":
        grads = list(grads.unstack())
    assert_close((value, (grads, grad_x)), expected)


@each_kind
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_inverse_undoes_the_call_with_the_same_key(kind, memory_efficient, key) -> None:
    model = nn.ReversibleSequential(
        blocks_of(kind, 3, 0.5), memory_efficient=memory_efficient
    )
    y = model(X, key=key)
    assert_close(model.inverse(y, key=key), X)
    assert_close(model(model.inverse(X, key=key), key=key), X)
    other = model.inverse(y, key=jax.random.key(1))
    assert np.abs(np.asarray(other) - np.asarray(X)).max() > 1e-3
    block = listed(3, 0.5)[0]
    assert_close(block.inverse(block(X, key=key), key=key), X)


@each_kind
def test_gradient_for_a_batch_with_a_key_for_each_is_that_of_plain_autodiff(
    kind, key
) -> None:
    x = np.asarray(X)
    xs, keys = np.stack([x, 2 * x, -x]), jax.random.split(key, 3)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(blocks, memory_efficient):
        model = nn.ReversibleSequential(blocks, memory_efficient=memory_efficient)
        return (jax.vmap(lambda x, k: model(x, key=k))(xs, keys) ** 2).sum()

    blocks = blocks_of(kind, 2, 0.5)
    assert_close(gradient(blocks, True), gradient(blocks, False))


@each_kind
def test_gradient_of_the_inverse_is_that_of_plain_autodiff(kind, key) -> None:
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(arguments, memory_efficient):
        blocks, y = arguments
        model = nn.ReversibleSequential(blocks, memory_efficient=memory_efficient)
        return (model.inverse(y, key=key) ** 2).sum()

    arguments = (blocks_of(kind, 2, 0.5), X)
    assert_close(gradient(arguments, True), gradient(arguments, False))


@each_kind
def test_recomputation_with_the_same_key_is_not_reported_as_its_reuse(kind) -> None:
    model = nn.ReversibleSequential(blocks_of(kind, 2, 0.5))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model, xs, keys):
        return jax.vmap(lambda x, k: model.inverse(model(x, key=k), key=clone(k)))(
            xs, keys
        ).sum()

    clone = jax.random.clone
    with jax.debug_key_reuse(True):
        gradient(model, jnp.stack([X, -X]), jax.random.split(jax.random.key(0), 2))
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(lambda k: model(X, key=k) + model(X, key=k))(jax.random.key(0))


@hypothesis.given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3), data=st.data()
)
@hypothesis.settings(max_examples=8)
def test_any_axis_may_be_split(shape, data) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[axis] *= 2
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    block = nn.ReversibleBlock(jnp.sin, jnp.cos, split_axis=axis)
    model = nn.ReversibleSequential([block, block])

    @jax.jit
    def there_and_back(x):
        y = block(x)
        return y, block.inverse(y), model.inverse(model(x))

    y, *back = there_and_back(x)
    x1, x2 = np.split(x, 2, axis)
    y1 = x1 + np.sin(x2)
    assert_close(y, np.concatenate([y1, x2 + np.cos(y1)], axis), 1e-6)
    assert_close(back, [x, x])


@each_kind
def test_pair_goes_in_and_comes_back(kind, key) -> None:
    model = nn.ReversibleSequential(blocks_of(kind, 2))
    pair = tuple(jnp.split(X, 2))
    out = model(pair)
    assert isinstance(out, tuple)
    assert_close(jnp.concatenate(out), model(X))
    assert_close(model.inverse(out), pair)
    first, second = jax.jit(jax.grad(lambda pair: model(pair)[0].sum()))(pair)
    whole = jax.jit(jax.grad(lambda x: model(x)[:WIDTH].sum()))(X)
    assert_close(np.concatenate([first, second]), whole)


def test_halves_of_a_pair_may_differ() -> None:
    block = nn.ReversibleBlock(lambda x: x[:1] ** 2, lambda x: jnp.stack([x[0]] * 3))
    pair = jnp.array([2.0]), jnp.array([1.0, 2.0, 3.0])
    assert_close(block(pair), (jnp.array([3.0]), jnp.array([4.0, 5.0, 6.0])))
    assert_close(block.inverse(block(pair)), pair)


def temporary_bytes(kind, depth, memory_efficient=True):
    """Of the gradient for a batch."""
    model = nn.ReversibleSequential(
        blocks_of(kind, depth), memory_efficient=memory_efficient
    )

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model, xs):
        return (jax.vmap(model)(xs) ** 2).sum()

    compiled = gradient.lower(model, np.ones((128, 2 * WIDTH), np.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@each_kind
def test_memory_of_the_gradient_does_not_grow_with_the_depth(kind) -> None:
    sizes = [temporary_bytes(kind, depth) for depth in (4, 8)]
    assert max(sizes) <= 1.05 * min(sizes)


@each_kind
def test_that_of_plain_autodiff_does(kind) -> None:
    few, more = (temporary_bytes(kind, depth, False) for depth in (2, 8))
    assert more > 2 * few


def test_program_of_stacked_blocks_does_not_grow_with_the_depth() -> None:
    def equations(depth):
        model = nn.ReversibleSequential(stacked_of(depth))
        return str(jax.make_jaxpr(jax.grad(lambda x: model(x).sum()))(X)).count("\n")

    assert equations(2) == equations(20)


def test_forward_mode_and_second_derivatives_need_plain_autodiff() -> None:
    blocks = blocks_of("stacked", 2)
    model = nn.ReversibleSequential(blocks, memory_efficient=False)
    _, tangent = jax.jvp(model, (X,), (X,))
    both = blocks_of("list", 2)
    _, expected = jax.jit(lambda x: jax.jvp(lambda x: plain(both, x), (x,), (x,)))(X)
    assert_close(tangent, expected)
    hessians = (jax.jit(jax.hessian(f))(X) for f in (model, lambda x: plain(both, x)))
    assert_close(*hessians)
    with pytest.raises(TypeError, match=r"forward-mode.*`memory_efficient=False`"):
        jax.jvp(nn.ReversibleSequential(blocks), (X,), (X,))


@each_kind
@pytest.mark.parametrize("where", ["blocks", "first", "weight"])
def test_what_is_frozen_is_not_trained(kind, where) -> None:
    select = {
        "blocks": lambda m: m.blocks,
        "first": lambda m: m.blocks[0] if kind == "list" else m.blocks.layers,
        "weight": lambda m: (
            m.blocks[0] if kind == "list" else m.blocks.layers
        ).g.layers[0].weight,
    }[where]  # fmt: skip
    model = nn.ReversibleSequential(blocks_of(kind, 2))
    frozen = eqx.tree_at(select, model, replace_fn=eqx.frozen)

    def loss(arguments):
        model, x = arguments
        return (model(x) ** 2).sum()

    grads, grad_x = eqx.filter_jit(eqx.filter_grad(loss))((frozen, X))
    all_grads, all_x = eqx.filter_jit(eqx.filter_grad(loss))((model, X))
    assert_close(grad_x, all_x)
    # Only what is trained has a gradient, and it is what it was.
    flags = jax.tree.leaves(eqx.trainable(frozen))
    leaves = jax.tree.leaves(model)
    expected = iter(jax.tree.leaves(all_grads))
    wanted = [next(expected) if eqx.is_inexact_array(leaf) else None for leaf in leaves]
    wanted = [g for g, flag in zip(wanted, flags, strict=True) if flag]
    assert_close(jax.tree.leaves(grads), wanted)
    assert len(wanted) < len(jax.tree.leaves(all_grads))
    assert_close(eqx.filter_jit(lambda m, x: m.inverse(m(x)))(frozen, X), X)


@each_kind
def test_no_blocks_are_the_identity(kind) -> None:
    model = nn.ReversibleSequential(blocks_of(kind, 0))
    assert model(X) is X and model.inverse(X) is X


def test_blocks_without_arrays_may_be_stacked() -> None:
    block = nn.ReversibleBlock(jnp.sin, jnp.cos)
    stacked = nn.Stacked(lambda key: block, 3, key=jax.random.key(0))
    stacked = nn.ReversibleSequential(stacked)
    assert_close(stacked(X), nn.ReversibleSequential([block] * 3)(X))
    assert_close(stacked.inverse(stacked(X)), X)


class Scale(eqx.Module):
    scale: jax.Array

    def __call__(self, x, *, key=None):
        return jax.tree.map(lambda a: a * self.scale, x)

    def inverse(self, y, *, key=None):
        return jax.tree.map(lambda a: a / self.scale, y)


def test_any_module_with_an_inverse_is_a_block(key) -> None:
    model = nn.ReversibleSequential(
        [
            Scale(jnp.array(2.0)),
            nn.ReversibleSequential([make(key), Scale(jnp.ones(()))]),
        ]
    )
    assert_close(model(X), make(key)(2 * X))
    assert_close(model.inverse(model(X)), X)
    grads = eqx.filter_grad(lambda model: model(X).sum())(model)
    assert_close(grads.blocks[0].scale, jax.grad(lambda s: make(key)(s * X).sum())(2.0))
    assert nn.ReversibleSequential([Scale(jnp.array(2.0))])({"a": X})["a"][0] == -2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
def test_dtype_is_kept_under_strict_promotion(dtype, strict, x64) -> None:
    def build(key):
        kf, kg = jax.random.split(key)
        return nn.ReversibleBlock(
            nn.Linear(2, 2, dtype=dtype, key=kf), nn.Linear(2, 2, dtype=dtype, key=kg)
        )

    key = jax.random.key(0)
    model = eqx.filter_jit(
        lambda: nn.ReversibleSequential(nn.Stacked(build, 3, key=key))
    )()
    x = jax.device_put(np.arange(4).astype(dtype))
    assert jax.eval_shape(model, x).dtype == dtype
    grad = jax.jit(jax.grad(lambda x: jnp.abs(model(x)).sum()))(x)
    assert grad.dtype == dtype
    tolerance = float(jnp.finfo(dtype).eps) * 50
    assert_close(jax.jit(lambda x: model.inverse(model(x)))(x), x, tolerance)


def test_inference_mode_sees_through_it(key) -> None:
    model = nn.ReversibleSequential(blocks_of("stacked", 2, 0.5))
    assert_close(nn.inference_mode(model)(X), plain(blocks_of("list", 2), X))
    with pytest.raises(RuntimeError, match="key"):
        model(X)


# Misuse


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.ones(5), r"splits `x` in halves along axis 0, .* given shape \(5,\)"),
        (jnp.ones(()), r"given shape \(\)"),
        (2.0, r"given shape \(\)"),
    ],
)
def test_what_has_no_halves_is_refused(x, message, key) -> None:
    with pytest.raises(eqx.ShapeError, match=message):
        make(key)(x)
    with pytest.raises(eqx.ShapeError, match=r"At `blocks\[1\]`: .* axis 7.*\(8,\)"):
        nn.ReversibleSequential([make(key), make(key, split_axis=7)])(X)
    with pytest.raises(eqx.ShapeError, match="splits `y`"):
        make(key).inverse(x)
    with pytest.raises(
        TypeError, match="a tuple of two as `x`; got a tuple of length 3"
    ):
        make(key)((X, X, X))


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: x[:1], r"shape \(4,\) and dtype float32\. It returned shape \(1,\)"),
        (lambda x: x > 0, r"It returned shape \(4,\) and dtype bool"),
    ],
)
def test_residuals_must_keep_shape_and_dtype(f, text, key) -> None:
    good = make(key)
    for name, block in {
        "f": nn.ReversibleBlock(f, good.g),
        "g": nn.ReversibleBlock(good.f, f),
    }.items():
        message = rf"`{name}` of ReversibleBlock must return .*{text}"
        with pytest.raises(eqx.ShapeError, match=message):
            block(X)
        with pytest.raises(eqx.ShapeError, match=rf"^At `blocks\[1\]`: {message}"):
            nn.ReversibleSequential([good, block])(X)
        stacked = nn.Stacked.from_layers([block, block])
        with pytest.raises(eqx.ShapeError, match=rf"^At `blocks.layers`: {message}"):
            nn.ReversibleSequential(stacked)(X)


def test_error_of_a_layer_inside_names_its_place(key) -> None:
    block = nn.ReversibleBlock(nn.Linear(3, 3, key=key), jnp.tanh)
    with pytest.raises(eqx.ShapeError, match=r"^At `blocks\[0\]\.f`: Linear takes"):
        nn.ReversibleSequential([block])(X)


@pytest.mark.parametrize("memory_efficient", [True, False])
def test_blocks_must_keep_the_form_of_what_they_are_given(memory_efficient) -> None:
    class Half(Scale):
        def __call__(self, x, *, key=None):
            return x[: len(x) // 2]

    model = nn.ReversibleSequential(
        [Half(jnp.ones(()))], memory_efficient=memory_efficient
    )
    message = r"`blocks\[0\]` .* given shape \(8,\) .* returned shape \(4,\)"
    with pytest.raises(eqx.ShapeError, match=message):
        model(X)


def test_stateful_layers_are_refused(key) -> None:
    norm = nn.BatchNorm(WIDTH, mode="ema")
    for layer in (norm, nn.Sequential([norm]), eqx.frozen(norm)):
        with pytest.raises(
            TypeError, match="`g` of ReversibleBlock is stateful: it is a "
        ):
            nn.ReversibleBlock(jnp.tanh, layer)
    with pytest.raises(
        TypeError, match=r"`blocks\[1\]` of .* is stateful: it is a BatchNorm"
    ):
        nn.ReversibleSequential([make(key), norm])
    stacked = nn.Stacked(lambda key: nn.BatchNorm(WIDTH, mode="ema"), 2, key=key)
    with pytest.raises(
        TypeError, match=r"`blocks.layers` .* is stateful: it is a BatchNorm"
    ):
        nn.ReversibleSequential(stacked)


def test_block_without_an_inverse_is_refused(key) -> None:
    with pytest.raises(
        TypeError, match=r"`blocks\[1\]` .* no method `inverse.* a Linear"
    ):
        nn.ReversibleSequential([make(key), nn.Linear(2, 2, key=key)])
