"""`filter_vmap`: `jax.vmap` with axes as prefix trees of ints, `None` and callables.

Each leaf gets an axis or `None`. JAX maps over a flat list of the leaves with an axis;
all others are closed over. Mapped outputs have their batch axis at 0 first, and it is
moved afterwards. Outputs that are not arrays bypass JAX (`MappedOutput`).
"""

import dataclasses
import operator
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AxisType

from .._core.base import DEPRECATED, Transformed, check_not_deprecated, frames_hidden
from .._core.flat_call import FlatCall, Template
from .._module.fields import field
from .._tree.arrays import describe_array
from .._tree.filters import is_array, is_array_like, is_none
from .._tree.match import leaf_name, match_prefix
from .._tree.nodes import describe_node
from .._tree.require import check_options, integer_or_none, require_integer
from .._typing import NOT_GIVEN, MayTakeState, VmapOptions
from .arguments import NamedCall, WithOptions, applied

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")  # for jedi, as in `_jit/jit.py`
_Y = TypeVar("_Y", covariant=True)

if TYPE_CHECKING:

    class _MappedLayer(MayTakeState[_Y], Transformed[..., Any]): ...


@dataclasses.dataclass(frozen=True)
class if_array:
    """For [`equinox_like.filter_vmap`][]: maps over `axis` of each array, and nothing
    else.

    Pass it as a leaf of `in_axes` or `out_axes`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.if_array(1)(jnp.ones((2, 3))) == 1
        assert eqx.if_array(1)("text") is None
        ```
    """

    axis: int | None

    def __post_init__(self) -> None:
        integer_or_none(self.axis, "if_array", "axis")

    def __call__(self, x: Any) -> int | None:
        return self.axis if is_array(x) else None


@typing.overload
def filter_vmap(
    fun: "MayTakeState[_T]",
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Unpack[VmapOptions],
) -> "_MappedLayer[_T]": ...
@typing.overload
def filter_vmap(
    fun: Callable[_P, _T],
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Unpack[VmapOptions],
) -> Transformed[_P, _T]: ...
@typing.overload
def filter_vmap(
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Unpack[VmapOptions],
) -> Callable[[Callable[_P, _T]], Transformed[_P, _T]]: ...
def filter_vmap(
    fun: _F = NOT_GIVEN,
    *,
    in_axes: Any = if_array(0),
    out_axes: Any = if_array(0),
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Any,
) -> _F:
    """`jax.vmap` for functions of any pytrees.

    **Arguments:**

    - `fun`: the function to map. If it is a Module, its arrays are not mapped: to map over
        them, pass the Module as an argument.
    - `in_axes`: a prefix tree of the tuple of positional arguments, whose leaves are ints,
        `None`, or callables `leaf -> int | None`. Or a dictionary from parameter names to
        such trees; the other parameters then have the default. By default each array is
        mapped over axis 0, and everything else is passed on as it is.
    - `out_axes`: a prefix tree of the output, likewise. By default each array of the output
        has the mapped axis first, and everything else is returned as it is.
    - `axis_name`: a name for collective operations.
    - `axis_size`: the size of the axis. Needed only if no argument is mapped.
    - `**vmapkwargs`: as for `jax.vmap`, for example `spmd_axis_name`.

    **Returns:**

    A function of the same arguments. They are passed by position, unless `in_axes` is a
    dictionary.

    **Raises:**

    `ValueError` if an axis is out of range or sizes differ, naming the arguments; if
    a mapped output has the axis `None`; if a name in `in_axes` is not a
    parameter. `TypeError` if something other than an array has an int as its axis.
    `RuntimeError` if the function is called with keyword arguments, and `in_axes` is
    not a dictionary.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        # An ensemble: a Module whose arrays have a leading axis.
        @eqx.filter_vmap
        def make(key):
            return eqx.nn.Linear(2, 3, key=key)

        ensemble = make(jax.random.split(jax.random.key(0), 4))
        x = jnp.ones(2)
        call = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
        y = call(ensemble, x)
        assert y.shape == (4, 3)
        ```
    """
    check_not_deprecated(
        "filter_vmap", DEPRECATED, vmapkwargs, ": use `in_axes` and `out_axes`"
    )
    check_options(vmapkwargs, "filter_vmap", jax.vmap)
    # Layers repeat an activation function as often as their size says, which may be
    # "scalar". Without an array in it, nothing is repeated.
    if not isinstance(axis_size, str):
        axis_size = checked_size("filter_vmap", axis_size)
    return applied(
        Vmapped,
        fun,
        _in_axes=in_axes,
        _out_axes=out_axes,
        _axis_name=axis_name,
        _axis_size=axis_size,
        _vmapkwargs=tuple(sorted(vmapkwargs.items())),
    )


