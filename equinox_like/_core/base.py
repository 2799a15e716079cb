"""`Transformed`, the base of all transformed functions: their errors, pickling, caches.

A transformed function is a Module. If it wraps a callable pytree, for example a model,
that is its subtree. Any other callable is part of its structure, and so are all
options.
"""

import copyreg
import functools
import importlib
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._annotations import signature_of
from .._call_path import add_note_on_path, outer_call
from .._compat.errors import pass_over, was_cut
from .._errors import FOLDER
from .._module.construct import filled
from .._module.fields import field
from .._module.flatten import WRAPPER_ATTRIBUTES
from .._module.instance import OfCallables, name_of as name_of
from .._module.module import Function, as_pytree
from .._module.wrappers import Partial
from .._tree.cached import set_raw_dict
from .._tree.cycles import name_cycle
from .._tree.deleted import raise_if_deleted
from .._tree.require import require_callable as require_callable
from .show_as import name_unconverted

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_S = TypeVar("_S")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[[], None])
_new = object.__new__


class Transformed(Function, Generic[_P, _T]):
    """A wrapped callable: base class of what the transformations return.

    It has the name, docstring and signature of the callable that it wraps, which is
    `__wrapped__`. As an attribute of a class it binds like a method.
    """

    # The name of the transformation.
    _transformation_ = ""
    _wraps_callables_ = True
    _passes_calls_on_ = True
    # The class of the bound method, when `self` is read from an instance.
    _binds_as_ = Partial
    _shown_fields_ = types.MappingProxyType({"_tree": "__wrapped__"})

    # One of the two is the wrapped callable, the other one is `None`.
    _tree: Any
    _opaque: Any = field(static=True)

    # Used if `fun` has no `__name__`; otherwise `__init__` copies it to the instance.
    __name__ = OfCallables(lambda self: name_of(self.__wrapped__))  # pyright: ignore[reportAssignmentType]

    # Of a method that is marked as abstract below the transformation.
    __isabstractmethod__ = OfCallables(
        lambda self: getattr(self.__wrapped__, "__isabstractmethod__", False)
    )

    def __init__(self, fun: Any):
        require_callable(fun, self._transformation_)
        fun = as_pytree(fun)
        is_opaque = jtu.all_leaves([fun])
        self._tree = None if is_opaque else fun
        self._opaque = fun if is_opaque else None
        for name in WRAPPER_ATTRIBUTES:
            try:
                value = getattr(fun, name)
            except AttributeError:
                continue
            setattr(self, name, value)

    @property
    def _held_(self) -> Any:
        return self._opaque if self._tree is None else self._tree

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._held_

    def _shown_around_(self) -> tuple[str, str]:
        """What `__repr__` shows before and after what is wrapped."""
        return f"<{self._transformation_} of ", ">"

    def __repr__(self) -> str:
        start, end = self._shown_around_()
        return start + name_of(self.__wrapped__) + end

    def __pdoc__(self, **kwargs: Any) -> Any:
        # Within a printed tree, what is wrapped is shown in full.
        import wadler_lindig as wl

        start, end = map(wl.TextDoc, self._shown_around_())
        return start + wl.pdoc(self.__wrapped__, **kwargs) + end

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_global(self, _are_copies):  # the function's global name refers to `self`
            make, args = self._made_by_()
            return reduce_global(self, make, *args)
        return super().__reduce_ex__(protocol)

    def _made_by_(self) -> tuple[Any, tuple[Any, ...]]:
        return filled, (type(self), self.__getstate__())

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        raise NotImplementedError

    # `self` is any callable: `ty` does not take `Jitted[(self, x), _T]` as an instance of
    # `Transformed[Concatenate[Any, _Q], _T]`, since ParamSpecs are invariant. The first
    # overload is for what is below `@classmethod`; the last for `@staticmethod`, and for
    # methods with `Self` in mypy, which does not match them to the third.
    @overload
    def __get__(
        self: Callable[Concatenate[type[_S], _Q], _T],
        instance: _S | None,
        owner: type[_S],
    ) -> Callable[_Q, _T]: ...
    @overload
    def __get__(self: _S, instance: None, owner: Any = None) -> _S: ...
    @overload
    def __get__(
        self: Callable[Concatenate[_S, _Q], _T], instance: _S, owner: Any = None
    ) -> Callable[_Q, _T]: ...
    @overload
    def __get__(
        self: Callable[_Q, _T], instance: Any, owner: Any = None
    ) -> "Transformed[..., _T]": ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # Built like an unflattened Module, without its constructor, for speed: this
        # runs at each call of the method.
        bound: Any = _new(self._binds_as_)
        set_raw_dict(bound, {"func": self, "args": (instance,), "keywords": {}})
        return bound


def _are_copies(one: Any, other: Any) -> bool:
    """Whether they differ at most in their identity, as after `jax.tree.map`."""
    structure = jtu.tree_structure(other)
    return structure.num_leaves == 0 and jtu.tree_structure(one) == structure


# Arguments by which Equinox once set what its transformations filter.
DEPRECATED: Final = ("default", "fn", "args", "kwargs", "out")


def check_not_deprecated(
    transformation: str, deprecated: Iterable[str], given: Mapping[str, Any], fix: str
) -> None:
    for name in deprecated:
        if name in given:
            raise ValueError(
                f"`{transformation}` no longer takes `{name}`, which was deprecated "
                f"long ago{fix}."
            )


