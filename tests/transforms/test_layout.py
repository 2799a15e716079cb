"""`Layout`: arrays are kept as its rules say, gathered for use, and kept again; the numbers
are those of one device."""

import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from layout_net import (
    BATCH,
    DEPTH,
    RULES,
    WIDTH,
    Block,
    Net,
    layout_of,
    loss,
    make,
    optimiser,
    rows,
    train,
)
from processes import finish, free_port, run_together, start

import equinox_like as eqx
from equinox_like import nn
from equinox_like._transforms import mesh_layout

MESHES = ["data=4,model=1", "data=2,model=2", "data=1,model=4"]
each_mesh = pytest.mark.parametrize("mesh", MESHES)


def arrays_of(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def assert_close(a, b, tolerance=1e-6):
    for x, y in zip(arrays_of(a), arrays_of(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance)


def explicit(mesh, kind):
    sizes = mesh_layout._sizes(mesh)
    kinds = (kind,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds)


def all_kinds(mesh):
    return [mesh, explicit(mesh, AxisType.Auto), explicit(mesh, AxisType.Explicit)]


@each_mesh
@pytest.mark.parametrize("kind", range(3), ids=["mixed", "auto", "explicit"])
def test_training_is_that_of_one_device_and_keeps_the_layout(mesh, kind) -> None:
    layout = layout_of(all_kinds(mesh)[kind])
    key = jax.random.key(0)
    expected = eqx.filter_jit(make)(key)
    held = layout.init(make, key)
    assert_close(held, expected)
    before = [x.sharding for x in arrays_of(held)]
    step = layout.jit(train, donate=("model", "state"))
    plain = eqx.filter_jit(train)
    for i in range(3):
        *expected, value = plain(*expected, *rows(i))
        *held, found = step(*held, *layout.batch(rows(i)))
        np.testing.assert_allclose(found, value, rtol=1e-5)
    assert_close(held, expected, 1e-5)
    for sharding, x in zip(before, arrays_of(held), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert len(step._program.traces()) == 1


def test_state_of_the_optimiser_is_split_as_its_parameters() -> None:
    layout = layout_of()
    model, state = layout.init(make, jax.random.key(0))
    weight = model.blocks.layers.first.weight
    assert weight.sharding.spec == P(None, "model", "data")
    assert state[0].mu.blocks.layers.first.weight.sharding == weight.sharding
    assert model.head.weight.sharding.spec == P(None, "data")
    assert state[0].nu.head.weight.sharding.spec == P(None, "data")
    assert state[0].count.sharding.is_fully_replicated


def test_state_with_fewer_axes_follows_too() -> None:
    adafactor = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    shapes = eqx.filter_eval_shape(make, jax.random.key(0), adafactor)
    where = layout_of().shardings(shapes)
    factored = next(x for x in where[1] if hasattr(x, "v_row"))
    kept = factored.v_row.head.weight, factored.v_col.head.weight
    assert {len([p for p in x.spec if p]) for x in kept} == {0, 1}


def test_a_train_state_may_be_one_module() -> None:
    class Train(eqx.Module):
        model: Net
        state: object
        step: jax.Array

    def make_train(key):
        return Train(*make(key), step=jnp.array(0))

    layout = layout_of()
    held = layout.init(make_train, jax.random.key(0))
    assert held.model.head.weight.sharding.spec == P(None, "data")
    assert held.state[0].mu.head.weight.sharding.spec == P(None, "data")

    @layout.jit(donate="all-except-first")
    def step(x, y, held):
        model, state, value = train(held.model, held.state, x, y)
        return Train(model, state, held.step + 1), value

    new, _ = step(*layout.batch(rows()), held)
    assert new.state[0].mu.head.weight.sharding.spec == P(None, "data")
    assert new.step == 1


def sgd_like(optimiser):
    """A step for any parameters, whose gradients are these themselves."""

    def step(params, state, x):
        updates, state = optimiser.update(params, state, params)
        return optax.apply_updates(params, updates), state, 2 * x

    return step


@pytest.mark.parametrize("kind", ["dictionary", "list"])
def test_parameters_that_are_no_module(kind) -> None:
    """A dictionary is found by its keys; of a list, `follow` says where it is."""
    is_list = kind == "list"
    name, w, b = ("[0]", 0, 1) if is_list else ("['w']", "w", "b")
    layout = eqx.Layout("data=-1", [(name, "out .")], params={"out": "data"})

    def make_params():
        params = {w: jnp.ones((8, 2)), b: jnp.ones(2)}
        params = [params[0], params[1]] if is_list else params
        return params, optimiser.init(params)

    of_made, of_step = None, None
    if is_list:
        of_made, of_step = (lambda made: made[0]), (lambda params, *_: params)
    params, state = layout.init(make_params, follow=of_made)
    step = layout.jit(sgd_like(optimiser), follow=of_step)
    for _ in range(2):
        for held in params, state[0].mu:
            assert held[w].sharding.spec == P("data", None)
            assert held[b].sharding.is_fully_replicated
        params, state, _ = step(params, state, layout.batch(jnp.ones((8, 3))))
    assert len(step._program.traces()) == 1


def test_rules_serve_an_optimiser_without_copies_of_the_model() -> None:
    rules = [("layers[0].weight", "hidden .")]
    layout = eqx.Layout("data=-1", rules, params={"hidden": "data"})
    for rule in optax.sgd(0.1), optax.adam(0.1):
        model, _ = layout.init(make_mlp, rule)
        assert model.layers[0].weight.sharding.spec == P("data", None)


def test_model_is_found_beside_what_is_like_a_part_of_it() -> None:
    layout = eqx.Layout("data=-1", [("layers[0].weight", P("data"))])

    def make_with_head(key):
        return nn.Linear(4, 4, key=key), *make_mlp(optimiser)

    _, model, state = layout.init(make_with_head, jax.random.key(0))
    assert model.layers[0].weight.sharding.spec == P("data")
    assert state[0].mu.layers[0].weight.sharding.spec == P("data")


def make_mlp(optimiser):
    model = nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    return model, optimiser.init(eqx.filter(model, eqx.trainable))


def test_several_models_are_followed_at_once() -> None:
    """Of a generator and a discriminator the same path may have other shapes."""
    layout = eqx.Layout("data=-1", [("**.layers[0].weight", P("data"))])

    def make_both():
        models = {"of": nn.MLP(2, 6, 8, 1, key=jax.random.key(0))}
        models["from"] = nn.MLP(6, 1, 16, 1, key=jax.random.key(1))
        state = optax.adafactor(1e-3, min_dim_size_to_factor=2).init(
            eqx.filter(models, eqx.trainable)
        )
        return models, state

    models, state = layout.init(make_both)
    factored = next(x for x in state if hasattr(x, "v_row"))
    for name, size in ("of", 8), ("from", 16):
        assert models[name].layers[0].weight.sharding.spec == P("data")
        means = factored.v_row[name], factored.v_col[name]
        (split,) = (x for x in (m.layers[0].weight for m in means) if x.size == size)
        assert split.sharding.spec == P("data")


def test_outputs_that_are_not_in_the_layout_stay_as_they_are() -> None:
    layout = layout_of(rules=[*RULES, ("**", P())])
    batch = layout.batch((np.ones((BATCH, 4)),))
    model = layout.init(Net, jax.random.key(0))
    (y,) = layout.jit(lambda model, batch: (2 * batch[0],))(model, batch)
    assert y.sharding.is_equivalent_to(batch[0].sharding, 2)


def test_a_spec_may_name_an_axis_of_one_device() -> None:
    layout = eqx.Layout("data=1,model=-1", [("**.weight", P("model", "data"))])
    optimiser = optax.adam(1e-2)
    model, state = layout.init(make_mlp, optimiser)
    step = layout.jit(sgd_like(optimiser))
    params = eqx.filter(model, eqx.trainable)
    for _ in range(2):
        params, state, _ = step(params, state, layout.batch(jnp.ones((8, 3))))
    assert params.layers[0].weight.sharding.shard_shape((8, 4)) == (2, 4)
    assert len(step._program.traces()) == 1


def test_a_mesh_may_have_no_axis_for_the_batch() -> None:
    rules = [
        ("**.layers[0].weight", P("model")),
        ("**.layers[1].weight", P(None, "model")),
    ]
    layout = eqx.Layout("model=-1", rules, compute={"batch": None})
    model = layout.init(nn.MLP, 4, 4, 8, 1, key=jax.random.key(0))
    x = layout.batch(np.ones((3, 4), "float32"))
    assert x.sharding.is_fully_replicated
    y = layout.jit(lambda model, x: jax.vmap(eqx.gather(model))(x))(model, x)
    plain = nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    assert_close(y, jax.vmap(plain)(x), 1e-5)


def test_a_rule_for_the_state_alone_holds_in_a_step_too() -> None:
    """It is what the error says about state whose shape does not tell how it follows."""

    def init(params):
        return optax.EmaState(jnp.array(0), {"w": jnp.ones((4, 4, 3))})

    optimiser = optax.GradientTransformation(init, lambda g, state, _: (g, state))
    rules = [("['w']", P("data"))]

    def make_params():
        params = {"w": jnp.ones((4, 4))}
        return params, optimiser.init(params)

    text = error_of(eqx.Layout("data=-1", rules).init, make_params)
    rule = eval(
        text.split("To replicate it: `")[1].removesuffix("`."), {"PartitionSpec": P}
    )
    layout = eqx.Layout("data=-1", [rule, *rules])
    params, state = layout.init(make_params)
    step = layout.jit(sgd_like(optimiser))
    params, state, _ = step(params, state, layout.batch(jnp.ones((8, 3))))
    assert params["w"].sharding.spec == P("data", None)
    assert state.ema["w"].sharding.is_fully_replicated


def test_only_one_block_is_gathered_at_a_time() -> None:
    """The text of the program: all-gathers inside the loop, none of a whole stack."""
    layout = layout_of("data=4,model=1")
    held = layout.init(make, jax.random.key(0))
    step = layout.jit(train)
    text = step.lower(*held, *layout.batch(rows())).compile().as_text()
    gathered = re.findall(r"= \w+\[([0-9,]+)\]\S* all-gather", text)
    shapes = {tuple(int(n) for n in found.split(",") if n != "1") for found in gathered}
    assert (4 * WIDTH, WIDTH) in shapes
    assert not any(shape[:1] == (DEPTH,) and len(shape) == 3 for shape in shapes)
    assert not any(BATCH in shape for shape in shapes)


@pytest.mark.parametrize("checkpoint", [None, True, "dots_saveable"])
def test_gathered_weights_are_not_kept_for_the_backward_pass(checkpoint) -> None:
    layout = layout_of("data=4,model=1")

    def forward(model, x):
        return loss(model, x, x[:, :2])

    model = layout.init(Net, jax.random.key(0), checkpoint=checkpoint)
    x, _ = layout.batch(rows())

    @layout.jit
    def residuals(model, x):
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        _, pullback = jax.vjp(lambda p: forward(eqx.combine(p, rest), x), params)
        return pullback

    kept = [x for x in arrays_of(residuals(model, x)) if x.shape[:1] == (DEPTH,)]
    weights = [x for x in kept if x.shape == (DEPTH, 4 * WIDTH, WIDTH)]
    assert weights
    for weight in weights:
        assert weight.sharding.shard_shape(weight.shape)[2] == WIDTH // 4


def test_nothing_happens_without_a_layout() -> None:
    model, x = Net(jax.random.key(0)), jnp.ones(3)
    assert eqx.gather(model) is model
    assert eqx.constrain(x, "no such names") is x


def test_gather_leaves_a_stacked_alone() -> None:
    layout = layout_of()
    seen = []

    @layout.jit
    def look(model):
        gathered = eqx.gather(model)
        seen.append(
            gathered.blocks.layers.first.weight is model.blocks.layers.first.weight
        )
        return gathered.head.weight

    model = layout.init(Net, jax.random.key(0))
    assert look(model).sharding.is_fully_replicated
    assert seen == [True]


def test_stacked_in_stacked_has_two_axes_of_depth() -> None:
    def pair(key):
        return nn.Stacked(Block, 2, key=key)

    def make_nested(key):
        return nn.Sequential([nn.Stacked(pair, 3, key=key)])

    layout = layout_of(rules=RULES[:3])
    model = layout.init(make_nested, jax.random.key(0))
    weight = model.layers[0].layers.layers.first.weight
    assert weight.sharding.spec == P(None, None, "model", "data")

    @layout.jit
    def apply(model, x):
        return jax.vmap(eqx.gather(model))(x)

    x, _ = rows()
    plain = make_nested(jax.random.key(0))
    assert_close(apply(model, layout.batch(x)), jax.vmap(plain)(x), 1e-5)


def test_activations_are_split_by_names() -> None:
    layout = layout_of()

    @layout.jit
    def double(x):
        return eqx.constrain(2 * x, "batch hidden")

    x, _ = rows()
    out = double(layout.batch(x))
    assert out.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(layout.mesh, P("data", "model")), 2
    )


def test_batches_hold_numbers_keys_and_anything_else() -> None:
    layout = layout_of()
    keys = jax.random.split(jax.random.key(0), BATCH)
    x, _ = rows()
    batch = layout.batch({"x": x, "keys": keys, "name": "train"})
    assert batch["name"] == "train"
    assert (jax.random.key_data(batch["keys"]) == jax.random.key_data(keys)).all()
    for array in batch["x"], batch["keys"]:
        assert array.sharding.shard_shape(array.shape)[0] == BATCH // 2


def test_report_counts_what_a_device_holds() -> None:
    layout = layout_of(rules=[*RULES, ("**.missing", "hidden")])
    report = layout.report(Net(jax.random.key(0)))
    whole = (
        DEPTH * (2 * 4 * WIDTH * WIDTH) // 4 + DEPTH * 4 * WIDTH // 2 + 2 * WIDTH // 2
    )
    assert report.bytes_of_each_device == 4 * whole
    assert report.unused == ["**.missing"]
    text = str(report)
    assert "blocks.layers.first.weight" in text and f"{4 * whole:,} bytes" in text


def error_of(function, *args, **kwargs):
    with pytest.raises(ValueError) as info:
        function(*args, **kwargs)
    return str(info.value)


class TestErrors:
    def test_axis_that_the_mesh_lacks(self) -> None:
        text = error_of(layout_of, params={"hidden": "modle"})
        assert "`params['hidden']` is 'modle'" in text and "'data', 'model'" in text

    def test_unknown_name(self) -> None:
        text = error_of(layout_of, rules=[("**.weight", "hiden embed")])
        assert "'hiden'" in text and "Did you mean `hidden`?" in text

    def test_mesh_that_is_no_mesh(self) -> None:
        assert "'data=2,model=4'" in error_of(eqx.Layout, "data,model")
        assert "3" in error_of(eqx.Layout, "data=3")

    def test_wrong_number_of_names(self) -> None:
        layout = layout_of(rules=[("**.first.weight", "hidden")])
        text = error_of(layout.shardings, Net(jax.random.key(0)))
        assert "`blocks.layers.first.weight`" in text
        assert "'depth hidden'" in text and "2 for 3 dimensions" in text

    def test_rule_that_matches_nothing(self) -> None:
        layout = layout_of(rules=[("**.frist.weight", "hidden embed")])
        text = error_of(layout.init, Net, jax.random.key(0))
        assert "'**.frist.weight'" in text and "blocks.layers.first.weight" in text

    def test_size_that_is_not_divisible(self) -> None:
        layout = layout_of(
            rules=[("head.weight", "hidden .")], compute={"batch": "data"}
        )
        layout = layout_of(rules=[("weight", "hidden .")])
        text = error_of(layout.shardings, nn.Linear(4, 3, key=jax.random.key(0)))
        assert "`weight`" in text and "size 3" in text

    def test_axis_used_twice(self) -> None:
        layout = layout_of(rules=[("weight", "hidden hidden")])
        text = error_of(layout.shardings, nn.Linear(4, 4, key=jax.random.key(0)))
        assert "'model' twice" in text and "`weight`" in text

    def test_batch_that_is_not_divisible(self) -> None:
        text = error_of(layout_of().batch, {"x": np.ones((3, 2))})
        assert "`rows['x']`" in text and "'data'" in text

    def test_pattern_that_does_not_reach_into_a_stacked(self) -> None:
        layout = layout_of(rules=[("blocks.layers.first.weight", "hidden embed")])
        text = error_of(layout.shardings, Net(jax.random.key(0)))
        assert "`blocks.layers.first.weight`" in text and "'**.'" in text

    def test_constrain_with_unknown_names(self) -> None:
        layout = layout_of()
        x = jnp.ones((4, 4))
        split = layout.jit(lambda x, names: eqx.constrain(x, names))
        assert "'sequence'" in error_of(split, x, "batch sequence")
        assert "`x`" in error_of(split, x, "batch")

    def test_forgotten_gather_is_an_error(self) -> None:
        class Plain(eqx.Module):
            weight: jax.Array

            def __call__(self, x):
                return jax.nn.relu(x @ self.weight) @ self.weight.T

        layout = layout_of(rules=[("weight", "embed hidden")])
        model = layout.init(lambda: Plain(jnp.ones((8, 4))))
        x = layout.batch(np.ones((4, 8), "float32"))
        apply = layout.jit(lambda model, x: jax.vmap(model)(x))
        with pytest.raises(Exception, match="data") as info:
            apply(model, x)
        assert type(info.value).__name__ == "ShardingTypeError"
        gathered = layout.jit(lambda model, x: jax.vmap(eqx.gather(model))(x))
        assert_close(gathered(model, x), 32 * x)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_one_model(processes) -> None:
    script = Path(__file__).parents[1] / "processes_layout.py"
    printed = run_together(script, processes=processes, devices=2)
    losses = [text.splitlines()[-1].split() for text in printed]
    model, state = eqx.filter_jit(make)(jax.random.key(0))
    for i, found in enumerate(zip(*losses, strict=True)):
        model, state, value = eqx.filter_jit(train)(model, state, *rows(i))
        np.testing.assert_allclose(np.float32(found), value, rtol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_training_that_is_killed_while_it_saves_resumes_on_other_processes(
    before, after, tmp_path
) -> None:
    """The last step that was saved is trained on, on another mesh."""
    pytest.importorskip("orbax.checkpoint")
    script = Path(__file__).parents[1] / "killed_layout.py"
    address, mesh = f"127.0.0.1:{free_port()}", "data=-1,model=2"
    killed = [
        start(script, address, before, i, tmp_path / "steps", mesh, devices=2)
        for i in range(before)
    ]
    try:
        is_before = "written, not committed\n".__ne__
        lines = list(itertools.takewhile(is_before, killed[0].stdout))
        assert killed[0].poll() is None, killed[0].communicate()
    finally:
        for process in killed:
            process.kill()  # by SIGKILL
            process.communicate()

    options = {"processes": after, "devices": 2}
    printed = run_together(script, tmp_path / "steps", "data=-1,model=1", **options)
    losses, *resumed = map(losses_in, [lines, *map(str.splitlines, printed)])
    assert len(losses) == 3 and resumed == resumed[:1] * after
    model, state = eqx.filter_jit(make)(jax.random.key(0))
    for i, found in enumerate([*losses[:2], *resumed[0]]):
        model, state, value = eqx.filter_jit(train)(model, state, *rows(i))
        np.testing.assert_allclose(found, value, rtol=1e-5)


def losses_in(lines):
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]


LARGE = "data=2,model=4"


@pytest.mark.parametrize(
    ("batch", "cases"),
    [
        (56, ["data=8,model=1", "data=4,model=2", LARGE, "data=1,model=8"]),
        (8, [LARGE, f"{LARGE}:Auto", f"{LARGE}:Explicit"]),
    ],
)
def test_devices_send_each_other_one_block_and_no_batch(batch, cases) -> None:
    """On eight devices, by the text of the program; the numbers are those of one device."""
    script = Path(__file__).parents[1] / "layout_gpt.py"
    lines = finish(start(script, batch, *cases, devices=8), timeout=900).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == len(cases)
    for each in found:
        data, model = each["mesh"]
        shapes = [shape for kind in each["collectives"].values() for shape in kind]
        gathered = each["collectives"].get("all-gather", [])
        assert (data == 1) == (gathered == [])
        # Weights of one block, of which a device has its part of the axis `model`.
        assert all(len(shape) == 2 and 64 in shape for shape in gathered)
        if data > 1:
            assert not any(shape[:1] == [batch] for shape in shapes)
        # The largest moment is split over both axes.
        assert each["moment"] == [3, 320 // model, 64 // data]
        assert each["difference"] < 1e-5 and each["traces"] == 1


def test_a_step_needs_no_more_memory_than_one_written_by_hand() -> None:
    """The bytes of temporary arrays that XLA says for a GPT of 12 million parameters."""
    script = Path(__file__).parents[1] / "layout_memory.py"
    cases = [f"{mesh}:{size}" for mesh in (LARGE, "data=8,model=1") for size in (8, 64)]
    lines = finish(start(script, *cases, devices=8), timeout=900).splitlines()
    found = [tuple(map(int, line.split())) for line in lines]
    assert len(found) == 2 * len(cases)
    for (held, needed), (held_by_hand, needed_by_hand) in zip(
        found[::2], found[1::2], strict=True
    ):
        assert held == pytest.approx(held_by_hand, rel=0.01)
        assert needed <= 1.08 * needed_by_hand
