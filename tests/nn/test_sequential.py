import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


class Counter(nn.StatefulLayer):
    """Adds the state to the input, and one to the state."""

    active: bool = True

    def __call__(self, x, state=None, *, key=None):
        return (x + state, state + 1) if self.active else x

    def is_stateful(self):
        return self.active


class KeyRecorder(eqx.Module):
    seen: list

    def __call__(self, x, *, key):
        self.seen.append(key)
        return x


def test_members_are_called_in_order(key) -> None:
    first, second = (nn.Linear(3, 3, key=k) for k in jax.random.split(key))
    model = nn.Sequential([first, jnp.tanh, second])
    x = jnp.ones(3)
    assert (model(x) == second(jnp.tanh(first(x)))).all()


def test_each_member_gets_its_own_key(key) -> None:
    seen = []
    model = nn.Sequential([KeyRecorder(seen), jnp.tanh, KeyRecorder(seen)])
    model(jnp.ones(3), key=key)
    keys = jax.random.split(key, 3)
    assert seen == [keys[0], keys[2]]
    model(jnp.ones(3))
    assert seen[2:] == [None, None]


def test_key_goes_only_to_members_that_take_it(key) -> None:
    def with_key(x, key):
        return x + (key is not None)

    def with_kwargs(x, **kwargs):
        return x + ("key" in kwargs)

    def without(x):
        return x

    def positional(x, key=None, /):
        assert key is None
        return x

    plain = [
        without,
        positional,
        lambda x: x,
        functools.partial(without),
        jax.jit(without),
        eqx.filter_jit(without),
        jnp.tanh,
        np.abs,
        nn.Lambda(without),
    ]
    assert nn.Sequential(plain)(jnp.zeros(()), key=key) == 0
    keyed = [
        with_key,
        with_kwargs,
        eqx.filter_jit(with_key),
        nn.Dropout(inference=True),
    ]
    assert nn.Sequential(keyed)(jnp.zeros(()), key=key) == 3


def test_member_keeps_a_key_of_its_own_unless_one_is_passed(key) -> None:
    dropout, x = nn.Dropout(0.5), jnp.ones(20)
    bound = functools.partial(dropout, key=key)
    model = nn.Sequential([bound, lambda x, key=None, scale=2: x * scale])
    assert (model(x) == 2 * dropout(x, key=key)).all()
    other = jax.random.key(1)
    expected = 2 * dropout(x, key=jax.random.split(other)[0])
    assert (model(x, key=other) == expected).all()
    assert nn.Sequential([lambda x, key=7: x + key])(1) == 8


def test_state_runs_through_the_stateful_members() -> None:
    model = nn.Sequential([Counter(), jnp.negative, Counter(False), Counter()])
    out, state = model(jnp.asarray(10), jnp.asarray(1))
    assert out == -11 + 2 and state == 3
    out, state = nn.Sequential([model, Counter()])(jnp.asarray(10), jnp.asarray(1))
    assert out == -9 + 3 and state == 4


def test_state_is_returned_if_it_was_passed() -> None:
    model = nn.Sequential([jnp.negative])
    assert model(1, None) == (-1, None)
    assert model(1, state="any") == (-1, "any")
    assert model(1) == -1


def test_sequential_is_stateful_if_a_member_is() -> None:
    assert nn.Sequential([jnp.tanh, nn.Sequential([Counter()])]).is_stateful()
    assert not nn.Sequential([jnp.tanh, Counter(False)]).is_stateful()
    assert not nn.Sequential([]).is_stateful()
    assert nn.Sequential([nn.Sequential([jnp.negative]), jnp.negative])(1) == 1


def test_missing_state_is_an_error_that_names_the_member() -> None:
    with pytest.raises(TypeError, match=r"`layers\[1\]` of this Sequential.*Counter"):
        nn.Sequential([jnp.tanh, Counter()])(jnp.ones(3))


class Block(eqx.Module):
    def __call__(self, x, state):
        return x + state, state


@pytest.mark.parametrize("member", [Block(), eqx.frozen(Block())])
def test_member_that_needs_a_state_must_be_a_stateful_layer(member) -> None:
    model = nn.Sequential([jnp.tanh, member])
    for args in ((jnp.ones(3), 1), (jnp.ones(3),)):
        with pytest.raises(TypeError, match=r"`layers\[1\]` .* Block.*StatefulLayer"):
            model(*args)


def test_type_error_of_a_member_is_passed_on() -> None:
    def member(x, state=None):
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        nn.Sequential([member])(1)


@pytest.mark.parametrize("member", [[], None, "relu"])
def test_member_that_cannot_be_called_is_named(member, without_type_checks) -> None:
    model = nn.Sequential([nn.Identity(), member])
    with pytest.raises(TypeError, match=r"a function as `layers\[1\]`; got"):
        model(jnp.ones(2))


