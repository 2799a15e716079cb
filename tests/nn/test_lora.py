"""Low-rank updates: what they compute, what is trained, and the way back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

KEY = jax.random.key(0)


class Own(eqx.Module):
    """A layer of the user's, which needs a true array and has another method."""

    weight: jax.Array

    def __call__(self, x):
        return jax.lax.dot(self.weight, x)

    def first_row(self):
        return self.weight[0]


LAYERS: dict[str, Any] = {
    "Linear": (lambda: nn.Linear(5, 4, key=KEY), (5,)),
    "scalar Linear": (lambda: nn.Linear("scalar", 4, key=KEY), ()),
    "Embedding": (lambda: nn.Embedding(7, 4, key=KEY), None),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, key=KEY), (4, 5, 5)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, key=KEY), (4, 5)),
    "frozen Linear": (lambda: eqx.frozen(nn.Linear(5, 4, key=KEY)), (5,)),
    "Own": (lambda: Own(jax.random.normal(KEY, (4, 5))), (5,)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name, draw):
    build, shape = LAYERS[name]
    return drawn(build), 3 if shape is None else draw(*shape)


def moved(model, scale=0.3):
    """The model with updates that are not zero."""

    def each(node):
        if not isinstance(node, nn.LoRA):
            return node
        rng = np.random.default_rng(0)

        def normal(b):
            values = scale * rng.normal(size=b.shape)
            if np.iscomplexobj(b):
                values = values + 1j * scale * rng.normal(size=b.shape)
            return jax.device_put(values.astype(b.dtype))

        return eqx.tree_at(lambda lora: lora.b, node, jax.tree.map(normal, node.b))

    return jax.tree.map(each, model, is_leaf=lambda x: isinstance(x, nn.LoRA))


def same(a, b):
    return eqx.tree_equal(*jax.device_get((a, b)))


@every_layer
def test_update_is_that_of_the_formula_and_is_zero_at_first(name, draw):
    layer, x = make(name, draw)
    lora = nn.LoRA(layer, rank=2, alpha=6.0, key=KEY)
    np.testing.assert_array_equal(lora(x), layer(x))
    lora = moved(lora)
    update = (np.asarray(lora.b) @ np.asarray(lora.a)).reshape(layer.weight.shape)
    weight = np.asarray(layer.weight) + np.float32(3) * update
    expected = eqx.tree_at(lambda m: m.weight, layer, jax.device_put(weight))(x)
    np.testing.assert_allclose(lora(x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lora.weight, weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lora.merge()(x), expected, rtol=1e-4, atol=1e-5)


@every_layer
def test_only_the_two_matrices_are_trained(name, draw):
    layer, x = make(name, draw)
    lora = nn.LoRA(layer, rank=2, key=KEY)
    rows, columns = len(layer.weight), layer.weight.size // len(layer.weight)
    params = jax.tree.leaves(eqx.filter(lora, eqx.trainable))
    assert [p.shape for p in params] == [(2, columns), (rows, 2)]
    grads = eqx.filter_jit(eqx.filter_grad(lambda lora: lora(x).sum()))(lora)
    assert [g.shape for g in jax.tree.leaves(grads)] == [(2, columns), (rows, 2)]
    assert jax.tree.leaves(eqx.filter(lora.merge(), eqx.trainable)) == []


def test_first_values_of_a_are_normal_with_the_variance_of_a_mean():
    layer = drawn(lambda: nn.Linear(400, 10, key=KEY))
    lora = nn.LoRA(layer, rank=50, key=KEY)
    assert lora.rank == 50 and lora.alpha == 50
    np.testing.assert_allclose(np.std(np.asarray(lora.a)), 1 / 20, rtol=0.05)
    half = nn.LoRA(nn.Linear(4, 3, dtype=jnp.bfloat16, key=KEY), rank=2, key=KEY)
    assert half.a.dtype == half.b.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_unmerging_gives_the_weight_back_to_one_spacing(dtype, scale):
    layer = nn.Linear(30, 20, dtype=dtype, key=KEY)
    lora = moved(nn.LoRA(layer, rank=4, key=KEY), scale)
    merged = lora.merge()
    again = merged.unmerge()
    assert merged.merge() is merged and again.unmerge() is again
    assert jax.tree.structure(again) == jax.tree.structure(lora)
    before, between, after = (
        np.asarray(m.layer.weight).astype(complex) for m in (lora, merged, again)
    )
    for part in (np.real, np.imag):
        size = np.abs(part(between)) + np.finfo("float32").tiny
        spacing = jnp.finfo(dtype).eps * 2.0 ** np.floor(np.log2(size))
        assert (np.abs(part(before) - part(after)) <= spacing).all()
    if scale < 1:
        assert (before == after).mean() > 0.9
    untouched = nn.LoRA(layer, rank=4, key=KEY).merge().unmerge()
    np.testing.assert_array_equal(untouched.layer.weight, layer.weight)


def test_methods_and_fields_are_those_of_the_updated_layer(draw):
    lora = moved(nn.LoRA(nn.Embedding(7, 4, key=KEY), rank=2, key=KEY))
    x = draw(4)
    np.testing.assert_allclose(lora.attend(x), lora.merge().layer.attend(x), rtol=1e-5)
    assert lora.num_embeddings == 7
    own = moved(nn.LoRA(Own(jnp.ones((3, 3))), rank=1, key=KEY))
    np.testing.assert_allclose(own.first_row(), own.weight[0])
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'missing'"):
        _ = own.missing


def test_gradient_is_found_without_one_of_the_weight():
    lora = nn.LoRA(nn.Linear(7, 5, key=KEY), rank=2, key=KEY)
    params, rest = eqx.partition(lora, eqx.trainable)
    loss = lambda p, xs: jnp.sum(jax.vmap(eqx.combine(p, rest))(xs))  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((3, 7)))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    avals: list[Any] = [product.outvars[0].aval for product in products]
    shapes = {aval.shape for aval in avals}
    assert shapes and shapes.isdisjoint({(7, 5), (5, 7)})


