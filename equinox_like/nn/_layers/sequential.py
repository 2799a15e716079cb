"""`Sequential` and `Lambda`: a chain of layers, and a function as a layer."""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, SupportsIndex, TypeVar, overload

from jaxtyping import Array

from ..._annotations import signature_of
from ..._call_path import call_part
from ..._module import Module
from ..._tree.nodes import describe_node
from ..._typing import NOT_GIVEN, PRNGKeyArray
from .._base.checks import as_layers, check_function, check_layer
from .._base.init import split_key
from .._base.precision import computes
from .._base.state import (
    StatefulLayer,
    call_stateless,
    check_not_key,
    is_stateful,
    key_for,
)

_S = TypeVar("_S")
_Y = TypeVar("_Y", covariant=True)


class Sequential(StatefulLayer, Generic[_Y]):
    """Calls its members one after the other, each on the result of the previous member.

    It can be indexed, sliced and iterated over; `len` is the number of members.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
        model = eqx.nn.Sequential(
            [
                eqx.nn.Linear(3, 8, key=k1),
                jax.nn.relu,
                eqx.nn.Dropout(0.1),
                eqx.nn.Linear(8, 2, key=k2),
            ]
        )
        assert model(jnp.ones(3), key=k3).shape == (2,)
        assert len(model[:2]) == 2
        ```
    """

    layers: tuple[Any, ...]

    # Without a type variable, as mypy joins the members of a list to `object`. The second
    # kind of function is that of layers that return the type that they take.
    @overload
    def __init__(
        self: "Sequential[Array]",
        layers: Iterable[
            StatefulLayer | Callable[..., Array] | Callable[[Array], Array]
        ],
    ): ...

    @overload
    def __init__(self: "Sequential[Any]", layers: Iterable[Callable[..., Any]]): ...

    def __init__(self, layers: Iterable[Callable[..., Any]]):
        """**Arguments:**

        - `layers`: any callables: layers, Modules of your own, plain functions.

        **Raises:**

        `TypeError` for a class of layers in place of a layer.
        """
        self.layers = as_layers("Sequential", "layers", layers)

    @overload
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> _Y: ...

    @overload
    def __call__(
        self, x: Any, state: _S, *, key: PRNGKeyArray | None = None
    ) -> tuple[_Y, _S]: ...

    @computes("eqx.nn.Sequential", "nothing")
    def __call__(
        self, x: Any, state: Any = NOT_GIVEN, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """**Arguments:**

        - `x`: passed to the first member.
        - `state`: passed to each member that is a [`equinox_like.nn.StatefulLayer`][] and
            says it is stateful, and replaced by the state that it returns.
        - `key`: split into one for each member, which is passed to the members that take
            an argument `key`. Without it, a member uses the default of this argument.

        **Returns:**

        The result of the last member. If `state` was passed, the pair of that result and
        the last state.

        **Raises:**

        `TypeError` if a member cannot be called, or is stateful and no `state` was
        passed. An error about the shape of an array or a missing key begins with the
        member it came from, for example `layers[1]`.
        """
        number = len(self.layers)
        keys = [None] * number if key is None else split_key(key, number, self)
        check_not_key(self, state)
        for i, (layer, layer_key) in enumerate(zip(self.layers, keys, strict=True)):
            if not callable(layer):
                check_layer("Sequential", f"layers[{i}]", layer)
            kwargs = key_for(layer, layer_key)
            part = self, ("layers", i), layer
            if not is_stateful(layer):
                what = f"`layers[{i}]` of this Sequential"
                x = call_part(*part, call_stateless, what, layer, x, **kwargs)
            elif state is NOT_GIVEN:
                raise TypeError(
                    f"`layers[{i}]` of this Sequential is stateful: it is "
                    f"{describe_node(layer)}. Pass its state, as in `out, state = "
                    "model(x, state)`."
                )
            else:
                x, state = call_part(*part, layer, x, state=state, **kwargs)
        return x if state is NOT_GIVEN else (x, state)

    def is_stateful(self) -> bool:
        """Whether any member is stateful."""
        return any(map(is_stateful, self.layers))

    @overload
    def __getitem__(self, index: slice) -> "Sequential[_Y]": ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...

    def __getitem__(self, index: Any) -> Any:
        """A member, or for a slice a `Sequential` of members."""
        if isinstance(index, slice):
            return _with_layers(self, self.layers[index])
        return self.layers[operator.index(index)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


class Lambda(Module, Generic[_Y]):
    """A function as a layer.

    [`equinox_like.nn.Sequential`][] takes plain functions directly; `Lambda` is for
    places where a layer is called with a `key`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        flatten = eqx.nn.Lambda(jnp.ravel)
        assert flatten(jnp.ones((2, 3)), key=None).shape == (6,)
        ```
    """

    fn: Callable[[Any], _Y]

    def __init__(self, fn: Callable[[Any], _Y]):
        """**Arguments:**

        - `fn`: a callable of one argument. If it is a pytree, its arrays are those of the
            layer.

        **Raises:**

        `TypeError` if it cannot be called.
        """
        check_function("Lambda", "fn", fn)
        self.fn = fn

    @computes(None)
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> _Y:
        """**Returns:** `fn(x)`. `key` is ignored."""
        return self.fn(x)


def _with_layers(sequential: Sequential, layers: tuple[Any, ...]) -> Sequential:
    """A copy with other members; of the same class if its constructor makes such a one."""
    cls = type(sequential)
    parameters = signature_of(cls).parameters
    own = vars(sequential)
    kwargs = {name: getattr(sequential, name) for name in parameters if name in own}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    if "layers" not in parameters or not kwargs.keys() >= set(required):
        return Sequential(layers)
    made = cls(**kwargs | {"layers": layers})
    is_like = len(made) == len(layers) and all(map(operator.is_, made.layers, layers))
    return made if is_like else Sequential(layers)
