"""`StatefulLayer`: how a container learns that a layer takes a state and returns one."""

import abc
from typing import Any

from jaxtyping import PRNGKeyArray

from .._module import Module


class StatefulLayer(Module):
    """Abstract base class of the layers that read or write a state.

    A subclass is called as `layer(x, state, *, key=None)` and returns `(out, new_state)`.
    [`equinox_like.nn.Sequential`][] threads the state through those of its members which
    are instances of this class.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        class CountCalls(eqx.nn.StatefulLayer):
            def __call__(self, x, state, *, key=None):
                return x, state + 1

        model = eqx.nn.Sequential([CountCalls(), CountCalls()])
        out, state = model(jnp.ones(3), jnp.asarray(0))
        assert state == 2
        ```
    """

    @abc.abstractmethod
    def __call__(self, x: Any, state: Any, *, key: PRNGKeyArray | None = None) -> Any:
        """**Returns:** the output for one example, and the new state."""

    def is_stateful(self) -> bool:
        """Whether this instance takes a state: `True` unless a subclass says otherwise."""
        return True


class _Absent:
    """Stands for a `state` that was not passed, which `None` would be."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()
