"""A convolutional GAN: two models with BatchNorm, each with its own state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Generator(eqx.Module):
    layers: list

    def __init__(self, latent, key):
        k1, k2 = jr.split(key)
        self.layers = [
            eqx.nn.ConvTranspose2d(latent, 4, 4, use_bias=False, key=k1),
            eqx.nn.BatchNorm(4, axis_name="batch", mode="ema"),
            jax.nn.relu,
            eqx.nn.ConvTranspose2d(4, 1, 4, 2, padding=1, use_bias=False, key=k2),
            jax.nn.tanh,
        ]

    def __call__(self, x, state):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return x, state


class Discriminator(eqx.Module):
    layers: list

    def __init__(self, key):
        k1, k2 = jr.split(key)
        self.layers = [
            eqx.nn.Conv2d(1, 4, 4, 2, padding=1, use_bias=False, key=k1),
            eqx.nn.BatchNorm(4, axis_name="batch", mode="ema"),
            eqx.nn.PReLU(jnp.float32(0.2)),
            eqx.nn.Conv2d(4, 1, 4, use_bias=False, key=k2),
        ]

    def __call__(self, x, state):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return x.reshape(()), state


def mapped(model):
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))


def loss_of_discriminator(discriminator, generator, states, real, noise):
    fake, g_state = mapped(generator)(noise, states[1])
    on_real, d_state = mapped(discriminator)(real, states[0])
    on_fake, d_state = mapped(discriminator)(fake, d_state)
    loss = optax.sigmoid_binary_cross_entropy(on_real, jnp.ones(len(real))).mean()
    loss += optax.sigmoid_binary_cross_entropy(on_fake, jnp.zeros(len(real))).mean()
    return loss, (d_state, g_state)


def loss_of_generator(generator, discriminator, states, real, noise):
    fake, g_state = mapped(generator)(noise, states[1])
    on_fake, d_state = mapped(discriminator)(fake, states[0])
    loss = optax.sigmoid_binary_cross_entropy(on_fake, jnp.ones(len(real))).mean()
    return loss, (d_state, g_state)


@eqx.filter_jit
def make_step(loss, model, other, states, optim, opt_state, real, noise):
    compute = eqx.filter_value_and_grad(loss, has_aux=True)
    (value, states), grads = compute(model, other, states, real, noise)
    updates, opt_state = optim.update(grads, opt_state)
    return eqx.apply_updates(model, updates), states, opt_state, value


def run(key):
    gkey, dkey, rkey, nkey = jr.split(key, 4)
    generator, g_state = eqx.nn.make_with_state(Generator)(3, gkey)
    discriminator, d_state = eqx.nn.make_with_state(Discriminator)(dkey)
    states = d_state, g_state
    real = jr.normal(rkey, (4, 1, 8, 8))
    noise = jr.normal(nkey, (4, 3, 1, 1))
    optim = optax.adam(0.01, b1=0.5, b2=0.999)
    g_opt = optim.init(eqx.filter(generator, eqx.is_array))
    d_opt = optim.init(eqx.filter(discriminator, eqx.is_array))
    losses, of_generator = [], []
    for _ in range(3):
        discriminator, states, d_opt, loss = make_step(
            loss_of_discriminator,
            discriminator, generator, states, optim, d_opt, real, noise,
        )  # fmt: skip
        losses.append(loss)
        generator, states, g_opt, loss = make_step(
            loss_of_generator,
            generator, discriminator, states, optim, g_opt, real, noise,
        )  # fmt: skip
        of_generator.append(loss)
    at_rest = eqx.nn.inference_mode(generator)
    image, _ = eqx.filter_jit(mapped(at_rest))(noise[:1], states[1])
    return {"losses": losses, "generator": of_generator, "image": image[0, 0, 0, :4]}
