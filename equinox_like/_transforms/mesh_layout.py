"""`Layout`: how a model, the state of its optimiser and its batches lie on a mesh.

Parameters are kept in one layout, `params`, and used in another one, `compute`. `gather`
goes from the first to the second, and its derivative back. A layout is part of a trace by
a `Context`, which `Layout.jit` enters while it traces, with the mesh: at each call they
would take as long as the call itself.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._call_path import call_rebuilt
from .._core.base import frames_hidden, require_callable
from .._core.context import Context
from .._core.sharding import (
    axes_of,
    check_fits,
    constrain as constrain_array,
    require_axis,
)
from .._errors import did_you_mean
from .._jit.report import table_lines
from .._module.fields import field
from .._module.module import Module
from .._tree.arrays import describe_array, with_key, without_key
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import listed, path_str, plain_path
from .._tree.partitioning import filter as filter_tree
from .._tree.paths import matches, near_paths
from .._tree.require import named_arguments
from .._typing import NOT_GIVEN
from .arguments import WithOptions, applied
from .shard import (
    build_sharded,
    check_alike_everywhere,
    following,
    owner_of,
    owners_of,
    parameters_by,
)
from .shard_map import JittedMap

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Tree = TypeVar("_Tree")
_UNNAMED: Final = "."


class Layout:
    """How a model, the state of its optimiser and its batches lie on a mesh of devices.

    Patterns give the axes of arrays names, and two tables say over which axes of the mesh
    the names are split: while arrays are kept (`params`), and while they are used
    (`compute`).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp
        import optax

        optimiser = optax.adam(1e-2)
        layout = eqx.Layout(
            "data=-1",
            [("**.layers[0].weight", "hidden ."), ("**.layers[1].weight", ". hidden")],
            params={"hidden": "data"},  # a part of the weights on each device
            compute={"batch": "data"},  # whole weights for a part of the batch
        )

        def make(key):
            model = eqx.nn.MLP(2, 1, 64, 1, key=key)
            return model, optimiser.init(eqx.filter(model, eqx.trainable))

        def loss(model, x, y):
            return jnp.mean((jax.vmap(eqx.gather(model))(x) - y) ** 2)

        @layout.jit(donate=("model", "state"))
        def step(model, state, x, y):
            value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
            updates, state = optimiser.update(grads, state)
            return eqx.apply_updates(model, updates), state, value

        model, state = layout.init(make, jax.random.key(0))
        x, y = layout.batch((jnp.ones((8, 2)), jnp.ones((8, 1))))
        model, state, value = step(model, state, x, y)
        print(layout.report((model, state)))
        ```
    """

    def __init__(
        self,
        mesh: Mesh | str,
        rules: Sequence[tuple[str, str | PartitionSpec]] = (),
        *,
        params: Mapping[str, Any] | None = None,
        compute: Mapping[str, Any] | None = None,
    ):
        """**Arguments:**

        - `mesh`: the sizes of its axes, as `"data=2,model=4"`, of which one may be `-1` for
            the rest of the devices; or a `jax.sharding.Mesh`. With a string, the axes that
            split the batch are explicit, so that it stays split, and the others automatic.
        - `rules`: pairs of a pattern for the paths of parameters and a name for each of
            their axes, as `("**.embedding.weight", "vocab embed")`, `"."` for none. Or a
            `PartitionSpec`, in both layouts. The first pattern that matches applies. Arrays
            that none matches are whole on each device. A path is that within the model;
            within the layers of an [`equinox_like.nn.Stacked`][] patterns must also match
            below them, and the axis of the layers is not counted: it has the name `depth`.
        - `params`: from the name of an axis to the axis of the mesh that splits it, or to a
            tuple of them, where parameters and the state of the optimiser are kept. A name
            that is only in the other table is not split.
        - `compute`: likewise, while parameters are used; and for activations, see
            [`equinox_like.constrain`][]. `"batch"` is the leading axis of the batches: by
            default the first axis of the mesh splits it.

        **Raises:**

        `ValueError` if a name or an axis of the mesh is not known.
        """
        if compute is None or "batch" not in compute:
            axes = [*_sizes(mesh)] if isinstance(mesh, str) else mesh.axis_names
            compute = {"batch": axes[0], **(compute or {})}
        self.params = dict(params or {})
        self.compute = dict(compute)
        explicit = axes_of(self.compute["batch"])
        self.mesh = _made_mesh(mesh, explicit) if isinstance(mesh, str) else mesh
        self.rules = tuple(rules)
        for table in ("params", "compute"):
            for name, part in getattr(self, table).items():
                for axis in axes_of(part):
                    require_axis(f"`{table}[{name!r}]` is {part!r}", axis, self.mesh)
        for pattern, names in self.rules:
            if isinstance(names, str):
                self._check_names(f"rules[{pattern!r}]", names.split())
        # JAX forgets axes of size 1 in what a program returns, so that it would be traced
        # once more.
        for table in self.params, self.compute:
            table.update((name, self._split(part)) for name, part in table.items())

    def __repr__(self) -> str:
        sizes = ",".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"<Layout {sizes}>"

    def _split(self, part: Any) -> Any:
        """One part of a `PartitionSpec`, without axes of size 1."""
        axes = tuple(axis for axis in axes_of(part) if self.mesh.shape[axis] > 1)
        return axes[0] if len(axes) == 1 else axes or None

    def _check_names(self, option: str, names: Sequence[str]) -> None:
        known = {*self.params, *self.compute, "depth"}
        for name in names:
            if name != _UNNAMED and name not in known:
                raise ValueError(
                    f"`{option}` names the axis {name!r}, which is in neither `params` nor "
                    f"`compute`. Names: {', '.join(sorted(known))}; `.` for an axis "
                    f"without one.{did_you_mean(name, known, '`{}`')}"
                )

    def _spec(
        self, path: Sequence[Any], x: Any, depths: int, table: Mapping[str, Any]
    ) -> tuple[str, PartitionSpec]:
        """The option that says so, and the spec of a parameter in a layout.

        `depths`: how many of its axes come from a `Stacked` around it."""
        name = plain_path(path)
        pattern, names = self._rule(name) or ("", PartitionSpec())
        option = f"rules[{pattern!r}]"
        if isinstance(names, PartitionSpec):
            spec = PartitionSpec(*[None] * depths, *names)
        else:
            spec = self._spec_of(
                option, name, x, ["depth"] * depths + names.split(), table
            )
        check_fits(option, name, spec, x, mesh=self.mesh)
        return option, spec

    def _spec_of(
        self, option: str, name: str, x: Any, names: list[str], table: Mapping[str, Any]
    ) -> PartitionSpec:
        if len(names) != x.ndim:
            raise ValueError(
                f"`{option}` gives `{name}` ({describe_array(x)}) the axes "
                f"{' '.join(names)!r}: {len(names)} for {x.ndim} dimensions."
            )
        return PartitionSpec(*map(table.get, names))

    def _rule(self, name: str) -> tuple[str, str | PartitionSpec] | None:
        return next((rule for rule in self.rules if matches(rule[0], name)), None)

    # Where arrays are kept

    def shardings(self, tree: Any, *, follow: Any = None) -> Any:
        """Where the arrays of a tree are kept: for `load`, or for Orbax.

        **Arguments:**

        - `tree`: parameters, or a tree of them and of the state of an optimiser, which
            follows them. `jax.ShapeDtypeStruct`s may stand for arrays.
        - `follow`: the parameters in `tree`, or a function from it to them. By default the
            first Module of a class of which there is also one in the state of an optimiser
            (a named tuple); and the whole tree if there is none.

        **Returns:**

        The tree with a `jax.sharding.NamedSharding` in place of each array, and `None` for
        other leaves.

        **Raises:**

        `ValueError`, naming the path, if a rule does not fit an array, and for a rule that
        matches no parameter.
        """
        params = _parameters_of(tree, follow)
        self._check_rules(params)
        return self._kept(tree, params)

    def _kept(self, tree: Any, params: Any) -> Any:
        owners = {
            path: (plain_path(path), x)
            for path, (_, x) in owners_of(tree, params).items()
        }
        stacks = [path for path, _ in _stacks(params)]
        specs = {
            name: self._spec(path, x, _number_above(stacks, path), self.params)
            for path, (name, x) in owners.items()
        }

        def choose(path: Any, x: Any) -> Any:
            if not is_array_or_struct(x):
                return None
            owner = owner_of(path, owners)
            if owner is None:
                return NamedSharding(self.mesh, PartitionSpec())
            option, spec = specs[owner[0]]
            spec = following(option, spec, owner, plain_path(path), x)
            return NamedSharding(self.mesh, spec)

        return jtu.tree_map_with_path(choose, tree)

    def _unused_rules(self, params: Any) -> list[str]:
        there = _array_paths(params)
        return [
            pattern
            for pattern, _ in self.rules
            if not any(matches(pattern, path) for path in there)
        ]

    def _check_rules(self, params: Any) -> None:
        if unused := self._unused_rules(params):
            there = _array_paths(params)
            raise ValueError(
                f"The rule for {unused[0]!r} matches no parameter. The paths are "
                f"{listed(there, 5)}.{near_paths(unused, there)}"
            )
        for path, stack in _stacks(params):
            for below, x in jtu.tree_leaves_with_path(stack.layers):
                whole = plain_path((*path, _LAYERS, *below))
                inner = plain_path(below)
                if is_array_or_struct(x) and self._rule(whole) != self._rule(inner):
                    raise ValueError(
                        f"`{whole}` is in a `Stacked`, whose layers see paths below it, "
                        f"and the rules differ: for the whole path {self._rule(whole)}, "
                        f"for `{inner}` {self._rule(inner)}. Begin patterns with '**.'."
                    )

    def init(
        self, make: Callable[..., _T], /, *args: Any, follow: Any = None, **kwargs: Any
    ) -> _T:
        """What `make(*args, **kwargs)` returns, built directly in its shards.

        Neither a device nor the host ever holds the whole. The values are those of
        `filter_jit(make)(*args, **kwargs)`, on any mesh.

        **Arguments:**

        - `make`: a class or a function that returns a model, or any tree with the state of
            its optimiser. It is traced twice and must return one structure.
        - `*args`, `**kwargs`: the arguments of `make`.
        - `follow`: as for `shardings`, a function.

        **Raises:**

        As `shardings`, before anything is computed. `ValueError` in all processes, naming
        the argument, if they pass different ones, such as keys.
        """
        require_callable(make, "Layout.init", "make")
        place = functools.partial(self.shardings, follow=follow)
        rules = {"rules": repr((self.rules, self.params))}
        return build_sharded(make, args, kwargs, self.mesh, rules, place)

    def batch(self, rows: _Tree) -> _Tree:
        """The rows of this process, as a part of the batch of all of them.

        **Arguments:**

        - `rows`: a tree of arrays whose leading axis is the batch, the same in each process
            in structure, shapes and dtypes. Everything else is passed on.

        **Returns:**

        The tree with arrays of all rows, split as `compute["batch"]` says.

        **Raises:**

        `ValueError`, naming the path, if the rows cannot be split over the devices of this
        process, or if processes pass different shapes.
        """
        where = NamedSharding(self.mesh, PartitionSpec(self.compute["batch"]))
        if jax.process_count() > 1:
            structs = jtu.tree_map(
                lambda x: describe_array(x) if is_array(x) else x, rows
            )
            check_alike_everywhere(self.mesh, {"rows": structs})

        def place(path: Any, x: Any) -> Any:
            if not is_array(x):
                return x
            name = f"`{path_str(path, 'rows')}` ({describe_array(x)})"
            if x.ndim == 0:
                raise ValueError(
                    f"{name} has no axis for the batch. Pass it to the step as it is."
                )
            try:
                data = np.asarray(without_key(x))
                made = jax.make_array_from_process_local_data(where, data)
            except ValueError as e:
                raise ValueError(
                    f"{name} cannot be split over {self.compute['batch']!r} of the mesh "
                    f"{dict(self.mesh.shape)}: {e}"
                ) from e
            return with_key(made, like=x)

        return jtu.tree_map_with_path(place, rows)

    def report(self, tree: Any, *, follow: Any = None) -> "LayoutReport":
        """What each device holds of a tree, as a table that prints itself.

        **Arguments:**

        - `tree`, `follow`: as for `shardings`. Rules that match nothing are in the report.
        """
        params = _parameters_of(tree, follow)
        return LayoutReport(self, self._kept(tree, params), tree, params)

    # Within a step

    def jit(self, fun: Any = NOT_GIVEN, /, **options: Any) -> Any:
        """[`equinox_like.filter_jit`][] of a function that is traced within this layout.

        In it [`equinox_like.gather`][] and [`equinox_like.constrain`][] have an effect. An
        output that has the structure and the shapes of an argument is kept as that is.

        **Arguments:**

        - `fun`: the function. Without it a decorator is returned.
        - `**options`: those of [`equinox_like.filter_jit`][], such as `donate`.

        **Raises:**

        When called in several processes, `ValueError`, naming the path, for a NumPy array
        or an array of this process alone: make them by `batch`.
        """
        if fun is NOT_GIVEN:
            return functools.partial(self.jit, **options)
        donate = options.pop("donate", "none")
        kind: Any = JittedMap if jax.process_count() == 1 else _JittedByAll
        return kind(applied(_InLayout, fun, _layout=self), donate, options)

    def _pinned(self, out: Any, arguments: Any) -> Any:
        """The output of a step, where what replaces an argument is kept as that is."""
        kept = self._kept(arguments, _parameters_of(arguments, None))
        known = {}
        for tree, where in _candidates(arguments, kept):
            known.setdefault(_shape_of(tree), jtu.tree_leaves(where))

        def pin(x: Any) -> Any:
            where = None if is_array(x) else known.get(_shape_of(x))
            if where:
                arrays, rest = jtu.tree_flatten(x)
                left = iter(where)
                return rest.unflatten(
                    [
                        constrain_array("rules", "output", a, next(left))
                        if is_array(a)
                        else a
                        for a in arrays
                    ]
                )
            if type(x) in (tuple, list):
                return type(x)(map(pin, x))
            return {k: pin(v) for k, v in x.items()} if type(x) is dict else x

        return pin(out)

    def _gathered(self, tree: Any) -> Any:
        stacks = [path for path, _ in _stacks(tree)]

        def move(path: Any, x: Any) -> Any:
            if not is_array(x) or _number_above(stacks, path):
                return x
            _, old = self._spec(path, x, 0, self.params)
            option, new = self._spec(path, x, 0, self.compute)
            if old == new:
                return x
            where = NamedSharding(self.mesh, new)
            return constrain_array(option, plain_path(path), x, where)

        return jtu.tree_map_with_path(move, tree)


_current: Final[Context[Layout | None]] = Context(None, name="layout")


def gather(tree: _Tree) -> _Tree:
    """The parameters as they are used: the parts that other devices keep are fetched.

    The derivative goes the other way: each device gets the gradient for its part. Call it
    in the loss, on the model, within [`equinox_like.Layout.jit`][]. The layers of an
    [`equinox_like.nn.Stacked`][] stay as they are kept, because that gathers one of them at
    a time. Without a layout, `tree` is returned.

    **Arguments:**

    - `tree`: a model, or any tree of parameters with the paths that the rules match.
    """
    layout = _current.value
    return tree if layout is None else layout._gathered(tree)


def constrain(x: _T, names: str) -> _T:
    """`x`, split as the layout says for axes of these names. Without a layout, `x`.

    **Arguments:**

    - `x`: an array, or a tree of arrays, within [`equinox_like.Layout.jit`][].
    - `names`: a name in the layout's `compute` for each axis, as in `"batch seq embed"`;
        `"."` for an axis that is not split.

    **Raises:**

    `ValueError` for an unknown name, another number of names than dimensions, or a size
    that the devices cannot share.
    """
    layout = _current.value
    if layout is None:
        return x
    layout._check_names("constrain", names.split())

    def split(path: Any, x: Any) -> Any:
        if not is_array(x):
            return x
        name = path_str(path, "x")
        spec = layout._spec_of("constrain", name, x, names.split(), layout.compute)
        check_fits("constrain", name, spec, x, mesh=layout.mesh)
        return constrain_array("constrain", name, x, NamedSharding(layout.mesh, spec))

    return jtu.tree_map_with_path(split, x)


def gathers_again(policy: Any) -> Any:
    """The policy of `jax.checkpoint` for the step of a scan over layers that are gathered.

    Without one of the user's, all is kept but what was gathered: else the weights of all
    layers would be kept whole for the backward pass.
    """
    return (
        _all_but_gathered if policy is None and _current.value is not None else policy
    )


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("sharding_constraint", "reshard", "name")


class _InLayout(WithOptions[..., Any]):
    """A function that is traced within a layout."""

    _transformation_ = "Layout.jit"

    _layout: Layout = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        layout = self._layout
        abstract = layout.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(abstract), _current(layout):
            out = call_rebuilt(self._held_, *args, **kwargs)
            return layout._pinned(out, (args, kwargs))


class _JittedByAll(JittedMap[..., Any]):
    """The result of `Layout.jit` if there are several processes."""

    @frames_hidden
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        _check_global(named_arguments(self, args, kwargs))
        return super().__call__(*args, **kwargs)


def _check_global(named: Iterable[tuple[str, Any]]) -> None:
    for name, tree in named:
        for path, x in jtu.tree_leaves_with_path(tree):
            if is_array(x) and x.ndim > 0 and getattr(x, "is_fully_addressable", True):
                raise ValueError(
                    f"`{path_str(path, name)}` ({describe_array(x)}) is an array of this "
                    "process alone, and the step is one of all processes. Make a batch "
                    "of the rows of each one by `layout.batch(rows)`, and a model by "
                    "`layout.init`."
                )


class LayoutReport:
    """What each device holds of a tree: `str` is a table, which a notebook shows."""

    def __init__(self, layout: Layout, kept: Any, tree: Any, params: Any):
        self.bytes_of_each_device = 0
        self.whole: list[str] = []
        rows = [("array", "shape", "split over", "bytes of a device")]
        arrays = filter_tree(tree, is_array_or_struct)
        for (path, x), sharding in zip(
            jtu.tree_leaves_with_path(arrays), jtu.tree_leaves(kept), strict=True
        ):
            name, part = plain_path(path), sharding.shard_shape(x.shape)
            held = math.prod(part) * x.dtype.itemsize
            self.bytes_of_each_device += held
            over = "whole"
            if part == tuple(x.shape):
                self.whole.append(name)
            else:
                over = ", ".join(str(axes or "-") for axes in sharding.spec)
            rows.append((name, describe_array(x), over, f"{held:,}"))
        self.unused = layout._unused_rules(params)
        lines = [repr(layout), *table_lines(rows, {3})]
        lines.append(f"each device: {self.bytes_of_each_device:,} bytes")
        if self.unused:
            lines.append(f"rules that match nothing: {', '.join(self.unused)}")
        self._text = "\n".join(lines)

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def _sizes(text: str) -> dict[str, int]:
    """The sizes of the axes of a mesh that are written as `"data=2,model=4"`."""
    sizes = {}
    for part in text.split(","):
        name, _, size = map(str.strip, part.partition("="))
        if not name or not size.removeprefix("-").isdigit():
            raise ValueError(
                f"A mesh is written as 'data=2,model=4', -1 for the rest; got {text!r}."
            )
        sizes[name] = int(size)
    return sizes


def _made_mesh(text: str, explicit: Sequence[Any]) -> Mesh:
    sizes, number = _sizes(text), jax.device_count()
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    sizes = {k: number // fixed if size == -1 else size for k, size in sizes.items()}
    if np.prod([*sizes.values()]) != number:
        raise ValueError(
            f"The mesh {text!r} is not one of all {number} devices. Write -1 for the size "
            "of one axis, or make a mesh of some devices by `jax.sharding.Mesh`."
        )
    kinds = tuple(
        AxisType.Explicit if axis in explicit else AxisType.Auto for axis in sizes
    )
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds)


_LAYERS: Final = jtu.GetAttrKey("layers")


def _is_stack(x: Any) -> bool:
    return getattr(type(x), "_gathers_its_layers_", False)


def _stacks(tree: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """The path of each `Stacked` in a tree, at any depth, and itself."""
    for path, node in jtu.tree_leaves_with_path(tree, is_leaf=_is_stack):
        if _is_stack(node):
            yield (*prefix, *path), node
            yield from _stacks(node.layers, (*prefix, *path, _LAYERS))


def _array_paths(tree: Any) -> list[str]:
    found = jtu.tree_leaves_with_path(tree)
    return [plain_path(path) for path, x in found if is_array_or_struct(x)]


def _number_above(nodes: Iterable[tuple[Any, ...]], path: tuple[Any, ...]) -> int:
    """How many of these nodes, given by their paths, `path` is below."""
    return sum(path[: len(node)] == node for node in nodes)


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _parameters_of(tree: Any, follow: Any) -> Any:
    """The parameters in a tree that has the state of their optimiser too, or the tree."""
    if follow is not None:
        return parameters_by(follow, tree)
    copies: set[type] = set()

    def see(x: Any) -> bool:
        copies.add(type(x))
        return False

    for state in jtu.tree_leaves(tree, is_leaf=_is_named_tuple):
        if _is_named_tuple(state):
            jtu.tree_leaves(state, is_leaf=see)

    def is_model(x: Any) -> bool:
        return isinstance(x, Module) and type(x) in copies

    def stops(x: Any) -> bool:
        return _is_named_tuple(x) or is_model(x)

    found = jtu.tree_leaves(tree, is_leaf=stops)
    return next(filter(is_model, found), tree)


def _candidates(tree: Any, kept: Any) -> Iterator[tuple[Any, Any]]:
    """What an output may replace: arguments, and what is in tuples, lists and dictionaries
    of them; with the shardings of each."""
    if is_array(tree):
        return
    yield tree, kept
    if type(tree) in (tuple, list):
        for x, where in zip(tree, kept, strict=True):
            yield from _candidates(x, where)
    elif type(tree) is dict:
        for key, x in tree.items():
            yield from _candidates(x, kept[key])


def _shape_of(tree: Any) -> Any:
    arrays = filter_tree(tree, is_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)
