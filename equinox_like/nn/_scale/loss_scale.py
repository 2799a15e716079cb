"""Loss scales, which keep gradients in half precision from underflow."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool

from ..._compat.tracing import Tracer
from ..._module import Module, field
from ..._tree import (
    is_array,
    is_array_like,
    is_inexact_array,
    is_inexact_array_like,
    tree_at,
)
from ..._tree.deleted import deleted_named
from ..._tree.match import flatten_up_to
from ..._tree.nodes import describe_node, path_str
from ..._typing import ArrayLike
from .._base.arguments import as_number, as_size, wrong_type
from .._base.inputs import described, jax_array
from .._base.precision import accumulation_dtype

_Tree = TypeVar("_Tree")


class NoLossScale(Module):
    """A loss scale that does nothing: a placeholder for the other ones.

    !!! example

        ```python
        import equinox_like as eqx

        scale = eqx.nn.NoLossScale()
        assert scale.scale(3.0) == scale.unscale(3.0) == 3.0
        ```
    """

    def scale(self, loss: Any) -> Any:
        """Multiplies the loss by the scale, which is 1: returns `loss`."""
        return loss

    @deleted_named
    def unscale(self, grads: _Tree) -> _Tree:
        """Divides gradients by the scale, which is 1: returns `grads`."""
        return grads

    def adjust(self, finite: Any) -> "NoLossScale":
        """The loss scale for the next step: returns itself."""
        return self


class _LossScale(Module):
    """What static and dynamic loss scales share."""

    loss_scale: Array = field(trainable=False)

    def scale(self, loss: ArrayLike) -> Array:
        """Multiplies the loss by the scale, in the loss's dtype."""
        return _times(jnp.asarray(loss), self.loss_scale)

    @deleted_named
    def unscale(self, grads: _Tree) -> _Tree:
        """Divides the gradients by the scale, and returns them in float32 at least: many
        of those that the scale keeps from underflow are too small for float16."""

        def each(g: Any) -> Any:
            if not is_inexact_array(g):
                return g
            g = jax_array(g)
            # In half precision, the inverse of a large scale would be rounded or vanish.
            wide = accumulation_dtype(g)
            inverse = 1 / self.loss_scale.astype(jnp.finfo(wide).dtype)
            # Unlike a quotient, the product is exact for powers of two on every device.
            return _times(g.astype(wide), inverse)

        return jax.tree.map(each, grads)


class StaticLossScale(_LossScale):
    """A constant loss scale.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        scale = eqx.nn.StaticLossScale(1024.0)
        assert scale.unscale(scale.scale(jnp.float32(3))) == 3
        ```
    """

    def __init__(self, scale: ArrayLike):
        """**Arguments:**

        - `scale`: the factor for the loss. A power of two causes no rounding.

        **Raises:**

        `ValueError` unless `scale` is finite and above 0.
        """
        self.loss_scale = _first_scale(self, scale)

    def adjust(self, finite: Any) -> "StaticLossScale":
        """The loss scale for the next step: returns itself."""
        return self


