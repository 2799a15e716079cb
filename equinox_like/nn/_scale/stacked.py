"""`Stacked`: many layers of equal structure, compiled once and run by a scan."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, SupportsIndex, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._call_path import call_part
from ..._core.difference import ARRAY_TYPE, tree_differences
from ..._core.flat_call import pair_of
from ..._errors import ShapeError, did_you_mean
from ..._module import Module, field
from ..._module.construct import filled
from ..._transforms.checkpoint import checkpointed_step, require_policy
from ..._transforms.mesh_layout import gather, gathers_again
from ..._tree import combine, is_array, partition
from ..._tree.nodes import describe_node, path_str
from ..._tree.partitioning import map_arrays, map_nodes
from ..._typing import NOT_GIVEN, PRNGKeyArray
from .._attention.kv_cache import Rows, caches_in, writing_into
from .._base.checks import IF_AN_ENSEMBLE, as_layers, as_size, check_function, described
from .._base.init import build_stacked, split_key
from .._base.precision import computes
from .._base.sharding import parts, split_by, varying_as
from .._base.state import (
    Marker,
    State,
    StatefulLayer,
    call_stateless,
    check_not_key,
    check_state,
    is_index,
    is_stateful,
    key_for,
    with_marker,
)

_L = TypeVar("_L", covariant=True)
_M = TypeVar("_M")
_Y = TypeVar("_Y")


class Stacked(StatefulLayer, Generic[_L]):
    """Layers of equal structure, whose arrays are stacked along a leading axis.

    It computes the same as [`equinox_like.nn.Sequential`][] of these layers, by one
    `jax.lax.scan`: the time to trace and compile does not grow with the depth. `len` is
    the depth, an index gives one layer, and a slice a `Stacked` of some of them.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Block(eqx.Module):
            norm: eqx.nn.LayerNorm
            mlp: eqx.nn.MLP

            def __init__(self, key):
                self.norm = eqx.nn.LayerNorm(8)
                self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=key)

            def __call__(self, x):
                return x + self.mlp(self.norm(x))

        blocks = eqx.nn.Stacked(Block, depth=12, key=jax.random.key(0), checkpoint=True)
        assert blocks.layers.norm.weight.shape == (12, 8)
        assert blocks(jnp.ones(8)).shape == (8,)
        ```
    """

    _gathers_its_layers_ = True

    layers: _L
    depth: int = field(static=True)
    checkpoint: Any = field(static=True)
    unroll: int | bool = field(static=True)

    # Where the layers are, for a state dict, which has each one under its own names.
    _stacked_field: ClassVar[str] = "layers"

    def __init__(
        self,
        make_layer: Callable[[Any], _L],
        depth: int,
        *,
        key: PRNGKeyArray,
        checkpoint: Any = None,
        unroll: int | bool = 1,
    ):
        """**Arguments:**

        - `make_layer`: a function of a key that returns a layer.
        - `depth`: the number of layers, 0 or more.
        - `key`: split into one for each layer.
        - `checkpoint`: which intermediate values of each layer to store for the
            backward pass; others are computed again. `None`: all. `True` or `"full"`:
            none. Otherwise a policy of `jax.checkpoint_policies`, or its name, such as
            `"dots_saveable"`.
        - `unroll`: as for `jax.lax.scan`.

        **Raises:**

        `ValueError` for a negative depth, and for a policy that does not exist.
        """
        self.depth = as_size(self, "depth", depth)
        policy_of(checkpoint)  # raises if there is no such policy
        self.checkpoint = checkpoint
        self.unroll = unroll
        check_function("Stacked", "make_layer", make_layer)
        keys = split_key(key, self.depth, self)
        try:
            self.layers = build_stacked(make_layer, keys)
        except ShapeError as error:
            if isinstance(make_layer, Module):
                error.add_note(
                    "Stacked calls `make_layer` with a PRNG key. For layers that exist, "
                    "use `Stacked.from_layers([...])`."
                )
            raise

    @classmethod
    def from_layers(
        cls, layers: Sequence[_M], *, checkpoint: Any = None, unroll: int | bool = 1
    ) -> "Stacked[_M]":
        """Stacks existing layers.

        **Arguments:**

        - `layers`: at least one. All must have the same structure, with arrays of the
            same shapes and dtypes.
        - `checkpoint`, `unroll`: as above.

        **Raises:**

        `ValueError`, naming the path and both values, where two layers differ.
        """
        layers = list(as_layers("Stacked.from_layers", "layers", layers))
        if not layers:
            raise ValueError("`Stacked.from_layers` needs at least one layer.")
        layers = _with_common_markers(layers)
        for i, layer in enumerate(layers[1:], start=1):
            _check_alike(layers[0], layer, i)
        arrays = [partition(layer, is_array)[0] for layer in layers]
        _, rest = partition(layers[0], is_array)
        stacked = combine(jax.tree.map(lambda *xs: jnp.stack(xs), *arrays), rest)
        policy_of(checkpoint)  # raises if there is no such policy
        options = {"checkpoint": checkpoint, "unroll": unroll}
        return filled(cls, {"layers": stacked, "depth": len(layers), **options})

    @computes("eqx.nn.Stacked")
    def __call__(
        self: "Stacked[Callable[..., _Y]]",
        x: Any,
        state: Any = NOT_GIVEN,
        *,
        key: PRNGKeyArray | None = None,
        xs: Any = NOT_GIVEN,
        **broadcast: Any,
    ) -> _Y:
        """**Arguments:**

        - `x`: passed to the first layer; the result of each one is passed to the next. An
            array or a pytree of arrays.
        - `state`: as in [`equinox_like.nn.Sequential`][]. Each layer gets its own part.
        - `key`: split into one for each layer, if they take a `key`.
        - `xs`: a pytree of arrays whose leading axis is the depth. Each layer is called
            with its part as second argument, and returns a pair: the input of the next
            layer, and an output that is stacked and returned. For example a
            [`equinox_like.nn.KVCache`][] with a leading axis of the depth, which holds
            the caches of all layers. A layer must return its part of `xs` then, with
            equal shapes: the scan writes into the caches in place.
        - `**broadcast`: keyword arguments that are passed to each layer.

        **Returns:**

        The last result; with `xs`, the pair of the last result and the stacked outputs.
        If `state` was passed, a pair of this and the new state.

        **Raises:**

        [`equinox_like.ShapeError`][] if a layer changes structure, shape or dtype of `x`,
        or if this is an ensemble and not called under `filter_vmap`.
        `TypeError` if the layers are stateful and no state was passed, if they are not
        and other arrays were passed as `state`, or if with `xs` a layer does not return
        a pair.
        """
        check_not_key(self, state)
        layers = self.layers
        stateful = is_stateful(layers)
        _check_state(self, state, stateful)
        arrays, rest = partition(layers, is_array)
        keys = None if key is None else split_key(key, self.depth, self)
        inputs = {"arrays": arrays, "key": keys, "xs": None if xs is NOT_GIVEN else xs}
        inputs["state"] = state.substate(self.layers) if stateful else None
        _check_leading_axes(self, inputs["xs"])

        def step(x: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
            layer = gather(combine(inputs["arrays"], rest))
            args = [x] if xs is NOT_GIVEN else [x, inputs["xs"]]
            kwargs = {**broadcast, **key_for(layer, inputs["key"])}
            new_state = None
            part = layers, (), layer
            if stateful:
                kwargs["state"] = inputs["state"]
                out, new_state = call_part(*part, layer, *args, **kwargs)
                if new_state is inputs["state"]:  # as at inference
                    jax.tree.leaves(new_state)  # raises if it is out of date
                    new_state = None
            else:
                what = "A layer of this Stacked"
                out = call_part(*part, call_stateless, what, layer, *args, **kwargs)
            y = None
            if xs is not NOT_GIVEN:
                out, y = pair_of(out, "With `xs`, a layer of Stacked", "(x, y)")
            return as_before("A layer of Stacked", x, out), (y, new_state)

        x = varying_as((x, inputs, broadcast), jax.tree.map(strongly_typed, x))
        # Annotated, as mypy 2.4 crashes otherwise if it checks a copy of this library.
        ys: Any = None
        new_state: Any = None
        if self.depth > 0:
            policy = gathers_again(policy_of(self.checkpoint))
            is_in_place = bool(caches_in(inputs["xs"]))
            if is_in_place:
                rows = varying_as((x, inputs, broadcast), inputs.pop("xs"))
                step, x = _in_place(step), (x, rows, jnp.asarray(0))
            step = checkpointed_step(step, policy, self.unroll, self.depth)
            scanned = jax.lax.scan(step, x, inputs, self.depth, unroll=self.unroll)
            x, (ys, new_state) = scanned
            if is_in_place:
                x, ys, _ = x
        out: Any = x if xs is NOT_GIVEN else (x, ys)
        if state is NOT_GIVEN:
            return out
        out = out, state if new_state is None else state.update(new_state)
        return out

    def is_stateful(self) -> bool:
        """Whether the layers are stateful."""
        return is_stateful(self.layers)

    def unstack(self) -> tuple[_L, ...]:
        """The layers, one by one. A State of this `Stacked` has no values for them."""
        return tuple(self[i] for i in range(self.depth))

    @overload
    def __getitem__(self, index: slice) -> "Stacked[_L]": ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> _L: ...

    def __getitem__(self, index: Any) -> Any:
        """One layer, or for a slice a `Stacked` of layers.

        A State of this `Stacked` has no value for stateful layers that are taken out.
        """
        if isinstance(index, slice):
            rows = {"layers": self._rows(index), "depth": len(range(self.depth)[index])}
            return filled(type(self), vars(self) | rows)
        i = operator.index(index)
        if not -self.depth <= i < self.depth:
            raise IndexError(f"There is no layer {i}: the depth is {self.depth}.")
        return self._rows(i)

    def _rows(self, index: int | slice) -> _L:
        layers = map_arrays(lambda a: a[index], self.layers)
        rows = range(self.depth)[index]
        if rows == range(self.depth):
            return layers

        # A State of the whole has one value for all layers, and so none for some of them.
        def of_rows(marker: Any) -> Any:
            is_named = isinstance(marker, str)
            return f"{marker} of layer {rows}" if is_named else (marker, rows)

        return _with_markers(layers, of_rows)

    def __len__(self) -> int:
        return self.depth


def _in_place(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with the rows of all layers in the carry, as XLA can write into a carry.

    As `xs` and `ys` of a scan, the caches are copied for each token.
    """

    def with_rows(carry: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        x, before, i = carry
        rows = Rows(i)
        row = jax.tree.map(rows.row, before)
        with writing_into(rows):
            x, (y, new_state) = step(x, {**inputs, "xs": row})
        y = as_before("With caches as `xs`, a layer of Stacked", row, y)
        return (x, jax.tree.map(rows.after, before, y), i + 1), (None, new_state)

    return with_rows


def _check_state(stacked: Stacked, state: Any, stateful: bool) -> None:
    if stateful and state is NOT_GIVEN:
        raise TypeError(
            "The layers of this Stacked are stateful. Pass the state, as in "
            "`out, state = model(x, state)`."
        )
    if stateful:
        check_state(stacked, state)
    elif not isinstance(state, State) and any(map(is_array, jtu.tree_leaves(state))):
        raise TypeError(
            "Stacked takes a state as its second argument, and has no stateful layers; "
            f"got {describe_node(state)}. Pass other arguments by name: `layers(x, "
            "mask=mask)`, or as `xs` if they have a row for each layer."
        )


