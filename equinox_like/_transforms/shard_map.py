"""`filter_shard_map` and `filter_pmap`: each device computes on its part of the arrays.

JAX gets a flat list of specs for a flat list of arrays. The structure of the output is
not known before the trace. So the arrays of `filter_shard_map` are returned in one list
for each leaf of `out_specs`, as in `_jit/shardings.py`, and the rest of the output
bypasses JAX.
`filter_pmap` is `filter_vmap` with one device for each row, by `jax.shard_map`.
"""

import itertools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from .._compat.axes import varying_axes
from .._compat.errors import is_other_specs_error
from .._core.base import DEPRECATED, by_position, check_not_deprecated, name_of
from .._core.flat_call import FlatCall, Template
from .._core.sharding import axes_of, check_fits, require_axis, require_mesh
from .._core.show_as import show_as
from .._jit.donation import Donate, check_mode
from .._jit.jit import Jitted
from .._module.fields import field
from .._tree.arrays import describe_array
from .._tree.filters import is_array, is_none
from .._tree.match import spread
from .._tree.nodes import path_str
from .._typing import NOT_GIVEN
from .arguments import NamedCall, WithOptions, applied, show_as_call
from .vmap import (
    Mapped,
    MappedOutput,
    axes_of_call,
    check_sizes,
    checked_size,
    if_array,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")  # for jedi, as in `_jit/jit.py`


class JittedMap(Jitted[_P, _T]):
    """`filter_jit` of a transformed function. `__wrapped__` is the user's function."""

    @classmethod
    def of(cls: Any, fun: Any, kind: Any, donate: Any, **fields: Any) -> Any:
        """The compiled `kind` of map of a function."""
        check_mode(donate)
        return cls(kind(fun, **fields), donate, {})

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._held_.__wrapped__

    def _shown_around_(self) -> tuple[str, str]:
        return self._held_._shown_around_()


@typing.overload
def filter_shard_map(
    fun: Callable[_P, _T],
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[Any] | None = None,
    check_vma: bool = True,
    donate: Donate = "none",
) -> Jitted[_P, _T]: ...
@typing.overload
def filter_shard_map(
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[Any] | None = None,
    check_vma: bool = True,
    donate: Donate = "none",
) -> Callable[[Callable[_P, _T]], Jitted[_P, _T]]: ...
def filter_shard_map(
    fun: _F = NOT_GIVEN,
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Iterable[Any] | None = None,
    check_vma: bool = True,
    donate: Any = "none",
) -> _F:
    """`jax.shard_map` for functions of any pytrees, compiled as by `filter_jit`.

    **Arguments:**

    - `fun`: what each device computes from its part. The arrays of a callable pytree
        are the same on all of them.
    - `mesh`: the mesh; by default the mesh in use.
    - `in_specs`: a prefix tree of the tuple of positional arguments, whose leaves are
        `PartitionSpec`s, or `None` for an argument that each device gets whole. Arguments
        without arrays, at the end or passed by keyword, need none. Or a dictionary from
        parameter names to such trees; other parameters then have `None`. Over explicit
        axes an array must be split like this already: [`equinox_like.filter_shard`][]
        does that.
    - `out_specs`: a prefix tree of the output, with leaves of the same kinds.
    - `axis_names`: the axes that become manual; by default all.
    - `check_vma`: whether JAX keeps track of what differs between devices. Without it,
        a wrong `out_specs` is not detected. With it, a gradient taken in `fun` for an
        array that all devices share is the sum over them: take the `jax.lax.pmean` of
        the loss, not of the gradient.
    - `donate`: as for [`equinox_like.filter_jit`][].

    Everything that is not an array is static, in the arguments and in the output.

    **Returns:**

    A function of the same arguments, with `.lower` and the other methods of what
    [`equinox_like.filter_jit`][] returns.

    **Raises:**

    `ValueError` if a spec is not a `PartitionSpec` or does not fit an array, or if an
    output with a replicated spec may differ between devices, naming its path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp
        from jax.sharding import AxisType, PartitionSpec as P

        mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))

        @eqx.filter_shard_map(mesh=mesh, in_specs={"batch": P("data")}, out_specs=P())
        def mean(model, batch):
            return jax.lax.pmean(jax.vmap(model)(batch).mean(), "data")

        model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        assert mean(model, jnp.ones((8, 2))).shape == ()
        ```
    """
    if mesh is not None:
        require_mesh(mesh, "filter_shard_map")
    if isinstance(axis_names, str):
        raise TypeError(
            "`axis_names` of `filter_shard_map` must be a set of names, such as "
            f"{ {axis_names} }; got {axis_names!r}."
        )
    return applied(
        JittedMap.of,
        fun,
        kind=ShardMapped,
        donate=donate,
        _mesh=mesh,
        _in_specs=in_specs,
        _out_specs=out_specs,
        _axis_names=frozenset(axis_names or ()),
        _check_vma=check_vma,
    )


class ShardMapped(WithOptions[..., Any]):
    """The function that `filter_shard_map` compiles: `jax.shard_map` of a function."""

    _transformation_ = "filter_shard_map"

    _mesh: Any = field(static=True)
    _in_specs: Any = field(static=True)
    _out_specs: Any = field(static=True)
    _axis_names: frozenset[Any] = field(static=True)  # empty for all axes
    _check_vma: bool = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun = self.__wrapped__
        placed, named = by_position(fun, args, kwargs)
        call = NamedCall("filter_shard_map", fun, placed, named)
        mesh = jax.sharding.get_abstract_mesh() if self._mesh is None else self._mesh
        if mesh.empty:
            raise ValueError(
                f"{call} has no mesh: give it one, or call it under `jax.set_mesh(mesh)`."
            )
        data, flat_call = FlatCall.of(self._held_, placed, named, with_fun=True)
        specs, names = self._specs(call), call.data_names(self._tree)
        specs = [PartitionSpec()] * (len(data) - len(specs)) + specs  # of the function
        for name, x, spec in zip(names, data, specs, strict=True):
            self._check_spec("in_specs", name, spec, mesh, x)
        manual = self._axis_names or frozenset(mesh.axis_names)
        template: Any = None

        def flat(data):
            nonlocal template
            groups, template = self._grouped(flat_call.run(data), manual)
            return groups

        show_as(flat, fun, lambda: names)
        for path, spec in jtu.tree_leaves_with_path(self._out_specs):
            self._check_spec("out_specs", path_str(path, "out"), spec, mesh)
        mapped = jax.shard_map(
            flat,
            mesh=self._mesh,
            in_specs=(specs,),
            out_specs=[spec or PartitionSpec() for spec in self._output_leaves()],
            axis_names=self._axis_names,
            check_vma=self._check_vma,
        )
        try:
            groups = mapped(data)
        except ValueError as e:
            if is_other_specs_error(e):
                _explain_explicit(names, data, specs, e)
            raise
        return template.fill(itertools.chain.from_iterable(groups))

    def _specs(self, call: NamedCall) -> list[Any]:
        """The spec of each array of the arguments."""
        given, (_, fun, args, kwargs) = self._in_specs, call
        of_keywords = given
        if isinstance(given, tuple):
            of_keywords = None
            without_spec = [name for name, x in kwargs.items() if _has_arrays(x)]
            if without_spec:
                raise ValueError(
                    f"`in_specs` of `{name_of(fun)}` has no entry for {without_spec}, "
                    "which are passed by keyword. Make it a dictionary from names to "
                    "specs."
                )
            more = args[len(given) :]
            if not _has_arrays(more):  # static arguments do not need a spec
                given = (*given, *[None] * len(more))
        if isinstance(given, dict):
            parts = call.by_name("in_specs", given, None)
        else:
            parts = [(given, args, "in_specs", "the arguments")]
            parts += [(of_keywords, kwargs[k], "in_specs", k) for k in sorted(kwargs)]
        specs = [spec for part in parts for _, spec in spread(*part)]
        return [
            spec or PartitionSpec()
            for x, spec in zip(jtu.tree_leaves((args, kwargs)), specs, strict=True)
            if is_array(x)
        ]

    def _output_leaves(self) -> list[Any]:
        return jtu.tree_leaves(self._out_specs, is_leaf=is_none)

    def _grouped(
        self, out: Any, axes: frozenset[Any]
    ) -> tuple[list[list[Any]], Template]:
        """The arrays of an output, in one list for each leaf of `out_specs`, and the
        output without them."""
        leaves, treedef = jtu.tree_flatten_with_path(out)
        groups: list[list[int]] = [[] for _ in self._output_leaves()]
        found = spread(self._out_specs, out, "out_specs", "out")
        for i, (number, spec) in enumerate(found):
            path, x = leaves[i]
            if not is_array(x):
                continue
            groups[number].append(i)
            name, spec = path_str(path, "out"), spec or PartitionSpec()
            if len(spec) > x.ndim:
                check_fits("out_specs", name, spec, x, mesh=self._mesh)
            differs = varying_axes(jax.typeof(x)) & axes - set(jtu.tree_leaves([*spec]))
            if differs and self._check_vma:
                raise ValueError(
                    f"`out_specs` gives {spec} for `{name}` ({describe_array(x)}), "
                    f"which may differ along {sorted(map(str, differs))}: name the axis "
                    "there, or make the parts equal by `jax.lax.psum` or `jax.lax.pmean`."
                )
        values = [x for _, x in leaves]
        places = [*itertools.chain.from_iterable(groups)]
        template = Template(treedef, values, places)
        return [[values[i] for i in group] for group in groups], template

    def _check_spec(
        self, option: str, name: str, spec: Any, mesh: Any, x: Any = None
    ) -> None:
        """Raises if a spec is none, or does not fit the mesh and the array `x`."""
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f"`{option}` gives {spec!r} for `{name}`: it must be a `PartitionSpec`, or "
                "`None`."
            )
        if x is not None:
            check_fits(option, name, spec, x, mesh=self._mesh)
        for axis in itertools.chain.from_iterable(map(axes_of, spec)):
            require_axis(f"`{option}` gives {spec} for `{name}`", axis, mesh)
            if self._axis_names and axis not in self._axis_names:
                raise ValueError(
                    f"`{option}` gives {spec} for `{name}`, but the axis {axis!r} is not "
                    "in `axis_names`, so it is not manual: leave it out of the spec."
                )


