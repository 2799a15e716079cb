"""Copies the arrays of a tree, so that one can be donated and the other kept."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat.tracing import at_top_level
from .._errors import DonationError
from .arrays import describe_array, is_concrete, is_deleted, is_typed_key
from .deleted import deleted_named, fate_of
from .filters import is_array
from .nodes import path_str

_Tree = TypeVar("_Tree")


@deleted_named
def tree_copy(pytree: _Tree) -> _Tree:
    """A copy of the tree in which each array has a buffer of its own.

    JAX arrays keep dtype, weak type, sharding and whether they are committed to their
    devices. NumPy arrays and typed PRNG keys are copied too, everything else is the
    identical object. An array that occurs at two places becomes two arrays.

    **Arguments:**

    - `pytree`: any pytree. Under `jax.jit` the arrays of the result are copies at run time.

    **Returns:**

    The copy. Donating it leaves `pytree` as it is.

    **Raises:**

    [`equinox_like.DonationError`][] if an array was deleted, naming its path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        state = {"w": jnp.ones(2), "steps": 3}
        spare = eqx.tree_copy(state)
        state["w"].delete()
        assert spare["w"].sum() == 2
        ```
    """
    return jtu.tree_map_with_path(_copy, pytree)


def _copy(path: tuple[Any, ...], x: Any) -> Any:
    if not is_array(x):
        return x
    if not is_concrete(x):
        return x.copy()
    if is_deleted(x):
        raise DonationError(
            f"Cannot copy `{path_str(path, 'pytree')}`, {describe_array(x)}: it was "
            f"{fate_of(x)}. Copy it before that."
        )
    return copy_array(x)


def copy_array(x: jax.Array) -> jax.Array:
    # `x.copy()` fails for a PRNG key that a trace captures.
    is_captured_key = is_typed_key(x) and not at_top_level()
    copy = jnp.copy(x) if is_captured_key else x.copy()
    # Within a trace, the copy of a captured array is a tracer.
    if not is_concrete(copy) or copy.sharding == x.sharding:
        return copy
    # A copy may lose the memory kind, or return an equivalent sharding.
    return jax.device_put(copy, x.sharding)
