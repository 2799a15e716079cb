"""A vision transformer, written for Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp


class PatchEmbedding(eqx.Module):
    conv: eqx.nn.Conv2d

    def __init__(self, channels, dim, patch, *, key):
        self.conv = eqx.nn.Conv2d(channels, dim, patch, stride=patch, key=key)

    def __call__(self, x):
        x = self.conv(x)
        return x.reshape(x.shape[0], -1).T


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, dim, heads, *, key):
        k1, k2 = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(dim)
        self.norm2 = eqx.nn.RMSNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(
            heads, dim, use_query_bias=True, use_output_bias=True, dropout_p=0.1, key=k1
        )
        self.rope = eqx.nn.RotaryPositionalEmbedding(dim // heads)
        self.mlp = eqx.nn.MLP(dim, dim, 2 * dim, 1, activation=jax.nn.gelu, key=k2)
        self.dropout = eqx.nn.Dropout(0.1)

    def _heads(self, q, k, v):
        rotate = jax.vmap(self.rope, in_axes=1, out_axes=1)
        return rotate(q), rotate(k), v

    def __call__(self, x, *, key=None):
        k1, k2 = (None, None) if key is None else jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, process_heads=self._heads, key=k1)
        y = jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))
        return x + self.dropout(y, key=k2)


class ViT(eqx.Module):
    patches: PatchEmbedding
    positions: jax.Array
    blocks: list
    head: eqx.nn.Sequential

    def __init__(self, *, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.patches = PatchEmbedding(1, 8, 4, key=k1)
        self.positions = 0.02 * jax.random.normal(k2, (4, 8))
        self.blocks = [Block(8, 2, key=k) for k in jax.random.split(k3, 1)]
        self.head = eqx.nn.Sequential(
            [eqx.nn.LayerNorm(8), eqx.nn.Lambda(jnp.tanh), eqx.nn.Linear(8, 3, key=k4)]
        )

    def __call__(self, x, *, key=None):
        x = self.patches(x) + self.positions
        count = len(self.blocks)
        keys = [None] * count if key is None else jax.random.split(key, count)
        for block, block_key in zip(self.blocks, keys, strict=True):
            x = block(x, key=block_key)
        return self.head(x.mean(axis=0))


@eqx.filter_jit
def step(model, x, y, key):
    @eqx.filter_value_and_grad
    def loss(model):
        logits = jax.vmap(lambda x, k: model(x, key=k))(
            x, jax.random.split(key, len(x))
        )
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, 3), 1))

    value, grads = loss(model)
    updates = jax.tree_util.tree_map(lambda g: -0.1 * g, grads)
    return eqx.apply_updates(model, updates), value


def run(key):
    model = ViT(key=key)
    x, y = jax.random.normal(key, (3, 1, 8, 8)), jnp.array([0, 1, 2])
    values = []
    for i in range(3):
        model, value = step(model, x, y, jax.random.PRNGKey(i))
        values.append(value)
    model = eqx.nn.inference_mode(model)
    return (
        values,
        eqx.filter_jit(jax.vmap(model))(x)[0],
        model.blocks[0].mlp.layers[0].weight[0, :3],
    )