def _explain_explicit(names, data, specs, error: ValueError) -> None:
    """Raises an error naming the argument whose explicit sharding is not its spec."""
    for name, x, spec in zip(names, data, specs, strict=True):
        has = jax.typeof(x).sharding.spec
        if _padded(has, x.ndim) != _padded(spec, x.ndim):
            raise ValueError(
                f"`in_specs` gives {spec} for `{name}` ({describe_array(x)}), which is "
                f"split by {has}. For explicit axes, the spec must be that of the "
                "array: use `filter_shard` on it first."
            ) from error


def _has_arrays(tree: Any) -> bool:
    return any(map(is_array, jtu.tree_leaves(tree)))


def _padded(spec: Any, ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


_ROWS = if_array(0)


@typing.overload
def filter_pmap(
    fun: Callable[_P, _T],
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: Donate = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
) -> Jitted[_P, _T]: ...
@typing.overload
def filter_pmap(
    *,
    in_axes: Any = ...,
    out_axes: Any = ...,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: Donate = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
) -> Callable[[Callable[_P, _T]], Jitted[_P, _T]]: ...
def filter_pmap(
    fun: _F = NOT_GIVEN,
    *,
    in_axes: Any = _ROWS,
    out_axes: Any = _ROWS,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: Any = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    **refused: Any,
) -> _F:
    """`jax.pmap` for functions of any pytrees: one device for each row.

    New code is better served by [`equinox_like.filter_jit`][] with arrays that
    [`equinox_like.filter_shard`][] has split, or by [`equinox_like.filter_shard_map`][].

    **Arguments:**

    - `fun`: the function to map. The arrays of a callable pytree are the same on all
        devices.
    - `in_axes`, `out_axes`, `axis_name`, `axis_size`: as for
        [`equinox_like.filter_vmap`][]. If `out_axes` has a `None`, `fun` is traced twice.
    - `donate`: as for [`equinox_like.filter_jit`][].
    - `devices`, `backend`: where to run; by default on as many of `jax.devices()` as there
        are rows.

    **Returns:**

    A function of the same arguments, with `.lower` and the other methods of what
    [`equinox_like.filter_jit`][] returns.

    **Raises:**

    `ValueError` as by [`equinox_like.filter_vmap`][]; if there are more rows than devices;
    if an output with the axis `None` may differ between devices, or an argument is on
    a mesh with explicit axes. Each names the path. Also `ValueError` under
    `jax.set_mesh`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        n = len(jax.devices())
        share = eqx.filter_pmap(lambda x: x / jax.lax.psum(x, "rows"), axis_name="rows")
        assert share(jnp.ones(n)).tolist() == [1 / n] * n
        ```
    """
    check_not_deprecated(
        "filter_pmap", DEPRECATED, refused, ": use `in_axes` and `out_axes`"
    )
    for name in refused:
        if name in ("static_broadcasted_argnums", "donate_argnums"):
            raise ValueError(
                f"`filter_pmap` does not take `{name}`: leaves that are not arrays are "
                "static, and `donate` says what to donate."
            )
        raise TypeError(f"`filter_pmap` got an unexpected keyword argument {name!r}.")
    used = devices if devices is not None else jax.devices(backend)
    return applied(
        JittedMap.of,
        fun,
        kind=Pmapped,
        donate=donate,
        _in_axes=in_axes,
        _out_axes=out_axes,
        _axis_name="<filter_pmap>" if axis_name is None else axis_name,
        _axis_size=checked_size("filter_pmap", axis_size),
        _platform=next((device.platform for device in used), backend),
        _ids=tuple(device.id for device in used),
        _exact=devices is not None,
    )


class Pmapped(Mapped):
    """The function that `filter_pmap` compiles: it runs each row on its own device."""

    _transformation_ = "filter_pmap"

    # Of the devices, which cannot be pickled themselves.
    _platform: str | None = field(static=True)
    _ids: tuple[int, ...] = field(static=True)
    # Whether there must be as many rows as devices.
    _exact: bool = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        axis_name = self._axis_name
        call = NamedCall("filter_pmap", self.__wrapped__, args, kwargs)
        axes = axes_of_call(call, self._in_axes)
        check_sizes(call, axes, self._axis_size)
        mesh = self._mesh(call, axes)
        data, flat_call = FlatCall.of(self._held_, args, kwargs, with_fun=True)
        axes = [None] * jtu.tree_structure(self._held_).num_leaves + axes
        of_data = [axes[i] for i in flat_call.template.places]
        output = MappedOutput(self._out_axes)

        def of_row(row):
            return output.split(flat_call.run(row))

        def flat(data):
            with_rows, without = of_row(
                x if axis is None else jax.lax.index_in_dim(x, 0, axis, keepdims=False)
                for x, axis in zip(data, of_data, strict=True)
            )
            return [jnp.asarray(x)[None] for x in with_rows], without

        show_as_call(flat, self.__wrapped__, args, kwargs, self._tree)
        if _may_return_once(self._out_axes):
            options = {"axis_name": axis_name, "axis_size": mesh.devices.size}
            found = output.batched(of_row, data, in_axes=(of_data,), **options)
            if found is not None:
                raise ValueError(
                    f"{call}: {found} may differ between devices, so its output axis "
                    "cannot be `None`. Make it equal on all devices with `jax.lax.psum` "
                    "or `jax.lax.pmean`, or give it an axis."
                )
        specs = [
            PartitionSpec()
            if axis is None
            else PartitionSpec(*[None] * (axis % x.ndim), axis_name)
            for x, axis in zip(data, of_data, strict=True)
        ]
        with_rows, without = jax.shard_map(
            flat,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(PartitionSpec(axis_name), PartitionSpec()),
            # With it, the gradient for an array that all devices share would be a sum
            # over the devices, which it is not under `jax.pmap`. And some functions
            # would need a `jax.lax.pcast`. So `jax.vmap` checks the outputs, above.
            check_vma=False,
        )(data)
        return output.join(with_rows, without)

    def _mesh(self, call: NamedCall, axes: Sequence[int | None]) -> Mesh:
        size, name = self._axis_size, "axis_size"
        leaves = jtu.tree_leaves_with_path((call.args, call.kwargs))
        for (path, x), axis in zip(leaves, axes, strict=True):
            if axis is not None:
                size, name = x.shape[axis], call.leaf_name(path)
                break
        if size is None:
            raise ValueError(
                f"{call}: no argument is mapped. Map one, or give `axis_size`."
            )
        by_id = {device.id: device for device in jax.devices(self._platform)}
        devices = [by_id[i] for i in self._ids if i in by_id]
        count = len(devices)
        if size > count or (self._exact and size != count):
            raise ValueError(
                f"{call}: `{name}`: {size} rows cannot be split over {count} devices, one "
                "row each. Map over at most as many rows as devices, and use "
                "`filter_vmap` for the rows of one device."
            )
        _check_not_explicit(call, axes)
        names, kinds = (self._axis_name,), (AxisType.Auto,)
        return Mesh(np.asarray(devices[:size]), names, axis_types=kinds)


def _check_not_explicit(call: NamedCall, axes: Sequence[int | None]) -> None:
    """Raises for an argument with explicit axes, which JAX does not move to a mesh."""
    leaves = jtu.tree_leaves_with_path((call.args, call.kwargs))
    for (path, x), axis in zip(leaves, axes, strict=True):
        sharding: Any = jax.typeof(x).sharding if is_array(x) else None
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
            continue
        if axis is not None or any(sharding.spec):
            raise ValueError(
                f"{call}: `{call.leaf_name(path)}` ({describe_array(x)}) is on another "
                "mesh, one with explicit axes. Take it off that mesh with "
                "`jax.device_get`."
            )


def _may_return_once(out_axes: Any) -> bool:
    leaves = jtu.tree_leaves(out_axes, is_leaf=is_none)
    return not all(
        isinstance(x, int) or (isinstance(x, if_array) and x.axis is not None)
        for x in leaves
    )
