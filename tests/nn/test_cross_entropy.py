import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax.test_util import check_grads

import equinox_like as eqx
from equinox_like import nn

loss = nn.linear_cross_entropy
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01}


def reference(x, weight, labels, bias=0.0, where=True, label_smoothing=0.0, z_loss=0.0):
    """The formula in NumPy, in float64."""
    x, weight, bias = (np.asarray(a, np.float64) for a in (x, weight, bias))
    logits = x @ weight.T + bias
    largest = logits.max(-1)
    lse = largest + np.log(np.exp(logits - largest[..., None]).sum(-1))
    right = np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
    target = (1 - label_smoothing) * right + label_smoothing * logits.mean(-1)
    return np.where(where, lse - target + z_loss * lse**2, 0)


def by_logits(
    x, weight, labels, bias=None, where=None, label_smoothing=0.0, z_loss=0.0
):
    """The same in plain JAX, with all logits."""
    logits = x @ weight.T if bias is None else x @ weight.T + bias
    lse = jax.nn.logsumexp(logits, -1)
    right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    target = (1 - label_smoothing) * right
    if label_smoothing:
        target += label_smoothing * logits.mean(-1)
    losses = lse - target + z_loss * lse**2
    return losses if where is None else jnp.where(where, losses, 0)


def given(batch=(4, 3), words=22, size=5, seed=0):
    rng = np.random.default_rng(seed)
    x, weight, bias = (
        rng.normal(size=s) for s in ((*batch, size), (words, size), words)
    )
    labels, where = rng.integers(0, words, batch), rng.uniform(size=batch) > 0.3
    # Unlike `jnp.asarray`, `device_put` compiles nothing.
    floats = [jax.device_put(a.astype(np.float32)) for a in (x, weight, bias)]
    return *floats, jax.device_put(np.asarray(labels, np.int32)), jax.device_put(where)


def assert_close(actual, expected, tolerance=2e-5):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, actual, expected)


# Values


@pytest.mark.parametrize(
    ("batch", "words", "block"),
    [((), 22, 2048), ((0,), 22, 5), ((5,), 24, 6), ((2, 3), 23, 5), ((2, 1, 3), 7, 1)],
)
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_values_are_those_of_float64(batch, words, block, options) -> None:
    x, weight, bias, labels, where = given(batch, words)
    more = {"bias": bias, "where": where} if options else {}
    out = jax.jit(functools.partial(loss, block=block, **options))(
        x, weight, labels, **more
    )
    assert out.shape == batch and out.dtype == jnp.float32
    assert_close(out, reference(x, weight, labels, **more, **options))


def test_values_and_smoothing_are_those_of_optax() -> None:
    x, weight, _, labels, where = given()
    logits = x @ weight.T
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    ours = loss(x, weight, labels, where=where, block=8)
    assert_close(ours, cross_entropy(logits, labels, where=where))
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 22), 0.1)
    ours = loss(x, weight, labels, label_smoothing=0.1, block=8)
    assert_close(ours, optax.softmax_cross_entropy(logits, smooth))


def test_logits_of_any_size_have_a_loss() -> None:
    x, weight, _, labels, _ = given()
    for scale in (1e4, 1e-4):
        ours = loss(x * scale, weight, labels, block=8)
        np.testing.assert_allclose(
            ours, reference(x * scale, weight, labels), rtol=1e-5
        )


def test_strict_promotion_is_obeyed(strict) -> None:
    x, weight, bias, labels, where = given()

    def total(x, bias):
        options = {"bias": bias, "where": where, "block": 5, **OPTIONS}
        return loss(x, weight, labels, **options).sum()

    assert jax.grad(total)(x, bias).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_labels_have_any_integer_dtype(dtype) -> None:
    x, weight, _, _, _ = given((3,), 300)
    labels = np.array([120, 0, 77]).astype(dtype)
    assert_close(
        loss(x, weight, labels, block=50), reference(x, weight, labels.astype(int))
    )
    if dtype == jnp.int8:  # 300 words are 44 in it
        labels = jnp.array([-1, -128, 3], dtype)
        assert jnp.isinf(loss(x, weight, labels)).tolist() == [True, True, False]


def test_label_out_of_range_has_an_infinite_loss() -> None:
    x, weight, _, _, _ = given((4,))
    labels = jnp.array([-1, 22, 21, -100])
    for block in (5, 22):
        out = jax.jit(functools.partial(loss, block=block))(x, weight, labels)
        assert jnp.isposinf(out).tolist() == [True, True, False, True]


# What is left out


