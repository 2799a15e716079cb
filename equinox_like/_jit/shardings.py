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

from .._compat.errors import is_other_sharding_error
from .._core.sharding import (
    check_fits,
    check_is_sharding,
    check_memory,
    in_memory,
    is_sharding,
    memory_of,
)
from .._tree.arrays import describe_array, is_concrete
from .._tree.filters import is_array, is_none
from .._tree.match import spread
from .._tree.nodes import describe_node, path_str
from .._tree.partitioning import STATIC
from .._tree.strict import strict_key
from .layout import CallLayout, Leaves, chained, data_names, groups_of

OPTIONS: Final = ("in_shardings", "out_shardings")
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
# In place of an entry for a positional argument: an error if that has arrays.
_MISSING: Final = "no entry"


class Shardings:
    """The `in_shardings` and `out_shardings` of one function. Compared by value."""

    def __init__(self, given: dict[str, Any], name: str, signature: inspect.Signature):
        """`given` are keyword arguments of `filter_jit`; only `OPTIONS` are read."""
        given = {key: given[key] for key in OPTIONS if key in given}
        self._of_inputs = given.get("in_shardings")
        self._of_outputs = given.get("out_shardings")
        self._positional = [
            p.name for p in signature.parameters.values() if p.kind in _POSITIONAL
        ]
        self._check_inputs(name, signature)
        leaves, treedef = jtu.tree_flatten(given, is_leaf=is_none)
        self._key = treedef, strict_key(leaves)

    def __eq__(self, other: object) -> bool:
        return type(other) is Shardings and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def jit(self, traced: Callable[..., Any], layout: CallLayout, options: Any) -> Any:
        """`jax.jit` of a function from groups of arrays to `take_apart(...)`."""
        if self._of_outputs is not None:
            # A leaf may face something that is not an array.
            specs = [s if is_sharding(s) else None for s in self._output_leaves()]
            one_for_each = (tuple(specs), None)
            options["out_shardings"] = one_for_each if self.groups_outputs else specs[0]
        if self._of_inputs is None:
            return jax.jit(traced, **options)
        named = self._named_inputs(layout)
        for name, spec in named:
            check_is_sharding("in_shardings", name, spec)
        specs = groups_of(layout.labels, self._inputs(layout))
        options["in_shardings"] = tuple(map(tuple, specs))

        @functools.wraps(traced)
        def in_their_memory(*groups):
            # JAX ignores the memory for a NumPy array, and within another trace.
            for (name, spec), x in zip(named, chained(groups), strict=True):
                if spec is not None and memory_of(spec) != "unpinned_host":
                    check_memory("in_shardings", name, spec, x)
            return traced(*groups)

        return jax.jit(in_their_memory, **options)

    def _named_inputs(self, layout: CallLayout) -> list[tuple[str, Any]]:
        """The name of each array of a call, and its entry of `in_shardings`."""
        found = zip(layout.labels, self._inputs(layout), strict=True)
        specs = [spec for label, spec in found if label is not STATIC]
        return list(zip(data_names(layout.arguments, layout), specs, strict=True))

    def check_inputs(
        self, error: Exception, layout: CallLayout, leaves: Leaves
    ) -> None:
        """Raises an error that names the argument, because JAX's, `error`, may not."""
        if self._of_inputs is None or not isinstance(error, ValueError):
            return
        mismatch = is_other_sharding_error(error)
        named = zip(self._named_inputs(layout), layout.take_data(leaves), strict=True)
        for (name, spec), x in named:
            check_fits("in_shardings", name, spec, x, error)
            if not mismatch or not is_concrete(x) or not x.committed:
                continue
            sharding = spec
            if isinstance(spec, PartitionSpec):
                sharding = NamedSharding(jax.sharding.get_mesh(), spec)
            if isinstance(sharding, Sharding) and not x.sharding.is_equivalent_to(
                sharding, x.ndim
            ):
                raise ValueError(
                    f"`{name}` ({describe_array(x)}) is sharded by {x.sharding}, but "
                    f"`in_shardings` says {spec}. Move it there with `jax.device_put`, "
                    "or let JAX choose its sharding with `None`."
                ) from error

    def take_apart(self, out: Any, specialization: Any) -> Any:
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
            if spec is not None:
                name = path_str(path, "out")
                check_is_sharding("out_shardings", name, spec)
                check_fits("out_shardings", name, spec, x)
                # JAX ignores the memory of the `out_shardings` of an inner `jit`.
                leaves[i] = in_memory(x, spec)
        arrays, number = specialization.take_apart(treedef.unflatten(leaves))
        if not self.groups_outputs:
            return arrays, number
        # Leaves below one prefix leaf are consecutive, so concatenated groups are in
        # order.
        groups: list[list[Any]] = [[] for _ in self._output_leaves()]
        for n, x in zip(numbers, arrays, strict=True):
            groups[n].append(x)
        return tuple(groups), number

    @property
    def groups_outputs(self) -> bool:
        """Whether the output's arrays are returned in one group for each sharding."""
        return not _is_leaf(self._of_outputs)

    def _output_leaves(self) -> list[Any]:
        return jtu.tree_leaves(self._of_outputs, is_leaf=is_none)

    def _inputs(self, layout: CallLayout) -> Iterator[Any]:
        """The entry of `in_shardings` for each leaf of a call, in canonical order."""
        fun, args, kwargs = layout.treedef.children()
        treedefs = [fun, *args.children(), *kwargs.children()]
        given: Any = self._of_inputs
        count = len(args.children())
        if _is_leaf(given):
            entries = [given] * (len(treedefs) - 1)
        else:
            missing = [_MISSING] * (count - len(given))
            # A parameter is passed by keyword, too, if one before it is left out.
            by_name = dict(zip(self._positional, given, strict=False))
            rest = [by_name.get(name) for name in kwargs.node_data()[1]]
            entries = [*given[:count], *missing, *rest]
        # The arrays of the callable itself are not arguments.
        for entry, treedef, (name, size) in zip(
            [None, *entries], treedefs, layout.arguments, strict=True
        ):
            if _is_leaf(entry):
                yield from [entry] * size
            else:
                tree = treedef.unflatten(range(size))
                yield from (
                    spec for _, spec in spread(entry, tree, "in_shardings", name)
                )

    def _check_inputs(self, name: str, signature: inspect.Signature) -> None:
        given, size = self._of_inputs, len(self._positional)
        if isinstance(given, tuple | list):
            kinds = [p.kind for p in signature.parameters.values()]
            if len(given) > size and inspect.Parameter.VAR_POSITIONAL not in kinds:
                raise ValueError(
                    f"`in_shardings` has {len(given)} entries, but `{name}` takes "
                    f"{size} positional arguments."
                )
        elif not _is_leaf(given):
            raise ValueError(
                "`in_shardings` must be one sharding for all arguments, or a tuple with "
                f"an entry for each positional argument; got {describe_node(given)}."
            )


def _is_leaf(spec: Any) -> bool:
    return spec is None or jtu.all_leaves([spec])
