"""`filter_vmap`: `jax.vmap` with axes given as prefix trees of ints, `None` and callables.

Each leaf gets an axis or `None`. JAX maps over a flat list of the leaves with an axis;
all others are closed over. Mapped outputs have their batch axis at 0 first, and it is
moved afterwards. Outputs that are not arrays bypass JAX (`unmapped.py`).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.tree_util as jtu
from jax.sharding import AxisType

from .._core.base import (
    DEPRECATED,
    NOT_GIVEN,
    Transformed,
    frames_hidden,
    name_of,
    refuse_deprecated,
)
from .._core.parts import Rest
from .._module.fields import field
from .._tree.filters import is_array, is_none
from .._tree.match import leaf_name, match_prefix
from .._tree.nodes import describe_node
from .._tree.require import refuse_unknown_options, require_integer
from .._typing import VmapOptions
from .arguments import argument_name, by_name, check_arguments
from .unmapped import Unmapped

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
        if self.axis is not None:
            require_integer(self.axis, "if_array", "axis")

    def __call__(self, x: Any) -> int | None:
        return self.axis if is_array(x) else None


@overload
def filter_vmap(
    fun: Callable[_P, _T],
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Unpack[VmapOptions],
) -> Transformed[_P, _T]: ...
@overload
def filter_vmap(
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Unpack[VmapOptions],
) -> Callable[[Callable[_P, _T]], Transformed[_P, _T]]: ...
def filter_vmap(
    fun: Any = NOT_GIVEN,
    *,
    in_axes: Any = if_array(0),
    out_axes: Any = if_array(0),
    axis_name: Any = None,
    axis_size: int | None = None,
    **vmapkwargs: Any,
) -> Any:
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
    refuse_deprecated(
        "filter_vmap", DEPRECATED, vmapkwargs, ": use `in_axes` and `out_axes`"
    )
    refuse_unknown_options(vmapkwargs, "filter_vmap", jax.vmap)
    options = (in_axes, out_axes, axis_name, axis_size, vmapkwargs)
    if fun is NOT_GIVEN:
        return lambda fun: Vmapped(fun, *options)
    return Vmapped(fun, *options)


class Vmapped(Transformed[..., Any]):
    """The result of [`equinox_like.filter_vmap`][]."""

    _transformation_ = "filter_vmap"

    _in_axes: Any = field(static=True)
    _out_axes: Any = field(static=True)
    _axis_name: Any = field(static=True)
    _axis_size: Any = field(static=True)
    _vmapkwargs: tuple[tuple[str, Any], ...] = field(static=True)

    def __init__(self, fun, in_axes, out_axes, axis_name, axis_size, vmapkwargs):
        super().__init__(fun)
        self._in_axes = in_axes
        self._out_axes = out_axes
        self._axis_name = axis_name
        # Layers repeat an activation function as often as their size says, which may be
        # "scalar". Without an array in it, nothing is repeated.
        is_text = isinstance(axis_size, str)
        self._axis_size = axis_size if is_text else _checked(axis_size)
        self._vmapkwargs = tuple(sorted(vmapkwargs.items()))

    @frames_hidden
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun = self.__wrapped__
        axes = axes_of_call("filter_vmap", fun, self._in_axes, args, kwargs)
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        mapped = [i for i, axis in enumerate(axes) if axis is not None]
        rest = Rest(treedef, leaves, mapped)
        out_axes, axis_size = self._out_axes, self._axis_size
        unmapped_outputs = Unmapped()

        def flat(values):
            args, kwargs = rest.fill(values)
            out = fun(*args, **kwargs)
            of_output = output_axes(out_axes, out)
            if any(axis is not None for axis in of_output):
                _checked(axis_size)
            return unmapped_outputs.split(out, of_output)

        if not mapped and axis_size is None:
            # There is no batch axis, which is legal unless `out_axes` asks for one.
            out = fun(*args, **kwargs)
            if any(axis is not None for axis in output_axes(out_axes, out)):
                raise ValueError(
                    f"`filter_vmap` of `{name_of(fun)}`: no argument is mapped, so there "
                    "is no batch dimension to put into the outputs. Map an argument, or "
                    "give `axis_size`, or let `out_axes` be `None`."
                )
            return out
        check_sizes("filter_vmap", fun, args, kwargs, axes, axis_size)
        _check_splits(fun, args, kwargs, axes)
        of_mapped = [axes[i] for i in mapped]
        options = {
            # A single int if all axes are equal, because JAX handles it faster.
            "in_axes": (of_mapped[0] if len(set(of_mapped)) == 1 else of_mapped,),
            "axis_name": self._axis_name,
            "axis_size": axis_size,
            **dict(self._vmapkwargs),
        }
        arrays = [leaves[i] for i in mapped]
        try:
            with_batch, without = jax.vmap(flat, out_axes=(0, None), **options)(arrays)
        except ValueError:
            if not unmapped_outputs.are_known:  # `fun` has raised this
                raise
            found = unmapped_outputs.batched(flat, arrays, **options)
            if found is None:
                raise
            raise ValueError(
                f"`filter_vmap` of `{name_of(fun)}`: {found} depends on a mapped "
                "argument, so it has a batch axis, but `out_axes` gives it `None`. "
                "Give it the position of that axis, or return a value that is the "
                "same for the whole batch."
            ) from None
        return unmapped_outputs.join(with_batch, without)


def axes_of_call(
    where: str, fun: Any, in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int | None]:
    """The axis of each leaf of `(args, kwargs)`."""
    if isinstance(in_axes, dict):
        parts = by_name("in_axes", fun, in_axes, args, kwargs, if_array(0))
        return [axis for part in parts for axis in resolve_axes(*part)]
    if kwargs:
        raise RuntimeError(
            f"`{where}` of `{name_of(fun)}` cannot be called with keyword arguments "
            f"({', '.join(kwargs)}) unless `in_axes` is a dictionary from names to "
            "axes. Pass them by position, or pass `in_axes={}`."
        )
    try:
        return resolve_axes(in_axes, args, "in_axes", "args")
    except ValueError:
        check_arguments(where, fun, args, kwargs)
        raise


def output_axes(out_axes: Any, out: Any) -> list[int | None]:
    return resolve_axes(out_axes, out, "out_axes", "out")


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
                is_type = callable(axis) or is_bool
                error = TypeError if is_type else ValueError
                raise error(
                    f"The leaves of `{option}` must be ints, `None`, or callables that "
                    f"return one; `{leaf_name(axes, number, option, is_none)}` gives "
                    f"{chosen!r}."
                )
            resolved.append(None if chosen is None else operator.index(chosen))
    return resolved


def _checked(axis_size: Any) -> Any:
    return checked_size("filter_vmap", axis_size)


def checked_size(function: str, axis_size: Any) -> Any:
    """`axis_size`, after validating it."""
    if axis_size is None or jax.export.is_symbolic_dim(axis_size):
        return axis_size
    return require_integer(axis_size, function, "axis_size", least=0)


def check_sizes(
    where: str,
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: Sequence[int | None],
    axis_size: int | None,
) -> None:
    """Raises where `jax.vmap` would, with errors that name the arguments."""
    sizes = set() if axis_size is None else {axis_size}
    pairs = zip(jtu.tree_leaves((args, kwargs)), axes, strict=True)
    try:
        if len(sizes.union(x.shape[i] for x, i in pairs if i is not None)) <= 1:
            return
    except (AttributeError, IndexError):
        pass  # reported with the path
    check_arguments(where, fun, args, kwargs)
    alike: dict[Any, list[Any]] = {}
    paths = jtu.tree_flatten_with_path((args, kwargs))[0]
    for (path, x), axis in zip(paths, axes, strict=True):
        if axis is None:
            continue
        if not hasattr(x, "shape"):
            raise TypeError(
                f"`{where}` of `{name_of(fun)}`: "
                f"`{argument_name(fun, args, kwargs, path)}` is {describe_node(x)}, not "
                f"an array, so it has no axis {axis} to map over. In `in_axes`, write "
                f"`equinox_like.if_array({axis})` for `{axis}`: it maps the arrays of "
                "an argument, and passes everything else unmapped."
            )
        if not -len(x.shape) <= axis < len(x.shape):
            fix = "Use `None` as its axis in `in_axes` to pass it unmapped"
            if len(path) > 2:  # a part of an argument, as the count of an optimiser
                whole = argument_name(fun, args, kwargs, path[:2])
                fix += (
                    f", or make `{whole}` by `filter_vmap`, too, if each element needs "
                    "its own, as each member of an ensemble needs an optimiser state"
                )
            raise ValueError(
                f"`{where}` of `{name_of(fun)}`: "
                f"`{argument_name(fun, args, kwargs, path)}` has shape "
                f"{tuple(x.shape)}, so it has no axis {axis} to map over. {fix}."
            )
        sizes.add(x.shape[axis])
        alike.setdefault((path[:2], axis, x.shape[axis]), []).append(path)
    if len(sizes) > 1:
        name = functools.partial(argument_name, fun, args, kwargs)
        listing = ", ".join(
            f"`{name(same[0])}` {_and_more(len(same) - 1, name(argument))} size {size} "
            f"along axis {axis}"
            for (argument, axis, size), same in alike.items()
        )
        wanted = "" if axis_size is None else f"; axis_size is {axis_size}"
        raise ValueError(
            f"`{where}` of `{name_of(fun)}`: the sizes of the mapped axes differ: "
            f"{listing}{wanted}. In `in_axes`, write `None` for an argument that is "
            "not mapped."
        )


def _and_more(number: int, argument: str) -> str:
    if not number:
        return "has"
    return f"and {number} more array{'s' * (number > 1)} of `{argument}` have"


def _check_splits(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Sequence[int | None]
) -> None:
    """Raises where `jax.vmap` would under explicit axes, and names the arguments."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return
    splits = []
    for (path, x), axis in zip(
        jtu.tree_leaves_with_path((args, kwargs)), axes, strict=True
    ):
        if axis is not None and is_array(x):
            splits.append((path, jax.typeof(x).sharding.spec[axis]))
    for path, split in splits[1:]:
        if split != splits[0][1]:
            (one, first), (other, second) = (
                (f"`{argument_name(fun, args, kwargs, p)}`", s)
                for p, s in (splits[0], (path, split))
            )
            raise ValueError(
                f"`filter_vmap` of `{name_of(fun)}`: the mapped axes must be split in "
                "the same way over the explicit axes of the mesh, but "
                f"{_as_split(one, first)} and {_as_split(other, second)}. Split one "
                "like the other, for example with `jax.sharding.reshard`. PRNG keys "
                "must be split, too."
            )


def _as_split(name: str, by: Any) -> str:
    return f"{name} is not split" if by is None else f"{name} is split by {by!r}"