def test_what_where_leaves_out_has_no_effect() -> None:
    x, weight, bias, labels, where = given((6,))
    where = jnp.array([True, False, True, True, False, False])

    def mean(x, weight, bias, labels):
        options = {"bias": bias, "where": where, "block": 8, **OPTIONS}
        return loss(x, weight, labels, **options).sum() / where.sum()

    gradient = jax.value_and_grad(mean, (0, 1, 2))
    expected = gradient(x, weight, bias, labels)
    kept = loss(x[where], weight, labels[where], bias=bias, **OPTIONS).mean()
    assert_close(expected[0], kept)
    spoilt = jnp.where(where[:, None], x, jnp.nan).at[1].set(jnp.inf)
    actual = gradient(spoilt, weight, bias, jnp.where(where, labels, -100))
    assert_close(actual, expected)
    assert (actual[1][0][~where] == 0).all()


def test_bias_of_minus_infinity_excludes_words() -> None:
    x, weight, bias, _, _ = given((3,))
    allowed = slice(9, 20)  # so that no word of the first block is
    excluding = jnp.full(22, -jnp.inf).at[allowed].set(bias[allowed])
    labels = jnp.array([9, 12, 19])

    def total(x, weight, bias, labels):
        return loss(x, weight, labels, bias=bias, block=4).sum()

    gradient = jax.value_and_grad(total, (0, 1, 2))
    value, (dx, dw, db) = gradient(x, weight, excluding, labels)
    of_some = gradient(x, weight[allowed], bias[allowed], labels - 9)
    assert_close((value, (dx, dw[allowed], db[allowed])), of_some)
    assert (dw[:9] == 0).all() and (db[20:] == 0).all()


# Derivatives


def test_derivatives_of_all_orders_are_those_of_finite_differences(x64) -> None:
    x, weight, bias, labels, where = given((2, 2), 7, 3)
    floats = [jnp.asarray(a, jnp.float64) for a in (x, weight, bias)]

    def total(x, weight, bias):
        options = {"bias": bias, "where": where, "block": 3, **OPTIONS}
        out = loss(x, weight, labels, **options)
        assert out.dtype == jnp.float64
        return (out**2).sum()

    check_grads(total, floats, order=2, modes=("fwd", "rev"))


def transformed():
    def batch(f):
        return lambda x, w, b, y, m: jax.vmap(f, (0, None, None, 0, 0))(x, w, b, y, m)

    def weights(f):
        def both(x, w, b, y, m):
            return jax.vmap(lambda w: f(x, w, b, y, m))(jnp.stack([w, 2 * w]))

        return both

    def steps(f):
        def scanned(x, w, b, y, m):
            def step(c, xs):
                return c + f(xs[0], w, b, *xs[1:]).sum(), None

            return jax.lax.scan(step, 0.0, (x, y, m))[0]

        return scanned

    return {"batch": batch, "weights": weights, "scan": steps, "remat": jax.checkpoint}


@pytest.mark.parametrize("name", ["batch", "weights", "scan", "remat"])
def test_gradient_commutes_with_transformations(name) -> None:
    def ours(x, weight, bias, labels, where):
        return loss(x, weight, labels, bias=bias, where=where, block=8, **OPTIONS)

    def expected(x, weight, bias, labels, where):
        return by_logits(x, weight, labels, bias, where, **OPTIONS)

    def gradient(f):
        f = transformed()[name](f)
        return jax.jit(jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2)))

    assert_close(gradient(ours)(*given()), gradient(expected)(*given()), 1e-4)


def test_tied_embedding_of_a_model_is_trained() -> None:
    embedding = nn.Embedding(50, 8, key=jax.random.key(0))
    tokens = jnp.array([[3, 7, 1], [2, 2, 9]])

    @eqx.filter_jit
    @eqx.filter_grad
    def ours(embedding):
        x = jax.vmap(jax.vmap(embedding))(tokens[:, :-1])
        return loss(x, embedding.weight, tokens[:, 1:], block=16).mean()

    @eqx.filter_grad
    def expected(embedding):
        x = jax.vmap(jax.vmap(embedding))(tokens[:, :-1])
        return by_logits(x, embedding.weight, tokens[:, 1:]).mean()

    assert_close(ours(embedding).weight, expected(embedding).weight)
    frozen = loss(jnp.ones((1, 8)), eqx.frozen(embedding.weight), jnp.array([4]))
    assert_close(frozen, loss(jnp.ones((1, 8)), embedding.weight, jnp.array([4])))