MODELS: dict[str, Any] = {
    "scan MLP": (lambda: nn.MLP(3, 2, 4, 3, scan=True, key=KEY), 3),
    "Stacked": (lambda: nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 3, key=KEY), 1),
    "mixed": (lambda: nn.mixed(nn.Linear(3, 3, key=KEY), "compute=f16,output=f32"), 1),
    "Sequential": (
        lambda: nn.Sequential([nn.Linear(3, 4, key=KEY), jnp.tanh, nn.LayerNorm(4)]),
        1,
    ),
    "RNN": (lambda: nn.RNN(nn.LSTMCell(3, 4, key=KEY)), 2),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(2, 4, key=KEY), 4),
}


def call(model):
    x = jax.device_put(np.random.default_rng(0).normal(size=(5, 3)))
    match model:
        case nn.RNN():
            return model(x)[0]
        case nn.MultiheadAttention():
            return model(x.T[:, :4], x.T[:, :4], x.T[:, :4])
    return model(x[0])


compiled = eqx.filter_jit(call)


@pytest.mark.parametrize("name", MODELS)
def test_whole_model_is_wrapped_frozen_and_merged(name):
    build, number = MODELS[name]
    model = drawn(build)
    tuned = nn.add_lora(model, "**", rank=2, key=KEY)
    np.testing.assert_allclose(compiled(tuned), compiled(model), rtol=1e-6)
    params = eqx.filter(tuned, eqx.trainable)
    assert len(jax.tree.leaves(params)) == 2 * number
    grads = eqx.filter_eval_shape(eqx.filter_grad(lambda m: call(m).sum()), tuned)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert same(nn.merge_lora(tuned), model)

    tuned = moved(tuned)
    merged = nn.merge_lora(tuned)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert not same(merged, model)
    tolerance = 2e-2 if name == "mixed" else 1e-4
    np.testing.assert_allclose(
        compiled(tuned), compiled(merged), rtol=tolerance, atol=tolerance
    )


