"""Pickling by name, for compiled functions and others that JAX wraps."""

import copyreg
import importlib
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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

    In cloudpickle, what is not importable is made by `make(*args)`.
    """
    name = value.__qualname__
    if value.__module__ != "__main__":
        return _imported, (value.__module__, name)

    find = _as_find(lambda _=None: make(*args))
    return types.MethodType(find, _InMain(name, find)), ()


def _as_find(function: Any) -> Any:
    # `pickle` saves a method as the attribute `find` of its instance, cloudpickle and dill
    # by its function. joblib does what `pickle` does, but sends `function` as the instance.
    function.__name__ = "find"
    function.find = function
    return function


def _imported(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _reduce_function(function: Any) -> Any:
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
    copyreg.pickle(_kind, _reduce_function)
