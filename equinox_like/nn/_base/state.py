"""`State`, what layers keep between calls, and how layers are called with it.

A layer holds a `StateIndex`: a marker, and the initial value of the state. The `State`
maps markers to values. Setting a value returns a new state and invalidates the old one,
so that using an old state raises an error. `StatefulLayer` is the base class of layers
that take and return a state.
"""

import abc
import enum
import functools
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jaxtyping import Array

from ..._annotations import signature_of
from ..._compat.tracing import is_vmapped
from ..._core.base import Transformed
from ..._core.context import is_inference
from ..._core.difference import tree_differences
from ..._errors import warn
from ..._io.faults import BEFORE_STATE
from ..._module import Frozen, Module, field
from ..._module.construct import filled
from ..._transforms.vmap import Vmapped
from ..._tree import is_array, is_array_like, tree_pformat
from ..._tree.arrays import is_weak
from ..._tree.cached import Attribute, Cached, forget
from ..._tree.nodes import describe_node, path_str
from ..._tree.partitioning import map_nodes
from ..._tree.registry import CachedType, register_cached
from ..._tree.require import explain_call, may_be_key
from ..._typing import NOT_GIVEN
from .checks import check_function, check_not_layer_class, described, wrong_type

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Tree = TypeVar("_Tree")


def unchanged(node: _T, dtype: Any) -> _T:
    """The method `_in_dtype` of a node that a cast leaves as it is."""
    return node


class Marker:
    """The marker of an index without a name. Compared by identity."""

    def __repr__(self) -> str:
        # JAX shows it if trees from before and after `make_with_state` meet.
        return f"<unnamed: {BEFORE_STATE}>"

    def __pdoc__(self, **kwargs: Any) -> Any:
        return wl.TextDoc("<unnamed>")


class _Deleted(Module):
    """A placeholder for an initial value that was deleted."""

    def __repr__(self) -> str:
        return "<deleted>"


class StateIndex(Module, Generic[_T]):
    """Stands for one value in a [`equinox_like.nn.State`][], and holds its initial value.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        class Counter(eqx.Module):
            index: eqx.nn.StateIndex

            def __init__(self):
                self.index = eqx.nn.StateIndex(jnp.array(0))

            def __call__(self, x, state):
                number = state.get(self.index)
                return x * number, state.set(self.index, number + 1)

        counter, state = eqx.nn.make_with_state(Counter)()
        _, state = counter(1.0, state)
        assert state.get(counter.index) == 1
        ```
    """

    marker: Any = field(static=True)
    init: _T = field(trainable=False)

    # In another `precision`: a state starts in the dtype in which it is stored.
    _in_dtype = unchanged

    def __init__(self, init: _T):
        """**Arguments:**

        - `init`: the value that the state starts with: an array, or a pytree of arrays
            and numbers. It is not a parameter of the model, so `filter_grad` does not
            differentiate it, and an optimiser keeps no state for it.

        **Raises:**

        `ValueError` if it is a function.
        """
        if callable(init) and jtu.all_leaves([init]):
            raise ValueError(
                "StateIndex takes the initial value itself as `init`, not a function that "
                f"makes it; got {init!r}."
            )
        self.marker = Marker()
        self.init = init


