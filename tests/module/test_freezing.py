import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equinox_like as eqx
from equinox_like import nn


class Buffered(eqx.Module):
    weight: jax.Array
    buffer: jax.Array = eqx.field(trainable=False)
    inner: dict
    name: str = eqx.field(static=True, default="name")


@pytest.fixture
def mlp(key):
    return nn.MLP(3, 2, 4, 2, jnp.tanh, key=key)


def freeze(mlp, *indices):
    return eqx.tree_at(
        lambda m: [m.layers[i] for i in indices], mlp, replace_fn=eqx.frozen
    )


def shapes(tree):
    return [x.shape for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


# What is trainable


def test_trainable_are_inexact_arrays_outside_of_buffers_and_frozen_parts() -> None:
    one = jnp.ones(1)
    model = Buffered(one, one, {"a": eqx.frozen([one, {"b": one}]), "c": one, "d": 3})
    flags = eqx.trainable([model, jnp.arange(2), one, jnp.tanh, 1.0])
    assert isinstance(flags[0], Buffered)
    assert flags[0].weight is True and flags[0].buffer is False
    assert flags[0].inner["a"].value == [False, {"b": False}]
    assert flags[0].inner["c"] is True and flags[0].inner["d"] is False
    assert flags[1:] == [False, True, False, False]


def test_structs_are_arrays_where_there_are_no_arrays() -> None:
    def make(key):
        layer = eqx.nn.Linear(2, 3, key=key)
        layer = eqx.tree_at("bias", layer, replace_fn=eqx.frozen)
        return layer, eqx.nn.BatchNorm(3, "batch", mode="ema"), jnp.arange(2)

    template = eqx.filter_eval_shape(make, jax.random.key(0))
    params = eqx.filter(template, eqx.trainable)
    # The weight, and those of the norm: no frozen array, no state, no integers.
    assert [x.shape for x in jax.tree.leaves(params)] == [(3, 2), (3,), (3,)]
    # An optimiser's state is made from shapes alone.
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    assert len(jax.tree.leaves(state)) == 1 + 2 * 3
    # Beside arrays, a struct is a static value.
    struct = jax.ShapeDtypeStruct((2,), "float32")
    assert eqx.trainable([struct, jnp.ones(2)]) == [False, True]
    assert eqx.trainable([struct, jnp.arange(2)]) == [False, False]


def test_buffer_holds_a_plain_array_that_is_data_for_jax() -> None:
    model = Buffered(jnp.ones(1), jnp.ones(2), {})
    assert isinstance(model.buffer, jax.Array)
    assert len(jax.tree.leaves(model)) == 2
    assert eqx.filter_jit(lambda m: m.buffer * 2)(model).tolist() == [2, 2]


def test_it_is_handed_the_whole_tree_wherever_a_specification_is_taken(mlp) -> None:
    model = freeze(mlp, 0)
    kept, rest = eqx.partition(model, eqx.trainable)
    assert shapes(kept) == [(4, 4), (4,), (2, 4), (2,)]
    assert shapes(rest) == [(4, 3), (4,)]
    assert eqx.tree_equal(eqx.combine(kept, rest), model)
    kept = eqx.filter([model, model], [eqx.trainable, False])
    assert shapes(kept[0]) == [(4, 4), (4,), (2, 4), (2,)] and shapes(kept[1]) == []
    is_linear = lambda x: isinstance(x, nn.Linear)  # noqa: E731
    kept = eqx.filter(model, eqx.trainable, is_leaf=is_linear)
    assert kept.layers[0].value is None and kept.layers[1] is model.layers[1]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("layers[0]", [(4, 4), (4,), (2, 4), (2,)]),
        ("layers[*].bias", [(4, 3), (4, 4), (2, 4)]),
        ("**.bias", [(4, 3), (4, 4), (2, 4)]),
        (lambda m: m.layers[1], [(4, 3), (4,), (2, 4), (2,)]),
        (lambda m: (m.layers[0].weight, m.layers[2]), [(4,), (4, 4), (4,)]),
        (nn.Linear, []),
        (["layers[0]", "layers[1]"], [(2, 4), (2,)]),
        ("layers[9].*", [(4, 3), (4,), (4, 4), (4,), (2, 4), (2,)]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_exclude_leaves_out_more(exclude, left, mlp) -> None:
    assert shapes(eqx.filter(mlp, eqx.trainable(mlp, exclude=exclude))) == left


def test_wrong_exclude_is_an_error(mlp) -> None:
    with pytest.raises(
        TypeError, match="by a function that returns nodes, a class, or a pattern"
    ):
        eqx.trainable(mlp, exclude=3)
    for pattern in ("bias", "layers[9]", "layer"):
        message = (
            rf"pattern {re.escape(repr(pattern))}, .* nothing.*`layers\[0\].weight`"
        )
        with pytest.raises(ValueError, match=message):
            eqx.trainable(mlp, exclude=["**.weight", pattern])


def test_path_of_a_bias_that_is_missing_may_be_excluded() -> None:
    layer = nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))
    assert eqx.trainable([layer], exclude="[0].bias")[0].weight is True


