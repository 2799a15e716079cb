"""`generate` and `sample_logits`: tokens, drawn from the logits of a model.

The prompt, except for its last token, fills the cache. The scan starts from the last
token: each step feeds one token to the model and samples the next. So the logits of the
prompt are not needed, and prompts of different lengths differ only in how much padding
is truncated.
"""

import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..._annotations import signature_of
from ..._compat.tracing import Tracer, known_array
from ..._core.base import on_clear
from ..._core.flat_call import pair_of
from ..._errors import ShapeError
from ..._jit import filter_jit
from ..._loops import filter_scan
from ..._loops.eager import run_cached
from ..._runtime.error_if import error_if
from ..._transforms.trace import filter_eval_shape
from ..._transforms.vmap import filter_vmap
from ..._tree import is_array, is_array_like
from ..._tree.deleted import deleted_named
from ..._tree.nodes import describe_node, path_str
from ..._tree.partitioning import map_nodes
from ..._tree.require import require_integer
from ..._typing import ArrayLike, PRNGKeyArray
from .._attention.kv_cache import caches_in, cut, is_cache
from .._base.checks import (
    as_array,
    check_function,
    check_input,
    check_integer,
    check_scalar,
    jax_array,
    wrong_shape,
    wrong_type,
    wrong_value,
)
from .._base.init import key_named
from .._base.precision import accumulation_dtype
from .._base.sharding import on_mesh, parts


class Generation(NamedTuple):
    """The result of [`equinox_like.nn.generate`][].

    - `tokens`: int32, shape `(max_new_tokens,)`. The new tokens, and `pad_token` after the
        end token.
    - `length`: int32, shape `()`. The number of tokens, the end token included.
    - `cache`: the cache, which holds the prompt and all new tokens except the last.

    For a batch of prompts, all arrays have a leading axis of the batch.
    """

    tokens: Array
    length: Array
    cache: Any


