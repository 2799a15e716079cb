"""`ReversibleBlock` and `ReversibleSequential`: layers that compute inputs from outputs.

So their inputs need not be stored for the backward pass.
"""

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from ..._errors import ShapeError
from ..._loops import filter_scan
from ..._module import Frozen, Module, field
from ..._transforms.invertible import filter_invertible
from ..._tree.arrays import reusable
from ..._tree.nodes import describe_node
from ..._tree.partitioning import map_arrays
from ..._typing import PRNGKeyArray
from .._base.checks import as_axis, as_layers, check_layer, described, wrong_type
from .._base.init import split_key
from .._base.precision import computes
from .._base.sharding import parts, split_by, varying_as
from .._base.state import is_stateful, key_for
from .stacked import Stacked, as_before, policy_of, strongly_typed

_X = TypeVar("_X")


class ReversibleBlock(Module):
    """An invertible block: two residual layers, each on one half of the input.

    The halves `x1` and `x2` become `y1 = x1 + f(x2)` and `y2 = x2 + g(y1)`. So `x2` is
    `y2 - g(y1)` and `x1` is `y1 - f(x2)`, whatever `f` and `g` are. From [The
    Reversible Residual Network](https://arxiv.org/abs/1707.04585) (Gomez et al. 2017), with
    the coupling of [NICE](https://arxiv.org/abs/1410.8516) (Dinh et al. 2015).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        kf, kg = jax.random.split(jax.random.key(0))
        block = eqx.nn.ReversibleBlock(
            eqx.nn.MLP(4, 4, 16, 1, key=kf), eqx.nn.MLP(4, 4, 16, 1, key=kg)
        )
        x = jnp.arange(8.0)
        assert jnp.allclose(block.inverse(block(x)), x, atol=1e-5)
        y1, y2 = block((x[:4], x[4:]))
        ```
    """

    f: Any
    g: Any
    split_axis: int = field(static=True)

    def __init__(self, f: Any, g: Any, *, split_axis: int = 0):
        """**Arguments:**

        - `f`, `g`: layers, Modules of your own or plain functions. They return an array
            of the shape and dtype of their input, which is one half of the input of the
            block.
        - `split_axis`: the axis along which an input is split in halves.

        **Raises:**

        `TypeError` if `f` or `g` is stateful, or cannot be called. `ValueError` if
        `split_axis` is not an integer.
        """
        for name, layer in (("f", f), ("g", g)):
            check_layer("ReversibleBlock", name, layer)
            _check_stateless(f"`{name}` of ReversibleBlock", layer)
        self.f, self.g = f, g
        self.split_axis = as_axis(self, "split_axis", split_axis)

    @computes("eqx.nn.ReversibleBlock")
    def __call__(self, x: _X, *, key: PRNGKeyArray | None = None) -> _X:
        """**Arguments:**

        - `x`: an array with an even size along `split_axis`; or a pair `(x1, x2)`.
        - `key`: split into one for `f` and one for `g`, if they take a `key`.

        **Returns:**

        The two results, joined or as a pair, as the input was.

        **Raises:**

        [`equinox_like.ShapeError`][] if `x` cannot be halved, or if `f` or `g` changes
        the shape or dtype.
        """
        x1, x2 = self._halves("x", x)
        f_key, g_key = _split(key, 2, self)
        y1 = x1 + self._residual("f", x2, x1, f_key)
        y2 = x2 + self._residual("g", y1, x2, g_key)
        return self._joined(x, y1, y2)

    @computes("eqx.nn.ReversibleBlock.inverse")
    def inverse(self, y: _X, *, key: PRNGKeyArray | None = None) -> _X:
        """The input `x` for which a call with the same `key` returns `y`."""
        y1, y2 = self._halves("y", y)
        f_key, g_key = _split(key, 2, self)
        x2 = y2 - self._residual("g", y1, y2, g_key)
        x1 = y1 - self._residual("f", x2, y1, f_key)
        return self._joined(y, x1, x2)

    def _halves(self, name: str, x: Any) -> tuple[Array, ...]:
        if isinstance(x, tuple) and len(x) == 2:
            return tuple(map(jnp.asarray, x))
        if isinstance(x, tuple | list):
            raise wrong_type(self, "an array or a tuple of two", name, x)
        axis, shape = self.split_axis, jnp.shape(x)
        if not -len(shape) <= axis < len(shape) or shape[axis] % 2:
            raise ShapeError(
                f"ReversibleBlock splits `{name}` in halves along axis {axis}, but was "
                f"given shape {shape}. Pad it, or choose another `split_axis`."
            )
        return tuple(jnp.split(x, 2, axis))

    def _residual(self, name: str, x: Array, like: Array, key: Any) -> Any:
        out = _call(getattr(self, name), x, key)
        # A sum that broadcasts or promotes cannot be inverted.
        if (jnp.shape(out), jnp.result_type(out)) != (like.shape, like.dtype):
            raise ShapeError(
                f"`{name}` of ReversibleBlock must return an array like the half of the "
                f"input that it is added to, which has {described(like)}. It returned "
                f"{described(out)}."
            )
        return split_by(out, parts(like))

    def _joined(self, x: Any, first: Array, second: Array) -> Any:
        if isinstance(x, tuple):
            return first, second
        return jnp.concatenate([first, second], self.split_axis)


