"""`filter_pmap`: `filter_vmap` with one device for each row, by `jax.shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from .._core.base import DEPRECATED, check_not_deprecated
from .._core.flat_call import FlatCall
from .._jit.donation import Donate
from .._jit.jit import Jitted
from .._module.fields import field
from .._tree.arrays import describe_array
from .._tree.filters import is_array, is_none
from .._typing import NOT_GIVEN
from .arguments import NamedCall, show_as_call
from .shard_map import JittedMap
from .vmap import Mapped, MappedOutput, axes_of_call, check_sizes, if_array

_P = ParamSpec("_P")
_T = TypeVar("_T")

_ROWS = if_array(0)


@overload
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
@overload
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
    fun: Any = NOT_GIVEN,
    *,
    in_axes: Any = _ROWS,
    out_axes: Any = _ROWS,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: Any = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    **refused: Any,
) -> Any:
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
    used = tuple((device.platform, device.id) for device in used)
    options = (in_axes, out_axes, axis_name, axis_size, used, devices is not None)
    if fun is NOT_GIVEN:
        return lambda fun: JittedMap(Pmapped(fun, *options), donate)
    return JittedMap(Pmapped(fun, *options), donate)


def _find_devices(wanted: Sequence[tuple[str, int]]) -> list[Any]:
    """The devices with these platforms and ids."""
    platforms = {platform for platform, _ in wanted}
    found = {(p, d.id): d for p in platforms for d in jax.devices(p)}
    missing = [device for device in wanted if device not in found]
    if missing:
        raise ValueError(
            f"A function of `filter_pmap` was pickled for the devices {missing}, which "
            "this process does not have."
        )
    return [found[device] for device in wanted]


class Pmapped(Mapped):
    """The function that `filter_pmap` compiles: it runs each row on its own device."""

    _transformation_ = "filter_pmap"

    # The platform and id of each, which can be pickled.
    _devices: tuple[tuple[str, int], ...] = field(static=True)
    # Whether there must be as many rows as devices.
    _exact: bool = field(static=True)

    def __init__(self, fun, in_axes, out_axes, axis_name, axis_size, devices, exact):
        axis_name = "<filter_pmap>" if axis_name is None else axis_name
        super().__init__(fun, in_axes, out_axes, axis_name, axis_size)
        self._devices = devices
        self._exact = exact

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
        count = len(self._devices)
        if size > count or (self._exact and size != count):
            raise ValueError(
                f"{call}: `{name}`: {size} rows cannot be split over {count} devices, one "
                "row each. Map over at most as many rows as devices, and use "
                "`filter_vmap` for the rows of one device."
            )
        devices = np.asarray(_find_devices(self._devices[:size]))
        mesh = Mesh(devices, (self._axis_name,), axis_types=(AxisType.Auto,))
        _check_mesh(call, axes, mesh)
        return mesh


def _check_mesh(call: NamedCall, axes: Sequence[int | None], mesh: Mesh) -> None:
    """Raises if another mesh is in use, or an argument has explicit axes of one.

    JAX allows only one mesh at a time, and does not move explicit axes to another mesh.
    """
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and here != mesh.abstract_mesh:
        raise ValueError(
            f"{call} has a mesh of its own, and cannot be called while a mesh with the "
            f"axes {here.axis_names} is in use. Call it outside of `jax.set_mesh`, or use "
            "`filter_shard_map` or `filter_vmap` instead."
        )
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
