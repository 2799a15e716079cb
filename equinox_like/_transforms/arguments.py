"""What transformations share: options as static fields, names of arguments, one check."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax.tree_util as jtu

from .._annotations import argument_names, signature_of
from .._core.base import Transformed, name_of
from .._core.show_as import show_as
from .._errors import did_you_mean
from .._tree.filters import is_array, is_array_like
from .._tree.nodes import describe_node, path_str
from .._typing import NOT_GIVEN

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


def applied(make: Callable[..., Any], fun: Any, **options: Any) -> Any:
    """`make(fun, **options)`; or a decorator that does so, if there is no function yet."""
    if fun is NOT_GIVEN:
        return functools.partial(make, **options)
    return make(fun, **options)


class WithOptions(Transformed[_P, _T], Generic[_P, _T]):
    """A transformed function that is made with its static fields, by their names."""

    def __init__(self, fun: Any, /, **fields: Any):
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(fun)


class NamedCall(NamedTuple):
    """A call of the user's function by a transformation, for messages about it."""

    transformation: str
    fun: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"`{self.transformation}` of `{name_of(self.fun)}`"

    def by_name(
        self, option: str, given: dict[str, Any], default: Any
    ) -> list[tuple[Any, Any, str, str]]:
        """For each argument: its entry in the option `given`, its value, and the names of
        both in messages. They are in the order of the leaves of `(args, kwargs)`."""
        # An element of `*args` has no name of its own.
        names = [name if name == shown else None for shown, name in self._names()]
        known = [name for name in [*names, *self.kwargs] if name is not None]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"`{option}` names {unknown}, but `{name_of(self.fun)}` was called without "
                "it; the arguments that can be named in this call are "
                f"{sorted(known)}.{did_you_mean(unknown[0], known, '{!r}')}"
            )
        named = [*zip(names, self.args, strict=True), *sorted(self.kwargs.items())]
        return [
            (given.get(name, default), value, f"{option}[{name!r}]", name)
            if name is not None
            else (default, value, option, "args")
            for name, value in named
        ]

    def check(self) -> None:
        """Raises `TypeError` if the arguments do not fit the function's signature."""
        try:
            self._names()
        except TypeError as error:
            raise TypeError(f"{self}: {error}.") from None

    def data_names(
        self, tree: Any = None, is_data: Callable[[Any], bool] = is_array
    ) -> list[str]:
        """For each array of `(tree, args, kwargs)`: its path, starting with the name of
        the function, or with that of its parameter."""
        parts = [
            (name_of(self.fun), tree),
            *zip(self._shown_names(), self.args, strict=True),
            *sorted(self.kwargs.items()),
        ]
        return [
            path_str(path, name)
            for name, part in parts
            for path, x in jtu.tree_leaves_with_path(part)
            if is_data(x)
        ]

    def leaf_name(self, path: Any) -> str:
        """The path of a leaf of `(args, kwargs)`, starting with its parameter's name."""
        kind, place, *path = path
        if kind.idx == 1:
            return path_str(path, place.key)
        return path_str(path, self._shown_names()[place.idx])

    def _shown_names(self) -> list[str]:
        try:
            return [shown for shown, _ in self._names()]
        except (TypeError, ValueError):
            return [f"args[{i}]" for i in range(len(self.args))]

    def _names(self) -> list[tuple[str, str]]:
        """For each positional argument: its name in messages, and its parameter.

        **Raises:**

        `TypeError` if the arguments do not fit the function's signature.
        """
        call = range(len(self.args)), {k: k for k in self.kwargs}
        try:
            bound = signature_of(self.fun).bind(*call[0], **call[1])
        except TypeError:
            # `functools.wraps` shows the signature of the wrapped function, not the actual
            # one.
            signature = signature_of(self.fun, follow_wrapped=False)
            bound = signature.bind(*call[0], **call[1])
        names = argument_names(bound)
        return [names[i] for i in range(len(self.args))]


def show_as_call(
    made: _F,
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    tree: Any = None,
    is_data: Callable[[Any], bool] = is_array,
    before: Sequence[str] = (),
) -> _F:
    """`made` in JAX's messages as a call of `fun`, see `show_as`. Its arrays are those of
    `(tree, args, kwargs)`, after some with the names `before`."""
    call = NamedCall("", fun, args, kwargs or {})
    names = [*before, *call.data_names(tree, is_data)]
    return show_as(made, fun, lambda: names)


def check_only_arrays(
    out: Any,
    name: str,
    transformation: str,
    takes: Callable[[Any], bool] = is_array_like,
) -> None:
    """Raises `TypeError` for the first leaf of an output that JAX cannot take."""
    for path, leaf in jtu.tree_flatten_with_path(out)[0]:
        if not takes(leaf):
            raise TypeError(
                f"`{transformation}` of `{name}`: the output must hold arrays and "
                f"numbers only; `{path_str(path, 'output')}` is {describe_node(leaf)}."
            )
