"""`Einsum`: a linear map between axes of an array, given by an einsum equation."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..._core.sharding import axes_of
from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.arguments import as_size, wrong_type
from .._base.init import Init, Layout, first_values
from .._base.inputs import check_input, jax_array, parameter_shape
from .._base.precision import computes, in_float32
from .._base.sharding import explicit_mesh, like, parts, placed, split_by, thawed

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
        bias = bias_init, [sizes[name] for name in axes.bias] if use_bias else None
        parameters = first_values(self, key, limit, dtype, weight=weight, bias=bias)
        self.weight, self.bias = parameters

    @property
    def _layouts(self) -> dict[str, Layout]:
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
    def new(self) -> tuple[str, ...]:
        return tuple(name for name in self.weight if name not in self.x)

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(n for n in self.weight if n in self.x and n in self.out)

    @property
    def bias(self) -> tuple[str, ...]:
        return tuple(name for name in self.out if name in self.weight)


@dataclasses.dataclass(frozen=True)
class EinsumLayout:
    """The layout of an `Einsum`'s weight: JAX's initialisers get `(in, out)`."""

    axes: _Axes

    @property
    def ndim(self) -> int:
        return len(self.axes.weight)

    def __call__(self, init: Any, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        axes = self.axes
        sizes = dict(zip(axes.weight, shape, strict=True))
        rows, columns, number = (
            math.prod(sizes[name] for name in names)
            for names in (axes.summed, axes.new, axes.shared)
        )
        keys = jax.random.split(key, number) if axes.shared else [key]
        drawn = [jnp.asarray(init(k, (rows, columns), dtype)) for k in keys]
        if not drawn:
            return jnp.zeros(shape, dtype)
        order = (*axes.shared, *axes.summed, *axes.new)
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
        raise TypeError(
            f"Einsum({axes}) takes a dict as `sizes`, of the size of each axis of its "
            f"weight; got {describe_node(sizes)}."
        )
    missing = [name for name in axes.weight if name not in sizes]
    if missing:
        raise ValueError(
            f"Einsum({axes}) takes the size of each axis of its weight; `sizes` has none "
            f"for {', '.join(map(repr, missing))}."
        )
    unknown = [name for name in sizes if name not in axes.weight]
    if unknown:
        raise ValueError(
            f"Einsum({axes}) was given sizes for {', '.join(map(repr, unknown))}, which "
            "its weight does not have."
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