@deleted_named
def generate(
    model: Callable[..., Any],
    prompt: ArrayLike,
    cache: Any,
    max_new_tokens: int,
    *,
    key: PRNGKeyArray | None = None,
    prompt_length: ArrayLike | None = None,
    pad_side: Literal["left", "right"] = "right",
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    repetition_penalty: ArrayLike | None = None,
    end_token: int | Sequence[int] | None = None,
    pad_token: int = 0,
) -> Generation:
    """Continues a prompt, or a batch of prompts, with tokens sampled from a model.

    It runs as one compiled program: the whole prompt first, and then a scan over the
    new tokens, which updates the cache in place. It always takes `max_new_tokens`
    steps. To stop as soon as all rows have ended, call it for a few tokens at a time.

    **Arguments:**

    - `model`: called as `model(tokens, cache)` with tokens of shape `(n,)`, int32, and
        the cache of one sequence. Returns logits of shape `(n, vocabulary)` and the
        next cache. A Module, or a function that is defined once: each new `lambda` is
        compiled again. Switch off its dropout by [`equinox_like.nn.inference_mode`][].
    - `prompt`: integers of shape `(length,)`, or `(batch, length)`, with at least one
        token. Prompts of different lengths are padded with any tokens; `prompt_length`
        and `pad_side` say where.
    - `cache`: a pytree of [`equinox_like.nn.KVCache`][]s, with a leading axis of the batch
        on all arrays if there is one. It need not be empty. It is donated: its arrays are
        deleted, and those that are returned take their place.
    - `max_new_tokens`: the number of tokens to draw, 1 or more. The caches need room for
        the prompt and all new tokens except the last.
    - `key`: the PRNG key; not needed if `temperature` is the number 0. New token `i` is
        drawn with `jax.random.fold_in(key, i)`, and in a batch each row has its own key of
        `jax.random.split(key, batch)`.
    - `prompt_length`: the number of tokens of each prompt that are not padding: integers
        of shape `()`, or `(batch,)`; by default all. Each length of the padded prompts
        compiles a program, so pad prompts to a few lengths.
    - `pad_side`: the side of the padding. With `"left"`, as tokenizers of
        `transformers` often pad, the tokens are moved to the front before the model sees
        them, so their positions start at 0.
    - `temperature`, `top_k`, `top_p`, `repetition_penalty`: as for
        [`equinox_like.nn.sample_logits`][]. The penalty is for the tokens of the prompt and
        the new ones. Another program is compiled only for another `top_k`, and for
        another choice of which are `None` or 0.
    - `end_token`: a token, or several, after which a row is filled with `pad_token`.
        Another number of end tokens compiles another program.
    - `pad_token`: any token that the model takes.

    **Returns:**

    A [`equinox_like.nn.Generation`][]: `tokens`, `length` and `cache`. A row of a batch
    has the same tokens as its prompt alone with the key of the row, up to rounding of
    the logits. A token is -1 if the model returned a NaN for it, or only -inf. To
    continue a row, pass its cache, and a prompt that starts with its last token.

    **Raises:**

    `ValueError` for a number out of range, for no `key` where one is needed, and for a
    cache without room, if its `length` is known. `TypeError` for what is not an integer,
    and for a cache of arrays other than those of a KVCache.
    [`equinox_like.ShapeError`][] for wrong shapes. If a `prompt_length` is out of range,
    the error is that of [`equinox_like.error_if`][]. [`equinox_like.DonationError`][]
    for a cache that was donated before.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Model(eqx.Module):
            embedding: eqx.nn.Embedding
            attention: eqx.nn.MultiheadAttention

            def __init__(self, key):
                keys = jax.random.split(key)
                self.embedding = eqx.nn.Embedding(10, 8, key=keys[0])
                self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])

            def __call__(self, tokens, cache):
                x = jax.vmap(self.embedding)(tokens)
                x, cache = self.attention(x, x, x, is_causal=True, cache=cache)
                return jax.vmap(self.embedding.attend)(x), cache

        model = Model(jax.random.key(0))
        prompts = jnp.array([[3, 1, 4], [1, 5, 0]])  # the last token is padding
        caches = jax.vmap(lambda _: model.attention.init_cache(16))(prompts)
        out = eqx.nn.generate(
            model,
            prompts,
            caches,
            max_new_tokens=5,
            key=jax.random.key(1),
            prompt_length=jnp.array([3, 2]),
            top_k=4,
        )
        assert out.tokens.shape == (2, 5)
        assert out.cache.length.tolist() == [7, 6]
        ```
    """
    prompt = _checked_integers("prompt", prompt)
    if prompt.ndim not in (1, 2) or prompt.size == 0:
        wanted = "shape (length,) or (batch, length), with at least one token,"
        raise wrong_shape("`generate`", wanted, "prompt", prompt.shape)
    steps = require_integer(max_new_tokens, "generate", "max_new_tokens", 1)
    # As an int, `top_k` stays static.
    top_k = _check_sampling("generate", temperature, top_k, top_p, repetition_penalty)
    check_function("`generate`", "model", model)
    greedy = _is_greedy(temperature)
    if key is None and not greedy:
        raise ValueError(
            "`generate` needs a `key`, unless `temperature` is the number 0."
        )
    if key is not None:
        with key_named(key, "`generate`"):
            jax.eval_shape(jax.random.split, key)
    _check_cache(cache, prompt.shape, steps)
    # As arrays, so that another value does not cause a retrace; by `device_put`, an
    # explicit transfer, which `jax.transfer_guard("disallow")` allows.
    sampling = {"temperature": 0} if greedy else {"temperature": _float(temperature)}
    sampling |= {"top_k": top_k, "top_p": _float(top_p)}
    sampling["repetition_penalty"] = _float(repetition_penalty)
    ends = None
    if end_token is not None:
        many = end_token if isinstance(end_token, Sequence) else [end_token]
        tokens = [require_integer(x, "generate", "end_token", 0) for x in many]
        ends = jax.device_put(np.array(tokens, np.int32))
    pad = require_integer(pad_token, "generate", "pad_token", 0)
    length = _checked_length(prompt_length, prompt.shape)
    if pad_side not in ("left", "right"):
        raise wrong_value("`generate`", "'left' or 'right'", "pad_side", pad_side)
    if pad_side == "left" and length is None:
        raise ValueError(
            "`generate` with `pad_side='left'` needs a `prompt_length`, the number of "
            "tokens of each prompt that are not padding: `attention_mask.sum(-1)`."
        )
    options = _Options(steps, sampling, ends, jax.device_put(np.int32(pad)), pad_side)
    arguments = [model], prompt, length, cache, key, options
    if type(model) is types.FunctionType:
        # What was compiled for it is freed with it, and with what it reads.
        return run_cached(_generate, *arguments, donate=("cache",))
    return _compiled(*arguments)


class _Options(NamedTuple):
    steps: int
    sampling: dict[str, Any]
    end_tokens: Array | None
    pad_token: Any
    pad_side: str


def _generate(
    models: Any, prompt: Any, length: Any, cache: Any, key: Any, options: _Options
) -> Generation:
    (model,) = models

    def row(prompt, length, cache, key):
        return _row(model, prompt, length, cache, key, options)

    if prompt.ndim == 1:
        return row(prompt, length, cache, key)
    keys = None if key is None else jax.random.split(key, len(prompt))
    if keys is not None and any(batch := parts(prompt)[:1]):
        keys = jax.sharding.reshard(keys, on_mesh(PartitionSpec(*batch), prompt))
    return filter_vmap(row)(prompt, length, cache, keys)


