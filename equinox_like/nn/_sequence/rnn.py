"""`RNN` and `Bidirectional`: run recurrent cells over a sequence, layer by layer.

`cell(x, state)` returns the next state, and `cell.init_state()` the initial one. The
scan over the sequence is in `_scan_cell.py`.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._call_path import call_part
from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree import is_array
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.arguments import as_size, check_function, check_layer
from .._base.init import split_key
from .._base.precision import computes
from .._layers.elementwise import Dropout
from .scan_cell import as_sequence, scanned


def concatenate(forward: Any, backward: Any) -> Any:
    """The outputs of both directions, joined along the last axis."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), forward, backward)


class Bidirectional(Module):
    """Runs one cell forward over a sequence, and another one backward.

    Both run in one `jax.lax.scan`. It is called on a whole sequence, by itself or as a
    layer of an [`equinox_like.nn.RNN`][]. From [Bidirectional Recurrent Neural
    Networks](https://doi.org/10.1109/78.650093) (Schuster, Paliwal 1997).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        k1, k2 = jax.random.split(jax.random.key(0))
        forward = eqx.nn.GRUCell(3, 4, key=k1)
        backward = eqx.nn.GRUCell(3, 4, key=k2)
        layer = eqx.nn.Bidirectional(forward, backward)
        outputs, (last_forward, last_backward) = layer(jnp.ones((10, 3)))
        assert outputs.shape == (10, 8)
        assert (outputs[-1, :4] == last_forward).all()
        assert (outputs[0, 4:] == last_backward).all()
        ```
    """

    forward: Any
    backward: Any
    merge: Callable[[Any, Any], Any]
    unroll: int | bool = field(static=True)

    _takes_sequence: ClassVar[bool] = True

    def __init__(
        self,
        forward: Any,
        backward: Any,
        merge: Callable[[Any, Any], Any] | None = None,
        *,
        unroll: int | bool = 1,
    ):
        """**Arguments:**

        - `forward`, `backward`: two cells: [`equinox_like.nn.GRUCell`][],
            [`equinox_like.nn.LSTMCell`][] or your own, as for
            [`equinox_like.nn.scan_cell`][].
        - `merge`: a function of the outputs of both directions, each in the order of the
            inputs. By default they are concatenated along the last axis; `operator.add`
            adds them.
        - `unroll`: as for `jax.lax.scan`.

        **Raises:**

        `TypeError` if a cell or `merge` cannot be called.
        """
        check_layer("Bidirectional", "forward", forward)
        check_layer("Bidirectional", "backward", backward)
        self.forward, self.backward = forward, backward
        self.merge = concatenate if merge is None else merge
        check_function("Bidirectional", "merge", self.merge)
        self.unroll = unroll

    @computes("eqx.nn.Bidirectional")
    def __call__(
        self,
        xs: Any,
        init: Sequence[Any] | None = None,
        *,
        length: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Any, tuple[Any, Any]]:
        """**Arguments:**

        - `xs`: an array, or a pytree of arrays, whose first axis is that of the sequence.
        - `init`: the pair of the first states, forward and backward. `None`, also in
            place of one state, stands for `init_state()` of the cell.
        - `length`: the number of elements that are not padding, as for
            [`equinox_like.nn.RNN`][].
        - `key`: ignored.

        **Returns:**

        The pair of the merged outputs and of the last states. The last state of the
        backward cell is the one after the first element of the sequence.

        **Raises:**

        [`equinox_like.ShapeError`][] if `init` is not a pair, or if a cell raises one.
        `TypeError` if a cell has no `init_state` and no first state is given, or if
        `length` is not an integer. `ValueError` if it is a Python int out of range.
        """
        states = _as_states(self, init, 2, "direction")
        cells = self.forward, self.backward
        xs, size = as_sequence(self, xs)
        there = _there(self, size, length)
        out, last = scanned(cells, states, xs, there, self.unroll)
        return self.merge(*out), (last[0], last[1])


