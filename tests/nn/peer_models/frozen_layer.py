"""Fine-tuning: only the last layer of an MLP is trained."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


def run(key):
    mkey, xkey = jr.split(key)
    model = eqx.nn.MLP(in_size=2, out_size=1, width_size=8, depth=2, key=mkey)
    xs = jr.normal(xkey, (16, 2))
    ys = jnp.sin(xs.sum(1, keepdims=True))

    is_trained = jax.tree_util.tree_map(lambda _: False, model)
    is_trained = eqx.tree_at(
        lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias),
        is_trained,
        replace=(True, True),
    )
    optim = optax.sgd(0.1)
    opt_state = optim.init(eqx.filter(model, is_trained))

    @eqx.filter_jit
    def make_step(model, opt_state):
        @eqx.filter_value_and_grad
        def loss(trained, fixed):
            pred = jax.vmap(eqx.combine(trained, fixed))(xs)
            return jnp.mean((pred - ys) ** 2)

        value, grads = loss(*eqx.partition(model, is_trained))
        updates, opt_state = optim.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    losses, first = [], model
    for _ in range(3):
        model, opt_state, loss = make_step(model, opt_state)
        losses.append(loss)
    fixed = [eqx.tree_equal(model.layers[i], first.layers[i]) for i in range(3)]
    return {"losses": losses, "fixed": fixed, "bias": model.layers[-1].bias}
