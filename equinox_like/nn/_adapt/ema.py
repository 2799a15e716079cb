"""`EMA`: an exponential moving average of a model over its training steps."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from ..._compat.tracing import Tracer
from ..._core.difference import tree_differences
from ..._module import Module, field
from ..._module.construct import filled
from ..._module.freezing import trainable_leaves
from ..._tree import is_array, partition
from ..._tree.copies import tree_copy
from ..._tree.deleted import deleted_named
from ..._tree.nodes import describe_node
from ..._tree.partitioning import STATIC, Skeleton, make_skeleton, merge
from ..._typing import ArrayLike, DTypeLike
from .._base.checks import as_array, check_dtype, check_scalar, jax_array, wrong_type
from .._base.init import default_dtype
from .._base.precision import accumulation_dtype, computes, saturated

_Model = TypeVar("_Model")

_COPIED = "copied"


class EMA(Module, Generic[_Model]):
    r"""An exponential moving average of the parameters of a model.

    With $\theta_t$ the parameters at update $t$ and $d_t$ the decay,

    $$m_t = d_t\, m_{t - 1} + (1 - d_t)\, \theta_t, \qquad
    \bar\theta_t = \frac{m_t}{1 - d_1 d_2 \cdots d_t},$$

    with $m_0 = 0$. The divisor corrects for the start at zero: [Adam](
    https://arxiv.org/abs/1412.6980) (Kingma, Ba 2015), section 3. So $\bar\theta_1$ is
    $\theta_1$, and the average of a constant is that constant. The `EMA` stores
    $\bar\theta_t$ itself, by the equivalent $\bar\theta_t = \bar\theta_{t - 1} + r_t\,
    (\theta_t - \bar\theta_{t - 1})$ with $r_t = (1 - d_t) / (1 - d_1 \cdots d_t)$.

    The parameters are averaged: the arrays that [`equinox_like.trainable`][] chooses.
    Integer arrays, keys, frozen arrays and those in a `field(trainable=False)` are
    copies of the last model's. Everything static is that of the last model, too.

    All its leaves are arrays, which it shares with nothing else, so it can be donated
    together with the model, and be a carry of `jax.lax.scan`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        ema = eqx.nn.EMA(model, decay=0.99)

        @eqx.filter_jit(donate="arrays")
        def step(model, ema):
            grads = eqx.filter_grad(lambda model: model(jnp.ones(3)).sum())(model)
            model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
            return model, ema.update(model)

        model, ema = step(model, ema)
        y = ema.model()(jnp.ones(3))
        assert jnp.allclose(y, model(jnp.ones(3)))
        ```
    """

    average: Any = field(trainable=False)
    steps: Array = field(trainable=False)
    weight: Array = field(trainable=False)
    decay: Any = field(static=True)
    debias: bool = field(static=True)
    _skeleton: Skeleton = field(static=True, repr=False)

    def __init__(
        self,
        model: _Model,
        decay: float | Callable[[Array], ArrayLike] = 0.999,
        *,
        debias: bool = True,
        dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `model`: any pytree. Its values are those of the average before the first update.
        - `decay`: a Python number from 0 to 1. Or a schedule: a function of the
            number of updates before this one, such as those of `optax`, for example
            `lambda steps: jnp.minimum(0.999, (1 + steps) / (10 + steps))`.
        - `debias`: whether to correct for the start at zero. If not, the average starts at
            the values of `model`.
        - `dtype`: of the averages; by default that of each parameter, and float32 for those
            in half precision, where `1 - decay` times a difference would be rounded off.

        **Raises:**

        `ValueError` for a number outside of 0 to 1, or if `dtype` is not a floating
        dtype. `TypeError` if there is nothing to average, or if `decay` is neither a
        Python number nor a function.
        """
        if isinstance(decay, int | float) and not 0 <= decay <= 1:
            raise ValueError(f"EMA takes a `decay` between 0 and 1; got {decay!r}.")
        if not (callable(decay) or isinstance(decay, int | float)):
            raise wrong_type(self, "a Python number or a function", "decay", decay)
        if dtype is not None:
            check_dtype(self, "dtype", dtype, jnp.floating)
        self._skeleton = _skeleton(model)
        labels = _array_labels(self._skeleton)
        if all(label == _COPIED for label in labels):
            raise TypeError(
                "EMA takes a model with trainable parameters; got "
                f"{describe_node(model)} without any."
            )
        arrays, _ = partition(tree_copy(model), is_array)
        leaves, treedef = jtu.tree_flatten(arrays)
        pairs = zip(leaves, labels, strict=True)
        starts = [x if label == _COPIED else _wide(x, dtype) for x, label in pairs]
        self.average = treedef.unflatten(starts)
        self.steps = jnp.zeros((), jnp.int32)
        self.weight = jnp.zeros((), default_dtype(None))
        self.decay = decay
        self.debias = debias

    @computes("eqx.nn.EMA", "nothing")
    @deleted_named
    def update(self, model: _Model) -> "EMA[_Model]":
        """The average after one more training step.

        **Arguments:**

        - `model`: a model of the structure and shapes of the first one.

        **Returns:**

        A new `EMA`; this one is left as it is.

        **Raises:**

        `ValueError`, naming the path, if the model has another structure, or an array
        another shape. [`equinox_like.ShapeError`][] if a schedule returns an array that
        is not a scalar.
        """
        skeleton = _skeleton(model)
        arrays, _ = partition(model, is_array)
        _check_alike(self.average, arrays)
        rate, weight = _rate(self)
        leaves, treedef = jtu.tree_flatten(arrays)
        olds, labels = jtu.tree_leaves(self.average), _array_labels(skeleton)
        news = [
            _renewed(old, new) if label == _COPIED else _moved(old, new, rate)
            for old, new, label in zip(olds, leaves, labels, strict=True)
        ]
        changed = {"average": treedef.unflatten(news), "steps": self.steps + 1}
        changed |= {"weight": weight, "_skeleton": skeleton}
        return filled(type(self), vars(self) | changed)

    def model(self) -> _Model:
        """The model with averaged parameters, in the dtypes of the model itself.

        Its arrays are copies, so it can be kept if the `EMA` is donated. The field
        `average` has its arrays in the dtypes of the averages.
        """
        groups: dict[Any, list[Any]] = {}
        labels = _array_labels(self._skeleton)
        for x, label in zip(jtu.tree_leaves(self.average), labels, strict=True):
            leaf = x if label == _COPIED else x.astype(label)
            groups.setdefault(label, []).append(tree_copy(leaf) if leaf is x else leaf)
        return merge(groups, self._skeleton)


def _skeleton(model: Any) -> Skeleton:
    """The skeleton of a model. An averaged array is labelled with its dtype."""
    leaves, treedef = jtu.tree_flatten(model)

    def label(leaf: Any, is_parameter: bool) -> Any:
        if is_parameter:
            return str(jnp.result_type(leaf))
        return _COPIED if is_array(leaf) else STATIC

    labels = list(map(label, leaves, trainable_leaves(model)))
    return make_skeleton(treedef, labels, [x for x in leaves if not is_array(x)])


def _array_labels(skeleton: Skeleton) -> list[Any]:
    return [label for label in skeleton.labels if label is not STATIC]


def _wide(x: Any, dtype: DTypeLike | None) -> Array:
    x = jax_array(x)
    if dtype is None:
        dtype = accumulation_dtype(x)
    elif jnp.iscomplexobj(x):
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(dtype, jnp.complex64)
    # Without a weak type: losing that at the first update would retrace.
    return saturated(x, dtype)


def _rate(ema: EMA) -> tuple[Array, Array]:
    """The step size of the average towards the model, and the new sum of weights."""
    if callable(ema.decay):
        decay = as_array(ema, "decay(steps)", ema.decay(ema.steps))
        check_scalar(ema, "decay", decay, " A schedule returns a scalar.")
        rate = 1 - decay.astype(ema.weight.dtype)
    else:
        # Subtracted in double precision: in float32, 1 - 0.9999 has only four digits.
        rate = jnp.asarray(1 - ema.decay, ema.weight.dtype)
    weight = ema.weight + rate * (1 - ema.weight)
    if ema.debias:
        # With a decay of 1, the sum of weights is 0.
        rate = jnp.where(weight > 0, rate / jnp.where(weight > 0, weight, 1), 0)
    return rate, weight


def _moved(old: Array, new: Any, rate: Array) -> Array:
    new = saturated(jnp.asarray(new), old.dtype)
    moved = old + rate.astype(old.dtype) * (new - old)
    # Replaced, not moved, because the old average may not be finite.
    return jnp.where(rate == 1, new, moved)


def _renewed(old: Any, new: Any) -> Any:
    """A copy of `new`, for which a donated `old` has the memory."""
    if isinstance(old, Tracer):
        # An `old` that the program does not use would be an unused donation.
        _, new = jax.lax.optimization_barrier((old, new))
    return tree_copy(new)


def _check_alike(average: Any, arrays: Any) -> None:
    shape = lambda x: f"shape {x.shape}"  # noqa: E731
    for found in tree_differences("model", average, arrays, is_array, shape):
        raise ValueError(
            f"EMA averages models of equal structure and shapes; `{found.path}` is "
            f"{found.before} in the average, and {found.after} in the model."
        )
