"""`PReLU`: a rectifier with a learned slope."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._module import Module
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.precision import computes, in_float32
from .._base.shape import as_array, check_dtype, jax_array
from .._base.sharding import like


class PReLU(Module):
    r"""A rectifier with a slope for negative inputs: $y = x$ if $x \ge 0$, else $a x$.

    From [Delving Deep into Rectifiers](https://arxiv.org/abs/1502.01852) (He et al. 2015).
    The slope $a$ may be an array of any shape that broadcasts with the input.

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
        return in_float32(lambda a, x: jnp.where(x >= 0, x, a * x), slope, x)
