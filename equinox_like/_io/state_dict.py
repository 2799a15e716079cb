"""A tree as a flat dictionary with dotted names, as in other frameworks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import LeafError
from .._tree.arrays import (
    describe_array,
    describe_type,
    is_typed_key,
    struct_of,
    with_key,
    without_key,
)
from .._tree.cycles import check_no_cycle
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import describe_node, path_str
from .._tree.require import check_not_class
from .._typing import FilePath
from .faults import Faults, Path, Wanted, other_prefix, renamer
from .files import is_path, with_suffix
from .format import NUMBERS, as_numpy_or_number, is_loadable, number_type
from .placement import put_like, shardings_for
from .shards import SUFFIX, open_file

_Tree = TypeVar("_Tree")

_STATISTICS = (
    " The running statistics of a BatchNorm belong to its state: leave them out of the "
    '`mapping`, and set them by `state.set`. "Coming from PyTorch" in the documentation '
    "shows how. Without them, predictions would be wrong."
)


def state_dict(tree: Any, *, unstack: bool = False) -> dict[str, Any]:
    """The arrays and numbers of a tree by dotted names, `layers.0.weight`.

    **Arguments:**

    - `tree`: any pytree.
    - `unstack`: whether each layer of an [`equinox_like.nn.Stacked`][] has its own names:
        `blocks.0.weight`, `blocks.1.weight` in place of `blocks.layers.weight`, as if the
        layers were in a list. In an ensemble, whose arrays have another axis in front,
        the names stay.

    **Returns:**

    A dictionary in the order of the leaves. Values are the leaves themselves, without a
    copy, or with `unstack` slices of them; of a typed PRNG key, its data. Leaves that are
    neither arrays nor numbers are left out.

    **Raises:**

    `ValueError` if two leaves have the same dotted name, naming both paths. `LeafError` for
    a `jax.Ref`.

    The result shares arrays with `tree`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        assert list(eqx.state_dict(model)) == ["weight", "bias"]
        ```
    """
    check_no_cycle("tree", tree)
    for path, leaf in jtu.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Ref):
            name = path_str(path, "tree")
            raise LeafError(f"`{name}` is a `jax.Ref`: put `ref[...]` there.", path)
    return {entry.name: _numbers(_row(entry)) for entry in _entries(tree, unstack)}


def load_state_dict(
    tree: _Tree,
    mapping: Mapping[str, Any] | FilePath,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> _Tree:
    """A copy of `tree` with the arrays and numbers of a flat dictionary.

    **Arguments:**

    - `tree`: a pytree; its arrays say which shape and dtype is wanted, and where the new
        arrays are placed, if they are committed to a device or sharded.
    - `mapping`: from dotted names to arrays: JAX or NumPy arrays, or objects that
        convert to one, such as PyTorch's tensors on the CPU (after `.detach()`). Or the
        path of a safetensors file, or of an index of several: `*.safetensors.index.json`.
        The arrays are copied. The layers of an [`equinox_like.nn.Stacked`][] may have names
        of their own, `blocks.0.weight`, `blocks.1.weight`: they are stacked.
    - `strict`: if `False`, leaves that `mapping` does not have are kept, and names that
        only `mapping` has are ignored. Other shapes and dtypes remain errors, and so does
        a `mapping` with none of the names. Python numbers and flags, such as the rate of
        a dropout, may be missing in any case: other frameworks do not save them.
    - `rename`: from a name in `tree` to its name in `mapping`: a dictionary of those that
        differ, or a function for all. If `mapping` does not have the name of a leaf of a
        `Stacked`, it is also used for the names of the layers.

    **Returns:**

    A tree like `tree`, with leaves of the same types.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, which lists all leaves that are
    missing, left over, or of another shape or dtype. `ValueError` if a key of `rename` is
    not a name in `tree`. For a path, the errors of [`equinox_like.load`][] about the file.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import numpy as np

        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        foreign = {"fc.weight": np.ones((2, 3), "f4"), "fc.bias": np.ones(2, "f4")}
        model = eqx.load_state_dict(model, foreign, rename=lambda name: f"fc.{name}")
        assert model.bias.tolist() == [1.0, 1.0]
        ```
    """
    check_not_class(tree, "tree")
    check_no_cycle("tree", tree)
    mapping = _arrays_in(mapping)
    entries = _entries(tree)
    rows: dict[Path, list[_Entry]] = {entry.path: [] for entry in entries}
    for entry in _entries(tree, unstack=True):
        if entry.layer:
            rows[entry.path].append(entry)
    axes = {x.name: len(x.layer) for found in rows.values() for x in found}
    there = renamer(rename, tree, "tree", _dotted, axes)
    wanted = _wanted(entries, rows, there, mapping)
    faults = Faults("the state dict", "the mapping", "tree")
    new: dict[str, Any] = {}

    def problem_of(leaf: Wanted) -> str | None:
        try:
            axis = axes.get(leaf.own, 0)
            new[leaf.own] = _as_fitting_array(mapping[leaf.name], leaf.like, axis)
        except _Unfit as unfit:
            return faults.mismatch(*unfit.args)

    is_setting = lambda leaf: not hasattr(leaf, "dtype")  # noqa: E731
    faults.compare(wanted, mapping, problem_of, strict, is_optional=is_setting)
    fix = faults.fix_by_options(strict)
    if any(str(name).endswith("running_mean") for name in faults.extra):
        fix += _STATISTICS
    faults.raise_any(fix)
    for entry in entries:
        if any(row.name in new for row in rows[entry.path]):
            new[entry.name] = _stacked(entry, rows[entry.path], new)
    found = {e.path: _copy_like(new[e.name], e.leaf) for e in entries if e.name in new}
    items, treedef = jtu.tree_flatten_with_path(tree)
    leaves = [found.get(path, leaf) for path, leaf in items]
    where = shardings_for(tree, None)
    return treedef.unflatten(put_like(items, leaves, where))


def _arrays_in(mapping: Any) -> Mapping[str, Any]:
    """The mapping, or the arrays of the file that has this path."""
    if is_path(mapping):
        file = open_file(with_suffix(mapping, SUFFIX))
        return {name: file.array(name) for name in file.tensors}
    is_mapping = hasattr(mapping, "__contains__") and hasattr(mapping, "__getitem__")
    if not is_mapping or isinstance(mapping, Sequence):
        raise TypeError(
            "`mapping` must be a dictionary from names to arrays, or a path; got "
            f"{describe_node(mapping)}. `tree` comes first, and `mapping` second."
        )
    return mapping


class _Entry(NamedTuple):
    """A leaf under its name, or the part of it that belongs to one layer of a `Stacked`."""

    name: str
    path: Path
    leaf: Any
    # Of the layer, in each `Stacked` around the leaf.
    layer: tuple[int, ...] = ()


def _is_stacked(node: Any) -> bool:
    return hasattr(type(node), "_stacked_field")


def _entries(tree: Any, unstack: bool = False) -> list[_Entry]:
    """All that a state dict has of a tree, in its order.

    `unstack`: whether each layer of a `Stacked` has its own names.
    """
    entries = list(_walk(tree, _Entry("", (), None), (), unstack))
    seen: dict[str, Path] = {}
    for name, path, *_ in entries:
        if name in seen:
            raise ValueError(
                f"`{path_str(seen[name], 'tree')}` and `{path_str(path, 'tree')}` have "
                f"the same name {name!r} in a state dict. Rename a key of the tree."
            )
        seen[name] = path
    return entries


def _walk(node: Any, at: _Entry, named: Path, unstack: bool) -> Iterator[_Entry]:
    """The entries below `node`, which is at `at.path` and has the name `named`."""
    for step, x in jtu.tree_flatten_with_path(node, is_leaf=_is_stacked)[0]:
        path, name = (*at.path, *step), (*named, *step)
        if _is_stacked(x):
            key, axis = jtu.GetAttrKey(x._stacked_field), len(at.layer)
            layers = getattr(x, key.name)
            arrays = filter(is_array_or_struct, jtu.tree_leaves(layers))
            steps: list[Any] = [(key, at.layer)]
            if unstack and all(a.shape[axis : axis + 1] == (len(x),) for a in arrays):
                steps = [(jtu.SequenceKey(i), (*at.layer, i)) for i in range(len(x))]
            for last, layer in steps:
                below = at._replace(path=(*path, key), layer=layer)
                yield from _walk(layers, below, (*name, last), unstack)
        elif is_loadable(x):
            yield _Entry(_dotted(name), path, x, at.layer)


def _row(entry: _Entry) -> Any:
    leaf, index = entry.leaf, entry.layer
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[len(index) :], leaf.dtype)
    return leaf[(*index, ...)] if index and is_array(leaf) else leaf


def _wanted(entries: Any, rows: Any, there: Any, mapping: Any) -> list[Wanted]:
    """The names to read: of the leaves of a tree, or of its layers if they are there."""

    def named(entry):
        return Wanted(entry.path, entry.name, there(entry.name), entry.leaf)

    wholes, parts = [*map(named, entries)], []
    for whole in wholes:
        is_whole = whole.name in mapping or not rows[whole.path]
        parts += [whole] if is_whole else map(named, rows[whole.path])
    names = [part.name for part in parts]
    if len(parts) == len(wholes) or any(name in mapping for name in names):
        return parts
    return parts if other_prefix(names, sorted(map(str, mapping))) else wholes


def _stacked(entry: _Entry, rows: Sequence[_Entry], new: Mapping[str, Any]) -> Any:
    """What is loaded for a leaf of a `Stacked`, from that of its layers."""
    if not is_array_or_struct(entry.leaf):
        numbers = {row.name: new[row.name] for row in rows if row.name in new}
        if len({number.item() for number in numbers.values()}) > 1:
            found = ", ".join(f"`{name}` is {x}" for name, x in numbers.items())
            fix = "A `Stacked` has one number for all layers: give them the same."
            raise LeafError(f"{found}. {fix}", entry.path)
        return next(iter(numbers.values()))
    values = [new[x.name] if x.name in new else _numbers(_row(x)) for x in rows]
    stack = jnp.stack if any(isinstance(x, jax.Array) for x in values) else np.stack
    return stack(values).reshape(_numbers(struct_of(entry.leaf)).shape)


class _Unfit(Exception):
    """A value does not fit. Its arguments describe the value, and what is wanted."""


def _as_fitting_array(value: Any, like: Any, axes: int) -> Any:
    """`value` as an array, of the type of `like` without its first `axes`."""
    array = _as_array(value)
    found = describe_array(array)
    if hasattr(like, "dtype"):
        data = _numbers(struct_of(like)) if is_typed_key(like) else like
        wanted = describe_type(data.dtype, data.shape[axes:])
        fits = found == wanted
    else:
        python = number_type(like)
        wanted = f"a Python {python.__name__}"
        fits = array.shape == () and jnp.issubdtype(array.dtype, NUMBERS[python])
    if not fits:
        raise _Unfit(found, wanted)
    return array


def _copy_like(array: Any, like: Any) -> Any:
    """A copy of an array, as a leaf of the kind of `like`."""
    if is_typed_key(like):
        if not isinstance(array, jax.Array):
            array = jax.device_put(array)
        return with_key(jnp.array(array), like)
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return as_numpy_or_number(np.asarray(array), like)
    # `put_like` places an array of NumPy.
    return jnp.array(array) if isinstance(array, jax.Array) else np.array(array)


def _numbers(leaf: Any) -> Any:
    """What a state dict has of a leaf: of typed keys, or of a struct of them, the data."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and is_typed_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return without_key(leaf)


def _as_array(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value
    try:
        array = np.asarray(value)
    except Exception:
        try:
            # PyTorch cannot convert a bfloat16 tensor to NumPy, and JAX takes no slice.
            compact = getattr(value, "contiguous", lambda: value)
            return jnp.from_dlpack(compact())
        except Exception as error:
            what = f"of type {type(value).__name__}, which gives no array ({error})"
            raise _Unfit(what, "an array") from error
    if array.dtype.hasobject:
        raise _Unfit(f"of type {type(value).__name__}", "an array")
    return array


def _dotted(path: Path) -> str:
    # The key from a frozen part to its content has an empty text.
    written = tuple(key for key in path if str(key))
    return jtu.keystr(written, simple=True, separator=".")
