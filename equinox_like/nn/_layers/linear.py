"""`Linear` and `Identity`, and `MLP`: linear layers with activations between them."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._call_path import call_part
from ..._module import Module, field
from ..._tree import combine, is_array, partition
from ..._tree.partitioning import map_arrays
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.arguments import as_size, as_size_or_scalar, check_layer
from .._base.init import Init, build_stacked, first_values, output_first, split_key
from .._base.inputs import (
    check_columns,
    check_input,
    jax_array,
    parameter_shape,
)
from .._base.precision import computes, in_float32
from .._base.sharding import (
    explicit_mesh,
    like,
    parts,
    product,
    split_along,
    split_by,
    varying_as,
)

_T = TypeVar("_T")


class Linear(Module):
    """An affine map of a vector: `W x + b`.

    Weight and bias start uniform between `-a` and `a`, where `a` is `1/sqrt(in_features)`.

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
        rows, columns = (1 if n == "scalar" else n for n in (out_size, in_size))
        limit = 1 / math.sqrt(columns) if columns else 1.0
        weight = weight_init, (rows, columns)
        bias = bias_init, (rows,) if use_bias else None
        parameters = first_values(self, key, limit, dtype, weight=weight, bias=bias)
        self.weight, self.bias = parameters
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
        if self.in_features == "scalar":
            parameter_shape(self, "weight", 2)  # refuses an ensemble
            check_input(self, x, ())
            x = jnp.reshape(x, (1,))
        else:
            check_columns(self, x)
        y = product(rows_product, jax_array(x), self.weight, out_sharding)
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
        """**Arguments:**

        - `*args`, `**kwargs`: any, and all are ignored.
        """

    @computes("eqx.nn.Identity", "nothing")
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
        y = rows_product(x, layer.weight)
        return y if layer.bias is None else in_float32(jnp.add, y, layer.bias[None])


def rows_product(x: Array, weight: Any) -> Array:
    # `x` comes first, so that under `vmap` the batch axis needs no transpose.
    return jnp.inner(x, weight) if is_array(weight) else weight @ x


def identity(x: Any) -> Any:
    return x


