"""How layers are called: with a state, with a key, at inference or not.

`StatefulLayer` is the base class of layers that take and return a state. The error of a
call that does not fit the signature says what to write.
"""

import abc
import enum
import types
import weakref
from typing import Any

import numpy as np

from ..._annotations import signature_of
from ..._compat.tracing import is_vmapped
from ..._core.base import Transformed
from ..._core.context import is_inference
from ..._errors import warn
from ..._module import Frozen, Module
from ..._transforms.vmap import Vmapped
from ..._tree import is_array
from ..._tree.arrays import is_typed_key
from ..._tree.nodes import describe_node
from ..._tree.require import explain_call, may_be_key
from .state import MAKE_WITH_STATE


class StatefulLayer(Module):
    """Abstract base class of the layers that read or write a state.

    A subclass is called as `layer(x, state, *, key=None)` and returns `(out, new_state)`.
    Its second argument must be named `state`, because containers pass it by name.
    [`equinox_like.nn.Sequential`][] passes the state through its members that are
    instances of this class.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        class CountCalls(eqx.nn.StatefulLayer):
            def __call__(self, x, state, *, key=None):
                return x, state + 1

        model = eqx.nn.Sequential([CountCalls(), CountCalls()])
        out, state = model(jnp.ones(3), jnp.asarray(0))
        assert state == 2
        ```
    """

    # For type checkers a subclass may have any parameters, so it needs no `key`.
    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """**Returns:** the output for one example, and the new state."""

    def is_stateful(self) -> bool:
        """Whether this instance takes a state: `True` unless a subclass says otherwise."""
        return True


def explain_wrong_call(error: TypeError, layer: Any, args: Any, kwargs: Any) -> None:
    """Has the error of a call that does not fit the signature say what to write."""
    returned = "out, state = " if is_stateful(layer) else ""
    explain_call(error, layer, args, kwargs, f"{returned}layer({{}})")
    said = str(error)
    if "'state'. Write" in said:
        error.args = (said + MAKE_WITH_STATE,)
    elif f"{type(layer).__name__} takes " in said and "by name" not in said:
        if any(map(may_be_key, args[1:])):  # in the place of another argument
            error.args = (f"{said} Pass the key by name: `key=key`.",)


class _Absent:
    """The default of a `state` argument. `None` would count as a state."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()


def check_not_key(layer: Any, state: Any) -> None:
    """Raises `TypeError` if a call without stateful layers was given a key as `state`.

    They return a state as it is, so the key would not be used. A stateful layer of a
    user may have a key as its state.
    """
    if state is ABSENT:
        return
    is_raw = (
        is_array(state) and state.dtype == np.uint32 and state.shape in ((2,), (4,))
    )
    if (is_raw or is_typed_key(state)) and not is_stateful(layer):
        raise TypeError(
            f"{type(layer).__name__} takes a state as its second argument; got a PRNG "
            "key. Pass the key by name: `layer(x, key=key)`."
        )


def with_state(layer: Any, y: Any, state: Any) -> tuple[Any, Any]:
    """What a layer that only passes its state on returns."""
    check_not_key(layer, state)
    return y, state


def is_stateful(layer: Any) -> bool:
    """Whether to call a layer with a state."""
    if isinstance(layer, Frozen):
        return is_stateful(layer.value)
    return isinstance(layer, StatefulLayer) and layer.is_stateful()


def call_stateless(what: str, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer without a state. `what` is its name in the error if it needs one."""
    try:
        return layer(*args, **kwargs)
    except TypeError:
        _check_not_plain_class(what, layer, args, kwargs)
        raise


def _check_not_plain_class(what: str, layer: Any, args: Any, kwargs: Any) -> None:
    """Raises `TypeError` if a layer lacks a state that its class does not ask for."""
    while isinstance(layer, Frozen):
        layer = layer.value
    if isinstance(layer, StatefulLayer):
        return
    try:
        signature = signature_of(layer)
        passed = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function in C may have no signature
        return
    state = signature.parameters.get("state")
    if state is not None and state.default is state.empty and "state" not in passed:
        raise TypeError(
            f"{what} is {describe_node(layer)}, which needs a `state`, but is not a "
            "`StatefulLayer`. Derive its class from `equinox_like.nn.StatefulLayer` in "
            "place of `Module`, so that the state is passed to it."
        ) from None


def takes_key(layer: Any) -> bool:
    """Whether to call a layer, or a plain function, with a `key`."""
    return _use_of_key(layer) is not _Use.NEVER


def key_for(layer: Any, key: Any) -> dict[str, Any]:
    """The keyword arguments of a call of a layer with `key`, which may be `None`."""
    use = _use_of_key(layer)
    is_passed = use is _Use.ALWAYS or (use is _Use.IF_GIVEN and key is not None)
    return {"key": key} if is_passed else {}


class _Use(enum.Enum):
    """When to pass a `key`. With a default of its own, `None` is not passed."""

    NEVER = enum.auto()
    IF_GIVEN = enum.auto()
    ALWAYS = enum.auto()


def _use_of_key(layer: Any) -> _Use:
    if isinstance(layer, Frozen):
        return _use_of_key(layer.value)
    if isinstance(layer, Vmapped):
        # Keywords need a dictionary, and by default it would map over the single key.
        axes = layer._in_axes
        is_named = isinstance(axes, dict) and "key" in axes
        return _use_of_key(layer.__wrapped__) if is_named else _Use.NEVER
    if isinstance(layer, Transformed):
        return _use_of_key(layer.__wrapped__)
    function = type(layer).__call__ if isinstance(layer, Module) else layer
    wraps = getattr(layer, "__wrapped__", None) not in (None, layer.__call__)  # pyright: ignore[reportAttributeAccessIssue]
    if (wraps or function is layer) and is_vmapped(layer):
        return _Use.NEVER
    shows_another = wraps or hasattr(layer, "__signature__")
    if shows_another or type(function) is not types.FunctionType:
        return _use_by_signature(layer)
    # Reading a signature takes as long as an eager call of a layer.
    known = _known_uses.get(function)
    if known is None:
        known = _known_uses[function] = _use_by_signature(function)
    return known


_known_uses: weakref.WeakKeyDictionary[Any, _Use] = weakref.WeakKeyDictionary()


def _use_by_signature(function: Any) -> _Use:
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):  # a function in C may have no signature
        return _Use.NEVER
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            return _Use.ALWAYS
        if p.name == "key" and p.kind is not p.POSITIONAL_ONLY:
            return _Use.ALWAYS if p.default is p.empty else _Use.IF_GIVEN
    return _Use.NEVER


def at_inference(layer: Any, inference: Any) -> Any:
    """Whether a layer called with `inference` is at inference.

    The result may be an array, if the layer's own field `inference` is one.
    """
    flag = layer.inference
    # `is False`, because the flag may be an array, whose value may be traced.
    if inference is None and flag is False and is_inference():
        name = type(layer).__name__
        warn(
            f"{name} was called within `equinox_like.inference()`, but it has "
            "`inference=False`, which takes precedence. To make the model follow the "
            "context, use `model = nn.inference_mode(model, None)`; if this is "
            f"intended, pass `inference=False` to the call of {name}."
        )
    return is_inference(inference, flag)
