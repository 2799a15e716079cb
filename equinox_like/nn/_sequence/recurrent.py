"""Recurrent networks: cells, `RNN` and `Bidirectional`, and `scan_cell`.

`cell(x, state)` returns the next state, and `cell.init_state()` the initial one.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from ..._call_path import call_part
from ..._errors import ShapeError
from ..._module import Module, field
from ..._tree import is_array
from ..._tree.arrays import is_typed_key, is_weak
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.checks import (
    as_divisor,
    as_size,
    check_columns,
    check_dtype,
    check_function,
    check_input,
    check_integer,
    check_layer,
    check_scalar,
    described,
    jax_array,
    refusal,
    taker_name,
    wrong_type,
    wrong_value,
)
from .._base.init import Init, WeightLayout, dtype_of, first_values, gates, split_key
from .._base.precision import cast_to_precision, computes, in_float32, is_half
from .._base.sharding import explicit_mesh, matvec, parts, varying_as
from .._layers.elementwise import Dropout


class _Cell(Module):
    """The parameters of a cell: those of its gates, one below the other."""

    weight_ih: Array
    weight_hh: Array
    bias: Array | None
    input_size: int = field(static=True)
    hidden_size: int = field(static=True)
    use_bias: bool = field(static=True)

    _gates: ClassVar[int]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: the sizes of the input and of the hidden state.
        - `use_bias`: whether there are biases.
        - `dtype`: of the parameters; by default float32, or float64 if `jax_enable_x64` is
            on.
        - `key`: a PRNG key for parameter initialisation.
        - `weight_init`, `bias_init`: as for [`equinox_like.nn.Linear`][]. Each gate is
            drawn separately, with the shape `(in, out)`.

        **Raises:**

        `ValueError` if a size is negative, `ZeroDivisionError` if `hidden_size` is 0.
        """
        self.input_size = as_size(self, "input_size", input_size)
        self.hidden_size = size = as_divisor(self, "hidden_size", hidden_size)
        self.use_bias = use_bias
        rows = self._gates * size
        parameters: dict[str, Any] = {
            "weight_ih": (weight_init, (rows, self.input_size)),
            "weight_hh": (weight_init, (rows, size)),
            "bias": (bias_init, (rows,) if use_bias else None),
        }
        if isinstance(self, GRUCell):
            parameters["bias_n"] = bias_init, (size,) if use_bias else None
        drawn = first_values(self, key, math.sqrt(1 / size), dtype, **parameters)
        for name, value in zip(parameters, drawn, strict=True):
            setattr(self, name, value)

    @property
    def _layouts(self) -> dict[str, WeightLayout]:
        return dict.fromkeys(("weight_ih", "weight_hh"), gates(self._gates))

    def _zeros(self, dtype: DTypeLike | None) -> Array:
        weight = self.weight_hh
        if dtype is None:
            # An object in place of an array may have neither a dtype nor a shape.
            dtype = weight.dtype if hasattr(weight, "dtype") else dtype_of(weight)
        check_dtype("`init_state`", "dtype", dtype)
        return jnp.zeros(getattr(weight, "shape", (self.hidden_size,))[-1:], dtype)


