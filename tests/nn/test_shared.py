import pickle

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import nn


@pytest.fixture
def pair(key):
    return nn.Embedding(5, 3, key=key), nn.Linear(3, 5, use_bias=False, key=key)


def tie(pair):
    return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def test_node_is_at_both_places_and_once_in_the_tree(pair) -> None:
    shared = tie(pair)
    embedding, linear = shared()
    assert linear.weight is embedding.weight is pair[0].weight
    arrays = jax.tree.leaves(eqx.filter(shared, eqx.is_array))
    assert len(arrays) == 1 and "SharedNode" in repr(shared)


def test_gradients_of_both_uses_add_up(pair) -> None:
    @jax.jit
    def grad(pair):
        def loss(shared):
            embedding, linear = shared()
            return jnp.sum(linear(embedding(1)))

        return eqx.filter_grad(loss)(tie(pair)).pytree[0].weight

    weight = pair[0].weight
    expected = jnp.tile(weight[1], (5, 1)).at[1].add(weight.sum(axis=0))
    assert jnp.allclose(grad(pair), expected, atol=1e-6)


def test_get_may_compute(key) -> None:
    pair = nn.Linear(3, 5, use_bias=False, key=key), nn.Linear(5, 3, key=key)
    shared = nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight.T)
    assert (shared()[1].weight == pair[0].weight.T).all()


def test_several_nodes_and_subtrees(key) -> None:
    layers = [nn.Linear(3, 3, key=k) for k in jax.random.split(key, 4)]
    shared = nn.Shared(
        layers, lambda ls: (ls[1], ls[2].bias), lambda ls: (ls[0], ls[3].bias)
    )
    tied = shared()
    assert tied[1].weight is layers[0].weight and tied[2].bias is layers[3].bias
    assert len(jax.tree.leaves(eqx.filter(shared, eqx.is_array))) == 5


def test_paths_choose_as_functions_do(pair) -> None:
    by_path = nn.Shared(pair, "[1].weight", "[0].weight")
    assert eqx.tree_equal(by_path.pytree, tie(pair).pytree)
    assert by_path()[1].weight is pair[0].weight
    layers = [nn.Linear(3, 3, key=jax.random.key(i)) for i in range(4)]
    several = nn.Shared(layers, ["[1].weight", "[2]"], ["[0].weight", "[3]"])
    first, second, third, last = several()
    assert second.weight is first.weight and second.bias is layers[1].bias
    assert third.weight is last.weight and third.bias is last.bias


def test_path_reads_a_weight_that_a_lora_computes(pair) -> None:
    model = nn.Shared(pair, "[1].weight", "[0].weight")
    tuned = nn.add_lora(model, nn.Embedding, 2, key=jax.random.key(0))
    b = jnp.ones_like(tuned.pytree[0].b)
    tuned = eqx.tree_at("pytree[0].b", tuned, b)
    weight = nn.merge_lora(tuned).pytree[0].weight
    assert (tuned()[1].weight == weight).all() and (weight != pair[0].weight).any()


def test_path_may_be_given_for_several_nodes(key) -> None:
    layers = [nn.Linear(3, 3, key=k) for k in jax.random.split(key, 3)]
    model = nn.Shared(layers, ["[1].weight", "[2].weight"], ["[0].weight"] * 2)
    assert all(layer.weight is layers[0].weight for layer in model())


def test_what_paths_share_is_pickled_and_exported(pair) -> None:
    shared = nn.Shared(pair, "[1].weight", "[0].weight")
    restored = pickle.loads(pickle.dumps(shared))
    assert jax.tree.structure(restored) == jax.tree.structure(shared)

    def step(shared):
        embedding, linear = shared()
        return linear(embedding(1))

    data = eqx.filter_export(step)(shared).serialize()
    out = eqx.deserialize_export(data)(restored)
    assert jnp.allclose(out, step(shared))


def test_a_path_that_is_not_there_is_named(pair) -> None:
    with pytest.raises(ValueError, match=r"^`where` .*pytree\[1\].* no `\.bais`"):
        nn.Shared(pair, "[1].bais", "[0].weight")
    with pytest.raises(ValueError, match=r"^`get` .*pytree\[0\].* no `\.wieght`"):
        nn.Shared(pair, "[1].weight", "[0].wieght")


def test_different_nodes_are_refused(pair, key) -> None:
    message = "^Every node being shared together must have the same structure"
    shapes = r".* `where` returned f32\[(\d,\d)\], but `get` returned f32\[(\d,\d)\]\.$"
    with pytest.raises(ValueError, match=message + shapes):
        nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight.T)
    with pytest.raises(ValueError, match=message):
        nn.Shared(pair, lambda p: p[1], lambda p: p[0].weight)
    with pytest.raises(ValueError, match=message):
        nn.Shared(
            pair, lambda p: p[1].weight, lambda p: p[0].weight.astype(jnp.float16)
        )
    with pytest.raises(ValueError, match="`where` returned 2, and `get` 1"):
        nn.Shared(pair, lambda p: (p[0].weight, p[1].weight), lambda p: [p[0].weight])


def test_two_of_a_kind_share_one_trace(pair) -> None:
    traces = []
    where, get = (lambda p: p[1].weight), (lambda p: p[0].weight)

    @eqx.filter_jit
    def call(shared, i):
        traces.append(None)
        return shared()[0](i)

    for _ in range(2):
        call(nn.Shared(pair, where, get), jnp.array(1))
    assert len(traces) == 1
