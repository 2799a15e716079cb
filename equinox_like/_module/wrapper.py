"""`module_update_wrapper`, and attributes that a wrapper takes from what it wraps."""

import inspect
from typing import Any, TypeVar

from .._tree.cached import build_now, raw_dict
from .flatten import WRAPPER_ATTRIBUTES
from .module import Module

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
    copy: Any = object.__new__(cls)
    copy.__dict__.update(Module.__getstate__(wrapper))
    for name in WRAPPER_ATTRIBUTES:
        try:
            copy.__dict__[name] = getattr(wrapped, name)
        except AttributeError:
            pass
    return copy


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
