"""`breakpoint_if`: opens JAX's debugger if a value is true."""

from typing import Any

import jax
from jax import lax

from .._runtime.unvmap import unvmap_any
from .._typing import ArrayLike


def breakpoint_if(pred: ArrayLike, **kwargs: Any) -> Any:
    """Opens JAX's debugger if a predicate is true when the program runs.

    **Arguments:**

    - `pred`: a bool, or an array of any shape. The debugger opens if any element is
        true; under `jax.vmap`, if any element of the batch is.
    - `**kwargs`: as for `jax.debug.breakpoint`. By default the debugger has the variables
        of all calling functions. Some may not be used within a rule of a custom
        derivative or an `internal.noinline` function: pass `num_frames=1` there.

    **Returns:**

    The keyword argument `token`, or `None`. A `token` that is used afterwards orders the
    breakpoint among other computations.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        @jax.jit
        def f(x):
            y = jnp.sqrt(x)
            eqx.debug.breakpoint_if(jnp.isnan(y))
            return y

        assert f(jnp.asarray(4.0)) == 2
        ```
    """
    token = kwargs.pop("token", None)

    # A new function, so that JAX does not reuse the trace of another breakpoint.
    def stop(token):
        jax.debug.breakpoint(token=token, **kwargs)
        return token

    return lax.cond(unvmap_any(pred), stop, lambda token: token, token)
