import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

VOCABULARY, SIZE, DEPTH = 11, 8, 2
LENGTH = 10  # of the longest sequence that `slowly` makes


class Block(eqx.Module):
    attention: nn.MultiheadAttention
    norm: nn.LayerNorm

    def __init__(self, key):
        rope = nn.RotaryPositionalEmbedding(SIZE // 2)
        self.attention = nn.MultiheadAttention(2, SIZE, rotary=rope, key=key)
        self.norm = nn.LayerNorm(SIZE)

    def __call__(self, x, cache=None):
        y = jax.vmap(self.norm)(x)
        if cache is None:
            return x + self.attention(y, y, y, is_causal=True)
        y, cache = self.attention(y, y, y, is_causal=True, cache=cache)
        return x + y, cache


class Model(eqx.Module):
    """With learned and rotary positions, which make it matter where a token is."""

    tokens: nn.Embedding
    positions: jax.Array
    blocks: list

    def __init__(self, key, depth=DEPTH):
        keys = jax.random.split(key, depth + 2)
        self.tokens = nn.Embedding(VOCABULARY, SIZE, key=keys[0])
        self.positions = jax.random.normal(keys[1], (32, SIZE))
        self.blocks = [Block(k) for k in keys[2:]]

    def __call__(self, tokens, caches):
        start = caches[0].length
        rows = start + jnp.arange(len(tokens))
        x = jax.vmap(self.tokens)(tokens) + self.positions[rows]
        new = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, cache)
            new.append(cache)
        return jax.vmap(self.tokens.attend)(x), new

    def whole(self, tokens, length):
        """The logits of the next token, without a cache, if `length` tokens are there.

        No token attends to what follows it.
        """
        x = jax.vmap(self.tokens)(tokens) + self.positions[: len(tokens)]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(x[length - 1])

    def init_cache(self, length=16, **options):
        return [b.attention.init_cache(length, **options) for b in self.blocks]


@pytest.fixture(scope="module")
def model():
    return drawn(lambda: Model(jax.random.key(1)))


@pytest.fixture(scope="module")
def shallow():
    """Of one block, which is enough where blocks do not matter."""
    return drawn(lambda: Model(jax.random.key(1), 1))


def batch_of_caches(model, number, length=16, **options):
    make = lambda _: model.init_cache(length, **options)  # noqa: E731
    return jax.vmap(make)(jnp.arange(number))


def slowly(model, prompt, number, key, **options):
    """The same, from the whole sequence at each step."""
    tokens = list(prompt)
    for i in range(number):
        padded = np.array(tokens + [0] * (LENGTH - len(tokens)))
        tokens.append(int(_next_token(model, padded, len(tokens), key, i, options)))
    return tokens[len(prompt) :]


def _next_token(model, tokens, length, key, i, options):
    call = _compiled_next_token(tuple(sorted(options.items())))
    return call(model, tokens, np.int32(length), key, np.int32(i))


@functools.cache
def _compiled_next_token(options):
    options = dict(options)

    @eqx.filter_jit
    def call(model, tokens, length, key, i):
        logits = model.whole(tokens, length)
        if "repetition_penalty" in options:
            is_there = jnp.arange(LENGTH) < length
            one_hot = tokens[:, None] == jnp.arange(VOCABULARY)
            options["seen"] = jnp.any(one_hot & is_there[:, None], 0)
        step_key = None if key is None else jax.random.fold_in(key, i)
        return nn.sample_logits(logits, step_key, **options)

    return call


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.7},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    ],
)
def test_tokens_are_those_of_the_whole_sequence_at_each_step(
    options, model, key
) -> None:
    prompt = [3, 1, 4, 1]
    key = key if options["temperature"] else None
    out = nn.generate(
        model, jnp.array(prompt), model.init_cache(), 6, key=key, **options
    )
    assert out.tokens.tolist() == slowly(model, prompt, 6, key, **options)
    assert out.length == 6 and out.tokens.dtype == jnp.int32
    assert [cache.length for cache in out.cache] == [9, 9]


def test_a_prompt_of_one_token_will_do(model) -> None:
    out = nn.generate(model, np.array([3]), model.init_cache(5), 5, temperature=0)
    assert out.tokens.tolist() == slowly(model, [3], 5, None, temperature=0)


