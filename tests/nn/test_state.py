import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


class Counter(nn.StatefulLayer):
    """Adds up what it was given, and counts."""

    index: nn.StateIndex

    def __init__(self, size=2):
        self.index = nn.StateIndex((jnp.array(0), jnp.zeros(size)))

    def __call__(self, x, state, *, key=None):
        number, total = state.get(self.index)
        total = total + x
        return total * 1, state.set(self.index, (number + 1, total))


make = nn.make_with_state(Counter)


def test_set_makes_a_new_state() -> None:
    counter, state = make()
    _, state = counter(jnp.ones(2), state)
    out, state = counter(jnp.ones(2), state)
    assert out.tolist() == [2, 2] and state.get(counter.index)[0] == 2


def test_arguments_may_be_passed_by_name() -> None:
    counter, state = make()
    number, total = state.get(item=counter.index)
    state = state.set(item=counter.index, value=(number + 1, total))
    assert state.get(item=counter.index)[0] == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda state, index: state.get(index),
        lambda state, index: state.set(index, (1, jnp.ones(2))),
        lambda state, index: state.substate(index),
        lambda state, index: state.update(state),
        lambda state, index: jax.tree.leaves(state),
        lambda state, index: jax.jit(lambda s: s)(state),
    ],
    ids=["get", "set", "substate", "update", "flatten", "jit"],
)
def test_old_state_cannot_be_used(use) -> None:
    counter, state = make()
    _, new = counter(jnp.ones(2), state)
    with pytest.raises(
        ValueError, match=r"out of date.*clone it first: `leaves, treedef"
    ):
        use(state, counter.index)
    assert repr(state) == "State(<old>)"
    use(new, counter.index)


def test_clone_goes_on_from_the_same_state() -> None:
    counter, state = make()
    leaves, treedef = jax.tree.flatten(state)
    _, once = counter(jnp.ones(2), state)
    _, again = counter(jnp.ones(2), jax.tree.unflatten(treedef, leaves))
    assert eqx.tree_equal(once, again)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.ones(2), "cannot change from a tuple of length 2 to an array"),
        ((0, jnp.ones(3)), r"`Counter.index\[1\]` .*\(2,\) .* to shape \(3,\)"),
        ((0.0, jnp.ones(2)), r"`Counter.index\[0\]` .*dtype int32 to .*dtype float32"),
    ],
)
def test_value_of_another_kind_is_refused_and_the_state_lives_on(
    value, message
) -> None:
    counter, state = make()
    with pytest.raises(ValueError, match=message):
        state.set(counter.index, value)
    assert state.get(counter.index)[0] == 0


def test_numbers_and_numpy_arrays_are_converted() -> None:
    counter, state = make()
    state = state.set(counter.index, (7, np.ones(2, np.float32)))
    number, total = state.get(counter.index)
    assert isinstance(number, jax.Array) and isinstance(total, jax.Array)


def test_weak_type_of_the_initial_value_stays() -> None:
    index = nn.StateIndex((jnp.array(0), 0.5, jnp.zeros((), jnp.int32)))
    state = nn.State(index)

    def weak(state):
        return [x.weak_type for x in state.get(index)]

    assert weak(state) == [True, True, False]
    with jax.numpy_dtype_promotion("strict"):
        assert (jnp.ones(()) * state.get(index)[0]).dtype == jnp.float32
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return state.set(index, jax.tree.map(lambda x: x + 1, state.get(index)))

    for _ in range(3):
        state = step(state)
        assert weak(state) == [True, True, False]
    assert traces == [1] and state.get(index) == (3, 3.5, 3)


def test_value_of_a_state_does_not_become_weakly_typed() -> None:
    index = nn.StateIndex(jnp.zeros((), jnp.int32))
    assert not nn.State(index).set(index, 2).get(index).weak_type


def test_error_names_the_dtype_of_a_weakly_typed_value() -> None:
    with jax.enable_x64(False):
        index = nn.StateIndex(jnp.asarray(0))
        state = nn.State(index)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"int32 to .* int64"),
    ):
        state.set(index, state.get(index) + 1)


