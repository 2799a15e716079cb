import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@pytest.fixture
def model(key):
    return nn.Sequential(
        [nn.Linear(3, 4, key=key), nn.Conv1d(2, 4, 3, key=key), nn.LayerNorm(3)]
    )


def changed(before, after):
    """The paths of the arrays that are other objects than before."""
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return [jax.tree_util.keystr(path)[1:] for (path, a), b in pairs if a is not b]


@pytest.mark.parametrize(
    ("selector", "paths"),
    [
        (nn.Linear, ["layers[0].weight"]),
        ((nn.Linear, nn.Conv), ["layers[0].weight", "layers[1].weight"]),
        ((nn.Conv, "bias"), ["layers[1].bias"]),
        ("layers[*].bias", ["layers[0].bias", "layers[1].bias", "layers[2].bias"]),
        ("**.weight", ["layers[0].weight", "layers[1].weight", "layers[2].weight"]),
        (
            lambda path, layer, name, array: (
                isinstance(layer, nn.LayerNorm) and name == "bias" and array.ndim == 1
            ),
            ["layers[2].bias"],
        ),
    ],
    ids=["class", "classes", "field", "pattern", "deep pattern", "function"],
)
def test_selector_chooses_parameters(selector, paths, model, key) -> None:
    new = nn.reinit(model, [(selector, "normal")], key=key)
    assert changed(model, new) == paths


def test_first_rule_wins_and_each_must_choose_something(model, key) -> None:
    rules = [("layers[0].weight", 1.0), (nn.Linear, 2.0), ((nn.Linear, "bias"), 3)]
    new = nn.reinit(model, rules, key=key)
    assert (new[0].weight == 1).all() and (new[0].bias == 3).all()
    rules = [(nn.Embedding, "normal")]
    with pytest.raises(ValueError, match=r"Embedding.*chooses no parameter"):
        nn.reinit(model, rules, key=key)
    new = nn.reinit(model, rules, key=key, allow_unused=True)
    assert changed(model, new) == []
    with pytest.raises(ValueError, match=r"The rule for \(\) chooses no parameter"):
        nn.reinit(model, [((), "normal")], key=key)
    with pytest.raises(TypeError, match="A selector must be a class"):
        nn.reinit(model, [(3, "normal")], key=key)


def test_draws_depend_on_the_path_alone(model, key) -> None:
    rules = [("**.weight", "normal")]
    one = nn.reinit(model, rules, key=key)
    shorter = nn.reinit(model[:1], rules, key=key)
    assert (one[0].weight == shorter[0].weight).all()
    assert not np.allclose(one[1].weight[..., 0], 0)
    two = nn.reinit(nn.Sequential([model[0], model[0]]), rules, key=key)
    assert not np.allclose(two[0].weight, two[1].weight)


def test_initialiser_sees_the_layout_of_jax(model, key) -> None:
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.zeros(shape, dtype)

    cell = nn.GRUCell(3, 5, key=key)
    nn.reinit([model[0], model[1], cell], [("**.weight*", init)], key=key)
    assert shapes == [(3, 4), (3, 2, 4), *[(3, 5)] * 3, *[(5, 5)] * 3]


def test_stacked_layers_and_ensembles_are_drawn_one_by_one(key) -> None:
    stacked = nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 4, key=key)
    many = eqx.filter_vmap(lambda k: nn.Linear(3, 3, key=k))(jax.random.split(key, 4))
    for model in (stacked, many):
        new = nn.reinit(model, [(nn.Linear, "orthogonal")], key=key)
        weights = new.layers.weight if model is stacked else new.weight
        for weight in weights:
            np.testing.assert_allclose(weight @ weight.T, np.eye(3), atol=1e-5)
        assert not np.allclose(weights[0], weights[1])
        zeros = nn.reinit(model, [(nn.Linear, "zeros"), ("**.bias", 1.0)], key=key)
        assert all(x.shape == y.shape for x, y in zip(
            jax.tree.leaves(zeros), jax.tree.leaves(model), strict=True
        ))  # fmt: skip


def test_stack_of_no_layers_has_nothing_to_draw(key) -> None:
    # With a depth of 1, a scanned MLP has no layers in its middle.
    mlp = nn.MLP(3, 2, 4, 1, scan=True, key=key)
    new = nn.reinit(mlp, [(nn.Linear, "he_normal")], key=key)
    assert new.layers[1].weight.shape == (0, 4, 4)
    assert not np.allclose(new.layers[0].weight, mlp.layers[0].weight)


def test_structs_become_arrays_and_frozen_stays_frozen(key) -> None:
    structs = eqx.filter_eval_shape(nn.Linear, 3, 2, key=key)
    new = nn.reinit(structs, [("**", "normal")], key=key)
    assert isinstance(new.weight, jax.Array) and new.weight.shape == (2, 3)
    frozen = eqx.frozen(nn.Linear(3, 2, use_bias=False, key=key))
    new = jax.jit(lambda m: nn.reinit(m, [(nn.Linear, "ones")], key=key))(frozen)
    assert (new.value.weight == 1).all()


def test_parameters_of_numpy_become_arrays_of_jax(key) -> None:
    model = nn.Embedding(weight=np.ones((3, 2)))
    new = nn.reinit(model, [(nn.Embedding, "normal")], key=key)
    assert isinstance(new.weight, jax.Array) and new.weight.dtype == jnp.float32


def test_dtype_is_kept_and_a_wrong_shape_names_the_path(model, key) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.float16), model)
    new = nn.reinit(half, [(nn.Linear, "normal")], key=key)
    assert new[0].weight.dtype == jnp.float16
    with pytest.raises(ValueError, match=r"`layers\[0\]\.weight` returned .*\(2,\)"):
        nn.reinit(model, [(nn.Linear, jnp.ones(2))], key=key)


@pytest.mark.parametrize("rules", ["**.weight", ("**.weight", "zeros"), [(1, 2, 3)]])
def test_rules_are_pairs(rules, model, key, without_type_checks) -> None:
    with pytest.raises(TypeError, match=r"pairs .*; `rules\[0\]` is .*"):
        nn.reinit(model, rules, key=key)
