"""An LSTM classifier of token sequences, written for Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class Classifier(eqx.Module):
    embedding: eqx.nn.Embedding
    cell: eqx.nn.LSTMCell
    gru: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array
    hidden_size: int = eqx.field(static=True)

    def __init__(self, vocabulary, size, hidden, *, key):
        ekey, ckey, gkey, lkey = jr.split(key, 4)
        self.hidden_size = hidden
        self.embedding = eqx.nn.Embedding(vocabulary, size, key=ekey)
        self.cell = eqx.nn.LSTMCell(size, hidden, key=ckey)
        self.gru = eqx.nn.GRUCell(hidden, hidden, use_bias=False, key=gkey)
        self.linear = eqx.nn.Linear(hidden, "scalar", use_bias=False, key=lkey)
        self.bias = jnp.zeros(())

    def __call__(self, tokens):
        zeros = jnp.zeros((self.hidden_size,))

        def f(carry, token):
            hc, g = carry
            hc = self.cell(self.embedding(token), hc)
            return (hc, self.gru(hc[0], g)), None

        (_, out), _ = jax.lax.scan(f, ((zeros, zeros), zeros), tokens)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


@eqx.filter_value_and_grad
def compute_loss(model, x, y):
    pred = jax.vmap(model)(x)
    return -jnp.mean(y * jnp.log(pred) + (1 - y) * jnp.log(1 - pred))


@eqx.filter_jit
def make_step(model, x, y):
    loss, grads = compute_loss(model, x, y)
    updates = jax.tree_util.tree_map(lambda g: -0.5 * g, grads)
    return loss, eqx.apply_updates(model, updates)


def run(key):
    model = Classifier(7, 4, 5, key=key)
    x = jr.randint(key, (6, 8), 0, 7)
    y = (x[:, 0] > 3).astype(jnp.float32)
    losses = []
    for _ in range(3):
        loss, model = make_step(model, x, y)
        losses.append(loss)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    again = eqx.combine(params, static)
    return losses, jax.vmap(again)(x), again.cell.weight_hh[0, :3]
