"""`capture`, `tag` and `intervene`: read or replace intermediate values of a model.

The chosen Modules are replaced by watched copies (`harvest.py`), which mark a value for it
to collect, or pass it to a function of the user. The user's model is not changed.

A `Context` holds whether `tag` marks or replaces a value. So this is part of JAX's
cache key, and functions that were compiled before are retraced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, ParamSpec, TypeVar

import jax.tree_util as jtu

from .._core.base import frames_hidden, name_of
from .._core.context import Context
from .._errors import did_you_mean
from .._module.fields import field
from .._tree.filters import is_array
from .._tree.nodes import describe_node, listed
from .._tree.paths import check_patterns, matches, near_paths
from .harvest import (
    Around,
    Found,
    Mark,
    Replace,
    See,
    harvest,
    map_modules,
    marked,
    marks_of,
    replacement,
    with_step,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Functions = tuple[tuple[str, Callable[[Any], Any]], ...]

# The number of enclosing calls of `capture`.
_depth: Final[Context[int]] = Context(0, name="capture")
# Pairs of a pattern for names of values, and the function that replaces these values.
_replaced: Final[Context[_Functions]] = Context((), name="intervene")
_SHOWN: Final = 8


def capture(
    model: Callable[_P, _T], where: Any, *, of: Literal["outputs", "inputs"] = "outputs"
) -> "Captured[_P, _T]":
    """A function that calls a model, and also returns what chosen parts of it return.

    **Arguments:**

    - `model`: a Module that can be called, or another callable.
    - `where`: the Modules to capture: a pattern for paths, as in
        [`equinox_like.trainable`][], such as `"layers[0]"`, `"**.mlp"` or `"**"`; a
        class; a function from a Module to a bool; or a sequence of these. A pattern also
        chooses values to which [`equinox_like.tag`][] gave a matching name.
    - `of`: `"outputs"`, or `"inputs"` for what the Modules are called with, as pairs
        `(args, kwargs)`.

    **Returns:**

    A function of the arguments of `model`, which returns the pair `(out, values)`. `out` is
    what `model` returns. `values` is a dictionary from the path of each chosen Module that
    was called, or from a name, to its output: any pytree; the tuple of its outputs, in the
    order of the calls, if there was more than one. The model itself has the path `""`.

    Within `jax.vmap`, `jax.lax.scan` and so in [`equinox_like.nn.Stacked`][], the
    arrays have the axes of the batch, or of the steps, in front. Within `jax.shard_map`
    they have one row for each device along its mesh axes, in front. The values have
    derivatives. A Module whose attributes are read, but which is not called, has no
    output to capture.

    **Raises:**

    `TypeError` for a `where` of another type, or a class as `model`. When called:
    `ValueError` if a part of `where` chooses nothing that is called; `RuntimeError`, naming
    the path, for a value that is computed within `jax.lax.cond` or `jax.lax.while_loop`,
    where it is not known in advance whether and how often that happens.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 2, 8, depth=2, key=jax.random.key(0))
        out, values = eqx.capture(mlp, eqx.nn.Linear)(jnp.ones(3))
        assert list(values) == ["layers[0]", "layers[1]", "layers[2]"]
        assert values["layers[0]"].shape == (8,)
        assert (values["layers[2]"] == out).all()
        ```
    """
    return Captured(model, where, of)


def tag(value: _T, name: str) -> _T:
    """Gives a value a name, by which [`equinox_like.capture`][] returns it.

    Outside of `capture` and [`equinox_like.intervene`][] it returns `value` itself.

    **Arguments:**

    - `value`: any pytree.
    - `name`: what `capture` and `intervene` call it. If several values have the same
        name, `capture` returns the tuple of them.

    **Returns:**

    `value`, or its replacement by `intervene`.

    **Raises:**

    `ValueError` for an empty name, `TypeError` for one that is not a string.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def attend(scores):
            weights = eqx.tag(jax.nn.softmax(scores), "weights")
            return weights @ jnp.arange(3.0)

        out, values = eqx.capture(attend, "weights")(jnp.zeros(3))
        assert jnp.allclose(values["weights"], 1 / 3)
        ```
    """
    if not isinstance(name, str):
        raise TypeError(
            "`tag` takes the value first, and then a string as its name; got "
            f"{describe_node(name)} as `name`."
        )
    if not name:
        raise ValueError("`tag` takes a non-empty string as its name.")
    for pattern, function in _replaced.value:
        if matches(pattern, name):
            value = replacement(function, value, name)
    return marked(value, Mark(name, None)) if _depth.value else value


def intervene(
    model: Callable[_P, _T], replacements: Mapping[str, Callable[[Any], Any]]
) -> "Intervened[_P, _T]":
    """A function that calls a model with the outputs of chosen parts replaced.

    **Arguments:**

    - `model`: a Module that can be called, or another callable.
    - `replacements`: a dictionary from patterns, as in [`equinox_like.capture`][], to
        functions. A pattern that is the path of a Module does not match a `tag` of the
        same name. Each function is called with an output, and returns what takes its
        place: a tree of the same structure, with arrays of the same shapes and dtypes. It
        may close over arrays, even traced ones. In an [`equinox_like.nn.Stacked`][] it is
        called once, for all layers.

    **Returns:**

    A function of the arguments of `model`, which returns what `model` then returns. It
    can be passed to `capture`, which returns the new values, with the same paths.

    **Raises:**

    `TypeError` if `model` is a class, a key is not a string, or a replacement is not
    callable or is a pytree with arrays. When called:
    `ValueError` if a pattern chooses nothing, and [`equinox_like.ShapeError`][], naming the
    path, if a function returns another structure, shape or dtype.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, 2, 8, depth=2, key=jax.random.key(0))
        ablated = eqx.intervene(mlp, {"layers[1]": lambda h: h.at[4].set(0.0)})
        _, values = eqx.capture(ablated, "layers[1]")(jnp.ones(3))
        assert values["layers[1]"][4] == 0
        ```
    """
    return Intervened(model, replacements)


class Captured(Around, Generic[_P, _T]):
    """The result of [`equinox_like.capture`][]."""

    where: tuple[Any, ...] = field(static=True)
    of: Literal["outputs", "inputs"] = field(static=True)

    def __init__(self, model: Any, where: Any, of: Literal["outputs", "inputs"]):
        super().__init__(model, "capture")
        self.where = _parts_of(where)
        if of not in ("outputs", "inputs"):
            raise TypeError(
                f"`capture` takes 'outputs' or 'inputs' as `of`; got {of!r}."
                + did_you_mean(of, ("outputs", "inputs"), "{!r}")
            )
        self.of = of

    @frames_hidden
    def __call__(
        self, /, *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[_T, dict[str, Any]]:
        depth = _depth.value + 1
        chosen: dict[str, Any] = {}

        def mark(path, node):
            if not any(_chooses(part, path, node) for part in self.where):
                return node
            chosen[path] = node
            return with_step(node, See(Mark(path, depth), self.of))

        def is_wanted(mark):
            return mark.depth == depth or (
                mark.depth is None
                and any(
                    isinstance(p, str) and matches(p, mark.path) for p in self.where
                )
            )

        model = map_modules(self.model, mark)
        with _depth(depth):
            out, found = harvest(_call, is_wanted, model, args, kwargs)
        values = _by_path(found)
        self._check(chosen, found, values)
        return out, values

    def _check(
        self, chosen: dict[str, Any], found: list[Found], values: dict[str, Any]
    ) -> None:
        for x in found:
            if x.mark.depth is None and x.mark.path in chosen:
                raise ValueError(
                    f"`{x.mark.path}` is both the name of a `tag` and the path of a "
                    "chosen Module. Rename the tag."
                )
        for part in self.where:
            names = [path for path in chosen if _chooses(part, path, chosen[path])]
            if isinstance(part, str):
                names += [name for name in values if matches(part, name)]
            if values.keys().isdisjoint(names):
                raise _chooses_nothing("capture", part, self.model, names)


class Intervened(Around, Generic[_P, _T]):
    """The result of [`equinox_like.intervene`][]."""

    replacements: _Functions = field(static=True)

    def __init__(self, model: Any, replacements: Mapping[str, Callable[[Any], Any]]):
        super().__init__(model, "intervene")
        if not isinstance(replacements, Mapping):
            raise TypeError(
                "`replacements` of `intervene` must be a dictionary from patterns to "
                f"functions; got {describe_node(replacements)}."
            )
        check_patterns(replacements, "replacements")
        for pattern, function in replacements.items():
            if not callable(function) or any(map(is_array, jtu.tree_leaves(function))):
                raise TypeError(
                    "`intervene` takes functions, and not pytrees with arrays; got "
                    f"{describe_node(function)} for {pattern!r}. Use a function that "
                    "closes over the arrays, such as a `lambda`."
                )
        self.replacements = tuple(replacements.items())

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        model = self._replaced_in(self.model)
        paths: list[str] = []
        map_modules(self.model, lambda path, node: paths.append(path) or node)
        # These patterns can only match names of `tag`s.
        left = [
            pattern
            for pattern, _ in self.replacements
            if not any(matches(pattern, path) for path in paths)
        ]
        # The context leaves out the others: for a new function, whatever is compiled within
        # would be compiled again, and JAX's caches would keep what the function closes
        # over.
        of_tags = [x for x in self.replacements if "*" in x[0] or x[0] in left]
        with _replaced((*of_tags, *_replaced.value)):
            self._check(left, model, args, kwargs)
            return model(*args, **kwargs)

    def _replaced_in(self, model: Any) -> Any:
        def replace(path, node):
            for pattern, function in self.replacements:
                if matches(pattern, path):
                    node = with_step(node, Replace(path, function))
            return node

        return map_modules(model, replace)

    def _check(self, left: list[str], model: Any, args: Any, kwargs: Any) -> None:
        if not left:
            return
        # The names of `tag`s are known after a trace.
        with _depth(_depth.value + 1):
            names = [mark.path for mark in marks_of(_call, model, args, kwargs)]
        for pattern in left:
            if not any(matches(pattern, name) for name in names):
                raise _chooses_nothing("intervene", pattern, self.model, [])


def _call(model: Any, args: Any, kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _parts_of(where: Any) -> tuple[Any, ...]:
    parts = tuple(where) if isinstance(where, list | tuple) else (where,)
    for part in parts:
        if not (isinstance(part, str) or callable(part)):
            raise TypeError(
                "`capture` chooses Modules by a pattern for their paths, a class, a "
                f"function of a Module, or a sequence of these; got {part!r}."
            )
    return parts


def _chooses(part: Any, path: str, node: Any) -> bool:
    if isinstance(part, str):
        return matches(part, path)
    return isinstance(node, part) if isinstance(part, type) else bool(part(node))


def _by_path(found: Iterable[Found]) -> dict[str, Any]:
    groups: dict[str, list[Any]] = {}
    for x in found:
        groups.setdefault(x.mark.path, []).append(x.rest.fill(x.arrays))
    return {
        path: values[0] if len(values) == 1 else tuple(values)
        for path, values in groups.items()
    }


def _chooses_nothing(
    function: str, part: Any, model: Any, names: Sequence[str]
) -> ValueError:
    shown = repr(part) if isinstance(part, str) else name_of(part)
    if names:
        return ValueError(
            f"`{function}`: the Modules that {shown} chooses are not called: "
            f"{listed(names, _SHOWN)}. Perhaps the Module that contains them reads their "
            "attributes: choose that one, or `tag` the value."
        )
    there: list[str] = []
    map_modules(model, lambda path, node: there.append(path) or node)
    return ValueError(
        f"`{function}`: {shown} chooses no Module and no `tag` of {name_of(model)}. There "
        f"are Modules at: {listed(there, _SHOWN)}." + near_paths([part], there)
    )
