"""The GPT by Flax NNX."""

import sys

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from ._sizes import DEPTH, HEADS, STEPS, VOCABULARY, WIDTH, tokens_of

sizes = [int(size) for size in sys.argv[2].split(",")]  # mesh
kinds = (AxisType.Auto, AxisType.Auto)  # mesh
mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=kinds)  # mesh
tensor = (("vocab", "model"), ("heads", "model"), ("mlp", "model"))  # mesh
params, compute = (("embed", "data"), *tensor), (("embed", None), *tensor)  # mesh


def named(*names):  # mesh
    init = nnx.initializers.lecun_normal()  # mesh
    return nnx.with_partitioning(init, names)  # mesh


def gathered(module):  # mesh
    graph, state = nnx.split(module)  # mesh
    with nnx.logical_axis_rules(compute):  # mesh
        specs = nnx.get_named_sharding(state, mesh)  # mesh
    return nnx.merge(graph, jax.lax.with_sharding_constraint(state, specs))  # mesh


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=WIDTH,
            use_bias=False,
            decode=False,
            kernel_init=named("embed", "heads", None),  # mesh
            out_kernel_init=named("heads", None, "embed"),  # mesh
            rngs=rngs,
        )
        self.second_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(
            WIDTH,
            5 * WIDTH,
            kernel_init=named("embed", "mlp"),  # mesh
            bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("mlp",)),  # mesh
            rngs=rngs,
        )
        self.down = nnx.Linear(
            5 * WIDTH,
            WIDTH,
            kernel_init=named("mlp", "embed"),  # mesh
            rngs=rngs,
        )

    def __call__(self, x):
        y = self.first_norm(x)
        x = x + self.attention(y, is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.second_norm(x))))


@nnx.split_rngs(splits=DEPTH)
@nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
def make_blocks(rngs):
    return Block(rngs)


@nnx.scan(
    in_axes=(0, nnx.Carry),
    out_axes=nnx.Carry,
    transform_metadata={nnx.PARTITION_NAME: None},  # mesh
)
@nnx.remat
def through(block, x):
    rows = NamedSharding(mesh, P("data"))  # mesh
    x = gathered(block)(x)  # mesh
    return jax.lax.with_sharding_constraint(x, rows)  # mesh


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(
            VOCABULARY,
            WIDTH,
            embedding_init=named("vocab", "embed"),  # mesh
            rngs=rngs,
        )
        self.blocks = make_blocks(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        embedding = gathered(self.embedding)  # mesh
        rows = NamedSharding(mesh, P("data"))  # mesh
        x = jax.lax.with_sharding_constraint(embedding(tokens), rows)  # mesh
        x = through(self.blocks, x)
        return embedding.attend(self.norm(x))


@nnx.jit
def make():
    model = GPT(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def loss_fn(model, tokens):
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimiser, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimiser.update(model, grads)
    return loss


with jax.set_mesh(mesh), nnx.logical_axis_rules(params):  # mesh
    model, optimiser = make()
    for i in range(STEPS):
        rows = NamedSharding(mesh, P("data"))  # mesh
        tokens = jax.make_array_from_process_local_data(rows, tokens_of(i))  # mesh
        print(f"{train_step(model, optimiser, tokens):.4f}")
