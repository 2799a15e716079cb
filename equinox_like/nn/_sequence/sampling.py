"""`sample_logits`: the next token, drawn from a model's logits."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..._compat.tracing import Tracer, known_array
from ..._errors import ShapeError
from ..._tree import is_array, is_array_like
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.arguments import as_size, check_scalar, wrong_type
from .._base.init import key_named
from .._base.inputs import jax_array
from .._base.precision import accumulation_dtype


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
    check_sampling("sample_logits", temperature, top_k, top_p, repetition_penalty)
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
        if is_greedy(temperature):
            return _checked(best)
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
        return _checked(jnp.where((temperature > 0) & is_finite, token, best))


def _checked(token: Array) -> Array:
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


def is_greedy(temperature: Any) -> bool:
    """Whether the temperature is the Python number 0: take the most likely token."""
    return not is_array(temperature) and temperature == 0


_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("finite and 0 or more", lambda x: 0 <= x < math.inf),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "repetition_penalty": ("above 0 and finite", lambda x: 0 < x < math.inf),
}


def check_sampling(
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
    return None if top_k is None else checked_int(function, "top_k", top_k, 1)


def checked_int(function: str, name: str, value: Any, minimum: int) -> int:
    """`as_size`, except that something else than an int is a `TypeError`."""
    try:
        operator.index(value)
    except TypeError:  # also for a traced integer
        raise wrong_type(f"`{function}`", "a Python integer", name, value) from None
    return as_size(f"`{function}`", name, value, minimum)


def _check_logits(logits: Any, seen: Any) -> None:
    if not is_array(logits):
        raise TypeError(
            f"`sample_logits` takes an array of logits; got {describe_node(logits)}."
        )
    if logits.ndim != 1 or logits.shape[0] == 0:
        raise ShapeError(
            "`sample_logits` takes `logits` of shape (vocabulary,); got shape "
            f"{logits.shape}. For a batch, wrap it in `jax.vmap`, with a key for each row."
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"`sample_logits` takes floating logits; got {logits.dtype}.")
    if seen is not None and not is_array(seen):
        raise wrong_type("`sample_logits`", "an array of bools", "seen", seen)
    if seen is not None and seen.shape != logits.shape:
        raise ShapeError(
            f"`sample_logits` takes a `seen` of the shape of the logits, {logits.shape}; "
            f"got shape {seen.shape}."
        )
