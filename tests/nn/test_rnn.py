"""`RNN` and `Bidirectional`, beside loops in NumPy."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(cell, x, h):
    """As the documentation of `torch.nn.GRU` has it; of its biases only `b_hn` is apart."""
    w = [np.asarray(w) @ x for w in np.split(np.asarray(cell.weight_ih), 3)]
    u = [np.asarray(u) @ h for u in np.split(np.asarray(cell.weight_hh), 3)]
    b, b_hn = np.split(np.asarray(cell.bias), 3), np.asarray(cell.bias_n)
    r, z = sigmoid(w[0] + b[0] + u[0]), sigmoid(w[1] + b[1] + u[1])
    n = np.tanh(w[2] + b[2] + r * (u[2] + b_hn))
    return (1 - z) * n + z * h


def lstm(cell, x, state):
    """As the documentation of `torch.nn.LSTM` has it, with its two biases added."""
    h, c = state
    all_gates = np.asarray(cell.weight_ih) @ x + np.asarray(cell.weight_hh) @ h
    i, f, g, o = np.split(all_gates + np.asarray(cell.bias), 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


FORMULAS = {nn.GRUCell: gru, nn.LSTMCell: lstm}


def loop(cell, xs, state, length, backward=False):
    """The outputs and the last state of one direction, step by step."""
    outputs = np.zeros((len(xs), 4))
    for i in reversed(range(length)) if backward else range(length):
        state = FORMULAS[type(cell)](cell, xs[i], state)
        outputs[i] = state[0] if isinstance(state, tuple) else state
    return outputs, state


def looped(rnn, xs, states, length):
    """All layers, one after the other."""
    xs, last = np.asarray(xs), []
    for layer, state in zip(rnn.layers, states, strict=True):
        if isinstance(layer, nn.Bidirectional):
            forward, a = loop(layer.forward, xs, state[0], length)
            backward, b = loop(layer.backward, xs, state[1], length, backward=True)
            xs = np.concatenate([forward, backward], -1)
            last.append((a, b))
        else:
            xs, after = loop(layer, xs, state, length)
            last.append(after)
    return xs, tuple(last)


def assert_close(found, wanted, rtol=1e-10):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol),
        found,
        wanted,
    )


def first_states(rnn, draw=None):
    """A state for each cell: zeros, or drawn."""

    def of(layer):
        if isinstance(layer, nn.Bidirectional):
            return of(layer.forward), of(layer.backward)
        h, c = (np.zeros(4) if draw is None else np.asarray(draw(4)) for _ in range(2))
        return (h, c) if type(layer) is nn.LSTMCell else h

    return tuple(map(of, rnn.layers))


@pytest.mark.parametrize("cell", FORMULAS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_batch_of_lengths_is_the_loop_of_torch(cell, bidirectional, x64, build, draw):
    rnn = build(
        lambda key: nn.RNN.build(cell, 3, 4, 2, bidirectional=bidirectional, key=key)
    )
    batch, lengths = draw(4, 5, 3), jnp.array([5, 2, 0, 3])
    init = [first_states(rnn, draw) for _ in lengths]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *init)
    outputs, last = jax.jit(jax.vmap(lambda x, s, n: rnn(x, s, length=n)))(
        batch, stacked, lengths
    )
    for i, length in enumerate(lengths):
        wanted = looped(rnn, batch[i], init[i], int(length))
        assert_close((outputs[i], jax.tree.map(lambda x, i=i: x[i], last)), wanted)


def test_cell_in_place_of_its_class_is_refused(build):
    cell = build(nn.LSTMCell, 2, 4)
    with pytest.raises(TypeError, match=r"RNN\.build takes a class.*got an LSTMCell"):
        nn.RNN.build(cell, 2, 4, key=jax.random.key(0))
    make = eqx.Partial(nn.LSTMCell, use_bias=False)
    assert nn.RNN.build(make, 2, 4, key=jax.random.key(0)).layers[0].bias is None


def test_states_are_zero_by_default_and_go_on_where_they_ended(x64, build, draw):
    rnn = build(lambda key: nn.RNN.build(nn.LSTMCell, 3, 4, 2, key=key))
    xs = draw(7, 3)
    wanted = looped(rnn, xs, first_states(rnn), 7)
    assert_close(rnn(xs), wanted)
    first, states = rnn(xs[:4])
    second, last = rnn(xs[4:], states)
    assert_close((jnp.concatenate([first, second]), last), wanted)
    assert_close(rnn(xs, (None, None)), wanted)
    assert_close(rnn(xs, length=7), wanted)


def test_each_layer_is_one_scan(key):
    rnn = nn.RNN.build(nn.LSTMCell, 3, 4, 3, bidirectional=True, key=key)
    jaxpr = jax.make_jaxpr(lambda xs: rnn(xs, length=2))(jnp.ones((5, 3)))
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("scan") == 3


@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_reaches_neither_results_nor_gradients(bidirectional, build, draw):
    rnn = build(nn.RNN.build, nn.GRUCell, 3, 4, 2, bidirectional=bidirectional)
    xs = draw(5, 3)

    @jax.jit
    def run(xs, length):
        @functools.partial(eqx.filter_grad, has_aux=True)
        def gradients(both):
            rnn, xs = both
            outputs, last = rnn(xs, length=length)
            return jnp.sum(outputs**2), (outputs, last)

        (grads, x_grad), (outputs, last) = gradients((rnn, xs))
        return outputs, last, eqx.filter(grads, eqx.is_inexact_array), x_grad

    outputs, last, grads, x_grad = run(xs.at[3:].set(jnp.nan), 3)
    clean, clean_last, clean_grads, clean_x_grad = run(xs[:3], 3)
    assert_close(outputs[:3], clean, rtol=1e-5)
    assert_close((last, grads), (clean_last, clean_grads), rtol=1e-5)
    assert_close(x_grad[:3], clean_x_grad, rtol=1e-5)
    assert not outputs[3:].any() and not x_grad[3:].any()


def test_scan_cell_keeps_nan_of_the_padding_from_the_gradients(key, draw):
    cell, xs, mask = nn.GRUCell(3, 4, key=key), draw(5, 3), jnp.arange(5) < 3

    @jax.jit
    @jax.grad
    def grad_of(weight, xs, mask):
        full = eqx.tree_at(lambda cell: cell.weight_ih, cell, weight)
        return jnp.sum(nn.scan_cell(full, xs, mask=mask)[1] ** 2)

    grad = grad_of(cell.weight_ih, xs.at[3:].set(jnp.nan), mask)
    assert_close(grad, grad_of(cell.weight_ih, xs[:3], None), rtol=1e-5)


class Counter(eqx.Module):
    """A user's own cell: inputs and states are trees, one of integers."""

    step: jax.Array

    def __call__(self, x, state):
        value, _ = x
        return {"sum": state["sum"] + self.step * value, "n": state["n"] + 1}

    def init_state(self):
        return {"sum": 0.0, "n": jnp.asarray(0)}