class GRUCell(_Cell, init=False):
    r"""One step of a gated recurrent unit.

    $$r = \sigma(W_r x + U_r h + b_r), \qquad z = \sigma(W_z x + U_z h + b_z),$$

    $$n = \tanh(W_n x + b_n + r \odot (U_n h + b'_n)), \qquad h' = n + z \odot (h - n).$$

    `weight_ih` is $W_r$, $W_z$ and $W_n$, one below the other. In the same way
    `weight_hh` holds the $U$, and `bias` the $b$; `bias_n` is $b'_n$. All start uniform
    on $[-1/\sqrt{H}, 1/\sqrt{H})$, with $H$ the size of $h$. From [Learning Phrase
    Representations using RNN Encoder-Decoder](https://arxiv.org/abs/1406.1078) (Cho et
    al. 2014), in the form that resets after the product.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        cell = eqx.nn.GRUCell(3, 4, key=jax.random.key(0))
        step = lambda h, x: (cell(x, h), None)
        h, _ = jax.lax.scan(step, cell.init_state(), jnp.ones((10, 3)))
        assert h.shape == (4,)
        ```
    """

    bias_n: Array | None

    _gates = 3

    @computes("eqx.nn.GRUCell")
    def __call__(
        self, input: ArrayLike, hidden: ArrayLike, *, key: PRNGKeyArray | None = None
    ) -> Array:
        """**Arguments:**

        - `input`: shape `(input_size,)`.
        - `hidden`: shape `(hidden_size,)`.
        - `key`: ignored.

        **Returns:**

        The new hidden state, shape `(hidden_size,)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if one of the two has another shape.
        """
        check_columns(self, input, "weight_ih", "input")
        check_columns(self, hidden, "weight_hh", "hidden")
        hidden = jax_array(hidden)
        from_input = matvec(self.weight_ih, jax_array(input))
        # The flag decides, not whether the bias is `None`.
        if self.use_bias:
            from_input = in_float32(jnp.add, from_input, self.bias)
        reset_i, update_i, new_i = jnp.split(from_input, 3)
        reset_h, update_h, new_h = jnp.split(matvec(self.weight_hh, hidden), 3)
        if self.use_bias:
            new_h = in_float32(jnp.add, new_h, self.bias_n)
        reset = jax.nn.sigmoid(reset_i + reset_h)
        update = jax.nn.sigmoid(update_i + update_h)
        new = jnp.tanh(new_i + reset * new_h)
        return new + update * (hidden - new)

    def init_state(self, *, dtype: DTypeLike | None = None) -> Array:
        """Zeros to start from; by default of the weight's dtype."""
        return self._zeros(dtype)


