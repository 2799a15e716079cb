"""BatchNorm and SpectralNorm, with the state that they keep between steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Model(eqx.Module):
    norm1: eqx.nn.BatchNorm
    spectral_linear: eqx.nn.SpectralNorm
    norm2: eqx.nn.BatchNorm
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jr.split(key, 4)
        self.norm1 = eqx.nn.BatchNorm(input_size=3, axis_name="batch", mode="batch")
        self.spectral_linear = eqx.nn.SpectralNorm(
            layer=eqx.nn.Linear(3, 8, key=k1), weight_name="weight", key=k2
        )
        self.norm2 = eqx.nn.BatchNorm(input_size=8, axis_name="batch", mode="batch")
        self.linear1 = eqx.nn.Linear(8, 8, key=k3)
        self.linear2 = eqx.nn.Linear(8, 3, key=k4)

    def __call__(self, x, state):
        x, state = self.norm1(x, state)
        x, state = self.spectral_linear(x, state)
        x, state = self.norm2(jax.nn.relu(x), state)
        return self.linear2(jax.nn.relu(self.linear1(x))), state


def compute_loss(model, state, xs, ys):
    batch_model = jax.vmap(
        model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    pred, state = batch_model(xs, state)
    return jnp.mean((pred - ys) ** 2), state


def run(key):
    model, state = eqx.nn.make_with_state(Model)(key)
    xs = jr.normal(key, (8, 3))
    ys = xs**2
    optim = optax.sgd(0.05)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, state, opt_state):
        loss = eqx.filter_value_and_grad(compute_loss, has_aux=True)
        (value, state), grads = loss(model, state, xs, ys)
        updates, opt_state = optim.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    losses = []
    for _ in range(4):
        model, state, opt_state, loss = make_step(model, state, opt_state)
        losses.append(loss)
    resting = eqx.nn.inference_mode(model).spectral_linear
    out, _ = eqx.Partial(resting, state=state)(xs[0])
    means = [
        state.get(norm.batch_state_index)[0] for norm in (model.norm1, model.norm2)
    ]
    return {"losses": losses, "resting": out, "means": means}