class Mapped(WithOptions[..., Any]):
    """A function that is mapped over an axis, by `filter_vmap` or `filter_pmap`."""

    _in_axes: Any = field(static=True)
    _out_axes: Any = field(static=True)
    _axis_name: Any = field(static=True)
    _axis_size: Any = field(static=True)


class Vmapped(Mapped):
    """The result of [`equinox_like.filter_vmap`][]."""

    _transformation_ = "filter_vmap"

    _vmapkwargs: tuple[tuple[str, Any], ...] = field(static=True)

    @frames_hidden
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun, axis_size = self.__wrapped__, self._axis_size
        call = NamedCall("filter_vmap", fun, args, kwargs)
        axes = axes_of_call(call, self._in_axes)
        is_mapped = [axis is not None for axis in axes]
        output = MappedOutput(self._out_axes)
        if axis_size is None and not any(is_mapped):
            # There is no batch axis, which is legal unless `out_axes` asks for one.
            out = fun(*args, **kwargs)
            if any(axis is not None for axis in output.axes_of(out)):
                raise ValueError(
                    f"{call}: no argument is mapped, so there is no batch dimension to "
                    "put into the outputs. Map an argument, or give `axis_size`, or let "
                    "`out_axes` be `None`."
                )
            return out
        check_sizes(call, axes, axis_size)
        _check_splits(call, axes)
        data, flat_call = FlatCall.of(fun, args, kwargs, is_mapped)

        def flat(data):
            with_batch, without = output.split(flat_call.run(data))
            if with_batch:
                checked_size("filter_vmap", axis_size)
            return with_batch, without

        of_data = [axis for axis in axes if axis is not None]
        options = {
            # A single int if all axes are equal, because JAX handles it faster.
            "in_axes": (of_data[0] if len(set(of_data)) == 1 else of_data,),
            "axis_name": self._axis_name,
            "axis_size": axis_size,
            **dict(self._vmapkwargs),
        }
        try:
            with_batch, without = jax.vmap(flat, out_axes=(0, None), **options)(data)
        except ValueError:
            if output.template is None:  # `fun` has raised this
                raise
            found = output.batched(flat, data, **options)
            if found is None:
                raise
            raise ValueError(
                f"{call}: {found} depends on a mapped argument, so it has a batch axis, "
                "but `out_axes` gives it `None`. Give it the position of that axis, or "
                "return a value that is the same for the whole batch."
            ) from None
        return output.join(with_batch, without)


