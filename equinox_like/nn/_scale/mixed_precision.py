"""Mixed precision: `Policy`, `mixed`, the context `precision`, and loss scales."""

import inspect
import math
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool

from ..._call_path import call_part
from ..._compat.tracing import Tracer
from ..._core.context import Entering
from ..._errors import did_you_mean
from ..._module import Frozen, Module, field
from ..._module.module import Function
from ..._module.wrappers import check_forwards
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
from ..._tree.partitioning import map_nodes
from ..._typing import ArrayLike, DTypeLike, MayTakeState, PRNGKeyArray
from .._base.checks import (
    as_number,
    as_size,
    check_layer,
    described,
    jax_array,
    wrong_type,
)
from .._base.precision import (
    accumulation_dtype,
    cast,
    compute_dtype,
    computes,
    floating,
    is_real,
)
from .._base.state import StatefulLayer, is_stateful, takes_key

_Layer = TypeVar("_Layer", covariant=True)
_P = ParamSpec("_P")
_Tree = TypeVar("_Tree")
_S = TypeVar("_S")
_Y = TypeVar("_Y")
# Methods that compute nothing: they return parameters, which are not cast.
_OF_STRUCTURE = ("unstack",)
_ROLES = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}

# Methods that return an initial state or cache, which must have the compute dtype.
_STARTS = "init_cache", "init_state"


