"""Prints trees, with arrays in short form, laid out to fit a width.

wadler_lindig does the layout, and prints Python's types and dataclasses. `TreeWLCustom`
adds the types of JAX. wadler_lindig takes 4 ms to import, so it is imported only when
something is printed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .arrays import is_deleted, is_weak


def tree_pformat(
    pytree: Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] | None = None,
) -> str:
    """A readable text for a tree: `Linear(weight=f32[2,3], bias=f32[2])`.

    An array is shown by dtype and shape: `f32[2,3]` in JAX, `f64[3](numpy)` in NumPy,
    `weak_f32[]` if weakly typed, `key<fry>[]` for a typed PRNG key. Fields of a dataclass
    that have their default value are left out.

    **Arguments:**

    - `pytree`: what to print; any Python object.
    - `width`: the number of columns. A container that does not fit is broken into lines.
    - `indent`: the indentation of its content.
    - `short_arrays`: if `False`, the values of arrays are shown, unless they were
        deleted.
    - `struct_as_array`: if `True`, a `jax.ShapeDtypeStruct` is shown like an array.
    - `truncate_leaf`: a function. Objects for which it returns `True` are shown as
        `TypeName(...)`.

    **Returns:**

    The text. [`equinox_like.tree_pprint`][] prints it. An object inside of itself is
    shown as `<recursive>`, and a field that was not set as `<uninitialised>`. A class
    may define `__pdoc__(self, **kwargs)`, the hook of wadler_lindig, to be shown in
    another way. For an interactive picture, Modules can be rendered by treescope (`pip
    install treescope`).

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        tree = {"w": jnp.ones((2, 3)), "act": jnp.tanh}
        assert eqx.tree_pformat(tree) == "{'w': f32[2,3], 'act': <wrapped function tanh>}"
        ```
    """
    import wadler_lindig as wl

    custom = TreeWLCustom(truncate_leaf, short_arrays, struct_as_array, indent)
    return wl.pformat(
        pytree,
        width=width,
        indent=indent,
        short_arrays=short_arrays,
        custom=custom,
        seen_ids=custom.seen_ids,
    )


def tree_pprint(pytree: Any, **options: Any) -> None:
    """Prints the text of [`equinox_like.tree_pformat`][], which takes these options.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        eqx.tree_pprint(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
        # Linear(weight=f32[2,3], bias=f32[2], in_features=3, out_features=2)
        ```
    """
    print(tree_pformat(pytree, **options))


@dataclasses.dataclass(frozen=True)
class TreeWLCustom:
    """The rules of `tree_pformat`, as the `custom=` of wadler_lindig's functions.

    Calling it returns a document (`wadler_lindig.AbstractDoc`) for an object that these
    rules cover, and `None` for any other object.
    """

    truncate_leaf: Callable[[Any], bool] | None = None
    short_arrays: bool = True
    struct_as_array: bool = False
    # wadler_lindig does not pass these two to `custom`, so its caller sets them here.
    indent: int = 2
    seen_ids: set[int] = dataclasses.field(default_factory=set)

    def __call__(self, obj: Any) -> Any:
        import wadler_lindig as wl

        # Classes are printed as parts of their instances, so they are not truncated.
        if isinstance(obj, type):
            return None
        if self.truncate_leaf is not None and self.truncate_leaf(obj):
            return wl.TextDoc(f"{type(obj).__name__}(...)")
        if isinstance(obj, jax.Array):
            return self._jax_array(obj)
        if isinstance(obj, jax.ShapeDtypeStruct):
            as_array = self.struct_as_array and self.short_arrays
            return self._array(obj) if as_array else None
        if isinstance(obj, jax.custom_jvp | jax.custom_vjp):
            return self._nested(obj.fun)
        if isinstance(obj, jtu.Partial):
            return self._partial(obj)
        if _is_wrapper(obj):
            return wl.TextDoc(f"<wrapped function {obj.__qualname__}>")
        return None

    def _jax_array(self, x: Any) -> Any:
        import wadler_lindig as wl

        if self.short_arrays or is_deleted(x):
            return self._array(x, "deleted" if is_deleted(x) else None)
        return wl.TextDoc(repr(x))

    def _array(self, x: Any, kind: str | None = None) -> Any:
        import wadler_lindig as wl

        weak = "weak_" if is_weak(x) else ""
        return wl.TextDoc(weak) + wl.array_summary(x.shape, str(x.dtype), kind)

    def _partial(self, partial: functools.partial) -> Any:
        import wadler_lindig as wl

        names = "func", "args", "keywords"
        values = [self._nested(getattr(partial, name)) for name in names]
        return wl.bracketed(
            begin=wl.TextDoc("Partial("),
            docs=[
                wl.TextDoc(f"{name}=") + value
                for name, value in zip(names, values, strict=True)
            ],
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=self.indent,
        )

    def _nested(self, obj: Any) -> Any:
        import wadler_lindig as wl

        return wl.pdoc(
            obj,
            indent=self.indent,
            short_arrays=self.short_arrays,
            custom=self,
            seen_ids=self.seen_ids,
        )


def _is_wrapper(obj: Any) -> bool:
    """Whether `obj` is a callable made from a function: by `jax.jit`, `lru_cache`, ..."""
    return (
        not dataclasses.is_dataclass(obj)
        and not hasattr(type(obj), "__pdoc__")
        and not isinstance(obj, np.ndarray | np.generic)
        and callable(obj)
        and hasattr(obj, "__wrapped__")
        and isinstance(getattr(obj, "__qualname__", None), str)
    )
