"""Watched Modules, whose call also marks or replaces a value.

A watched Module is an instance of a subclass of its class, with the same fields and
methods. So code that reads its attributes, or checks its class, works as before.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import ShapeError
from .._module.fields import field
from .._module.freezing import Frozen
from .._module.module import BoundMethod, Module
from .._tree.arrays import describe_array
from .._tree.filters import is_array
from .._tree.nodes import children_of, describe_node, path_within
from .harvest import Mark, marked


class Inputs(NamedTuple):
    """What a Module was called with, as [`equinox_like.capture`][] returns it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Around(Module):
    """A callable that wraps another one. Paths of Modules leave out the wrapper."""

    model: Any

    @property
    def __wrapped__(self) -> Any:
        return self.model


class See(NamedTuple):
    mark: Mark
    of: Literal["outputs", "inputs"]


class Replace(NamedTuple):
    path: str
    function: Callable[[Any], Any]


def map_modules(
    node: Any, function: Callable[[str, Any], Any], path: tuple[Any, ...] = ()
) -> Any:
    """`node`, with each callable Module replaced by `function(path, module)`."""
    if node is None or jtu.all_leaves([node]):
        return node
    children, treedef = children_of(node)
    old = [child for _, child in children]
    new = [
        map_modules(
            child, function, path if isinstance(node, Around) else (*path, *step)
        )
        for step, child in children
    ]
    if any(a is not b for a, b in zip(old, new, strict=True)):
        node = treedef.unflatten(new)
    if not isinstance(node, Module) or not callable(node):
        return node
    # Calls of these wrappers call the Module that they hold, which is replaced itself.
    if isinstance(node, Around | BoundMethod | Frozen):
        return node
    return function(path_within(path), node)


def with_step(node: Any, step: See | Replace) -> Any:
    """A watched copy of `node`, whose call also runs `step`."""
    cls, state = type(node), node.__getstate__()
    steps = state.get("_steps_", ())  # `getattr` may find those of a wrapped layer
    new: Any = object.__new__(cls if steps else _watched(cls))
    for name, value in state.items():
        object.__setattr__(new, name, value)
    object.__setattr__(new, "_steps_", (*steps, step))
    return new


def class_of(node: Any) -> Any:
    """The class of a node, or that of the Module of which it is a watched copy."""
    cls = type(node)
    return cls.__bases__[-1] if "_steps_" in vars(cls) else cls


class _Silent:
    """Keeps the `__init_subclass__` of a user from being called for a watched class."""

    def __init_subclass__(cls) -> None:
        pass


@functools.cache
def _watched(cls: type) -> type:
    """A subclass with a field for steps. Cached, as JAX never drops node classes."""

    @functools.wraps(cls.__call__)
    def call(self, /, *args, **kwargs):
        for step in self._steps_:
            if isinstance(step, See) and step.of == "inputs":
                args, kwargs = marked(Inputs(args, kwargs), step.mark)
        out = super(subclass, self).__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # The innermost `intervene` adds its step last, and runs first.
        for step in reversed(self._steps_):
            if isinstance(step, Replace):
                out = replacement(step.function, out, step.path)
        for step in self._steps_:
            if isinstance(step, See) and step.of == "outputs":
                out = marked(out, step.mark)
        return out

    names = {
        "__call__": call,
        "__annotations__": {"_steps_": Any},
        "_steps_": field(static=True, default=()),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    subclass: Any = types.new_class(
        cls.__name__, (_Silent, cls), {}, lambda body: body.update(names)
    )
    return subclass


def replacement(function: Callable[[Any], Any], value: Any, path: str) -> Any:
    new = function(value)
    old_leaves, old_structure = jtu.tree_flatten_with_path(value)
    leaves, structure = jtu.tree_flatten(new)
    if structure != old_structure:
        raise ShapeError(
            "The functions of `intervene` must return the structure that they are "
            f"given. The one for `{path}` was given {describe_node(value)} and "
            f"returned {describe_node(new)}."
        )
    root = path or "<root>"
    return structure.unflatten(
        [
            _same_type(old, new, root + jtu.keystr(step))
            for (step, old), new in zip(old_leaves, leaves, strict=True)
        ]
    )


def _same_type(old: Any, new: Any, path: str) -> Any:
    if not is_array(old):
        return new
    if not isinstance(new, jax.Array):
        new = jnp.asarray(new)
    if (new.shape, new.dtype) != (old.shape, jax.typeof(old).dtype):
        raise ShapeError(
            f"The functions of `intervene` must keep the shape and dtype. `{path}` is "
            f"{describe_array(old)}, but its function returned {describe_array(new)}. "
            "Use `jax.numpy.full_like` or `astype`."
        )
    return new
