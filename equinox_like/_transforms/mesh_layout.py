"""`Layout`: how a model, the state of its optimiser and its batches lie on a mesh.

Parameters are kept in one layout, `params`, and used in another one, `compute`. `gather`
goes from the first to the second, and its derivative back. A layout is part of a trace by
a `Context`, which `Layout.jit` enters while it traces, with the mesh: at each call they
would take as long as the call itself.
"""

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._call_path import call_rebuilt
from .._compat.compiled import least_memory
from .._compat.tracing import at_top_level
from .._core.base import frames_hidden, require_callable
from .._core.context import Context
from .._core.sharding import (
    axes_of,
    check_fits,
    constrain as constrain_array,
    require_axis,
    require_mesh,
)
from .._errors import did_you_mean
from .._jit import filter_jit
from .._jit.report import table_lines
from .._module.fields import field
from .._tree.arrays import describe_array, with_key, without_key
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import Nodes, leaf_paths, listed, path_str, plain_path
from .._tree.partitioning import filter as filter_tree
from .._tree.paths import matches, near_paths
from .._tree.require import named_arguments
from .._typing import NOT_GIVEN
from .arguments import WithOptions, applied
from .optimiser_state import following, owner_of, parameters_of
from .shard import check_alike_everywhere, filter_shard
from .shard_map import JittedMap
from .trace import filter_eval_shape

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")  # for jedi, as in `_jit/jit.py`
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
        rules: Iterable[tuple[str, str | PartitionSpec]] = (),
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
            For what is not a parameter it is that in the whole tree, and an array of the
            state of an optimiser has both.
        - `params`: from the name of an axis to the axis of the mesh that splits it, or to a
            tuple of them, where parameters and the state of the optimiser are kept. A name
            that is only in the other table is not split.
        - `compute`: likewise, while parameters are used; and for activations, see
            [`equinox_like.constrain`][]. `"batch"` is the leading axis of the batches: by
            default the first axis of the mesh splits it.

        **Raises:**

        `ValueError` if a name or an axis of the mesh is not known, or if a rule follows
        `"**"`. `TypeError` for what is not a rule or a mesh.
        """
        sizes = _sizes(mesh)
        compute = {"batch": next(iter(sizes), None), **(compute or {})}
        explicit = axes_of(compute["batch"])
        self.mesh = _made_mesh(mesh, sizes, explicit) if isinstance(mesh, str) else mesh
        self.params = self._table("params", params or {})
        self.compute = self._table("compute", compute)
        self.rules = tuple(map(self._checked, rules))
        patterns = [pattern for pattern, _ in self.rules]
        if "**" in patterns[:-1]:
            raise ValueError(
                f"The rule for {patterns[patterns.index('**') + 1]!r} is never used: '**' "
                "before it matches every array. Put '**' last."
            )

    def __repr__(self) -> str:
        sizes = ",".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"<Layout {sizes}>"

    def _table(self, option: str, table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._split(f"`{option}[{name!r}]` is {part!r}", part)
            for name, part in table.items()
        }

    def _checked(self, rule: Any) -> tuple[str, str | PartitionSpec]:
        kinds = list(map(type, rule)) if isinstance(rule, tuple | list) else None
        if kinds not in ([str, str], [str, PartitionSpec]):
            raise TypeError(
                "Each rule must be a pair of a pattern and the names of axes, or a "
                f"`PartitionSpec`, such as `('**.weight', 'vocab embed')`; got {rule!r}."
            )
        pattern, names = rule
        option = f"rules[{pattern!r}]"
        if isinstance(names, str):
            self._check_names(option, names.split())
            return pattern, names
        says = f"`{option}` is {names}"
        return pattern, PartitionSpec(*(self._split(says, part) for part in names))

    def _split(self, says: str, part: Any) -> Any:
        """One part of a `PartitionSpec`, without axes of size 1.

        JAX forgets these in what a program returns, so that it would be traced once more.
        """
        for axis in axes_of(part):
            require_axis(says, axis, self.mesh)
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
        self, rule: Any, name: str, x: Any, depths: int, table: Mapping[str, Any]
    ) -> PartitionSpec:
        """The spec of an array by the rule for it.

        `depths`: how many of its axes come from a `Stacked` around it."""
        option, names = f"rules[{rule[0]!r}]", rule[1]
        if isinstance(names, PartitionSpec):
            spec = PartitionSpec(*[table.get("depth")] * depths, *names)
            check_fits(option, name, spec, x, mesh=self.mesh)
            return spec
        return self._spec_of(option, name, x, ["depth"] * depths + names.split(), table)

    def _spec_of(
        self, option: str, name: str, x: Any, names: list[str], table: Mapping[str, Any]
    ) -> PartitionSpec:
        if len(names) != x.ndim:
            raise ValueError(
                f"`{option}` gives `{name}` ({describe_array(x)}) the axes "
                f"{' '.join(names)!r}: {len(names)} for {x.ndim} dimensions."
            )
        spec = PartitionSpec(*map(table.get, names))
        check_fits(option, name, spec, x, mesh=self.mesh)
        return spec

    def _rule(self, *names: str) -> tuple[str, str | PartitionSpec] | None:
        """The first rule for an array that has any of these names."""
        for rule in self.rules:
            if any(matches(rule[0], name) for name in names):
                return rule
        return None

    # Where arrays are kept

    @frames_hidden
    def shardings(self, tree: Any, *, follow: Any = None) -> Any:
        """Where the arrays of a tree are kept: for `load`, or for Orbax.

        **Arguments:**

        - `tree`: parameters, or a tree of them and of the state of an optimiser, which
            follows them. `jax.ShapeDtypeStruct`s may stand for arrays.
        - `follow`: the parameters, or a function from `tree` to them. By default the first
            Module, dictionary or list of Modules like which there is one in the state of an
            optimiser, a named tuple; else the only Module, or else the whole tree.

        **Returns:**

        The tree with a `jax.sharding.NamedSharding` in place of each array, and `None` for
        other leaves.

        **Raises:**

        `ValueError`, naming the path, if a rule does not fit an array, and for a rule that
        matches nothing; or if shapes do not tell how an array of the state follows.
        """
        params = parameters_of(tree, follow, otherwise=tree)
        self._check_rules(tree, params)
        return self._kept(tree, params)

    def _kept(self, tree: Any, params: Any, others: Any = None) -> Any:
        """`others`: in place of arrays that are neither parameters nor of their state. By
        default these are kept by their own paths."""
        owners = _arrays_of(params)
        stacks = [path for path, _ in _stacks(params)]
        whole = NamedSharding(self.mesh, PartitionSpec())

        def keep(path: Any, x: Any) -> Any:
            if not is_array_or_struct(x):
                return None
            name, owner = plain_path(path), owner_of(path, owners)
            if owner is None and others is not None:
                return others
            names = [owner.name] if owner else []
            if owner is None or x is not owner.array:
                names.append(name)
            rule = self._rule(*names)
            if rule is None or (owner is None and x.ndim == 0):
                return whole
            if owner is None or not matches(rule[0], owner.name):
                return NamedSharding(
                    self.mesh, self._spec(rule, name, x, 0, self.params)
                )
            depths = _number_above(stacks, owner.path)
            spec = self._spec(rule, owner.name, owner.array, depths, self.params)
            spec = following(f"rules[{rule[0]!r}]", spec, owner, path, x)
            return NamedSharding(self.mesh, spec)

        return jtu.tree_map_with_path(keep, tree)

    def _unused_rules(self, tree: Any, params: Any) -> tuple[list[str], list[str]]:
        """The patterns that match nothing, and the paths that there are."""
        own = {id(x) for x in _arrays_of(params).values()}
        others = [p for p, x in _arrays_of(tree).items() if id(x) not in own]
        # A rule may match no more than a leaf that is `None`, as the bias of a layer is.
        there = [*leaf_paths(params), *map(plain_path, others)]
        return [
            pattern
            for pattern, _ in self.rules
            if not any(matches(pattern, path) for path in there)
        ], there

    def _check_rules(self, tree: Any, params: Any) -> None:
        unused, there = self._unused_rules(tree, params)
        if unused and there:
            raise ValueError(
                f"The rule for {unused[0]!r} matches nothing. The paths are "
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

    @frames_hidden
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
        if at_top_level() and jax.process_count() > 1:
            named = {"rules": repr((self.rules, self.params)), "make": make}
            if inspect.isfunction(make):
                named |= inspect.getclosurevars(make).nonlocals
            named |= dict(named_arguments(make, args, kwargs))
            check_alike_everywhere(self.mesh, named)
        kept = self.shardings(filter_eval_shape(make, *args, **kwargs), follow=follow)
        device = self.mesh.devices.flat[0]
        # Within another `jit`, the outermost one decides the options.
        options = least_memory(device.platform) if at_top_level() else None
        jitted = filter_jit(make, out_shardings=kept, compiler_options=options)
        # JAX ignores the `out_shardings` of a `jit` within another one if the axes of the
        # mesh in use are explicit, and under `jax.disable_jit`.
        return filter_shard(jitted(*args, **kwargs), kept)

    @frames_hidden
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
        params = parameters_of(tree, follow, otherwise=tree)
        unused, _ = self._unused_rules(tree, params)
        return LayoutReport(self, self._kept(tree, params), tree, unused)

    # Within a step

    @typing.overload
    def jit(
        self, fun: Callable[_P, _T], /, *, follow: Any = None, **options: Any
    ) -> JittedMap[_P, _T]: ...
    @typing.overload
    def jit(
        self, /, *, follow: Any = None, **options: Any
    ) -> Callable[[Callable[_P, _T]], JittedMap[_P, _T]]: ...
    def jit(self, fun: _F = NOT_GIVEN, /, *, follow: Any = None, **options: Any) -> _F:
        """[`equinox_like.filter_jit`][] of a function that is traced within this layout.

        In it [`equinox_like.gather`][] and [`equinox_like.constrain`][] have an effect. An
        output that has the structure and the shapes of an argument is kept as that is: of
        arguments, the parameters and their state.

        **Arguments:**

        - `fun`: the function. Without it a decorator is returned.
        - `follow`: as for `shardings`, a function from the arguments of `fun`.
        - `**options`: those of [`equinox_like.filter_jit`][], such as `donate`.

        **Raises:**

        When called in several processes, `ValueError`, naming the path, for a NumPy array
        or an array of this process alone: make them by `batch`.
        """
        if fun is NOT_GIVEN:
            return typing.cast(Any, lambda fun: self.jit(fun, follow=follow, **options))
        donate = options.pop("donate", "none")
        is_of_several = getattr(self.mesh, "is_multi_process", False)
        kind: Any = _JittedByAll if is_of_several else JittedMap
        held = applied(_InLayout, fun, _layout=self, _follow=follow)
        return kind(held, donate, options)

    def _pinned(self, out: Any, arguments: Iterable[Any], params: Any) -> Any:
        """The output of a step, where what replaces an argument is kept as that is.

        The compiler places what is not in the layout, such as a batch."""
        known = {}
        for argument in arguments:
            kept = self._kept(argument, params, others=False)
            for x, where in zip(_containers(argument), _containers(kept), strict=True):
                if not is_array(x):
                    known.setdefault(_shape_of(x), jtu.tree_leaves(where))

        def pin(x: Any) -> Any:
            left = iter(known.get(_shape_of(x), ()))

            def pin_array(a: Any) -> Any:
                where = next(left, False) if is_array(a) else False
                return constrain_array("rules", "output", a, where) if where else a

            return jtu.tree_map(pin_array, x)

        return jtu.tree_map(pin, out, is_leaf=lambda x: _shape_of(x) in known)

    def _gathered(self, tree: Any) -> Any:
        stacks = [path for path, _ in _stacks(tree)]

        def move(path: Any, x: Any) -> Any:
            name = plain_path(path)
            rule = self._rule(name)
            if not is_array(x) or rule is None or _number_above(stacks, path):
                return x
            new = self._spec(rule, name, x, 0, self.compute)
            if new == self._spec(rule, name, x, 0, self.params):
                return x
            where = NamedSharding(self.mesh, new)
            return constrain_array(f"rules[{rule[0]!r}]", name, x, where)

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
        return constrain_array("constrain", name, x, NamedSharding(layout.mesh, spec))

    return jtu.tree_map_with_path(split, x)


def gathers_again(policy: Any) -> Any:
    """The policy of `jax.checkpoint` for the step of a scan over layers that are gathered.

    Without one of the user's, all is kept but what was gathered: else the weights of all
    layers would be kept whole for the backward pass.
    """
    is_ours = policy is None and _current.value is not None
    return _all_but_gathered if is_ours else policy


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("sharding_constraint", "reshard", "name")


class _InLayout(WithOptions[..., Any]):
    """A function that is traced within a layout."""

    _transformation_ = "Layout.jit"

    _layout: Layout = field(static=True)
    _follow: Any = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        layout, follow = self._layout, self._follow
        abstract = layout.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(abstract), _current(layout):
            out = call_rebuilt(self._held_, *args, **kwargs)
            followed = None if follow is None else follow(*args, **kwargs)
            params = parameters_of((args, kwargs), followed, otherwise=None)
            return layout._pinned(out, (*args, *kwargs.values()), params)


class _JittedByAll(JittedMap[..., Any]):
    """The result of `Layout.jit` if there are several processes."""

    @frames_hidden
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_of_one_process, jtu.tree_leaves((args, kwargs)))):
            raise _not_global(named_arguments(self, args, kwargs))
        return super().__call__(*args, **kwargs)


def _is_of_one_process(x: Any) -> bool:
    return is_array(x) and x.ndim > 0 and getattr(x, "is_fully_addressable", True)


def _not_global(named: Iterable[tuple[str, Any]]) -> ValueError:
    at = next(
        f"`{path_str(path, name)}` ({describe_array(x)})"
        for name, tree in named
        for path, x in jtu.tree_leaves_with_path(tree)
        if _is_of_one_process(x)
    )
    return ValueError(
        f"{at} is an array of this process alone, and the step is one of all processes. "
        "Make a batch of the rows of each one by `layout.batch(rows)`, and a model by "
        "`layout.init`."
    )


class LayoutReport:
    """What each device holds of a tree: `str` is a table, which a notebook shows.

    It has `bytes_of_each_device`; `whole`, the paths of the arrays of which each device has
    all; and `unused`, the patterns of rules that match nothing.
    """

    def __init__(self, layout: Layout, kept: Any, tree: Any, unused: list[str]):
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
        self.unused = unused
        lines = [repr(layout), *table_lines(rows, {3})]
        lines.append(f"each device: {self.bytes_of_each_device:,} bytes")
        if self.unused:
            lines.append(f"rules that match nothing: {', '.join(self.unused)}")
        self._text = "\n".join(lines)

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def _sizes(mesh: Mesh | str) -> dict[Any, int]:
    """The sizes of the axes of a mesh, which may be written as `"data=2,model=4"`."""
    if not isinstance(mesh, str):
        require_mesh(mesh, "Layout")
        return dict(mesh.shape)
    sizes = {}
    for part in mesh.split(","):
        name, _, size = map(str.strip, part.partition("="))
        if not name or not re.fullmatch(r"-1|[1-9]\d*", size):
            raise ValueError(
                f"A mesh is written as 'data=2,model=4', -1 for the rest; got {mesh!r}."
            )
        sizes[name] = int(size)
    return sizes


def _made_mesh(text: str, sizes: dict[str, int], explicit: Sequence[Any]) -> Mesh:
    number = jax.device_count()
    rest = number // math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != number:
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


def _arrays_of(tree: Any) -> dict[Any, Any]:
    """From the key path of each array to it."""
    return {p: x for p, x in jtu.tree_leaves_with_path(tree) if is_array_or_struct(x)}


def _number_above(nodes: Iterable[tuple[Any, ...]], path: tuple[Any, ...]) -> int:
    """How many of these nodes, given by their paths, `path` is below."""
    return sum(path[: len(node)] == node for node in nodes)


def _containers(tree: Any) -> list[Any]:
    """Tuples, lists and dictionaries, and what is in them: what an output may replace."""
    return Nodes(tree, is_leaf=lambda x: type(x) not in (tuple, list, dict)).all


def _shape_of(tree: Any) -> Any:
    arrays = filter_tree(tree, is_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)
