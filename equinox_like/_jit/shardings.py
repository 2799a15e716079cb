"""`in_shardings` and `out_shardings` of `filter_jit`, from prefix trees to arrays.

JAX sees flat lists of arrays, so it gets a flat list of shardings for the arguments.
The structure of the output is not known before the trace. So the traced function
returns one list of arrays for each leaf of the prefix tree, and JAX applies one
sharding to each list.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._compat.messages import tells_of_missing_mesh, tells_of_other_sharding
from .._core.sharding import (
    constrain,
    in_memory,
    is_sharding,
    memory_of,
    refuse_memory,
    refuse_misfit,
    refuse_other,
)
from .._errors import did_you_mean
from .._tree.arrays import describe_array, is_concrete
from .._tree.filters import is_array, is_none
from .._tree.match import spread
from .._tree.nodes import describe_node, path_str
from .._tree.splitting import STATIC, Skeleton
from .._tree.strict import strict_key
from .layout import Layout, add_bounded, chained, groups_of

OPTIONS: Final = ("in_shardings", "out_shardings")
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Shardings:
    """The `in_shardings` and `out_shardings` of one function. Compared by value."""

    def __init__(self, given: dict[str, Any], name: str, signature: inspect.Signature):
        """`given` are keyword arguments of `filter_jit`; only `OPTIONS` are read."""
        given = {key: given[key] for key in OPTIONS if key in given}
        self._of_inputs = given.get("in_shardings")
        self._of_outputs = given.get("out_shardings")
        kinds = {p.name: p.kind for p in signature.parameters.values()}
        self._positional = [n for n, kind in kinds.items() if kind in _POSITIONAL]
        self._by_kind = {kind: n for n, kind in kinds.items()}
        self._check(name, list(kinds))
        leaves, treedef = jtu.tree_flatten(given, is_leaf=is_none)
        self._key = treedef, strict_key(leaves)

    def __eq__(self, other: object) -> bool:
        return type(other) is Shardings and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def jit(
        self,
        traced: Callable[..., Any],
        layout: Layout,
        skeleton: Skeleton,
        **options: Any,
    ) -> Any:
        """`jax.jit` of a function from groups of arrays to `take_apart(...)`."""
        if self._of_outputs is not None:
            # `take_apart` applies the functions; a `None` leaves the choice to JAX.
            specs = [s if is_sharding(s) else None for s in self._output_leaves()]
            one_for_each = (tuple(specs), None)
            options["out_shardings"] = one_for_each if self.groups_outputs else specs[0]
        if self._of_inputs is None:
            return jax.jit(traced, **options)
        found = zip(skeleton.labels, self._inputs(layout, skeleton), strict=True)
        runs = groups_of(found)
        specs = tuple(tuple(s for _, s in run) for _, run in runs)
        return _Sharded(traced, options, specs, layout)

    def take_apart(self, out: Any, outputs: Any) -> Any:
        """What to return to JAX for an output: its arrays, and its number.

        The arrays are grouped by sharding, if there is more than one sharding.
        """
        named, treedef = jtu.tree_flatten_with_path(out)
        leaves = [leaf for _, leaf in named]
        numbers = []  # for each array, that of its sharding
        spread_out = spread(self._of_outputs, out, "out_shardings", "out")
        for i, (number, spec) in enumerate(spread_out):
            path, x = named[i]
            if not is_array(x):
                continue
            numbers.append(number)
            name = path_str(path, "out")
            chosen = _chosen("out_shardings", name, spec, x)
            if chosen is not None:
                refuse_misfit("out_shardings", name, chosen, x)
                # JAX ignores the memory of the `out_shardings` of an inner `jit`.
                leaves[i] = x = in_memory(x, chosen)
                if callable(spec):
                    leaves[i] = constrain("out_shardings", name, x, chosen)
        arrays, number = outputs.take_apart(treedef.unflatten(leaves))
        if not self.groups_outputs:
            return arrays, {number: ()}
        # Leaves below one prefix leaf are consecutive, so concatenated groups are in
        # order.
        groups: list[list[Any]] = [[] for _ in self._output_leaves()]
        for n, x in zip(numbers, arrays, strict=True):
            groups[n].append(x)
        return tuple(groups), {number: ()}

    @property
    def groups_outputs(self) -> bool:
        """Whether the output's arrays are returned in one group for each sharding."""
        return not _is_leaf(self._of_outputs)

    def _output_leaves(self) -> list[Any]:
        return jtu.tree_leaves(self._of_outputs, is_leaf=is_none)

    def _check(self, name: str, parameters: list[str]) -> None:
        given, size = self._of_inputs, len(self._positional)
        if isinstance(given, dict):
            unknown = [key for key in given if key not in parameters]
            if unknown:
                raise ValueError(
                    f"`in_shardings` names {unknown}, but the parameters of `{name}` are "
                    f"{parameters}.{did_you_mean(unknown[0], parameters, '{!r}')}"
                )
        elif isinstance(given, tuple | list):
            if len(given) > size and _VAR_POSITIONAL not in self._by_kind:
                raise ValueError(
                    f"`in_shardings` has {len(given)} entries, but `{name}` takes "
                    f"{size} positional arguments."
                )
        elif not _is_leaf(given):
            raise ValueError(
                "`in_shardings` must be one sharding for all arguments, a tuple with "
                "an entry for each positional argument, or a dictionary from "
                f"parameter names to shardings; got {describe_node(given)}."
            )

    def _inputs(self, layout: Layout, skeleton: Skeleton) -> Iterator[Any]:
        """The entry of `in_shardings` for each leaf of a call, in canonical order."""
        fun, args, kwargs = skeleton.treedef.children()
        keys = [None, *range(len(args.children())), *kwargs.node_data()[1]]
        treedefs = [fun, *args.children(), *kwargs.children()]
        labels = iter(skeleton.labels)
        for key, treedef, (name, size) in zip(
            keys, treedefs, layout.arguments, strict=True
        ):
            # The arrays of the callable itself are not arguments.
            entry = None if key is None else self._for_argument(key)
            statics = [next(labels) is STATIC for _ in range(size)]
            if entry is _NOTHING:
                if not all(statics):
                    raise ValueError(
                        "`in_shardings` is a tuple without an entry for the positional "
                        f"argument `{name}`."
                    )
                entry = None
            if _is_leaf(entry):
                yield from [entry] * size
            else:
                tree = treedef.unflatten(range(size))
                yield from (
                    spec for _, spec in spread(entry, tree, "in_shardings", name)
                )

    def _for_argument(self, key: int | str) -> Any:
        """The entry for an argument, given its position or its keyword."""
        given, size = self._of_inputs, len(self._positional)
        if isinstance(given, tuple | list):
            if isinstance(key, str):
                return None
            return given[key] if key < len(given) else _NOTHING
        if not isinstance(given, dict):
            return given
        if isinstance(key, str):
            return given[key] if key in given else self._rest(_VAR_KEYWORD, key)
        if key < size:
            return given.get(self._positional[key])
        return self._rest(_VAR_POSITIONAL, key - size)

    def _rest(self, kind: Any, key: Any) -> Any:
        """The entry for one of `*args` or `**kwargs`."""
        given: Any = self._of_inputs
        entry = given.get(self._by_kind.get(kind))
        if isinstance(entry, dict):
            return entry.get(key)
        if isinstance(entry, tuple | list):
            return entry[key] if key < len(entry) else None
        return entry


