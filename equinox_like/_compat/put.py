"""Converts a NumPy array to a JAX array, seven times as fast as `jax.device_put`.

A checkpoint has thousands of leaves, and `device_put` takes 30 us for each of them.
(`jnp.asarray` also compiles a program for each shape.) Serves jax 0.10 to 0.12:
`batched_device_put` of jaxlib, which `device_put` calls. The fallback is `device_put`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .private import private

Put = Callable[[np.ndarray], jax.Array]


def find(client: Any, *, copy: bool) -> Put:
    """A function that puts arrays onto the current default device.

    With `copy=False` the result shares the memory of the NumPy array if JAX can do
    that, so the NumPy array must not be written to. With `copy=True` the result owns
    its memory, so that an output can reuse it if the result is donated.
    """
    public = jnp.array if copy else jax.device_put
    try:
        put, semantics = client.batched_device_put, client.HostBufferSemantics
        kind = semantics.IMMUTABLE_ONLY_DURING_CALL if copy else semantics.ZERO_COPY
        make_aval = importlib.import_module("jax.core").ShapedArray
    except AttributeError:
        return public
    # `device_put` finds the default device. Under a trace, it returns a tracer.
    sharding = getattr(jax.device_put(np.zeros((), bool)), "sharding", None)
    if type(sharding) is not jax.sharding.SingleDeviceSharding:
        return public
    devices = list(sharding.device_set)

    avals: dict[Any, Any] = {}

    def fast(array: np.ndarray) -> jax.Array:
        key = array.shape, array.dtype
        aval = avals.get(key)
        if aval is None:
            if not _is_canonical(array.dtype):
                return public(array)
            aval = avals[key] = make_aval(*key)
        try:
            return put(
                aval, sharding, [array], devices, False, host_buffer_semantics=kind
            )
        except TypeError:  # other parameters than in the versions above
            return public(array)
        except RuntimeError:
            # `jax.transfer_guard("disallow")` allows explicit transfers only.
            return jax.device_put(array.copy() if copy else array)

    return fast


def putter(*, copy: bool) -> Put:
    """[`find`][] with the jaxlib that is installed."""
    return find(getattr(private("lib"), "xla_client", None), copy=copy)


def _is_canonical(dtype: np.dtype) -> bool:
    return jax.dtypes.canonicalize_dtype(dtype) == dtype