def test_training_moves_the_matrices_alone(draw):
    mlp = drawn(lambda: nn.MLP(3, 1, 8, 1, key=KEY))
    model = nn.add_lora(mlp, nn.Linear, rank=2, key=KEY)
    xs = draw(16, 3)

    @eqx.filter_jit
    def step(model):
        def loss(model):
            return jnp.mean((jax.vmap(model)(xs)[:, 0] - xs[:, 0]) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    losses, first = [], model
    for _ in range(5):
        value, model = step(model)
        losses.append(value)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    fixed = lambda m: eqx.filter(m, eqx.trainable, inverse=True)  # noqa: E731
    assert same(fixed(model), fixed(first))


def test_selectors_choose_layers_and_each_path_has_its_own_draw():
    model = nn.MLP(4, 4, 4, 2, key=KEY)
    for where in (
        "layers[1]",
        lambda m: m.layers[1],
        ["layers[1]", "layers[1].weight"],
    ):
        tuned = nn.add_lora(model, where, rank=2, key=KEY)
        kinds = [type(layer) for layer in tuned.layers]
        assert kinds == [nn.Linear, nn.LoRA, nn.Linear]
    every = nn.add_lora(model, "**", rank=2, key=KEY)
    assert (every.layers[1].a == tuned.layers[1].a).all()
    assert (every.layers[1].a != every.layers[2].a).all()
    head = eqx.tree_at("layers[2]", tuned, replace_fn=eqx.unfrozen)
    assert len(jax.tree.leaves(eqx.filter(head, eqx.trainable))) == 4


def test_state_goes_through_a_stateful_layer():
    class Counting(nn.StatefulLayer):
        weight: jax.Array

        def __call__(self, x, state, *, key=None):
            return self.weight @ x, state + 1

    model = nn.Sequential([nn.LoRA(Counting(jnp.ones((3, 3))), 1, key=KEY), jnp.tanh])
    _, state = model(jnp.ones(3), jnp.array(0), key=KEY)
    assert state == 1


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: nn.mixed(x, "output=f32")])
@pytest.mark.parametrize("norm", ["WeightNorm", "SpectralNorm"])
def test_norm_of_a_weight_is_that_of_the_updated_weight(norm, wrap, draw) -> None:
    linear = wrap(drawn(lambda: nn.Linear(4, 3, key=KEY)))
    plain = nn.WeightNorm(linear)
    if norm == "SpectralNorm":
        make = functools.partial(nn.SpectralNorm, linear, "weight", inference=True)
        plain, state = nn.make_with_state(make)(key=KEY)

    @eqx.filter_jit
    def apply(model, x):
        return model(x) if norm == "WeightNorm" else model(x, state)[0]

    x = draw(4)
    model = nn.add_lora(plain, nn.Linear, 2, key=KEY)
    np.testing.assert_allclose(apply(model, x), apply(plain, x), rtol=1e-5)
    model = moved(model)
    merged = nn.merge_lora(model)
    weights = np.asarray(merged.layer.weight), np.asarray(linear.weight)
    assert np.abs(weights[0] - weights[1]).max() > 1e-3
    np.testing.assert_allclose(apply(model, x), apply(merged, x), rtol=1e-5)
    gradient = eqx.filter_grad(lambda model: (apply(model, x) ** 2).sum())
    grads = jax.tree.leaves(eqx.filter_jit(gradient)(model))
    assert len(grads) == 2 and all(np.any(g) for g in grads)


@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")])
@pytest.mark.parametrize("name", ["Linear", "Embedding"])
def test_weight_may_be_split_over_a_mesh(name, spec, draw):
    layer = drawn(
        lambda: (
            nn.Linear(4, 8, key=KEY)
            if name == "Linear"
            else nn.Embedding(8, 4, key=KEY)
        )
    )
    xs = np.asarray(draw(4, 4)) if name == "Linear" else np.array([0, 3, 5, 7])
    lora = moved(nn.LoRA(layer, rank=2, key=KEY))
    loss = lambda lora, xs: jnp.sum(jax.vmap(lora)(xs) ** 2)  # noqa: E731
    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    wanted = gradient(lora, xs).b
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        weight = np.asarray(layer.weight)
        weight = jax.device_put(weight, NamedSharding(mesh, spec))
        lora = eqx.tree_at(lambda m: m.layer.weight, lora, weight)
        xs = jax.device_put(xs, NamedSharding(mesh, P("data")))
        grad = gradient(lora, xs).b
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)
        back = lora.merge().unmerge().layer.weight
        assert jax.typeof(back).sharding.spec == spec


