"""Small Modules around other values: a call with arguments, a static value, a closure."""

import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax.tree_util as jtu

from .._annotations import signature_of
from .._tree.cached import build_now, raw_dict
from .construct import filled
from .fields import field
from .flatten import WRAPPER_ATTRIBUTES
from .instance import OfCallables, code_of, name_of, show_function
from .module import Function, Module, as_pytree

_T = TypeVar("_T")


class Static(Module, Generic[_T]):
    """Holds a value as structure, for transformations that accept arrays only.

    For JAX, two `Static`s are the same if their values have the same structure, and leaves
    that are equal and of the same type: `1`, `1.0` and `True` differ.

    **Arguments:**

    - `value`: any pytree. Its arrays, if any, cannot be compared.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        @jax.jit
        def f(x):
            return x + 1, eqx.internal.Static("text")

        assert f(1)[1].value == "text"
        ```
    """

    _leaves: tuple[Any, ...] = field(static=True)
    _treedef: Any = field(static=True)

    def __init__(self, value: _T):
        leaves, self._treedef = jtu.tree_flatten(value)
        self._leaves = tuple(leaves)

    @property
    def value(self) -> _T:
        return self._treedef.unflatten(self._leaves)


def str2jax(msg: str) -> Module:
    """A pytree without leaves that is shown as a text.

    Compiled functions can take and return it, for example as a marker. Each call
    creates a class, so call it once, at the top level of a module.

    **Arguments:**

    - `msg`: the text.

    **Returns:**

    An instance of a new class whose name is `msg`. It equals only itself.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        unchanged = eqx.internal.str2jax("unchanged")
        assert str(jax.jit(lambda: unchanged)()) == "unchanged"
        ```
    """
    import wadler_lindig as wl

    body = {
        "__doc__": None,
        "__module__": __name__,
        "__repr__": lambda self: msg,
        "__pdoc__": lambda self, **_: wl.TextDoc(msg),
    }
    return types.new_class(msg, (Module,), exec_body=lambda made: made.update(body))()


class Partial(Function, Generic[_T]):
    """Like `functools.partial`, and a pytree: function and arguments are its children.

    A keyword given both here and in the call is a `TypeError`. Its name, docstring and
    annotations are those of the function. It has a hash, and equals another one with the
    same function and static values, by value and type, and the identical arrays.

    **Arguments:**

    - `func`: any callable, a Module for example.
    - `*args`, `**kwargs`: arguments of `func`. Those of a call are added after them.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        add_one = eqx.Partial(jnp.add, jnp.asarray(1.0))
        assert add_one(2.0) == 3.0
        ```
    """

    func: Callable[..., _T]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    _passes_calls_on_ = True

    __name__ = OfCallables(lambda self: name_of(self.func))  # pyright: ignore[reportAssignmentType]
    __code__ = OfCallables(lambda self: code_of(self.func) or Partial.__call__.__code__)

    def __init__(self, func: Callable[..., _T], /, *args: Any, **kwargs: Any):
        self.func = as_pytree(func)
        self.args = args
        self.keywords = kwargs

    def _shown_(self) -> Any:
        return self.func

    def __call__(self, /, *args: Any, **kwargs: Any) -> _T:
        if self.keywords:
            return self.func(*self.args, *args, **kwargs, **self.keywords)
        return self.func(*self.args, *args, **kwargs)  # faster; the case of a method

    @property
    def __wrapped__(self) -> types.MethodType:
        # Of a transformed method: `inspect.getsource`, `typing.get_type_hints` and `??` of
        # IPython read it.
        if self.keywords:
            raise AttributeError("__wrapped__")
        try:
            return types.MethodType(inspect.unwrap(self.func), *self.args)
        except (TypeError, ValueError) as e:  # not one argument, or no function
            raise AttributeError("__wrapped__") from e

    @property
    def __signature__(self) -> inspect.Signature:
        partial = functools.partial(self.func, *self.args, **self.keywords)
        try:
            signature = signature_of(partial)
        except (TypeError, ValueError) as e:  # `inspect` then uses `__call__`
            raise AttributeError("__signature__") from e
        parameters = signature.parameters.values()
        left = [p for p in parameters if p.name not in self.keywords]
        return signature.replace(parameters=left)


show_function(Partial)


_M = TypeVar("_M", bound=Module)


