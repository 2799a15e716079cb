"""Outputs of a mapped function: with a batch axis, without one, and not arrays at all."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._core.parts import Rest
from .._tree.arrays import describe_array
from .._tree.filters import is_array, is_array_like
from .._tree.match import leaf_name
from .._tree.nodes import describe_node


class Unmapped:
    """Splits an output into mapped arrays and unmapped ones, and joins them again.

    It keeps the structure and the leaves that are not arrays.
    """

    _rest: Rest | None = None

    @property
    def are_known(self) -> bool:
        return self._rest is not None

    def split(self, out: Any, axes: list[int | None]) -> tuple[list[Any], list[Any]]:
        leaves, treedef = jtu.tree_flatten(out)
        with_batch = [i for i, axis in enumerate(axes) if axis is not None]
        for i in with_batch:
            _check_output_axis(leaves[i], axes[i], out, i)
        without = [i for i, x in enumerate(leaves) if axes[i] is None and is_array(x)]
        self._axes: list[Any] = [axes[i] for i in with_batch]
        self._without = without
        # Holds no array: that would be a leak of a tracer.
        self._rest = Rest(treedef, leaves, with_batch + without)
        return [leaves[i] for i in with_batch], [leaves[i] for i in without]

    def join(self, with_batch: list[Any], without: list[Any]) -> Any:
        assert self._rest is not None
        moved = [
            x if axis == 0 else jnp.moveaxis(x, 0, axis)
            for axis, x in zip(self._axes, with_batch, strict=True)
        ]
        return self._rest.fill(moved + without)

    def batched(self, function: Any, *args: Any, **options: Any) -> str | None:
        """The path of an unmapped array that is batched, and what it is.

        Traces `function`, which ends with `split`, under `jax.vmap` with these options.
        """

        @jax.custom_batching.custom_vmap
        def unmapped(without):
            return without

        @unmapped.def_vmap
        def _(_, is_batched, without):
            number = is_batched[0].index(True)
            raise _Batched(number, describe_array(without[number][0]))

        def checked(*args):
            with_batch, without = function(*args)
            return with_batch, unmapped(without)

        try:
            jax.eval_shape(jax.vmap(checked, out_axes=(0, None), **options), *args)
        except _Batched as found:
            number, what = found.args
        else:
            return None
        assert self._rest is not None
        tree = self._rest.fill([0] * len(self._rest.places))
        return f"`{leaf_name(tree, self._without[number], 'out')}` ({what})"


class _Batched(Exception):
    """The number of an unmapped array that is batched, and its description."""


def _check_output_axis(x: Any, axis: Any, out: Any, number: int) -> None:
    if not is_array_like(x):
        raise TypeError(
            f"`{leaf_name(out, number, 'out')}` is {describe_node(x)}, which is not a "
            f"valid JAX type, so it cannot have the batch axis {axis} that `out_axes` "
            f"gives it. In `out_axes`, write `equinox_like.if_array({axis})` for "
            f"`{axis}`: it returns everything that is not an array as it is."
        )
    ndim = getattr(x, "ndim", 0) + 1
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"`out_axes` gives `{leaf_name(out, number, 'out')}` the batch axis {axis}, "
            f"which is out of bounds: with a batch axis it has {ndim} "
            f"dimension{'s' * (ndim > 1)}."
        )