# Errors and profiles name the compiled function.
_generate.__name__ = _generate.__qualname__ = "generate"
_compiled = filter_jit(_generate, donate=("cache",))
on_clear(_compiled.clear_cache)


def _row(
    model: Any, prompt: Array, length: Any, cache: Any, key: Any, options: _Options
) -> Generation:
    """The generation of one prompt."""
    if options.pad_side == "left":
        prompt = jnp.roll(prompt, length)
    token = prompt[-1] if length is None else prompt[length - 1]
    seen = _seen_in_prompt(model, prompt, length, cache, options)
    cache = _prefilled(model, prompt, length, cache)

    def step(carry, i):
        token, cache, seen, ended = carry
        logits, cache = _next_logits(model, token, cache)
        step_key = None if key is None else jax.random.fold_in(key, i)
        token = sample_logits(logits, step_key, seen=seen, **options.sampling)
        is_new = ~ended
        if options.end_tokens is not None:
            # A token fed after the end is cut off, so that a ring loses no token.
            fed = ended.astype(jnp.int32)
            cache = map_nodes(lambda c: cut(c, c.length - fed), cache, is_cache)
            token = jnp.where(ended, options.pad_token, token)
            ended = ended | (token == options.end_tokens).any()
        if seen is not None:
            seen = seen.at[token].set(True)
        return (token, cache, seen, ended), (token, is_new)

    # False, of the token's mesh: JAX fails to spread a constant over a split batch.
    start = token, cache, seen, token != token
    steps = jnp.arange(options.steps)
    (_, cache, _, _), (tokens, is_new) = filter_scan(step, start, steps)
    return Generation(tokens, is_new.sum(dtype=jnp.int32), cache)


def _prefilled(model: Any, prompt: Array, length: Any, cache: Any) -> Any:
    """The cache after the prompt, except for its last token."""
    if len(prompt) == 1:
        return cache
    _, filled = _called(model, prompt[:-1], cache)
    if len(caches_in(filled)) != len(caches_in(cache)):
        # The tokens would be drawn without the prompt.
        raise TypeError(
            "`generate` takes a `model` that returns the next cache for each that it was "
            f"given; it returned {describe_node(filled)}."
        )
    if length is None:
        return filled
    lengths = iter([c.length for c in caches_in(cache)])
    truncate = lambda c: c.truncate(next(lengths) + length - 1)  # noqa: E731
    return map_nodes(truncate, filled, is_cache)


def _called(model: Any, tokens: Array, cache: Any) -> tuple[Any, Any]:
    """The logits and the next cache."""
    try:
        signature_of(model).bind(tokens, cache)
    except TypeError as error:
        raise TypeError(
            "`generate` calls `model(tokens, cache)`, which this `model` does not take: "
            f"{error}. Write `def __call__(self, tokens, cache)`, and return `logits, "
            "cache`."
        ) from None
    except ValueError:  # a built-in function may have no signature
        pass
    out = model(tokens, cache)
    return pair_of(out, "`generate`: the `model`", "(logits, cache)")


def _next_logits(model: Any, token: Array, cache: Any) -> tuple[Array, Any]:
    logits, cache = _called(model, token[None], cache)
    if jnp.ndim(logits) != 2 or len(logits) != 1:
        raise ShapeError(
            "`generate` takes a `model` that returns logits of shape (tokens, vocabulary); "
            f"for 1 token it returned shape {jnp.shape(logits)}."
        )
    return logits[0], cache


def _seen_in_prompt(
    model: Any, prompt: Array, length: Any, cache: Any, options: _Options
) -> Array | None:
    """The mask of tokens that are in the prompt; `None` if there is no penalty."""
    if options.sampling["repetition_penalty"] is None:
        return None
    logits, _ = filter_eval_shape(_next_logits, model, prompt[0], cache)
    number = len(logits)
    if length is not None:
        prompt = jnp.where(jnp.arange(len(prompt)) < length, prompt, number)
    return jnp.zeros(number, bool).at[prompt].set(True, mode="drop")


# The caches