# Gradients and updates


def loss(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize("transform", [lambda f: f, eqx.filter_jit])
def test_gradient_is_none_where_frozen_and_elsewhere_unchanged(
    transform, mlp, key
) -> None:
    x = jax.random.normal(key, (5, 3))
    grads = transform(eqx.filter_grad(loss))(freeze(mlp, 1), x)
    full = eqx.filter_grad(loss)(mlp, x)
    assert grads.layers[1].value.weight is None
    np.testing.assert_allclose(grads.layers[0].weight, full.layers[0].weight, rtol=1e-5)
    value, grads = eqx.filter_value_and_grad(loss)(freeze(mlp, 1), x)
    np.testing.assert_allclose(value, loss(mlp, x), rtol=1e-6)
    assert grads.layers[1].value.bias is None


def test_no_gradient_flows_through_a_frozen_part_even_in_plain_jax(mlp) -> None:
    linear = eqx.frozen(mlp.layers[0])
    grad = jax.grad(lambda m: m(jnp.ones(3)).sum())(linear)
    assert not grad.value.weight.any()
    grad = jax.grad(lambda w: (w @ jnp.ones(3)).sum())(eqx.frozen(jnp.ones((2, 3))))
    assert not grad.value.any()


def test_hessian_differentiates_what_is_trainable(mlp) -> None:
    params = {"a": jnp.ones(2), "b": eqx.frozen(jnp.ones(3))}
    hessian = eqx.filter_hessian(lambda p: jnp.sum(p["a"] ** 3) * jnp.sum(p["b"]))(
        params
    )
    assert hessian["a"]["a"].shape == (2, 2) and jax.tree.leaves(hessian["b"]) == []


def test_if_all_is_frozen_the_gradient_is_an_error(mlp) -> None:
    with pytest.raises(TypeError, match=r"nothing to differentiate: all its .*frozen"):
        eqx.filter_grad(loss)(eqx.frozen(mlp), jnp.ones((1, 3)))


def test_wrt_chooses_among_what_is_trainable(mlp) -> None:
    model = freeze(mlp, 1)
    spec = eqx.trainable(model, exclude="layers[0]")
    grads = eqx.filter_grad(loss, wrt=spec)(model, jnp.ones((1, 3)))
    assert shapes(grads) == [(2, 4), (2,)]
    grads = eqx.filter_grad(loss, wrt=eqx.trainable)(model, jnp.ones((1, 3)))
    assert shapes(grads) == [(4, 3), (4,), (2, 4), (2,)]


def test_weight_decay_does_not_move_what_is_frozen(mlp) -> None:
    model = freeze(mlp, 1)
    optimiser = optax.adamw(0.1, weight_decay=0.5)
    params = eqx.filter(model, eqx.trainable)
    state = optimiser.init(params)
    moments = jax.tree.leaves(state[0].mu)
    assert [m.shape for m in moments] == [(4, 3), (4,), (2, 4), (2,)]
    grads = eqx.filter_grad(loss)(model, jnp.ones((1, 3)))
    updates, state = optimiser.update(grads, state, params)
    new = eqx.apply_updates(model, updates)
    assert new.layers[1].value.weight is model.layers[1].value.weight
    assert (new.layers[0].weight != model.layers[0].weight).any()


# The frozen part


def test_frozen_is_the_same_data_in_the_same_order(mlp) -> None:
    model = freeze(mlp, 0)
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(mlp), strict=True)
    assert all(a is b for a, b in pairs)
    assert eqx.frozen(model.layers[0]) is model.layers[0]
    assert eqx.tree_equal(eqx.unfrozen(model), mlp)
    nested = eqx.frozen([eqx.frozen(jnp.ones(1)), 3])
    assert type(eqx.unfrozen(nested)[0]) is not type(nested)


