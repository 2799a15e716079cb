"""Single arrays: typed keys as numbers, deleted arrays, weak types, fast conversion.

Serves jax 0.10 to 0.12.

- JAX stores typed PRNG keys in the private attribute `_base_array`. `sharding` and `aval`
  of an array of keys are computed at each access, which takes 10 to 30 us; those of the
  array of numbers take 0.1 us. Without the attribute, calls that donate are slower if a
  key comes first, or if arrays are on several devices.
- An array keeps the traceback of where it was created. `.delete()` drops it, but a
  donation does not: so one can tell the two.
- If NumPy holds the buffer of the first device, a donation deletes only those of the
  others. The array then looks alive, and to use it may crash or hang. To delete the rest
  could crash, too, if another thread reads it, so the array is only noted.
- jax 0.10 crashes if a deleted array on several devices is passed to a function that it
  has compiled. Later versions raise an error.
- JAX has no public function to make an array weakly typed: the parameters of a primitive
  are used.
- `device_put` takes 30 us for each leaf of a checkpoint, and `batched_device_put` of
  jaxlib, which it calls, a seventh of that. (`jnp.asarray` also compiles a program for
  each shape.) The fallback is `device_put`.
"""

import importlib
import weakref
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from . import private
from .tracing import Tracer


def stored_as(x: Any) -> Any:
    """The array of numbers, for an array of typed keys; any other array itself."""
    return getattr(x, "_base_array", x)


MAY_CRASH: Final[bool] = jax.__version_info__ < (0, 11)
"""Whether JAX may crash on a deleted array on several devices."""


def may_be_donated(x: Any) -> bool:
    """Whether `x`, a deleted array, was donated; `False` if that is unknown."""
    return getattr(stored_as(x), "traceback", None) is not None


_in_part: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()


def record_deleted_part(x: Any) -> None:
    """Has `is_array_deleted` tell that a part of `x` is deleted."""
    x = stored_as(x)
    _in_part[id(x)] = x


def is_array_deleted(x: Any) -> bool:
    """Whether `x`, an array of JAX, is deleted, or a part of it that JAX does not tell."""
    if x.is_deleted():
        return True
    x = stored_as(x)
    return _in_part.get(id(x)) is x


def weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with the same dtype, which is weak."""
    convert = jax.lax.convert_element_type_p
    weak = convert.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
    if isinstance(weak, Tracer) or weak.sharding == x.sharding:
        return weak
    return jax.device_put(weak, x.sharding)  # it may have lost the memory kind


Put = Callable[[np.ndarray], jax.Array]


def find_put(client: Any, *, copy: bool) -> Put:
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
            if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
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
    """`find_put` with the jaxlib that is installed."""
    return find_put(getattr(private("lib"), "xla_client", None), copy=copy)


def default_device() -> Any:
    """The device of new arrays: that of `jax.default_device`, or else the first one of
    this process."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def platform_of(device: Any) -> str:
    """The platform of a device, as JAX's lowering names it: `"cuda"`, not `"gpu"`."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
