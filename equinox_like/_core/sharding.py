"""Validates the sharding that a user asks for one array, and applies it.

Errors name the option that gave the sharding, and the array.
"""

from typing import Any

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from .._tree.arrays import describe_array, is_typed_key
from .._tree.filters import is_array


def axes_of(part: Any) -> tuple[Any, ...]:
    """The axes of the mesh that one part of a `PartitionSpec` names."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return part if isinstance(part, tuple) else (part,)


def is_sharding(spec: Any) -> bool:
    # JAX's `Format` has an attribute `sharding`.
    if isinstance(spec, Sharding | PartitionSpec):
        return True
    return hasattr(spec, "sharding") and not is_array(spec)


def require_mesh(mesh: Any, function: str) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"`mesh` of `{function}` must be a `jax.sharding.Mesh`, as `jax.make_mesh` "
            f"makes it; got {mesh!r}."
        )


def require_axis(
    says: str, axis: Any, mesh: Any, cause: Exception | None = None
) -> None:
    """Raises `ValueError` if the mesh has no axis of this name."""
    if mesh.shape and axis not in mesh.shape:
        raise ValueError(
            f"{says}, but the mesh has no axis {axis!r}. Its axes: "
            f"{', '.join(map(repr, mesh.shape))}."
        ) from cause


def check_is_sharding(option: str, name: str, spec: Any) -> None:
    if spec is not None and not is_sharding(spec):
        raise ValueError(
            f"`{option}` gives {spec!r} for `{name}`: it must be a sharding, a "
            "`PartitionSpec` or `None`."
        )


def check_fits(
    option: str,
    name: str,
    spec: Any,
    x: Any,
    cause: Exception | None = None,
    mesh: Any = None,
) -> None:
    """Raises `ValueError` if `spec` does not fit the shape of `x`."""
    mesh = mesh or getattr(spec, "mesh", None) or jax.sharding.get_abstract_mesh()
    parts = getattr(spec, "spec", spec)
    if not isinstance(parts, PartitionSpec):
        return
    says = f"`{option}` gives {parts} for `{name}` ({describe_array(x)})"
    if len(parts) > len(x.shape):
        raise ValueError(
            f"{says}, which has {x.ndim} dimension{'s' * (x.ndim != 1)}."
        ) from cause
    axes = [axis for part in parts for axis in axes_of(part)]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ValueError(
                f"{says}, which names the axis {axis!r} twice. One axis of the mesh can "
                "split only one dimension."
            ) from cause
    for i, (size, part) in enumerate(zip(x.shape, parts, strict=False)):
        count = 1
        for axis in axes_of(part):
            require_axis(says, axis, mesh, cause)
            count *= mesh.shape.get(axis, 1)
        if isinstance(size, int) and size % count:
            raise ValueError(
                f"{says}, whose dimension {i} has size {size} and cannot be split over "
                f"{count} devices."
            ) from cause


def memory_of(spec: Any) -> str:
    """The memory kind that `spec` names.

    A `PartitionSpec`, and the sharding of an abstract mesh, name none: as for a value,
    JAX then takes that of the device.
    """
    return getattr(getattr(spec, "sharding", spec), "memory_kind", None) or "device"


def in_memory(x: Any, spec: Any) -> Any:
    """The traced array `x`, moved to the host if `spec` says so."""
    is_host = memory_of(spec) == "pinned_host"
    return jax.device_put(x, jax.memory.Space.Host) if is_host else x


def check_memory(option: str, name: str, spec: Any, x: Any) -> None:
    """Raises `ValueError` if the traced array `x` is in another memory than `spec` says.

    JAX ignores the memory of a constraint. Within a trace it moves nothing to unpinned
    memory, and no typed keys that are sharded over a mesh.
    """
    wanted = memory_of(spec)
    is_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    found = "pinned_host" if is_host else "device"
    is_split_key = is_typed_key(x) and isinstance(spec, NamedSharding)
    only_outside = wanted in ("unpinned_host", is_split_key and "pinned_host")
    if wanted != found or only_outside:
        raise ValueError(
            f"`{option}` gives {spec} for `{name}` ({describe_array(x)}), which is in "
            f"the memory {found!r}. Under a transformation of JAX, such as `jax.jit`, "
            "this moves nothing between memories: call `filter_device_put`"
            f"{' outside of it' if only_outside else ''}."
        )


def constrain(option: str, name: str, x: Any, spec: Any) -> Any:
    """`x` with the sharding `spec`, within a trace, for any axis types of the mesh.

    `reshard` is for explicit axes: `with_sharding_constraint` would only assert their
    sharding. Automatic axes need `with_sharding_constraint`, which has a gradient only
    if no axis is explicit. A mesh with both needs both.
    """
    check_memory(option, name, spec, x)
    mesh, parts = jax.sharding.get_abstract_mesh(), getattr(spec, "spec", spec)
    if not isinstance(parts, PartitionSpec):
        return jax.lax.with_sharding_constraint(x, spec)
    if mesh.empty:
        mesh = getattr(spec, "mesh", mesh)
    elif AxisType.Manual in mesh.axis_types:
        spec = parts  # with manual axes, the mesh differs from that of `spec`
    if AxisType.Explicit not in mesh.axis_types:
        return jax.lax.with_sharding_constraint(x, spec)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed = _explicit_part(spec, kinds)
    if AxisType.Auto not in kinds.values():
        return jax.sharding.reshard(x, typed)
    _check_order(option, name, parts, x, kinds)
    explicit = tuple(axis for axis, kind in kinds.items() if kind == AxisType.Explicit)
    all_automatic: Any = jax.sharding.auto_axes(
        lambda x: jax.lax.with_sharding_constraint(x, parts),
        axes=explicit,
        out_sharding=typed,
    )
    return all_automatic(x)


def _check_order(
    option: str, name: str, spec: PartitionSpec, x: Any, kinds: dict[Any, AxisType]
) -> None:
    """Raises `ValueError` where JAX would change the order of a dimension's axes."""
    for i, part in enumerate(spec):
        axes = list(axes_of(part))
        # A stable sort: `False` comes first.
        ordered = sorted(axes, key=lambda axis: kinds.get(axis) != AxisType.Explicit)
        if ordered != axes:
            raise ValueError(
                f"`{option}` gives {spec} for `{name}` ({describe_array(x)}): under "
                "tracing, the explicit axes of a dimension must come before its "
                f"automatic ones. Write {tuple(ordered)} for dimension {i}."
            )


def _explicit_part(spec: Any, kinds: dict[Any, AxisType]) -> Any:
    """A `PartitionSpec` or `NamedSharding`, with only its explicit axes."""
    parts = []
    for part in getattr(spec, "spec", spec):
        axes = tuple(x for x in axes_of(part) if kinds.get(x) == AxisType.Explicit)
        parts.append(axes if len(axes) != 1 else axes[0])
    chosen = PartitionSpec(*(part or None for part in parts))
    return (
        chosen if isinstance(spec, PartitionSpec) else NamedSharding(spec.mesh, chosen)
    )
