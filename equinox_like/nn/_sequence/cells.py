"""`GRUCell` and `LSTMCell`: one step of a recurrent network."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._module import Module, field
from ..._tree.nodes import describe_node
from ..._typing import ArrayLike, DTypeLike, PRNGKeyArray
from .._base.arguments import as_divisor, as_size, check_dtype
from .._base.init import Init, Layout, dtype_of, first_values, gates
from .._base.inputs import check_columns, jax_array
from .._base.precision import computes, in_float32
from .._base.sharding import matvec


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
    def _layouts(self) -> dict[str, Layout]:
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
        total = matvec(self.weight_ih, jax_array(input)) + matvec(
            self.weight_hh, jax_array(h)
        )
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
        shape = getattr(hidden, "shape", None)
        given = describe_node(hidden) if shape is None else f"an array of shape {shape}"
        raise TypeError(
            f"{type(cell).__name__} takes the pair `(h, c)` as `hidden`, a tuple; got "
            f"{given}. `cell.init_state()` makes one."
        )
    return hidden[0], hidden[1]