class MLP(Module):
    """A multilayer perceptron: `depth` hidden layers of one width.

    Each hidden layer computes `activation(W x + b)`, and the last layer
    `final_activation(W x + b)`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 2, width_size=16, depth=2, key=jax.random.key(0))
        assert mlp(jnp.ones(3)).shape == (2,)
        ```
    """

    layers: tuple[Linear, ...]
    activation: Callable[..., Any]
    final_activation: Callable[..., Any]
    use_bias: bool = field(static=True)
    use_final_bias: bool = field(static=True)
    in_size: int | Literal["scalar"] = field(static=True)
    out_size: int | Literal["scalar"] = field(static=True)
    width_size: int = field(static=True)
    depth: int = field(static=True)
    scan: bool = field(static=True, default=False)

    def __init__(
        self,
        in_size: int | Literal["scalar"],
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Callable[..., Any] = jax.nn.relu,
        final_activation: Callable[..., Any] = identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        scan: bool = False,
        key: PRNGKeyArray,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `in_size`: the size of the input vector, or `"scalar"` for an input of shape
            `()`.
        - `out_size`: the size of the output vector, or `"scalar"`.
        - `width_size`: the size of each hidden layer.
        - `depth`: the number of hidden layers. With 0 there is one linear layer, from the
            input to the output.
        - `activation`: applied after each hidden layer, to each neuron's scalar; by default
            `jax.nn.relu`. If it holds arrays, as a Module may, each neuron of each layer
            gets its own copy: they gain leading axes `(depth, width_size)`.
        - `final_activation`: applied after the last layer, in the same way; by default
            the identity. Its arrays gain a leading axis `(out_size,)`, none for
            `"scalar"`.
        - `use_bias`, `use_final_bias`: whether the hidden layers, and the last one, have a
            bias.
        - `dtype`: of the parameters, as for [`equinox_like.nn.Linear`][].
        - `scan`: if `True`, the hidden layers from the second on run in one
            `jax.lax.scan`, so that the time to compile does not grow with the depth.
            `layers` is then (first, all of the middle stacked into one, last). The
            results are the same.
        - `key`: a PRNG key for parameter initialisation.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Linear`][], for each layer.

        **Raises:**

        `ValueError` if a size or `depth` is negative, `TypeError` if an activation is not
        callable.
        """
        self.in_size = as_size_or_scalar(self, "in_size", in_size)
        self.out_size = as_size_or_scalar(self, "out_size", out_size)
        self.width_size = as_size(self, "width_size", width_size)
        self.depth = as_size(self, "depth", depth)
        self.use_bias = use_bias
        self.use_final_bias = use_final_bias
        self.scan = scan
        inits = {"weight_init": weight_init, "bias_init": bias_init}
        self.layers = _build_layers(self, dtype, key, inits)
        check_layer("MLP", "activation", activation, "a function")
        check_layer("MLP", "final_activation", final_activation, "a function")
        self.activation = _copied(activation, (self.depth, self.width_size))
        out_shape = () if self.out_size == "scalar" else (self.out_size,)
        self.final_activation = _copied(final_activation, out_shape)

    @computes("eqx.nn.MLP", "nothing")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: shape `(in_size,)`, or `()` if that is `"scalar"`.
        - `key`: ignored.

        **Returns:**

        An array of shape `(out_size,)`, or `()` if that is `"scalar"`.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another shape.
        """
        hidden = _scan_hidden if self.scan else _loop_hidden
        h = hidden(self, x) if self.depth > 0 else x
        y = self.layers[-1](h)
        with _of_scalars("final_activation"):
            if self.out_size == "scalar":
                return self.final_activation(y)
            return _each_neuron(self.final_activation, y)


def _build_layers(
    mlp: MLP, dtype: DTypeLike | None, key: PRNGKeyArray, inits: dict[str, Any]
) -> tuple[Linear, ...]:
    depth, width = mlp.depth, mlp.width_size
    linear = functools.partial(Linear, dtype=dtype, **inits)

    def layer(index: int, key: Any) -> Linear:
        in_size = mlp.in_size if index == 0 else width
        if index == depth:
            return linear(in_size, mlp.out_size, mlp.use_final_bias, key=key)
        return linear(in_size, width, mlp.use_bias, key=key)

    keys = split_key(key, depth + 1, mlp)
    if depth == 0 or not mlp.scan:
        # To iterate over keys takes a tenth of the time that it takes to index each.
        return tuple(layer(i, k) for i, k in enumerate(keys))
    middle = build_stacked(
        lambda key: linear(width, width, mlp.use_bias, key=key), keys[1:depth]
    )
    return layer(0, keys[0]), middle, layer(depth, keys[depth])


def _copied(activation: Any, shape: tuple[int, ...]) -> Any:
    """`activation`, with each array broadcast to one copy for each neuron."""
    return map_arrays(lambda a: jnp.broadcast_to(a, shape + a.shape), activation)


def _slice(activation: Any, index: int | slice) -> Any:
    if jax.tree_util.all_leaves([activation]):
        return activation
    return map_arrays(lambda a: a[index], activation)


def _each_neuron(activation: Any, x: Any) -> Any:
    if jax.tree_util.all_leaves([activation]):  # a plain function
        return jax.vmap(activation)(x)
    arrays, rest = partition(activation, is_array)
    # `vmap` refuses arrays of which explicit axes of a mesh split only some.
    arrays = jax.tree.map(lambda a: split_along(a, 0, parts(x)[0]), arrays)
    return jax.vmap(lambda arrays, x: combine(arrays, rest)(x))(arrays, x)


@contextmanager
def _of_scalars(name: str) -> Iterator[None]:
    """Adds a note to errors: the function is applied to a scalar, not a vector."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This is from the `{name}` of an MLP, which is applied to the scalar of each "
            "neuron, of shape (). For a function of the whole vector, such as "
            "`jax.nn.softmax`, use `eqx.nn.Sequential([mlp, jax.nn.softmax])`."
        )
        raise


def _loop_hidden(mlp: MLP, x: Any) -> Any:
    for i, layer in enumerate(mlp.layers[:-1]):
        x = call_part(mlp, ("layers", i), layer, layer, x)
        x = _hidden_activation(mlp, i, x)
    return x


def _hidden_activation(mlp: MLP, index: int, x: Any) -> Any:
    with _of_scalars("activation"):
        return _each_neuron(_slice(mlp.activation, index), x)


def _scan_hidden(mlp: MLP, x: Any) -> Any:
    first, stacked, _ = mlp.layers
    x = first(x)
    x = _hidden_activation(mlp, 0, x)
    if mlp.depth == 1:  # an empty scan, which `jax.disable_jit` refuses
        return x
    inputs = stacked, _slice(mlp.activation, slice(1, None))
    arrays, rest = partition(inputs, is_array)

    def step(x: Any, arrays: Any) -> tuple[Any, None]:
        layer, activation = combine(arrays, rest)
        y = call_part(stacked, (), layer, layer, x)
        return split_by(_each_neuron(activation, y), parts(x)), None

    # Otherwise the arrays decide, which may have been replaced by more or fewer layers.
    length = None if jax.tree.leaves(arrays) else mlp.depth - 1
    x, _ = jax.lax.scan(step, varying_as((x, arrays), x), arrays, length)
    return x
