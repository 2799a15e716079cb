import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(cell, x, h):
    """The formula of Cho et al. 2014, in NumPy."""
    size = len(h)
    w, u = np.asarray(cell.weight_ih), np.asarray(cell.weight_hh)
    b = np.zeros(3 * size) if cell.bias is None else np.asarray(cell.bias)
    b_n = 0 if cell.bias_n is None else np.asarray(cell.bias_n)
    rows = [slice(i * size, (i + 1) * size) for i in range(3)]
    r, z = (sigmoid(w[i] @ x + u[i] @ h + b[i]) for i in rows[:2])
    n = np.tanh(w[rows[2]] @ x + b[rows[2]] + r * (u[rows[2]] @ h + b_n))
    return (1 - z) * n + z * h


def lstm(cell, x, h, c):
    """The formula of Hochreiter and Schmidhuber 1997, with a forget gate, in NumPy."""
    gates = np.asarray(cell.weight_ih) @ x + np.asarray(cell.weight_hh) @ h
    if cell.bias is not None:
        gates = gates + np.asarray(cell.bias)
    i, f, g, o = np.split(gates, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def test_first_values_and_results_are_those_of_the_contract(k0) -> None:
    cell = nn.GRUCell(3, 2, key=k0)
    weight = [0.4841053, -0.4491844, -0.3858284]
    np.testing.assert_allclose(cell.weight_ih[0], weight, atol=1e-7)
    np.testing.assert_allclose(cell.bias_n, [-0.3295266, 0.3308555], atol=1e-7)
    out = cell(jnp.ones(3), jnp.ones(2))
    np.testing.assert_allclose(out, [0.6006681, 0.6347354], atol=1e-5)
    h, c = nn.LSTMCell(3, 2, key=k0)(jnp.ones(3), (jnp.ones(2), jnp.ones(2)))
    np.testing.assert_allclose(h, [0.1833377, 0.2041138], atol=1e-5)
    np.testing.assert_allclose(c, [0.4709673, 0.4090015], atol=1e-5)


@pytest.mark.parametrize(("cls", "n"), [(nn.GRUCell, 4), (nn.LSTMCell, 3)])
def test_first_values_are_uniform_and_do_not_depend_on_the_bias(cls, n, k0) -> None:
    cell, keys = cls(3, 5, key=k0), jax.random.split(k0, n)
    lim = np.sqrt(1 / 5)
    arrays = [cell.weight_ih, cell.weight_hh, cell.bias]
    arrays += [cell.bias_n] if cls is nn.GRUCell else []
    for array, key in zip(arrays, keys, strict=True):
        drawn = jax.random.uniform(key, array.shape, minval=-lim, maxval=lim)
        assert (array == drawn).all()
    unbiased = cls(3, 5, use_bias=False, key=k0)
    assert (unbiased.weight_hh == cell.weight_hh).all() and unbiased.bias is None


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("size", [0, 3])
def test_results_are_those_of_the_formulas(use_bias, size, x64, draw, build) -> None:
    x, h, c = draw(size), draw(4), draw(4)
    cell = build(nn.GRUCell, size, 4, use_bias)
    np.testing.assert_allclose(cell(x, h), gru(cell, x, h), rtol=1e-12)
    cell = build(nn.LSTMCell, size, 4, use_bias)
    outs, expected = cell(x, (h, c)), lstm(cell, x, h, c)
    assert isinstance(outs, tuple)
    for out, wanted in zip(outs, expected, strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-12)
    assert eqx.tree_equal(cell(x, [h, c]), outs)


def test_wrong_shapes_name_the_argument(key) -> None:
    cell = nn.GRUCell(3, 2, key=key)
    with pytest.raises(eqx.ShapeError, match=r"GRUCell takes `input` of shape \(3,\)"):
        cell(jnp.ones(2), jnp.ones(2))
    with pytest.raises(
        eqx.ShapeError, match=r"`hidden` .*one extra leading axis.*jax\.vmap"
    ):
        cell(jnp.ones(3), jnp.ones((5, 2)))
    cell = nn.LSTMCell(3, 2, key=key)
    for at, hidden in enumerate([(3, 2), (2, 3)]):
        with pytest.raises(eqx.ShapeError, match=rf"LSTMCell takes `hidden\[{at}\]`"):
            cell(jnp.ones(3), tuple(map(jnp.ones, hidden)))


@pytest.mark.parametrize("cls", [nn.GRUCell, nn.LSTMCell])
def test_hidden_size_zero_is_an_error(cls, key) -> None:
    message = f"^{cls.__name__} takes an int >= 1 as `hidden_size`; got 0"
    with pytest.raises(ZeroDivisionError, match=message):
        cls(3, 0, key=key)


def test_init_state_is_zeros_of_the_right_structure(key) -> None:
    cell = nn.LSTMCell(3, 2, dtype=jnp.bfloat16, key=key)
    for part in cell.init_state():
        assert part.shape == (2,) and part.dtype == jnp.bfloat16 and not part.any()
    assert nn.GRUCell(3, 2, key=key).init_state(dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize("cls", [nn.GRUCell, nn.LSTMCell])
def test_weight_that_is_not_an_array_has_a_default_state(cls, draw, key) -> None:
    class Doubled(eqx.Module):
        half: jax.Array

        def __matmul__(self, x):
            return 2 * (self.half @ x)

    cell, xs = cls(3, 2, dtype=jnp.float16, key=key), draw(5, 3).astype(jnp.float16)
    other = eqx.tree_at("weight_hh", cell, replace_fn=lambda w: Doubled(w / 2))
    assert eqx.tree_equal(other.init_state(), cell.init_state())
    assert eqx.tree_equal(nn.scan_cell(other, xs), nn.scan_cell(cell, xs))


@pytest.mark.parametrize("cls", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_cell_is_the_loop(cls, reverse, draw, key) -> None:
    cell, xs = cls(3, 2, key=key), draw(5, 3)
    mask = jnp.array([True, True, False, True, False])
    outs, final = jax.jit(
        lambda xs: nn.scan_cell(cell, xs, reverse=reverse, mask=mask)
    )(xs)
    state, expected = cell.init_state(), {}
    for i in reversed(range(5)) if reverse else range(5):
        state = cell(xs[i], state) if mask[i] else state
        expected[i] = state[0] if cls is nn.LSTMCell else state
    rows = jnp.stack([expected[i] for i in range(5)])
    np.testing.assert_allclose(outs, rows, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(final), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_scan_cell_starts_from_a_given_state_and_checks_the_mask(draw, key) -> None:
    cell, xs, h = nn.GRUCell(3, 2, key=key), draw(1, 3), draw(2)
    outs, _ = nn.scan_cell(cell, xs, h)
    np.testing.assert_allclose(outs[0], cell(xs[0], h), rtol=1e-6)
    with pytest.raises(eqx.ShapeError, match=r"`mask` of shape \(1,\)"):
        nn.scan_cell(cell, xs, mask=jnp.ones(2, bool))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("sequence", [list, tuple])
def test_scan_cell_takes_what_the_cell_takes(sequence, dtype, draw, key) -> None:
    cell, xs = nn.LSTMCell(3, 2, key=key), draw(2, 3).astype(jnp.float32)
    init = sequence([jnp.asarray([1, 2], dtype), jnp.zeros(2)])
    outs, last = nn.scan_cell(cell, xs, init)
    expected = cell(xs[1], cell(xs[0], init))
    for a, b in zip(last, expected, strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(outs[1], expected[0], rtol=1e-6)
    rnn_outs, _ = nn.RNN([cell])(xs, [init])
    np.testing.assert_allclose(rnn_outs, outs, rtol=1e-6)


def test_wrong_arguments_of_scan_cell_are_named(key, without_type_checks) -> None:
    cell, xs = nn.GRUCell(3, 2, key=key), jnp.ones((5, 3))
    with pytest.raises(TypeError, match=r"array as `mask`; got a list.*jnp\.asarray"):
        nn.scan_cell(cell, xs, mask=[True] * 5)
    message = r"`init` is shape \(3,\).*the function returned shape \(6,\)"
    with pytest.raises(eqx.ShapeError, match=message):
        nn.scan_cell(lambda x, h: jnp.concatenate([h, x]), xs, jnp.ones(3))
    with pytest.raises(eqx.ShapeError, match=r"`init` is shape \(2,\).*\['shape"):
        nn.scan_cell(lambda x, h: [cell(x, h)], xs, jnp.ones(2))


@pytest.mark.parametrize(
    ("hidden", "given"),
    [
        (jnp.ones(4), r"float32\[4\]"),
        (jnp.ones((2, 4)), r"float32\[2,4\]"),
        ((jnp.ones(4),), "a tuple of length 1"),
        (None, "None"),
    ],
)
def test_lstm_takes_a_pair(hidden, given, key, without_type_checks) -> None:
    cell = nn.LSTMCell(3, 4, key=key)
    with pytest.raises(
        TypeError, match=rf"LSTMCell takes the pair `\(h, c\)`.*got {given}"
    ):
        cell(jnp.ones(3), hidden)
    h, _ = cell(jnp.ones(3), [jnp.ones(4), jnp.ones(4)])
    assert h.shape == (4,)


@pytest.mark.parametrize("cls", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("policy", [None, "compute=bf16", "compute=bf16,output=f32"])
def test_default_state_has_the_dtype_that_the_cell_returns(cls, policy, key) -> None:
    dtype = "bfloat16" if policy is None else "float32"
    cell = cls(3, 4, dtype=dtype, key=key)
    if policy is not None:
        cell = nn.mixed(cell, policy)
    expected = "bfloat16" if policy == "compute=bf16" else "float32"
    for length in (0, 2):
        outputs, final = nn.scan_cell(cell, jnp.ones((length, 3)))
        assert outputs.dtype == expected
        assert all(x.dtype == expected for x in jax.tree.leaves(final))