class RNN(Module):
    """A recurrent network: cells of any kind, in layers, in one or both directions.

    Each layer runs over the whole sequence in one `jax.lax.scan`, and the next one takes
    its outputs. The output of a step is the state, or the first part of it if the state is
    a tuple.

    In a batch, pad the sequences to one length, and pass the true length of each, as in
    `jax.vmap(rnn)(batch, length=lengths)`. The values of the padding do not matter,
    not even NaN: outputs there are zero, no gradient reaches it, the last state is the
    one after the last element, and the backward direction begins at the last element.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        rnn = eqx.nn.RNN.build(
            eqx.nn.LSTMCell, 3, 4, num_layers=2, bidirectional=True, key=jax.random.key(0)
        )
        outputs, states = rnn(jnp.ones((10, 3)))
        assert outputs.shape == (10, 8)
        forward, backward = states[1]  # of the second layer
        assert forward[0].shape == forward[1].shape == (4,)

        batch, lengths = jnp.ones((5, 10, 3)), jnp.array([10, 3, 7, 1, 0])
        outputs, states = jax.vmap(rnn)(batch, length=lengths)
        assert not outputs[1, 3:].any()
        ```
    """

    layers: tuple[Any, ...]
    dropout: Dropout
    unroll: int | bool = field(static=True)

    _takes_sequence: ClassVar[bool] = True
    # Ends the error of a call with the arguments of `build`.
    _other_constructor = " Write `RNN.build(cell, input_size, hidden_size, key=key)`."

    def __init__(
        self,
        layers: Any,
        *,
        dropout: ArrayLike = 0.0,
        inference: bool | Array | None = False,
        unroll: int | bool = 1,
    ):
        """**Arguments:**

        - `layers`: a cell or a [`equinox_like.nn.Bidirectional`][], or a sequence of these.
            Cells are as for [`equinox_like.nn.scan_cell`][].
        - `dropout`: the probability that an output of a layer is dropped before the next
            layer, in training.
        - `inference`: of the dropout, see [`equinox_like.nn.Dropout`][].
        - `unroll`: as for `jax.lax.scan`. A `Bidirectional` has its own.

        **Raises:**

        `ValueError` if there are no layers, `TypeError` if one cannot be called.
        """
        many = isinstance(layers, Iterable) and not isinstance(layers, Module)
        self.layers = tuple(layers) if many else (layers,)
        if not self.layers:
            raise ValueError("RNN needs at least one layer.")
        for i, layer in enumerate(self.layers):
            check_layer("RNN", f"layers[{i}]", layer)
        self.dropout = Dropout(dropout, inference)
        self.unroll = unroll

    @staticmethod
    def build(
        cell: Callable[..., Any],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bidirectional: bool = False,
        dropout: ArrayLike = 0.0,
        inference: bool | None = False,
        unroll: int | bool = 1,
        key: PRNGKeyArray,
        **kwargs: Any,
    ) -> "RNN":
        """A network of layers of one kind.

        **Arguments:**

        - `cell`: a class of cells, called as `cell(input_size, hidden_size, key=key)`.
        - `input_size`, `hidden_size`: the sizes of an input and of an output of a cell.
            From the second layer on, the input size is the output size of a layer:
            twice `hidden_size` if `bidirectional`.
        - `num_layers`: the number of layers, 1 or more.
        - `bidirectional`: whether each layer is a [`equinox_like.nn.Bidirectional`][].
        - `dropout`, `inference`, `unroll`: as for [`equinox_like.nn.RNN`][].
        - `key`: a PRNG key for parameter initialisation.
        - `**kwargs`: passed to `cell`.

        **Returns:**

        The `RNN`.

        **Raises:**

        `TypeError` if `cell` is a cell itself, or cannot be called.
        """
        num_layers = as_size(RNN, "num_layers", num_layers, 1)
        check_function("RNN.build", "cell", cell)
        if not isinstance(cell, type) and hasattr(cell, "init_state"):
            raise TypeError(
                "RNN.build takes a class of cells as `cell`, or a function that makes one; "
                f"got {describe_node(cell)}. Pass the class, or give `RNN` a list of cells."
            )
        layers: list[Any] = []
        for layer_key in split_key(key, num_layers, RNN):
            if bidirectional:
                keys = jax.random.split(layer_key)
                both = (cell(input_size, hidden_size, key=k, **kwargs) for k in keys)
                layers.append(Bidirectional(*both, unroll=unroll))
            else:
                layers.append(cell(input_size, hidden_size, key=layer_key, **kwargs))
            input_size = 2 * hidden_size if bidirectional else hidden_size
        return RNN(layers, dropout=dropout, inference=inference, unroll=unroll)

    @computes("eqx.nn.RNN")
    def __call__(
        self,
        xs: Any,
        init: Sequence[Any] | None = None,
        *,
        length: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Any, tuple[Any, ...]]:
        """**Arguments:**

        - `xs`: one sequence: an array, or a pytree of arrays, whose first axis is that of
            the sequence.
        - `init`: the first states, one for each layer; that of a `Bidirectional` is a
            pair. `None`, also in place of one state, stands for `init_state()` of the
            cell.
        - `length`: the number of elements that are not padding: an integer, of shape
            `()`. The padding is at the end of the sequence. An array out of range is
            clamped.
        - `key`: a PRNG key for the dropout.
        - `inference`: overrides the dropout's own, unless it is `None`.

        **Returns:**

        The pair of the outputs of the last layer, stacked, and of the last states,
        which can be passed as `init` for the next part of the sequence.

        **Raises:**

        [`equinox_like.ShapeError`][] if `init` does not have a state for each layer,
        `length` is not a scalar, or a cell is given another shape than it takes.
        `TypeError` if a cell has no `init_state` and no first state is given, or if
        `length` is not an integer. `ValueError` if it is a Python int out of range.
        [`equinox_like.MissingKeyError`][] if the dropout is active and there is no `key`.
        """
        states = _as_states(self, init, len(self.layers), "layer")
        xs, size = as_sequence(self, xs)
        there = _there(self, size, length)
        number = len(self.layers) - 1
        keys = [None] * number if key is None else split_key(key, number, self)
        last = []
        for i, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if i > 0:
                xs = self.dropout(xs, key=keys[i - 1], inference=inference)
            part = self, ("layers", i), layer
            if getattr(layer, "_takes_sequence", False):
                xs, state = call_part(*part, layer, xs, state, length=length)
            else:
                one = (layer,), (state,), xs, there, self.unroll
                (xs,), (state,) = call_part(*part, scanned, *one)
            last.append(state)
        return xs, tuple(last)


