"""The messages about shapes, which all layers share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn

import equinox_like as eqx
from equinox_like import nn

KEY = jax.random.key(0)
LAYERS = [
    (drawn(lambda: nn.Linear(3, 2, key=KEY)), (3,), r"\(3,\)"),
    (drawn(lambda: nn.Linear("scalar", 2, key=KEY)), (), r"\(\)"),
    (drawn(lambda: nn.Linear(3, 3, key=KEY)), (3,), r"\(3,\)"),
    (drawn(lambda: nn.MLP(3, 2, 4, 1, key=KEY)), (3,), r"\(3,\)"),
    (drawn(lambda: nn.MLP(3, 2, 4, 2, scan=True, key=KEY)), (3,), r"\(3,\)"),
    (drawn(lambda: nn.Conv1d(2, 4, 3, key=KEY)), (2, 5), r"\(2, any\)"),
    (
        drawn(lambda: nn.Conv2d(4, 4, 3, groups=2, key=KEY)),
        (4, 5, 5),
        r"\(4, any, any\)",
    ),
    (nn.MaxPool1d(2), (2, 5), r"\(any, any\)"),
    (nn.AvgPool2d(2), (2, 5, 5), r"\(any, any, any\)"),
    (drawn(lambda: nn.ConvTranspose1d(2, 4, 3, key=KEY)), (2, 5), r"\(2, any\)"),
    (nn.AdaptiveMaxPool2d(2), (2, 5, 5), r"\(any, any, any\)"),
    (nn.RMSNorm((2, 3)), (2, 3), r"\(2, 3\)"),
    (nn.RMSNorm((2, 3), use_weight=False), (2, 3), r"\(2, 3\)"),
    (nn.RotaryPositionalEmbedding(4), (3, 4), r"\(any, 4\)"),
    (nn.LayerNorm((2, 3)), (2, 3), r"\(2, 3\)"),
    (nn.LayerNorm((2, 3), use_weight=False), (2, 3), r"\(2, 3\)"),
    (nn.LayerNorm((2, 3), use_weight=False, use_bias=False), (2, 3), r"\(2, 3\)"),
]


def name_of(value) -> str | None:
    return type(value).__name__ if isinstance(value, eqx.Module) else None


@pytest.mark.parametrize(("layer", "shape", "wanted"), LAYERS, ids=name_of)
def test_batch_is_refused_with_a_hint_at_vmap(layer, shape, wanted) -> None:
    jax.eval_shape(layer.__call__, np.ones(shape, np.float32))
    given = str((3, *shape)).replace("(", r"\(").replace(")", r"\)")
    hint = r"one extra leading axis.*`jax\.vmap\(model\)\(x\)`"
    with pytest.raises(eqx.ShapeError, match=rf"shape {wanted}.*{given}.*{hint}"):
        layer(np.ones((3, *shape), np.float32))
    hint = r"2 extra leading axes.*`jax\.vmap\(jax\.vmap\(model\)\)\(x\)`"
    with pytest.raises(eqx.ShapeError, match=hint):
        layer(np.ones((3, 3, *shape), np.float32))


@pytest.mark.parametrize(("layer", "shape", "wanted"), LAYERS[2:], ids=name_of)
def test_too_few_axes_are_refused_without_a_hint(layer, shape, wanted) -> None:
    with pytest.raises(eqx.ShapeError, match=rf"takes `x` of shape {wanted}") as info:
        layer(np.ones(shape[1:], np.float32))
    assert "vmap" not in str(info.value)


def test_number_for_a_vector_of_one_is_refused_with_the_fix() -> None:
    linear, x = nn.Linear(1, 2, key=KEY), jnp.ones(())
    with pytest.raises(eqx.ShapeError, match=r"size 1: `x\[None\]`\.$"):
        linear(x)
    assert linear(x[None]).shape == (2,)


@pytest.mark.parametrize(
    ("channels", "shape", "fix"),
    [(3, (8, 8, 3), "jnp.moveaxis(x, -1, 0)"), (1, (8, 8), "x[None]")],
)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_images_of_other_libraries_are_refused_with_the_fix(
    kind, channels, shape, fix
) -> None:
    conv, x = kind(channels, 4, 3, key=KEY), jnp.ones(shape)
    with pytest.raises(eqx.ShapeError, match=rf"`{re.escape(fix)}`\.$"):
        conv(x)
    conv(eval(fix))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (drawn(lambda: nn.Linear(3, 2, key=KEY)), (4,)),
        (drawn(lambda: nn.Linear(3, 2, use_bias=False, key=KEY)), (3, 4)),
        (nn.LayerNorm((2, 3)), (5, 3, 2)),
        (drawn(lambda: nn.Conv2d(3, 4, 3, key=KEY)), (1, 5, 5)),
        (nn.LayerNorm(3), (4,)),
    ],
    ids=name_of,
)
def test_wrong_size_names_the_class_and_both_shapes(layer, shape) -> None:
    given = str(shape).replace("(", r"\(").replace(")", r"\)")
    start = rf"^{type(layer).__name__} takes `x` of shape"
    with pytest.raises(
        eqx.ShapeError, match=rf"{start} .*, but was given shape {given}\.$"
    ):
        layer(np.ones(shape, np.float32))


@pytest.mark.parametrize("x", [None, "text", {"a": 1}, object()])
@pytest.mark.parametrize(
    "layer",
    [*(layer for layer, _, _ in LAYERS), nn.GroupNorm(2, 2), nn.InstanceNorm(2)],
    ids=name_of,
)
def test_what_is_not_an_array_is_named(layer, x, without_type_checks) -> None:
    name = "Linear" if isinstance(layer, nn.MLP) else type(layer).__name__
    with pytest.raises(TypeError, match=rf"{name} takes an array as `x`; got .+\.$"):
        layer(x)


def test_tuple_that_a_layer_returned_is_to_be_unpacked(
    build, without_type_checks
) -> None:
    lstm, linear = build(nn.LSTMCell, 3, 2), build(nn.Linear, 2, 2)
    pair = lstm(jnp.ones(3), lstm.init_state())
    message = (
        r"Linear takes an array as `x`; got a tuple of length 2\. If a layer returned "
        r"it, unpack it, as in `x, state = layer\(x, state\)`\.$"
    )
    with pytest.raises(TypeError, match=message):
        linear(pair)
    for numbers in ((1.0, 2.0), [jnp.ones(2)]):
        with pytest.raises(TypeError, match="Convert it with"):
            linear(numbers)


def test_error_of_a_missing_return_names_the_next_layer(without_type_checks) -> None:
    linear = nn.Linear(3, 3, key=KEY)
    model = nn.Sequential([linear, lambda x: None, linear])
    message = r"^At `layers\[2\]`: Linear takes an array as `x`; got None\.$"
    with pytest.raises(TypeError, match=message):
        model(jnp.ones(3))


@pytest.mark.parametrize("error", [ValueError, TypeError, AssertionError])
def test_shape_error_is_what_other_libraries_raise(error) -> None:
    with pytest.raises(error):
        nn.Linear(3, 2, key=KEY)(jnp.ones(4))


def test_path_leads_through_containers_to_the_layer() -> None:
    inner = drawn(
        lambda: nn.Sequential([nn.Linear(3, 4, key=KEY), nn.MLP(5, 2, 4, 1, key=KEY)])
    )
    model = nn.Sequential([jnp.tanh, inner])
    start = (
        r"^At `layers\[1\]\.layers\[1\]\.layers\[0\]`: Linear takes `x` of shape \(5,\)"
    )
    with pytest.raises(eqx.ShapeError, match=start):
        model(jnp.ones(3))


@pytest.mark.parametrize(("scan", "at"), [(False, 2), (True, 1)])
def test_path_of_a_layer_within_an_mlp(scan, at) -> None:
    mlp = drawn(lambda: nn.MLP(3, 2, 4, 3, scan=scan, key=KEY))
    wrong = jnp.ones((*mlp.layers[at].weight.shape[:-1], 9))
    mlp = eqx.tree_at(lambda m: m.layers[at].weight, mlp, wrong)
    with pytest.raises(eqx.ShapeError, match=rf"^At `layers\[{at}\]`: Linear takes"):
        mlp(jnp.ones(3))


def test_traceback_leads_to_the_layer() -> None:
    model = nn.Sequential([nn.Linear(3, 4, key=KEY)])
    with pytest.raises(eqx.ShapeError) as info:
        model(jnp.ones(5))
    assert info.traceback[-1].path.name == "checks.py"
    assert info.value.__cause__ is None and info.value.__context__ is None


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (drawn(lambda: nn.Linear(3, 2, key=KEY)), (3,)),
        (drawn(lambda: nn.Linear("scalar", 2, key=KEY)), ()),
        (drawn(lambda: nn.MLP(3, 2, 4, 2, scan=True, key=KEY)), (3,)),
        (drawn(lambda: nn.Conv1d(2, 4, 3, key=KEY)), (2, 5)),
        (nn.LayerNorm(3), (3,)),
        (nn.LayerNorm(3, use_weight=False), (3,)),
    ],
    ids=name_of,
)
def test_ensemble_is_called_under_filter_vmap(layer, shape) -> None:
    arrays, rest = eqx.partition(layer, eqx.is_array)
    ensemble = eqx.combine(
        jax.tree.map(lambda a: jnp.asarray(np.stack([a, a])), arrays), rest
    )
    hint = r"one axis more than one layer has.*call it under `filter_vmap`"
    with pytest.raises(eqx.ShapeError, match=hint):
        ensemble(np.ones(shape, np.float32))
    call = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    one, other = eqx.filter_jit(call)(ensemble, np.ones(shape, np.float32))
    np.testing.assert_array_equal(one, other)


def test_check_under_vmap_sees_one_example() -> None:
    layer = nn.Linear(3, 3, key=KEY)
    assert jax.vmap(layer)(jnp.ones((3, 3))).shape == (3, 3)
    with pytest.raises(eqx.ShapeError, match=r"given shape \(4,\)"):
        jax.vmap(layer)(jnp.ones((3, 4)))