def module_update_wrapper(wrapper: _M, wrapped: Any = None) -> _M:
    """A copy of a Module with the name and the docstring of the function that it wraps.

    It copies `__module__`, `__name__`, `__qualname__`, `__doc__` and `__annotations__`,
    if they exist. They become part of the tree's structure.

    **Arguments:**

    - `wrapper`: a Module whose class defines `__wrapped__` as a property.
    - `wrapped`: the function; by default `wrapper.__wrapped__`. It is not stored.

    **Returns:**

    The copy; `wrapper` is left as it is.

    **Raises:**

    `ValueError` if `__wrapped__` is not a property of the class.

    !!! example

        ```python
        import equinox_like as eqx

        class Twice(eqx.Module):
            fun: object

            @property
            def __wrapped__(self):
                return self.fun

            def __call__(self, x):
                return self.fun(self.fun(x))

        def add_one(x):
            return x + 1

        add_two = eqx.module_update_wrapper(Twice(add_one))
        assert add_two(1) == 3 and add_two.__name__ == "add_one"
        ```
    """
    cls = type(wrapper)
    if not isinstance(inspect.getattr_static(cls, "__wrapped__", None), property):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} must define `__wrapped__` as a "
            "property. Stored as an attribute, the wrapped object would be in the "
            "tree twice."
        )
    if wrapped is None:
        wrapped = wrapper.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    names = [name for name in WRAPPER_ATTRIBUTES if hasattr(wrapped, name)]
    own = Module.__getstate__(wrapper)
    return filled(cls, own | {name: getattr(wrapped, name) for name in names})


def check_forwards(wrapper: Module, name: str, field: str) -> None:
    """Raises `AttributeError` unless `__getattr__` may look for `name` in `field`.

    Special methods are not looked for there. Nor is anything while `field` has no value,
    because `copy` and `pickle` ask an object that has no attributes yet.
    """
    build_now(wrapper)
    # Not `__dict__`: reading that drops the caches of the instance.
    if name.startswith("__") or field not in raw_dict(wrapper):
        raise AttributeError(
            f"{type(wrapper).__name__!r} object has no attribute {name!r}"
        )


_Function = types.FunctionType


def closure_to_pytree(tree: Any) -> Any:
    """Makes the values that functions close over leaves of a tree.

    Each Python function among the leaves becomes a callable Module. Its children are the
    values of its closure and of its defaults, in which functions are replaced in turn. So
    an optimiser's learning rate can be differentiated, and an optimiser that is created
    again with other arrays does not cause a recompilation.

    Two such Modules have equal structure if their functions have the same code, name,
    module and globals.

    **Arguments:**

    - `tree`: any pytree. Other callables among its leaves, such as built-in functions
        and `functools.partial`s, are not changed.

    **Returns:**

    A copy of the tree. Its functions are called like the original ones, and read the
    globals of their module. Each call creates a new closure, so assignments to
    `nonlocal` names are lost.

    **Raises:**

    `ValueError` if a function refers to itself through its closure.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def sgd(rate):
            def update(gradient):
                return -rate * gradient

            return update

        update = eqx.internal.closure_to_pytree(sgd(jnp.asarray(0.5)))
        assert update(jnp.asarray(4.0)) == -2
        gradient = eqx.filter_grad(lambda update, x: update(x))(update, jnp.asarray(4.0))
        assert gradient.cells == (-4.0,)
        ```
    """
    return _replace(tree, ())


def _replace(tree: Any, within: tuple[_Function, ...]) -> Any:
    def replace(leaf):
        return _closure(leaf, within) if isinstance(leaf, _Function) else leaf

    return jtu.tree_map(replace, tree)


def _closure(function: _Function, within: tuple[_Function, ...]) -> "Closure":
    if function in within:
        names = " -> ".join(f"`{f.__qualname__}`" for f in (*within, function))
        raise ValueError(
            f"`closure_to_pytree` found a function that refers to itself: {names}. A "
            "tree cannot contain itself: pass one of these functions as an argument, "
            "or make it a global function."
        )
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            values.append(_Cell.EMPTY)
    parts = tuple(values), function.__defaults__, function.__kwdefaults__
    cells, defaults, keyword_defaults = _replace(parts, (*within, function))
    return Closure(cells, defaults, keyword_defaults, _Code(function))


class Closure(Module):
    """A function whose closure and defaults are children.

    `equinox_like.internal.closure_to_pytree` creates it.
    """

    cells: tuple[Any, ...]
    defaults: tuple[Any, ...] | None
    keyword_defaults: Mapping[str, Any] | None
    code: "_Code" = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.code.name

    @property
    def __wrapped__(self) -> _Function:
        cells = tuple(
            types.CellType() if x is _Cell.EMPTY else types.CellType(x)
            for x in self.cells
        )
        return self.code.function(cells, self.defaults, self.keyword_defaults)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class _Code:
    """A function without its closure and defaults."""

    def __init__(self, function: _Function):
        self.name = function.__name__
        self._code = function.__code__
        self._globals = function.__globals__
        self._names = (function.__module__, function.__qualname__)

    def function(self, cells: Any, defaults: Any, keywords: Any) -> _Function:
        cells = cells or None
        made = _Function(self._code, self._globals, self.name, defaults, cells)
        made.__kwdefaults__ = None if keywords is None else {**keywords}
        made.__module__, made.__qualname__ = self._names
        return made

    def __eq__(self, other: object) -> bool:
        return type(other) is _Code and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        # `==` of code objects compares bytecode, typed constants, names and lines.
        return self._code, self.name, self._names, id(self._globals)

    def __deepcopy__(self, memo: Any) -> "_Code":
        return self  # never a copy of the globals

    def __repr__(self) -> str:
        return f"<code of {self._names[1]}>"


class _Cell(enum.Enum):
    """The content of a cell that has none."""

    EMPTY = "not assigned"