def test_layers_without_a_weight_are_an_error_that_says_what_to_do(without_type_checks):
    attention = drawn(lambda: nn.MultiheadAttention(2, 4, key=KEY))
    with pytest.raises(ValueError, match=r"this MultiheadAttention has none.*add_lora"):
        nn.LoRA(attention, 2, key=KEY)
    with pytest.raises(
        ValueError, match=r"`weight` of this LayerNorm has shape \(3,\)"
    ):
        nn.LoRA(nn.LayerNorm(3), 2, key=KEY)
    with pytest.raises(ValueError, match=r"int >= 1 as `rank`; got 0"):
        nn.LoRA(nn.Linear(3, 2, key=KEY), 0, key=KEY)
    with pytest.raises(ValueError, match=r"int >= 1 as `rank`; got 1.5"):
        nn.LoRA(nn.Linear(3, 2, key=KEY), 1.5, key=KEY)
    with pytest.raises(ValueError, match=r"LoRA takes a number as `alpha`; got 'a'"):
        nn.LoRA(nn.Linear(3, 2, key=KEY), 1, "a", key=KEY)
    with pytest.raises(
        ValueError, match=r"no weight with at least two axes under 'layer'"
    ):
        nn.add_lora(nn.MLP(3, 2, 4, 1, key=KEY), "layer", 2, key=KEY)


class Int8(eqx.Module):
    numbers: jax.Array
    scale: jax.Array

    def __jax_array__(self):
        return self.numbers * self.scale


def test_quantised_weight_is_refused_by_add_lora_but_not_by_lora():
    weight = Int8(jnp.arange(6, dtype=jnp.int8).reshape(2, 3), jnp.array([[0.5], [2]]))
    linear = eqx.tree_at("weight", nn.Linear(3, 2, key=KEY), weight)
    model = nn.Sequential([linear])
    with pytest.raises(ValueError, match=r"wrap a layer with another weight by `LoRA`"):
        nn.add_lora(model, nn.Linear, 1, key=KEY)
    wrapped = eqx.select(model).of(nn.Linear).apply(lambda x: nn.LoRA(x, 1, key=KEY))
    x = jnp.array([1.0, 2, 3])
    np.testing.assert_allclose(wrapped(x), model(x), rtol=1e-6)
    grads = eqx.filter_grad(lambda model: model(x).sum())(wrapped)
    assert (
        grads.layers[0].b.shape == (2, 1) and grads.layers[0].layer.weight.scale is None
    )


def test_lora_of_a_lora_is_refused():
    linear = nn.Linear(3, 2, key=KEY)
    lora = nn.LoRA(linear, 1, key=KEY)
    with pytest.raises(
        TypeError, match=r"LoRA takes a layer without a LoRA as `layer`"
    ):
        nn.LoRA(lora, 1, key=KEY)
    with pytest.raises(ValueError, match="wrap `layer`: it is in a LoRA already"):
        nn.add_lora(lora, "**", 1, key=KEY)
    model = nn.add_lora(nn.MLP(3, 2, 4, 1, key=KEY), "layers[0]", 1, key=KEY)
    with pytest.raises(ValueError, match=r"wrap `layers\[0\]\.layer`: it is in a LoRA"):
        nn.add_lora(model, nn.Linear, 1, key=KEY)
    both = nn.add_lora(model, "layers[1]", 1, key=KEY)
    assert both(jnp.ones(3)).shape == (2,)


def test_model_is_rebuilt_once_whatever_its_number_of_layers():
    @jax.tree_util.register_pytree_node_class
    class Layers(list):
        rebuilt = 0

        def tree_flatten(self):
            return tuple(self), None

        @classmethod
        def tree_unflatten(cls, _, children):
            cls.rebuilt += 1
            return cls(children)

    def rebuilt(number):
        Layers.rebuilt = 0
        model = Layers(nn.Linear(2, 2, key=KEY) for _ in range(number))
        nn.add_lora(model, nn.Linear, 1, key=KEY)
        return Layers.rebuilt

    assert rebuilt(6) == rebuilt(2)


