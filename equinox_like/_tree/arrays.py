"""Single arrays: how messages describe them, their buffers, and their typed keys."""

import functools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat.arrays import is_array_deleted
from .._compat.tracing import Tracer
from .._environment import GETKEY_SEED
from .._typing import ArrayLike


def describe_array(x: Any) -> str:
    """The dtype and shape of an array, as in `float32[3]`."""
    return describe_type(x.dtype, x.shape)


@functools.lru_cache(maxsize=1024)
def describe_type(dtype: Any, shape: tuple[int, ...]) -> str:
    """As `describe_array`, from a dtype (or its name) and a shape."""
    name = dtype if isinstance(dtype, str) else dtype.name
    return f"{name}[{','.join(map(str, shape))}]"


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without its sharding and weak type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def jax_struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """As `struct_of`, with the dtype that JAX uses for a NumPy array of 64 bits."""
    return struct_of(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def is_concrete(x: Any) -> bool:
    """Whether `x` is a JAX array with buffers, and not a tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def is_deleted(x: Any) -> bool:
    # A tracer has no buffer, and a NumPy array never loses its own.
    return is_concrete(x) and is_array_deleted(x)


def is_typed_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys, or a struct of one."""
    dtype = getattr(x, "dtype", None)
    return (
        dtype is not None
        # Tested first, since `issubdtype` is slower.
        and not isinstance(dtype, np.dtype)
        and isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    )


def is_weak(x: Any) -> bool:
    """Whether the dtype of an array is weak, which typed keys do not have."""
    return getattr(x, "weak_type", False)


def without_key(x: Any) -> Any:
    """The array of numbers, for an array of typed PRNG keys; any other array itself."""
    return jax.random.key_data(x) if is_typed_key(x) else x


def with_key(x: Any, like: Any) -> Any:
    """The inverse of `without_key`. `like` is an array, or a struct, of the dtype."""
    if not is_typed_key(like):
        return x
    return jax.random.wrap_key_data(x, impl=key_impl(like.dtype))


@functools.cache
def key_impl(dtype: Any) -> Any:
    """The implementation of typed keys of this dtype."""
    found = []
    # Abstractly, because a callback of a running program must not run another one.
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def reusable(x: Any) -> Any:
    """`x`, and if it holds PRNG keys, a copy that may be used where `x` was used before,
    or will be. Only `jax.debug_key_reuse` distinguishes the two."""
    return jax.random.clone(x) if is_typed_key(x) else x


def buffer_pointers(x: jax.Array) -> list[Any]:
    """Hashable values. Two arrays that share memory have at least one in common."""
    try:
        return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    except Exception:
        return [id(x)]  # this backend has no pointers: recognises the same object only


def left_broadcast_to(arr: ArrayLike, shape: Sequence[int]) -> jax.Array:
    """As `jnp.broadcast_to`, but new axes are added on the right.

    **Arguments:**

    - `arr`: an array, or a Python number.
    - `shape`: the shape of the result. It begins with the shape of `arr`, in which an
        axis of size 1 fits any size.

    **Returns:**

    An array of this shape and the dtype of `arr`.

    **Raises:**

    `ValueError` if the shapes do not fit.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        mask = jnp.asarray([True, False, True])
        assert eqx.internal.left_broadcast_to(mask, (3, 2)).all(axis=1).tolist() == [
            True, False, True
        ]
        ```
    """
    arr, shape = jnp.asarray(arr), tuple(shape)
    head = shape[: arr.ndim]
    if len(head) < arr.ndim or any(
        n not in (1, m) for n, m in zip(arr.shape, head, strict=True)
    ):
        raise ValueError(
            f"An array of shape {arr.shape} cannot be broadcast to {shape}, with the axes "
            "aligned on the left."
        )
    missing = tuple(range(arr.ndim, len(shape)))
    return jnp.broadcast_to(jnp.expand_dims(arr, missing), shape)


class GetKey:
    """Returns a new PRNG key each time it is called. Meant for tests.

    Print it if a test fails: its `repr` has the seed, which reproduces the same keys.

    **Arguments:**

    - `seed`: an integer. The default is the environment variable `EQX_GETKEY_SEED`, as
        it was when the library was imported. If that is not set, the seed is random.

    **Returns:**

    A callable without arguments. Its k-th call returns
    `jax.random.fold_in(jax.random.PRNGKey(seed), k)`, a raw `uint32` key.

    **Attributes:**

    - `seed`: the seed that is used.
    - `call`: the number of calls so far.
    - `key`: `jax.random.PRNGKey(seed)`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        getkey = eqx.internal.GetKey(seed=0)
        x, y = jax.random.normal(getkey()), jax.random.normal(getkey())
        assert x != y and getkey.call == 2
        ```
    """

    def __init__(self, seed: int | None = None):
        if seed is None:
            seed = GETKEY_SEED
        self.seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        self.call = 0
        self.key = jax.random.PRNGKey(self.seed)

    def __call__(self) -> jax.Array:
        self.call += 1
        return jax.random.fold_in(self.key, self.call)

    def __repr__(self) -> str:
        return f"GetKey(seed={self.seed}, call={self.call}, key={self.key!r})"


def nextafter(x: ArrayLike) -> jax.Array:
    """The next larger floating-point number.

    For zero, of either sign, this is the smallest normal number, since many devices
    treat smaller numbers as zero.

    **Arguments:**

    - `x`: an array of a floating dtype, or a Python float.

    **Returns:**

    An array of the shape and dtype of `x`. Infinity, or the largest number of a dtype
    without one, is unchanged. The derivative is 1.

    **Raises:**

    `ValueError` if `x` has another dtype.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.internal.nextafter(1.0) == 1 + jnp.finfo(jnp.float32).eps
        ```
    """
    return _neighbour(_as_floating(x, "nextafter"), 1)


def prevbefore(x: ArrayLike) -> jax.Array:
    """The next smaller floating-point number.

    As [`equinox_like.internal.nextafter`][], in the other direction.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.internal.prevbefore(0.0) == -jnp.finfo(jnp.float32).tiny
        ```
    """
    return _neighbour(_as_floating(x, "prevbefore"), -1)


def _as_floating(x: ArrayLike, name: str) -> jax.Array:
    x = jnp.asarray(x)
    # The powers of two of `float8_e8m0fnu` have neither a sign nor a zero.
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float8_e8m0fnu:
        raise ValueError(f"`{name}` takes floating-point numbers; got {x.dtype}.")
    return x


def _neighbour(x: jax.Array, sign: int) -> jax.Array:
    # The rule calls `step`: derivatives of any order are those of the identity.
    @jax.custom_jvp
    def step(x):
        tiny = jnp.asarray(sign * jnp.finfo(x.dtype).tiny, x.dtype)
        # Infinity, or the largest number of a dtype that has none, such as float8_e4m3fn.
        far = np.fmax(np.asarray(np.inf, x.dtype), jnp.finfo(x.dtype).max)
        far = jnp.full_like(x, sign * far)
        return jnp.where(x == 0, tiny, jnp.nextafter(x, far))

    step.defjvp(lambda primals, tangents: (step(*primals), *tangents))
    return step(x)
