import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import internal as eqxi, nn


@pytest.fixture
def mlp(key):
    return nn.MLP(3, 2, 8, 1, key=key)


def test_each_array_is_a_row(mlp) -> None:
    mlp = eqx.tree_at("layers[0].bias", mlp, replace_fn=eqx.frozen)
    table = nn.summary(mlp)
    assert table.rows == [
        ("layers[0].weight", "Linear", (8, 3), "float32", 24, 96, "trainable", None),
        ("layers[0].bias", "Linear", (8,), "float32", 8, 32, "frozen", None),
        ("layers[1].weight", "Linear", (2, 8), "float32", 16, 64, "trainable", None),
        ("layers[1].bias", "Linear", (2,), "float32", 2, 8, "trainable", None),
    ]
    assert table.total_params == 50 and table.trainable_params == 42
    assert table.total_bytes == 200
    lines = str(table).splitlines()
    assert lines[0].split() == "path layer shape dtype params bytes status".split()
    assert lines[2].split()[:2] == ["layers[0].weight", "Linear"]
    assert lines[-1] == "50 parameters, 42 trainable, 200 bytes"
    assert repr(table) == str(table)


def test_depth_sums_up(mlp) -> None:
    mlp = eqx.tree_at("layers[0].bias", mlp, replace_fn=lambda x: x.astype(jnp.float16))
    rows = nn.summary(mlp, depth=2).rows
    assert rows == [
        ("layers[0]", "Linear", None, "mixed", 32, 112, "trainable", None),
        ("layers[1]", "Linear", None, "float32", 18, 72, "trainable", None),
    ]
    assert [row.params for row in nn.summary(mlp, depth=1).rows] == [50]
    assert nn.summary(mlp, depth=3).rows == nn.summary(mlp).rows
    assert "of these 42 float32, 8 float16" in str(nn.summary(mlp, depth=1))


@pytest.mark.parametrize(
    "where", [lambda m: m.layers[1], "layers[1]"], ids=["function", "pattern"]
)
def test_where_restricts(where, mlp) -> None:
    table = nn.summary(mlp, where=where)
    assert [row.path for row in table.rows] == ["layers[1].weight", "layers[1].bias"]
    assert table.total_params == 18
    assert nn.summary([mlp, jnp.ones(3)], where=nn.MLP).total_params == 50


def test_structs_and_numpy_arrays_count(key) -> None:
    huge = eqx.filter_eval_shape(nn.Linear, 10**6, 10**6, key=key)
    table = nn.summary(huge)
    assert table.total_params == 10**12 + 10**6 == table.trainable_params
    assert nn.summary({"a": np.ones((2, 3))}).rows[0].dtype == "float64"
    assert nn.summary([1.0, "text", None, jnp.tanh]).rows == []


def test_tied_arrays_count_once(key) -> None:
    weight = jnp.ones((2, 2))
    table = nn.summary([weight, {"a": weight}])
    assert [row.tied_to for row in table.rows] == [None, "[0]"]
    assert table.total_params == 4 and "trainable, = [0]" in str(table)
    pair = nn.Embedding(4, 3, key=key), nn.Linear(3, 4, use_bias=False, key=key)
    shared = nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
    assert nn.summary(shared).total_params == 12


@pytest.mark.parametrize(
    ("array", "params", "size"),
    [
        (jnp.zeros(5, jnp.int4), 5, 3),
        (jnp.zeros(3, jnp.complex64), 3, 24),
        (jnp.zeros(3, bool), 3, 3),
        (jnp.zeros((), jnp.float8_e4m3fn), 1, 1),
        (jax.random.split(jax.random.key(0), 3), 6, 24),
        (jnp.zeros((0, 3)), 0, 0),
    ],
    ids=["int4", "complex64", "bool", "float8", "key", "empty"],
)
def test_bytes_are_those_of_the_dtype(array, params, size) -> None:
    row = nn.summary(array).rows[0]
    assert (row.params, row.bytes) == (params, size)


def test_state_is_marked() -> None:
    norm, state = nn.make_with_state(nn.BatchNorm)(3)
    rows = nn.summary((norm, state)).rows
    assert [row.status for row in rows] == ["trainable"] * 2 + ["state"] * 3
    assert rows[2].layer == "State"
    assert rows[2].path == "[1]['batch_counter']"
    assert nn.summary(nn.BatchNorm(3)).rows[-1].status == "state"