def test_cell_of_the_user_takes_and_returns_trees():
    cell = Counter(jnp.array(2.0))
    xs = jnp.arange(1.0, 5.0), jax.random.split(jax.random.key(0), 4)
    layer = nn.Bidirectional(cell, cell, merge=lambda a, b: (a["sum"], b["n"]))
    (sums, numbers), (_, last) = layer(xs, length=3)
    assert sums.tolist() == [2, 6, 12, 0] and numbers.tolist() == [3, 2, 1, 0]
    assert last["sum"] == 12 and last["n"] == 3
    outputs, (state,) = nn.RNN(cell)(xs)
    assert outputs["n"].tolist() == [1, 2, 3, 4] and state["sum"] == 20


class Noisy(eqx.Module):
    def __call__(self, x, state):
        total, key = state
        key, draw = jax.random.split(key)
        return total + x + jax.random.normal(draw), key

    def init_state(self):
        return jnp.zeros(()), jax.random.key(0)


def test_state_of_a_cell_may_hold_a_key():
    xs = jnp.arange(3.0)
    outputs, (state,) = nn.RNN(Noisy())(xs)
    scanned, last = nn.scan_cell(Noisy(), xs)
    assert (outputs == scanned).all() and len(set(outputs.tolist())) == 3
    assert eqx.tree_equal(state, last)


def test_weakly_typed_inputs_leave_the_dtype_of_the_state(key):
    cell = nn.GRUCell(3, 4, dtype=jnp.bfloat16, key=key)
    xs = jnp.broadcast_to(2.0, (2, 3))
    assert nn.scan_cell(cell, xs)[0].dtype == jnp.bfloat16
    assert nn.RNN(cell)(xs)[0].dtype == jnp.bfloat16


