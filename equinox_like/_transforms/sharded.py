"""`shardings` by rules, and `make_sharded`, which builds a tree directly in its shards.

A model that is built first and sharded afterwards must fit on one device. Under
`jax.jit` with `out_shardings` it need not: the compiler partitions the computation,
random numbers included, and each device computes its own shard.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._compat.scheduler import least_memory
from .._compat.tracing import at_top_level
from .._core.base import frames_hidden, jit_is_disabled, require_callable
from .._core.sharding import refuse_misfit, require_mesh
from .._jit import filter_jit
from .._tree.arrays import describe_array
from .._tree.filters import is_array_or_struct
from .._tree.glob import matches
from .._tree.nodes import leaf_paths, listed, plain_path
from .shard import filter_shard
from .trace import filter_eval_shape

_T = TypeVar("_T")


def shardings(tree: Any, mesh: Mesh, rules: Sequence[tuple[str, PartitionSpec]]) -> Any:
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

    **Returns:**

    A tree of the structure of `tree`, with a `jax.sharding.NamedSharding` for each array
    and `None` for other leaves.

    **Raises:**

    `ValueError`, naming the path, if no rule matches an array, or if its spec is
    invalid: it names an axis that the mesh does not have, or one axis twice, it has
    more entries than the array has dimensions, or a dimension is not divisible. Also if a
    pattern without `*` matches no leaf, or a rule follows `"**"`. `TypeError` if a rule
    is not such a pair, or `mesh` is not a mesh.

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
    _check_rules(rules, tree)

    def choose(path, leaf):
        if not is_array_or_struct(leaf):
            return None
        name = plain_path(path)
        found = next((rule for rule in rules if matches(rule[0], name)), None)
        if found is None:
            raise ValueError(
                f"No rule matches `{name}` ({describe_array(leaf)}). Add one, or end "
                'the rules with `("**", PartitionSpec())`, which replicates the rest '
                "on each device."
            )
        return _named(mesh, found, name, leaf)

    return jtu.tree_map_with_path(choose, tree)


@frames_hidden
def make_sharded(
    make: Callable[..., _T],
    /,
    *args: Any,
    mesh: Mesh,
    rules: Sequence[tuple[str, PartitionSpec]],
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
    - `mesh`, `rules`: as for [`equinox_like.shardings`][].

    **Returns:**

    What `make` returns. Arrays are sharded, NumPy arrays among them; other leaves are
    returned unchanged.

    **Raises:**

    As [`equinox_like.shardings`][], before anything is computed.

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
    shapes = filter_eval_shape(make, *args, **kwargs)
    out_shardings = shardings(shapes, mesh, rules)
    if not at_top_level() or jit_is_disabled():
        # The outermost `jit` decides the compiler options. JAX ignores the `out_shardings`
        # of a `jit` within another one if the axes of the mesh in use are explicit, and
        # under `jax.disable_jit`.
        made = filter_jit(make, out_shardings=out_shardings)(*args, **kwargs)
        return filter_shard(made, out_shardings)
    options = least_memory(mesh.devices.flat[0].platform)
    jitted = filter_jit(make, out_shardings=out_shardings, compiler_options=options)
    return jitted(*args, **kwargs)


def _check_rules(rules: list[Any], tree: Any) -> None:
    for rule in rules:
        if not isinstance(rule, tuple | list) or list(map(type, rule)) != [
            str,
            PartitionSpec,
        ]:
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
    # A pattern with `*` may be one of several for many models. One without it names a
    # leaf, which may be `None`, as the bias of a layer is.
    exact = {pattern.removeprefix(".") for pattern in patterns if "*" not in pattern}
    if exact:
        there = leaf_paths(tree)
        for pattern in sorted(exact.difference(there)):
            raise ValueError(
                f"The rule for {pattern!r} matches no leaf. The leaves are "
                f"{listed(there, 5)}."
            )


def _named(
    mesh: Mesh, rule: tuple[str, PartitionSpec], name: str, leaf: Any
) -> NamedSharding:
    pattern, spec = rule
    refuse_misfit(f"rules[{pattern!r}]", name, spec, leaf, mesh=mesh)
    return NamedSharding(mesh, spec)