def by_position(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call, with each argument that has a position passed by position."""
    if not kwargs:
        return args, kwargs
    bound = signature_of(fun).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def hide_frames(error: BaseException) -> None:
    """Removes this library's frames from a traceback.

    Call it in an `except` clause, before a bare `raise`, which does not add its own
    frame again. JAX does the same with its frames; `JAX_TRACEBACK_FILTERING=off` turns
    off both. The last frame stays, because the error was raised there, unless JAX has
    removed later ones. Before, the path of the layer is noted, which they tell.
    """
    add_note_on_path(error)
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if not entries:
        return
    kept = (
        None if was_cut(error) and is_private(entries[-1].tb_frame) else entries.pop()
    )
    for entry in reversed(entries):
        if not is_private(entry.tb_frame):
            entry.tb_next = kept
            kept = entry
    BaseException.with_traceback(error, kept)


def frames_hidden(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: applies `hide_frames` to the errors that `function` raises.

    Those about deleted arguments, and about one that contains itself, name the place.
    """

    @functools.wraps(function)
    @outer_call  # before it has the name of `function`
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except Exception as e:
            hide_frames(e)
            raise_if_deleted(e, function, args, kwargs)
            name_cycle(e, function, args, kwargs)
            name_unconverted(e, function, args, kwargs)
            raise

    return call


# `nn` is left out: its frames show which layer of a model failed. JAX compares whole parts
# of a path, so that the beginning of a name would not do.
_PRIVATE = tuple(
    os.path.join(FOLDER, part)
    for part in (
        "_call_path.py",
        "_compat",
        "_core",
        "_io",
        "_jit",
        "_loops",
        "_module",
        "_runtime",
        "_transforms",
        "_tree",
        "debug",
    )
)
pass_over(_PRIVATE)


def is_private(frame: types.FrameType) -> bool:
    """Whether a frame is internal to this library, and so of no use to a user."""
    return frame.f_code.co_filename.startswith(_PRIVATE)


def global_name(value: Any) -> str:
    # `jnp.ufunc`s such as `jnp.maximum` have no `__qualname__`.
    return getattr(value, "__qualname__", None) or value.__name__


def is_global(value: Any, same: Callable[..., bool] = operator.is_) -> bool:
    """Whether a function or class can be found by its name in the module it is from."""
    try:
        module = sys.modules[value.__module__]
        return same(operator.attrgetter(global_name(value))(module), value)
    except (AttributeError, KeyError, TypeError):
        return False


class _InMain:
    """A name of the script or notebook that is running.

    To cloudpickle it looks like `function`, which it sends in place of this. `pickle` goes
    by its class, and saves the name.
    """

    __slots__ = "function", "name"

    def __init__(self, name: str, function: Any = None):
        self.name = name
        self.function = function

    def find(self) -> Any:
        return operator.attrgetter(self.name)(sys.modules["__main__"])

    def __reduce__(self):
        return _InMain, (self.name,)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return types.FunctionType

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def reduce_global(value: Any, make: Callable[..., Any], *args: Any) -> Any:
    """What `value.__reduce__` returns if `value` has a global name: that name.

    What another process cannot import, because it is of the script or notebook that runs,
    cloudpickle and the like make by `make(*args)`; `pickle` looks it up in `__main__`.
    """
    name = value.__qualname__
    if value.__module__ == "__main__":
        return _in_main(name, lambda _=None: make(*args)), ()
    return _imported, (value.__module__, name)


def _in_main(name: str, make: Any) -> types.MethodType:
    """A function for `__reduce__`, which `pickle` saves as the name, and others as `make`.

    It is a method: `pickle` saves one as the attribute `find` of its instance, cloudpickle
    and dill by its function. joblib does what `pickle` does, but sends `make` as the
    instance.
    """
    make.__name__ = "find"
    make.find = make
    return types.MethodType(make, _InMain(name, make))


def _imported(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _reduce_jax_function(function: Any) -> Any:
    """What pickles and copies a function that JAX wraps, or a `jnp.ufunc`: if possible,
    its name.

    JAX pickles what is wrapped, which is not found by its name: that is the wrapper's. So
    `jax.nn.relu`, the activation of `nn.MLP`, would not be pickled, and `copy.deepcopy`
    would make another function of it.
    """
    if is_global(function) and function.__module__ != "__main__":
        return global_name(function)
    return function.__reduce_ex__(2)


for _kind in (type(jax.jit(is_global)), jax.custom_jvp, jax.custom_vjp, jnp.ufunc):
    copyreg.pickle(_kind, _reduce_jax_function)


_hooks: list[Callable[[], None]] = []


def on_clear(hook: _F) -> _F:
    """Decorator: `hook` is called by [`equinox_like.clear_caches`][]."""
    _hooks.append(hook)
    return hook


def clear_caches() -> None:
    """Empties the caches of the library.

    A function that is wrapped again, by `filter_jit(f)` for example, then compiles
    again. Existing wrappers keep what they have compiled; their `.clear_cache()` frees
    that. JAX has caches of its own: call `jax.clear_caches()` afterwards to empty them
    as well.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        eqx.clear_caches()
        jax.clear_caches()
        ```
    """
    for hook in _hooks:
        hook()