def test_frozen_module_is_called_and_read(mlp) -> None:
    linear, x = mlp.layers[0], jnp.ones(3)
    frozen = eqx.frozen(linear)
    assert (frozen(x) == linear(x)).all()
    assert frozen.weight is linear.weight and frozen.in_features == 3
    assert eqx.filter_jit(lambda m: m)(frozen).weight.shape == (4, 3)
    assert (jax.vmap(frozen)(x[None]) == frozen(x)).all()
    assert not isinstance(frozen, nn.Linear) and frozen.value is linear
    with pytest.raises(AttributeError, match="nothing_of_it"):
        frozen.nothing_of_it  # noqa: B018
    assert eqx.frozen(nn.GRUCell(3, 2, key=jax.random.key(0))).init_state().shape == (
        2,
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_frozen_array_is_calculated_with(wrap) -> None:
    a = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    b = jnp.array([[2.0, 0.5], [1.0, 3.0]])

    @wrap
    def calculate(f):
        return [
            f + b, b + f, f - b, b - f, f * 2, 2 * f, f / b, b / f, f**2, 2**f,
            f @ b, b @ f, -f, abs(f), f < b, b > f, f // b, b % f, f + f,
            f == b, b == f, f != b, b != f, f == f, f <= 2, 2 >= f,
            f[0], f.T, f.sum(), f.astype(jnp.int32), jnp.asarray(f) @ b, np.ones(2) @ f,
        ]  # fmt: skip

    for mine, plain in zip(calculate(eqx.frozen(a)), calculate(a), strict=True):
        assert (mine == plain).all() and mine.dtype == plain.dtype
    f = eqx.frozen(a)
    assert (f.shape, f.dtype, f.ndim, len(f)) == ((2, 2), a.dtype, 2, 2)
    assert (np.asarray(f) == a).all() and float(eqx.frozen(jnp.float32(2))) == 2
    assert [row.tolist() for row in f] == a.tolist() and int(eqx.frozen(3)) == 3
    assert ["a", "b"][eqx.frozen(jnp.asarray(1))] == "b" and eqx.frozen(2.0) == 2
    assert divmod(eqx.frozen(7), 4) == (1, 3) and divmod(7, eqx.frozen(4)) == (1, 3)
    assert round(eqx.frozen(2.6)) == 3 and round(eqx.frozen(2.64), 1) == 2.6
    assert complex(eqx.frozen(jnp.float32(2))) == 2
    assert 2.0 in eqx.frozen(a[0]) and 3.0 not in eqx.frozen(a[0])
    assert [row.tolist() for row in reversed(f)] == a.tolist()[::-1]


def test_frozen_number_is_shown_as_one(capfd) -> None:
    scale = eqx.frozen(jnp.asarray(2.5))
    assert f"{scale:.2f} {scale}" == "2.50 2.5"

    @eqx.filter_jit
    def show(model):
        jax.debug.print("{:.2f} {}", model["scale"], model["scale"])

    show({"scale": scale})
    jax.effects_barrier()
    assert capfd.readouterr().out == "2.50 2.5\n"
    layer = eqx.frozen(nn.Identity())
    assert f"{layer}" == str(layer)


def test_frozen_container_has_what_its_class_defines() -> None:
    class Words(eqx.Module):
        words: tuple = eqx.field(static=True)

        def __contains__(self, word):
            return word in self.words

        def __iter__(self):
            return iter(range(2))

        def __reversed__(self):
            return iter("reversed")

    words = eqx.frozen(Words(("a", "b")))
    assert "a" in words and 0 not in words and "words" in dir(words)
    assert list(words) == [0, 1] and "".join(reversed(words)) == "reversed"


def test_frozen_arrays_are_compared_by_element_and_frozen_modules_as_a_whole() -> None:
    ids = eqx.frozen(np.array([1, 2, 1]))
    assert (ids == 1).tolist() == (np.ones(3) == ids).tolist() == [True, False, True]
    assert (ids != ids).tolist() == [False] * 3 and eqx.tree_equal(ids, ids)
    layers = [nn.Linear(2, 2, key=jax.random.key(i)) for i in (0, 0, 1)]
    first, same, other = map(eqx.frozen, layers)
    assert first == same and first != other and first != layers[0]
    assert hash(eqx.frozen("a")) == hash(eqx.frozen("a"))
    # A frozen number equals the number.
    for value in (1, 1.0, np.float32(1)):
        assert eqx.frozen(value) == 1 and hash(eqx.frozen(value)) == hash(1)


def test_numpy_copies_what_is_frozen() -> None:
    value = np.ones(3)
    copy = np.array(eqx.frozen(value))
    copy[0] = 5
    assert value.tolist() == [1, 1, 1]
    assert np.asarray(eqx.frozen(value)) is value


LAYERS = {
    "Linear": (lambda k: nn.Linear(3, 2, key=k), (3,)),
    "MLP": (lambda k: nn.MLP(3, 2, 4, 2, key=k), (3,)),
    "scan MLP": (lambda k: nn.MLP(3, 2, 4, 3, scan=True, key=k), (3,)),
    "Conv": (lambda k: nn.Conv1d(2, 3, 2, padding="SAME", key=k), (2, 5)),
    "ConvTranspose": (lambda k: nn.ConvTranspose1d(2, 3, 2, key=k), (2, 5)),
    "LayerNorm": (lambda k: nn.LayerNorm(3), (3,)),
    "RMSNorm": (lambda k: nn.RMSNorm(3), (3,)),
    "GroupNorm": (lambda k: nn.GroupNorm(2, 4), (4, 3)),
    "PReLU": (lambda k: nn.PReLU(), (3,)),
    "WeightNorm": (lambda k: nn.WeightNorm(nn.Linear(3, 2, key=k)), (3,)),
    "MultiheadAttention": (
        lambda k: nn.MultiheadAttention(2, 4, use_output_bias=True, key=k),
        (3, 4),
    ),
    "GRUCell": (lambda k: nn.GRUCell(3, 2, key=k), (3,)),
    "LSTMCell": (lambda k: nn.LSTMCell(3, 2, key=k), (3,)),
    "Embedding": (lambda k: nn.Embedding(4, 3, key=k), ()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_takes_frozen_parameters(name, key) -> None:
    make, shape = LAYERS[name]
    layer = make(key)
    x = jnp.linspace(-1, 2, int(np.prod(shape))).reshape(shape)

    def call(layer):
        match layer:
            case nn.Embedding():
                return layer(1)
            case nn.MultiheadAttention():
                return layer(x, x, x)
            case nn.GRUCell():
                return layer(x, jnp.ones(2))
            case nn.LSTMCell():
                return layer(x, (jnp.ones(2), jnp.ones(2)))[0]
        return layer(x)

    frozen = jax.tree.map(
        lambda leaf: eqx.frozen(leaf) if eqx.is_inexact_array(leaf) else leaf, layer
    )
    expected = eqx.filter_jit(call)(layer)
    np.testing.assert_allclose(eqx.filter_jit(call)(frozen), expected, rtol=1e-6)


def test_frozen_stateful_layer_stands_in_a_sequential(key) -> None:
    def make():
        norm = eqx.frozen(nn.BatchNorm(3))
        return nn.Sequential([eqx.frozen(nn.Lambda(jnp.tanh)), norm])

    model, state = nn.make_with_state(make)()
    assert model.is_stateful()
    x = jax.random.normal(key, (4, 3))
    out, state = model(x, state, key=key)
    assert jnp.allclose(out.mean(axis=0), 0, atol=1e-5)
    assert eqx.frozen(nn.Sequential([]))(3, key=key) == 3


# The other tools


def test_files_are_the_same(mlp, tmp_path) -> None:
    model = freeze(mlp, 0, 2)
    zeros = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, mlp)
    frozen_zeros = freeze(zeros, 0, 2)
    eqx.tree_serialise_leaves(tmp_path / "plain", mlp)
    eqx.tree_serialise_leaves(tmp_path / "frozen", model)
    for name in ("plain", "frozen"):
        loaded = eqx.tree_deserialise_leaves(tmp_path / name, frozen_zeros)
        assert eqx.tree_equal(loaded, model)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / name, zeros), mlp)
    eqx.save(tmp_path / "plain.safetensors", mlp)
    eqx.save(tmp_path / "frozen.safetensors", model)
    for name in ("plain", "frozen"):
        file = tmp_path / f"{name}.safetensors"
        assert eqx.tree_equal(eqx.load(file, frozen_zeros), model)
        assert eqx.tree_equal(eqx.load(file, zeros), mlp)
    assert list(eqx.state_dict(model)) == list(eqx.state_dict(mlp))


