"""`shardings` by rules, and `make_sharded`: a tree that is built in its shards."""

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
    found = eqx.shardings(model, mesh, rules)
    assert found.layers[0].weight == NamedSharding(mesh, P(("data", "model")))
    assert found.layers[1].weight.spec == P(None, "model")
    assert found.layers[0].bias.spec == P() and found.activation is None


def test_structs_numpy_arrays_and_keys_have_shardings_and_numbers_have_none(mesh):
    tree = [jax.ShapeDtypeStruct((2,), "int32"), np.ones(2), jax.random.key(0), 3, None]
    found = eqx.shardings(tree, mesh, [("**", P())])
    assert found == [NamedSharding(mesh, P())] * 3 + [None, None]


def test_they_are_what_filter_shard_and_filter_jit_take(mesh):
    model = nn.Linear(4, 4, key=jax.random.key(0))
    found = eqx.shardings(model, mesh, RULES)
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
        (None, "No rule matches `layers[0].weight` (float32[6,3])"),
        (
            P("other"),
            "`layers[0].weight` (float32[6,3]), but the mesh has no axis 'other'. Its ax",
        ),
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
    rules = [("**.bias", P())] + ([] if spec is None else [("**", spec)])

    def make():
        return nn.MLP(3, 6, 6, 1, key=jax.random.key(0))

    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.shardings(make(), mesh, rules)
    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.make_sharded(make, mesh=mesh, rules=rules)


@pytest.mark.parametrize("rule", ["**", ("**", None), (P(), "**"), ("**", P(), P())])
@pytest.mark.usefixtures("without_type_checks")
def test_a_rule_is_a_pair_of_a_pattern_and_a_spec(mesh, rule):
    with pytest.raises(TypeError, match="Each rule must be a pair"):
        eqx.shardings(jnp.ones(2), mesh, [rule])


# Construction


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_model_and_its_state_are_built_in_their_shards(kind):
    mesh, key = mesh_of(kind), jax.random.key(0)
    make = nn.make_with_state(Net)
    model, state = eqx.make_sharded(make, 8, key, mesh=mesh, rules=RULES)
    plain = make(8, key)
    where = eqx.shardings(plain, mesh, RULES)
    assert_same((model, state), eqx.filter_shard(plain, where))
    assert model.name == "net" and isinstance(model.table, jax.Array)
    assert model.linear.weight.addressable_shards[0].data.shape == (4, 8)


def test_the_mesh_may_be_in_use():
    mesh, key = mesh_of(AxisType.Explicit), jax.random.key(0)
    with jax.set_mesh(mesh):
        model = eqx.make_sharded(nn.Linear, 4, 4, key=key, mesh=mesh, rules=RULES)
    assert_same(
        model, eqx.make_sharded(nn.Linear, 4, 4, key=key, mesh=mesh, rules=RULES)
    )


def test_the_state_of_an_optimiser_is_built_in_its_shards(mesh):
    model = eqx.make_sharded(
        nn.Linear, 4, 4, key=jax.random.key(0), mesh=mesh, rules=RULES
    )
    init = optax.adam(1e-3).init
    state = eqx.make_sharded(init, model, mesh=mesh, rules=RULES)
    assert_same(
        state, eqx.filter_shard(init(model), eqx.shardings(init(model), mesh, RULES))
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
    made = eqx.make_sharded(nn.Linear, *shape, key=key, mesh=mesh, rules=rules)
    plain = nn.Linear(*shape, key=key)
    assert_same(made, eqx.filter_shard(plain, eqx.shardings(plain, mesh, rules)))


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
        return eqx.make_sharded(nn.Linear, 4, 4, key=key, mesh=mesh, rules=RULES)

    with in_use(mesh):
        model = made(jax.random.key(0))
    assert model.weight.sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)


def test_arrays_are_sharded_while_jit_is_disabled(mesh):
    with jax.disable_jit():
        x = eqx.make_sharded(jnp.ones, 4, mesh=mesh, rules=[("**", P("model"))])
    assert x.sharding == NamedSharding(mesh, P("model")) and x.tolist() == [1, 1, 1, 1]