class LSTMCell(_Cell, init=False):
    r"""One step of a long short-term memory.

    $$i, f, o = \sigma(W_{i, f, o}\, x + U_{i, f, o}\, h + b_{i, f, o}), \qquad
    g = \tanh(W_g x + U_g h + b_g),$$

    $$c' = f \odot c + i \odot g, \qquad h' = o \odot \tanh(c').$$

    `weight_ih` is $W_i$, $W_f$, $W_g$ and $W_o$, one below the other. In the same way
    `weight_hh` holds the $U$, and `bias` the $b$. All start uniform on
    $[-1/\sqrt{H}, 1/\sqrt{H})$, with $H$ the size of $h$. From [Long Short-Term
    Memory](https://doi.org/10.1162/neco.1997.9.8.1735) (Hochreiter, Schmidhuber 1997),
    with the forget gate of [Learning to
    Forget](https://doi.org/10.1162/089976600300015015) (Gers, Schmidhuber, Cummins 2000).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        cell = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))
        step = lambda state, x: (cell(x, state), None)
        (h, c), _ = jax.lax.scan(step, cell.init_state(), jnp.ones((10, 3)))
        assert h.shape == c.shape == (4,)
        ```
    """

    _gates = 4

    @computes("eqx.nn.LSTMCell")
    def __call__(
        self,
        input: ArrayLike,
        hidden: Sequence[ArrayLike],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """**Arguments:**

        - `input`: shape `(input_size,)`.
        - `hidden`: the pair `(h, c)`, each of shape `(hidden_size,)`.
        - `key`: ignored.

        **Returns:**

        The new pair `(h, c)`.

        **Raises:**

        [`equinox_like.ShapeError`][] if one of the three has another shape. `TypeError` if
        `hidden` is not a pair.
        """
        h, c = _pair(self, hidden)
        check_columns(self, input, "weight_ih", "input")
        check_columns(self, h, "weight_hh", "hidden[0]")
        check_columns(self, c, "weight_hh", "hidden[1]")
        total = matvec(self.weight_ih, jax_array(input))
        total = total + matvec(self.weight_hh, jax_array(h))
        # The flag decides, not whether the bias is `None`.
        if self.use_bias:
            total = in_float32(jnp.add, total, self.bias)
        i, f, g, o = jnp.split(total, 4)
        c = jax.nn.sigmoid(f) * jax_array(c) + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def init_state(self, *, dtype: DTypeLike | None = None) -> tuple[Array, Array]:
        """A pair of zeros to start from; by default of the weight's dtype."""
        return self._zeros(dtype), self._zeros(dtype)


def _pair(cell: Any, hidden: Any) -> tuple[Any, Any]:
    if not isinstance(hidden, tuple | list) or len(hidden) != 2:
        fix = " `cell.init_state()` makes one."
        raise wrong_type(cell, "the pair `(h, c)`, a tuple,", "hidden", hidden, fix)
    return hidden[0], hidden[1]


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
        xs, size = _as_sequence(self, xs)
        there = _there(self, size, length)
        out, last = _scanned(cells, states, xs, there, unroll=self.unroll)
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
            wanted = "a class of cells, or a function that makes one,"
            fix = " Pass the class, or give `RNN` a list of cells."
            raise wrong_type("RNN.build", wanted, "cell", cell, fix)
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
        xs, size = _as_sequence(self, xs)
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
                one = (layer,), (state,), xs, there
                (xs,), (state,) = call_part(*part, _scanned, *one, unroll=self.unroll)
            last.append(state)
        return xs, tuple(last)


def _there(layer: Any, size: int, length: Any) -> Array | None:
    """The mask of the elements of a sequence that are not padding; `None` if all."""
    if length is None:
        return None
    fix = " Use `jax.vmap` for a batch: `jax.vmap(rnn)(xs, length=lengths)`."
    check_scalar(layer, "length", length, fix)
    check_integer(layer, "length", length)
    if isinstance(length, SupportsIndex) and not is_array(length):
        if not 0 <= operator.index(length) <= size:
            wanted = f"an int from 0 to {size}, the size of the sequence,"
            raise wrong_value(layer, wanted, "length", length)
    return jnp.arange(size) < jnp.asarray(length).astype(int)


def _as_states(
    layer: Any, init: Sequence[Any] | None, number: int, what: str
) -> Sequence[Any]:
    if init is None:
        return (None,) * number
    if not isinstance(init, list | tuple) or len(init) != number:
        wanted = f"a tuple with one state for each {what}, {number} in all,"
        raise ShapeError(refusal(layer, wanted, "init", describe_node(init)))
    return init


def scan_cell(
    cell: Callable[..., Any],
    xs: Any,
    init: Any = None,
    *,
    reverse: bool = False,
    mask: Bool[Array, " length"] | None = None,
) -> tuple[Any, Any]:
    """Runs a recurrent cell over a sequence.

    **Arguments:**

    - `cell`: called as `cell(x, state)`, and returns the next state. An
        [`equinox_like.nn.LSTMCell`][], an [`equinox_like.nn.GRUCell`][] or your own.
    - `xs`: an array, or a pytree of arrays, whose first axis is that of the sequence.
    - `init`: the first state; by default `cell.init_state()`. It is cast to the dtypes in
        which the cell returns it.
    - `reverse`: if `True`, start at the end. The outputs are in the order of the inputs.
    - `mask`: shape `(length,)`; where it is `False` the state does not change, so that
        sequences of several lengths can be padded to one.

    **Returns:**

    The pair of all outputs, stacked, and the last state. The output of a step is its state,
    or the first part of it if the state is a tuple.

    **Raises:**

    [`equinox_like.ShapeError`][] if the cell returns another structure or other shapes than
    those of `init`, if `mask` has another shape, or if `xs` holds anything but arrays.
    `TypeError` if `mask` is not an array, `cell` cannot be called, or has no `init_state`
    where `init` is not given.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        cell = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))
        outputs, (h, c) = eqx.nn.scan_cell(cell, jnp.ones((10, 3)))
        assert outputs.shape == (10, 4) and (outputs[-1] == h).all()
        ```
    """
    check_layer("`scan_cell`", "cell", cell)
    xs, length = _as_sequence("`scan_cell`", xs)
    if mask is not None:
        check_input("`scan_cell`", mask, (length,), "mask")
        mask = jax_array(mask)
    states = (cast_to_precision(init),)
    outputs, final = _scanned((cell,), states, xs, mask, holds=True, reverse=reverse)
    return outputs[0], final[0]


def _scanned(
    cells: Sequence[Any],
    states: Sequence[Any],
    xs: Any,
    there: Array | None,
    *,
    holds: bool = False,
    **options: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The outputs and the last state of each cell. The first cell runs forward over the
    sequence, the second one backward. Elements where `there` is false are padding: there
    a cell keeps its state, and its output is zero, or that state if the output `holds`."""
    if there is not None:
        xs = _without_padding(xs, there)
    each = zip(cells, states, strict=True)
    states = tuple(_first_state(cell, xs, state) for cell, state in each)
    states = varying_as((cells, xs), states)
    inputs = [(xs, there)]
    if len(cells) > 1:
        inputs.append(_flipped((xs, there)))
    wide, narrow = _widened(tuple(cells))

    def output_of(state):
        return state[0] if isinstance(state, tuple) else state

    def step(states, inputs):
        new, outputs = [], []
        each = zip(cells, narrow(wide), states, inputs, strict=True)
        for cell, narrowed, state, (x, is_there) in each:
            after = call_part(cell, (), narrowed, narrowed, x, state)
            output = output_of(after)
            if is_there is not None:
                after = _where(is_there, after, state)
                if holds:
                    output = output_of(after)
                else:
                    zeros = jax.tree.map(jnp.zeros_like, output)
                    output = _where(is_there, output, zeros)
            new.append(after)
            outputs.append(output)
        return tuple(new), tuple(outputs)

    last, outputs = jax.lax.scan(step, states, inputs, **options)
    return (outputs[0], *map(_flipped, outputs[1:])), tuple(last)


def _as_sequence(taker: Any, xs: Any) -> tuple[Any, int]:
    """`xs` with JAX arrays as leaves, and the length of this sequence."""
    leaves = jax.tree.leaves(xs)
    if not leaves or not all(is_array(x) and x.ndim > 0 for x in leaves):
        raise ShapeError(
            f"{taker_name(taker)} takes an array, or a pytree of arrays, as `xs`, with "
            "the sequence along the first axis."
        )
    return jax.tree.map(jax_array, xs), leaves[0].shape[0]


def _widened(cells: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`cells` with half-precision arrays in float32, and the function that undoes it.

    The gradient of a weight is a sum over all steps, which a scan computes in the dtype
    that the weight has outside of it.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, cells)
    narrow = functools.partial(
        jax.tree.map, lambda old, x: x.astype(old.dtype) if is_half(old) else x, cells
    )
    return wide, narrow


def _first_state(cell: Any, xs: Any, init: Any) -> Any:
    """`init`, by default that of the cell, of the types that the state has after a step.

    Dtypes may differ if the inputs have other ones than the parameters, or in a `mixed`
    cell; shardings over explicit axes if the parameters are split. A list becomes the
    tuple that the cell returns.
    """
    if init is None:
        if not hasattr(cell, "init_state"):
            raise TypeError(
                f"The cell has no method `init_state`: it is {describe_node(cell)}. "
                "Pass `init`, or another cell."
            )
        init = cell.init_state()
    state = jax.tree.map(jnp.asarray, init)
    x = jax.tree.map(_type_of_row, xs)
    # Twice, because the types after the first step may change those after the second.
    for _ in range(2):
        after = jax.eval_shape(cell, x, state)
        if type(state) is list and type(after) is tuple:
            state = tuple(state)
        if _structure_and_shapes(state) != _structure_and_shapes(after):
            raise ShapeError(
                "A recurrent cell returns the next state, of the structure and shapes of "
                f"`init`. `init` is {described(state)}; the {type(cell).__name__} returned "
                f"{described(after)}. Pass an `init` like `cell.init_state()`."
            )
        state = jax.tree.map(_of_type, state, after)
    return state


def _structure_and_shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [x.shape for x in leaves]


def _type_of_row(xs: Any) -> jax.ShapeDtypeStruct:
    where = None
    if (mesh := explicit_mesh(xs)) is not None:
        where = NamedSharding(mesh, PartitionSpec(*parts(xs)[1:]))
    options = {"weak_type": is_weak(xs), "sharding": where}
    return jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype, **options)


def _of_type(x: Any, like: Any) -> Any:
    # A PRNG key has no `astype`.
    x = x if is_typed_key(x) else x.astype(like.dtype)
    split = None if like.sharding is None else tuple(like.sharding.spec)
    return x if split in (None, parts(x)) else jax.sharding.reshard(x, like.sharding)


def _flipped(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.flip(x, 0), tree)


def _without_padding(xs: Any, there: Array) -> Any:
    """`xs`, with zeros where `there` is false. A cell must not see a NaN in padding,
    because a zero gradient times NaN is NaN."""

    def each(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 1)), x, 0)

    return jax.tree.map(each, xs)


def _where(condition: Array, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), tree, other)