def test_directions_may_differ_and_be_added(key, draw):
    forward, backward = nn.GRUCell(3, 4, key=key), nn.LSTMCell(3, 4, key=key)
    layer, xs = nn.Bidirectional(forward, backward, merge=operator.add), draw(5, 3)
    outputs, (h, (_, c)) = layer(xs, (None, (jnp.ones(4), jnp.ones(4))))
    one, one_last = nn.scan_cell(forward, xs)
    init = jnp.ones(4), jnp.ones(4)
    other, other_last = nn.scan_cell(backward, xs, init, reverse=True)
    assert_close((outputs, h, c), (one + other, one_last, other_last[1]), rtol=1e-5)


def test_dropout_is_between_the_layers_only(key, draw):
    xs = draw(5, 3)
    rnn = nn.RNN.build(nn.GRUCell, 3, 4, 2, dropout=0.5, key=key)
    plain = nn.RNN(rnn.layers)
    assert eqx.tree_equal(rnn(xs, inference=True), plain(xs))
    assert eqx.tree_equal(eqx.tree_inference(rnn)(xs), plain(xs))
    outputs, _ = rnn(xs, key=key)
    hidden, _ = nn.scan_cell(rnn.layers[0], xs)
    (dropout_key,) = jax.random.split(key, 1)
    dropped = rnn.dropout(hidden, key=dropout_key)
    assert_close(outputs, nn.scan_cell(rnn.layers[1], dropped)[0], rtol=1e-5)
    with pytest.raises(RuntimeError, match="needs a `key`"):
        rnn(xs)
    one = nn.RNN.build(nn.GRUCell, 3, 4, dropout=0.5, key=key)
    assert one(xs)[0].shape == (5, 4)


def test_default_states_have_the_dtype_that_the_cell_computes_in(key, draw):
    xs = draw(5, 3).astype(jnp.float32)
    in_bf16 = nn.RNN.build(nn.GRUCell, 3, 4, 2, dtype=jnp.bfloat16, key=key)
    assert in_bf16(xs)[0].dtype == jnp.float32
    mixed = nn.RNN(nn.mixed(nn.LSTMCell(3, 4, key=key), "compute=bf16"))
    assert mixed(xs)[0].dtype == jnp.bfloat16
    layer = nn.Bidirectional(nn.GRUCell(3, 4, key=key), nn.GRUCell(3, 4, key=key))
    mixed = nn.RNN([nn.mixed(layer, "compute=bf16,output=f32")])
    assert mixed(xs)[0].dtype == jnp.float32
    outputs, _ = nn.RNN([eqx.frozen(layer)])(xs)
    assert outputs.shape == (5, 8)


def test_strict_promotion_takes_a_length(strict, key):
    rnn = nn.RNN.build(nn.LSTMCell, 3, 4, 2, bidirectional=True, key=key)
    run = jax.vmap(lambda xs, n: rnn(xs, length=n)[0])
    lengths = jnp.array([1, 2], jnp.uint8)
    assert jax.eval_shape(run, jnp.ones((2, 5, 3)), lengths).shape == (2, 5, 8)


def test_empty_sequence_leaves_the_states(key):
    rnn = nn.RNN.build(nn.GRUCell, 3, 4, 2, bidirectional=True, key=key)
    outputs, last = rnn(jnp.ones((0, 3)))
    assert outputs.shape == (0, 8) and not last[1][0].any()


def test_batch_over_the_devices_of_a_mesh(key, draw):
    rnn = nn.RNN.build(nn.GRUCell, 3, 4, bidirectional=True, key=key)
    batch, lengths = draw(4, 5, 3), jnp.array([5, 2, 0, 3])
    run = jax.vmap(lambda xs, n: rnn(xs, length=n)[0])
    wanted = run(batch, lengths)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.sharding.reshard((batch, lengths), P("data"))
        outputs = jax.jit(run)(*split)
        assert jax.typeof(outputs).sharding.spec == P("data", None, None)
        assert_close(outputs, wanted, rtol=1e-5)
        sharded = eqx.filter_shard_map(run, in_specs=P("data"), out_specs=P("data"))
        assert_close(sharded(*split), wanted, rtol=1e-5)