class State(Cached):
    """The values that stateful layers of a model carry from call to call.

    It is a pytree, so it passes through `jax.jit`, `jax.vmap`, `jax.lax.scan` and the
    like. Layers read it by `get` and return a new one, made by `set`; the old one
    cannot be used after that.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
        apply = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = apply(jnp.ones((8, 3)), state)
        assert state.get(norm.batch_counter) == 1
        ```
    """

    _in_dtype = unchanged
    _values: Any = Attribute(None, "_values")
    _markers: Any = Attribute(None, "_markers")

    def __init__(self, model: Any):
        """**Arguments:**

        - `model`: any pytree. The state has a value for each
            [`equinox_like.nn.StateIndex`][] in it: its `init`.

        **Raises:**

        `ValueError` if the initial values were deleted from `model`. `TypeError` for a
        class or an iterator in place of a model, and for initial values that are not
        arrays or numbers.
        """
        check_not_layer_class("State", "model", model)
        if isinstance(model, Iterator):
            fix = " Write `State(list(...))`."
            raise wrong_type("State", "a model", "model", model, fix)
        values = {}
        for path, index in _indices(model):
            if isinstance(index.init, _Deleted):
                raise ValueError(
                    f"The initial state was deleted from `{path_str(path, 'model')}`. Use "
                    "the state of `make_with_state`, or build the model again."
                )
            for inner, leaf in jtu.tree_leaves_with_path(index.init):
                if not is_array_like(leaf):
                    where = path_str((*path, jtu.GetAttrKey("init"), *inner), "model")
                    raise TypeError(
                        f"A State has arrays and numbers as values; `{where}` is "
                        f"{describe_node(leaf)}."
                    )
            values[index.marker] = jax.tree.map(jnp.asarray, index.init)
        self._values, self._markers = values, tuple(values)

    def get(self, item: StateIndex[_T]) -> _T:
        """The value at an index.

        **Raises:**

        `KeyError` if there is none; `ValueError` if this state was invalidated by `set`, or
        `item` is not a [`equinox_like.nn.StateIndex`][].
        """
        return self._alive()[self._marker(item)]

    def set(self, item: StateIndex[_T], value: _T) -> "State":
        """Returns a new state with another value at an index, and invalidates this one.

        **Raises:**

        As `get`; and `ValueError` if the value has another structure, or some leaf
        another shape or dtype than before. This state then stays valid.
        """
        values = self._alive()
        marker = self._marker(item)
        value = _fitting(value, values[marker], _name(marker, self._markers))
        return self._replaced(values | {marker: value})

    def substate(self, pytree: Any) -> "State":
        """A state with the values of just those indices that are in `pytree`.

        With `update` this is how a part of a model is mapped together with its own state:
        take its substate, pass both to `filter_vmap`, and update the state by the result.
        """
        values = self._alive()
        markers = [self._marker(index) for _, index in _indices(pytree)]
        return _state({marker: values[marker] for marker in markers})

    def update(self, substate: "State") -> "State":
        """Returns a new state with the values of a substate, and invalidates this one.

        **Raises:**

        `ValueError` if `substate` is not a `State`, or has an index that this one
        lacks.
        """
        values = self._alive()
        if type(substate) is not State:
            given = describe_node(substate)
            raise ValueError(f"`State.update` takes a State; got {given}.")
        new = substate._alive()
        unknown = [m for m in new if m not in values]
        if unknown:
            names = ", ".join(f"`{_name(m, tuple(new))}`" for m in unknown)
            raise ValueError(
                f"`State.update` takes a part of this state, as `substate` returns it; "
                f"this one has no {names}."
            )
        return self._replaced(values | new)

    def __repr__(self) -> str:
        if self._values is None:
            return "State(<old>)"
        return f"State({tree_pformat(_by_name(self._values))})"

    def _alive(self) -> dict[Any, Any]:
        if self._values is None:
            raise ValueError(
                "This State is out of date: `set` or `update` was called on it, and "
                "returned a new one. Pass on the new one, as in `out, state = layer(x, "
                "state)`. To continue from the same state twice, clone it first: "
                "`leaves, treedef = jax.tree.flatten(state)`, and then "
                "`jax.tree.unflatten(treedef, leaves)`."
            )
        return self._values

    def _marker(self, index: Any) -> Any:
        if type(index) is not StateIndex:
            raise ValueError(
                f"A State is indexed by a StateIndex; got {describe_node(index)}."
            )
        if index.marker not in self._alive():
            known = ", ".join(map(str, _by_name(self._alive()))) or "nothing"
            is_named = isinstance(index.marker, str)
            raise KeyError(
                f"This State has no value for {index.marker if is_named else '<unnamed>'};"
                f" it has {known}. Was it made together with this model?"
                + ("" if is_named else f" If not, {BEFORE_STATE}.")
            )
        return index.marker

    def _replaced(self, values: dict[Any, Any]) -> "State":
        self._values = None
        forget(self)
        return _state(values)


def check_state(layer: Any, state: Any) -> None:
    """Raises `TypeError` unless a layer was called with a `State`."""
    if not isinstance(state, State):
        raise wrong_type(layer, "a `State`", "state", state, MAKE_WITH_STATE)


MAKE_WITH_STATE: Final = (
    " Build the model by `make_with_state`, which returns `(model, state)`, and pass that "
    "state to the call."
)


def make_with_state(make_model: Callable[_P, _T]) -> Callable[_P, tuple[_T, State]]:
    """Makes a model together with its state.

    **Arguments:**

    - `make_model`: a class, or a function that returns a model.

    **Returns:**

    A function of the same arguments that returns `(model, state)`. The indices of the
    model are named by their paths, so that the states of two models of the same kind
    have the same structure. The initial values are deleted from the model.

    !!! example

        ```python
        import equinox_like as eqx

        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3)
        assert norm.batch_counter.marker == "BatchNorm.batch_counter"
        assert state.get(norm.batch_counter) == 0
        ```
    """

    check_function("`make_with_state`", "make_model", make_model)
    # The call of the class: a wrapper of a factory has the signature of the factory.
    cls: Any = type(make_model)
    if issubclass(cls, Module) and "state" in signature_of(cls.__call__).parameters:
        wanted = "a class, or a function that returns a model,"
        fix = f" Write `make_with_state({cls.__name__})(...)`."
        raise wrong_type("`make_with_state`", wanted, "make_model", make_model, fix)

    @functools.wraps(make_model)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> tuple[_T, State]:
        model = make_model(*args, **kwargs)
        root = type(model).__name__

        def named(path: Any, node: Any) -> Any:
            marker = root + jtu.keystr(path)
            return with_marker(node, marker) if is_index(node) else node

        model = jtu.tree_map_with_path(named, model, is_leaf=is_index)
        return delete_init_state(model), State(model)

    return make