def test_stateful_layer_is_abstract() -> None:
    class NoCall(nn.StatefulLayer):
        pass

    for cls in (nn.StatefulLayer, NoCall):
        with pytest.raises(TypeError, match="abstract"):
            cls()
    assert Counter().is_stateful()
    assert isinstance(nn.Sequential([]), nn.StatefulLayer)


def test_sequence_operations() -> None:
    functions = [jnp.sin, jnp.cos, jnp.tan]
    model = nn.Sequential(iter(functions))
    assert model.layers == tuple(functions)
    assert (
        model[0] is jnp.sin and model[-1] is jnp.tan and model[np.int64(1)] is jnp.cos
    )
    assert model[1:] == nn.Sequential([jnp.cos, jnp.tan])
    assert model[::-2] == nn.Sequential([jnp.tan, jnp.sin])
    assert list(model) == functions and len(model) == 3
    with pytest.raises(IndexError):
        model[3]


@pytest.mark.parametrize("index", ["0", 1.0, (0, 1), None])
def test_other_index_is_an_error(index, without_type_checks) -> None:
    with pytest.raises(TypeError):
        nn.Sequential([jnp.sin])[index]


def test_empty_sequential_is_falsy_and_the_identity(key) -> None:
    model = nn.Sequential([])
    x = object()
    assert not model
    assert model(x) is x and model(x, key=key) is x
    assert model(x, 3) == (x, 3)


class Named(nn.Sequential):
    name: str = eqx.field(static=True)

    def __init__(self, layers, name="model"):
        super().__init__(layers)
        self.name = name


class StaticLeaf(nn.Sequential):
    def __init__(self):
        super().__init__([jnp.sin, jnp.cos])


class Sized(nn.Sequential):
    def __init__(self, layers, size):
        super().__init__(layers)


class Repeated(nn.Sequential):
    def __init__(self, layers):
        super().__init__([layer for layer in layers for _ in range(2)])


def test_slice_keeps_the_subclass_if_it_can_be_built() -> None:
    named = Named([jnp.sin, jnp.cos], name="mine")[:1]
    assert type(named) is Named and named.name == "mine" and len(named) == 1
    for model in (StaticLeaf(), Sized([jnp.sin, jnp.cos], 3), Repeated([jnp.sin])):
        assert type(model[:1]) is nn.Sequential and model[:1].layers == (jnp.sin,)


def test_lambda_calls_its_function_without_the_key(key) -> None:
    layer = nn.Lambda(lambda x: x + 1)
    assert layer(1, key=key) == 2 == layer(1)
    assert "relu" in repr(nn.Lambda(jax.nn.relu))


def test_lambda_and_sequential_hold_the_arrays_of_their_members(key) -> None:
    linear = nn.Linear(3, 2, key=key)
    leaves = jax.tree.leaves(linear)
    model = nn.Sequential([nn.Lambda(linear), nn.Identity()])
    pairs = zip(jax.tree.leaves(model), leaves, strict=True)
    assert all(x is y for x, y in pairs)
    grads = jax.grad(lambda m: m(jnp.ones(3)).sum())(model)
    assert grads.layers[0].fn.weight.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "mapped",
    [
        eqx.filter_vmap,
        eqx.filter_vmap(in_axes={}),
        lambda layer: eqx.filter_jit(eqx.filter_vmap(layer)),
        jax.vmap,
        lambda layer: jax.jit(jax.vmap(layer)),
    ],
)
@pytest.mark.filterwarnings("ignore:A JAX-transformed callable")
def test_mapped_members_get_no_key(mapped, key) -> None:
    linear = nn.Linear(3, 2, key=key)
    model = nn.Sequential([mapped(linear), nn.Dropout(0.0)])
    x = jnp.ones((5, 3))
    np.testing.assert_allclose(model(x, key=key), jax.vmap(linear)(x), rtol=1e-6)
    model = nn.Sequential([mapped(nn.Dropout())])
    with pytest.raises(RuntimeError, match=r"^At `layers\[0\]`: Dropout needs a `key`"):
        model(x, key=key)


def test_key_goes_to_a_mapped_member_that_says_how(key) -> None:
    model = nn.Sequential([eqx.filter_vmap(nn.Dropout(), in_axes={"key": None})])
    out = model(jnp.ones((5, 3)), key=key)
    assert (out == out[0]).all() and set(out[0].tolist()) <= {0.0, 2.0}


def test_missing_key_names_the_member(key) -> None:
    inner = nn.Sequential([nn.Identity(), nn.Dropout()])
    with pytest.raises(
        RuntimeError, match=r"^At `layers\[1\].layers\[1\]`: Dropout needs"
    ):
        nn.Sequential([nn.Identity(), inner])(jnp.ones(3))
    attention = nn.MultiheadAttention(2, 4, dropout_p=0.5, key=key)
    with pytest.raises(RuntimeError, match=r"^At `dropout`: Dropout needs a `key`"):
        attention(*[jnp.ones((3, 4))] * 3)
