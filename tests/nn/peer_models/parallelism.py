"""Data parallelism: the batch is split over the devices, the model is on each of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


def run(key):
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), (AxisType.Auto,))
    split = NamedSharding(mesh, P("batch"))
    everywhere = NamedSharding(mesh, P())
    mkey, xkey = jr.split(key)
    model = eqx.nn.MLP(2, 1, 8, 2, key=mkey)
    optim = optax.adam(1e-2)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    def compute_loss(model, xs, ys):
        return jnp.mean((jax.vmap(model)(xs) - ys) ** 2)

    @eqx.filter_jit(donate="all")
    def make_step(model, opt_state, xs, ys):
        model, opt_state = eqx.filter_shard((model, opt_state), everywhere)
        xs, ys = eqx.filter_shard((xs, ys), split)
        loss, grads = eqx.filter_value_and_grad(compute_loss)(model, xs, ys)
        updates, opt_state = optim.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        model, opt_state = eqx.filter_shard((model, opt_state), everywhere)
        return model, opt_state, loss

    model, opt_state = eqx.filter_shard((model, opt_state), everywhere)
    losses = []
    for _ in range(3):
        xs = jr.normal(xkey, (16, 2))
        xs, ys = eqx.filter_shard((xs, xs.sum(1, keepdims=True)), split)
        model, opt_state, loss = make_step(model, opt_state, xs, ys)
        losses.append(loss)
    devices = len(model.layers[0].weight.sharding.device_set)
    return {"losses": losses, "on all": devices == jax.device_count()}
