"""Trees of this library in the checkpoints of Orbax: arguments for its `CheckpointManager`.

    manager.save(step, args=orbax.Save(model))
    model = manager.restore(step, args=orbax.Restore(model))

Orbax writes and reads the arrays as one flat dictionary with their paths as keys: in
parallel, in the background, and each process its own shards. What Orbax cannot store as
an array (which leaf is a typed key, Python numbers, static leaves) is in the metadata
that it saves with the arrays.

Needs the package `orbax-checkpoint`: `pip install orbax-checkpoint`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ._tree.nodes import describe_node as _described
from ._tree.paths import check_patterns as _check_patterns
from ._tree.require import (
    check_not_callable as _check_not_callable,
    check_not_class as _check_not_class,
)

try:
    import orbax.checkpoint as _ocp
    from orbax.checkpoint.future import ChainedFuture as _ChainedFuture
except ImportError:
    raise ImportError(
        "`equinox_like.orbax` needs the package `orbax-checkpoint`: "
        "`pip install orbax-checkpoint`."
    ) from None

from ._io import orbax_trees as _trees  # needs Orbax

__all__ = ["Restore", "Save", "TreeHandler"]


class TreeHandler(_ocp.AsyncCheckpointHandler):
    """Orbax's handler for [`equinox_like.orbax.Save`][] and
    [`equinox_like.orbax.Restore`][]. Orbax finds it by the class of these arguments.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import orbax.checkpoint as ocp
        from equinox_like import orbax
        from etils import epath

        model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        checkpointer = ocp.AsyncCheckpointer(orbax.TreeHandler())
        path = epath.Path("checkpoint").resolve()
        checkpointer.save(path, args=orbax.Save(model))
        checkpointer.wait_until_finished()
        again = checkpointer.restore(path, args=orbax.Restore(model))
        assert eqx.tree_equal(again, model)
        checkpointer.close()
        ```
    """

    def __init__(self, arrays: Any = None):
        """**Arguments:**

        - `arrays`: an `orbax.checkpoint.PyTreeCheckpointHandler` to write and read the
            arrays with; by default a new one.
        """
        self._arrays = _ocp.PyTreeCheckpointHandler() if arrays is None else arrays

    async def async_save(self, directory: Any, args: "Save") -> Any:
        """Copies the arrays to the host, and returns futures of their being written."""
        _require(args, Save, "save")
        saved = _trees.as_pytree_save(args.tree)
        futures = await self._arrays.async_save(directory, args=saved)
        sums = _trees.start_sums(saved.item)

        def write() -> None:  # before Orbax gives the step its final name
            _trees.write_sums(directory, sums.result())

        return [_ChainedFuture([*(futures or ()), sums], write)]

    def save(self, directory: Any, args: "Save") -> None:
        """Saves, and waits until all is written."""
        _require(args, Save, "save")
        saved = _trees.as_pytree_save(args.tree)
        sums = _trees.start_sums(saved.item)
        self._arrays.save(directory, args=saved)
        _trees.write_sums(directory, sums.result())

    def restore(self, directory: Any, args: "Restore") -> Any:
        """**Returns:** a tree of the structure of `args.like`."""
        _require(args, Restore, "restore")
        return _trees.restored(
            self._arrays, directory, args.like, args.shardings, args.at
        )

    def metadata(self, directory: Any) -> Any:
        """What Orbax knows of the arrays, by their paths."""
        return self._arrays.metadata(directory)

    def finalize(self, directory: Any) -> None:
        """Called by Orbax when all processes have written their parts."""
        self._arrays.finalize(directory)

    def close(self) -> None:
        """Called by Orbax at the end."""
        self._arrays.close()


@_ocp.args.register_with_handler(TreeHandler, for_save=True)
@dataclasses.dataclass
class Save(_ocp.args.CheckpointArgs):
    """Saves any tree, by `manager.save(step, args=Save(tree))`.

    It may be part of `orbax.checkpoint.args.Composite`, beside other arguments.

    **Attributes:**

    - `tree`: any pytree: a model, a State, the state of an optimiser, a tuple of these. JAX
        and NumPy arrays, sharded or not, typed PRNG keys and Python numbers are saved, by
        their paths. Of other leaves, such as functions and strings, the name is saved, for
        `Restore` to compare.

    **Raises:**

    `LeafError`, a `RuntimeError` with attribute `path`, before anything is written, if
    an array is traced or was deleted, is a `jax.ShapeDtypeStruct`, a `jax.Ref` or a masked
    array, is of a dtype or has a path that Orbax does not store, or is not on devices of
    all processes. `TypeError` if `tree` is a class or a function in place of a tree.

    !!! example

        ```python
        import pathlib
        import equinox_like as eqx
        import jax
        import orbax.checkpoint as ocp
        from equinox_like import orbax

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        with ocp.CheckpointManager(pathlib.Path("steps").resolve()) as manager:
            manager.save(1, args=orbax.Save(model))
            manager.wait_until_finished()
            again = manager.restore(1, args=orbax.Restore(model))
        assert eqx.tree_equal(again, model)
        ```
    """

    tree: Any

    def __post_init__(self) -> None:
        _check_not_callable(self.tree, "tree")
        # A later error would leave a partly written step in Orbax's folder.
        _trees.check_savable(self.tree)


@_ocp.args.register_with_handler(TreeHandler, for_restore=True)
@dataclasses.dataclass
class Restore(_ocp.args.CheckpointArgs):
    """Restores what [`equinox_like.orbax.Save`][] saved, into a tree like it.

    One error lists all leaves that are missing, left over, or of another shape, dtype or
    name. It is raised before an array is read.

    **Attributes:**

    - `like`: a tree with the structure, shapes and dtypes of what was saved. Its leaves may
        be `jax.ShapeDtypeStruct`s, as [`equinox_like.filter_eval_shape`][] makes them.
    - `shardings`: a device, a sharding, or a prefix tree of these, such as
        [`equinox_like.Layout.shardings`][] makes of `like`. The mesh may differ from that
        of the saved arrays. Where it is `None`, arrays go where those of `like` are. It is
        needed for arrays that were saved from several devices, if `like` has structs.
    - `at`: a pattern for paths, or a sequence of patterns: only nodes that match are
        read, with all that is below them. Other leaves come from `like`.

    **Raises:**

    `TypeError` if `like` is a class in place of an instance. `LeafError`, a `RuntimeError`
    with attribute `path`, while restoring: for differences from `like`, and if data are
    damaged. `ValueError` if a pattern matches nothing, or if the checkpoint was not saved
    by `Save`.
    """

    like: Any
    shardings: Any = None
    at: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        _check_not_class(self.like, "like")
        if self.at is not None:
            several = isinstance(self.at, Iterable) and not isinstance(self.at, str)
            patterns: list[Any] = list(self.at) if several else [self.at]
            _check_patterns(patterns, "at")
            if not patterns:
                raise ValueError(
                    "`at` must have a pattern: without one, nothing is read."
                )
            self.at = patterns


def _require(args: Any, kind: type, method: str) -> None:
    if not isinstance(args, kind):
        raise TypeError(
            f"`{method}` takes `equinox_like.orbax.{kind.__name__}`; got "
            f"{_described(args)}."
        )
