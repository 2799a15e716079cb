"""`Dropout` and `PReLU`, which treat each element alike."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._errors import MissingKeyError, ShapeError, warn
from ..._module import Module, field
from ..._tree import is_array_like
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import as_array, as_axes, check_dtype, jax_array
from .._base.init import draw, key_named
from .._base.precision import accumulation_dtype, computes, in_float32
from .._base.sharding import like
from .._base.state import at_inference

_T = TypeVar("_T")


class Dropout(Module):
    """Sets elements to zero at random, and scales the others up.

    An element is kept with probability `1 - p`, and then divided by `1 - p`, so that the
    mean of the output is the input. At inference the layer returns its input.

    From [Dropout: A Simple Way to Prevent Neural Networks from
    Overfitting](https://jmlr.org/papers/v15/srivastava14a.html) (Srivastava et al. 2014).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        dropout = eqx.nn.Dropout(p=0.25)
        x = jnp.ones(4)
        dropped = dropout(x, key=jax.random.key(0))
        assert ((dropped == 0) | jnp.isclose(dropped, 4 / 3)).all()
        assert dropout(x, inference=True) is x
        ```
    """

    p: ArrayLike
    inference: bool | Array | None
    broadcast_axes: tuple[int, ...] = field(static=True, default=())

    def __init__(
        self,
        p: ArrayLike = 0.5,
        inference: bool | Array | None = False,
        *,
        deterministic: bool | None = None,
        broadcast_axes: Sequence[int] = (),
    ):
        """**Arguments:**

        - `p`: the probability that an element is dropped. A leaf of the tree, as is
            `inference`, so that both can be changed later.
        - `inference`: if `True`, nothing is dropped. If `None`,
            [`equinox_like.inference`][] and [`equinox_like.training`][] decide.
        - `deterministic`: the old name of `inference`. Deprecated.
        - `broadcast_axes`: axes of the input along which elements are kept or dropped
            together: `(1, 2)` drops whole channels of an
            image of shape `(channels, height, width)`.

        **Raises:**

        `ValueError` if `p` is a Python number outside of 0 to 1, or is not a number, or
        if `broadcast_axes` is not a sequence of ints.
        """
        _check_range(p)
        self.p = p
        self.inference = resolve_inference("Dropout", inference, deterministic)
        self.broadcast_axes = as_axes(self, "broadcast_axes", broadcast_axes)

    @property
    def deterministic(self) -> Any:
        """The same as `inference`, by its older name."""
        # The type is `Any`, because within `tree_at` a field may hold anything.
        return self.inference

    @computes(None)
    def __call__(
        self,
        x: _T,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Array | _T:
        """**Arguments:**

        - `x`: an array of any shape.
        - `key`: a PRNG key that decides which elements are dropped. Not needed at
            inference. Under `jax.vmap` pass a key for each example: one key drops the
            same elements of all of them. Where the examples are split over the explicit
            axes of a mesh, the keys must be split in the same way:
            `jax.sharding.reshard(keys, PartitionSpec("data"))`.
        - `inference`: overrides the layer's own, unless it is `None`.
        - `deterministic`: the old name of `inference`. Deprecated.

        **Returns:**

        An array of the shape and dtype of `x`; integers become floats. At inference, and
        if `p` is the number 0, `x` itself.

        **Raises:**

        [`equinox_like.MissingKeyError`][] if there is no key and one is needed.
        [`equinox_like.ShapeError`][] if `x` has no axis that `broadcast_axes` names.
        """
        inference = resolve_inference("Dropout", inference, deterministic)
        if not self.is_active(inference):
            return x
        if key is None:
            raise MissingKeyError(
                "Dropout needs a `key` outside of inference: pass `layer(x, "
                "key=key)`, or `inference=True`. For evaluation, call "
                "`eqx.nn.inference_mode(model)` instead of `model`."
            )
        # The scope starts after the warning above, so that this points at the caller.
        with jax.named_scope("eqx.nn.Dropout"):
            return _drop(as_array(self, "x", x), self, key)

    def is_active(self, inference: bool | None = None) -> bool:
        """Whether a call with this `inference` may drop anything."""
        is_zero = isinstance(self.p, (int, float)) and bool(self.p == 0)
        return not is_zero and not at_inference(self, inference)


def _drop(x: Array, dropout: Dropout, key: PRNGKeyArray) -> Array:
    keep = _keep_probability(dropout.p)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.result_type(float))
    shape = _mask_shape(x.shape, dropout.broadcast_axes)
    with key_named(key, dropout):
        if jnp.ndim(keep):
            mask = jax.random.bernoulli(key, keep, shape)
        else:  # the same numbers
            mask = _mask(key, keep, shape)
    # If nothing is kept, the mask would hide `x / 0`, but its gradient would be NaN.
    if isinstance(keep, float):
        divisor = keep if keep > 0 else 1.0
    else:
        divisor = jnp.where(keep > 0, keep, 1).astype(x.dtype)
    return jnp.where(mask, x / divisor, 0)