def test_layer_within_a_layer_that_has_a_weight_is_wrapped_too():
    class Both(eqx.Module):
        weight: jax.Array
        inner: nn.Linear

    tuned = nn.add_lora(
        Both(jnp.ones((2, 2)), nn.Linear(2, 2, key=KEY)), "**", 1, key=KEY
    )
    assert isinstance(tuned, nn.LoRA) and isinstance(tuned.layer.inner, nn.LoRA)


def test_lora_of_a_frozen_layer_is_compiled_and_trained() -> None:
    lora = moved(nn.LoRA(eqx.frozen(nn.Linear(5, 4, key=KEY)), rank=2, key=KEY))
    x = jnp.ones(5)
    np.testing.assert_allclose(
        eqx.filter_jit(lambda lora: lora(x))(lora), lora(x), rtol=1e-5
    )
    grads = eqx.filter_jit(eqx.filter_grad(lambda lora: lora(x).sum()))(lora)
    assert grads.layer.value.weight is None and grads.a.shape == (2, 5)


@pytest.mark.parametrize(
    "freeze",
    [
        eqx.frozen,
        lambda lora: eqx.tree_at(
            lambda lora: (lora.a, lora.b), lora, replace_fn=eqx.frozen
        ),
        lambda lora: lora.merge(),
    ],
    ids=["whole", "matrices", "merged"],
)
def test_lora_that_was_frozen_stays_frozen(freeze) -> None:
    model = nn.add_lora(nn.MLP(4, 2, 8, 1, key=KEY), "layers[0]", 2, key=KEY)
    model = eqx.tree_at("layers[0]", model, replace_fn=freeze)
    more = nn.add_lora(model, "layers[1]", 2, key=KEY)
    params = eqx.filter(more, eqx.trainable)
    assert not jax.tree.leaves(params.layers[0])
    assert len(jax.tree.leaves(params.layers[1])) == 2
    assert (more(jnp.ones(4)) == model(jnp.ones(4))).all()


# Adapters with names


def adapted(name=None):
    """A model, and it with two adapters of ranks 2 and 3, the last of which is used."""
    build = MODELS[name][0] if name else lambda: nn.MLP(3, 2, 4, 1, key=KEY)
    model = tuned = drawn(build)
    for i, each in enumerate(["french", "law"]):
        key = jax.random.key(i)
        tuned = nn.add_lora(tuned, "**", 2 + i, alpha=3.0, name=each, key=key)
        tuned = moved(tuned, 0.1 * (i + 1))
    return model, tuned


def updates(model):
    """The sum of each layer's update and nothing else, by path."""
    return {
        path: np.asarray(lora.weight) - np.asarray(lora.layer.weight)
        for path, lora in eqx.select(model).of(nn.LoRA)
        if isinstance(lora.weight_name, str)
    }


@pytest.mark.parametrize("name", MODELS)
def test_chosen_adapter_is_the_one_that_was_added(name) -> None:
    model, law = adapted(name)
    before = nn.add_lora(
        model, "**", 2, alpha=3.0, name="french", key=jax.random.key(0)
    )
    french = nn.choose_lora(law, "french")
    assert same(call(french), call(moved(before, 0.1)))
    assert same(nn.choose_lora(french, "law"), law)
    assert not same(call(law), call(french))
    assert same(nn.merge_lora(nn.choose_lora(law, {})), model)
    count = lambda model: len(jax.tree.leaves(eqx.filter(model, eqx.trainable)))  # noqa: E731
    assert count(french) == count(law) == count(before)


@pytest.mark.parametrize("name", MODELS)
def test_mixture_is_the_sum_of_the_updates_times_factors(name) -> None:
    _, law = adapted(name)
    french = nn.choose_lora(law, "french")

    @eqx.filter_jit
    def mixed(law, factor):  # the factor is traced
        return nn.choose_lora(law, {"french": factor, "law": -2.0})

    mixture = mixed(law, jnp.asarray(0.25))
    found, one, other = map(updates, (mixture, french, law))
    assert found.keys() == one.keys()
    for path in found:
        expected = 0.25 * one[path] - 2 * other[path]
        np.testing.assert_allclose(found[path], expected, atol=2e-6)
    for _, lora in eqx.select(mixture).of(nn.LoRA):
        assert lora.rank == 5 and lora.name is None
    tolerance = 2e-2 if name == "mixed" else 1e-4
    np.testing.assert_allclose(
        compiled(mixture), compiled(nn.merge_lora(mixture)), rtol=0, atol=tolerance
    )
    assert same(nn.choose_lora(mixture, "law"), law)