def _check_cache(tree: Any, prompt_shape: tuple[int, ...], steps: int) -> None:
    *batch, number = prompt_shape
    needed = number + steps - 1
    for path, node in jtu.tree_leaves_with_path(tree, is_leaf=is_cache):
        name = path_str(path, "cache")
        if not is_cache(node):
            if is_array(node):
                raise TypeError(
                    f"`generate` takes a `cache` that consists of KVCaches; `{name}` "
                    "is not part of a KVCache. Make one by `attention.init_cache(n)`."
                )
            continue
        if batch and node.length.shape[:1] != tuple(batch):
            raise ShapeError(
                "`generate` takes a `cache` with a leading axis of the batch, "
                f"{batch[0]}, on all arrays; `{name}.length` has shape "
                f"{node.length.shape}. Make it with `jax.vmap(lambda _: "
                "layer.init_cache(n))(jnp.arange(batch))`."
            )
        slots = node.position.shape[-1]
        if node.overflow == "ring" or isinstance(node.length, Tracer):
            continue
        with jax.ensure_compile_time_eval():  # not traced, if the cache is captured
            held = int(jax.device_get(node.length.max()))  # an explicit transfer
        if held + needed > slots:
            raise ValueError(
                f"`generate` needs room for {needed} tokens: {number} of the prompt "
                f"and `max_new_tokens - 1`. `{name}` has slots for {slots}, and holds "
                f"{held}. Make a longer one with `init_cache`."
            )


# Other arguments


def _float(x: Any) -> Any:
    if x is None:
        return None
    if isinstance(x, jax.Array):
        return x.astype(jnp.float32)
    return jax.device_put(np.float32(x))


def _checked_integers(name: str, value: Any) -> Array:
    value = as_array("`generate`", name, value)
    check_integer("`generate`", name, value)
    return value.astype(jnp.int32)


def _checked_length(length: Any, prompt_shape: tuple[int, ...]) -> Array | None:
    if length is None:
        return None
    length = _checked_integers("prompt_length", length)
    *batch, number = prompt_shape
    check_input("`generate`", length, batch, "prompt_length")
    return error_if(
        length,
        (length < 1) | (length > number),
        f"`generate` takes a `prompt_length` from 1 to {number}, the length of the prompt "
        "with padding.",
    )


def sample_logits(
    logits: Float[Array, " vocabulary"],
    key: PRNGKeyArray | None = None,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    repetition_penalty: ArrayLike | None = None,
    seen: Bool[Array, " vocabulary"] | None = None,
) -> Int[Array, ""]:
    """Samples a token from the distribution given by logits.

    In this order: the penalty, the temperature, `top_k`, `top_p`. It computes in float32 at
    least. For a batch, wrap it in `jax.vmap`, with a key for each row.

    **Arguments:**

    - `logits`: shape `(vocabulary,)`, floating. `-inf` forbids a token,
        and `inf` forces it.
    - `key`: the PRNG key; not needed if `temperature` is the number 0.
    - `temperature`: a finite scalar, 0 or more, that the logits are divided by. 0 is
        greedy: the most likely token, or the first of several.
    - `top_k`: the number of most likely tokens to draw from: an integer, 1 or more. A
        number larger than the vocabulary means all of them.
    - `top_p`: draw only from the smallest set of most likely tokens whose probabilities
        add up to at least this: a scalar, above 0 and at most 1. Nucleus sampling, from
        [The Curious Case of Neural Text Degeneration](https://arxiv.org/abs/1904.09751)
        (Holtzman et al. 2019).
    - `repetition_penalty`: makes tokens in `seen` less likely: a finite scalar above
        0. A positive logit is divided by it, and a negative one multiplied. 1 changes
        nothing. From [CTRL](https://arxiv.org/abs/1909.05858) (Keskar et al. 2019).
    - `seen`: which tokens the penalty is for, shape `(vocabulary,)`, bool; for example
        `jnp.zeros(vocabulary, bool).at[tokens].set(True)`.

    All scalars but `top_k` may be traced arrays. The range of a traced one is not
    checked: a negative temperature is then taken as 0, an infinite one draws all tokens
    that are not forbidden alike, and a `top_p` out of range is clamped.

    **Returns:**

    The token: an int32 scalar. If a logit is NaN, or all are -inf, there is no token to
    draw, and a compiled function returns -1, since a check there has a cost.

    **Raises:**

    `ValueError` if there is no token to draw and the logits are not traced, for a number
    out of range, for no `key` where one is needed, and if only
    one of `repetition_penalty` and `seen` is given. `TypeError` for logits that are not
    a floating-point array, or a `top_k` that is not an integer.
    [`equinox_like.ShapeError`][] for arrays of another shape.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        logits = jnp.array([1.0, 3.0, 2.0])
        assert eqx.nn.sample_logits(logits, temperature=0) == 1
        token = eqx.nn.sample_logits(logits, jax.random.key(0), top_k=2)
        assert token in (1, 2)
        ```
    """
    _check_logits(logits, seen)
    _check_sampling("sample_logits", temperature, top_k, top_p, repetition_penalty)
    if (repetition_penalty is None) != (seen is None):
        raise ValueError(
            "`sample_logits` takes `repetition_penalty` and `seen` together, or neither."
        )
    with jax.named_scope("eqx.nn.sample_logits"):
        logits = jax_array(logits)
        logits = logits.astype(accumulation_dtype(logits))
        if repetition_penalty is not None and seen is not None:
            penalty = jnp.asarray(repetition_penalty, logits.dtype)
            less = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(seen, less, logits)
        best = jnp.argmax(logits).astype(jnp.int32)
        largest = logits[best]
        # It is NaN if any logit is.
        best = jnp.where(largest > -jnp.inf, best, -1)
        if _is_greedy(temperature):
            return _require_token(best)
        if key is None:
            raise ValueError(
                "`sample_logits` needs a `key`, unless `temperature` is the number 0."
            )
        temperature = jnp.asarray(temperature, logits.dtype)
        # Subtract the maximum, or a low temperature could make several logits infinite.
        is_finite = jnp.isfinite(largest)
        # Less an infinite maximum, logits would be NaN.
        logits = jnp.where(is_finite, logits, 0)
        logits = logits - jnp.where(is_finite, largest, 0)
        divided = logits / jnp.where(temperature > 0, temperature, 1)
        # With an infinite temperature, the quotient would be NaN.
        logits = jnp.where(jnp.isneginf(logits), logits, divided)
        with key_named(key, "`sample_logits`"):
            token = _drawn(logits, key, top_k, top_p)
        return _require_token(jnp.where((temperature > 0) & is_finite, token, best))