class ReversibleSequential(Module):
    """Calls invertible blocks one after the other; the memory of the gradient does not
    grow with their number.

    The backward pass computes the input of each block from its output, by
    [`equinox_like.filter_invertible`][], at the cost of one more evaluation of each
    block. From [The Reversible Residual Network](https://arxiv.org/abs/1707.04585)
    (Gomez et al. 2017).

    Gradients are those of plain automatic differentiation, except for the rounding
    errors of the recomputed inputs, which grow with the depth: they are small in
    float32 and larger in bfloat16.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def make(key):
            kf, kg = jax.random.split(key)
            f, g = eqx.nn.Linear(4, 4, key=kf), eqx.nn.Linear(4, 4, key=kg)
            return eqx.nn.ReversibleBlock(f, g)

        # Traced and compiled once, whatever the depth; a list of blocks does as well.
        blocks = eqx.nn.Stacked(make, 32, key=jax.random.key(0))
        model = eqx.nn.ReversibleSequential(blocks)
        grads = eqx.filter_grad(lambda model: model(jnp.ones(8)).sum())(model)
        assert grads.blocks.layers.f.weight.shape == (32, 4, 4)
        ```
    """

    blocks: Any
    memory_efficient: bool = field(static=True)

    def __init__(
        self, blocks: Iterable[Any] | Stacked[Any], *, memory_efficient: bool = True
    ):
        """**Arguments:**

        - `blocks`: Modules with `__call__(x, *, key)` and `inverse(y, *, key)`, such as
            [`equinox_like.nn.ReversibleBlock`][]: several, or a
            [`equinox_like.nn.Stacked`][] of them. The output of a block has the
            structure, shapes and dtypes of its input.
        - `memory_efficient`: if `False`, automatic differentiation stores all inputs, and
            forward mode is possible, too.

        **Raises:**

        `TypeError` if a block has no `inverse`, or is stateful: it is evaluated again
        in the backward pass, and would update the state twice.
        """
        if not isinstance(blocks, Stacked):
            blocks = as_layers("ReversibleSequential", "blocks", blocks)
        self.blocks = blocks
        self.memory_efficient = memory_efficient
        for name, block in self._named():
            _check_stateless(f"`{name}` of ReversibleSequential", block)
            if not callable(getattr(block, "inverse", None)):
                raise TypeError(
                    f"`{name}` of ReversibleSequential has no method `inverse(y, *, "
                    f"key)`: it is {describe_node(block)}. Use a ReversibleBlock."
                )

    @computes("eqx.nn.ReversibleSequential")
    def __call__(self, x: _X, *, key: PRNGKeyArray | None = None) -> _X:
        """**Arguments:**

        - `x`: passed to the first block; the result of each one is passed to the next.
        - `key`: split into one for each block, if it takes a `key`.

        **Returns:**

        The last result.

        **Raises:**

        [`equinox_like.ShapeError`][] if a block changes structure, shape or dtype of `x`.
        """
        return self._run(x, key, reverse=False)

    @computes("eqx.nn.ReversibleSequential.inverse")
    def inverse(self, y: _X, *, key: PRNGKeyArray | None = None) -> _X:
        """The input `x` for which a call with the same `key` returns `y`."""
        return self._run(y, key, reverse=True)

    def _named(self) -> list[tuple[str, Any]]:
        blocks = self.blocks
        if isinstance(_content(blocks), Stacked):
            return [("blocks.layers", blocks.layers)]
        return [(f"blocks[{i}]", block) for i, block in enumerate(blocks)]

    def _run(self, x: Any, key: Any, reverse: bool) -> Any:
        blocks = self.blocks
        number = len(blocks)
        if number == 0:
            return x
        x = varying_as((x, self, key), jtu.tree_map(strongly_typed, x))
        keys = _split(key, number, self)
        step, chain = (_backward, _revert) if reverse else (_forward, _apply)
        if not isinstance(_content(blocks), Stacked):
            pairs = zip(self._named(), keys, strict=True)
            calls = [_BlockCall(name, block, k) for (name, block), k in pairs]
            calls = calls[::-1] if reverse else calls
            if self.memory_efficient:
                return chain(calls, x)
            return functools.reduce(lambda x, call: step(call, x), calls, x)
        ((name, layers),) = self._named()
        keys = None if key is None else keys
        # `number` gives the scan a length if the layers have no arrays.
        stacked = _BlockCall(name, layers, keys, jnp.arange(number))
        if self.memory_efficient:
            if reverse:
                stacked = map_arrays(lambda x: reusable(x[::-1]), stacked)
            return chain(stacked, x)
        policy = policy_of(blocks.checkpoint)
        options = {"reverse": reverse, "unroll": blocks.unroll, "checkpoint": policy}
        return filter_scan(
            lambda x, call: (step(call, x), None), x, stacked, **options
        )[0]


class _BlockCall(Module):
    """A block, with its PRNG key and its name in errors; or many of them, stacked."""

    name: str = field(static=True)
    block: Any
    key: Any
    number: Any = None


def _forward(call: _BlockCall, x: Any) -> Any:
    y = _call(call.block, x, call.key)
    return as_before(f"`{call.name}` of ReversibleSequential", x, y)


def _backward(call: _BlockCall, y: Any) -> Any:
    x = _call(call.block.inverse, y, call.key)
    return as_before(f"The inverse of `{call.name}` of ReversibleSequential", y, x)


_apply = filter_invertible(_forward, inverse=_backward)
_revert = filter_invertible(_backward, inverse=_forward)


def _call(layer: Any, x: Any, key: Any) -> Any:
    return layer(x, **key_for(layer, key))


def _split(key: Any, number: int, layer: Any) -> Any:
    return [None] * number if key is None else split_key(key, number, layer)


def _content(blocks: Any) -> Any:
    return blocks.value if isinstance(blocks, Frozen) else blocks


def _check_stateless(what: str, layer: Any) -> None:
    if is_stateful(layer):
        raise TypeError(
            f"{what} is stateful: it is {describe_node(layer)}. Use a layer without a "
            "state, for example LayerNorm for BatchNorm."
        )