def test_only_indices_of_the_state_are_keys(without_type_checks) -> None:
    counter, state = make()
    with pytest.raises(
        KeyError, match=r"no value for <unnamed>; it has Counter\.index"
    ):
        state.get(nn.StateIndex(0))

    class Special(nn.StateIndex):
        pass

    for wrong in (Special(0), "Counter.index"):
        with pytest.raises(ValueError, match="is indexed by a StateIndex; got a"):
            state.get(wrong)
    assert state.get(counter.index)


def test_function_as_init_is_an_error() -> None:
    with pytest.raises(ValueError, match="the initial value itself"):
        nn.StateIndex(lambda: 0)


def test_text_as_init_is_an_error() -> None:
    with pytest.raises(TypeError):
        nn.State(nn.StateIndex("text"))


def test_indices_are_named_by_their_paths() -> None:
    model, state = nn.make_with_state(lambda: nn.Sequential([jnp.sin, Counter()]))()
    assert model[1].index.marker == "Sequential.layers[1].index"
    assert "'Sequential.layers[1].index': (weak_i32[], f32[2])" in repr(state)
    model, _ = nn.make_with_state(lambda: {"a": Counter()})()
    assert model["a"].index.marker == "dict['a'].index"
    one, other = make()[1], jax.jit(lambda: make()[1])()
    assert jax.tree.structure(one) == jax.tree.structure(other)
    path, _ = jax.tree.leaves_with_path(one)[0]
    assert jax.tree_util.keystr(path) == "['index'][0]"


def test_saved_state_fits_after_the_class_was_renamed(tmp_path) -> None:
    def make_net(name):
        class Net(eqx.Module):
            counters: list

        Net.__name__ = name
        return nn.make_with_state(lambda: Net([Counter()]))()

    model, state = make_net("Net")
    state = state.set(model.counters[0].index, (7, jnp.ones(2)))
    eqx.save(tmp_path / "state", state)
    renamed, fresh = make_net("Renamed")
    loaded = eqx.load(tmp_path / "state", fresh)
    assert loaded.get(renamed.counters[0].index)[0] == 7
    (path, _), *_ = jax.tree.leaves_with_path(loaded)
    assert jax.tree_util.keystr(path) == "['counters[0].index'][0]"


def test_unnamed_indices_are_numbered_in_print() -> None:
    state = nn.State([nn.StateIndex(0), nn.StateIndex(1.0)])
    values = "'StateIndex #0': weak_i32[], 'StateIndex #1': weak_f32[]"
    assert repr(state) == f"State({{{values}}})"


def test_one_index_at_two_places_is_one_state_only_before_it_is_named() -> None:
    index = nn.StateIndex(0)
    assert len(jax.tree.leaves(nn.State([index, index]))) == 1
    _, state = nn.make_with_state(lambda: [index, index])()
    assert len(jax.tree.leaves(state)) == 2


def test_model_in_place_of_its_class_is_refused() -> None:
    norm = nn.BatchNorm(3, "batch", mode="batch")
    for model in (norm, nn.Sequential([nn.Identity(), norm])):
        name = type(model).__name__
        with pytest.raises(TypeError, match=rf"got an? {name}\. .*{name}\)\(\.\.\.\)"):
            nn.make_with_state(model)

    # A Module may be a factory.
    @eqx.filter_jit
    def make(state=None):
        return norm

    for factory in (make, eqx.Partial(nn.BatchNorm, 3, "batch", mode="batch")):
        assert isinstance(nn.make_with_state(factory)()[1], nn.State)


def test_deep_copy_of_a_layer_has_a_state_of_its_own() -> None:
    @nn.make_with_state
    def make():
        layer = nn.BatchNorm(3)
        return [layer, copy.deepcopy(layer)]

    layers, state = make()
    indices = [layer.batch_counter for layer in copy.deepcopy(layers)]
    state = copy.deepcopy(state).set(indices[0], jnp.array(5))
    assert [int(state.get(index)) for index in indices] == [5, 0]


def test_deleted_inits_cannot_make_a_state() -> None:
    model = nn.delete_init_state({"a": Counter()})
    assert jax.tree.leaves(model) == []
    assert eqx.tree_equal(nn.delete_init_state(model), model)
    with pytest.raises(ValueError, match=r"deleted from `model\['a'\]\.index`"):
        nn.State(model)


