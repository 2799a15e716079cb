"""Run by `test_layout.py` with eight devices: the temporary memory that a step needs.

For each mesh and batch, such as `data=2,model=4:64`, it prints what XLA says of the step of
`layout_gpt.py` in the size of 12 million parameters, and of the same step written by hand
in plain JAX: the bytes of a device's arguments, and of its temporary arrays.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import layout_gpt as t
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import equinox_like as eqx

t.WIDTH, t.DEPTH, t.VOCABULARY, t.LENGTH = 384, 6, 512, 40


def mean_loss(logits, tokens):
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# By a layout


def with_logits(model, tokens):
    model = eqx.gather(model)
    x = jax.vmap(model)(tokens[:, :-1])
    return mean_loss(jax.vmap(jax.vmap(model.embedding.attend))(x), tokens)


def train(model, state, tokens):
    value, grads = eqx.filter_value_and_grad(with_logits)(model, tokens)
    params = eqx.filter(model, eqx.trainable)
    updates, state = t.optimiser.update(grads, state, params)
    return eqx.apply_updates(model, updates), state, value


def by_layout(mesh, tokens):
    tables = {
        "params": {"embed": "data"} | t.TENSOR,
        "compute": {"batch": "data"} | t.TENSOR,
    }
    layout = eqx.Layout(mesh, t.RULES, **tables)
    like = eqx.filter_eval_shape(t.make, jax.random.key(0))
    held = jax.tree.map(
        lambda x, where: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) if where else x
        ),
        like,
        layout.shardings(like),
    )
    rows = NamedSharding(layout.mesh, P("data"))
    tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=rows)
    return layout.jit(train, donate=("model", "state")).lower(*held, tokens)


# By hand: the spec of each parameter as it is kept, without the axis of the layers

KEPT = {
    "norms": P(),
    "query": P("model", "data"),
    "key": P("model", "data"),
    "value": P("model", "data"),
    "output": P("data", "model"),
    "up": P("model", "data"),
    "up_bias": P("model"),
    "down": P("data", "model"),
    "down_bias": P(),
}
EMBEDDING = P("model", "data")


def shapes_of():
    width, wide = t.WIDTH, 5 * t.WIDTH
    square = (width, width)
    shapes = {
        "norms": (2, width),
        **dict.fromkeys(("query", "key", "value", "output"), square),
        "up": (wide, width),
        "up_bias": (wide,),
        "down": (width, wide),
        "down_bias": (width,),
    }
    return {
        "embedding": (t.VOCABULARY, width),
        "norm": (width,),
        "blocks": {name: (t.DEPTH, *shape) for name, shape in shapes.items()},
    }


def used(spec):
    return P(*(None if axis == "data" else axis for axis in spec))


def normed(x, weight):
    return weight * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def rotated(x):
    """Of the shape batch, position, head and size."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 1e4 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(constrain, x, p):
    p = {name: constrain(w, used(KEPT[name])) for name, w in p.items()}
    y = normed(x, p["norms"][0])
    q, k, v = (
        (y @ p[name].T).reshape(*x.shape[:2], t.HEADS, -1)
        for name in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + y.reshape(x.shape) @ p["output"].T
    y = jax.nn.gelu(normed(x, p["norms"][1]) @ p["up"].T + p["up_bias"])
    x = x + y @ p["down"].T + p["down_bias"]
    return constrain(x, P("data")), None


def by_hand(mesh, tokens):
    sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrain(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def loss(params, tokens):
        embedding = constrain(params["embedding"], used(EMBEDDING))
        x = constrain(embedding[tokens[:, :-1]], P("data"))
        step = jax.checkpoint(functools.partial(block, constrain))
        x, _ = jax.lax.scan(step, x, params["blocks"])
        return mean_loss(normed(x, params["norm"]) @ embedding.T, tokens)

    def train(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = t.optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def struct(shape, spec, dtype="float32"):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    shapes = shapes_of()
    params = {
        "embedding": struct(shapes["embedding"], EMBEDDING),
        "norm": struct(shapes["norm"], P()),
        "blocks": {
            name: struct(shape, P(None, *KEPT[name]))
            for name, shape in shapes["blocks"].items()
        },
    }
    adam, *rest = jax.eval_shape(t.optimiser.init, params)
    count = struct((), P(), adam.count.dtype)
    state = (adam._replace(count=count, mu=params, nu=params), *rest)
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(train, donate_argnums=(0, 1), out_shardings=(*where, None))
    return step.lower(params, state, struct(tokens.shape, P("data"), tokens.dtype))


def main(*cases):
    for case in cases:
        mesh, _, batch = case.partition(":")
        tokens = t.tokens_of(int(batch), 0)
        for lowered in by_layout(mesh, tokens), by_hand(mesh, tokens):
            found = lowered.compile().memory_analysis()
            print(found.argument_size_in_bytes, found.temp_size_in_bytes)


main(*sys.argv[1:])