class Policy(Module):
    """Three dtypes: of parameters, of computation, and of outputs.

    Casts change real floating arrays only: not integers, bools, keys, complex arrays
    and Python numbers, and nothing in a [`equinox_like.nn.State`][], its initial values
    in a [`equinox_like.nn.StateIndex`][], or a [`equinox_like.nn.KVCache`][].

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        policy = eqx.nn.Policy.parse("params=f32,compute=bf16,output=f32")
        assert policy.compute_dtype == jnp.bfloat16
        x, i = policy.cast_compute((jnp.ones(3), jnp.arange(3)))
        assert x.dtype == jnp.bfloat16 and i.dtype == jnp.int32
        ```
    """

    param_dtype: Any = field(static=True)
    compute_dtype: Any = field(static=True)
    output_dtype: Any = field(static=True)

    def __init__(
        self,
        param_dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        output_dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `param_dtype`, `compute_dtype`, `output_dtype`: the dtypes, which may have the
            short names of `parse`; `None` means no cast.
            `parse` reads all three from one string.

        **Raises:**

        `ValueError` for a dtype that is not a real floating-point one.
        """
        self.param_dtype = floating("Policy", "param_dtype", param_dtype)
        self.compute_dtype = floating("Policy", "compute_dtype", compute_dtype)
        self.output_dtype = floating("Policy", "output_dtype", output_dtype)

    @staticmethod
    def parse(text: str) -> "Policy":
        """Reads a policy such as `"params=f32,compute=bf16,output=f32"`.

        Each of the three may be missing. Dtypes are `half`, `f16`, `bf16`, `f32`, `f64`, or
        named as NumPy names them.

        **Raises:**

        `ValueError` for other text, `TypeError` for anything else.
        """
        if not isinstance(text, str):
            wanted = "text such as 'params=f32,compute=bf16,output=f32'"
            raise wrong_type("`Policy.parse`", wanted, "text", text)
        dtypes = {}
        for part in filter(None, map(str.strip, text.split(","))):
            role, _, name = map(str.strip, part.partition("="))
            if role not in _ROLES or _ROLES[role] in dtypes:
                meant = did_you_mean(role, _ROLES, f"'{{}}={name}'")
                if not name:
                    meant = f" To compute in this dtype, write 'compute={part}'."
                raise ValueError(
                    f"A policy is written as 'params=f32,compute=bf16,output=f32'; got "
                    f"{part!r} in {text!r}.{meant}"
                )
            dtypes[_ROLES[role]] = name
        return Policy(**dtypes)

    def cast_params(self, tree: _Tree) -> _Tree:
        """`tree` with its floating arrays in `param_dtype`."""
        return cast(tree, self.param_dtype)

    def cast_compute(self, tree: _Tree) -> _Tree:
        """`tree` with its floating arrays in `compute_dtype`."""
        return cast(tree, self.compute_dtype)

    def cast_output(self, tree: _Tree) -> _Tree:
        """`tree` with its floating arrays in `output_dtype`."""
        return cast(tree, self.output_dtype)


class Mixed(StatefulLayer, Generic[_Layer]):
    """The result of [`equinox_like.nn.mixed`][]: a layer that is called by a policy.

    Its fields are the arguments of `mixed`: `layer`, `policy` and `keep`. Methods of the
    layer are called by the policy, too. What `init_cache` and `init_state` return has the
    compute dtype. Other attributes are those of the layer: a part of the layer that is
    called computes in its own dtype.
    """

    layer: _Layer
    policy: Policy = field(static=True)
    keep: tuple[type, ...] = field(static=True)

    # Of a layer with overloads, such as `Sequential`, `_P` is that of the first one. With
    # a type variable in place of the last `Any`, mypy would infer `Never`.
    @overload
    def __call__(
        self: "Mixed[Callable[_P, _Y]]", /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _Y: ...

    @overload
    def __call__(
        self: "Mixed[MayTakeState[Any]]",
        x: Any,
        state: _S,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Any, _S]: ...

    @computes(None)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Casts, calls the layer, and casts what it returns."""
        if not takes_key(self.layer):
            kwargs.pop("key", None)
        return self._run(None, args, kwargs)

    def is_stateful(self) -> bool:
        """Whether the wrapped layer is stateful."""
        return is_stateful(self.layer)

    def __getattr__(self, name: str) -> Any:
        check_forwards(self, name, "layer")
        layer = self.layer
        return _Method(self, name) if _is_method(layer, name) else getattr(layer, name)

    def _run(
        self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        dtype = self.policy.compute_dtype
        layer: Any = cast(self.layer, dtype, self.keep)
        if dtype is not None and self.keep:
            layer = _with_kept(layer, dtype, self.keep)
        args, kwargs = cast((args, kwargs), dtype)
        run = layer if method is None else getattr(layer, method)
        out = call_part(self.layer, (), layer, run, *args, **kwargs)
        return out if method in _STARTS else self.policy.cast_output(out)


class _Kept(Mixed[Any]):
    """A layer that keeps its own dtype, within layers that compute in another one."""

    def _run(
        self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = self.policy.cast_compute((args, kwargs))
        run = self.layer if method is None else getattr(self.layer, method)
        out = call_part(self, (), self.layer, run, *args, **kwargs)
        return self.policy.cast_output(out)


class _Method(Function):
    """A method of a wrapped layer, called with the same casts as the layer."""

    owner: Mixed
    name: str = field(static=True)

    _passes_calls_on_ = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.owner._run(self.name, args, kwargs)


def _is_method(layer: Any, name: str) -> bool:
    """Whether `name` is a method that is bound to the instance and its parameters."""
    while isinstance(layer, Mixed | Frozen):
        layer = layer.value if isinstance(layer, Frozen) else layer.layer
    if name in getattr(layer, "__dict__", ()) or name in _OF_STRUCTURE:
        return False
    found = inspect.getattr_static(type(layer), name, None)
    if isinstance(found, staticmethod | classmethod | type):
        return False
    return callable(getattr(type(layer), name, None))


def mixed(layer: _Layer, policy: Policy | str, *, keep: Any = ()) -> Mixed[_Layer]:
    """A layer that computes in another dtype than that of its parameters.

    Norms and softmax are still computed in float32 at least. Gradients have the dtype
    of the parameters. See [Mixed Precision Training](https://arxiv.org/abs/1710.03740)
    (Micikevicius et al. 2018).

    **Arguments:**

    - `layer`: any Module that can be called. Its parameters are cast to `param_dtype` now.
    - `policy`: a [`equinox_like.nn.Policy`][], or its text.
    - `keep`: a class, or several, whose instances are left out of all casts.

    **Returns:**

    A layer that casts its own arrays and its arguments to `compute_dtype`, calls `layer`,
    and casts what that returns to `output_dtype`. Its methods do the same, except for
    static and class methods, which have no arrays. Its attribute `layer` is the layer
    without the policy.

    The result shares arrays with `layer`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
        model = eqx.nn.mixed(mlp, "compute=bf16,output=f32")
        assert model(jnp.ones(3)).dtype == jnp.float32
        grads = eqx.filter_grad(lambda m: m(jnp.ones(3)).sum())(model)
        assert grads.layers[0].weight.dtype == jnp.float32
        ```
    """
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    if not isinstance(policy, Policy):
        wanted = "a `Policy`, or text such as 'params=f32,compute=bf16',"
        fix = " To compute in bfloat16, write `mixed(layer, 'compute=bf16')`."
        raise wrong_type("`mixed`", wanted, "policy", policy, fix)
    if layer is None or jtu.all_leaves([layer]):
        check_layer("`mixed`", "layer", layer)
    classes = keep if isinstance(keep, tuple) else (keep,)
    for each in classes:
        if not isinstance(each, type):
            wanted = "a class, or a tuple of classes,"
            raise wrong_type("`mixed`", wanted, "keep", each)
    return Mixed(cast(layer, policy.param_dtype, classes), policy, classes)


def precision(policy: Policy | DTypeLike | None) -> Entering:
    """A context in which layers compute in another dtype than that of their parameters.

    Each layer that has parameters casts them, and its arguments, to this dtype, and
    returns that dtype. Norms and softmax are still computed in float32 at least, and
    gradients have the dtype of the parameters. What a model computes between its layers
    is left alone: wrap the model by [`equinox_like.nn.mixed`][] to cast that, too.

    **Arguments:**

    - `policy`: a real floating dtype, or its short name, such as `"bf16"`; a
        [`equinox_like.nn.Policy`][], or its text, with a compute dtype only; or `None`,
        for the layers' own dtypes.

    **Returns:**

    A context manager, which decorates functions, too. See [`equinox_like.Context`][]:
    compiled functions are retraced once for each dtype, and each thread has its own.

    **Raises:**

    `ValueError` for another dtype, and for a policy with other dtypes, because a
    context has neither stored parameters nor an output to cast.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
        with eqx.nn.precision(jnp.bfloat16):
            assert eqx.filter_jit(mlp)(jnp.ones(3)).dtype == jnp.bfloat16
        assert eqx.filter_jit(mlp)(jnp.ones(3)).dtype == jnp.float32
        ```
    """
    if isinstance(policy, str) and "=" in policy:
        policy = Policy.parse(policy)
    if not isinstance(policy, Policy):
        return compute_dtype(floating("precision", "policy", policy))
    if policy.param_dtype is not None or policy.output_dtype is not None:
        raise ValueError(
            "`precision` sets the compute dtype alone: pass `policy.compute_dtype`, and "
            "cast by `policy.cast_params(model)` and `policy.cast_output(out)`."
        )
    return compute_dtype(policy.compute_dtype)


def _with_kept(layer: Any, dtype: Any, keep: tuple[type, ...]) -> Any:
    """`layer`, with its kept layers wrapped: they take and return arrays of `dtype`."""

    def each(node: Any) -> Any:
        if not callable(node):
            return node
        own = next((x.dtype for x in jax.tree.leaves(node) if is_real(x)), None)
        return _Kept(node, Policy(None, own, dtype), ())

    return map_nodes(each, layer, lambda node: isinstance(node, keep))


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
        factor = as_number(self, "factor", factor, "a number above 1", lambda x: x > 1)
        min_scale = as_number(self, "min_scale", min_scale)
        max_scale = as_number(self, "max_scale", max_scale)
        # Written so that NaN is refused, too.
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