def test_surgery_reaches_through(mlp) -> None:
    model = freeze(mlp, 0)
    new = jnp.zeros((4, 3))
    for where in (
        "layers[0].weight",
        lambda m: m.layers[0].value.weight,
        lambda m: m.layers[0].weight,
    ):
        changed = eqx.tree_at(where, model, new)
        assert changed.layers[0].value.weight is new
    assert eqx.tree_equal(eqx.tree_at("layers[0]", model, replace_fn=eqx.unfrozen), mlp)


def test_inference_mode_reaches_through() -> None:
    model = eqx.tree_inference([eqx.frozen(nn.Dropout())])
    assert model[0].value.inference is True


def test_it_prints_its_content_and_names_its_place(mlp) -> None:
    assert repr(eqx.frozen(jnp.ones(2))) == "Frozen(value=f32[2])"
    path, _ = jax.tree.leaves_with_path(freeze(mlp, 0))[0]
    assert jax.tree_util.keystr(path) == ".layers[0].weight"


def test_keys_are_of_classes_that_other_libraries_know(mlp) -> None:
    jtu = jax.tree_util
    known = (jtu.SequenceKey, jtu.DictKey, jtu.GetAttrKey, jtu.FlattenedIndexKey)
    paths = [path for path, _ in jtu.tree_leaves_with_path(freeze(mlp, 0))]
    assert all(isinstance(key, known) for path in paths for key in path)