def _there(layer: Any, size: int, length: Any) -> Array | None:
    """The mask of the elements of a sequence that are not padding; `None` if all."""
    if length is None:
        return None
    name = type(layer).__name__
    if jnp.shape(length) != ():
        raise ShapeError(
            f"{name} takes one sequence, and its `length` as one integer; got shape "
            f"{jnp.shape(length)}. Use `jax.vmap` for a batch, as in "
            "`jax.vmap(rnn)(xs, length=lengths)`."
        )
    if not jnp.issubdtype(jnp.result_type(length), jnp.integer):
        raise TypeError(
            f"{name} takes an integer as `length`; got dtype {jnp.result_type(length)}."
        )
    if isinstance(length, SupportsIndex) and not is_array(length):
        if not 0 <= operator.index(length) <= size:
            raise ValueError(
                f"{name} was given a sequence of {size} elements, but a `length` "
                f"of {length}."
            )
    return jnp.arange(size) < jnp.asarray(length).astype(int)


def _as_states(
    layer: Any, init: Sequence[Any] | None, number: int, what: str
) -> Sequence[Any]:
    if init is None:
        return (None,) * number
    if not isinstance(init, list | tuple) or len(init) != number:
        got = f"{len(init)}" if isinstance(init, list | tuple) else type(init).__name__
        raise ShapeError(
            f"{type(layer).__name__} takes a tuple with one state for each {what}, "
            f"{number} in all, as `init`; got {got}."
        )
    return init