_NOTHING = object()
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


class _Sharded:
    """A compiled function with a sharding, or a function returning one, for each array.

    It holds one `jax.jit`-ed function for each choice of shardings.
    """

    def __init__(
        self,
        traced: Callable[..., Any],
        options: dict[str, Any],
        specs: tuple[tuple[Any, ...], ...],
        layout: Layout,
    ):
        self._traced = traced
        self._options = options
        self._specs = specs
        self._layout = layout
        self._jitted: dict[Any, Any] = {}
        has_functions = any(callable(spec) for group in specs for spec in group)
        self._only = None if has_functions else self._make(specs)

    def __call__(self, *groups: Any) -> Any:
        return self._apply(lambda jitted: jitted, groups)

    def trace(self, *groups: Any) -> Any:
        return self._apply(lambda jitted: jitted.trace, groups)

    def lower(self, *groups: Any) -> Any:
        return self._apply(lambda jitted: jitted.lower, groups)

    def eval_shape(self, *groups: Any) -> Any:
        return self._apply(lambda jitted: jitted.eval_shape, groups)

    def clear_cache(self) -> None:
        for jitted in [*self._jitted.values(), self._only]:
            if jitted is not None:
                jitted.clear_cache()

    def _apply(self, stage: Callable[[Any], Any], groups: Any) -> Any:
        if self._only is not None:
            specs, jitted = self._specs, self._only
        else:
            specs = self._choose(groups)
            jitted = self._jitted.get(specs)
            if jitted is None:
                jitted = self._make(specs)
                add_bounded(self._jitted, specs, jitted)
        try:
            return stage(jitted)(*groups)
        except Exception as e:
            self._raise_clearer(e, specs, groups)
            raise

    def _make(self, specs: Any) -> Any:
        fun = self._traced
        named = list(zip(self._layout.data_names, chained(specs), strict=True))
        for name, spec in named:
            refuse_other("in_shardings", name, spec)

        @functools.wraps(fun)
        def traced(*groups):
            # JAX ignores the memory for a NumPy array, and within another trace.
            for (name, spec), x in zip(named, chained(groups), strict=True):
                if spec is not None and memory_of(spec) != "unpinned_host":
                    refuse_memory("in_shardings", name, spec, x)
            return fun(*groups)

        return jax.jit(traced, in_shardings=specs, **self._options)

    def _choose(self, groups: Any) -> Any:
        names = iter(self._layout.data_names)
        return tuple(
            tuple(
                _chosen("in_shardings", next(names), spec, x)
                for x, spec in zip(group, specs, strict=True)
            )
            for group, specs in zip(groups, self._specs, strict=True)
        )

    def _raise_clearer(self, error: Exception, specs: Any, groups: Any) -> None:
        """Raises an error that names the argument, because JAX's may not."""
        mismatch = tells_of_other_sharding(error)
        without_mesh = tells_of_missing_mesh(error)
        if not isinstance(error, ValueError) and not without_mesh:
            return
        named = zip(
            self._layout.data_names, chained(specs), chained(groups), strict=True
        )
        for name, spec, x in named:
            if without_mesh and isinstance(spec, PartitionSpec):
                raise ValueError(
                    f"`in_shardings` gives {spec} for `{name}`, but no mesh is in use: "
                    "call the function under `jax.set_mesh(mesh)`, or give "
                    "`jax.sharding.NamedSharding(mesh, spec)`."
                ) from error
            refuse_misfit("in_shardings", name, spec, x, error)
            sharding = _with_mesh(spec)
            if not mismatch or not is_concrete(x) or not x.committed:
                continue
            if sharding is not None and not x.sharding.is_equivalent_to(
                sharding, x.ndim
            ):
                raise ValueError(
                    f"`{name}` ({describe_array(x)}) is sharded by {x.sharding}, but "
                    f"`in_shardings` says {spec}. Move it there with `jax.device_put`, "
                    "or let JAX choose its sharding with `None`."
                ) from error


def _is_leaf(spec: Any) -> bool:
    return spec is None or jtu.all_leaves([spec])


def _chosen(option: str, name: str, spec: Any, x: Any) -> Any:
    """The sharding for the array `x`: `spec`, or `spec(x)` if it is a function."""
    chosen = spec(x) if callable(spec) else spec
    refuse_other(option, name, chosen)
    return chosen


def _with_mesh(spec: Any) -> Any:
    """`spec` as a `Sharding`; a `PartitionSpec` is used with the current mesh."""
    if isinstance(spec, PartitionSpec):
        return NamedSharding(jax.sharding.get_mesh(), spec)
    return spec if isinstance(spec, Sharding) else None
