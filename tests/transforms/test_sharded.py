"""`Layout.shardings` and `Layout.init`: what rules say, what follows, and what is built."""

import contextlib
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from processes import finish, run_together, start

import equinox_like as eqx
from equinox_like import nn

RULES = [("**.weight", P("model")), ("**", P())]


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


@pytest.fixture(scope="module")
def mesh():
    return mesh_of()


class Net(eqx.Module):
    linear: nn.Linear
    norm: nn.BatchNorm
    table: object
    name: str

    def __init__(self, size, key):
        self.linear = nn.Linear(size, size, key=key)
        self.norm = nn.BatchNorm(size, "batch", mode="batch")
        self.table = np.arange(4)
        self.name = "net"


def assert_same(a, b):
    """The same structure, shardings and values."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        if isinstance(y, jax.Array):
            assert x.sharding == y.sharding and x.dtype == y.dtype
            np.testing.assert_array_equal(*map(np.asarray, (x, y)))
        else:
            assert x == y


# Rules


def test_the_first_rule_that_matches_counts(mesh):
    model = nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    rules = [
        ("layers[0].weight", P(("data", "model"))),
        ("**.weight", P(None, "model")),
        ("**", P()),
    ]
    found = eqx.Layout(mesh, rules).shardings(model)
    assert found.layers[0].weight == NamedSharding(mesh, P(("data", "model")))
    assert found.layers[1].weight.spec == P(None, "model")
    assert found.layers[0].bias.spec == P() and found.activation is None


def test_structs_numpy_arrays_and_keys_have_shardings_and_numbers_have_none(mesh):
    tree = [jax.ShapeDtypeStruct((2,), "int32"), np.ones(2), jax.random.key(0), 3, None]
    found = eqx.Layout(mesh, [("**", P())]).shardings(tree)
    assert found == [NamedSharding(mesh, P())] * 3 + [None, None]


def test_they_are_what_filter_shard_and_filter_jit_take(mesh):
    model = nn.Linear(4, 4, key=jax.random.key(0))
    found = eqx.Layout(mesh, RULES).shardings(model)
    sharded = eqx.filter_shard(model, found)
    assert sharded.weight.sharding.spec == P("model")
    step = eqx.filter_jit(
        lambda m: jax.tree.map(jnp.negative, m),
        in_shardings=(found,),
        out_shardings=found,
    )
    assert step(sharded).weight.sharding == found.weight


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("other"), "`rules['**']` is P('other',), but the mesh has no axis 'other'."),
        (
            P("model", "model"),
            "`layers[0].weight` (float32[6,3]), which names the axis 'model' tw",
        ),
        (
            P(None, "model"),
            "`layers[0].weight` (float32[6,3]), whose dimension 1 has size 3",
        ),
        (
            P("data", None, None),
            "`layers[0].weight` (float32[6,3]), which has 2 dimensions.",
        ),
    ],
)
def test_errors_name_the_path(mesh, spec, message):
    rules = [("**.bias", P()), ("**", spec)]

    def make():
        return nn.MLP(3, 6, 6, 1, key=jax.random.key(0))

    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.Layout(mesh, rules).shardings(make())
    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.Layout(mesh, rules).init(make)


@pytest.mark.parametrize("rule", ["**", ("**", None), (P(), "**"), ("**", P(), P())])
@pytest.mark.usefixtures("without_type_checks")
def test_a_rule_is_a_pair_of_a_pattern_and_a_spec(mesh, rule):
    with pytest.raises(TypeError, match="Each rule must be a pair"):
        eqx.Layout(mesh, [rule]).shardings(jnp.ones(2))


class Weights(eqx.Module):
    weight: np.ndarray = eqx.field(default_factory=lambda: np.ones((4, 2), "f4"))
    bias: np.ndarray = eqx.field(default_factory=lambda: np.ones(4, "f4"))


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("**.layers.*.weight", "`['layers'][*].weight`"),
        ("['layer'][*].weight", "`['layers'][*].weight`"),
        ("**.wieght", "`**.weight`"),
        ("**.something_else", None),
    ],
)
def test_rule_that_matches_nothing_is_an_error_with_a_pattern_like_it(
    mesh, pattern, near
):
    make = lambda: {"layers": [Weights()] * 3}  # noqa: E731
    rules = [(pattern, P("model")), ("**.bias", P("data")), ("**", P())]
    text = re.escape(f"The rule for {pattern!r} matches nothing. The paths are `['lay")
    text += r".* and 1 more\." + (
        rf" Did you mean {re.escape(near)}\?$" if near else "$"
    )
    layout = eqx.Layout(mesh, rules)
    with pytest.raises(ValueError, match=text):
        layout.shardings(make())
    with pytest.raises(ValueError, match=text):
        layout.init(make)
    assert layout.report(make()).unused == [pattern]


def test_rules_for_parameters_serve_a_state_without_arrays_or_with_follow(mesh):
    params = {"weight": jnp.ones((4, 2))}
    layout = eqx.Layout(mesh, [("**['weight']", P("model"))])
    assert layout.shardings(optax.sgd(0.1).init(params)) is not None
    state = optax.sgd(optax.constant_schedule(0.1)).init(params)
    with pytest.raises(ValueError, match="matches nothing"):
        layout.shardings(state)
    where = layout.shardings(state, follow=params)
    assert jax.tree.leaves(where)[0].spec == P()


# The state of an optimiser


class Layers(eqx.Module):
    wide: nn.Linear
    square: nn.Linear
    kernels: jax.Array

    def __init__(self, key):
        self.wide = nn.Linear(128, 256, key=key)
        self.square = nn.Linear(128, 128, key=key)
        self.kernels = jax.random.normal(key, (128, 2, 128))


OF_LAYERS = [
    ("wide.weight", P("model", "data")),
    ("*.bias", P("model")),
    ("square.*", P(None, "model")),
    ("kernels", P("data", None, "model")),
    ("**", P()),
]


def by_path(tree):
    items = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in items}


def test_means_over_an_axis_follow_the_other_axes_of_their_parameter(mesh):
    params = Layers(jax.random.key(0))
    optimiser = optax.adafactor(1e-3, momentum=0.9)
    state = jax.eval_shape(optimiser.init, params)
    found = by_path(eqx.Layout(mesh, OF_LAYERS).shardings(state, follow=params))
    found = {path: x.spec for path, x in found.items()}
    rows, columns = "[0].v_row", "[0].v_col"
    assert found[f"{rows}.wide.weight"] == P("data")  # of 256 x 128
    assert found[f"{columns}.wide.weight"] == P("model")
    assert found[f"{rows}.square.weight"] == P(None)  # of 128 x 128
    assert found[f"{columns}.square.weight"] == P("model")
    assert found[f"{rows}.kernels"] == P("data", None)  # of 128 x 2 x 128
    assert found[f"{columns}.kernels"] == P(None, "model")
    assert found["[0].v.wide.weight"] == P() and found["[0].count"] == P()
    assert found["[0].v.wide.bias"] == found["[4].ema.wide.bias"] == P("model")
    assert found["[4].ema.kernels"] == P("data", None, "model")


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (128, 128), (2, 128, 128)])
def test_the_specs_of_adafactor_are_those_of_its_means(mesh, shape):
    # Sharded parameters have means that the compiler splits in the same way.
    spec = P(*[None] * (len(shape) - 2), "data", "model")
    params = {"w": jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))}
    init = optax.adafactor(1e-3).init
    rules = [("['w']", spec), ("**", P())]
    where = eqx.Layout(mesh, rules).shardings(init(params), follow=params)

    def means(params):
        squares = params["w"] ** 2
        *_, d1, d0 = np.argsort(shape, kind="stable")
        return squares.mean(d0), squares.mean(d1)

    v_row, v_col = jax.jit(means)(params)
    assert v_row.shape == init(params)[0].v_row["w"].shape
    assert where[0].v_row["w"].is_equivalent_to(v_row.sharding, v_row.ndim)
    assert where[0].v_col["w"].is_equivalent_to(v_col.sharding, v_col.ndim)


def test_a_memory_of_parameters_is_not_split_along_its_first_axis(mesh):
    params = Layers(jax.random.key(0))
    state = jax.eval_shape(optax.lbfgs(memory_size=3).init, params)
    where = eqx.Layout(mesh, OF_LAYERS).shardings(state, follow=params)
    memory = where[0].diff_params_memory
    assert memory.wide.weight.spec == P(None, "model", "data")
    assert memory.wide.bias.spec == P(None, "model")
    assert memory.kernels.spec == P(None, "data", None, "model")
    assert where[0].params.square.weight.spec == P(None, "model")
    assert where[0].weights_memory.spec == P()


def test_a_list_of_one_array_for_each_axis_follows_these_axes(mesh):
    params = Layers(jax.random.key(0))
    state = jax.eval_shape(optax.sm3(1e-3).init, params)
    where = eqx.Layout(mesh, OF_LAYERS).shardings(state, follow=params)[0]
    assert [x.spec for x in where.mu.wide.weight] == [P("model"), P("data")]
    assert [x.spec for x in where.mu.square.weight] == [P(None), P("model")]
    assert [x.spec for x in where.mu.kernels] == [P("data"), P(None), P("model")]
    assert where.nu.kernels.spec == P("data", None, "model")

    # The statistics of Shampoo: a matrix for each axis.
    def squares(x):
        return [jnp.eye(size) for size in x.shape]

    state = jax.tree.map(squares, params), jax.tree.map(jnp.zeros_like, params)
    where, momentum = eqx.Layout(mesh, OF_LAYERS).shardings(state, follow=params)
    assert [x.spec for x in where.wide.weight] == [P("model", None), P("data", None)]
    assert [x.spec for x in where.square.weight] == [P(None, None), P("model", None)]
    assert [x.spec for x in where.wide.bias] == [P("model", None)]
    assert momentum.wide.weight.spec == P("model", "data")


def test_other_arrays_in_place_of_a_parameter_need_a_rule(mesh):
    params = {"w": jnp.ones((4, 8)), "mu": jnp.ones(4)}
    rules = [("['w']", P("model", "data")), ("**", P())]
    # The path ends with that of `w`, and begins with that of `mu`.
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"mu": zeros, "low": {"w": {"left": jnp.ones((4, 2))}}}
    with pytest.raises(
        ValueError, match=r"how `\['low'\]\['w'\]\['left'\]` \(float32"
    ) as e:
        eqx.Layout(mesh, rules).shardings(state, follow=params)
    code = str(e.value).split("To replicate it: `")[1].removesuffix("`.")
    rules = [eval(code, {"PartitionSpec": P}), *rules]
    where = eqx.Layout(mesh, rules).shardings(state, follow=params)
    assert where["low"]["w"]["left"].spec == P()
    assert where["mu"]["w"].spec == P("model", "data")


@pytest.mark.parametrize("kind", [list, tuple])
def test_attribute_of_an_optimiser_follows_no_parameter_of_a_list(kind, mesh):
    # `[0]` is the path of a parameter, and that of a part of the state.
    params = kind([jnp.ones((4, 8)), jnp.ones(8)])
    rules = [("[0]", P("data", "model")), ("[1]", P("model")), ("**", P())]
    state = jax.eval_shape(optax.lbfgs(memory_size=3).init, params)
    where = eqx.Layout(mesh, rules).shardings(state, follow=params)[0]
    assert where.weights_memory.spec == where.count.spec == P()
    assert where.diff_params_memory[0].spec == P(None, "data", "model")
    assert where.params[1].spec == P("model")


@pytest.mark.parametrize("name", ["adafactor", "lbfgs", "sm3"])
def test_factored_state_is_built_and_updated_in_its_shards(mesh, name):
    optimiser = {
        "adafactor": lambda: optax.adafactor(1e-3),
        "lbfgs": lambda: optax.lbfgs(1e-3, memory_size=3, linesearch=None),
        "sm3": lambda: optax.sm3(1e-3),
    }[name]()

    def make(key):
        params = Layers(key)
        return params, optimiser.init(params)

    rules = [(f"**.{pattern}".replace("**.**", "**"), x) for pattern, x in OF_LAYERS]
    params, state = eqx.Layout(mesh, rules).init(
        make, jax.random.key(0), follow=lambda out: out[0]
    )
    plain_params, plain_state = make(jax.random.key(0))
    where = eqx.Layout(mesh, OF_LAYERS).shardings(plain_state, follow=plain_params)
    assert_same(state, eqx.filter_shard(plain_state, where))
    update = eqx.filter_jit(optimiser.update, out_shardings=(None, where))
    updated = update(params, state, params)  # as if gradients
    plain = optimiser.update(plain_params, plain_state, plain_params)
    for x, y in zip(*map(jax.tree.leaves, (updated, plain)), strict=True):
        np.testing.assert_allclose(*map(np.asarray, (x, y)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P("data", "model")])
def test_lbfgs_is_updated_with_automatic_axes_on_an_explicit_mesh(spec):
    mesh = mesh_of(AxisType.Explicit)
    optimiser = optax.lbfgs(1e-2, memory_size=3, linesearch=None)

    def make():
        params = {"weight": jnp.arange(16.0).reshape(4, 4), "scale": jnp.ones(())}
        return params, optimiser.init(params)

    layout = eqx.Layout(mesh, [("**['weight']", spec)])
    params, state = layout.init(make)
    where = layout.shardings((params, state))
    update = jax.sharding.auto_axes(optimiser.update, out_sharding=where)
    with jax.set_mesh(mesh):
        updated = eqx.filter_jit(update)(params, state, params)  # as if gradients
    plain_params, plain_state = make()
    plain = optimiser.update(plain_params, plain_state, plain_params)
    assert updated[0]["weight"].sharding.is_equivalent_to(where[0]["weight"], 2)
    for x, y in zip(*map(jax.tree.leaves, (updated, plain)), strict=True):
        np.testing.assert_allclose(*map(np.asarray, (x, y)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["adafactor", "lbfgs"])
def test_state_that_a_rule_does_not_fit_is_answered_by_follow(mesh, name):
    params = Layers(jax.random.key(0))
    state = jax.eval_shape(getattr(optax, name)(1e-3).init, params)
    spec = P("model", "data") if name == "adafactor" else P(("model", "data"))
    layout = eqx.Layout(mesh, [("**.wide.weight", spec)])
    with pytest.raises(ValueError, match=r"gives .* for `\[0\]\.\w+\.wide\.weight` "):
        layout.shardings(state)
    assert layout.shardings(state, follow=params)
    assert layout.shardings((params, state))


def test_a_rule_for_the_state_alone_applies_as_it_is(mesh):
    params = Layers(jax.random.key(0))
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    rules = [("[0].v_row.wide.weight", P(("data", "model"))), *OF_LAYERS]
    where = eqx.Layout(mesh, rules).shardings(state, follow=params)
    assert where[0].v_row.wide.weight.spec == P(("data", "model"))
    assert where[0].v_col.wide.weight.spec == P("model")
    with pytest.raises(ValueError, match=r"'other' matches nothing"):
        eqx.Layout(mesh, [("other", P()), *rules]).shardings(state, follow=params)


def test_paths_are_those_within_the_parameters_and_else_of_the_whole_tree(mesh):
    tree = {
        "model": {"w": jnp.ones((4, 2))},
        "state": {"memory": {"w": jnp.ones((4, 4, 2))}},
        "step": jnp.ones(4),
    }
    follow = lambda tree: tree["model"]  # noqa: E731
    layout = eqx.Layout(mesh, [("['w']", P("model")), ("['step']", P("data"))])
    where = layout.shardings(tree, follow=follow)
    assert where["model"]["w"].spec == P("model")
    assert where["state"]["memory"]["w"].spec == P(None, "model", None)
    assert where["step"].spec == P("data")
    with pytest.raises(ValueError, match=r"\['model'\]\['w'\]\" matches nothing"):
        eqx.Layout(mesh, [("['model']['w']", P())]).shardings(tree, follow=follow)
    # Without `follow`, the rule applies to its own array alone.
    layout = eqx.Layout(mesh, [("['model']['w']", P("model"))])
    assert layout.shardings(tree)["state"]["memory"]["w"].spec == P()


@pytest.mark.parametrize("shape", [(4,), (3, 4), (4, 4, 3), (4, 4, 4, 2)])
def test_state_whose_shape_does_not_tell_needs_a_rule(mesh, shape):
    params, state = {"w": jnp.ones((4, 4))}, ({"w": jnp.ones(shape)},)
    rules = [("**", P("model", "data"))]
    with pytest.raises(
        ValueError, match=r"gives .* for `\['w'\]` \(float32\[4,4\]\)"
    ) as e:
        eqx.Layout(mesh, rules).shardings(state, follow=params)
    assert f"how `[0]['w']` (float32[{','.join(map(str, shape))}]) follows it" in str(
        e.value
    )
    code = str(e.value).split("To replicate it: `")[1].removesuffix("`.")
    rule = eval(code, {"PartitionSpec": P})
    where = eqx.Layout(mesh, [rule, *rules]).shardings(state, follow=params)
    assert where[0]["w"].spec == P()
    # Where the parameter is whole, there is no choice.
    if shape == (4,):
        where = eqx.Layout(mesh, [("**", P())]).shardings(state, follow=params)
        assert where[0]["w"].is_fully_replicated


# Construction


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_model_and_its_state_are_built_in_their_shards(kind):
    mesh, key = mesh_of(kind), jax.random.key(0)
    make = nn.make_with_state(Net)
    model, state = eqx.Layout(mesh, RULES).init(make, 8, key)
    plain = make(8, key)
    where = eqx.Layout(mesh, RULES).shardings(plain)
    assert_same((model, state), eqx.filter_shard(plain, where))
    assert model.name == "net" and isinstance(model.table, jax.Array)
    assert model.linear.weight.addressable_shards[0].data.shape == (4, 8)


def test_the_mesh_may_be_in_use():
    mesh, key = mesh_of(AxisType.Explicit), jax.random.key(0)
    with jax.set_mesh(mesh):
        model = eqx.Layout(mesh, RULES).init(nn.Linear, 4, 4, key=key)
    assert_same(model, eqx.Layout(mesh, RULES).init(nn.Linear, 4, 4, key=key))


def test_the_state_of_an_optimiser_is_built_in_its_shards(mesh):
    model = eqx.Layout(mesh, RULES).init(nn.Linear, 4, 4, key=jax.random.key(0))
    init = optax.adam(1e-3).init
    state = eqx.Layout(mesh, RULES).init(init, model)
    assert_same(
        state,
        eqx.filter_shard(init(model), eqx.Layout(mesh, RULES).shardings(init(model))),
    )
    assert state[0].mu.weight.sharding.spec == P("model")


def test_no_device_of_eight_holds_more_than_its_shards_while_it_is_built():
    script = Path(__file__).with_name("eight_devices_sharded.py")
    outputs, temporary = map(float, finish(start(script, devices=8)).split())
    assert 1 <= outputs < 1.1
    assert temporary < 0.5


@hypothesis.settings(max_examples=6)
@given(
    shape=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 6])),
    spec=st.sampled_from([P(), P("model"), P(None, "data"), P("model", "data")]),
    seed=st.integers(0, 9),
)
def test_it_equals_filter_shard_of_the_plain_construction(shape, spec, seed):
    mesh, key = mesh_of(), jax.random.key(seed)
    rules = [("**.weight", spec), ("**", P())]
    made = eqx.Layout(mesh, rules).init(nn.Linear, *shape, key=key)
    plain = nn.Linear(*shape, key=key)
    assert_same(made, eqx.filter_shard(plain, eqx.Layout(mesh, rules).shardings(plain)))


def test_two_processes_build_and_load_their_own_shards(tmp_path):
    script = Path(__file__).with_name("two_processes_sharded.py")
    printed = run_together(script, tmp_path, processes=2, devices=4)
    *reads, found = zip(*(text.splitlines()[-3:] for text in printed), strict=True)
    assert all(0.4 < float(line.split()[1]) < 0.8 for line in sum(reads, ()))
    assert found == ("found no damage", "found damage at (DictKey(key='rows'),)")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_use", [jax.set_mesh, contextlib.nullcontext])
def test_it_may_be_called_within_a_compiled_function(kind, in_use):
    mesh = mesh_of(kind)

    @eqx.filter_jit
    def made(key):
        return eqx.Layout(mesh, RULES).init(nn.Linear, 4, 4, key=key)

    with in_use(mesh):
        model = made(jax.random.key(0))
    assert model.weight.sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)


def test_arrays_are_sharded_while_jit_is_disabled(mesh):
    with jax.disable_jit():
        x = eqx.Layout(mesh, [("**", P("model"))]).init(jnp.ones, 4)
    assert x.sharding == NamedSharding(mesh, P("model")) and x.tolist() == [1, 1, 1, 1]
