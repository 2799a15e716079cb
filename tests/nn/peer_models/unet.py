"""A U-Net, written for Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp


class DoubleConv(eqx.Module):
    layers: eqx.nn.Sequential

    def __init__(self, channels, out, key):
        k1, k2 = jax.random.split(key)
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(channels, out, 3, padding=1, key=k1),
                eqx.nn.GroupNorm(2, out),
                eqx.nn.Lambda(jax.nn.silu),
                eqx.nn.Conv2d(out, out, 3, padding=1, padding_mode="REFLECT", key=k2),
                eqx.nn.GroupNorm(groups=out, channelwise_affine=False),
                eqx.nn.Dropout(0.2),
            ]
        )

    def __call__(self, x, *, key=None):
        return self.layers(x, key=key)


class UNet(eqx.Module):
    down: list
    pool: eqx.nn.AvgPool2d
    middle: DoubleConv
    up: list
    after: list
    final: eqx.nn.Conv2d
    act: eqx.nn.PReLU

    def __init__(self, sizes, *, key):
        keys = iter(jax.random.split(key, 20))
        pairs = [(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 1)]
        self.down = [DoubleConv(a, b, next(keys)) for a, b in pairs]
        self.pool = eqx.nn.AvgPool2d(2, 2)
        self.middle = DoubleConv(sizes[-1], sizes[-1], next(keys))
        backwards = [b for _, b in reversed(pairs)]
        self.up = [
            eqx.nn.ConvTranspose2d(b, b, 2, stride=2, key=next(keys)) for b in backwards
        ]
        outs = [*backwards[1:], backwards[-1]]
        self.after = [
            DoubleConv(2 * b, o, next(keys))
            for b, o in zip(backwards, outs, strict=True)
        ]
        self.final = eqx.nn.Conv2d(outs[-1], 1, kernel_size=1, key=next(keys))
        self.act = eqx.nn.PReLU()

    def __call__(self, x, key):
        keys = iter(jax.random.split(key, 10))
        skips = []
        for block in self.down:
            x = block(x, key=next(keys))
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x, key=next(keys))
        for up, block, skip in zip(self.up, self.after, reversed(skips), strict=True):
            x = block(jnp.concatenate([up(x), skip]), key=next(keys))
        return self.act(self.final(x))


@eqx.filter_jit
def step(model, x, key):
    def loss(params, static):
        model = eqx.combine(params, static)
        out = jax.vmap(model)(x, jax.random.split(key, len(x)))
        return jnp.mean((out - x[:, :1]) ** 2)

    params, static = eqx.partition(model, eqx.is_array)
    value, grads = jax.value_and_grad(loss)(params, static)
    params = jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    return eqx.combine(params, static), value


def run(key):
    model = UNet([2, 4], key=key)
    x = jax.random.normal(key, (2, 2, 8, 8))
    values = []
    for i in range(3):
        model, value = step(model, x, jax.random.PRNGKey(i))
        values.append(value)
    model = eqx.tree_at(lambda m: m.act.negative_slope, model, jnp.array(0.5))
    model = eqx.tree_inference(model, value=True)
    return (
        values,
        eqx.filter_jit(model)(x[0], key)[0, 0, :3],
        model.up[0].weight[0, 0, 0],
    )
