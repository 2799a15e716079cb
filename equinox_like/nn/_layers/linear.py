"""Linear maps: `Linear`, `Identity`, `MLP` and `Einsum`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._call_path import call_part
from ..._core.sharding import axes_of
from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree import combine, is_array, partition
from ..._tree.partitioning import map_arrays
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_size,
    as_size_or_scalar,
    check_columns,
    check_input,
    check_layer,
    jax_array,
    parameter_shape,
    wrong_type,
)
from .._base.init import Init, build_stacked, first_values, output_first, split_key
from .._base.precision import computes, in_float32
from .._base.sharding import (
    explicit_mesh,
    like,
    parts,
    placed,
    product,
    split_along,
    split_by,
    thawed,
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
        return _each_neuron("final_activation", self.final_activation, y)


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


def _each_neuron(name: str, activation: Any, x: Any) -> Any:
    """Applies the activation of this name to each scalar of `x`."""
    try:
        if jax_array(x).ndim == 0:
            return activation(x)
        if jax.tree_util.all_leaves([activation]):  # a plain function
            return jax.vmap(activation)(x)
        arrays, rest = partition(activation, is_array)
        # `vmap` refuses arrays of which explicit axes of a mesh split only some.
        arrays = jax.tree.map(lambda a: split_along(a, 0, parts(x)[0]), arrays)
        return jax.vmap(lambda arrays, x: combine(arrays, rest)(x))(arrays, x)
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
        x = _each_neuron("activation", _slice(mlp.activation, i), x)
    return x


def _scan_hidden(mlp: MLP, x: Any) -> Any:
    first, stacked, _ = mlp.layers
    x = _each_neuron("activation", _slice(mlp.activation, 0), first(x))
    if mlp.depth == 1:  # an empty scan, which `jax.disable_jit` refuses
        return x
    inputs = stacked, _slice(mlp.activation, slice(1, None))
    arrays, rest = partition(inputs, is_array)

    def step(x: Any, arrays: Any) -> tuple[Any, None]:
        layer, activation = combine(arrays, rest)
        y = call_part(stacked, (), layer, layer, x)
        return split_by(_each_neuron("activation", activation, y), parts(x)), None

    # Otherwise the arrays decide, which may have been replaced by more or fewer layers.
    length = None if jax.tree.leaves(arrays) else mlp.depth - 1
    x, _ = jax.lax.scan(step, varying_as((x, arrays), x), arrays, length)
    return x


_ELLIPSIS = "..."


class Einsum(Module):
    r"""A linear map of some axes of an array to others, plus a bias.

    The axes are named by the letters of an equation as of `jnp.einsum`, first those of the
    input, then those of the weight, then those of the output:
    $y = \mathrm{einsum}(\mathrm{equation}, x, W) + b$. An axis of the weight is

    - summed over, if the input has it and the output does not;
    - new, if the output has it and the input does not;
    - shared, if both have it: then each of its elements has a map of its own.

    All other axes of the input are kept as they are, and `...` stands for any number of
    them. The bias has the axes of the output that the weight has.

    With $n$ the product of the sizes that are summed over, which is the fan-in, weight and
    bias start uniform on $[-1/\sqrt{n}, 1/\sqrt{n})$. `"...i,io->...o"` is a
    [`equinox_like.nn.Linear`][] of the last axis.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
        sizes = {"d": 8, "h": 2, "k": 4}
        split_heads = eqx.nn.Einsum("...d,dhk->...hk", sizes, key=k1)
        assert split_heads(jnp.ones((5, 8))).shape == (5, 2, 4)
        join_heads = eqx.nn.Einsum("...hk,hkd->...d", sizes, key=k2)
        assert join_heads(jnp.ones((5, 2, 4))).shape == (5, 8)
        each_head = eqx.nn.Einsum("...hk,hkl->...hl", {"h": 2, "k": 4, "l": 3}, key=k3)
        assert each_head(jnp.ones((5, 2, 4))).shape == (5, 2, 3)
        ```
    """

    weight: Array
    bias: Array | None
    equation: str = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        equation: str,
        sizes: Mapping[str, int],
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `equation`: `"input,weight->output"`, in which each axis is one letter. Input and
            output may both have a `...`.
        - `sizes`: for each letter of the weight its size, 0 or more.
        - `use_bias`: whether to add a bias. Without one, the field `bias` is `None`.
        - `dtype`: of the parameters, floating or complex; by default float32, or float64
            if `jax_enable_x64` is on.
        - `key`: a PRNG key for parameter initialisation.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Linear`][]. The weight's
            shape is given as `(in, out)`: the product of the sizes that are summed over,
            and that of the new ones. Each element of the shared axes is drawn separately.

        **Raises:**

        `ValueError` if the equation is not of this kind, or `sizes` has other letters than
        the weight, or a negative size. `TypeError` if `equation` is not a string, or
        `sizes` not a dict.
        """
        axes = _parsed(equation)
        self.equation = str(axes)
        self.use_bias = use_bias
        sizes = _checked_sizes(self, axes, sizes)
        fan_in = math.prod(sizes[name] for name in axes.summed)
        limit = 1 / math.sqrt(fan_in) if fan_in else 1.0
        weight = weight_init, [sizes[name] for name in axes.weight]
        names = [name for name in axes.out if name in axes.weight]
        bias = bias_init, [sizes[name] for name in names] if use_bias else None
        parameters = first_values(self, key, limit, dtype, weight=weight, bias=bias)
        self.weight, self.bias = parameters

    @property
    def _layouts(self) -> "dict[str, EinsumLayout]":
        return {"weight": EinsumLayout(_parsed(self.equation))}

    @computes("eqx.nn.Einsum")
    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        out_sharding: PartitionSpec | None = None,
    ) -> Array:
        """**Arguments:**

        - `x`: an array with the axes that the equation names.
        - `key`: ignored.
        - `out_sharding`: how to split the result of one example over the explicit axes of
            a mesh; by default each axis as in `x`, and a new one as in the weight.

        **Returns:**

        An array with the axes of the output, of the dtype to which JAX promotes those of
        `x` and the parameters.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` has another number of axes, or an axis of
        another size than in the weight, naming the axis.
        """
        axes = _parsed(self.equation)
        _check_axes(self, axes, x)
        x, weight = jax_array(x), thawed(self.weight)
        if explicit_mesh(x, weight) is not None:
            x, weight, found = _split_alike(axes, x, weight)
            out_sharding = found if out_sharding is None else out_sharding
        product = functools.partial(jnp.einsum, str(axes))
        y = placed(product, out_sharding, x, weight)
        if self.bias is None:
            return y
        names = zip(_expanded(axes.out, y.ndim), y.shape, strict=True)
        shape = [size if name in axes.weight else 1 for name, size in names]
        return in_float32(jnp.add, y, like(jnp.reshape(self.bias, shape), y))


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The letters of an equation; `...` counts as one."""

    x: tuple[str, ...]
    weight: tuple[str, ...]
    out: tuple[str, ...]

    def __str__(self) -> str:
        x, weight, out = ("".join(term) for term in (self.x, self.weight, self.out))
        return f"{x},{weight}->{out}"

    @property
    def summed(self) -> tuple[str, ...]:
        return tuple(name for name in self.weight if name not in self.out)

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(n for n in self.weight if n in self.x and n in self.out)


@dataclasses.dataclass(frozen=True)
class EinsumLayout:
    """The layout of an `Einsum`'s weight: JAX's initialisers get `(in, out)`."""

    axes: _Axes

    @property
    def ndim(self) -> int:
        return len(self.axes.weight)

    def __call__(self, init: Any, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        axes = self.axes
        new = tuple(name for name in axes.weight if name not in axes.x)
        sizes = dict(zip(axes.weight, shape, strict=True))
        rows, columns, number = (
            math.prod(sizes[name] for name in names)
            for names in (axes.summed, new, axes.shared)
        )
        keys = jax.random.split(key, number) if axes.shared else [key]
        drawn = [jnp.asarray(init(k, (rows, columns), dtype)) for k in keys]
        if not drawn:
            return jnp.zeros(shape, dtype)
        order = (*axes.shared, *axes.summed, *new)
        values = jnp.stack(drawn).reshape([sizes[name] for name in order])
        return values.transpose([order.index(name) for name in axes.weight])


def _parsed(equation: str) -> _Axes:
    if not isinstance(equation, str):
        raise wrong_type("Einsum", "a string", "equation", equation)
    terms = equation.replace(" ", "").replace("->", ",").split(",")
    if equation.count("->") != 1 or len(terms) != 3:
        raise _wrong(equation, "it does not have the form 'input,weight->output'")
    axes = _Axes(*(_letters(equation, term) for term in terms))
    if _ELLIPSIS in axes.weight:
        raise _wrong(equation, "the weight has a '...'")
    if (_ELLIPSIS in axes.x) is not (_ELLIPSIS in axes.out):
        why = "either the input or the output has a '...', but not both"
        raise _wrong(equation, why)
    places = {"weight": axes.weight, "input": axes.x, "output": axes.out}
    for place, names in places.items():
        for name in names:
            if sum(name in others for others in places.values()) == 1:
                raise _wrong(equation, f"the axis {name!r} is only in the {place}")
    return axes


def _letters(equation: str, term: str) -> tuple[str, ...]:
    before, dots, after = term.partition(_ELLIPSIS)
    names = (*before, *([dots] if dots else []), *after)
    if any(name != _ELLIPSIS and not name.isalpha() for name in names):
        why = f"{term!r} contains something other than letters and one '...'"
        raise _wrong(equation, why)
    if len(set(names)) != len(names):
        raise _wrong(equation, f"{term!r} has the same axis twice")
    return names


def _wrong(equation: str, why: str) -> ValueError:
    return ValueError(
        f"Einsum takes an equation such as '...d,dhk->...hk'; in {equation!r} {why}."
    )


def _checked_sizes(
    layer: Einsum, axes: _Axes, sizes: Mapping[str, int]
) -> dict[str, int]:
    if not isinstance(sizes, Mapping):
        raise wrong_type(f"Einsum({axes})", "a dict", "sizes", sizes)
    if sizes.keys() != set(axes.weight):
        raise ValueError(
            f"Einsum({axes}) takes the size of each axis of its weight, {axes.weight}, as "
            f"`sizes`; got {dict(sizes)}."
        )
    checked = functools.partial(as_size, layer)
    return {name: checked(f"sizes[{name!r}]", sizes[name]) for name in axes.weight}


def _check_axes(layer: Einsum, axes: _Axes, x: Any) -> None:
    weight_shape = parameter_shape(layer, "weight", len(axes.weight))
    sizes = dict(zip(axes.weight, weight_shape or (), strict=False))
    shape = getattr(x, "shape", ())
    names = _expanded(axes.x, len(shape))
    wanted = [sizes.get(name) for name in names]
    if len(wanted) != len(shape) or isinstance(x, list | tuple):
        check_input(layer, x, wanted)
    for name, size, given in zip(names, wanted, shape, strict=True):
        if size is not None and given != size:
            raise ShapeError(
                f"Einsum({axes}) takes an `x` whose axis {name!r} has size {size}, but was "
                f"given shape {shape}, where it has size {given}."
            )


def _expanded(names: tuple[str, ...], ndim: int) -> list[str]:
    """A name for each axis of an array. The axes of `...` are `...0`, `...1`, etc."""
    number = max(ndim - len(names) + 1, 0)
    found: list[str] = []
    for name in names:
        found += [f"...{i}" for i in range(number)] if name == _ELLIPSIS else [name]
    return found


def _split_alike(
    axes: _Axes, x: Array, weight: Any
) -> tuple[Array, Any, PartitionSpec | None]:
    """`x` and `weight`, with common axes split alike, and the output's sharding."""
    names = _expanded(axes.x, x.ndim)
    of_x = dict(zip(names, parts(x), strict=True))
    of_weight = dict(zip(axes.weight, parts(weight), strict=True))
    summed = {n: of_weight[n] for n in axes.summed if of_x[n] and of_weight[n]}
    shared = {n: of_x[n] or of_weight[n] for n in axes.shared}
    of_x_now, of_weight_now = of_x | summed | shared, of_weight | shared
    x = split_by(x, _each_once(of_x_now[n] for n in names))
    weight = split_by(weight, _each_once(of_weight_now[n] for n in axes.weight))
    if not any((*of_x.values(), *of_weight.values())):
        return x, weight, None
    # JAX refuses an output in which both split an axis of their own by one mesh axis.
    out = _expanded(axes.out, x.ndim + len(axes.out) - len(axes.x))
    split = of_weight | of_x | shared
    return x, weight, PartitionSpec(*_each_once(split[n] for n in out))


def _each_once(split: Iterable[Any]) -> tuple[Any, ...]:
    """The parts of a spec; `None` for a part whose mesh axis was used before."""
    used: set[str] = set()
    found = []
    for part in split:
        axes = axes_of(part)
        found.append(None if used.intersection(axes) else part)
        used.update(axes)
    return tuple(found)
