"""`Policy`, `mixed`, `precision`: dtypes of parameters, computation and outputs."""

import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.tree_util as jtu

from ..._call_path import call_part
from ..._core.context import Entering
from ..._errors import did_you_mean
from ..._module import Frozen, Module, field
from ..._module.module import Function
from ..._module.wrappers import check_forwards
from ..._tree.nodes import describe_node
from ..._tree.partitioning import map_nodes
from ..._typing import DTypeLike, PRNGKeyArray
from .._base.arguments import check_layer, wrong_type
from .._base.precision import cast, compute_dtype, computes, floating, is_real
from .._base.state import State
from .._base.stateful import StatefulLayer, is_stateful, takes_key

_Layer = TypeVar("_Layer", covariant=True)
_P = ParamSpec("_P")
_Tree = TypeVar("_Tree")
_Y = TypeVar("_Y")
# Methods that compute nothing: they return parameters, which are not cast.
_OF_STRUCTURE = ("unstack",)
_SHORT = {"half": "float16", "f16": "float16", "bf16": "bfloat16"}
_SHORT |= {"f32": "float32", "f64": "float64"}
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

        - `param_dtype`, `compute_dtype`, `output_dtype`: the dtypes; `None` means no cast.
            `parse` reads all three from one string.

        **Raises:**

        `ValueError` for a dtype that is not a real floating-point one.
        """
        for dtype in (param_dtype, compute_dtype, output_dtype):
            if isinstance(dtype, str) and ("=" in dtype or dtype in _SHORT):
                raise ValueError(
                    f"Policy takes dtypes, such as `jnp.bfloat16`; got {dtype!r}. For "
                    "text, use `Policy.parse('params=f32,compute=bf16')`."
                )
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
            raise TypeError(
                "A policy is text such as 'params=f32,compute=bf16,output=f32'; got "
                f"{describe_node(text)}."
            )
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
            dtypes[_ROLES[role]] = _SHORT.get(name, name)
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
        self: "Mixed[Callable[[Any, State], tuple[Any, State]]]",
        x: Any,
        state: State,
        /,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Any, State]: ...

    @computes(None)
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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
        raise TypeError(
            "`mixed` takes a `Policy`, or text such as 'params=f32,compute=bf16'; got "
            f"{policy!r}. To compute in bfloat16, write `mixed(layer, 'compute=bf16')`."
        )
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
    if isinstance(policy, str):
        is_text = "=" in policy
        policy = Policy.parse(policy) if is_text else _SHORT.get(policy, policy)
    if not isinstance(policy, Policy):
        return compute_dtype(floating("precision", "policy", policy))
    if policy.param_dtype is not None or policy.output_dtype is not None:
        raise ValueError(
            "`precision` sets the compute dtype of layers and nothing else: cast the "
            "parameters by `policy.cast_params(model)`, the result by "
            "`policy.cast_output(out)`, and pass `policy.compute_dtype`."
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
