"""Layers whose parameters are computed: `SpectralNorm`, `WeightNorm` and `Shared`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._call_path import call_part
from ..._errors import did_you_mean
from ..._module import Module, field
from ..._tree import is_array, is_array_like, is_inexact_array, tree_at, tree_pformat
from ..._tree.paths import read
from ..._typing import ArrayLike, PRNGKeyArray
from .._base.checks import as_eps, as_size, check_not_layer_class
from .._base.init import split_key
from .._base.precision import accumulation_dtype, computes
from .._base.sharding import matvec, split_as
from .._base.state import State, StatefulLayer, StateIndex, at_inference, check_state
from .._layers.norm import nan_if_infinite, squared
from .lora import merge_lora
from .quantised import with_weight

_Layer = TypeVar("_Layer", covariant=True)
_Y = TypeVar("_Y")


class SpectralNorm(StatefulLayer, Generic[_Layer]):
    r"""Divides the weight of a layer by its largest singular value.

    A power iteration estimates this value, and continues at each call in training:

    $$u \leftarrow \frac{W v}{\|W v\|}, \qquad v \leftarrow \frac{W^T u}{\|W^T u\|}, \qquad
    \sigma = u^T W v.$$

    A weight with more than two axes is treated as a matrix with a row for each element of
    its first axis. Gradients flow through $W$, not through $u$ and $v$, which are kept in
    the [`equinox_like.nn.State`][]. From [Spectral Normalization for Generative
    Adversarial Networks](https://arxiv.org/abs/1802.05957) (Miyato et al. 2018).

    A weight of zeros is not divided.

    For complex weights $T$ is the conjugate transpose, and $\sigma$ the largest singular
    value. (Equinox 0.13.8 does not conjugate, which gives another number.)

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def make(key):
            k1, k2 = jax.random.split(key)
            linear = eqx.nn.Linear(3, 2, key=k1)
            return eqx.nn.SpectralNorm(linear, "weight", key=k2)

        layer, state = eqx.nn.make_with_state(make)(jax.random.key(0))
        apply = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))
        y, state = apply(jnp.ones((8, 3)), state)
        assert y.shape == (8, 2)
        ```
    """

    layer: _Layer
    weight_name: str = field(static=True)
    uv_index: StateIndex[Any]
    num_power_iterations: int = field(static=True)
    eps: float = field(static=True)
    inference: bool | Array | None

    def __init__(
        self,
        layer: _Layer,
        weight_name: str,
        num_power_iterations: int = 1,
        eps: float = 1e-12,
        inference: bool | None = False,
        *,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `layer`: the layer to wrap. The weight of a [`equinox_like.nn.LoRA`][] is the
            updated one.
        - `weight_name`: the name of its weight, which has two axes at least.
        - `num_power_iterations`: the number of iterations at each call in training.
        - `eps`: the lower bound of each norm, against division by zero.
        - `inference`: if `True`, `u` and `v` are not updated. If `None`,
            [`equinox_like.inference`][] and [`equinox_like.training`][] decide.
        - `key`: a PRNG key for the initial `u` and `v`, which 15 iterations then
            improve.

        **Raises:**

        `ValueError` if the weight has fewer axes, or `num_power_iterations` or `eps` is
        not a number of 0 or more; `AttributeError` if there is no such weight.
        """
        weight = _weight_of(self, layer, weight_name)
        self.layer = layer
        self.weight_name = weight_name
        self.num_power_iterations = as_size(
            self, "num_power_iterations", num_power_iterations
        )
        self.eps = as_eps(self, eps)
        self.inference = inference
        if weight.ndim < 2:
            raise ValueError(
                f"SpectralNorm takes a weight with at least two axes; `{weight_name}` "
                f"has shape {weight.shape}."
            )
        matrix = _as_matrix(weight)
        u_key, v_key = split_key(key, 2, self)
        u = jax.random.normal(u_key, matrix.shape[:1], matrix.dtype)
        v = jax.random.normal(v_key, matrix.shape[1:], matrix.dtype)
        work = accumulation_dtype(weight)
        u, v = _iterate(*(a.astype(work) for a in (matrix, u, v)), 15, self.eps)
        self.uv_index = StateIndex((u.astype(weight.dtype), v.astype(weight.dtype)))

    @computes("eqx.nn.SpectralNorm", "nothing")
    def __call__(
        self: "SpectralNorm[Callable[..., _Y]]",
        x: ArrayLike,
        state: State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[_Y, State]:
        """**Arguments:**

        - `x`: the input of the wrapped layer.
        - `state`: from [`equinox_like.nn.make_with_state`][], or the last call.
        - `key`: ignored.
        - `inference`: overrides the layer's own, unless it is `None`.

        **Returns:**

        The pair of the wrapped layer's output and the new state.

        **Raises:**

        `TypeError` if `state` is not a [`equinox_like.nn.State`][].
        """
        check_state(self, state)
        layer = merge_lora(self.layer)
        weight = jnp.asarray(getattr(layer, self.weight_name))
        u, v = state.get(self.uv_index)
        # Under a `Policy` the weight is cast, but the state is not.
        stored = u.dtype
        # In float16 the squares of small and of large weights would be lost.
        work = accumulation_dtype(weight, u)
        matrix, u, v = (a.astype(work) for a in (_as_matrix(weight), u, v))
        for_inference = at_inference(self, inference)
        if not for_inference:
            fixed = jax.lax.stop_gradient(matrix)
            u, v = _iterate(fixed, u, v, self.num_power_iterations, self.eps)
        u, v = jax.lax.stop_gradient((u, v))
        sigma = split_as(jnp.vdot, (), u, matvec(matrix, v))
        # A weight of zeros stays as it is.
        sigma = jnp.where(sigma == 0, 1, sigma)
        divided = (weight.astype(work) / sigma).astype(weight.dtype)
        layer = with_weight(layer, self.weight_name, divided)
        out = call_part(self, ("layer",), layer, layer, x)
        if not for_inference:
            # Last, so that the state is still valid if the layer refuses `x`.
            state = state.set(self.uv_index, (u.astype(stored), v.astype(stored)))
        return out, state


class WeightNorm(Module, Generic[_Layer]):
    r"""Separates the length of a layer's weights from their direction.

    $$W = g\, \frac{v}{\|v\|},$$

    where $v$ is the weight that the layer has, and $g$ starts as $\|v\|$, so that the
    output does not change at first. The norm is taken over all axes except `axis`, for
    each element of that axis. Where the norm is zero, $W$ is zero, too. From [Weight
    Normalization](https://arxiv.org/abs/1602.07868) (Salimans, Kingma 2016).

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        layer = eqx.nn.WeightNorm(linear)
        assert layer.g.shape == (2, 1)
        assert jnp.allclose(layer(jnp.ones(3)), linear(jnp.ones(3)), atol=1e-6)
        ```
    """

    layer: _Layer
    g: Array
    weight_name: str = field(static=True)
    axis: int | None = field(static=True)

    def __init__(
        self, layer: _Layer, weight_name: str = "weight", axis: int | None = 0
    ):
        """**Arguments:**

        - `layer`: the layer to wrap. The weight of a [`equinox_like.nn.LoRA`][] is the
            updated one.
        - `weight_name`: the name of its weight.
        - `axis`: the axis along which each slice has a length of its own. `None`: one
            length for the whole weight.

        **Raises:**

        `AttributeError` if the layer has no such weight; `ValueError` if the weight has
        no such axis.
        """
        weight = _weight_of(self, layer, weight_name)
        self.layer = layer
        self.weight_name = weight_name
        self.axis = axis
        if axis is not None and axis not in range(-weight.ndim, weight.ndim):
            raise ValueError(
                f"WeightNorm takes an axis of the weight as `axis`, or None; got {axis!r}, "
                f"and `{weight_name}` has shape {weight.shape}."
            )
        lengths = jnp.sqrt(_square_sum(weight, axis))
        is_inexact = is_inexact_array(weight)
        self.g = lengths.astype(weight.real.dtype) if is_inexact else lengths

    @computes("eqx.nn.WeightNorm", "nothing")
    def __call__(
        self: "WeightNorm[Callable[..., _Y]]",
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
    ) -> _Y:
        """**Arguments:**

        - `x`: the input of the wrapped layer.
        - `key`: ignored.

        **Returns:**

        The wrapped layer's output. The weight is computed in float32 at least.
        """
        layer = merge_lora(self.layer)
        v, g = jnp.asarray(getattr(layer, self.weight_name)), jnp.asarray(self.g)
        dtype = jnp.result_type(v.dtype, g.dtype)
        v = v.astype(accumulation_dtype(v))
        square = _square_sum(v, self.axis)
        is_zero = square == 0
        # The gradient of the root of 0 would be NaN, although its value is masked.
        norm = jnp.sqrt(jnp.where(is_zero, 1, square))
        weight = jnp.where(is_zero, 0, v * g.astype(square.dtype) / norm)
        layer = with_weight(layer, self.weight_name, weight.astype(dtype))
        return call_part(self, ("layer",), layer, layer, x)


def _weight_of(norm: Any, layer: Any, name: str) -> Array:
    taker = type(norm).__name__
    check_not_layer_class(taker, "layer", layer)
    weight = getattr(layer, name, None)
    if is_array_like(weight):
        return jnp.asarray(weight)
    known = [
        n for n, value in getattr(layer, "__dict__", {}).items() if is_array(value)
    ]
    raise AttributeError(
        f"{taker} takes the name of an array of its layer as `weight_name`; got {name!r}. "
        f"This {type(layer).__name__} has {', '.join(map(repr, known)) or 'no arrays'}."
        + did_you_mean(name, known, "{!r}")
    )


def _as_matrix(weight: Array) -> Array:
    # Not -1, which is ambiguous if there are no rows.
    return weight.reshape(len(weight), math.prod(weight.shape[1:]))


def _iterate(
    matrix: Array, u: Array, v: Array, number: int, eps: float
) -> tuple[Array, Array]:
    for _ in range(number):
        u = _normalised(matvec(matrix, v), eps, u)
        v = _normalised(matvec(matrix.T.conj(), u), eps, v)
    return u, v


def _normalised(vector: Array, eps: float, before: Array) -> Array:
    """`vector`, of length 1. If it is zero, `before`: all later ones would be zero."""
    norm = nan_if_infinite(jnp.linalg.norm(vector))
    unit = vector / jnp.maximum(norm, eps).astype(vector.dtype)
    # A sum: for `where`, explicit axes of a mesh would have to split both alike.
    return unit + before * (norm == 0).astype(before.dtype)


def _square_sum(v: Array, axis: int | None) -> Array:
    """The sum of squares over all axes but one, in float32 at least."""
    v = v.astype(accumulation_dtype(v))
    kept = None if axis is None else axis % v.ndim
    others = tuple(i for i in range(v.ndim) if i != kept)
    return nan_if_infinite(jnp.sum(squared(v), others, keepdims=True))


_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True, repr=False)
class SharedNode:
    """Stands in a [`equinox_like.nn.Shared`][] where a node was removed."""

    def __repr__(self) -> str:
        return "SharedNode"


class Shared(Module, Generic[_Tree]):
    """Shares parameters between places of a model, as in tied weights.

    It holds each shared node in one place only. A call returns the whole model, with the
    node in all its places. So a shared array has one gradient, the sum over its uses, and
    an optimiser updates it once.

    It shares arrays with the tree that it is made of: to donate one deletes those of the
    other. [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class LanguageModel(eqx.Module):
            shared: eqx.nn.Shared[tuple[eqx.nn.Embedding, eqx.nn.Linear]]

            def __init__(self, key):
                k1, k2 = jax.random.split(key)
                embedding = eqx.nn.Embedding(10, 4, key=k1)
                linear = eqx.nn.Linear(4, 10, use_bias=False, key=k2)
                self.shared = eqx.nn.Shared(
                    (embedding, linear), where="[1].weight", get="[0].weight"
                )

            def __call__(self, token):
                embedding, linear = self.shared()
                return linear(embedding(token))

        model = LanguageModel(jax.random.key(0))
        assert len(jax.tree.leaves(eqx.filter(model, eqx.is_array))) == 1
        assert model(jnp.array(3)).shape == (10,)
        ```
    """

    pytree: _Tree
    where: Callable[[_Tree], Any] | str | Sequence[str]
    get: Callable[[_Tree], Any] | str | Sequence[str]

    def __init__(
        self,
        pytree: _Tree,
        where: Callable[[_Tree], Any] | str | Sequence[str],
        get: Callable[[_Tree], Any] | str | Sequence[str],
    ):
        """**Arguments:**

        - `pytree`: the model, or the part of it that has the nodes.
        - `where`: the node to remove, or several: a path such as `"layers[0].weight"`, a
            sequence of paths, or a function that returns the node, or a sequence of
            nodes, as in [`equinox_like.tree_at`][].
        - `get`: the nodes that take their places, one for each, in the same form. A
            function may compute them, for example a transpose. Paths can be pickled and
            exported; a lambda cannot.

        **Raises:**

        `ValueError` if a removed node and its replacement differ in structure, shape or
        dtype, if they are the same node, or if a path does not exist.
        """
        removed = _nodes_at(where, pytree)
        is_one = isinstance(where, str) or (
            callable(where) and _is_one(where(pytree), removed)
        )
        replaced = [_asked(get, pytree)] if is_one else list(_asked(get, pytree))
        if len(removed) != len(replaced):
            raise ValueError(
                "`where` and `get` must return the same number of nodes: `where` "
                f"returned {len(removed)}, and `get` {len(replaced)}."
            )
        for node, other in zip(removed, replaced, strict=True):
            if _description(node) != _description(other):
                raise ValueError(
                    "Every node being shared together must have the same structure, "
                    f"shapes and dtypes. `where` returned {tree_pformat(node)}, but `get` "
                    f"returned {tree_pformat(other)}."
                )
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: SharedNode())
        # A node may hold others of its own, from a `Shared` within it.
        if _number_removed(_asked(get, self.pytree)) > _number_removed(replaced):
            raise ValueError(
                "`where` and `get` of Shared returned the same node. `get` must return "
                "another one, because the node of `where` is removed."
            )
        self.where = where
        self.get = get

    @computes(None)
    def __call__(self) -> _Tree:
        """**Returns:** the whole tree."""
        return tree_at(self.where, self.pytree, replace=_asked(self.get, self.pytree))


def _asked(get: Any, tree: Any) -> Any:
    """What the function `get` returns of the tree, or what it has at the paths `get`."""
    if callable(get):
        return get(tree)
    try:
        # Not among the nodes: a LoRA computes the weight that it has.
        if isinstance(get, str):
            return read(get, tree)
        if isinstance(get, list | tuple) and all(isinstance(p, str) for p in get):
            return [read(path, tree) for path in get]
        return _nodes_at(get, tree)
    except (TypeError, ValueError) as error:
        error_class = TypeError if isinstance(error, TypeError) else ValueError
        raise error_class(str(error).replace("`where`", "`get`")) from None


def _nodes_at(where: Any, tree: Any) -> list[Any]:
    nodes: list[Any] = []
    tree_at(where, tree, replace_fn=nodes.append)
    return nodes


def _is_one(answer: Any, nodes: Sequence[Any]) -> bool:
    """Whether `where` returned a single node, not a sequence of nodes."""
    if not isinstance(answer, list | tuple) or len(answer) != len(nodes):
        return True
    return any(a is not b for a, b in zip(answer, nodes, strict=True))


def _number_removed(tree: Any) -> int:
    return sum(isinstance(leaf, SharedNode) for leaf in jax.tree.leaves(tree))


def _description(node: Any) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(node)
    return treedef, [
        (jnp.shape(x), jnp.result_type(x)) if is_array_like(x) else type(x)
        for x in leaves
    ]
