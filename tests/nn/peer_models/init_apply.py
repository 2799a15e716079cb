"""A model as a pair of functions: the arrays of it are passed to `jax.jit` alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Network(eqx.Module):
    linear: eqx.nn.Linear
    activation: eqx.nn.PReLU
    out: eqx.nn.Linear

    def __init__(self, size, *, key):
        k1, k2 = jr.split(key)
        self.linear = eqx.nn.Linear(size, 8, key=k1)
        self.activation = eqx.nn.PReLU()
        self.out = eqx.nn.Linear(8, "scalar", key=k2)

    def __call__(self, x):
        return self.out(self.activation(self.linear(x)))


def make(make_model):
    def init(key):
        params, _ = eqx.partition(make_model(key=key), eqx.is_inexact_array)
        return params

    # Without any numbers, which `init` draws.
    _, static = eqx.partition(
        eqx.filter_eval_shape(make_model, key=jr.PRNGKey(0)),
        lambda x: isinstance(x, jax.ShapeDtypeStruct),
    )

    def apply(params, x):
        return eqx.combine(params, static)(x)

    return init, apply


def run(key):
    init, apply = make(functools.partial(Network, 3))
    xkey, pkey = jr.split(key)
    xs = jr.normal(xkey, (16, 3))
    ys = jnp.prod(xs, axis=1)
    params = init(pkey)
    optim = optax.adam(0.05)
    opt_state = optim.init(params)

    @jax.jit
    def make_step(params, opt_state):
        def loss(params):
            pred = jax.vmap(apply, in_axes=(None, 0))(params, xs)
            return jnp.mean((pred - ys) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optim.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    losses = []
    for _ in range(4):
        params, opt_state, loss = make_step(params, opt_state)
        losses.append(loss)
    return {"losses": losses, "slope": params.activation.negative_slope}