class MappedOutput:
    """Splits the output of a mapped function into arrays with a batch axis and arrays
    without one, and joins them again.

    It keeps the structure and the leaves that are not arrays.
    """

    template: Template | None = None

    def __init__(self, out_axes: Any):
        self._out_axes = out_axes

    def axes_of(self, out: Any) -> list[int | None]:
        return resolve_axes(self._out_axes, out, "out_axes", "out")

    def split(self, out: Any) -> tuple[list[Any], list[Any]]:
        axes = self.axes_of(out)
        leaves, treedef = jtu.tree_flatten(out)
        with_batch = [i for i, axis in enumerate(axes) if axis is not None]
        for i in with_batch:
            _check_output_axis(leaves[i], axes[i], out, i)
        without = [i for i, x in enumerate(leaves) if axes[i] is None and is_array(x)]
        self._axes: list[Any] = [axes[i] for i in with_batch]
        # Holds no array: that would be a leak of a tracer.
        self.template = Template(treedef, leaves, with_batch + without)
        return [leaves[i] for i in with_batch], [leaves[i] for i in without]

    def join(self, with_batch: list[Any], without: list[Any]) -> Any:
        assert self.template is not None
        moved = [
            x if axis == 0 else jnp.moveaxis(x, 0, axis)
            for axis, x in zip(self._axes, with_batch, strict=True)
        ]
        return self.template.fill(moved + without)

    def batched(self, function: Any, *args: Any, **options: Any) -> str | None:
        """The path of an array without a batch axis that is batched, and what it is.

        Traces `function`, which ends with `split`, under `jax.vmap` with these options.
        """

        @jax.custom_batching.custom_vmap
        def unmapped(without):
            return without

        @unmapped.def_vmap
        def _(_, is_batched, without):
            number = is_batched[0].index(True)
            raise _Batched(number, describe_array(without[number][0]))

        def checked(*args):
            with_batch, without = function(*args)
            return with_batch, unmapped(without)

        try:
            jax.eval_shape(jax.vmap(checked, out_axes=(0, None), **options), *args)
        except _Batched as found:
            number, what = found.args
        else:
            return None
        assert self.template is not None
        places = self.template.places
        tree, place = self.template.fill(places), places[len(self._axes) + number]
        return f"`{leaf_name(tree, place, 'out')}` ({what})"


class _Batched(Exception):
    """The number of an unmapped array that is batched, and its description."""


def _check_output_axis(x: Any, axis: Any, out: Any, number: int) -> None:
    if not is_array_like(x):
        raise TypeError(
            f"`{leaf_name(out, number, 'out')}` is {describe_node(x)}, which is not a "
            f"valid JAX type, so it cannot have the batch axis {axis} that `out_axes` "
            f"gives it. Write `equinox_like.if_array({axis})` there, for arrays only."
        )
    ndim = getattr(x, "ndim", 0) + 1
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"`out_axes` gives `{leaf_name(out, number, 'out')}` the batch axis {axis}, "
            f"which is out of bounds: with a batch axis it has {ndim} "
            f"dimension{'s' * (ndim > 1)}."
        )


def axes_of_call(call: NamedCall, in_axes: Any) -> list[int | None]:
    """The axis of each leaf of `(args, kwargs)`."""
    if isinstance(in_axes, dict):
        parts = call.by_name("in_axes", in_axes, if_array(0))
        return [axis for part in parts for axis in resolve_axes(*part)]
    if call.kwargs:
        raise RuntimeError(
            f"{call} cannot be called with keyword arguments ({', '.join(call.kwargs)}) "
            "unless `in_axes` is a dictionary from names to axes. Pass them by position, "
            "or pass `in_axes={}`."
        )
    try:
        return resolve_axes(in_axes, call.args, "in_axes", "args")
    except ValueError:
        call.check()
        raise


def resolve_axes(axes: Any, tree: Any, option: str, name: str) -> list[int | None]:
    """The axis of each leaf of `tree`, from the prefix tree `axes`."""
    if isinstance(axes, if_array):
        axis = axes.axis
        return [axis if is_array(x) else None for x in jtu.tree_leaves(tree)]
    resolved: list[int | None] = []

    matched = match_prefix(axes, tree, option, name, is_none)
    for number, (axis, subtree) in enumerate(matched):
        for leaf in jtu.tree_leaves(subtree):
            chosen: Any = axis(leaf) if callable(axis) else axis
            is_bool = type(chosen) is bool
            if is_bool or not (chosen is None or hasattr(chosen, "__index__")):
                error = TypeError if callable(axis) or is_bool else ValueError
                by_name = f" By name: `{option}={{{chosen!r}: 0}}`."
                raise error(
                    f"The leaves of `{option}` must be ints, `None`, or callables that "
                    f"return one; `{leaf_name(axes, number, option, is_none)}` gives "
                    f"{chosen!r}.{by_name * (option == 'in_axes' and type(axes) is str)}"
                )
            resolved.append(None if chosen is None else operator.index(chosen))
    return resolved