def test_substate_and_update_map_a_part() -> None:
    parts, state = nn.make_with_state(
        lambda: {
            "many": eqx.filter_vmap(lambda _: Counter(), axis_size=3)(None),
            "one": Counter(),
        }
    )()
    part = state.substate(parts["many"])
    xs = jnp.arange(6.0).reshape(3, 2)
    outs, part = eqx.filter_vmap(lambda c, x, s: c(x, s))(parts["many"], xs, part)
    state = state.update(part)
    assert (state.get(parts["many"].index)[1] == xs).all()
    assert state.get(parts["one"].index)[0] == 0
    assert (outs == xs).all()


def test_update_takes_a_part_of_the_state(without_type_checks) -> None:
    counter, state = make()
    with pytest.raises(ValueError, match="takes a State; got a dict"):
        state.update({})
    with pytest.raises(ValueError, match="has no `StateIndex #0`"):
        state.update(nn.State(nn.StateIndex(0)))
    assert state.get(counter.index)


def test_state_runs_through_jit_scan_vmap_and_grad() -> None:
    counter, state = make()
    xs = jnp.arange(6.0).reshape(3, 2)

    @eqx.filter_jit
    def run(counter, xs, state):
        def step(state, x):
            out, state = counter(x, state)
            return state, out

        return jax.lax.scan(step, state, xs)

    final, outs = run(counter, xs, state)
    np.testing.assert_allclose(outs, np.cumsum(xs, axis=0))
    assert final.get(counter.index)[0] == 3
    # Each trace had a copy of its own.
    assert state.get(counter.index)[0] == 0

    batched = jax.vmap(lambda x, s: counter(x, s), in_axes=(0, None))
    outs, states = batched(xs, state)
    assert states.get(counter.index)[1].shape == (3, 2) and (outs == xs).all()

    def loss(x, state):
        out, state = counter(x, state)
        return jnp.sum(out**2), state

    grad, new = jax.grad(loss, has_aux=True)(xs[1], state)
    assert (grad == 2 * xs[1]).all() and new.get(counter.index)[0] == 1
    checkpointed = jax.checkpoint(loss)(xs[1], final)[1]
    assert checkpointed.get(counter.index)[0] == 4


def test_forgetting_to_pass_it_on_is_noticed_within_a_trace() -> None:
    counter, state = make()

    @jax.jit
    def run(x, state):
        counter(x, state)
        return counter(x, state)

    with pytest.raises(ValueError, match="out of date"):
        run(jnp.ones(2), state)


def test_state_is_saved_by_position(tmp_path) -> None:
    counter, state = make()
    _, state = counter(jnp.ones(2), state)
    eqx.tree_serialise_leaves(tmp_path / "state", state)
    _, other = make()
    loaded = eqx.tree_deserialise_leaves(tmp_path / "state", other)
    assert eqx.tree_equal(loaded, state)


def test_sequential_threads_the_state() -> None:
    model, state = nn.make_with_state(
        lambda: nn.Sequential([Counter(), jnp.negative, Counter()])
    )()
    out, state = eqx.filter_jit(model)(jnp.ones(2), state)
    assert out.tolist() == [-1, -1]
    assert state.get(model[2].index)[1].tolist() == [-1, -1]


def test_model_can_be_built_without_computing() -> None:
    counter, state = eqx.filter_eval_shape(make)
    assert isinstance(jax.tree.leaves(state)[0], jax.ShapeDtypeStruct)
    assert counter.index.marker == "Counter.index"


def test_state_of_shapes_takes_values() -> None:
    """So a pretrained model is loaded without initialising it."""
    build = nn.make_with_state(nn.BatchNorm)
    norm, state = eqx.filter_eval_shape(build, 3, mode="batch")
    values = jnp.full(3, 2.0), jnp.full(3, 4.0)
    state = state.set(norm.batch_state_index, values)
    assert eqx.tree_equal(state.get(norm.batch_state_index), values)
    with pytest.raises(ValueError, match="cannot change from ShapeDtypeStruct"):
        state.set(norm.batch_counter, jnp.ones(4))