def test_adapters_of_other_layers_are_neither_used_nor_trained() -> None:
    model = nn.MLP(3, 2, 4, 2, key=KEY)
    french = moved(
        nn.add_lora(model, ["layers[0]", "layers[1]"], 2, name="french", key=KEY)
    )
    law = nn.add_lora(french, ["layers[1]", "layers[2]"], 2, name="law", key=KEY)
    assert [lora.name for lora in law.layers] == [None, "law", "law"]
    x = jnp.ones(3)
    np.testing.assert_array_equal(law(x), model(x))
    sizes = [p.size for p in jax.tree.leaves(eqx.filter(law, eqx.trainable))]
    assert sizes[:2] == [0, 0] and all(sizes[2:])
    np.testing.assert_array_equal(nn.choose_lora(law, "french")(x), french(x))
    grads = eqx.filter_grad(lambda model: model(x).sum())(law)
    assert jax.tree.leaves(grads.layers[1].others) == []


def test_training_one_adapter_leaves_the_others() -> None:
    _, law = adapted()

    @eqx.filter_jit(donate="all")
    def step(model):
        grads = eqx.filter_grad(lambda model: model(jnp.ones(3)).sum())(model)
        return eqx.apply_updates(model, grads)

    trained = step(eqx.tree_copy(law))
    for path, lora in eqx.select(trained).of(nn.LoRA):
        ((_, before),) = eqx.select(law).of(nn.LoRA).at(path)
        assert same(lora.others, before.others) and not same(lora.b, before.b)


def test_choosing_unmerges(draw) -> None:
    linear = nn.Linear(5, 4, key=KEY)
    french = moved(nn.LoRA(linear, 2, name="french", key=KEY))
    law = moved(nn.add_lora(french, "**", 2, name="law", key=KEY))
    again = nn.choose_lora(law.merge(), "french")
    assert not again.is_merged and again.name == "french"
    np.testing.assert_allclose(again.weight, french.weight, atol=1e-6)
    assert same(nn.choose_lora(law.merge(), "law"), law.merge())


def test_wrong_names_are_errors() -> None:
    _, law = adapted()
    message = (
        r"names of updates in the model, \['french', 'law'\].*got 'frnch'.*'french'"
    )
    with pytest.raises(ValueError, match=message):
        nn.choose_lora(law, {"law": 1.0, "frnch": 1.0})
    message = r"wrap `layers\[0\]\.layer`: .* with the name 'french'.*another `name`"
    with pytest.raises(ValueError, match=message):
        nn.add_lora(law, "**", 2, name="french", key=KEY)


# Dropout


@pytest.mark.parametrize("name", ["Linear", "Embedding", "Conv2d", "Own"])
def test_dropout_acts_on_the_update_alone(name, draw) -> None:
    layer, x = make(name, draw)
    lora = moved(nn.LoRA(layer, rank=2, key=KEY))
    dropped = nn.drop_lora(lora, 0.25, key=jax.random.key(3))
    assert same(dropped.layer, lora.layer) and same(dropped.b, lora.b)
    kept = np.asarray(dropped.a)[0] != 0
    expected = np.where(kept, np.asarray(lora.a) / np.float32(0.75), 0)
    np.testing.assert_allclose(dropped.a, expected, rtol=1e-6)
    assert not kept.all() or kept.size < 8
    if name == "Linear":  # the same as a dropout of the input of the update
        x_dropped = np.where(kept, np.asarray(x) / 0.75, 0)
        expected = layer(x) + lora.b @ (lora.a @ x_dropped)
        np.testing.assert_allclose(dropped(x), expected, atol=1e-5)
    keys = jax.random.split(KEY, 4000)
    a = eqx.filter_vmap(lambda key: nn.drop_lora(lora, 0.25, key=key).a)(keys)
    np.testing.assert_allclose(a.mean(0), lora.a, atol=0.06)


