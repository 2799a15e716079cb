"""`Linear` and `Identity`: an affine map of a vector, and the identity."""

import functools
import math
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._module import Module, field
from ..._tree import is_array
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.init import Init, first_values, output_first
from .._base.keys import split_key
from .._base.precision import computes, in_float32
from .._base.shape import as_size_or_scalar, check_input, jax_array, parameter_shape
from .._base.sharding import explicit_mesh, like, product

_T = TypeVar("_T")


class Linear(Module):
    r"""An affine map of a vector: $y = W x + b$.

    Weight and bias start uniform on
    $[-1/\sqrt{\mathrm{in\_features}}, 1/\sqrt{\mathrm{in\_features}})$.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        assert layer(jnp.ones(3)).shape == (2,)
        assert jax.vmap(layer)(jnp.ones((8, 3))).shape == (8, 2)
        ```
    """

    weight: Array
    bias: Array | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)

    _layouts = MappingProxyType({"weight": output_first})

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `in_features`: the size of the input vector, 0 or more, or `"scalar"` for an
            input of shape `()`.
        - `out_features`: the size of the output vector, or `"scalar"`.
        - `use_bias`: whether to add a bias. Without one, the field `bias` is `None`.
        - `dtype`: of the parameters, floating or complex; by default float32, or float64
            if `jax_enable_x64` is on.
        - `key`: a PRNG key for parameter initialisation.
        - `weight_init`, `bias_init`: other initial values: a function `(key,
            shape, dtype) -> array` as in `jax.nn.initializers`, the name of an initialiser
            in that module (`"he_normal"`), or the values. The function gets the shape
            of the weight as `(in, out)`, the layout that `jax.nn.initializers` expects.

        **Raises:**

        `ValueError` if a size is negative, or another word than `"scalar"`.
        """
        in_size = as_size_or_scalar(self, "in_features", in_features)
        out_size = as_size_or_scalar(self, "out_features", out_features)
        rows, columns = _count(out_size), _count(in_size)
        limit = 1 / math.sqrt(columns) if columns else 1.0
        weight_key, bias_key = split_key(key, 2, self)
        first = functools.partial(first_values, self, limit=limit, dtype=dtype)
        self.weight = first("weight", weight_init, weight_key, (rows, columns))
        self.bias = first("bias", bias_init, bias_key, (rows,)) if use_bias else None
        self.in_features = in_size
        self.out_features = out_size
        self.use_bias = use_bias

    @computes("eqx.nn.Linear")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        out_sharding: PartitionSpec | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: shape `(in_features,)`, or `()` if that is `"scalar"`.
        - `key`: ignored.
        - `out_sharding`: how to split the result of one example over the explicit
            axes of a mesh; by default as the rows of the weight are.

        **Returns:**

        An array of shape `(out_features,)`, or `()` if that is `"scalar"`, of the dtype
        to which JAX promotes those of `x` and the parameters.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another shape.
        """
        weight_shape = parameter_shape(self, "weight", 2)
        if self.in_features == "scalar":
            check_input(self, x, ())
            x = jnp.reshape(x, (1,))
        elif weight_shape is not None:
            check_input(self, x, weight_shape[1:])
        y = product(_product, jax_array(x), self.weight, out_sharding)
        if self.bias is not None:
            bias = self.bias if out_sharding is None else like(self.bias, y)
            y = in_float32(jnp.add, y, bias)
        return jnp.reshape(y, ()) if self.out_features == "scalar" else y


class Identity(Module):
    """Returns its input, the identical object: a placeholder for a layer that is left
    out.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        layer = eqx.nn.Identity(3, "any", use_bias=False)
        x = jnp.ones(3)
        assert layer(x) is x
        ```
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """**Arguments:** any, and all are ignored."""

    @jax.named_scope("eqx.nn.Identity")
    def __call__(self, x: _T, *, key: PRNGKeyArray | None = None) -> _T:
        """**Returns:** `x`, of any type. `key` is ignored."""
        return x


def mapped(layer: Any, x: Array) -> Array:
    """`jax.vmap(layer)(x)`; for a `Linear` by one product, which is faster to trace."""
    if (
        type(layer) is not Linear
        or not (is_array(layer.weight) and (layer.bias is None or is_array(layer.bias)))
        or layer.weight.shape[1:] != x.shape[1:]
        or "scalar" in (layer.in_features, layer.out_features)
        or explicit_mesh(x, layer.weight) is not None
    ):
        return jax.vmap(layer)(x)
    with jax.named_scope("eqx.nn.Linear"):
        y = _product(x, layer.weight)
        return y if layer.bias is None else in_float32(jnp.add, y, layer.bias[None])


def _product(x: Array, weight: Any) -> Array:
    # `x` comes first, so that under `vmap` the batch axis needs no transpose.
    return jnp.inner(x, weight) if is_array(weight) else weight @ x


def _count(size: int | Literal["scalar"]) -> int:
    return 1 if size == "scalar" else size