def policy_of(checkpoint: Any) -> Any:
    """The meaning of `checkpoint`: `None`, `True`, or a policy."""
    if checkpoint is None or isinstance(checkpoint, bool) or checkpoint == "full":
        return bool(checkpoint) or None
    policy = checkpoint
    if isinstance(checkpoint, str):
        policy = getattr(jax.checkpoint_policies, checkpoint, None)
        if not callable(policy):
            meant = did_you_mean(checkpoint, dir(jax.checkpoint_policies), "{!r}")
            raise ValueError(
                f"There is no policy {checkpoint!r} in `jax.checkpoint_policies`. Pass one "
                f"of those, or its name, or `True` to compute everything again.{meant}"
            )
    require_policy(policy, "Stacked", "checkpoint")
    return policy


def _check_leading_axes(stacked: Stacked[Any], xs: Any) -> None:
    """Raises `ShapeError` unless arrays of the layers and of `xs` have a row for each."""
    depth = stacked.depth
    hint = (
        f" {IF_AN_ENSEMBLE} In a `shard_map`, scan those of a device by `filter_scan`."
    )
    for name, tree, fix in ("layers", stacked.layers, hint), ("xs", xs, ""):
        for path, leaf in jtu.tree_leaves_with_path(tree):
            is_data = name == "xs" or is_array(leaf)
            if is_data and np.shape(leaf)[:1] != (depth,):
                raise ShapeError(
                    f"Stacked takes arrays with a leading axis of its depth, {depth}; "
                    f"`{path_str(path, name)}` has shape {np.shape(leaf)}.{fix}"
                )