def test_scan_cell_takes_parts_of_a_batch_within_a_shard_map(key, draw):
    cell, batch = nn.GRUCell(3, 4, key=key), draw(4, 5, 3)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    run = jax.vmap(lambda xs: nn.scan_cell(cell, xs)[0])
    spec = {"in_specs": P("data"), "out_specs": P("data")}
    assert_close(
        eqx.filter_shard_map(run, mesh=mesh, **spec)(batch), run(batch), rtol=1e-5
    )


def test_sequences_of_numpy_are_those_of_jax(key):
    cell, xs = nn.LSTMCell(3, 4, key=key), np.ones((5, 3))
    expected, _ = nn.scan_cell(cell, jnp.asarray(xs))
    outs, _ = nn.scan_cell(cell, xs, (np.zeros(4), np.zeros(4)))
    assert_close(outs, expected)
    assert_close(nn.RNN(cell)(xs)[0], expected)
    outs, _ = nn.Bidirectional(cell, cell)(xs)
    assert_close(outs[:, :4], expected)


@pytest.mark.parametrize("xs", [None, (), [[1.0, 2.0]], jnp.ones(()), (jnp.ones(2), 1)])
def test_sequence_is_a_tree_of_arrays(xs, key):
    cell, message = nn.GRUCell(3, 4, key=key), "takes an array, or a pytree of arrays,"
    init, mask = jnp.ones(4), jnp.ones(2, bool)
    with pytest.raises(eqx.ShapeError, match=f"`scan_cell` {message} as `xs`"):
        nn.scan_cell(cell, xs, init, mask=mask)
    with pytest.raises(eqx.ShapeError, match=f"RNN {message} as `xs`"):
        nn.RNN(cell)(xs)


def test_bad_input_is_an_error_that_names_it(key):
    rnn = nn.RNN.build(nn.GRUCell, 3, 4, 2, bidirectional=True, key=key)
    xs = jnp.ones((5, 3))
    for args, kwargs, message in [
        ((xs, (None,)), {}, "2 in all, as `init`; got a tuple of length 1"),
        ((xs, (None, (1, 2, 3))), {}, r"At `layers\[1\]`: .* each direction, 2 in all"),
        ((xs,), {"length": jnp.array([1, 2])}, r"got shape \(2,\)\. Use `jax\.vmap`"),
        ((jnp.array(1.0),), {}, "with the sequence along the first axis"),
        ((xs[None],), {}, r"At `layers\[0\]\.forward`: .*one extra leading axis"),
        ((xs, ((None, jnp.ones(3)), None)), {}, r"`layers\[0\]\.backward`: .*`hidden`"),
    ]:
        with pytest.raises(eqx.ShapeError, match=message):
            rnn(*args, **kwargs)
    with pytest.raises(ValueError, match=r"from 0 to 5, .* as `length`; got 6"):
        rnn(xs, length=6)
    with pytest.raises(TypeError, match="an integer as `length`; got dtype float32"):
        rnn(xs, length=jnp.ones(()))
    with pytest.raises(ValueError, match="at least one layer"):
        nn.RNN([])
    with pytest.raises(ValueError, match=r"^RNN takes an int >= 1 as `num_layers`"):
        nn.RNN.build(nn.GRUCell, 3, 4, 0, key=key)


class Copy(eqx.Module):
    """Its state is its weight, whose gradient is then the number of steps."""

    weight: jax.Array

    def __call__(self, x, state):
        return self.weight + 0 * state

    def init_state(self):
        return jnp.zeros_like(self.weight)


@pytest.mark.parametrize(
    "run",
    [
        lambda cell, xs: nn.RNN(cell)(xs)[0],
        lambda cell, xs: nn.Bidirectional(cell, cell, jnp.add)(xs)[0] / 2,
        lambda cell, xs: nn.scan_cell(cell, xs)[0],
    ],
)
def test_gradient_in_half_precision_is_summed_over_the_steps_in_float32(run) -> None:
    cell, xs = Copy(jnp.ones(2, "bfloat16")), jnp.zeros((1024, 1), "bfloat16")
    total = lambda cell: run(cell, xs).sum(dtype=jnp.float32)  # noqa: E731
    # In bfloat16, a sum of ones does not grow beyond 256.
    assert eqx.filter_grad(total)(cell).weight.tolist() == [1024, 1024]