def _require_token(token: Array) -> Array:
    known = known_array(token)
    if known is not None and (jax.device_get(known) < 0).any():
        raise ValueError(
            "`sample_logits` has no token to draw: a logit is NaN, or all are -inf. Look "
            "for the NaN in the model, or allow a token in the mask of the logits."
        )
    return token


def _drawn(logits: Array, key: Any, top_k: int | None, top_p: Any) -> Array:
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    number = len(logits) if top_k is None else min(operator.index(top_k), len(logits))
    # Sorted by likelihood; of equally likely tokens, the first ones come first.
    logits, tokens = jax.lax.top_k(logits, number)
    if top_p is not None:
        probabilities = jax.nn.softmax(logits)
        before = jnp.cumsum(probabilities) - probabilities
        kept = before < jnp.asarray(top_p, logits.dtype)
        # The most likely token is always kept.
        logits = jnp.where(kept.at[0].set(True), logits, -jnp.inf)
    return tokens[jax.random.categorical(key, logits)].astype(jnp.int32)


# Checks


def _is_greedy(temperature: Any) -> bool:
    """Whether the temperature is the Python number 0: take the most likely token."""
    return not is_array(temperature) and temperature == 0


_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("finite and 0 or more", lambda x: 0 <= x < math.inf),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "repetition_penalty": ("above 0 and finite", lambda x: 0 < x < math.inf),
}


def _check_sampling(
    function: str, temperature: Any, top_k: Any, top_p: Any, repetition_penalty: Any
) -> int | None:
    """Validates the options of `sample_logits`, and returns `top_k` as an int."""
    values = temperature, top_p, repetition_penalty
    for value, (name, (wanted, is_within)) in zip(values, _RANGES.items(), strict=True):
        if not is_array_like(value):
            if value is None and name != "temperature":
                continue
            raise wrong_type(f"`{function}`", "a number", name, value)
        check_scalar(f"`{function}`", name, value)
        # As NumPy's: within a trace, JAX would trace the comparison. By an explicit
        # transfer, which `jax.transfer_guard("disallow")` allows.
        is_known = not isinstance(value, Tracer)
        if is_known and not is_within(np.asarray(jax.device_get(value))):
            raise ValueError(
                f"`{function}` takes a `{name}` that is {wanted}; got {value}."
            )
    return None if top_k is None else require_integer(top_k, function, "top_k", 1)


def _check_logits(logits: Any, seen: Any) -> None:
    name = "`sample_logits`"
    if not is_array(logits) or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise wrong_type(name, "a floating array", "logits", logits)
    if logits.ndim != 1 or logits.shape[0] == 0:
        fix = " For a batch, wrap it in `jax.vmap`, with a key for each row."
        wanted = "an array of shape (vocabulary,)"
        raise wrong_shape(name, wanted, "logits", logits.shape, fix)
    if seen is not None:
        check_input(name, seen, logits.shape, "seen")
