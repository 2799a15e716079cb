"""Arguments that a user may pass by mistake: the error names the argument and the fix."""

import ast
import builtins
import contextlib
import functools
import inspect
import re
import traceback

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


@functools.cache
def names():
    """What the calls below use."""
    k, raw = jax.random.key(0), jax.random.PRNGKey(0)
    ks = jax.random.split(k, 2)
    x, xs = jnp.ones(4), jnp.ones((3, 4))
    objects = np.array([None] * 4)
    he_normal = jax.nn.initializers.he_normal
    L = nn.Linear(4, 4, key=k)
    cell = nn.GRUCell(4, 4, key=k)
    block = nn.ReversibleBlock(nn.Linear(2, 2, key=k), jnp.tanh)
    one_way, both = nn.RNN([cell]), nn.Bidirectional(cell, cell)
    spectral = nn.SpectralNorm(L, "weight", key=k)
    attention = nn.MultiheadAttention(2, 4, dropout_p=0.5, key=k)
    seq = nn.Sequential([L, nn.Dropout()])
    stacked = nn.Stacked.from_layers([L, L])
    conv = nn.Conv2d(1, 1, 3, key=k)
    scale = nn.DynamicLossScale()
    norm, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")
    over_batch = jax.vmap(norm, axis_name="batch", in_axes=(0, None))
    _, mapped = over_batch(jnp.ones((8, 3)), state)

    def logits(tokens, cache):
        return jnp.zeros((len(tokens), 5)), cache

    def forgets(tokens, cache):
        return jnp.zeros((len(tokens), 5)), None

    return globals() | locals()


