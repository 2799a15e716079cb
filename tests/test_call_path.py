"""Where in a Module an error happened: the path that its message or its note names."""

import contextlib
import dataclasses
import functools
import gc
import os
import re
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

KEY = jax.random.key(0)
X = jnp.ones(3)
WRONG = jnp.ones(5)


def linear(in_size=3, **kwargs):
    return nn.Linear(in_size, 3, key=KEY, **kwargs)


class Block(eqx.Module):
    """Fails at `lin` if it is called with `WRONG`, and of its own accord if told to."""

    lin: nn.Linear
    fails: str = eqx.field(static=True, default="")

    def __init__(self, fails="", key=KEY):
        self.lin = nn.Linear(3, 3, key=key)
        self.fails = fails

    def __call__(self, x):
        if self.fails == "jax":
            return x @ self.lin.weight[:1]
        if self.fails == "user":
            raise KeyError("mine")
        return self.lin(x)

    def encode(this, x):  # pyright: ignore[reportSelfClsParameterName]
        return this(x)


class Net(eqx.Module):
    """Calls `run(part, x)`."""

    part: Any

    def __call__(self, x, run=lambda part, x: part(x)):
        return run(self.part, x)


def raised(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def notes_of(error):
    notes = getattr(error, "__notes__", [])
    return [note for note in notes if note.startswith("This is from `")]


def place_of(function, *args):
    """What the message or the only note names; `None` if neither does."""
    error = raised(function, *args)
    found = re.match("At (.*?): ", str(error))
    notes = notes_of(error)
    if found is not None:
        assert notes == [] and str(error).count("At `") == 1
        return found[1]
    assert len(notes) <= 1
    return notes[0].removeprefix("This is from ").removesuffix(".") if notes else None


def in_each_way(model, x):
    """Calls of a model: without a transformation and with one."""
    return [
        lambda: model(x),
        lambda: jax.vmap(model)(x[None]),
        lambda: eqx.filter_vmap(model)(x[None]),
        lambda: eqx.filter_jit(model)(x),
        lambda: eqx.filter_jit(eqx.filter_grad(lambda m: m(x).sum()))(model),
        lambda: jax.jit(lambda x: model(x))(x),
        lambda: nn.precision("bf16")(lambda: model(x))(),
    ]


class Pair(eqx.Module):
    encoder: nn.MLP
    decoder: nn.MLP

    def __call__(self, x):
        return self.decoder(self.encoder(x))


def mlp(in_size, **kwargs):
    return nn.MLP(in_size, 3, 4, 2, key=KEY, **kwargs)


@pytest.mark.parametrize("call", range(7))
def test_error_of_a_layer_names_the_place_in_a_class_of_the_user(call):
    error = raised(in_each_way(Pair(mlp(3), mlp(4)), X)[call])
    assert type(error) is eqx.ShapeError and notes_of(error) == []
    assert str(error).startswith(
        "At `decoder.layers[0]`: Linear takes `x` of shape (4,)"
    )


def of_key(part, x):
    return part["a"](x)


def second(part, x):
    return part[1](x)


PARTS = {
    "list": ([Block(), Block()], second, "part[1].lin"),
    "tuple": ((Block(), Block()), second, "part[1].lin"),
    "dictionary": ({"a": Block()}, of_key, "part['a'].lin"),
    "method": (Block(), lambda part, x: part.encode(x), "part.lin"),
    "Sequential": (nn.Sequential([jnp.tanh, Block()]), None, "part.layers[1].lin"),
    "function": (nn.Sequential([lambda x: linear()(x)]), None, "part.layers[0]"),
    "Lambda": (nn.Sequential([nn.Lambda(linear())]), None, "part.layers[0].fn"),
    "mixed": (nn.mixed(Block(), "compute=bf16"), None, "part.layer.lin"),
    "mixed, method": (
        nn.mixed(Block(), "compute=bf16"),
        lambda part, x: part.encode(x),
        "part.layer.lin",
    ),
    "mixed, keep": (
        nn.mixed(nn.Sequential([Block()]), "compute=bf16", keep=Block),
        None,
        "part.layer.layers[0].lin",
    ),
    "LoRA": (nn.LoRA(linear(), 2, key=KEY), None, "part.layer"),
    "WeightNorm": (nn.WeightNorm(linear(use_bias=False)), None, "part.layer"),
    "Quantized": (nn.Quantized(linear()), None, "part.layer"),
    "MLP(scan=True)": (mlp(3, scan=True), None, "part.layers[0]"),
    "Partial": (eqx.Partial(Block()), None, "part.func.lin"),
    "scan_cell": (
        nn.GRUCell(3, 3, key=KEY),
        lambda part, x: nn.scan_cell(part, jnp.ones((4, 5)))[1],
        "part",
    ),
    "RNN": (
        nn.RNN([nn.GRUCell(3, 4, key=KEY)] * 2),
        lambda part, x: part(jnp.ones((4, 3)))[0],
        "part.layers[1]",
    ),
    "Bidirectional": (
        nn.RNN(nn.Bidirectional(nn.GRUCell(3, 4, key=KEY), nn.GRUCell(5, 4, key=KEY))),
        lambda part, x: part(jnp.ones((4, 3)))[0],
        "part.layers[0].backward",
    ),
    "checkpoint": (
        Block(),
        lambda part, x: jax.checkpoint(part.__call__)(x),
        "part.lin",
    ),
    "filter_checkpoint": (eqx.filter_checkpoint(Block()), None, "part.lin"),
    "jitted": (eqx.filter_jit(Block()), None, "part.lin"),
    "jitted in Sequential": (
        nn.Sequential([eqx.filter_jit(Block())]),
        None,
        "part.layers[0].lin",
    ),
    "jitted here": (
        Block(),
        lambda part, x: eqx.filter_jit(part.encode)(x),
        "part.lin",
    ),
    "argument": (
        [Block(), Block()],
        lambda part, x: eqx.filter_jit(lambda a, b, x: b(a.lin(X) + x[:3]) + b(x))(
            part[0], part[1], x
        ),
        "part[1].lin",
    ),
    "keywords": (
        [Block(), Block()],
        lambda part, x: eqx.filter_jit(lambda *, a, b: a(x))(b=part[0], a=part[1]),
        "part[1].lin",
    ),
    "gradient": (
        Block(),
        lambda part, x: eqx.filter_grad(lambda b: b(x).sum())(part).lin.weight,
        "part.lin",
    ),
    "filter_cond": (
        Block(),
        lambda part, x: eqx.filter_cond(x[0] > 0, lambda b: b(x), lambda b: x, part),
        "part.lin",
    ),
    "carry": (
        Block(),
        lambda part, x: eqx.filter_scan(
            lambda c, _: ((c[0], c[0](c[1])), None), (part, x), jnp.arange(3)
        )[0],
        "part.lin",
    ),
    "filter_while_loop": (
        Block(),
        lambda part, x: eqx.filter_while_loop(
            lambda c: True, lambda c: (c[0], c[0](c[1])), (part, x), max_steps=2
        )[1],
        "part.lin",
    ),
    "inference_mode": (
        Block(),
        lambda part, x: nn.inference_mode(part)(x),
        "part.lin",
    ),
    "tree_at": (
        [Block(), Block()],
        lambda part, x: eqx.tree_at("lin.weight", part[1], jnp.ones((3, 3)))(x),
        "part[1].lin",
    ),
    "Shared": (
        nn.Shared(
            (nn.Embedding(3, 3, key=KEY), linear(use_bias=False)),
            where="[1].weight",
            get="[0].weight",
        ),
        lambda part, x: part()[1](x),
        "part.pytree[1]",
    ),
    "frozen in Sequential": (
        [nn.Sequential([eqx.frozen(Block())]), jnp.ones(())],
        lambda part, x: part[0](x * part[1]),
        "part[0].layers[0].lin",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_path_leads_through_what_holds_the_layer(name):
    part, run, path = PARTS[name]
    model = Net(part) if run is None else functools.partial(Net(part), run=run)
    has_arrays = any(map(eqx.is_inexact_array, jtu.tree_leaves(part)))
    for i, call in enumerate(in_each_way(model, WRONG)):
        if i != 4 or (has_arrays and run is None):
            assert place_of(call) == f"`{path}`", (name, i)


LOOPS = {
    "Stacked": (nn.Stacked(lambda key: Block("jax", key), 3, key=KEY), "part.layers"),
    "checkpointed": (
        nn.Stacked(lambda key: Block("user", key), 3, key=KEY, checkpoint=True),
        "part.layers",
    ),
    "reversible": (
        nn.ReversibleSequential([nn.ReversibleBlock(Block(), Block("user"))]),
        "part.blocks[0].g",
    ),
    "stacked reversible": (
        nn.ReversibleSequential(
            nn.Stacked(
                lambda key: nn.ReversibleBlock(Block("jax", key), Block("", key)),
                2,
                key=KEY,
            )
        ),
        "part.blocks.layers.f",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_path_leads_into_a_scan(name):
    part, path = LOOPS[name]
    x = jnp.ones(6) if "reversible" in name else X
    for call in in_each_way(Net(part), x):
        assert place_of(call) == f"`{path}`"


ENSEMBLE = eqx.filter_vmap(lambda key: Block("jax", key))(jax.random.split(KEY, 4))


@pytest.mark.parametrize(
    "run",
    [
        lambda part, x: eqx.filter_scan(lambda x, b: (b(x), None), x, part)[0],
        lambda part, x: eqx.filter_map(lambda b: b(x), part),
        lambda part, x: eqx.filter_vmap(lambda b: b(x))(part),
    ],
)
def test_row_of_a_stack_is_named_as_the_stack(run):
    assert place_of(Net(ENSEMBLE), X, run) == "`part`"
    assert place_of(eqx.filter_jit(Net(ENSEMBLE)), X, run) == "`part`"


@pytest.mark.parametrize("fails", ["jax", "user"])
def test_error_of_jax_or_of_the_user_gets_one_note(fails):
    model = Net(nn.Sequential([Block(), Block(fails)]))
    for call in in_each_way(model, X):
        error = raised(call)
        assert type(error) is {"jax": TypeError, "user": KeyError}[fails]
        assert notes_of(error) == ["This is from `part.layers[1]`."]


def test_eager_error_in_classes_of_the_user_alone_has_no_note():
    assert notes_of(raised(Net(Block("user")), X)) == []
    by_method = raised(Net(Block("user")), X, lambda part, x: part.encode(x))
    assert notes_of(by_method) == ["This is from `part`."]


class Sharing(eqx.Module):
    layers: list[nn.Linear]
    block: Block

    def __call__(self, x, run):
        return run(self, x)


def test_layer_in_two_places_is_not_named_as_one_of_them():
    layer = linear()
    block = eqx.tree_at("lin", Block(), layer)
    model = Sharing([layer, layer], block)
    assert place_of(model, WRONG, lambda m, x: m.layers[1](x)) is None
    assert place_of(model, WRONG, lambda m, x: m.block(x)) == "`block.lin`"
    model = Sharing([layer, layer], Block())
    assert place_of(model, WRONG, lambda m, x: m.layers[1](x)) == "`layers`"
    copied = lambda m, x: eqx.tree_at("weight", m.layers[1], m.block.lin.weight)(x)  # noqa: E731
    assert place_of(model, WRONG, copied) is None
    twice = nn.Sequential([nn.Linear(3, 4, key=KEY)] * 2)
    assert place_of(twice, X) == "`layers[1]`"


def new_layer(part, x):
    return linear()(x)


def new_block(part, x):
    return Block()(x)


def jitted_new_block(part, x):
    return eqx.filter_jit(lambda block, x: block(x))(Block(), x)


@pytest.mark.parametrize("part", [Block(), linear(), [Block(), linear()]])
def test_layer_that_is_made_in_the_call_is_not_named_as_its_equal(part):
    for call in in_each_way(functools.partial(Net(part), run=new_layer), WRONG)[:4]:
        assert place_of(call) is None
    for run in (new_block, jitted_new_block):
        for call in in_each_way(functools.partial(Net(part), run=run), WRONG)[:4]:
            assert place_of(call) == "`lin` of a Block"
    nested = Net(nn.Sequential([Net(part)]))
    error = raised(lambda: eqx.filter_jit(nested)(WRONG))
    if not isinstance(part, list):
        assert str(error).startswith("At `part.layers[0].part")


def test_copy_without_a_known_original_has_the_nearest_name():
    doubled = lambda part, x: jtu.tree_map(lambda a: 2 * a, part[0])(x)  # noqa: E731
    outer = Net(nn.Sequential([functools.partial(Net([Block()]), run=doubled)]))
    assert place_of(outer, WRONG) == "`lin` of a Block, in `part.layers[0]`"


def test_average_of_an_ema_has_the_names_of_the_model():
    ema = nn.EMA(mlp(3))
    assert place_of(ema.model(), WRONG) == "`layers[0]`"
    run = lambda part, x: part.model()(x)  # noqa: E731
    assert place_of(Net(ema), WRONG, run) == "`layers[0]` of an MLP"


def test_batch_norm_is_named():
    norm, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")

    def run(part, x):
        axes = (0, None)
        call = jax.vmap(part, in_axes=axes, out_axes=axes, axis_name="batch")
        return call(x, state)

    assert place_of(Net(norm), jnp.ones((2, 5)), run) == "`part`"
    assert place_of(Net(norm), jnp.ones((1, 3)), run) == "`part`"


def test_methods_of_init_do_not_count():
    class Built(eqx.Module):
        block: Block

        def __init__(self):
            self.block = Block()
            self.block(WRONG)

    assert place_of(Built) == "`lin`"
    assert place_of(lambda: Net(None)(X, lambda part, x: Built())) == "`lin` of a Block"


def test_error_that_is_raised_again_keeps_one_place():
    def again(part, x):
        try:
            return part(x)
        except eqx.ShapeError as error:
            raise eqx.ShapeError(str(error)) from error

    assert place_of(Net(Block()), WRONG, again) == "`part.lin`"
    assert (
        place_of(nn.Sequential([Net(Net(Block("user")))]), X) == "`layers[0].part.part`"
    )


class Same(eqx.Module):
    error: Any = eqx.field(static=True)

    def __call__(self, x):
        raise self.error


def test_error_object_that_is_raised_in_two_places_names_none():
    error = ValueError("always the same")
    model = nn.Sequential([Net(Same(error)), Same(error)])
    assert place_of(model, X) == "`layers[0].part`"
    for _ in range(2):
        assert place_of(model[1:], X) is None


class Slots(Exception):
    __slots__ = ("value",)


class Refuses(Exception):
    def add_note(self, note):
        raise TypeError("no notes")


class WithoutNotes(Exception):
    add_note: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    value: int = 1


@pytest.mark.parametrize("kind", [Slots, Refuses, WithoutNotes, Frozen])
def test_errors_of_any_class_pass(kind):
    error = raised(nn.Sequential([Same(kind())]), X)
    assert type(error) is kind
    assert notes_of(error) == (["This is from `layers[0]`."] if kind is Slots else [])


def test_error_is_caught_by_its_class():
    with pytest.raises(ValueError):
        Net(Block())(WRONG)
    with contextlib.suppress(eqx.ShapeError):
        eqx.filter_jit(Net(Block()))(WRONG)
    error = eqx.ShapeError("mine", 1)
    assert error.args == ("mine", 1) and str(eqx.ShapeError()) == ""


@pytest.mark.parametrize("method", ["__init__", "__flatten__"])
def test_tree_that_cannot_be_flattened_hides_no_error(method):
    class Odd:
        pass

    def flatten(node):
        raise RuntimeError("cannot be flattened")

    jtu.register_pytree_node(Odd, flatten, lambda aux, children: Odd())
    error = raised(Net([Block(), Odd()]), WRONG, lambda part, x: part[0](x))
    assert type(error) is eqx.ShapeError and "cannot" not in str(error)


def test_two_hundred_layers():
    layers = [nn.Linear(3, 3, key=KEY) for _ in range(199)]
    model = Net(nn.Sequential([*layers, linear(4)]))
    assert place_of(model, X) == "`part.layers[199]`"

    def run(part, x):
        for layer in part:
            x = layer(x)
        return x

    assert place_of(Net([*layers, linear(4)]), X, run) == "`part[199]`"


def test_frames_of_the_search_are_not_in_the_traceback():
    def shown(model, x):
        frames = traceback.extract_tb(raised(model, x).__traceback__)
        return [Path(frame.filename).name for frame in frames]

    for call in in_each_way(Net(nn.Sequential([Block("user")])), X):
        assert "_call_path.py" not in shown(lambda x: call(), X)  # noqa: B023


def test_model_and_arrays_are_freed_with_the_error():
    gc.collect()
    gc.disable()
    try:
        for fails, x in [("", WRONG), ("jax", X), ("user", X)]:
            for wrap in (lambda block: nn.Sequential([block]), eqx.filter_jit):
                model = Net(wrap(Block(fails)))
                references = [weakref.ref(leaf) for leaf in jtu.tree_leaves(model)]
                for call in (model, jax.vmap(lambda x: model(x[0]))):  # noqa: B023
                    with contextlib.suppress(Exception):
                        call(x if call is model else x[None, None])
                del model, call
                if os.environ.get("TESTS_CHECK_TYPES") != "0":
                    gc.collect()  # the type checker's frames refer to each other
                assert [r() for r in references] == [None] * len(references)
    finally:
        gc.enable()


def test_running_frame_does_not_keep_a_donated_array():
    def fit(self, model):
        with contextlib.suppress(eqx.ShapeError):
            model(WRONG)
        reference = weakref.ref(model.lin.weight)
        model = None
        return reference()

    class Empty(eqx.Module):
        pass

    for owner in (Empty(), object()):
        left = fit(owner, Block())
        assert left is None


def test_variables_of_a_running_frame_are_left_alone():
    class Owner(eqx.Module):
        def run(self, x):
            variables = locals()
            with contextlib.suppress(eqx.ShapeError):
                Block()(x)
            return variables["x"], x, self

    assert Owner().run(WRONG)[:2] == (WRONG, WRONG)


def test_threads_name_their_own_places():
    model = Net([Block() for _ in range(8)])
    found = {}

    def run(i):
        for _ in range(5):
            found[i] = place_of(model, WRONG, lambda part, x: part[i](x))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"`part[{i}].lin`" for i in range(8)}


def test_error_of_an_explicit_mesh_names_the_layer():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def put(tree, *spec):
        return jtu.tree_map(lambda a: jax.device_put(a, P(*spec[: a.ndim])), tree)

    with jax.set_mesh(mesh):
        layer = put(nn.Linear(4, 4, key=KEY), None, "data")
        x = put(jnp.ones((4, 4)), "data", "model")
        error = raised(
            jax.vmap(lambda x: Net([layer])(x, lambda part, x: part[0](x))), x
        )
        assert type(error).__name__ == "DuplicateSpecError" or "data" in str(error)
        assert notes_of(error) == ["This is from `part[0]`."]


# Deleted arrays.


@eqx.filter_jit(donate=("model",))
def step(model):
    return jtu.tree_map(lambda x: x + 1 if eqx.is_array(x) else x, model)


@pytest.mark.parametrize("call", [0, 1, 2, 3, 4])
def test_deleted_array_is_named_in_the_model(call):
    model = Pair(mlp(3), mlp(3))
    step(model)
    name = "m" if call == 4 else "Pair"
    with pytest.raises(eqx.DonationError) as caught:
        in_each_way(model, X)[call]()
    leaf = f"{name}.encoder.layers[0].weight"
    assert str(caught.value).startswith(
        f"`{leaf}` (float32[4,3]) and 11 more arrays have been deleted: `{leaf}` was "
        f"donated to `step`. Use the `{name}` that `step` returned."
    )


def test_deleted_array_is_named_in_a_method():
    class Own(eqx.Module):
        w: jax.Array

        def times(self, x):
            return x @ self.w

    model = Own(jnp.ones((3, 3)))
    step(model)
    for call in (model.times, lambda x: eqx.filter_vmap(model.times)(x[None])):
        with pytest.raises(eqx.DonationError, match=r"^`Own\.w` .* donated to `step`"):
            call(X)


def test_deleted_input_of_a_layer_is_named():
    x = jnp.ones(3)
    step(x)
    with pytest.raises(
        eqx.DonationError, match=r"^`x` \(float32\[3\]\) has been deleted"
    ):
        linear()(x)


# A law: the place is the true one, or less is said.


class Failed(Exception):
    pass


class Node(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    children: Any
    tag: int = eqx.field(static=True)

    def __call__(self, x, plan):
        if not plan:
            raise Failed
        (index, how), *rest = plan
        return how(children_of(self.children)[index][1], x, tuple(rest))


class OtherNode(Node):
    def __call__(this, x, plan):  # pyright: ignore[reportSelfClsParameterName]
        return Node.__call__(this, x, plan)


def children_of(tree):
    return jtu.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Node))


def call(node, x, plan):
    return node(x, plan)


def with_two(node, x, plan):
    return eqx.filter_jit(lambda a, b, x: b(x, plan))(node, node, x)


def in_carry(node, x, plan):
    step = lambda c, _: ((c[0], c[0](c[1], plan)), None)  # noqa: E731
    return eqx.filter_scan(step, (node, x), jnp.arange(2))[0][1]


def made_again(node, x, plan):
    return jtu.tree_map(jnp.array, node)(x, plan)


def with_other_weight(node, x, plan):
    return eqx.tree_at("weight", node, 2 * node.weight)(x, plan)


EXACT = [
    call,
    lambda node, x, plan: jax.vmap(lambda x: node(x, plan))(x[None])[0],
    lambda node, x, plan: eqx.filter_jit(call)(node, x, plan),
    lambda node, x, plan: eqx.filter_checkpoint(call)(node, x, plan),
    lambda node, x, plan: eqx.filter_cond(x[0] > 0, call, call, node, x, plan),
    lambda node, x, plan: eqx.filter_grad(lambda n: n(x, plan).sum())(node).weight,
    in_carry,
]
NOT_EXACT = [
    with_two,
    lambda node, x, plan: jax.jit(lambda n: n(x, plan))(node),
    lambda node, x, plan: nn.inference_mode(node)(x, plan),
    with_other_weight,
    made_again,
]


@st.composite
def nodes(draw, depth, arrays):
    def array():
        if arrays and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(arrays))  # a tied weight
        arrays.append(jnp.full(2, float(len(arrays))))
        return arrays[-1]

    kind = draw(st.sampled_from([Node, OtherNode]))
    number = draw(st.integers(1, 3)) if depth else 0
    found = [draw(nodes(depth - 1, arrays)) for _ in range(number)]
    if found and draw(st.integers(0, 5)) == 0:
        found.append(found[0])  # the same node twice
    container = draw(
        st.sampled_from(
            [
                lambda xs: xs,
                tuple,
                lambda xs: {f"k{i}": x for i, x in enumerate(xs)},
                lambda xs: {"a": xs[:1], "b": tuple(xs[1:])},
            ]
        )
    )
    return kind(array(), array(), container(found), draw(st.integers(0, 1)))


@st.composite
def calls(draw):
    """A model, the way of calls from it to a node, its path, and if that is told."""
    model = node = draw(nodes(draw(st.integers(1, 3)), []))
    path, plan, is_exact = (), [], True
    while children := children_of(node.children):
        index = draw(st.integers(0, len(children) - 1))
        how = draw(st.sampled_from(EXACT * 3 + NOT_EXACT))
        is_exact &= how in EXACT
        steps, node = children[index]
        is_exact &= sum(x is node for _, x in children_of(model.children)) <= 1
        is_exact &= sum(x is node for _, x in children) == 1
        path = (*path, jtu.GetAttrKey("children"), *steps)
        plan.append((index, how))
        if draw(st.integers(0, 3)) == 0:
            break
    return model, tuple(plan), jtu.keystr(path).removeprefix("."), is_exact


@given(calls(), st.integers(0, 4))
@settings(deadline=None)
def test_place_is_true_or_says_less(case, way):
    model, plan, path, is_exact = case
    x = jnp.ones(2)
    eager = in_each_way(lambda x: model(x, plan), x)[:4]
    place = place_of([*eager, lambda: eqx.filter_jit(model)(x, plan)][way])
    if is_exact and way > 1:
        assert place == f"`{path}`"
    *inner, outermost = (place or "``").split(", in ")
    if " of a" not in outermost:
        assert path.startswith(outermost.strip("`"))
        assert not inner or path != outermost.strip("`")
    for part in [*inner, outermost]:
        found = re.fullmatch(r"`(.*)`( of an? \w+)?", part)
        assert found is not None and found[1] in path