@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_rows_of_padded_prompts_are_what_they_are_alone(overflow, shallow, key) -> None:
    model = shallow
    prompts = np.array([[3, 1, 4, 1, 5], [9, 2, 0, 8, 6], [6, 7, 4, 8, 3]])
    lengths = np.array([5, 2, 1])
    options = {"top_p": 0.9, "repetition_penalty": 3.0, "end_token": 1, "pad_token": 10}
    caches = batch_of_caches(model, 3, overflow=overflow)
    out = nn.generate(
        model, prompts, caches, 8, key=key, prompt_length=lengths, **options
    )
    keys = jax.random.split(key, 3)
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        cache = model.init_cache(overflow=overflow)
        alone = nn.generate(model, prompt[:n], cache, 8, key=keys[i], **options)
        assert out.tokens[i].tolist() == alone.tokens.tolist()
        assert out.length[i] == alone.length
        for together, single in zip(out.cache, alone.cache, strict=True):
            assert together.length[i] == single.length == n + alone.length - 1
            assert together.position[i].tolist() == single.position.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_prompts_padded_on_the_left_are_what_they_are_alone(seed, shallow, key) -> None:
    model, rng = shallow, np.random.default_rng(seed)
    lengths = rng.permutation([1, 3, 5])
    prompts = rng.integers(VOCABULARY, size=(3, 5))
    options = {"top_p": 0.9, "repetition_penalty": 3.0, "end_token": 1}
    caches = batch_of_caches(model, 3)
    out = nn.generate(
        model,
        prompts,
        caches,
        6,
        key=key,
        prompt_length=lengths,
        pad_side="left",
        **options,
    )
    keys = jax.random.split(key, 3)
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        cache = model.init_cache()
        alone = nn.generate(model, prompt[-n:], cache, 6, key=keys[i], **options)
        assert out.tokens[i].tolist() == alone.tokens.tolist()
        assert out.cache[0].position[i].tolist() == alone.cache[0].position.tolist()
    one = prompts[0], model.init_cache(), 6
    one = nn.generate(
        model, *one, key=keys[0], prompt_length=lengths[0], pad_side="left", **options
    )
    assert one.tokens.tolist() == out.tokens[0].tolist()


def test_nothing_follows_the_end_token(model, strict) -> None:
    prompt = jnp.array([3, 1, 4, 1])
    free = nn.generate(model, prompt, model.init_cache(), 6, temperature=0)
    end = free.tokens.tolist()[2]
    number = free.tokens.tolist().index(end) + 1
    out = nn.generate(
        model,
        prompt,
        model.init_cache(),
        6,
        temperature=0,
        end_token=end,
        pad_token=9,
    )
    assert out.length == number
    expected = free.tokens.tolist()[:number] + [9] * (6 - number)
    assert out.tokens.tolist() == expected
    position = out.cache[0].position.tolist()
    assert position[: number + 3] == list(range(number + 3))
    assert set(position[number + 3 :]) == {-1}


def test_a_sequence_may_end_with_any_of_several_tokens(model) -> None:
    prompt = jnp.array([3, 1, 4, 1])

    def generated(end_token):
        cache = model.init_cache()
        return nn.generate(model, prompt, cache, 6, temperature=0, end_token=end_token)

    free = generated(None).tokens.tolist()
    later, first = free[4], free[1]
    for ends in [later, first], (first, VOCABULARY):
        out, expected = generated(ends), generated(first)
        assert out.tokens.tolist() == expected.tokens.tolist()
        assert out.length == expected.length == free.index(first) + 1
    with pytest.raises(ValueError, match="`end_token` must be at least 0; got -1"):
        generated([1, -1])


@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_the_returned_cache_continues_the_sequence(overflow, model) -> None:
    prompt = jnp.array([3, 1, 4, 1])
    call = functools.partial(nn.generate, model, temperature=0)
    first = call(prompt, model.init_cache(overflow=overflow), 2)
    second = call(np.asarray(first.tokens)[-1:], first.cache, 4)
    both = first.tokens.tolist() + second.tokens.tolist()
    assert both == slowly(model, prompt.tolist(), 6, None, temperature=0)


def test_a_full_ring_of_an_ended_row_loses_no_token(shallow) -> None:
    # The row ends with all slots in use, and goes on to be fed padding.
    model = shallow
    prompt = jnp.array([3, 1, 4, 1])

    def generated(end_token):
        cache = model.init_cache(4, overflow="ring")
        return nn.generate(model, prompt, cache, 6, temperature=0, end_token=end_token)

    free = generated(VOCABULARY)
    out = generated(free.tokens.tolist()[2])
    number = int(out.length)
    assert out.tokens.tolist()[:number] == free.tokens.tolist()[:number]
    # A query sees 4 tokens, itself among them: 3 of the past are there.
    last = 4 + number - 2
    kept = sorted(out.cache[0].position.tolist())[-3:]
    assert kept == [last - 2, last - 1, last]