def test_dropout_differs_by_layer_and_by_example() -> None:
    model = nn.Stacked(lambda key: nn.Linear(64, 64, key=key), 2, key=KEY)
    model = moved(nn.add_lora([model, nn.Linear(64, 64, key=KEY)], "**", 2, key=KEY))
    dropped = nn.drop_lora(model, 0.5, key=KEY)
    masks = [*(dropped[0].layers.a[:, 0] != 0), dropped[1].a[0] != 0]
    assert len({tuple(np.asarray(mask).tolist()) for mask in masks}) == 3

    def loss(model, x, key):
        return nn.drop_lora(model, 0.5, key=key)[1](x).sum()

    keys, x = jax.random.split(KEY, 3), jnp.ones((3, 64))
    losses = eqx.filter_vmap(loss, in_axes=(None, 0, 0))(model, x, keys)
    assert len(set(losses.tolist())) == 3
    grads = eqx.filter_grad(lambda m: loss(m, x[0], KEY))(model)
    dropped = nn.drop_lora(model, 0.5, key=KEY)[1].a == 0
    assert ((grads[1].a == 0) == dropped).all()


def test_dropout_of_wrong_arguments_is_an_error(without_type_checks) -> None:
    _, law = adapted()
    with pytest.raises(ValueError, match=r"takes a `p` between 0 and 1; got 1\.5"):
        nn.drop_lora(law, 1.5, key=KEY)
    with pytest.raises(TypeError, match="`drop_lora`"):
        nn.drop_lora(law, 0.5, key=None)


# Files


@pytest.mark.parametrize("name", MODELS)
def test_adapter_is_saved_and_loaded_alone(name, tmp_path) -> None:
    model, law = adapted(name)
    nn.save_lora(tmp_path / "law", law)
    matrices = jax.tree.leaves(eqx.filter(law, eqx.trainable))
    size = (tmp_path / "law.safetensors").stat().st_size
    assert size < sum(p.nbytes for p in matrices) + 4000
    loaded = nn.load_lora(tmp_path / "law", model, "law")
    for path, lora in eqx.select(loaded).of(nn.LoRA):
        ((_, saved),) = eqx.select(law).of(nn.LoRA).at(path)
        assert lora.alpha == 3 and lora.weight_name == saved.weight_name
    assert same(call(loaded), call(law))
    french = nn.choose_lora(law, "french")
    both = nn.load_lora(tmp_path / "law", french, "again")
    assert same(call(both), call(law))
    assert same(call(nn.choose_lora(both, "french")), call(french))


def test_mixture_and_part_of_a_model_are_saved(tmp_path) -> None:
    model = nn.MLP(3, 2, 4, 2, key=KEY)
    french = moved(
        nn.add_lora(model, ["layers[0]", "layers[1]"], 2, name="french", key=KEY)
    )
    law = moved(nn.add_lora(french, ["layers[1]", "layers[2]"], 1, name="law", key=KEY))
    mixture = nn.choose_lora(law, {"french": 0.5, "law": 0.5})
    for tuned in (law, mixture):
        nn.save_lora(tmp_path / "adapter", tuned)
        loaded = nn.load_lora(tmp_path / "adapter", model)
        np.testing.assert_array_equal(loaded(jnp.ones(3)), tuned(jnp.ones(3)))


def test_wrong_files_of_adapters_are_errors(tmp_path) -> None:
    model, law = adapted()
    with pytest.raises(ValueError, match="`save_lora` takes a model that uses updates"):
        nn.save_lora(tmp_path / "law", model)
    nn.save_lora(tmp_path / "law", law)
    with pytest.raises(ValueError, match=r"wrap `layers\[0\]\.layer`: .* name 'law'"):
        nn.load_lora(tmp_path / "law", law, "law")
    shallow = nn.MLP(3, 2, 4, 0, key=KEY)
    with pytest.raises(
        ValueError, match=r"updates of \['layers\[1\]'\], which the model"
    ):
        nn.load_lora(tmp_path / "law", shallow)
    wide = nn.MLP(3, 2, 9, 1, key=KEY)
    with pytest.raises(eqx.LeafError, match=r"layers\[0\].*'b'.* but float32\[9,3\]"):
        nn.load_lora(tmp_path / "law", wide)
    eqx.save(tmp_path / "model", model)
    with pytest.raises(ValueError, match="has no updates"):
        nn.load_lora(tmp_path / "model", model)