# For each call the class of the error, and parts of its message; `;` is a comma in a part.
CALLS = {
    # A key that is passed by position, or forgotten.
    "nn.Linear(2, 3, k)": "TypeError: Pass `key` by name: `Linear(2, 3, key=key)`.",
    "nn.Linear(2, 3, raw)": "TypeError: `Linear(2, 3, key=key)`.",
    "nn.Linear(2, 3, True, None, k)": "TypeError: `Linear(2, 3, True, None, key=key)`.",
    "nn.Linear(2, 3, use_bias=False)": "TypeError: 3, use_bias=False, key=key)`.",
    "nn.MLP(2, 2, 4, 1, jnp.tanh, k)": "TypeError: `MLP(2, 2, 4, 1, ..., key=key)`.",
    "nn.Conv2d(1, 2, 3, k)": "TypeError: `Conv2d(1, 2, 3, key=key)`.",
    "nn.Embedding(3, 2, k)": "ValueError: Embedding, `weight`, by name: `key=key`.",
    "nn.Embedding(3, 2, raw)": "ValueError: by name: `key=key`.",
    "nn.Stacked(L, 3, k)": "TypeError: `Stacked(..., 3, key=key)`.",
    "nn.Dropout(0.5, False, k)": "TypeError: These are passed by name: `deterministic`",
    "nn.Linear(2, 3, use_bais=False, key=k)": "TypeError: Did you mean, use_bias",
    # Another argument that is forgotten.
    "nn.Conv2d(1, 4, key=k)": (
        "TypeError: Conv2d.__init__(), Write `Conv2d(1; 4; kernel_size; key=key)`."
    ),
    "nn.Conv2d(1, 4, k)": "TypeError: `Conv2d(1; 4; kernel_size; key=key)`.",
    "nn.ConvTranspose1d(1, 4, key=k)": "TypeError: ConvTranspose1d.__init__()",
    "nn.Linear(2, key=k)": "TypeError: Write `Linear(2; out_features; key=key)`.",
    "nn.MLP(2, width_size=4, depth=1, key=k)": "TypeError: `MLP(2; out_size; width_size=4",
    "nn.MLP(2, out_size=2, depth=1, key=k)": "TypeError: out_size=2; width_size=width_size",
    "nn.Linear(2, use_bias=False)": (
        "TypeError: `Linear(2; out_features; use_bias=False; key=key)`."
    ),
    "nn.GRUCell(3, key=raw)": "TypeError: Write `GRUCell(3; hidden_size; key=key)`.",
    "nn.AvgPool2d(stride=2)": "TypeError: AvgPool2d.__init__(), 'kernel_size'",
    "nn.Shared(L)": "TypeError: Write `Shared(...; where; get)`.",
    # Several layers in place of a list, and the arguments of another constructor.
    "nn.Sequential(L, L)": "TypeError: Pass one list: `Sequential([...; ...])`.",
    "nn.Sequential(L, jnp.tanh, L)": "TypeError: Pass one list: `Sequential([...; ...])`.",
    "nn.RNN(cell, cell)": "TypeError: Pass one list: `RNN([...; ...])`.",
    "nn.ReversibleSequential(block, block)": "TypeError: Pass one list",
    "nn.RNN(nn.GRUCell, 3, 5, key=k)": (
        "TypeError: `RNN.build(cell; input_size; hidden_size; key=key)`."
    ),
    "nn.RNN(nn.GRUCell, 3, 5)": (
        "TypeError: `RNN.build(cell; input_size; hidden_size; key=key)`."
    ),
    "nn.RNN(3, 5, num_layers=2)": (
        "TypeError: `RNN.build(cell; input_size; hidden_size; key=key)`."
    ),
    # A state that is forgotten.
    "norm(jnp.ones(3))": (
        "TypeError: BatchNorm.__call__(), `make_with_state`, `out; state = layer(x; state)`"
    ),
    "norm(jnp.ones(3), key=k)": "TypeError: `out; state = layer(x; state; key=key)`.",
    "spectral(x)": "TypeError: SpectralNorm.__call__(), `out; state = layer(x; state)`.",
    "jax.vmap(norm, axis_name='batch')(jnp.ones((8, 3)))": "TypeError: `make_with_state`",
    "cell(x)": "TypeError: GRUCell.__call__(), Write `layer(input; hidden)`.",
    "attention(xs)": "TypeError: Write `layer(query; key_; value)`.",
    # The name of a function in place of the function.
    "nn.MLP(2, 2, 4, 1, 'relu', key=k)": "TypeError: Did you mean `jax.nn.relu`?",
    "nn.MLP(2, 2, 4, 1, final_activation='sigmoid', key=k)": "TypeError: jax.nn.sigmoid",
    "nn.Lambda('rleu')": "TypeError: Lambda, `fn`, Did you mean `jax.nn.relu`?",
    "nn.Sequential([L, 'relu'])(x)": "TypeError: `layers[1]`, `jax.nn.relu`?",
    # A word that is misspelt.
    "nn.Conv2d(1, 1, 3, padding='smae', key=k)": "ValueError: Did you mean 'SAME'?",
    "nn.Conv2d(1, 1, 3, padding_mode='zero', key=k)": "ValueError: mean 'ZEROS'?",
    "nn.BatchNorm(3, mode='bacth')": "ValueError: Did you mean 'batch'?",
    "nn.BatchNorm(3, mode='batch', debias='exakt')": "ValueError: mean 'exact'?",
    "nn.resize(xs, size=(4,), method='liner')": "ValueError: Did you mean 'linear'?",
    "nn.Linear('scaler', 2, key=k)": "ValueError: Did you mean 'scalar'?",
    "nn.Linear(2, 2, weight_init='he_nromal', key=k)": "ValueError: mean 'he_normal'?",
    "nn.Linear(2, 2, dtype='bf16', key=k)": "ValueError: Did you mean 'bfloat16'?",
    "nn.WeightNorm(L, 'wieght')": "AttributeError: Did you mean 'weight'?",
    "attention.init_cache(4, overflow='rings')": "ValueError: Did you mean 'ring'?",
    "nn.dot_product_attention(xs, xs, xs, implementation='cuddn')": "ValueError: 'cudnn'?",
    "nn.Stacked.from_layers([L, L], checkpoint='dots_savable')": (
        "ValueError: Did you mean 'dots_saveable'?"
    ),
    "nn.Policy.parse('param=f32')": "ValueError: Did you mean 'params=f32'?",
    "nn.Policy(compute=jnp.bfloat16)": "TypeError: Did you mean, compute_dtype",
    "nn.mixed(L, 'bf16')": "ValueError: write 'compute=bf16'.",
    "nn.mixed(L, jnp.bfloat16)": "TypeError: write `mixed(layer, 'compute=bf16')`.",
    "nn.add_lora(seq, 'layer[0]', rank=2, key=k)": "ValueError: mean `layers[0]`?",
    "nn.reinit(seq, [('**.wieght', 'zeros')], key=k)": "ValueError: mean `**.weight`?",
    # A model that `generate` cannot call.
    "nn.generate(seq.layers[0], [1], (), 2, key=k)": (
        "TypeError: `def __call__(self, tokens, cache)`, return `logits, cache`."
    ),
    "nn.generate(lambda x: x, [1, 2], (), 2, key=k)": "TypeError: does not take: too many",
    "nn.generate(logits, [1], xs, 2, key=k)": "TypeError: by `attention.init_cache(n)`.",
    # A class, or no layer at all, in place of a layer.
    "nn.Sequential([L, nn.Dropout])": "TypeError: Sequential, `layers[1]`, `Dropout(...)`",
    "nn.Sequential(L)": "TypeError: Sequential, `layers`, a Linear, `Sequential([...])`",
    "nn.RNN([nn.GRUCell])": "TypeError: RNN, `layers[0]`, `GRUCell(...)`",
    "nn.RNN([None])": "TypeError: RNN, `layers[0]`, None",
    "nn.Bidirectional(nn.GRUCell, cell)": "TypeError: `forward`, `GRUCell(...)`",
    "nn.Bidirectional(cell, 3)": "TypeError: `backward`, an int",
    "nn.Bidirectional(cell, cell, 'sum')": "TypeError: `merge`, a str",
    "nn.ReversibleSequential([nn.ReversibleBlock])": "TypeError: `blocks[0]`",
    "nn.ReversibleSequential(block)": "TypeError: `blocks`, `ReversibleSequential([...])`",
    "nn.ReversibleBlock(None, None)": "TypeError: `f`, None",
    "nn.ReversibleBlock(L, nn.Linear)": "TypeError: `g`, `Linear(...)`",
    "nn.Stacked.from_layers([nn.Linear, nn.Linear])": "TypeError: `layers[0]`",
    "nn.Stacked.from_layers(L)": "TypeError: `layers`, `Stacked.from_layers([...])`",
    "nn.Stacked(3, 3, key=k)": "TypeError: Stacked, `make_layer`, an int",
    "nn.Stacked(L, 3, key=k)": "ShapeError: `make_layer`, `Stacked.from_layers([...])`",
    "nn.mixed(nn.Linear, 'compute=bf16')": "TypeError: `layer`, `Linear(...)`",
    "nn.mixed(None, 'compute=bf16')": "TypeError: `mixed`, `layer`, None",
    "nn.mixed(L, 'compute=bf16', keep=(3,))": "TypeError: `mixed`, `keep`, an int",
    "nn.Lambda(3)": "TypeError: Lambda, `fn`, an int",
    "nn.LoRA(nn.Linear, 2, key=k)": "TypeError: LoRA, `layer`, `Linear(...)`",
    "nn.LoRA(L, 2, weight_name=(), key=k)": "ValueError: LoRA, `weight_name`",
    "nn.WeightNorm(nn.Linear)": "TypeError: WeightNorm, `layer`, `Linear(...)`",
    "nn.WeightNorm(L, 'weigth')": "AttributeError: `weight_name`, 'weight', 'bias'",
    "nn.SpectralNorm(L, 'w', key=k)": "AttributeError: `weight_name`, 'weight', 'bias'",
    "nn.State(nn.BatchNorm)": "TypeError: State, `model`, `BatchNorm(...)`",
    "nn.State(iter([norm]))": "TypeError: State, `model`",
    "nn.make_with_state(3)": "TypeError: `make_with_state`, `make_model`, an int",
    "nn.RNN.build('lstm', 4, 4, key=k)": "TypeError: RNN.build, `cell`, a str",
    "nn.RNN([L])(xs)": "TypeError: `init_state`, a Linear",
    "nn.scan_cell(L, xs)": "TypeError: `init_state`, a Linear",
    "nn.scan_cell(nn.GRUCell, xs)": "TypeError: `cell`, `GRUCell(...)`",
    "nn.generate(None, [1], (), 2, key=k)": "TypeError: `generate`, `model`, None",
    "nn.dot_product_attention(xs, xs, xs, dropout=0.5)": "TypeError: `dropout`, a float",
    "nn.AdaptivePool(2, 2, 'mean')": "TypeError: AdaptivePool, `operation`, a str",
    "nn.Pool(0, 'add', 1, 2)": "TypeError: Pool, `operation`, a str",
    "nn.Linear(4, 4, key=k, weight_init=he_normal)": "TypeError: `he_normal()`",
    "nn.Embedding(4, 4, key=k, weight_init=he_normal)": "TypeError: `he_normal()`",
    "nn.dot_product_attention(xs, xs, xs, dropout=nn.Dropout)": "TypeError: `Dropout(...)`",
    "nn.MLP(4, 4, 4, 1, nn.PReLU, key=k)": "TypeError: `activation`, `PReLU(...)`",
    "nn.MLP(4, 4, 4, 1, final_activation=nn.PReLU, key=k)": "TypeError: `final_activation`",
    # A PRNG key by position.
    "seq(x, k)": "TypeError: Sequential, `layer(x, key=key)`",
    "seq(x, raw)": "TypeError: Sequential, `layer(x, key=key)`",
    "stacked(x, k)": "TypeError: Stacked, `layer(x, key=key)`",
    "nn.Stacked.from_layers([nn.BatchNorm(3)])(xs, k)": "TypeError: Stacked, `state`",
    "nn.Dropout()(x, k)": "TypeError: Dropout.__call__(), Pass `key`, `layer(x; key=key)`.",
    "nn.Dropout()(x, raw)": "TypeError: Pass `key` by name: `layer(x; key=key)`.",
    "conv(jnp.ones((1, 8, 8)), k)": "TypeError: Conv2d.__call__(), `layer(x; key=key)`.",
    "nn.AvgPool1d(2)(xs, k)": "TypeError: AvgPool1d.__call__(), `layer(x; key=key)`.",
    "nn.LSTMCell(4, 4, key=k)(x, (x, x), k)": "TypeError: `layer(input; hidden; key=key)`.",
    "nn.mixed(L, 'compute=bf16')(x, k)": "TypeError: `layer(x; key=key)`.",
    "eqx.filter_jit(lambda m, x: m(x, k))(L, x)": "TypeError: `layer(x; key=key)`.",
    # In the place of another argument.
    "cell(x, k)": "ShapeError: `hidden`, Pass the key by name: `key=key`.",
    "nn.LSTMCell(4, 4, key=k)(x, k)": "TypeError: `hidden`, by name: `key=key`.",
    "one_way(xs, k)": "ShapeError: `init`, by name: `key=key`.",
    "both(xs, k)": "ShapeError: `init`, by name: `key=key`.",
    "attention(xs, xs, xs, k)": "ShapeError: `mask`, by name: `key=key`.",
    "norm(jnp.ones(3), k)": "TypeError: `state`, by name: `key=key`.",
    # An argument of the layers by position.
    "stacked(x, x)": "TypeError: Stacked, float32[4], `layers(x, mask=mask)`",
    "stacked(x, [x])": "TypeError: Stacked, a list of length 1, `xs`",
    "nn.LayerNorm(4)(x, k)": "TypeError: LayerNorm, `layer(x, key=key)`",
    "nn.GroupNorm(2, 4)(x, k)": "TypeError: GroupNorm, `layer(x, key=key)`",
    # Keys that are not one key.
    "seq(x, key=0)": "TypeError: `key` of Sequential, one PRNG key, 0",
    "seq(x, key=ks)": "ValueError: `key` of Sequential, one PRNG key, key<fry>[2]",
    "stacked(x, key=0)": "TypeError: `key` of Stacked",
    "nn.RNN([cell, cell])(xs, key=0)": "TypeError: `key` of RNN",
    "nn.ReversibleSequential([block])(x, key=0)": "TypeError: `key` of Reversible",
    "block(x, key=0)": "TypeError: `key` of ReversibleBlock",
    "attention(xs, xs, xs, key=0)": "TypeError: `key` of MultiheadAttention",
    "nn.RNN.build(nn.GRUCell, 4, 4, key=0)": "TypeError: `key` of RNN",
    "nn.LoRA(L, 2, key=0)": "TypeError: `key` of LoRA",
    "nn.add_lora(L, nn.Linear, 2, key=0)": "TypeError: `key` of `add_lora`",
    "nn.reinit(L, [(nn.Linear, 'he_normal')], key=0)": "TypeError: `key` of `reinit`",
    "nn.sample_logits(x, 0)": "TypeError: `key` of `sample_logits`",
    "nn.generate(logits, [1], (), 2, key=0)": "TypeError: `key` of `generate`",
    "nn.LearnedPositionalEmbedding(4, 4, key=0)": "TypeError: `key` of Learned",
    "nn.dot_product_attention(xs, xs, xs, key=0)": "TypeError: `key` of `dot_product",
    # dtypes of parameters.
    "nn.Linear(4, 4, dtype='float31', key=k)": "ValueError: Linear, `dtype`, 'float31'",
    "nn.Linear(4, 4, dtype=int, key=k, weight_init='zeros')": "ValueError: `dtype`",
    "nn.Conv2d(1, 1, 3, dtype=int, key=k)": "ValueError: Conv2d, `dtype`",
    "nn.ConvTranspose2d(1, 1, 3, dtype=int, key=k)": "ValueError: `dtype`",
    "nn.Einsum('i,io->o', {'i': 1, 'o': 1}, dtype=int, key=k)": "ValueError: `dtype`",
    "nn.GRUCell(4, 4, dtype=int, key=k)": "ValueError: GRUCell, `dtype`",
    "nn.LSTMCell(4, 4, dtype=int, key=k)": "ValueError: LSTMCell, `dtype`",
    "nn.Embedding(4, 4, dtype=int, key=k)": "ValueError: Embedding, `dtype`",
    "nn.LayerNorm(4, dtype=int)": "ValueError: LayerNorm, `dtype`",
    "nn.RMSNorm(4, dtype=int)": "ValueError: RMSNorm, `dtype`",
    "nn.GroupNorm(2, 4, dtype=int)": "ValueError: GroupNorm, `dtype`",
    "nn.InstanceNorm(4, dtype=int)": "ValueError: InstanceNorm, `dtype`",
    "nn.BatchNorm(4, dtype=int)": "ValueError: BatchNorm, `dtype`",
    "nn.PReLU(dtype=int)": "ValueError: PReLU, `dtype`",
    "nn.EMA(L, dtype='float31')": "ValueError: EMA, `dtype`, 'float31'",
    "nn.RotaryPositionalEmbedding(4, dtype='float31')": "ValueError: `dtype`",
    "attention.init_cache(4, dtype='float31')": "ValueError: `init_cache`, `dtype`",
    "cell.init_state(dtype=int)": "ValueError: `init_state`, `dtype`",
    "nn.Linear(4, 4, True, k, key=k)": "ValueError: Linear, `dtype`, key<fry>",
    # Inputs that are not arrays of numbers, or of another dtype.
    "conv(jnp.ones((1, 8, 8), jnp.uint8))": "TypeError: Conv2d, `x`, float32, uint8",
    "conv(jnp.ones((1, 8, 8), bool))": "TypeError: Conv2d, `x`, `x.astype('float32')`",
    "L(jax.random.split(k, 4))": "TypeError: Linear, `x`, key<fry>[4]",
    "nn.LayerNorm(4)(objects)": "TypeError: LayerNorm, `x`, object[4]",
    "nn.MaxPool1d(2)(jax.random.split(k, (1, 4)))": "TypeError: MaxPool1d, `x`",
    "nn.Dropout()('hello', key=k)": "TypeError: Dropout, `x`, a str",
    "nn.Dropout()(k, key=k)": "TypeError: Dropout, `x`, key<fry>[]",
    "nn.PReLU()(None)": "TypeError: PReLU, `x`, None",
    "nn.PReLU(k)": "TypeError: PReLU, `init_alpha`, key<fry>[]",
    "nn.PReLU('a')": "TypeError: PReLU, `init_alpha`, a str",
    "nn.resize(None, scale=2)": "TypeError: `resize`, `x`, None",
    "nn.Upsample(2)('hello')": "TypeError: Upsample, `x`, a str",
    "nn.RotaryPositionalEmbedding(4)(xs, offset='a')": "TypeError: `offset`, a str",
    "nn.RotaryPositionalEmbedding(4)(xs, positions='a')": "TypeError: `positions`",
    "nn.dot_product_attention(None, xs, xs)": "TypeError: `query`, None",
    "nn.sample_logits(x, k, temperature=None)": "TypeError: `temperature`, None",
    "nn.sample_logits(x, k, top_p='a')": "TypeError: `top_p`, a str",
    "nn.generate(logits, 'hello', (), 2, key=k)": "TypeError: `prompt`, a str",
    "attention(xs, xs, xs, bias=jnp.ones((3, 3), bool))": "TypeError: `bias`, `mask=`",
    # Numbers out of range.
    "nn.MultiheadAttention(8, 4, key=k)": "ValueError: `num_heads`, 8 and 4, `qk_size`",
    "nn.LayerNorm(4, eps='a')": "ValueError: LayerNorm, `eps`, 'a'",
    "nn.RMSNorm(4, eps=-1)": "ValueError: RMSNorm, `eps`, -1",
    "nn.GroupNorm(2, 4, eps=-1)": "ValueError: GroupNorm, `eps`",
    "nn.InstanceNorm(4, eps=-1)": "ValueError: InstanceNorm, `eps`",
    "nn.BatchNorm(4, eps=-1)": "ValueError: BatchNorm, `eps`",
    "nn.BatchNorm(4, momentum=2)": "ValueError: BatchNorm, `momentum`, from 0 to 1",
    "nn.BatchNorm(4, momentum='a')": "ValueError: BatchNorm, `momentum`, 'a'",
    "nn.RotaryPositionalEmbedding(4, theta=0)": "ValueError: `theta`, > 0",
    "nn.SinusoidalPositionalEmbedding(4, theta=-1)": "ValueError: `theta`, > 0",
    "nn.StaticLossScale(0)": "ValueError: StaticLossScale, `scale`, 0",
    "nn.StaticLossScale(jnp.ones(3))": "ValueError: StaticLossScale, `scale`",
    "nn.DynamicLossScale(-2.0)": "ValueError: DynamicLossScale, `scale`, -2.0",
    "nn.DynamicLossScale(float('inf'))": "ValueError: DynamicLossScale, `scale`, inf",
    "scale.adjust(jnp.float32(jnp.nan))": "TypeError: `finite`, `all_finite(grads)`",
    "scale.adjust(jnp.ones(3, bool))": "TypeError: `finite`, bool[3]",
    "nn.DynamicLossScale(factor=float('nan'))": "ValueError: `factor`, nan",
    "nn.DynamicLossScale(min_scale=float('nan'))": "ValueError: `min_scale`, nan",
    "nn.DynamicLossScale(max_scale=float('nan'))": "ValueError: `max_scale`, nan",
    "nn.sample_logits(x, k, repetition_penalty=jnp.inf, seen=x > 0)": "ValueError: finite",
    # The rest.
    "norm(jnp.ones(3), mapped, inference=True)": "ShapeError: `state`, out_axes=(0",
    "nn.summary(L, where='layers[*]')": "ValueError: `summary`, `where`",
    "nn.Shared((L, L), lambda t: t[0].weight, lambda t: t[0].weight)": "ValueError: `get`",
    "nn.select_tree(True, [1.0], [[1.0]])": "ValueError: `on_true[0]`, a list",
    "nn.select_tree(True, [1.0], [None])": "ValueError: `on_true[0]`, `on_false[0]` None",
    "nn.generate(forgets, [1, 2], attention.init_cache(4), 2, key=k)": "TypeError: None",
    "nn.sample_logits(x, k, repetition_penalty=2.0, seen=[1] * 4)": "TypeError: `seen`",
    "nn.dot_product_attention(xs, xs, xs, scale=x)": "ShapeError: `scale`, (4,)",
    "nn.causal_mask(2, offset=jnp.arange(2))": "ShapeError: `offset`, (2,), jax.vmap",
    "nn.LoRA(L, 2, batch_ndim=-1, key=k)": "ValueError: LoRA, `batch_ndim`, -1",
    "nn.LoRA(L, 2, weight_name=3, key=k)": "ValueError: LoRA, `weight_name`, 3",
    "nn.add_lora(L, [], 2, key=k)": "ValueError: `add_lora`, `where`, []",
    "nn.StateIndex(jnp.tanh)": "ValueError: StateIndex, `init`",
    "nn.StateIndex(functools.partial(jnp.zeros, 3))": "ValueError: StateIndex, `init`",
    "nn.State([nn.StateIndex({'a': 'b'})])": "TypeError: `model[0].init['a']`, a str",
    "nn.AdaptivePool(2, 1, jnp.cumsum)(xs)": "ShapeError: `operation`, a scalar",
    "nn.reinit(L, [((nn.Conv, 3, 'bias'), 0.0)], key=k)": "TypeError: `rules[0]`, selector",
    "nn.reinit(L, [(('a', 'b'), 0.0)], key=k)": "TypeError: `rules[0]`, selector",
    "nn.reinit(L, [((nn.Conv, 3), 0.0)], key=k)": "TypeError: `rules[0]`, selector",
    "nn.summary(L, depth=-1)": "ValueError: `summary`, `depth`, -1",
    "nn.summary(L, depth=1.5)": "ValueError: `summary`, `depth`, 1.5",
    "nn.Shared((L, L), '[0].weight', 3)": "TypeError: `get`, an int",
    "nn.ReversibleBlock(L, L, split_axis=0.5)": "ValueError: `split_axis`, 0.5",
    "nn.EMA(L, lambda step: jnp.ones(1)).update(L)": "ShapeError: EMA, `decay`, (1,)",
    "nn.EMA(L, lambda step: None).update(L)": "TypeError: EMA, `decay(steps)`, None",
    "nn.RNN([cell, cell], dropout=0.5)(xs)": "RuntimeError: At `dropout`, `key`",
}