def delete_init_state(model: _Tree) -> _Tree:
    """The model without the initial values of its state, once a State has been made
    from them.

    **Arguments:**

    - `model`: any pytree.

    **Returns:**

    The same tree, in which no [`equinox_like.nn.StateIndex`][] has leaves.

    The result shares arrays with `model`: to donate one deletes those of the other.
    [`equinox_like.tree_copy`][] makes copies.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        norm = eqx.nn.BatchNorm(3)
        state = eqx.nn.State(norm)
        norm = eqx.nn.delete_init_state(norm)
        assert len(jax.tree.leaves(norm.batch_state_index)) == 0
        ```
    """

    def without_init(index: StateIndex[Any]) -> StateIndex[Any]:
        return filled(StateIndex, vars(index) | {"init": _Deleted()})

    return map_nodes(without_init, model, is_index)


def is_index(node: Any) -> bool:
    return type(node) is StateIndex


def _indices(tree: Any) -> list[tuple[Any, StateIndex[Any]]]:
    found, _ = jtu.tree_flatten_with_path(tree, is_index)
    return [(path, node) for path, node in found if is_index(node)]


def with_marker(index: StateIndex[Any], marker: Any) -> StateIndex[Any]:
    """The index, with another marker."""
    return filled(StateIndex, vars(index) | {"marker": marker})


def _state(values: dict[Any, Any]) -> State:
    state = object.__new__(State)
    state._values, state._markers = values, tuple(values)
    return state


def _fitting(value: Any, old: Any, name: str) -> Any:
    """`value` as arrays; raises unless structure, shapes and dtypes equal `old`'s."""
    value = jax.tree.map(jnp.asarray, value)
    (new, treedef), (olds, old_treedef) = map(jax.tree.flatten, (value, old))
    form, old_form = ([(x.shape, x.dtype) for x in xs] for xs in (new, olds))
    if treedef != old_treedef or form != old_form:
        for found in tree_differences(name, old, value, is_array, described):
            raise ValueError(
                f"The value of `{found.path}` cannot change from {found.before} to "
                f"{found.after}."
            )
    return jax.tree.map(_as_strong, value, old)


def _as_strong(new: Array, old: Array | jax.ShapeDtypeStruct) -> Array:
    """`new`, without a weak type if `old` has none, to avoid retraces of its users."""
    return jnp.asarray(new, new.dtype) if is_weak(new) and not is_weak(old) else new


def _by_name(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {_name(marker, tuple(values)): value for marker, value in values.items()}


def _name(marker: Any, markers: tuple[Any, ...]) -> str:
    if isinstance(marker, str):
        return marker
    unnamed = [m for m in markers if not isinstance(m, str)]
    return f"StateIndex #{unnamed.index(marker)}"


def _flatten(state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = state._alive()
    return tuple(values.values()), tuple(values)


def _flatten_with_keys(state: State):
    values, markers = _flatten(state)
    # Files name a value by its path in the model, whose class may be renamed.
    names = [re.sub(r"^\w+(\.|(?=\[))", "", _name(m, markers)) for m in markers]
    keys = map(jtu.DictKey, names)
    return tuple(zip(keys, values, strict=True)), markers


def _unflatten(markers: tuple[Any, ...], values: Iterable[Any]) -> State:
    return _state(dict(zip(markers, values, strict=True)))


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
# A State is not frozen: once it is old, flattening must raise, not use cached values.
register_cached(
    State, CachedType(_flatten, _unflatten, lambda _: ("_values", "_markers"), False)
)


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


def check_not_key(layer: Any, state: Any) -> None:
    """Raises `TypeError` if a call without stateful layers was given a key as `state`.

    They return a state as it is, so the key would not be used. A stateful layer of a
    user may have a key as its state.
    """
    is_given = state is not NOT_GIVEN
    if is_given and may_be_key(state) and not is_stateful(layer):
        raise TypeError(
            f"{type(layer).__name__} takes a state as its second argument; got a PRNG "
            "key. Pass the key by name: `layer(x, key=key)`."
        )


def is_stateful(layer: Any) -> bool:
    """Whether to call a layer with a state."""
    if isinstance(layer, Frozen):
        return is_stateful(layer.value)
    return isinstance(layer, StatefulLayer) and layer.is_stateful()


def call_stateless(what: str, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer without a state. `what` is its name in the error if it needs one."""
    try:
        return layer(*args, **kwargs)
    except TypeError as error:
        called = layer.value if isinstance(layer, Frozen) else layer
        name = getattr(type(called).__call__, "__qualname__", "")
        if re.fullmatch(rf"{re.escape(name)}\(\) missing 1 .*'state'", str(error)):
            raise TypeError(
                f"{what} is {describe_node(called)}, which needs a `state`, but is not a "
                "`StatefulLayer`. Derive its class from `equinox_like.nn.StatefulLayer`."
            ) from None
        raise


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
            "`inference=False`, which takes precedence. To follow the context, use "
            "`nn.inference_mode(model, None)`; or pass `inference=False` to the call."
        )
    return is_inference(inference, flag)