def as_before(what: str, before: Any, after: Any) -> Any:
    """`after`, split over the explicit axes of a mesh as `before` is, as a scan requires.

    Raises `ShapeError` unless both trees have equal structure, shapes and dtypes.
    """

    def form(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    if form(before) != form(after):
        raise ShapeError(
            f"{what} must return an array of the shape and dtype that it was given. It was "
            f"given {described(before)}, and returned {described(after)}."
        )
    return jax.tree.map(lambda new, old: split_by(new, parts(old)), after, before)


def strongly_typed(x: Any) -> Any:
    x = jnp.asarray(x)
    return jnp.asarray(x, x.dtype)


def _with_common_markers(layers: list[Any]) -> list[Any]:
    """The layers, with the same state markers."""
    nodes = jax.tree.leaves(layers[0], is_leaf=is_index)
    common = [Marker() for node in nodes if is_index(node)]

    def with_common(layer: Any) -> Any:
        new = iter(common)
        return _with_markers(layer, lambda old: next(new, old))

    return [with_common(layer) for layer in layers]


def _with_markers(layers: Any, new: Callable[[Any], Any]) -> Any:
    """The layers, with `new(marker)` in place of each state marker."""
    return map_nodes(lambda x: with_marker(x, new(x.marker)), layers, is_index)


def _check_alike(first: Any, layer: Any, index: int) -> None:
    for found in tree_differences("layer", first, layer, is_array, described):
        if found.kind == ARRAY_TYPE:
            wanted, verb = "with equal shapes and dtypes", "has"
        else:
            wanted, verb = "of equal structure", "is"
        raise ValueError(
            f"`Stacked.from_layers` takes layers {wanted}. `{found.path}` {verb} "
            f"{found.before} in layer 0, and {found.after} in layer {index}."
        )
