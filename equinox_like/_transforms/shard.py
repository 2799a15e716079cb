"""Trees on devices: `filter_shard`, `filter_device_put`, `shardings`, `make_sharded`.

`shardings` says by rules where the arrays of a tree are. The state of an optimiser follows
the rules for its parameters. `make_sharded` builds a tree directly in its shards.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .._compat.compiled import least_memory
from .._compat.tracing import at_top_level, jit_is_disabled
from .._core.base import frames_hidden, require_callable
from .._core.describe import describe
from .._core.sharding import check_fits, constrain, is_sharding, require_mesh
from .._errors import DonationError, warn
from .._io.checksums import own_parts, sum_of_parts
from .._jit import filter_jit
from .._jit.donation import delete_array
from .._tree.arrays import buffer_pointers, describe_array, is_concrete, is_deleted
from .._tree.copies import copy_array
from .._tree.deleted import fate_of
from .._tree.filters import is_array, is_array_or_struct
from .._tree.match import spread
from .._tree.nodes import leaf_paths, listed, path_str, plain_path
from .._tree.paths import matches, near_paths
from .._tree.require import named_arguments
from .trace import filter_eval_shape

_Tree = TypeVar("_Tree")
_T = TypeVar("_T")


@frames_hidden
def filter_shard(x: _Tree, device_or_shardings: Any) -> _Tree:
    """Shards the arrays of a tree, or moves them to a device.

    **Arguments:**

    - `x`: any pytree. NumPy arrays become JAX arrays; everything else is passed on.
    - `device_or_shardings`: a device, a sharding, a `PartitionSpec` for the mesh in use, or
        a prefix tree of these.

    Within `jax.jit` this is a constraint on the sharding of the arrays. For the
    explicit axes of a mesh it is a `jax.sharding.reshard`. Within `jax.shard_map` it
    concerns the axes that are not manual. A constraint moves nothing between memories,
    such as `memory_kind="pinned_host"`: use [`equinox_like.filter_device_put`][].

    **Returns:**

    The tree with the same values.

    **Raises:**

    `ValueError` if there is no sharding for an array, or none that fits its shape, if it
    names another memory than that of a traced array, or if several processes pass
    different values;
    [`equinox_like.DonationError`][] if an array was deleted before; `TypeError` for
    a NumPy array of a dtype that JAX does not have, such as text. Each names its path.

    The result shares arrays with `x`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        from jax.sharding import PartitionSpec

        mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        with jax.set_mesh(mesh):
            model = eqx.filter_shard(model, PartitionSpec())  # a copy on each device
        assert model.weight.sharding.is_fully_replicated
        ```
    """

    def shard(name: str, x: Any, spec: Any) -> Any:
        _check_not_deleted("filter_shard", name, x)
        spec = _fitting("device_or_shardings", name, x, spec)
        if at_top_level():
            return jax.device_put(x, spec)
        return constrain("device_or_shardings", name, jnp.asarray(x), spec)

    return _placed("device_or_shardings", "x", x, device_or_shardings, shard)


def filter_device_put(
    tree: _Tree,
    device: Any = None,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
) -> _Tree:
    """`jax.device_put` for any tree, with strict rules for `donate` and `may_alias`.

    **Arguments:**

    - `tree`: any pytree. NumPy arrays become JAX arrays; everything else is passed on.
    - `device`: a device, a sharding, a `PartitionSpec` for the mesh in use, a
        `jax.memory.Space`, which keeps the sharding, a prefix tree of these, or `None` to
        leave an array where it is.
        Within `jax.jit` too, arrays are moved and split; only `"unpinned_host"`, and
        PRNG keys on the host that are split over a mesh, are refused there.
    - `donate`: whether the JAX arrays of `tree` are deleted. An array whose memory NumPy
        holds stays alive.
    - `may_alias`: whether the result may share memory with `tree`. By default it may if
        nothing is donated.

    **Returns:**

    The tree with the same values.

    **Raises:**

    `ValueError` if both `donate` and `may_alias` are true, if arrays are donated while they
    are traced, or if a sharding does not fit an array. [`equinox_like.DonationError`][] if
    an array was deleted before; `TypeError` for a NumPy array of a dtype that JAX does not
    have, such as text. Each names the path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import numpy as np

        batch = {"x": np.ones((2, 3)), "name": "first"}
        moved = eqx.filter_device_put(batch, jax.devices()[0], may_alias=False)
        batch["x"][:] = 0
        assert moved["x"].sum() == 6 and moved["name"] == "first"
        ```
    """
    if donate and may_alias:
        raise ValueError(
            "`filter_device_put`: a donated array is deleted, so `donate` and "
            "`may_alias` cannot both be true."
        )
    if donate and not at_top_level():
        raise ValueError(
            "`filter_device_put`: nothing can be donated under a transformation of JAX, "
            "such as `jax.jit` or `jax.grad`. Leave out `donate=True`."
        )
    shares = not donate if may_alias is None else may_alias

    def put(name: str, x: Any, spec: Any) -> Any:
        _check_not_deleted("filter_device_put", name, x)
        if not shares and not isinstance(x, jax.Array):
            x = np.array(x)
        if spec is None or isinstance(spec, jax.memory.Space):
            out = jax.device_put(x, spec)
        else:
            spec = _fitting("device", name, x, spec)
            out = jax.device_put(x, spec)
            if not at_top_level():
                # JAX moves it between memories, and ignores the automatic axes.
                out = constrain("device", name, out, spec)
        if shares or not is_concrete(x) or not is_concrete(out):
            return out
        overlap = not set(buffer_pointers(x)).isdisjoint(buffer_pointers(out))
        return copy_array(out) if overlap else out

    out = _placed("device", "tree", tree, device, put)
    if donate:
        # At the end, because a tree may hold an array twice. JAX's own `donate` is not
        # used: it leaves most arrays alive, and deletes too much of typed PRNG keys.
        for x in filter(is_concrete, jtu.tree_leaves(tree)):
            delete_array(x)
    return out


def _check_not_deleted(function: str, name: str, x: Any) -> None:
    if is_deleted(x):
        raise DonationError(
            f"`{function}`: `{name}` ({describe_array(x)}) was {fate_of(x)}."
        )


def _placed(option: str, name: str, tree: Any, specs: Any, place: Any) -> Any:
    leaves, treedef = jtu.tree_flatten_with_path(tree)
    chosen = [spec for _, spec in spread(specs, tree, option, name)]

    def place_at(path: Any, x: Any, spec: Any) -> Any:
        try:
            return place(path_str(path, name), x, spec)
        except (TypeError, AssertionError) as e:
            at = f"`{path_str(path, name)}` ({describe_array(x)})"
            if isinstance(e, TypeError):  # a dtype that JAX does not have, such as text
                raise TypeError(f"{at} cannot be placed on a device: {e}") from e
            if jax.process_count() == 1:
                raise
            raise _differs(at) from e  # JAX compares the values

    return treedef.unflatten(
        [
            place_at(path, x, spec) if is_array(x) else x
            for (path, x), spec in zip(leaves, chosen, strict=True)
        ]
    )


def _differs(at: str) -> ValueError:
    return ValueError(
        f"{at} is not the same in all processes. Make a model from the same key in each. "
        "If each has rows of its own, call `jax.make_array_from_process_local_data`."
    )


def _fitting(option: str, name: str, x: Any, spec: Any) -> Any:
    """The sharding to give JAX for the array `x`; raises if `spec` does not fit it."""
    if isinstance(spec, jax.Device):
        return SingleDeviceSharding(spec)
    if not is_sharding(spec):
        raise ValueError(
            f"`{option}` is {spec!r} for `{name}` ({describe_array(x)}): it must be a "
            "device, a sharding or a `PartitionSpec`."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(spec, PartitionSpec) and mesh.empty:
        raise ValueError(
            f"`{option}` gives {spec} for `{name}` ({describe_array(x)}), but no mesh "
            "is in use: call it under `jax.set_mesh(mesh)`, or give "
            "`jax.sharding.NamedSharding(mesh, spec)`."
        )
    check_fits(option, name, spec, x)
    return spec


def shardings(
    tree: Any,
    mesh: Mesh,
    rules: Sequence[tuple[str, PartitionSpec]],
    *,
    follow: Any = None,
) -> Any:
    """A sharding for each array of a tree, by rules on paths.

    Pass the result to `filter_shard(tree, ...)`, as `in_shardings` or `out_shardings` of
    `filter_jit`, or to `load(..., shardings=...)`.

    **Arguments:**

    - `tree`: any pytree. `jax.ShapeDtypeStruct`s may stand for arrays.
    - `mesh`: a `jax.sharding.Mesh`.
    - `rules`: pairs of a pattern and a `PartitionSpec`. The first pair whose pattern
        matches the path of an array, as [`equinox_like.save`][] writes it, applies to
        it. In a pattern `*` stands for anything within one component, and `**` for any
        number of components. `("**", PartitionSpec())` as the last one replicates all
        other arrays on each device.
    - `follow`: the parameters, if `tree` has the state of an optimiser for them, or a
        function from `tree` to them. An array of the state whose path ends with the path
        of a parameter follows the rule for it: an axis that it lacks is left out, as in
        `optax.adafactor`, and an axis in front is not split, as in `optax.lbfgs`. A list
        in place of a parameter may have one array for each of its axes: vectors, as in
        `optax.sm3`, or square matrices, as in Shampoo. The first axis of such an array is
        split as that axis of the parameter. Rules that match only the path of the array
        itself apply as they are.

    **Returns:**

    A tree of the structure of `tree`, with a `jax.sharding.NamedSharding` for each array
    and `None` for other leaves.

    **Raises:**

    `ValueError`, naming the path, if no rule matches an array, or if its spec is
    invalid: it names an axis that the mesh does not have, or one axis twice, it has
    more entries than the array has dimensions, or a dimension is not divisible. Also if a
    pattern without `*` matches no leaf, a rule follows `"**"`, or shapes do not tell how
    an array follows its parameter. `TypeError` if a rule is not such a pair, or `mesh` is
    not a mesh.

    A pattern with `*` that matches no leaf is a `UserWarning`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((len(jax.devices()),), ("model",))
        model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
        rules = [("layers[*].weight", P("model")), ("**", P())]
        where = eqx.shardings(model, mesh, rules)
        assert where.layers[0].weight.spec == P("model")
        assert where.layers[0].bias.spec == P() and where.activation is None
        model = eqx.filter_shard(model, where)
        ```
    """
    require_mesh(mesh, "shardings")
    rules = list(rules)  # a generator can be read only once
    owners = owners_of(tree, follow)
    _check_rules(rules, tree, [name for name, _ in owners.values()])

    def choose(path, leaf):
        if not is_array_or_struct(leaf):
            return None
        name = plain_path(path)
        owner = owner_of(path, owners) or (name, leaf, ())
        names = {name, owner[0]}
        found = next((x for x in rules if any(matches(x[0], y) for y in names)), None)
        if found is None:
            raise ValueError(
                f"No rule matches `{name}` ({describe_array(leaf)}). Add one, or end "
                'the rules with `("**", PartitionSpec())`, which replicates the rest '
                "on each device."
            )
        option, spec = f"rules[{found[0]!r}]", found[1]
        if matches(found[0], owner[0]):
            spec = following(option, spec, owner, name, leaf)
        fix = FOLLOW if follow is None and isinstance(tree, tuple) else ""
        check_fits(option, name, spec, leaf, mesh=mesh, fix=fix)
        return NamedSharding(mesh, spec)

    return jtu.tree_map_with_path(choose, tree)


@frames_hidden
def make_sharded(
    make: Callable[..., _T],
    /,
    *args: Any,
    mesh: Mesh,
    rules: Sequence[tuple[str, PartitionSpec]],
    follow: Any = None,
    **kwargs: Any,
) -> _T:
    """Builds a model, a State or the state of an optimiser directly in its shards.

    Neither a device nor the host ever holds the whole. The values are those of
    `filter_jit(make)(*args, **kwargs)`, on any mesh, and those of `make(*args, **kwargs)`
    up to rounding.

    **Arguments:**

    - `make`: a class or a function that returns any pytree. It is traced twice, as by
        [`equinox_like.filter_jit`][], and must return one structure. So make a State by
        [`equinox_like.nn.make_with_state`][], which names its values.
    - `*args`, `**kwargs`: the arguments of `make`.
    - `mesh`, `rules`, `follow`: as for [`equinox_like.shardings`][]. A function as `follow`
        is called with what `make` returns, with shapes in place of arrays.

    **Returns:**

    What `make` returns. Arrays are sharded, NumPy arrays among them; other leaves are
    returned unchanged.

    **Raises:**

    As [`equinox_like.shardings`][], before anything is computed. `ValueError` in all
    processes, naming the argument, if they pass different ones: keys, for example.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import optax
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((len(jax.devices()),), ("model",))
        placed = {"mesh": mesh, "rules": [("**.weight", P("model")), ("**", P())]}
        key = jax.random.key(0)
        model = eqx.make_sharded(eqx.nn.MLP, 8, 8, 16, 2, key=key, **placed)
        assert model.layers[0].weight.sharding.spec == P("model")

        params = eqx.filter(model, eqx.trainable)
        state = eqx.make_sharded(optax.adam(1e-3).init, params, **placed)
        assert state[0].mu.layers[0].weight.sharding.spec == P("model")
        ```
    """
    require_callable(make, "make_sharded", "make")
    require_mesh(mesh, "make_sharded")
    rules = list(rules)  # a generator can be read only once

    def place(shapes: Any) -> Any:
        return shardings(shapes, mesh, rules, follow=follow)

    return build_sharded(make, args, kwargs, mesh, {"rules": repr(rules)}, place)


def build_sharded(
    make: Callable[..., _T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Any,
    named: dict[str, Any],
    place: Callable[[Any], Any],
) -> _T:
    """What `make` returns, in the shards that `place` returns for its shapes.

    `named`: what must be the same in all processes, beside the arguments."""
    if at_top_level() and jax.process_count() > 1:
        named = {**named, "make": make}
        if inspect.isfunction(make):
            named |= inspect.getclosurevars(make).nonlocals
        check_alike_everywhere(mesh, named | dict(named_arguments(make, args, kwargs)))
    shapes = filter_eval_shape(make, *args, **kwargs)
    out_shardings = place(shapes)
    if not at_top_level() or jit_is_disabled():
        # The outermost `jit` decides the compiler options. JAX ignores the `out_shardings`
        # of a `jit` within another one if the axes of the mesh in use are explicit, and
        # under `jax.disable_jit`.
        made = filter_jit(make, out_shardings=out_shardings)(*args, **kwargs)
        return filter_shard(made, out_shardings)
    options = least_memory(mesh.devices.flat[0].platform)
    jitted = filter_jit(make, out_shardings=out_shardings, compiler_options=options)
    return jitted(*args, **kwargs)


def check_alike_everywhere(mesh: Mesh, named: dict[str, Any]) -> None:
    """Raises `ValueError` in all processes if these trees differ between processes.

    No process sees those of another, so checksums are gathered: of the structure, of
    static values that have a text, and of the arrays of this process. As JAX does for
    `jax.device_put`, a mesh of some processes is passed over: each may have its own.
    """
    if len({x.process_index for x in mesh.devices.flat}) < jax.process_count():
        return
    texts: dict[str, str] = {}
    for name, tree in named.items():
        texts |= {k: v for k, v in describe(name, tree).items() if isinstance(v, str)}
        for path, x in jtu.tree_leaves_with_path(tree):
            if is_array(x) and getattr(x, "is_fully_addressable", True):
                _check_not_deleted("make_sharded", path_str(path, name), x)
                total = sum_of_parts(own_parts(x))
                texts[path_str(path, name)] = f"{describe_array(x)} {total}"
    sums = np.array([crc32(repr(item).encode()) for item in texts.items()], "uint32")
    size = process_allgather(sums.size).max()
    found = process_allgather(np.pad(sums, (0, size - sums.size)))
    differs = (found != found[0]).any(axis=0)
    if differs.any():
        place = [*texts][min(differs.argmax(), sums.size - 1)]
        raise _differs(f"`{place}`")


def _check_rules(rules: list[Any], tree: Any, others: list[str]) -> None:
    for rule in rules:
        kinds = list(map(type, rule)) if isinstance(rule, tuple | list) else None
        if kinds != [str, PartitionSpec]:
            raise TypeError(
                "Each rule must be a pair of a pattern and a `jax.sharding.PartitionSpec`, "
                f"such as `('**.weight', PartitionSpec('model'))`; got {rule!r}."
            )
    patterns = [pattern for pattern, _ in rules]
    if "**" in patterns[:-1]:
        raise ValueError(
            f"The rule for {patterns[patterns.index('**') + 1]!r} is never used: '**' "
            "before it matches every array. Put '**' last."
        )
    # It may match no more than a leaf that is `None`, as the bias of a layer is.
    there = [*leaf_paths(tree), *others]
    for pattern in patterns:
        if pattern != "**" and not any(matches(pattern, path) for path in there):
            text = (
                f"The rule for {pattern!r} matches no leaf. The leaves are "
                f"{listed(there, 5)}.{near_paths([pattern], there)}"
            )
            if "*" not in pattern:
                raise ValueError(text)
            if there:
                warn(text)  # and no more: it may be one of several for many models


FOLLOW = " If it is in the state of an optimiser, pass the parameters: `follow=params`."


def parameters_by(follow: Any, tree: Any) -> Any:
    """What `follow` says: it is the parameters, or a function from `tree` to them."""
    is_function = callable(follow) and jtu.all_leaves([follow])
    return follow(tree) if is_function else follow


def owners_of(tree: Any, follow: Any) -> dict[Any, tuple[str, Any]]:
    """From the key path of a parameter to its name and itself.

    `follow`: the parameters, or a function from `tree` to them. A parameter that is in
    `tree` has the name that it has there.
    """
    params = parameters_by(follow, tree)
    paths = {id(x): path for path, x in jtu.tree_leaves_with_path(tree)}
    return {
        path: (plain_path(paths.get(id(x), path)), x)
        for path, x in jtu.tree_leaves_with_path(params)
        if is_array_or_struct(x)
    }


def owner_of(path: tuple[Any, ...], owners: dict[Any, tuple[str, Any]]) -> Any:
    """The name of the parameter that `path` belongs to, the parameter, and the rest of
    `path` below its own; or `None`.

    An attribute is not below a parameter: in `[0].count`, `[0]` is part of an optimiser.
    """
    for stop in range(len(path), 0, -1):
        below = path[stop:]
        if any(isinstance(key, jtu.GetAttrKey) for key in below):
            return None
        for start in range(stop):
            if path[start:stop] in owners:
                return *owners[path[start:stop]], below
    return None


def following(
    option: str, spec: PartitionSpec, owner: tuple[str, Any, Any], name: str, x: Any
) -> PartitionSpec:
    """The spec of `x`, in the state of an optimiser, if that of its parameter is `spec`.

    Raises `ValueError` if the shapes do not tell it.
    """
    like, shape, below = owner[1].shape, x.shape, owner[2]
    parts = (*spec, *[None] * (len(like) - len(spec)))
    extra = max(len(shape) - len(like), 0)
    # A list in place of a parameter has an array for each axis: in `optax.sm3` a vector,
    # in Shampoo a matrix.
    for axis, size in enumerate(like):
        if below == (jtu.SequenceKey(axis),) and {*shape} == {size}:
            return PartitionSpec(parts[axis], *[None] * (len(shape) - 1))
    if shape == like:
        return spec
    if math.prod(shape) == 1:
        return PartitionSpec()
    # `optax.adafactor` has means over the largest axis, and over the second largest one.
    order = sorted(range(len(like)), key=lambda i: like[i])
    lost = order[-1:] * (".v_row" in name) + order[-2:-1] * (".v_col" in name)
    found = {
        PartitionSpec(*[None] * extra, *(parts[i] for i in axes))
        for axes in itertools.combinations(range(len(like)), len(shape) - extra)
        if tuple(like[i] for i in axes) == shape[extra:] and not {*lost} & {*axes}
    }
    if len(found) == 1:
        return found.pop()
    raise ValueError(
        f"`{option}` gives {spec} for `{owner[0]}` ({describe_array(owner[1])}). The "
        f"shapes do not tell how `{name}` ({describe_array(x)}) follows it. Put a rule for "
        f"that first. To replicate it: `({name!r}, PartitionSpec())`."
    )
