"""The device that JAX computes on by default, and the names of platforms."""

from typing import Any

import jax


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
