"""The shardings of layers' results on a mesh with explicit axes.

There, the type of an array includes its sharding. JAX raises if it cannot derive the
sharding of a result: of a sum over a split axis, a convolution of split channels, or a
gather. The layers state it with the functions below. Without explicit axes these add
nothing to the program, and only inspect types.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..._compat.axes import vary_over, varying_axes
from ..._module import Frozen
from ..._tree import is_array


def explicit_mesh(*arrays: Any) -> AbstractMesh | None:
    """The first mesh with explicit axes that one of the arrays is on."""
    for x in arrays:
        if is_array(x):
            mesh = jax.typeof(x).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                return mesh
    return None


def thawed(x: Any) -> Any:
    """The array of a `Frozen`, whose sharding JAX does not see; anything else as it is."""
    return jnp.asarray(x) if isinstance(x, Frozen) and is_array(x.value) else x


def parts(x: Any) -> tuple[Any, ...]:
    """For each axis of an array, the explicit mesh axes that split it, or `None`."""
    return tuple(jax.typeof(x).sharding.spec)


def like(x: Any, y: Any) -> Any:
    """`x`, resharded like the `y` that it will be broadcast against."""
    x = thawed(x)
    before = parts(x)
    if not any(before):
        return x
    after = parts(y)[len(parts(y)) - len(before) :]
    after = tuple(
        None if n == 1 else part for n, part in zip(x.shape, after, strict=True)
    )
    return split_by(x, after)


def split_along(x: Array, axis: int, names: Any) -> Array:
    """`x`, resharded so that these mesh axes, or none, split this axis."""
    before = parts(x)
    return split_by(x, (*before[:axis], names, *before[axis + 1 :]))


def split_by(x: Any, to: tuple[Any, ...]) -> Any:
    """`x`, resharded so that these mesh axes split its axes."""
    if parts(x) == to:
        return x
    return jax.sharding.reshard(x, on_mesh(PartitionSpec(*to), x))


def varying_as(tree: Any, x: Any) -> Any:
    """The tree `x`, marked as varying over the `shard_map` axes that any array of `tree`
    varies over. A scan requires this of its carry."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    axes = frozenset().union(*(varying_axes(jax.typeof(leaf)) for leaf in arrays))
    return jax.tree.map(lambda leaf: vary_over(axes, leaf), x)


def matvec(weight: Any, x: Any) -> Array:
    """`weight @ x`, also if both are split along the axis that is summed over."""
    return product(lambda x, weight: weight @ x, x, weight)


def product(
    plain: Callable[[Any, Any], Array],
    x: Any,
    weight: Any,
    out_sharding: PartitionSpec | None = None,
) -> Array:
    """`plain(x, weight)`, which must be `weight @ x`, split by `out_sharding`."""
    weight = thawed(weight)
    if out_sharding is None and not any(jax.typeof(x).sharding.spec):
        return plain(x, weight)
    if not is_array(weight) or weight.ndim != 2:
        return placed(plain, out_sharding, x, weight)
    (features,) = parts(x)
    if features is not None:
        rows, columns = parts(weight)
        if columns is not None:
            x = split_by(x, (columns,))
            out_sharding = PartitionSpec(rows) if out_sharding is None else out_sharding
    if out_sharding is None:
        return plain(x, weight)
    where = on_mesh(out_sharding, x, weight)
    return jnp.einsum("i,oi->o", x, weight, out_sharding=where)


def placed(
    f: Callable[..., Array], out_sharding: PartitionSpec | None, *args: Any
) -> Array:
    """`f(*args)`, split by `out_sharding`. Within `f`, the compiler decides."""
    if out_sharding is None:
        return f(*args)
    mesh = explicit_mesh(*args)
    if mesh is None:
        return jax.sharding.reshard(f(*args), out_sharding)  # raises if invalid
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    # By default `auto_axes` would include the manual axes of a `shard_map`, and fail.
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    where = NamedSharding(mesh, out_sharding)
    decided: Any = jax.sharding.auto_axes(f, axes=axes, out_sharding=where)
    return decided(*args)


def split_as(f: Callable[..., Array], axes: Iterable[Any], *args: Any) -> Array:
    """`f(*args)`, split by `axes` if one of the arrays is on a mesh with explicit axes."""
    is_explicit = explicit_mesh(*args) is not None
    return placed(f, PartitionSpec(*axes) if is_explicit else None, *args)


def on_mesh(spec: PartitionSpec, *arrays: Any) -> PartitionSpec | NamedSharding:
    """The spec on the mesh of the arrays, which need not be the current mesh."""
    mesh = explicit_mesh(*arrays)
    return spec if mesh is None else NamedSharding(mesh, spec)
