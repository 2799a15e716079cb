"""Layers on meshes whose axes are explicit, and the same layers on other meshes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from drawn import drawn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

EXPLICIT, AUTO = (
    jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    for kind in (AxisType.Explicit, AxisType.Auto)
)
KEY = jax.random.key(0)


def over_batch(model, *xs, **options):
    return jax.vmap(lambda *xs: model(*xs, **options))(*xs)


def attend_to_itself(model, x, **options):
    return jax.vmap(lambda x: model(x, x, x, **options))(x)


def with_state(model, x):
    return model[0](x, model[1])


def with_state_over_batch(model, x):
    apply = jax.vmap(model[0], axis_name="b", in_axes=(0, None), out_axes=(0, None))
    return apply(x, model[1])


class Case(NamedTuple):
    """A layer, how its parameters and its batches are split, and so its output."""

    build: Callable[[Any], Any]
    shapes: Sequence[tuple[int, ...]]
    given: P
    wanted: P
    # By the names of the parameters; the others are not split.
    split: dict[str, P] = {}  # noqa: RUF012
    out_sharding: P | None = None
    call: Callable[..., Any] = over_batch

    def options(self):
        given = self.out_sharding is not None
        return {"out_sharding": self.out_sharding} if given else {}


def linear(key):
    return nn.Linear(8, 4, key=key)


def mlp(key):
    return nn.MLP(8, 4, 8, 1, jnp.tanh, key=key)


def gru(key):
    return nn.GRUCell(8, 4, key=key)


def lstm(key):
    cell = nn.LSTMCell(8, 4, key=key)
    return eqx.Partial(lambda cell, x, h: cell(x, (h, h)), cell)


def reversible(key):
    return nn.ReversibleBlock(nn.Linear(4, 4, key=key), jnp.tanh)


def conv(key, **options):
    return nn.Conv2d(4, 8, 3, padding=1, key=key, **options)


def transposed(key, **options):
    return nn.ConvTranspose2d(4, 8, 2, stride=2, key=key, **options)


def embedding(key):
    return nn.Embedding(8, 6, key=key)


def attention(key, **options):
    return nn.MultiheadAttention(4, 8, key=key, **options)


def positions(key):
    return nn.LearnedPositionalEmbedding(8, 8, key=key)


def at_positions(model, x):
    return jax.vmap(lambda x: model(x, positions=jnp.array([5, 0, 2, 2, 7, 1])))(x)


def split_heads(key):
    return nn.Einsum("...d,dhk->...hk", {"d": 8, "h": 2, "k": 4}, key=key)


def each_feature(key):
    return nn.Einsum("...h,hk->...hk", {"h": 8, "k": 4}, key=key)


def batch_norm(**options):
    return lambda key: nn.make_with_state(nn.BatchNorm)(4, **options)


def spectral(key):
    return nn.make_with_state(
        lambda: nn.SpectralNorm(nn.Linear(8, 4, key=key), "weight", key=key)
    )()


def weight_norm(key):
    return nn.WeightNorm(nn.Linear(8, 4, key=key))


def without(build):
    return lambda key: build


VECTORS, IMAGES, TEXT = [(4, 8)], [(4, 4, 8, 8)], [(4, 6, 8)]
STEPS = [(4, 8), (4, 4)]
# A batch of integers, in all of these cases.
INDICES = [(4,)]
BY_ROW = {"weight": P("y"), "bias": P("y")}
BY_COLUMN = {"weight": P(None, "y")}
HEADS = {f"{name}_proj.weight": P("y") for name in ("query", "key", "value")}
ALL_HEADS = HEADS | {"output_proj.weight": P(None, "y")}
X, XY = P("x"), P("x", "y")

CASES = {
    # What JAX does by itself.
    "Linear": Case(linear, VECTORS, X, X),
    "Linear by row": Case(linear, VECTORS, X, XY, BY_ROW),
    "Linear by column": Case(linear, VECTORS, X, X, BY_COLUMN),
    "Linear by column, as the batch": Case(
        linear, VECTORS, X, X, {"weight": P(None, "x")}
    ),
    "Linear of split features": Case(linear, VECTORS, XY, X),
    "Linear by row of split features": Case(linear, VECTORS, XY, XY, BY_ROW),
    "MLP": Case(mlp, VECTORS, X, X),
    "GRUCell": Case(gru, STEPS, X, X),
    "GRUCell by row": Case(
        gru, STEPS, X, XY, {"weight_ih": P("y"), "weight_hh": P("y")}
    ),
    "LSTMCell": Case(lstm, STEPS, X, X),
    "LayerNorm of split features": Case(
        without(nn.LayerNorm(8)), VECTORS, XY, XY, BY_ROW
    ),
    "RMSNorm of split features": Case(without(nn.RMSNorm(8)), VECTORS, XY, XY),
    "GroupNorm": Case(without(nn.GroupNorm(2, 4)), IMAGES, X, X),
    "GroupNorm by channel": Case(without(nn.GroupNorm(2, 4)), IMAGES, XY, XY, BY_ROW),
    "InstanceNorm": Case(without(nn.InstanceNorm(4)), IMAGES, X, X),
    "InstanceNorm by channel": Case(
        without(nn.InstanceNorm(4)), IMAGES, XY, XY, BY_ROW
    ),
    "InstanceNorm of split space": Case(
        without(nn.InstanceNorm(4)),
        IMAGES,
        P("x", None, "y"),
        P("x", None, "y"),
        BY_ROW,
    ),
    "sinusoids": Case(without(nn.SinusoidalPositionalEmbedding(8)), TEXT, XY, XY),
    "table of positions": Case(positions, TEXT, XY, XY),
    "table of positions by column": Case(
        positions, TEXT, P("x", None, "y"), P("x", None, "y"), BY_COLUMN
    ),
    "table of positions, to split text": Case(positions, TEXT, XY, XY, BY_COLUMN),
    "Einsum": Case(split_heads, TEXT, X, X),
    "Einsum by head": Case(
        split_heads,
        TEXT,
        X,
        P("x", None, "y"),
        {"weight": P(None, "y"), "bias": P("y")},
    ),
    "MaxPool2d": Case(without(nn.MaxPool2d(2, 2)), IMAGES, XY, XY),
    "AvgPool2d": Case(without(nn.AvgPool2d(2, 2)), IMAGES, XY, XY),
    "rotary embedding": Case(without(nn.RotaryPositionalEmbedding(8)), TEXT, XY, XY),
    "attention": Case(attention, TEXT, X, X, call=attend_to_itself),
    "attention by head": Case(attention, TEXT, X, X, HEADS, call=attend_to_itself),
    "WeightNorm": Case(
        weight_norm, VECTORS, X, XY, {f"layer.{k}": v for k, v in BY_ROW.items()}
    ),
    "PReLU": Case(without(nn.PReLU()), VECTORS, XY, XY),
    "Conv2d": Case(conv, IMAGES, X, X),
    "Conv2d of split space": Case(conv, IMAGES, P("x", None, "y"), P("x", None, "y")),
    "ConvTranspose2d": Case(transposed, IMAGES, X, X),
    "Embedding": Case(embedding, INDICES, P(), P()),
    # A sum over what is split.
    "Linear along the sum": Case(linear, VECTORS, XY, X, BY_COLUMN),
    "Linear along the sum, unlike x": Case(
        linear,
        VECTORS,
        P(None, "x"),
        P(),
        BY_COLUMN,
    ),
    "Linear along the sum, to rows": Case(
        linear, VECTORS, XY, XY, BY_COLUMN, out_sharding=P("y")
    ),
    "Linear by row, as the batch": Case(
        linear, VECTORS, X, X, {"weight": X, "bias": X}, out_sharding=P()
    ),
    "Linear by row, to whole": Case(linear, VECTORS, X, X, BY_ROW, out_sharding=P()),
    "Linear of one number": Case(
        lambda key: nn.Linear(8, "scalar", key=key), VECTORS, XY, X, BY_COLUMN
    ),
    "MLP by row and column": Case(
        mlp,
        VECTORS,
        X,
        X,
        {
            "layers[0].weight": P("y"),
            "layers[0].bias": P("y"),
            "layers[1].weight": P(None, "y"),
        },
    ),
    "MLP by row, with activations that have parameters": Case(
        lambda key: nn.MLP(8, 4, 8, 2, nn.PReLU(), nn.PReLU(), key=key),
        VECTORS,
        X,
        XY,
        {"layers[0].weight": P("y"), "layers[2].weight": P("y")},
    ),
    "scanned MLP by row, after its first layer": Case(
        lambda key: nn.MLP(8, 4, 8, 3, jnp.tanh, scan=True, key=key),
        VECTORS,
        X,
        X,
        {"layers[1].weight": P(None, "y")},
    ),
    "scanned MLP by row, before its other layers": Case(
        lambda key: nn.MLP(8, 4, 8, 3, jnp.tanh, scan=True, key=key),
        VECTORS,
        X,
        X,
        {"layers[0].weight": P("y")},
    ),
    "Stacked by row": Case(
        lambda key: nn.Stacked(
            lambda key: nn.Sequential([nn.Linear(8, 8, key=key), jnp.tanh]), 3, key=key
        ),
        VECTORS,
        X,
        X,
        {"layers.layers[0].weight": P(None, "y")},
    ),
    "ReversibleSequential by row": Case(
        lambda key: nn.ReversibleSequential([reversible(key)]),
        VECTORS,
        X,
        X,
        {"blocks[0].f.weight": P("y")},
    ),
    "ReversibleSequential of Stacked by row": Case(
        lambda key: nn.ReversibleSequential(nn.Stacked(reversible, 2, key=key)),
        VECTORS,
        X,
        X,
        {"blocks.layers.f.weight": P(None, "y")},
    ),
    "RNN by row": Case(
        lambda key: nn.RNN.build(nn.GRUCell, 8, 4, 2, key=key),
        TEXT,
        X,
        P("x", None, "y"),
        {f"layers[{i}].weight_{kind}": P("y") for i in (0, 1) for kind in ("ih", "hh")},
    ),
    "RNN of split features": Case(
        lambda key: nn.RNN.build(nn.GRUCell, 8, 4, key=key),
        TEXT,
        P("x", None, "y"),
        P("x", None, "y"),
        {"layers[0].weight_hh": P("y")},
    ),
    "RNN in both directions, with padding": Case(
        lambda key: nn.RNN.build(nn.LSTMCell, 8, 4, bidirectional=True, key=key),
        TEXT,
        X,
        P("x", None, "y"),
        {
            f"layers[0].{direction}.weight_{kind}": P("y")
            for direction in ("forward", "backward")
            for kind in ("ih", "hh")
        },
        call=lambda model, x: jax.vmap(lambda x: model(x, length=3))(x),
    ),
    "GRUCell along the sum": Case(
        gru, STEPS, XY, XY, {"weight_ih": P(None, "y"), "weight_hh": P(None, "y")}
    ),
    "attend of Embedding along the sum": Case(
        lambda key: nn.Embedding(4, 8, key=key),
        VECTORS,
        XY,
        X,
        BY_COLUMN,
        call=lambda model, x: jax.vmap(model.attend)(x),
    ),
    "attention, all by head": Case(
        attention, TEXT, X, X, ALL_HEADS, call=attend_to_itself
    ),
    "attention, all by head, to columns": Case(
        attention,
        TEXT,
        X,
        P("x", None, "y"),
        ALL_HEADS,
        out_sharding=P(None, "y"),
        call=attend_to_itself,
    ),
    "attention, all by head, to rows": Case(
        attention, TEXT, X, XY, ALL_HEADS, out_sharding=P("y"), call=attend_to_itself
    ),
    "attention of shared heads": Case(
        functools.partial(attention, num_kv_heads=2),
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=attend_to_itself,
    ),
    "attention of shared heads, with a softcap and sinks": Case(
        functools.partial(attention, num_kv_heads=2, softcap=2.0, use_sinks=True),
        TEXT,
        X,
        X,
        ALL_HEADS | {"sinks": P("x")},
        call=attend_to_itself,
    ),
    "rotary attention, all by head": Case(
        functools.partial(attention, rotary=nn.RotaryPositionalEmbedding(2)),
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=lambda model, x: attend_to_itself(model, x, cache=model.init_cache(8)),
    ),
    "attention, all by head, with an int8 cache": Case(
        functools.partial(attention, num_kv_heads=2),
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=lambda model, x: attend_to_itself(
            model, x, cache=model.init_cache(8, dtype=jnp.int8)
        ),
    ),
    "attention with split queries": Case(
        functools.partial(attention, num_kv_heads=2),
        TEXT,
        X,
        X,
        {"query_proj.weight": P("y")},
        call=attend_to_itself,
    ),
    "attention by head, with dropout": Case(
        functools.partial(attention, dropout_p=0.5),
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=functools.partial(attend_to_itself, key=KEY),
    ),
    "attention by head, with a mask and a bias that are not split": Case(
        attention,
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=lambda model, x: attend_to_itself(
            model,
            x,
            mask=jnp.arange(144).reshape(4, 6, 6) % 5 > 0,
            bias=jnp.ones((4, 6, 6)),
        ),
    ),
    "attention by head, to a ring": Case(
        attention,
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=lambda model, x: attend_to_itself(
            model, x, cache=model.init_cache(4, overflow="ring")
        ),
    ),
    "attention by JAX's kernel": Case(
        functools.partial(attention, implementation="xla"),
        TEXT,
        X,
        X,
        ALL_HEADS,
        call=attend_to_itself,
    ),
    "attention along a split text": Case(
        attention, TEXT, XY, XY, call=attend_to_itself
    ),
    "SpectralNorm by row": Case(
        spectral,
        VECTORS,
        X,
        XY,
        {"[0].layer.weight": P("y"), "[0].layer.bias": P("y")},
        call=with_state_over_batch,
    ),
    "SpectralNorm by column": Case(
        spectral,
        VECTORS,
        X,
        X,
        {"[0].layer.weight": P(None, "y")},
        call=with_state_over_batch,
    ),
    "Einsum along the sum": Case(
        split_heads, TEXT, P("x", None, "y"), X, {"weight": P("y")}
    ),
    "Einsum along the sum, of a split text": Case(
        split_heads, TEXT, XY, XY, {"weight": P("x")}
    ),
    "Einsum along the sum, to heads": Case(
        split_heads,
        TEXT,
        P("x", None, "y"),
        P("x", None, "y"),
        {"weight": P("y")},
        out_sharding=P(None, "y"),
    ),
    "Einsum of split shared axes": Case(
        each_feature, TEXT, P("x", None, "y"), P("x", None, "y")
    ),
    "Einsum by shared axes": Case(
        each_feature, TEXT, X, P("x", None, "y"), {"weight": P("y"), "bias": P("y")}
    ),
    # A gather.
    "table of given positions": Case(
        positions, TEXT, XY, XY, {"weight": P("y")}, call=at_positions
    ),
    "table of given positions by column": Case(
        positions,
        TEXT,
        P("x", None, "y"),
        P("x", None, "y"),
        BY_COLUMN,
        call=at_positions,
    ),
    "Embedding of a split batch": Case(embedding, INDICES, X, X),
    "Embedding by feature": Case(embedding, INDICES, X, XY, BY_COLUMN),
    "Embedding by index": Case(embedding, INDICES, X, X, {"weight": P("y")}),
    "Embedding by index, as the batch": Case(embedding, INDICES, X, X, {"weight": X}),
    "Embedding by both": Case(embedding, INDICES, X, XY, {"weight": XY}),
    "Embedding by feature, as the batch": Case(
        embedding, INDICES, X, XY, {"weight": P(None, "x")}, out_sharding=P("y")
    ),
    # Convolutions whose channels are split.
    "Conv2d to split channels": Case(conv, IMAGES, X, XY, BY_ROW),
    "Conv2d from split channels": Case(conv, IMAGES, XY, X, BY_COLUMN),
    "Conv2d of split channels": Case(conv, IMAGES, XY, X),
    "Conv2d from and to split channels": Case(conv, IMAGES, XY, XY, BY_ROW),
    "Conv2d to split channels, in split space": Case(
        conv, IMAGES, P("x", None, "y"), P("x", None, "y"), BY_ROW
    ),
    "Conv2d, to the channels wanted": Case(
        conv, IMAGES, XY, XY, {"weight": X, "bias": X}, out_sharding=P("y")
    ),
    "Conv2d in groups": Case(functools.partial(conv, groups=4), IMAGES, XY, XY, BY_ROW),
    "padded Conv2d": Case(
        functools.partial(conv, padding_mode="REFLECT"),
        IMAGES,
        P("x", None, "y"),
        P("x", None, "y"),
        out_sharding=P(None, "y"),
    ),
    "padded Conv2d of split space": Case(
        functools.partial(conv, padding_mode="REFLECT"),
        IMAGES,
        P("x", None, "y"),
        P("x", None, "y"),
    ),
    "ConvTranspose2d to split channels": Case(transposed, IMAGES, X, XY, BY_ROW),
    "ConvTranspose2d from split channels": Case(transposed, IMAGES, XY, X, BY_COLUMN),
    "ConvTranspose2d, to the channels wanted": Case(
        transposed, IMAGES, XY, XY, BY_COLUMN, out_sharding=P("y")
    ),
    # Parameters that are split unlike the input.
    "PReLU by feature": Case(
        without(nn.PReLU(jnp.full(8, 0.1))), VECTORS, X, X, {"negative_slope": P("y")}
    ),
    "LayerNorm, as the batch": Case(
        without(nn.LayerNorm(8)), VECTORS, X, X, {"weight": X, "bias": X}
    ),
    "GroupNorm of split space": Case(
        without(nn.GroupNorm(2, 4)),
        IMAGES,
        P("x", None, "y"),
        P("x", None, "y"),
        BY_ROW,
    ),
    "BatchNorm": Case(batch_norm(), IMAGES, X, X, call=with_state),
    "BatchNorm by channel": Case(
        batch_norm(),
        IMAGES,
        XY,
        XY,
        {f"[0].{k}": v for k, v in BY_ROW.items()},
        call=with_state,
    ),
    "BatchNorm of split space": Case(
        batch_norm(),
        IMAGES,
        P("x", None, "y"),
        P("x", None, "y"),
        {f"[0].{k}": v for k, v in BY_ROW.items()},
        call=with_state,
    ),
    "named BatchNorm": Case(
        batch_norm(axis_name="b", mode="batch"),
        IMAGES,
        X,
        X,
        call=with_state_over_batch,
    ),
    "named BatchNorm by channel": Case(
        batch_norm(axis_name="b", mode="ema"),
        IMAGES,
        XY,
        XY,
        {f"[0].{k}": v for k, v in BY_ROW.items()},
        call=with_state_over_batch,
    ),
    "Upsample of split channels": Case(
        without(nn.Upsample(2, method="linear")), IMAGES, XY, XY
    ),
    "Upsample of split space": Case(
        without(nn.Upsample((2, 1))),
        IMAGES,
        P("x", None, None, "y"),
        P("x", None, None, "y"),
    ),
    "Upsample along a split axis": Case(
        without(nn.Upsample((2, 1))), IMAGES, P("x", None, "y"), X
    ),
    # Bins, each of which may be on two devices.
    "AdaptivePool of split channels": Case(
        without(nn.AdaptiveAvgPool2d(3)), IMAGES, XY, XY
    ),
    "AdaptivePool of split space": Case(
        without(nn.AdaptiveMaxPool2d(3)), IMAGES, P("x", None, "y"), X
    ),
}
# One of each kind.
SOME = [
    "Linear by row",
    "LSTMCell",
    "GroupNorm by channel",
    "Conv2d from split channels",
    "ConvTranspose2d to split channels",
    "Embedding by both",
    "attention, all by head",
    "SpectralNorm by row",
    "AdaptivePool of split channels",
]


def made(case):
    """The model and its batches, drawn in NumPy."""
    rng = np.random.default_rng(0)

    def drawn(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        # Small, as the gradients of a sine of large outputs depend on how they are rounded.
        values = (np.abs(rng.normal(size=x.shape)) + 0.1) / 4
        return jax.device_put(values.astype(x.dtype))

    model = jax.tree.map(drawn, eqx.filter_eval_shape(case.build, KEY))
    if case.shapes is INDICES:
        return model, [jnp.array([0, 3, 5, 3])]
    return model, [jax.device_put(rng.normal(size=s)) for s in case.shapes]


def placed(case, mesh):
    # From NumPy, as it compiles a program to split what is on a device.
    model, xs = jax.device_get(made(case))

    def put(path, x):
        name = jtu.keystr(path).lstrip(".")
        spec = case.split.get(name, P())
        is_array = isinstance(x, np.ndarray)
        return jax.device_put(x, NamedSharding(mesh, spec)) if is_array else x

    assert set(case.split) <= {
        jtu.keystr(path).lstrip(".") for path, _ in jtu.tree_leaves_with_path(model)
    }
    model = jtu.tree_map_with_path(put, model)
    return model, [jax.device_put(x, NamedSharding(mesh, case.given)) for x in xs]


@eqx.filter_jit
def results(case, model, xs, **options):
    """What the case returns, and the gradients of model and batches."""

    def loss(both):
        out = case.call(both[0], *both[1], **options)
        inexact = jax.tree.leaves(eqx.filter(out, eqx.is_inexact_array))
        return sum(jnp.sum(jnp.sin(y)) for y in inexact), out

    grads, out = eqx.filter_grad(loss, has_aux=True)((model, xs))
    return out, grads


_one_device: dict[Any, Any] = {}


def on_one_device(case):
    # Many cases differ in nothing but how arrays are split.
    same = (case.build, tuple(case.shapes), case.call)
    if same not in _one_device:
        _one_device[same] = results(case, *made(case))
    return _one_device[same]


def assert_close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


def is_split(x, spec, mesh=EXPLICIT):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_one_device_and_split_as_wanted(name):
    case = CASES[name]
    with jax.set_mesh(EXPLICIT):
        both = placed(case, EXPLICIT)
        out, grads = results(case, *both, **case.options())
    assert_close((out, grads), on_one_device(case))
    first = jax.tree.leaves(out)[0]
    assert is_split(first, case.wanted), first.sharding
    inputs = dict(jtu.tree_leaves_with_path(both))
    for path, x in jtu.tree_leaves_with_path(grads):
        wanted = inputs[path].sharding
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (path, x.sharding)


@pytest.mark.parametrize(
    "name",
    [
        "Linear along the sum",
        "Linear by row, to whole",
        "MLP by row and column",
        "GRUCell along the sum",
        "Einsum by head",
        "Embedding of a split batch",
        "Embedding by both",
        "attend of Embedding along the sum",
        "attention, all by head",
    ],
)
def test_frozen_arrays_are_split_as_others(name):
    case = CASES[name]
    with jax.set_mesh(EXPLICIT):
        model, xs = placed(case, EXPLICIT)
        frozen = jax.tree.map(lambda x: eqx.frozen(x) if eqx.is_array(x) else x, model)
        out = eqx.filter_jit(case.call)(frozen, *xs, **case.options())
    assert_close(out, on_one_device(case)[0])
    assert is_split(jax.tree.leaves(out)[0], case.wanted)


@pytest.mark.parametrize("name", [*SOME, "BatchNorm by channel"])
def test_automatic_axes_need_no_other_model(name):
    case = CASES[name]
    with jax.set_mesh(AUTO):
        got = results(case, *placed(case, AUTO))
    assert_close(got, on_one_device(case))


@pytest.mark.parametrize("name", SOME)
def test_manual_axes_need_no_other_model(name):
    case = CASES[name]
    model, xs = made(case)
    arrays, rest = eqx.partition(model, eqx.is_array)

    def per_device(arrays, xs):
        return jax.tree.leaves(case.call(eqx.combine(arrays, rest), *xs))[0]

    mapped = jax.shard_map(per_device, mesh=EXPLICIT, in_specs=(P(), X), out_specs=X)
    with jax.set_mesh(EXPLICIT):
        both = jax.device_put(jax.device_get((arrays, xs)), (P(), X))
        out = jax.jit(mapped)(*both)
    assert_close(out, jax.tree.leaves(on_one_device(case)[0])[0])
    assert is_split(out, X)


PER_DEVICE = {
    "Stacked": lambda key: nn.Stacked(lambda k: nn.Linear(8, 8, key=k), 3, key=key),
    "scanned MLP": lambda key: eqx.tree_at(
        lambda mlp: mlp.layers[0],
        nn.MLP(8, 8, 8, 3, jnp.tanh, key=key, scan=True),
        jnp.sin,
    ),
    "ReversibleSequential": lambda key: nn.ReversibleSequential(
        [reversible(k) for k in jax.random.split(key, 2)]
    ),
    "ReversibleSequential of Stacked": lambda key: nn.ReversibleSequential(
        nn.Stacked(reversible, 2, key=key)
    ),
}


@pytest.mark.parametrize("name", PER_DEVICE)
def test_devices_may_have_layers_of_their_own(name):
    build, keys = PER_DEVICE[name], jax.random.split(KEY, 4)
    models = jax.device_get(drawn(lambda: eqx.filter_vmap(build)(keys)))
    arrays, rest = eqx.partition(models, eqx.is_array_like)
    x = jax.device_put(np.linspace(-1.0, 1.0, 8, dtype=np.float32))

    @jax.jit
    def loss_and_gradient(arrays):
        model = eqx.combine(arrays, rest)
        return jax.value_and_grad(lambda x: jnp.sin(model(x)).sum())(x)

    def per_device(arrays):
        out, grad = loss_and_gradient(jax.tree.map(lambda a: a[0], arrays))
        return out[None], grad

    each = P(("x", "y"))
    mapped = jax.shard_map(per_device, mesh=AUTO, in_specs=each, out_specs=(each, P()))
    losses, grad = jax.jit(mapped)(arrays)
    wanted = [
        loss_and_gradient(jax.tree.map(lambda a, i=i: a[i], arrays)) for i in range(4)
    ]
    np.testing.assert_allclose(losses, [loss for loss, _ in wanted], rtol=1e-4)
    np.testing.assert_allclose(grad, sum(grad for _, grad in wanted), atol=1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "captured"])
def test_table_of_positions_that_is_split_by_row_has_rows_at_a_number(wrap):
    layer, x = drawn(lambda: positions(KEY)), np.zeros((5, 8), np.float32)
    with jax.set_mesh(EXPLICIT):
        split = eqx.filter_shard(layer, P("y", "x"))
        out = wrap(lambda x: split(x, offset=2))(x)
    assert_close(out, np.asarray(layer.weight)[2:7])


@pytest.mark.parametrize("names", [{"x", "y"}, {"x"}], ids=["all manual", "one manual"])
def test_batch_norm_has_statistics_over_a_manual_axis(names):
    norm, state = nn.make_with_state(nn.BatchNorm)(4, "x", mode="batch", batch_axis=0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4, 3)))
    with jax.set_mesh(EXPLICIT):
        mapped = jax.shard_map(
            lambda x, state: norm(x, state),
            in_specs=(X, P()),
            out_specs=(X, P()),
            axis_names=names,
        )
        spec = X if "y" in names else XY
        out, new = jax.jit(mapped)(jax.device_put(x, spec), state)
    whole, state = nn.make_with_state(nn.BatchNorm)(4)
    wanted, wanted_state = eqx.filter_jit(whole)(x, state)
    assert is_split(out, spec)
    assert_close((out, new), (wanted, wanted_state))


def test_arrays_on_an_explicit_mesh_need_it_not_be_in_use():
    case = CASES["MLP by row and column"]
    model, xs = placed(case, EXPLICIT)
    out = over_batch(model, *xs)
    assert_close(out, on_one_device(case)[0])
    assert is_split(out, case.wanted)
    table, indices = placed(CASES["Embedding by both"], EXPLICIT)
    assert is_split(over_batch(table, *indices), XY)


def test_mixed_meshes_split_by_both_kinds_of_axes():
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit)
    )
    for name in (
        "Linear along the sum",
        "Conv2d from split channels",
        "Embedding by both",
    ):
        case = CASES[name]
        with jax.set_mesh(mesh):
            got = results(case, *placed(case, mesh))
        assert_close(got, on_one_device(case))


SPLIT_TABLES = {
    "by feature": P(None, "y"),
    "by index": P("y"),
    "by index, as the batch": X,
    "by both": XY,
    "by index, by all": P(("x", "y")),
}


@pytest.mark.parametrize("spec", SPLIT_TABLES.values(), ids=list(SPLIT_TABLES))
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "one"])
def test_no_device_has_all_of_a_split_table(spec, batched):
    table = nn.Embedding(64, 6, weight=np.ones((64, 6), np.float32))
    index = np.arange(8) if batched else np.array(3)

    def loss(table, index):
        return jnp.sin(jax.vmap(table)(index) if batched else table(index)).sum()

    with jax.set_mesh(EXPLICIT):
        table, index = jax.device_put((table, index), (spec, X if batched else P()))
        program = jax.jit(jax.value_and_grad(loss)).lower(table, index).compile()
    assert "f32[64,6]" not in program.as_text()


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_state_takes_the_split_of_the_channels(mode):
    make = nn.make_with_state(nn.BatchNorm)
    norm, state = make(4, mode=mode, num_spatial_dims=1)
    apply, x = eqx.filter_jit(norm), np.ones((4, 4, 8), np.float32)
    with jax.set_mesh(EXPLICIT):
        for _ in range(2):
            _, state = apply(jax.device_put(x, XY), state)
        index = norm.ema_state_index if mode == "ema" else norm.batch_state_index
        assert all(is_split(average, P("y")) for average in state.get(index))
        y, _ = apply(jax.device_put(x, P("x", None, "y")), state, inference=True)
    assert is_split(y, P("x", None, "y"))


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit])
@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_cache_of_split_heads_is_split_and_can_be_used(jit, overflow):
    layer = drawn(lambda: attention(KEY))
    x = jax.device_put(np.random.default_rng(1).normal(size=(5, 8)))
    projections = ("query_proj", "key_proj", "value_proj")
    split = eqx.tree_at(
        lambda m: [getattr(m, name).weight for name in projections],
        layer,
        replace_fn=lambda weight: jax.device_put(
            weight, NamedSharding(EXPLICIT, P("y"))
        ),
    )

    @eqx.filter_jit
    def run(model, x, cache):
        outs = []
        for rows in (x[:3], x[3:4], x[4:]):
            out, cache = model(rows, rows, rows, is_causal=True, cache=cache)
            outs.append(out)
        return jnp.concatenate(outs), cache

    with jax.set_mesh(EXPLICIT):
        cache = jit(lambda model: model.init_cache(8, overflow=overflow))(split)
        assert is_split(cache.key, P(None, "y")) and is_split(cache.value, P(None, "y"))
        out, cache = run(split, x, cache)
    assert is_split(cache.key, P(None, "y"))
    whole = eqx.filter_jit(layer)(x, x, x, is_causal=True)
    np.testing.assert_allclose(out, whole, atol=1e-5)
    # The mesh need not be in use.
    assert is_split(jit(lambda model: model.init_cache(8))(split).key, P(None, "y"))


CALLABLE = {
    "Linear": (lambda: nn.Linear(8, 4, key=KEY), [(8,)]),
    "Conv": (lambda: nn.Conv1d(2, 4, 3, key=KEY), [(2, 5)]),
    "ConvTranspose": (lambda: nn.ConvTranspose1d(2, 4, 3, key=KEY), [(2, 5)]),
    "Embedding": (lambda: nn.Embedding(4, 4, key=KEY), None),
    "MultiheadAttention": (lambda: attention(KEY), [(6, 8)] * 3),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_new_cache_of_a_split_batch_is_split_in_all_of_its_arrays(wrap):
    model = attention(KEY)
    with jax.set_mesh(EXPLICIT):
        xs = jax.device_put(np.ones((4, 2)), X)
        cache = wrap(jax.vmap(lambda _: model.init_cache(3)))(xs)
    assert all(is_split(leaf, X) for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize("name", CALLABLE)
def test_a_wrong_out_sharding_is_refused_as_jax_refuses_it(name):
    build, shapes = CALLABLE[name]
    layer = drawn(build)

    def call(spec, mesh):
        xs = [2]
        if shapes is not None:
            xs = [jax.device_put(np.ones(shape)) for shape in shapes]
        # Attention is of many operations.
        wrap = eqx.filter_jit if name == "MultiheadAttention" else lambda model: model
        if mesh is None:
            return wrap(layer)(*xs, out_sharding=spec)
        with jax.set_mesh(mesh):
            model, xs = jax.tree.map(
                lambda x: jax.device_put(x, P()) if eqx.is_array(x) else x, (layer, xs)
            )
            return wrap(model)(*xs, out_sharding=spec)

    assert is_split(call(P("y"), EXPLICIT), P("y"))
    with pytest.raises(ValueError, match="under a mesh context"):
        call(P(), None)
    with pytest.raises(ValueError, match="axis name: x of type"):
        call(P("x"), AUTO)
    with pytest.raises(ValueError, match=r"z of P.* is not found in mesh"):
        call(P("z"), EXPLICIT)


def test_layers_ask_nothing_of_a_mesh_without_explicit_axes():
    for name in SOME:
        model, xs = made(CASES[name])
        with jax.set_mesh(AUTO):
            program = str(eqx.filter_make_jaxpr(CASES[name].call)(model, *xs)[0])
        for primitive in ("reshard", "mesh_cast", "sharding_constraint"):
            assert primitive not in program


def test_dropout_over_a_split_batch_asks_for_keys_that_are_split_alike():
    dropout = nn.Dropout(0.5)
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(jnp.ones((4, 8)), XY)
        keys = jax.random.split(KEY, 4)
        apply = eqx.filter_vmap(lambda x, keys: dropout(x, key=keys))
        message = (
            r"`x` is split by 'x' and `keys` is not split.*PRNG keys must be split, too"
        )
        with pytest.raises(ValueError, match=message):
            apply(x, keys)
        out = apply(x, jax.sharding.reshard(keys, X))
    assert is_split(out, XY)
    one_by_one = jax.vmap(lambda x, key: dropout(x, key=key))
    wanted = jax.jit(one_by_one)(np.ones((4, 8), np.float32), keys)
    assert_close(out, wanted)


@pytest.mark.parametrize("by_batch", [P(), X])
def test_output_of_einsum_has_each_mesh_axis_once(by_batch) -> None:
    """The text and the weight have an axis of their own that is split by `y`."""
    layer = nn.Einsum("bti,boi->bto", {"b": 2, "o": 4, "i": 3}, key=KEY)
    x = jax.random.normal(KEY, (2, 4, 3))
    expected = layer(x)
    split = P(*by_batch or (None,), "y")
    with jax.set_mesh(EXPLICIT):
        weight = jax.device_put(layer.weight, NamedSharding(EXPLICIT, split))
        layer = eqx.tree_at("weight", layer, weight)
        y = layer(jax.device_put(x, NamedSharding(EXPLICIT, split)))
        assert jax.typeof(y).sharding.spec == P(*split, None)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
