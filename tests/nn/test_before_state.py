"""A tree that was taken before `make_with_state` meets one from after it."""

import io
import tempfile

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import pytest

import equinox_like as eqx

nn = eqx.nn
TOLD = "this tree was taken before `make_with_state`; take it from the model that it "
TOLD += "returned"


class Net(eqx.Module):
    linear: nn.Linear
    norm: nn.BatchNorm
    spectral: nn.SpectralNorm

    def __init__(self):
        key = jax.random.key(0)
        self.linear = nn.Linear(3, 3, key=key)
        self.norm = nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.spectral = nn.SpectralNorm(nn.Linear(3, 3, key=key), "weight", key=key)


BEFORE = Net()
AFTER, STATE = nn.make_with_state(Net)()
ADAM = optax.adam(1e-3)
WEIGHTS = eqx.filter(AFTER, eqx.trainable)
X = jnp.ones(3)


def saved(tree):
    file = io.BytesIO()
    eqx.save(file, tree)
    file.seek(0)
    return file


def deserialised(tree, like):
    with tempfile.TemporaryDirectory() as folder:
        eqx.tree_serialise_leaves(f"{folder}/model", tree)
        return eqx.tree_deserialise_leaves(f"{folder}/model", like)


def truth(tree):
    return jax.tree.map(lambda _: True, tree)


MEETINGS = {
    "an optimiser": lambda a, b: ADAM.update(
        eqx.filter(a, eqx.trainable), ADAM.init(eqx.filter(b, eqx.trainable))
    ),
    "optax's updates": lambda a, b: optax.apply_updates(a, b),
    "jax.tree.map": lambda a, b: jax.tree.map(lambda x, y: x, a, b),
    "apply_updates": lambda a, b: eqx.apply_updates(a, eqx.filter(b, eqx.trainable)),
    "combine": lambda a, b: eqx.combine(
        eqx.filter(a, eqx.is_array), eqx.filter(b, eqx.is_array, inverse=True)
    ),
    "filter": lambda a, b: eqx.filter(a, truth(b)),
    "partition": lambda a, b: eqx.partition(a, truth(b)),
    "wrt": lambda a, b: eqx.filter_grad(lambda m: m.linear(X).sum(), wrt=truth(b))(a),
    "a scan": lambda a, b: eqx.filter_scan(lambda c, _: (b, None), a, None, length=2),
    "a loop": lambda a, b: eqx.filter_while_loop(lambda _: True, lambda _: b, a),
    "branches": lambda a, b: eqx.filter_cond(True, lambda: a, lambda: b),
    "vmap": lambda a, b: eqx.filter_vmap(
        lambda m: 1, in_axes=(jax.tree.map(lambda _: None, b),), axis_size=2
    )(a),
    "jvp": lambda a, b: eqx.filter_jvp(
        lambda m: m.linear(X), (a,), (eqx.filter(b, eqx.is_inexact_array),)
    ),
    "EMA": lambda a, b: nn.EMA(a).update(b),
    "a compiled stage": lambda a, b: eqx.filter_jit(lambda m: 1).lower(a).compile()(b),
    "load": lambda a, b: eqx.load(saved(b), a),
    "load of moments": lambda a, b: eqx.load(
        saved(ADAM.init(eqx.filter(b, eqx.is_inexact_array))),
        ADAM.init(eqx.filter(a, eqx.is_inexact_array)),
    ),
    "tree_deserialise_leaves": lambda a, b: deserialised(b, a),
    "a state dict": lambda a, b: eqx.load_state_dict(a, eqx.state_dict(b)),
}


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("order", [(BEFORE, AFTER), (AFTER, BEFORE)])
def test_the_error_tells_where_the_tree_is_from(meeting, order):
    with pytest.raises(Exception) as caught:
        MEETINGS[meeting](*order)
    assert TOLD in str(caught.value) and "norm.batch_" in str(caught.value)


def test_a_state_tells_it_of_an_index():
    with pytest.raises(KeyError) as caught:
        STATE.get(BEFORE.norm.batch_counter)
    assert TOLD in str(caught.value)


def test_retraces_tell_it():
    f = eqx.filter_jit(lambda m: 1)
    f(BEFORE)
    assert TOLD in str(f.explain(AFTER))


def test_a_model_alone_and_other_faults_do_not_tell_it():
    assert TOLD not in repr(BEFORE) and "<unnamed>" in repr(BEFORE)
    with pytest.raises(ValueError) as caught:
        jax.tree.map(lambda x, y: x, AFTER, AFTER.linear)
    assert TOLD not in str(caught.value)
    with pytest.raises(eqx.LeafError) as caught:
        eqx.load(saved({"a": X}), {"b": X})
    assert TOLD not in str(caught.value)
    assert jtu.tree_structure(nn.make_with_state(Net)()[0]) == jtu.tree_structure(AFTER)