# Precision


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_half_precision_are_in_float32(dtype) -> None:
    words = 1024
    x = jnp.zeros((600, 2), dtype).at[:, 0].set(1)
    weight = jnp.zeros((words, 2), dtype).at[1:, 1].set(1)

    def mean(x, weight, bias):  # blocks of one word
        labels = jnp.zeros(600, int)
        return loss(x, weight, labels, bias=bias, block=1).mean()

    gradient = jax.jit(jax.value_and_grad(mean, (0, 2)))
    value, (dx, db) = gradient(x, weight, jnp.zeros(words, dtype))
    assert value.dtype == jnp.float32 and dx.dtype == db.dtype == dtype
    # In bfloat16 a sum of ones stops at 256, and one of 1024 shares of 1/1024 at 1/4.
    np.testing.assert_allclose(value, np.log(words), rtol=1e-6)
    np.testing.assert_allclose(dx[:, 1] * 600, (words - 1) / words, rtol=2e-2)
    np.testing.assert_allclose(db[0], 1 / words - 1, rtol=1e-2)


def test_errors_of_bfloat16_are_those_of_its_rounding() -> None:
    x, weight, _, labels, _ = given((64,), 200, 16)
    halves = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)

    def mean(x, weight):
        return loss(x, weight, labels, block=50).mean()

    value, grads = jax.value_and_grad(mean, (0, 1))(*halves)
    exact = [a.astype(jnp.float32) for a in halves]
    expected, wanted = jax.value_and_grad(mean, (0, 1))(*exact)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == jnp.bfloat16
        assert jnp.abs(grad - want).max() < 2**-7 * jnp.abs(want).max()


def test_products_are_in_the_dtype_of_the_context() -> None:
    x, weight, _, labels, _ = given()
    with nn.precision("bfloat16"):
        ours = loss(x, weight, labels)
        text = str(jax.make_jaxpr(loss)(x, weight, labels))
    rounded = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    assert ours.dtype == jnp.float32 and "bf16" in text
    assert_close(ours, reference(*rounded, labels))


# Memory

STRUCTS = (
    jax.ShapeDtypeStruct((8, 256, 256), jnp.float32),
    jax.ShapeDtypeStruct((65_536, 256), jnp.float32),
    jax.ShapeDtypeStruct((8, 256), jnp.int32),
)


def temporary_megabytes(f, *structs):
    def mean(x, weight, labels):
        return f(x, weight, labels).mean()

    compiled = jax.jit(jax.value_and_grad(mean, (0, 1))).lower(*structs).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_memory_is_that_of_a_block_of_logits(options) -> None:
    """2048 tokens, 65,536 words: 16.8 MB for a block, 537 for all logits."""
    assert temporary_megabytes(functools.partial(loss, **options), *STRUCTS) < 22
    small = functools.partial(loss, block=512, **options)
    assert temporary_megabytes(small, *STRUCTS) < 10


def test_vmap_of_tokens_makes_no_gradient_of_the_weight_for_each() -> None:
    def mapped(x, weight, labels):
        return jax.vmap(lambda x, labels: loss(x, weight, labels))(x, labels)

    # The weight has 67 MB, and there are 8 sequences.
    assert temporary_megabytes(mapped, *STRUCTS) < 60


def test_vocabulary_without_a_divisor_costs_two_copies_of_the_weight() -> None:
    x, _, labels = STRUCTS
    prime, even = (
        jax.ShapeDtypeStruct((words, 256), jnp.float32) for words in (65_537, 50_257)
    )
    assert temporary_megabytes(loss, x, even, labels) < 22  # 29 blocks of 1733
    assert temporary_megabytes(loss, x, prime, labels) < 22 + 2 * 67.2


# Meshes

A, E = AxisType.Auto, AxisType.Explicit