def test_a_cache_of_stacked_layers_may_be_beside_a_static_value(model) -> None:
    blocks = nn.Stacked.from_layers(model.blocks)

    class WithStack(eqx.Module):
        model: Model
        blocks: nn.Stacked

        def __call__(self, tokens, cache):
            name, cache = cache
            rows = cache.length[0] + jnp.arange(len(tokens))
            x = jax.vmap(self.model.tokens)(tokens) + self.model.positions[rows]
            x, cache = self.blocks(x, xs=cache)
            return jax.vmap(self.model.tokens.attend)(x), (name, cache)

    stacked = WithStack(model, blocks)
    make = jax.vmap(lambda _: blocks.layers.attention.init_cache(16))
    prompts, lengths = jnp.array([[3, 1, 4], [1, 5, 0]]), jnp.array([3, 2])
    cache = jax.vmap(lambda _: make(jnp.arange(DEPTH)))(jnp.arange(2))
    call = {"temperature": 0, "prompt_length": lengths, "end_token": 7}
    out = nn.generate(stacked, prompts, ("blocks", cache), 5, **call)
    expected = nn.generate(model, prompts, batch_of_caches(model, 2), 5, **call)
    assert out.tokens.tolist() == expected.tokens.tolist()
    name, cache = out.cache
    assert name == "blocks" and cache.length.shape == (2, DEPTH)


# One program


def test_it_is_one_scan_that_copies_no_cache(model) -> None:
    def run(model, prompt, cache):
        return nn.generate(model, prompt, cache, 4, temperature=0, end_token=1)

    cache = model.init_cache(256)
    prompt = jnp.array([3, 1])
    text = str(eqx.filter_make_jaxpr(run)(model, prompt, cache)[0])
    assert text.count("scan[") == 1 and "while[" not in text
    program = eqx.filter_jit(run, donate=("cache",)).lower(model, prompt, cache)
    memory = program.compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 2


class Unplaced(Model):
    """Without the positions, which JAX cannot gather for a split batch."""

    def __call__(self, tokens, caches):
        x, cache = self.blocks[0](jax.vmap(self.tokens)(tokens), caches[0])
        return jax.vmap(self.tokens.attend)(x), [cache]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_that_is_split_over_explicit_axes_has_the_same_tokens(side, key) -> None:
    model = drawn(lambda: Unplaced(key, 1))
    prompts = jnp.arange(12).reshape(4, 3) % VOCABULARY
    options = {"top_k": 5, "repetition_penalty": 1.5, "end_token": 3, "key": key}
    options["pad_side"] = side

    def generated(model, prompts, split):
        caches = jax.vmap(lambda _: model.init_cache())(jnp.arange(4))
        lengths = jnp.array([3, 1, 2, 3])
        caches, lengths = split((caches, lengths))
        return nn.generate(
            model, split(prompts), caches, 6, prompt_length=lengths, **options
        )

    wanted = generated(model, prompts, lambda x: x)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        model = eqx.filter_shard(model, P())
        out = generated(model, prompts, lambda x: eqx.filter_shard(x, P("data")))
    assert out.tokens.tolist() == wanted.tokens.tolist()
    assert jax.typeof(out.cache[0].key).sharding.spec[0] == "data"


def test_the_cache_is_donated(model) -> None:
    prompt, cache = jnp.array([3, 1, 4, 1]), model.init_cache()
    nn.generate(model, prompt, cache, 2, temperature=0)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    message = r"`cache\[0\]\.key` .* donated to `generate`\. Use the .* returned"
    with pytest.raises(eqx.DonationError, match=message):
        nn.generate(model, prompt, cache, 2, temperature=0)
    with pytest.raises(eqx.DonationError, match="donated to `generate`"):
        eqx.filter_jit(model)(jnp.array([3]), cache)


def test_cache_that_a_compiled_function_captures_is_checked(shallow) -> None:
    model = shallow
    prompts, caches = jnp.array([[3, 1]]), batch_of_caches(model, 1, 4)
    make = lambda steps: nn.generate(model, prompts, caches, steps, temperature=0)  # noqa: E731
    with pytest.raises(ValueError, match="has slots for 4, and holds 0"):
        jax.jit(lambda: make(4).tokens)()
    tokens = jax.jit(lambda: make(3).tokens)()
    assert tokens.tolist() == make(3).tokens.tolist()