def test_jit_and_vmap_treat_frozen_leaves_as_ordinary(mlp, key) -> None:
    traces = []

    @eqx.filter_jit
    def call(model, x):
        traces.append(None)
        return model(x)

    for scale in (1, 2):
        model = freeze(jax.tree.map(functools.partial(scaled, scale), mlp), 0)
        call(model, jnp.ones(3))
    assert len(traces) == 1
    many = eqx.filter_vmap(lambda k: eqx.frozen(nn.Linear(3, 2, key=k)))(
        jax.random.split(key, 4)
    )
    assert many.value.weight.shape == (4, 2, 3)


@pytest.mark.parametrize(
    "where",
    [
        lambda m: m.layers[0].weight,
        lambda m: m.layers[1],
        lambda m: (m.layers[0].bias, m.layers[1].weight),
    ],
    ids=["leaf", "node", "several"],
)
def test_parts_of_what_is_frozen_are_replaced_under_a_trace(mlp, where) -> None:
    @eqx.filter_jit
    def doubled(model):
        twice = lambda node: jax.tree.map(functools.partial(scaled, 2), node)  # noqa: E731
        return eqx.tree_at(where, model, replace_fn=twice)

    def total(model):
        return sum(jnp.sum(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))

    new = doubled(eqx.frozen(mlp))
    assert isinstance(new, type(eqx.frozen(mlp)))
    changed = total(new) - total(mlp)
    assert jnp.allclose(changed, total(where(mlp)), atol=1e-5)
    # The new part stops gradients, too.
    out = lambda w: doubled(eqx.frozen(jax.tree.map(functools.partial(scaled, w), mlp)))  # noqa: E731
    assert jax.grad(lambda w: out(w)(jnp.ones(3)).sum())(1.0) == 0


def scaled(scale, leaf):
    return leaf * scale if eqx.is_array(leaf) else leaf


def test_init_of_a_state_index_is_no_parameter() -> None:
    norm = nn.BatchNorm(3)
    assert shapes(eqx.filter(norm, eqx.trainable)) == [(3,), (3,)]
    grads = eqx.filter_grad(lambda n: jnp.sum(n.weight**2))(norm)
    assert grads.batch_state_index.init == (None, None)
