"""`ContainerMeta`: the old form of enumerations, kept for backward compatibility."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ContainerMeta(type):
    """Metaclass whose classes are enumerations. Use [`equinox_like.Enumeration`][] instead.

    The attributes of the class become integers, counted from 0. `Cls[i]` is the value that
    was written for the integer `i`, `Cls.reverse_lookup` is the list of them, and
    `len(Cls)` is their number. `isinstance(x, Cls)` is true for Python integers and for
    integer arrays of shape `()`.

    !!! example

        ```python
        import equinox_like as eqx

        class Results(metaclass=eqx.internal.ContainerMeta):
            successful = "It worked."
            failed = "It did not work."

        assert Results.failed == 1 and Results[1] == "It did not work."
        ```
    """

    reverse_lookup: list[Any]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]):
        items = {k: v for k, v in namespace.items() if not k.startswith("__")}
        numbers = {k: i for i, k in enumerate(items)}
        lookup = {"reverse_lookup": list(items.values())}
        return super().__new__(mcs, name, bases, namespace | numbers | lookup)

    def __getitem__(cls, item: Any) -> Any:
        return cls.reverse_lookup[item]

    def __len__(cls) -> int:
        return len(cls.reverse_lookup)

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, jax.Array | np.ndarray | np.generic):
            return instance.ndim == 0 and jnp.issubdtype(instance.dtype, jnp.integer)
        return isinstance(instance, int)