def test_it_sees_into_stacked_layers(key) -> None:
    stacked = nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 4, key=key)
    assert nn.summary(stacked).rows[0][:3] == ("layers.weight", "Linear", (4, 3, 3))


class Net(eqx.Module):
    conv: nn.Conv2d
    norm: nn.BatchNorm
    pool: nn.MaxPool2d
    dropout: nn.Dropout
    out: nn.Linear

    def __init__(self, key):
        self.conv = nn.Conv2d(2, 4, 3, groups=2, key=key)
        self.norm = nn.BatchNorm(4, "batch", mode="batch")
        self.pool = nn.MaxPool2d(2, 2)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(36, 2, key=key)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.conv(x), state)
        x = self.pool(jax.nn.relu(x)).ravel()
        return self.out(self.dropout(x, key=key)), state


class Block(eqx.Module):
    norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, key):
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(2, 8, key=key)
        self.mlp = nn.MLP(8, 8, 16, 1, key=key)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, is_causal=True)
        return x + jax.vmap(self.mlp)(h)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_inputs_add_outputs_and_operations(mlp) -> None:
    table = nn.summary(mlp, struct(3))
    assert table.rows == nn.summary(mlp).rows
    assert table.layers == [
        ("layers[0]", "Linear", struct(8), 48, 0.6),
        ("layers[1]", "Linear", struct(2), 32, 0.4),
        ("", "MLP", struct(2), 80, 1.0),
    ]
    assert table.total_operations == 80
    text = str(table)
    assert text.startswith(str(nn.summary(mlp)) + "\n\n")
    lines = text.removeprefix(str(nn.summary(mlp)) + "\n\n").splitlines()
    assert lines[0].split() == "path layer output operations share".split()
    assert lines[2].split() == ["layers[0]", "Linear", "float32[8]", "48", "60.0%"]
    assert lines[4].split() == ["(model)", "MLP", "float32[2]", "80", "100.0%"]
    assert lines[-1].startswith("80 operations of matrix") and "jaxpr" in lines[-1]
    without = nn.summary(mlp)
    assert without.layers == [] and without.total_operations == 0


def test_state_and_key_are_further_inputs(key) -> None:
    net, state = nn.make_with_state(Net)(key)
    call = lambda net, x, state, key: net(x, state, key=key)  # noqa: E731
    batched = eqx.filter_vmap(
        call, in_axes=(None, 0, None, 0), out_axes=(0, None), axis_name="batch"
    )
    keys = jax.random.split(key, 16)
    table = nn.summary(eqx.Partial(batched, net), struct(16, 2, 8, 8), state, keys)
    conv, dense = 16 * 4 * 6 * 6 * 9 * 2, 16 * 36 * 2 * 2
    shapes = {x.path: jax.tree.leaves(x.output)[0].shape for x in table.layers[:5]}
    assert shapes == {
        "args[0].conv": (16, 4, 6, 6),
        "args[0].norm": (16, 4, 6, 6),
        "args[0].pool": (16, 4, 3, 3),
        "args[0].dropout": (16, 36),
        "args[0].out": (16, 2),
    }
    assert [x.operations for x in table.layers[:5]] == [conv, 0, 0, 0, dense]
    assert table.total_operations == conv + dense
    whole = table.layers[5]
    assert whole.layer == "Net" and isinstance(whole.output[1], nn.State)
    lines = [line.split()[:4] for line in str(table).splitlines()]
    assert ["args[0]", "Net", "float32[16,2]", f"{conv + dense:,}"] in lines
    # As keyword arguments, and at inference without a batch.
    net = nn.inference_mode(net)
    layers = nn.summary(net, struct(2, 8, 8), state=state, key=key).layers
    assert layers[-1][:2] == ("", "Net") and layers[-1].output[0].shape == (2,)