class DynamicLossScale(_LossScale):
    """A loss scale that grows while all gradients are finite, and shrinks when one is
    not.

    From [Mixed Precision Training](https://arxiv.org/abs/1710.03740) (Micikevicius et al.
    2018). It is a pytree of arrays, so one object works through `jax.jit` and
    `jax.lax.scan`, and nothing waits for the device.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def step(model, scale, x):
            def loss(model):
                return scale.scale(jnp.sum((model["w"] * x) ** 2))

            grads = scale.unscale(eqx.filter_grad(loss)(model))
            finite = eqx.nn.all_finite(grads)
            updated = eqx.apply_updates(model, {"w": -0.1 * grads["w"]})
            model = eqx.nn.select_tree(finite, updated, model)
            return model, scale.adjust(finite)

        model = {"w": jnp.ones(3, jnp.float16)}
        scale = eqx.nn.DynamicLossScale()
        model, scale = eqx.filter_jit(step)(model, scale, jnp.ones(3, jnp.float16))
        assert scale.loss_scale == 2.0**14  # 2.0**15 was too much for float16
        model, scale = eqx.filter_jit(step)(model, scale, jnp.ones(3, jnp.float16))
        assert jnp.allclose(model["w"], 0.8, atol=1e-3)
        ```
    """

    good_steps: Array = field(trainable=False)
    period: int = field(static=True)
    factor: float = field(static=True)
    min_scale: float = field(static=True)
    max_scale: float = field(static=True)

    def __init__(
        self,
        scale: ArrayLike = 2.0**15,
        *,
        period: int = 2000,
        factor: float = 2.0,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ):
        """**Arguments:**

        - `scale`: the initial scale of the loss. It may be outside of the bounds, and is
            brought within them when it grows or shrinks.
        - `period`: the number of finite steps in a row after which the scale grows.
        - `factor`: the factor by which it grows and shrinks.
        - `min_scale`, `max_scale`: the bounds of a scale that grows or shrinks, above 0.

        **Raises:**

        `ValueError` if `factor` is not above 1, `min_scale` is not above 0 or is above
        `max_scale`, `period` is not an int of 1 or more, or `scale` is not finite and
        above 0.
        """
        # Python numbers, because one of NumPy could change the dtype of the scale.
        factor = as_number(self, "factor", factor)
        min_scale = as_number(self, "min_scale", min_scale)
        max_scale = as_number(self, "max_scale", max_scale)
        # Written so that NaN is refused, too.
        if not factor > 1:
            raise ValueError(
                f"DynamicLossScale takes a `factor` above 1; got {factor!r}."
            )
        if not 0 < min_scale <= max_scale:  # a scale of 0 would stay 0
            raise ValueError(
                "DynamicLossScale takes a `min_scale` above 0 and of at most `max_scale`; "
                f"got {min_scale!r} and {max_scale!r}."
            )
        self.loss_scale = _first_scale(self, scale)
        self.good_steps = jnp.zeros((), jnp.int32)
        self.period = as_size(self, "period", period, minimum=1)
        self.factor = factor
        self.min_scale = min_scale
        self.max_scale = max_scale

    def adjust(self, finite: ArrayLike) -> "DynamicLossScale":
        """The loss scale for the next step: larger, smaller or the same.

        **Arguments:**

        - `finite`: whether all gradients of this step are finite, from
            [`equinox_like.nn.all_finite`][].

        **Raises:**

        `TypeError` for floats, such as a loss.
        """
        if not _is_scalar(finite) or is_inexact_array_like(finite):
            fix = " Pass `all_finite(grads)`."
            raise wrong_type("DynamicLossScale", "a scalar bool", "finite", finite, fix)
        steps = jnp.where(finite, self.good_steps + 1, 0)
        is_due = steps >= self.period
        grown = jnp.minimum(self.loss_scale * self.factor, self.max_scale)
        shrunk = jnp.maximum(self.loss_scale / self.factor, self.min_scale)
        kept = jnp.where(is_due, grown, self.loss_scale)
        scale = jnp.where(finite, kept, shrunk)
        steps = jnp.where(is_due, 0, steps)
        return tree_at(lambda s: (s.loss_scale, s.good_steps), self, (scale, steps))


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether all floating-point and complex numbers of a tree are free of infinities
    and NaN.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.nn.all_finite({"a": jnp.ones(3), "b": None})
        assert not eqx.nn.all_finite([jnp.ones(3), jnp.array(jnp.inf)])
        ```
    """
    finite = jnp.array(True)
    for x in filter(is_inexact_array_like, jax.tree.leaves(tree)):
        finite = jnp.logical_and(finite, jnp.isfinite(x).all())
    return finite


def select_tree(pred: ArrayLike, on_true: _Tree, on_false: _Tree) -> _Tree:
    """Chooses one of two trees of the same structure, by a bool that may be traced.

    **Arguments:**

    - `pred`: a scalar bool.
    - `on_true`, `on_false`: the trees. Leaves that are not arrays are those of
        `on_true`.

    **Raises:**

    `TypeError` if `pred` is not a scalar bool. `ValueError`, naming the path, if the
    structures differ, if two arrays have another shape or dtype, or if only one of two
    leaves is an array.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        chosen = eqx.nn.select_tree(jnp.array(False), [jnp.ones(2)], [jnp.zeros(2)])
        assert chosen[0].tolist() == [0, 0]
        ```
    """
    if not _is_scalar(pred) or not jnp.issubdtype(jnp.result_type(pred), bool):
        fix = " To choose for each of a batch of trees, map it by `filter_vmap`."
        raise wrong_type("`select_tree`", "a scalar bool", "pred", pred, fix)

    def each(path: Any, a: Any, b: Any) -> Any:
        are_arrays = is_array(a), is_array(b)
        if not any(are_arrays) and jtu.all_leaves([b]):
            return a
        if not all(are_arrays) or described(a) != described(b):
            raise ValueError(
                "`select_tree` takes trees of one structure, whose arrays have equal "
                f"shapes and dtypes; `{path_str(path, 'on_true')}` is {describe_node(a)}, "
                f"and `{path_str(path, 'on_false')}` {describe_node(b)}."
            )
        return jax.lax.select(pred, a, b)

    pred = jnp.asarray(pred)
    items, treedef = jtu.tree_flatten_with_path(on_true)
    others = flatten_up_to(treedef, on_true, on_false, "on_true", "on_false")
    return treedef.unflatten(
        each(path, a, b) for (path, a), b in zip(items, others, strict=True)
    )


def _is_scalar(x: Any) -> bool:
    return is_array_like(x) and jnp.shape(x) == ()


def _first_scale(layer: Any, scale: Any) -> Array:
    # Without its value, a traced scale is not checked.
    if not isinstance(scale, Tracer):
        wanted = "a finite number > 0"
        scale = as_number(layer, "scale", scale, wanted, lambda x: 0 < x < math.inf)
    return jnp.asarray(scale, jnp.float32)


def _times(x: Array, factor: Array) -> Array:
    return x * factor.astype(x.dtype)