def checked_size(function: str, axis_size: Any) -> Any:
    """`axis_size`, after validating it."""
    if axis_size is None or jax.export.is_symbolic_dim(axis_size):
        return axis_size
    return require_integer(axis_size, function, "axis_size", least=0)


def check_sizes(
    call: NamedCall, axes: Sequence[int | None], axis_size: int | None
) -> None:
    """Raises where `jax.vmap` would, with errors that name the arguments."""
    sizes = set() if axis_size is None else {axis_size}
    arguments = call.args, call.kwargs
    pairs = zip(jtu.tree_leaves(arguments), axes, strict=True)
    try:
        if len(sizes.union(x.shape[i] for x, i in pairs if i is not None)) <= 1:
            return
    except (AttributeError, IndexError):
        pass  # reported with the path
    call.check()
    alike: dict[Any, list[Any]] = {}
    for (path, x), axis in zip(jtu.tree_leaves_with_path(arguments), axes, strict=True):
        if axis is None:
            continue
        if not hasattr(x, "shape"):
            raise TypeError(
                f"{call}: `{call.leaf_name(path)}` is {describe_node(x)}, not an array, so "
                f"it has no axis {axis} to map over. In `in_axes`, write "
                f"`equinox_like.if_array({axis})`, which maps arrays only."
            )
        if not -len(x.shape) <= axis < len(x.shape):
            raise ValueError(
                f"{call}: `{call.leaf_name(path)}` has shape {tuple(x.shape)}, so it has "
                f"no axis {axis} to map over. Use `None` as its axis in `in_axes` to pass "
                f"it unmapped, or make `{call.leaf_name(path[:2])}` by `filter_vmap`, too."
            )
        sizes.add(x.shape[axis])
        alike.setdefault((path[:2], axis, x.shape[axis]), []).append(path)
    if len(sizes) > 1:
        listing = ", ".join(
            f"`{call.leaf_name(same[0])}` "
            f"{_and_more(len(same) - 1, call.leaf_name(argument))} size {size} along axis "
            f"{axis}"
            for (argument, axis, size), same in alike.items()
        )
        wanted = "" if axis_size is None else f"; axis_size is {axis_size}"
        raise ValueError(
            f"{call}: the sizes of the mapped axes differ: {listing}{wanted}. In "
            "`in_axes`, write `None` for an argument that is not mapped."
        )


def _and_more(number: int, argument: str) -> str:
    if not number:
        return "has"
    return f"and {number} more array{'s' * (number > 1)} of `{argument}` have"


def _check_splits(call: NamedCall, axes: Sequence[int | None]) -> None:
    """Raises where `jax.vmap` would under explicit axes, and names the arguments."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return
    leaves = jtu.tree_leaves_with_path((call.args, call.kwargs))
    splits = [
        (path, jax.typeof(x).sharding.spec[axis])
        for (path, x), axis in zip(leaves, axes, strict=True)
        if axis is not None and is_array(x)
    ]
    for path, split in splits[1:]:
        if split != splits[0][1]:
            one, other = (
                f"`{call.leaf_name(p)}` is "
                + (f"split by {by!r}" if by else "not split")
                for p, by in (splits[0], (path, split))
            )
            raise ValueError(
                f"{call}: the mapped axes must be split in the same way over the explicit "
                f"axes of the mesh, but {one} and {other}. Split one like the other, for "
                "example with `jax.sharding.reshard`. PRNG keys must be split, too."
            )