@pytest.mark.parametrize("make", ["block", "stacked", "recomputed"])
@pytest.mark.parametrize("batched", [False, True])
def test_outputs_are_those_that_capture_finds(make, batched, key) -> None:
    stacked = lambda **options: nn.Stacked(Block, 3, key=key, **options)  # noqa: E731
    model = {
        "block": lambda: Block(key),
        "stacked": stacked,
        "recomputed": lambda: stacked(checkpoint=True),
    }[make]()
    x = struct(4, 5, 8) if batched else struct(5, 8)
    model = eqx.filter_vmap(model) if batched else model
    table = nn.summary(model, x)
    _, outputs = eqx.filter_eval_shape(eqx.capture(model, "**"), x)
    assert {row.path: row.output for row in table.layers} == outputs
    of_block = 4 * (2 * 5 * 8 * 8) + 2 * (2 * 5 * 5 * 8) + 2 * (2 * 5 * 8 * 16)
    times = (1 if make == "block" else 3) * (4 if batched else 1)
    assert table.total_operations == of_block * times == table.layers[-1].operations
    # The layers within a block have all of its operations.
    of_parts = [x for x in table.layers if x.path.endswith((".norm", "ion", "mlp"))]
    assert sum(row.share for row in of_parts) == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda k: nn.Linear(3, 4, use_bias=False, key=k), (3,)),
        (lambda k: nn.Conv1d(4, 6, 3, groups=2, use_bias=False, key=k), (4, 9)),
        (lambda k: nn.Conv2d(2, 3, 2, stride=2, use_bias=False, key=k), (2, 8, 8)),
    ],
    ids=["linear", "grouped", "strided"],
)
def test_products_are_counted_as_by_the_compiler(make, shape, key) -> None:
    layer = make(key)
    # As on all platforms but CPUs, on which convolutions with groups take another form.
    lowered = jax.jit(eqxi.finalise_fn(layer)).lower(jnp.ones(shape))
    number = lowered.compile().cost_analysis()["flops"]
    assert nn.summary(layer, struct(*shape)).total_operations == number


def test_depth_and_where_restrict_the_layers(key) -> None:
    block, x = Block(key), struct(5, 8)
    paths = lambda **options: [  # noqa: E731
        row.path for row in nn.summary(block, x, **options).layers
    ]
    assert paths(depth=0) == [""]
    assert paths(depth=1) == ["norm", "attention", "mlp", ""]
    inside = ["mlp.layers[0]", "mlp.layers[1]", "mlp"]
    for where in (nn.MLP, "mlp", lambda b: b.mlp):
        assert paths(where=where) == inside
        assert paths(where=where, depth=1) == ["mlp"]
    whole = nn.summary(block, x).total_operations
    assert nn.summary(block, x, where="mlp").total_operations == whole


TREE = """
path          layer       shape   dtype    params  bytes  status     output      operations   share
---------------------------------------------------------------------------------------------------
(model)       Sequential          float32      26    104  trainable  float32[2]          40  100.0%
  layers      tuple               float32      26    104  trainable
    [0]       Linear              float32      16     64  trainable  float32[4]          24   60.0%
      weight  Linear      (4, 3)  float32      12     48  trainable
      bias    Linear      (4,)    float32       4     16  trainable
    [1]       Lambda                                                 float32[4]           0    0.0%
    [2]       Linear              float32      10     40  trainable  float32[2]          16   40.0%
      weight  Linear      (2, 4)  float32       8     32  trainable
      bias    Linear      (2,)    float32       2      8  trainable
---------------------------------------------------------------------------------------------------
26 parameters, 26 trainable, 104 bytes
40 operations of matrix products and convolutions, counted from the jaxpr
"""  # noqa: E501


@pytest.fixture
def sequential(key):
    layers = nn.Linear(3, 4, key=key), nn.Lambda(jax.nn.relu), nn.Linear(4, 2, key=key)
    return nn.Sequential(layers)


def test_tree_has_a_line_for_each_part(sequential) -> None:
    tree = nn.summary(sequential, struct(3)).tree()
    assert tree == TREE.strip()
    # Without inputs there is no layer that has no arrays, and no column of a call.
    kept = [line[:69].rstrip() for line in tree.splitlines() if "Lambda" not in line]
    without = nn.summary(sequential).tree().splitlines()
    rules = {1, len(without) - 2}
    assert [x for i, x in enumerate(without) if i not in rules] == [
        x for i, x in enumerate(kept[:-1]) if i not in rules
    ]


def test_tree_ends_at_the_depth(sequential) -> None:
    lines = nn.summary(sequential, struct(3), depth=2).tree().splitlines()
    expected = TREE.strip().splitlines()
    expected = [x for x in expected if not x.startswith("      ")]
    assert [x.split() for x in lines[2:-3]] == [x.split() for x in expected[2:-3]]
    assert nn.summary(jnp.ones(3)).tree().splitlines()[2].split()[0] == "(model)"
    assert nn.summary([]).tree().endswith("0 parameters, 0 trainable, 0 bytes")