@functools.partial(jax.jit, static_argnames="shape", inline=True)
def _mask(key: PRNGKeyArray, keep: Any, shape: tuple[int, ...]) -> Array:
    return draw(jax.random.uniform, key, shape, jnp.result_type(keep)) < keep


def _check_range(p: Any) -> None:
    is_number = isinstance(p, (int, float))
    if not is_array_like(p) or (is_number and not 0 <= p <= 1):
        raise ValueError(f"Dropout takes a `p` between 0 and 1; got {p!r}.")


def _keep_probability(p: Any) -> Any:
    """`1 - p`: a Python float if `p` is a Python number."""
    _check_range(p)
    if isinstance(p, (int, float)):
        # A float64 of NumPy is a `float`, too, but it would promote the input.
        return 1.0 - float(p)
    p = jnp.asarray(p)
    # In half precision, 1 - 0.001 may be 1, and the draws would be coarse.
    return 1 - jax.lax.stop_gradient(p.astype(accumulation_dtype(p)))


def _mask_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ShapeError(
                f"Dropout has `broadcast_axes={axes}`, but was given an array of shape "
                f"{shape}, which has no axis {axis}."
            )
    shared = {axis % len(shape) for axis in axes}
    return tuple(1 if i in shared else n for i, n in enumerate(shape))


def resolve_inference(name: str, inference: Any, deterministic: bool | None) -> Any:
    """`inference`, or the value of `deterministic`, its deprecated name."""
    if deterministic is None:
        return inference
    warn(f"{name}'s `deterministic` was renamed: pass `inference` instead.")
    return deterministic


class PReLU(Module):
    """A rectifier with a slope for negative inputs: `x` if `x >= 0`, else `a * x`.

    From [Delving Deep into Rectifiers](https://arxiv.org/abs/1502.01852) (He et al. 2015).
    The slope `a` may be an array of any shape that broadcasts with the input.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        prelu = eqx.nn.PReLU(0.5)
        assert prelu(jnp.array([-2.0, 2.0])).tolist() == [-1.0, 2.0]
        ```
    """

    negative_slope: Array

    def __init__(self, init_alpha: ArrayLike = 0.25, *, dtype: DTypeLike | None = None):
        """**Arguments:**

        - `init_alpha`: the initial value of the slope. If it is a Python number and no
            `dtype` is given, the layer keeps the dtype of its input.
        - `dtype`: of the slope.
        """
        if dtype is not None:
            check_dtype(self, "dtype", dtype)
        if isinstance(init_alpha, int):
            init_alpha = float(init_alpha)
        slope = as_array(self, "init_alpha", init_alpha, dtype)
        if not jnp.issubdtype(slope.dtype, jnp.inexact):
            # An integer would never be trained.
            slope = slope.astype(float)
        self.negative_slope = slope

    # The user's promotion settings must not make the layer's own arithmetic fail.
    @computes("eqx.nn.PReLU")
    @jax.numpy_rank_promotion("allow")
    @jax.numpy_dtype_promotion("standard")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: an array of any shape.
        - `key`: ignored.

        **Returns:**

        An array of the dtype to which JAX promotes those of `x` and the slope.
        """
        x = as_array(self, "x", x)
        slope = like(jax_array(self.negative_slope), x)
        return in_float32(_rectified, slope, x)


@functools.partial(jax.jit, inline=True)
def _rectified(slope: Array, x: Array) -> Array:
    return jnp.where(x >= 0, x, slope * x)