@pytest.mark.parametrize("call", CALLS)
def test_mistake_is_named_with_its_fix(call, without_type_checks):
    wanted, parts = CALLS[call].split(": ", 1)
    wanted = eqx.ShapeError if wanted == "ShapeError" else getattr(builtins, wanted)
    with pytest.raises(wanted) as caught:
        eval(call, names())
    message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for part in parts.split(", "):
        assert part.replace(";", ",") in message


CLASSES = [x for x in vars(nn).values() if isinstance(x, type(eqx.Module))]


@hypothesis.given(st.data())
def test_call_to_write_fits_the_signature(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        check_call_to_write(data)


def check_call_to_write(data):
    cls = data.draw(st.sampled_from(CLASSES))
    parameters = inspect.signature(cls).parameters.values()
    first = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    names = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    number = data.draw(st.integers(0, len(first)))
    later = [name for name in names if name not in first[:number]]
    chosen = data.draw(st.sets(st.sampled_from(later))) if later else ()
    values = st.sampled_from([1, jax.random.key(0), "a", None, jnp.tanh])
    args = [data.draw(values) for _ in range(number)]
    kwargs = {name: data.draw(values) for name in chosen}
    with contextlib.suppress(TypeError):
        inspect.signature(cls).bind(*args, **kwargs)
        hypothesis.reject()
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\.__init__") as caught:
        cls(*args, **kwargs)
    found = re.search(r"`(\w+\(.*\))`", str(caught.value))
    if found:
        call = ast.parse(found[1], mode="eval").body
        assert isinstance(call, ast.Call)
        written = {word.arg: None for word in call.keywords}
        inspect.signature(cls).bind(*call.args, **written)
    else:
        assert not args and set(names) - {"key"} - kwargs.keys()


def test_layers_show_no_frame_of_what_explains_their_calls():
    model = nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    with pytest.raises(eqx.ShapeError) as caught:
        model(jnp.ones(9))
    functions = [entry.name for entry in traceback.extract_tb(caught.tb)]
    assert functions.count("__call__") == 2 and "explained_call" not in functions


class Noise(nn.StatefulLayer):
    """Has a PRNG key as its state."""

    def __call__(self, x, state, *, key=None):
        state, used = jax.random.split(state)
        return x + jax.random.normal(used, x.shape), state


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_key_may_be_the_state_of_a_layer(make_key):
    layer, key = Noise(), make_key(0)
    y, state = nn.Sequential([layer])(jnp.ones(3), key)
    expected, wanted = layer(jnp.ones(3), key)
    assert (y == expected).all() and (state == wanted).all()


@pytest.mark.parametrize("state", [None, 3, {"a": jnp.ones(2)}], ids=str)
def test_other_states_are_passed_through(state):
    layers = nn.Sequential([nn.Identity()]), nn.LayerNorm(3), nn.GroupNorm(1, 3)
    for layer in layers:
        assert layer(jnp.ones(3), state)[1] is state


def test_sequential_without_its_functions_can_be_sliced(without_type_checks):
    model = nn.Sequential([nn.Linear(2, 2, key=jax.random.key(0)), jax.nn.relu])
    arrays = eqx.filter(model, eqx.is_array)
    assert arrays[:2].layers[1] is None


@pytest.mark.parametrize(
    "alpha", [0, True, jnp.arange(1, 3)], ids=["0", "True", "array"]
)
def test_integer_slope_of_prelu_is_trained(alpha):
    layer = nn.PReLU(alpha)
    assert layer.negative_slope.dtype == jnp.float32
    grads = eqx.filter_grad(lambda m: m(-jnp.ones(2)).sum())(layer)
    assert grads.negative_slope.sum() == -2


def test_python_number_as_slope_keeps_the_dtype_of_the_input():
    assert nn.PReLU(0)(jnp.ones(2, jnp.float16)).dtype == jnp.float16


@pytest.mark.parametrize("number", [float("nan"), complex("inf")])
def test_all_finite_sees_python_numbers(number):
    assert not nn.all_finite([number, 1])
    assert nn.all_finite([1.0, 1])


def test_heads_larger_than_the_query_may_be_given():
    layer = nn.MultiheadAttention(8, 4, qk_size=2, vo_size=2, key=jax.random.key(0))
    assert layer(*[jnp.ones((3, 4))] * 3).shape == (3, 4)


def test_shared_node_may_hold_a_shared_part():
    pair = [jnp.ones(2), jnp.ones(2)]
    tied = nn.Shared(pair, lambda p: p[1], lambda p: p[0])
    outer = nn.Shared((tied, tied), lambda t: t[1], lambda t: t[0])
    assert outer()[1]()[1] is pair[0]


def test_key_is_named_in_the_call_of_a_module_of_the_user():
    class Block(eqx.Module):
        layer: nn.Linear

        def __init__(self, size, *, width=1, key):
            self.layer = nn.Linear(size, width, key=key)

    class Net(eqx.Module):
        block: Block

        def __init__(self, size, key):
            self.block = Block(size, key)

    key = jax.random.key(0)
    for call in (lambda: Block(2, key), lambda: Net(2, key)):
        with pytest.raises(TypeError, match=r"`Block\(2, key=key\)`\.$"):
            call()
    # Where another argument is missing, a call would not be the answer.
    with pytest.raises(TypeError, match=r"positional argument: 'size'$"):
        Net(key=key)


def test_error_within_an_init_is_left_alone():
    class Net(eqx.Module):
        def __init__(self, *, key):
            raise TypeError("no")

    with pytest.raises(TypeError, match=r"^no$"):
        Net(key=1)