def test_parts_are_in_the_order_of_the_fields(key) -> None:
    pools = nn.Sequential([nn.MaxPool1d(2), nn.MaxPool1d(2)])
    linear = eqx.frozen(nn.Linear(2, 1, key=key))
    layers = [*[nn.Lambda(jnp.sin)] * 9, pools, nn.Lambda(jnp.ravel), linear]
    lines = nn.summary(nn.Sequential(layers), struct(1, 4)).tree().splitlines()[2:-3]
    # The tuple of the poolings has no line, as it has no arrays and is not called.
    expected = [(0, "(model)"), (1, "layers"), *((2, f"[{i}]") for i in range(10))]
    expected += [(3, "layers[0]"), (3, "layers[1]"), (2, "[10]"), (2, "[11]")]
    expected += [(3, "weight"), (3, "bias")]
    levels = [(len(line) - len(line.lstrip())) // 2 for line in lines]
    names = [line.split()[0] for line in lines]
    assert list(zip(levels, names, strict=True)) == expected


def test_notebooks_show_the_tree_as_a_table(sequential) -> None:
    summary = nn.summary({"<b>": sequential})
    table, below = summary._repr_html_().split("</table>")
    rows = ElementTree.fromstring(table + "</table>")
    cells = [[cell.text or "" for cell in row] for row in rows]
    lines = summary.tree().splitlines()
    assert [[x for x in row if x] for row in cells] == [
        [x for x in re.split(r"  +", line.strip()) if x]
        for line in (lines[0], *lines[2:-2])
    ]
    assert cells[2][0] == "['<b>']" and "<b>" not in table
    assert rows[0][0].tag == "th" and "padding-left: 2.5em" in rows[2][0].get("style")
    assert "text-align: right" in rows[2][4].get("style")
    assert below == f"\n<p>{lines[-1]}</p>"


def test_layer_that_is_called_twice_has_the_sum_and_both_outputs(key) -> None:
    class Twice(eqx.Module):
        layer: nn.Linear
        unused: nn.Linear

        def __call__(self, x):
            return self.layer(jax.vmap(self.layer)(x)[0])

    model = Twice(nn.Linear(3, 3, key=key), nn.Linear(3, 3, key=key))
    layer, whole = nn.summary(model, struct(2, 3)).layers
    assert layer.output == (struct(2, 3), struct(3))
    assert layer.operations == (2 + 1) * 2 * 9 == whole.operations
    assert "float32[2,3], float32[3]" in str(nn.summary(model, struct(2, 3)))


def test_derivatives_belong_to_the_layers(key) -> None:
    class Force(eqx.Module):
        energy: nn.Linear

        def __call__(self, x):
            return jax.grad(lambda x: self.energy(x) ** 2)(x)

    layer, whole = nn.summary(
        Force(nn.Linear(3, "scalar", use_bias=False, key=key)), struct(3)
    ).layers
    assert layer.operations == whole.operations == 2 * (2 * 3)


def test_control_flow_is_counted(key) -> None:
    class Steps(eqx.Module):
        layer: nn.Linear

        def __call__(self, x):
            step = lambda x: self.layer(x)  # noqa: E731
            x = jax.lax.while_loop(lambda x: x.sum() > 0, step, x)
            x = jax.lax.cond(x.sum() > 0, step, lambda x: x, x)
            return jax.lax.scan(lambda x, _: (step(x), None), x, length=5)[0]

    table = nn.summary(Steps(nn.Linear(3, 3, use_bias=False, key=key)), struct(3))
    assert table.total_operations == (1 + 1 + 5) * 2 * 9
    assert table.layers[0].output == (struct(3), struct(3), struct(5, 3))


def test_in_a_shard_map_one_device_is_counted(key) -> None:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto)

    class Parallel(eqx.Module):
        layer: nn.Linear

        def __call__(self, x):
            spec = jax.sharding.PartitionSpec("data")
            mapped = jax.shard_map(
                jax.vmap(self.layer), mesh=mesh, in_specs=spec, out_specs=spec
            )
            return mapped(x)

    table = nn.summary(Parallel(nn.Linear(3, 3, use_bias=False, key=key)), struct(8, 3))
    assert table.total_operations == (8 // 4) * 2 * 9


def test_nothing_is_computed(key) -> None:
    huge = eqx.filter_eval_shape(nn.MLP, 10**6, 10**6, 10**6, 1, key=key)
    layers = nn.summary(huge, struct(10**6)).layers
    assert layers[-1].operations == 2 * 2 * 10**12


def test_inputs_of_what_cannot_be_called_are_refused(mlp) -> None:
    with pytest.raises(TypeError, match=r"call a list.*: pass a model, or no inputs\."):
        nn.summary([mlp], struct(3))