def test_transfer_guard_allows_numbers_as_options(shallow, key) -> None:
    model = shallow
    prompt, caches = jnp.array([3, 1, 4]), [model.init_cache() for _ in range(2)]
    options = {"temperature": 0.5, "top_p": 0.9, "end_token": 2, "key": key}
    expected = nn.generate(model, prompt, caches[0], 2, **options)
    with jax.transfer_guard("disallow"):
        out = nn.generate(model, prompt, caches[1], 2, **options)
    assert out.tokens.tolist() == expected.tokens.tolist()


def test_top_k_may_be_an_integer_of_numpy_or_jax(
    shallow, key, without_type_checks
) -> None:
    tokens = [
        nn.generate(shallow, [1], shallow.init_cache(), 4, key=key, top_k=k).tokens
        for k in (2, np.int64(2), jnp.array(2))
    ]
    assert (tokens[0] == tokens[1]).all() and (tokens[0] == tokens[2]).all()


def test_other_values_compile_no_other_program(shallow, key) -> None:
    traced, model = [], shallow

    class Counting(eqx.Module):
        model: Model

        def __call__(self, tokens, cache):
            traced.append(len(tokens))
            return self.model(tokens, cache)

    for temperature, top_p, end in ((1.0, 0.5, 3), (0.3, 0.9, 4)):
        nn.generate(
            Counting(model),
            jnp.array([3, 1, 4]),
            model.init_cache(),
            2,
            key=key,
            temperature=temperature,
            top_p=top_p,
            end_token=end,
        )
    # The prompt but for its last token, and the step of the scan.
    assert traced[0] == 2 and set(traced[1:]) == {1} and len(traced) <= 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"prompt": jnp.ones((1, 1, 3), int)},
            eqx.ShapeError,
            r"`prompt`.*\(1, 1, 3\)",
        ),
        ({"prompt": jnp.zeros(0, int)}, eqx.ShapeError, r"at least one token.*\(0,\)"),
        ({"prompt": jnp.ones(3)}, TypeError, "integers as `prompt`; got dtype float32"),
        (
            {"max_new_tokens": 0},
            ValueError,
            "`max_new_tokens` must be at least 1; got 0",
        ),
        (
            {"max_new_tokens": 2.5},
            TypeError,
            "`max_new_tokens` must be an integer; got 2.5",
        ),
        (
            {"max_new_tokens": 15},
            ValueError,
            r"room for 17.*`cache\[0\]` has slots for 16",
        ),
        ({"key": None}, ValueError, "needs a `key`"),
        ({"temperature": -1}, ValueError, "`generate` takes a `temperature`"),
        ({"top_p": 2}, ValueError, "`generate` takes a `top_p`"),
        ({"end_token": -1}, ValueError, "`end_token` must be at least 0; got -1"),
        ({"pad_token": 1.5}, TypeError, "`pad_token` must be an integer; got 1.5"),
        (
            {"prompt_length": jnp.array([2])},
            eqx.ShapeError,
            r"`prompt_length` of shape \(\)",
        ),
        ({"prompt_length": 1.5}, TypeError, "integer as `prompt_length`"),
        ({"prompt_length": 4}, eqx.EquinoxRuntimeError, "`prompt_length` from 1 to 3"),
        ({"pad_side": "lef"}, ValueError, "as `pad_side`; got 'lef'.*'left'"),
        ({"pad_side": "left"}, ValueError, "needs a `prompt_length`"),
        (
            {"pad_side": "left", "prompt_length": 0},
            eqx.EquinoxRuntimeError,
            "`prompt_length` from 1 to 3",
        ),
        (
            {"cache": {"h": jnp.ones(3)}},
            TypeError,
            r"`cache\['h'\]` is not part of a KVCache",
        ),
        (
            {"prompt": jnp.ones((2, 3), int)},
            eqx.ShapeError,
            r"batch, 2, .*`cache\[0\]\.length` has shape \(\)",
        ),
        ({"model": lambda tokens, cache: tokens}, TypeError, "return a pair.*"),
        (
            {"model": lambda tokens, cache: (jnp.ones(5), cache)},
            eqx.ShapeError,
            r"for 1 token it returned shape \(5,\)",
        ),
    ],
)
def test_wrong_argument_is_named(
    change, error, message, model, key, without_type_checks
) -> None:
    call = {"model": model, "prompt": jnp.array([3, 1, 4]), "max_new_tokens": 2}
    call |= {"cache": model.init_cache(), "key": key}
    with pytest.raises(error, match=message):
        nn.generate(**call | change)