def collectives(text):
    """The sizes of the arrays that devices exchange."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    lines = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = re.findall(r"\w\d+\[([\d,]*)\]", " ".join(lines))
    return [int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes]


@pytest.mark.parametrize(
    ("kinds", "split"),
    [
        ((A, A), P("y")),
        ((E, E), P("y")),
        ((E, A), P("y")),
        ((A, A), P()),
        ((E, E), P(("x", "y"))),
        ((E, E), P(None, "y")),
    ],
)
def test_tokens_and_vocabulary_may_be_split(kinds, split) -> None:
    x, weight, bias, labels, where = given((8, 4), 96, 16)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def gradient(x, weight, bias, labels, where):
        options = {"bias": bias, "where": where, "block": 10, **OPTIONS}
        return loss(x, weight, labels, **options).sum() / 8

    expected = gradient(x, weight, bias, labels, where)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    specs = P("x"), split, P(*split[:1]), P("x"), P("x")
    args = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, weight, bias, labels, where), specs, strict=True)
    ]
    program = gradient.lower(*args).compile()
    actual = program(*args)
    assert_close(actual, expected)
    if kinds == (E, E):
        for grad, arg in zip(actual[1], args[:3], strict=True):
            assert grad.sharding.is_equivalent_to(arg.sharding, arg.ndim)
    if split == P("y"):
        assert actual[1][1].sharding.shard_shape((96, 16)) == (48, 16)
        # Not more than `x` on a device: no part of the weight, and no logits.
        assert max(collectives(program.as_text())) <= 4 * 4 * 16
    with jax.set_mesh(mesh):
        assert_close(gradient(*args), expected)
        losses = loss(args[0], args[1], args[3], bias=args[2])
        if kinds[0] == E:
            assert jax.typeof(losses).sharding.spec == P("x", None)


def test_memory_on_a_mesh_is_that_of_a_part_of_a_block() -> None:
    for kinds in ((A, A), (E, E), (E, A)):
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
        structs = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
            for s, spec in zip(STRUCTS, (P("x"), P("y"), P("x")), strict=True)
        ]
        # The weight has 34 MB on a device, which automatic axes copy once.
        limit = 22 if kinds[0] == E else 22 + 34
        assert temporary_megabytes(loss, *structs) < limit


def test_vmap_maps_tokens_that_explicit_axes_split() -> None:
    x, weight, bias, labels, _ = given((4, 3))
    expected = jax.grad(lambda w: by_logits(x, w, labels, bias).sum())(weight)
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"))):
        x, labels = eqx.filter_shard((x, labels), P("x"))
        weight, bias = eqx.filter_shard((weight, bias), P("y"))

        @jax.jit
        @jax.grad
        def gradient(weight):
            def each(x, labels):
                return loss(x, weight, labels, bias=bias, block=8)

            return jax.vmap(each)(x, labels).sum()

        actual = gradient(weight)
    assert_close(actual, expected)
    assert actual.sharding.spec == P("y", None)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_splits_the_tokens(check_vma) -> None:
    x, weight, bias, labels, _ = given((4, 3))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(A,))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x"), P(), P(), P("x")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def total(x, weight, bias, labels):
        return jax.lax.psum(loss(x, weight, labels, bias=bias, block=8).sum(), "x")

    actual = jax.jit(jax.grad(total, (0, 1, 2)))(x, weight, bias, labels)

    def whole(x, weight, bias):
        return by_logits(x, weight, labels, bias).sum()

    assert_close(actual, jax.grad(whole, (0, 1, 2))(x, weight, bias))


# Errors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": np.ones((5, 22), np.float32)}, r"`weight` \(5, 22\)"),
        ({"weight": np.ones((1, 22, 5), np.float32)}, r"`weight` \(vocabulary, size\)"),
        ({"weight": np.ones((0, 5), np.float32)}, "not empty"),
        ({"x": np.ones((), np.float32)}, r"`x` \(\)"),
        ({"labels": np.ones(3, int)}, r"`labels` \(3,\)"),
        ({"bias": np.ones(5, np.float32)}, r"`bias` \(5,\)"),
        ({"where": np.ones((4, 1), bool)}, r"`where` \(4, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(wrong, message) -> None:
    x, weight, bias, labels, where = given()
    args = {"x": x, "weight": weight, "labels": labels, "bias": bias, "where": where}
    with pytest.raises(
        eqx.ShapeError, match=f"`linear_cross_entropy` takes .*{message}"
    ):
        loss(**args | wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"x": np.ones((4, 3, 5), int)}, TypeError, "of floating dtype as `x`; got i"),
        (
            {"weight": np.ones((22, 5), complex)},
            TypeError,
            "floating dtype as `weight`",
        ),
        ({"labels": np.ones((4, 3))}, TypeError, "of integer dtype as `labels`; got f"),
        ({"labels": np.ones((4, 3), bool)}, TypeError, "integer dtype as `labels`"),
        ({"where": np.ones((4, 3), int)}, TypeError, "of bool dtype as `where`; got i"),
        ({"block": 0}, ValueError, "an int >= 1 as `block`; got 0"),
        (
            {"label_smoothing": 10.0},
            ValueError,
            r"in \[0, 1\] as `label_smoothing`; got 10",
        ),
        ({"z_loss": -1.0}, ValueError, "a number >= 0 as `z_loss`; got -1.0"),
    ],
)
def test_wrong_arguments_are_named(wrong, error, message) -> None:
    x, weight, _, labels, _ = given()
    args = {"x": x, "weight": weight, "labels": labels}
    with pytest.raises(error, match=f"`linear_cross_entropy` takes .*{message}"):
        loss(**args | wrong)
