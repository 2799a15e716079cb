"""A tree as a flat dictionary with dotted names, as in other frameworks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

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
from .._tree.nodes import describe_node, path_str, path_within
from .._tree.require import refuse_class
from .faults import Faults, Path, Wanted, renamer
from .files import is_path
from .placement import put_like, shardings_for
from .tensors import NUMBERS, is_loadable, number_type

_Tree = TypeVar("_Tree")

_STATISTICS = (
    " The running statistics of a BatchNorm belong to its state: leave them out of the "
    '`mapping`, and set them by `state.set`. "Coming from PyTorch" in the documentation '
    "shows how. Without them, predictions would be wrong."
)


def state_dict(tree: Any) -> dict[str, Any]:
    """The arrays and numbers of a tree by dotted names, `layers.0.weight`.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    A dictionary in the order of the leaves. Values are the leaves themselves, without a
    copy; of a typed PRNG key, its data. Leaves that are neither arrays nor numbers are
    left out.

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
    for path, leaf in jtu.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Ref):
            name = path_str(path, "tree")
            raise LeafError(f"`{name}` is a `jax.Ref`: put `ref[...]` there.", path)
    return {name: _numbers(leaf) for name, _, leaf in _named_leaves(tree)}


def load_state_dict(
    tree: _Tree,
    mapping: Mapping[str, Any],
    *,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> _Tree:
    """A copy of `tree` with the arrays and numbers of a flat dictionary.

    **Arguments:**

    - `tree`: a pytree; its arrays say which shape and dtype is wanted, and where the new
        arrays are placed, if they are committed to a device or sharded.
    - `mapping`: from dotted names to arrays: JAX or NumPy arrays, or objects that
        convert to one, such as PyTorch's tensors on the CPU (after `.detach()`). The
        arrays are copied.
    - `strict`: if `False`, leaves that `mapping` does not have are kept, and names that
        only `mapping` has are ignored. Other shapes and dtypes remain errors, and so does
        a `mapping` with none of the names. Python numbers and flags, such as the rate of
        a dropout, may be missing in any case: other frameworks do not save them.
    - `rename`: from a name in `tree` to its name in `mapping`: a dictionary of those that
        differ, or a function for all.

    **Returns:**

    A tree like `tree`, with leaves of the same types.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, which lists all leaves that are
    missing, left over, or of another shape or dtype. `ValueError` if a key of `rename` is
    not a name in `tree`.

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
    refuse_class(tree, "tree")
    is_mapping = hasattr(mapping, "__contains__") and hasattr(mapping, "__getitem__")
    if not is_mapping or isinstance(mapping, Sequence):
        fix = (
            "Read a file first, for example by `safetensors.numpy.load_file`."
            if is_path(mapping)
            else "`tree` comes first, and `mapping` second."
        )
        raise TypeError(
            "`mapping` must be a dictionary from names to arrays; got "
            f"{describe_node(mapping)}. {fix}"
        )
    there = renamer(rename, tree, "tree", _dotted)
    faults = Faults("the state dict", "the mapping", "tree")
    new: dict[Path, Any] = {}
    named = _named_leaves(tree)
    wanted = [Wanted(path, own, there(own), leaf) for own, path, leaf in named]

    def problem_of(leaf: Wanted) -> str | None:
        try:
            new[leaf.path] = _convert(mapping[leaf.name], leaf.like)
        except _Unfit as unfit:
            return faults.mismatch(*unfit.args)

    def is_setting(leaf: Any) -> bool:
        return not hasattr(leaf, "dtype")

    faults.compare(wanted, mapping, problem_of, strict, is_optional=is_setting)
    fix = _unstacked(faults.first or (), mapping) or faults.fix_by_options(strict)
    if any(str(name).endswith("running_mean") for name in faults.extra):
        fix += _STATISTICS
    faults.raise_any(fix)
    items, treedef = jtu.tree_flatten_with_path(tree)
    leaves = [new.get(path, leaf) for path, leaf in items]
    where = shardings_for(tree, None)
    return treedef.unflatten(put_like(items, leaves, where))


def _unstacked(path: Path, mapping: Any) -> str:
    """How to load into a Stacked, if `mapping` has the layers one by one."""
    for i, key in enumerate(path):
        first = (*path[:i], jtu.SequenceKey(0), *path[i + 1 :])
        if str(key) == ".layers" and _dotted(first) in mapping:
            at = path_within(path[:i])
            old, new = path_str(path[:i], "tree"), path_str(path[:i], "loaded")
            return (
                "The mapping has each layer of a `Stacked` on its own. Load into "
                f"`eqx.tree_at({at!r}, tree, {old}.unstack())`, and then call "
                f"`eqx.tree_at({at!r}, loaded, eqx.nn.Stacked.from_layers({new}))`."
            )
    return ""


class _Unfit(Exception):
    """A value does not fit. Its arguments describe the value, and what is wanted."""


def _convert(value: Any, like: Any) -> Any:
    array = _as_array(value)
    if is_typed_key(like):
        data = _numbers(struct_of(like))
        _require(array, data.dtype, data.shape)
        if not isinstance(array, jax.Array):
            array = jax.device_put(array)
        return with_key(jnp.array(array), like)
    if not hasattr(like, "dtype"):
        python = number_type(like)
        if array.shape != () or not jnp.issubdtype(array.dtype, NUMBERS[python]):
            raise _Unfit(describe_array(array), f"a Python {python.__name__}")
        return type(like)(array.item())
    _require(array, like.dtype, like.shape)
    if isinstance(like, np.generic):
        return like.dtype.type(np.asarray(array)[()])
    if isinstance(like, np.ndarray) or not isinstance(array, jax.Array):
        return np.array(array)  # `put_like` places it
    return jnp.array(array)


def _numbers(leaf: Any) -> Any:
    """What a state dict has of a leaf: of typed keys, or of a struct of them, the data."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and is_typed_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return without_key(leaf)


def _require(array: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    found, wanted = describe_array(array), describe_type(dtype, shape)
    if found != wanted:
        raise _Unfit(found, wanted)


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


def _named_leaves(tree: Any) -> list[tuple[str, Path, Any]]:
    named, seen = [], {}
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        if is_loadable(leaf):
            name = _dotted(path)
            if name in seen:
                raise ValueError(
                    f"`{path_str(seen[name], 'tree')}` and `{path_str(path, 'tree')}` have "
                    f"the same name {name!r} in a state dict. Rename a key of the tree."
                )
            seen[name] = path
            named.append((name, path, leaf))
    return named
