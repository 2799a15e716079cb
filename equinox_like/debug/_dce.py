"""`store_dce` and `inspect_dce`: show which arrays dead code elimination has removed.

Each array goes through a `lax.cond` whose predicate is the result of a callback. The
compiler does not know that it is always true. If the array is not used, the compiler
removes the branch together with the callback, so the callback is never called.
"""

import threading
from collections.abc import Hashable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from .._compat.tracing import at_top_level, within_program
from .._core.caches import on_clear
from .._core.parts import Rest, take_apart
from .._runtime.spoil import may_depend, spoilt
from .._tree.arrays import struct_of
from .._tree.format import tree_pformat

_T = TypeVar("_T")


def store_dce(x: _T, name: Hashable = None) -> _T:
    """Returns `x`, and records which of its arrays dead code elimination keeps.

    Use it in a compiled function. Once that has run,
    [`equinox_like.debug.inspect_dce`][] prints the record. It holds the leaves of `x` that
    are not arrays until [`equinox_like.clear_caches`][] deletes all records.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged.
    - `name`: the name of the record.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    **Raises:**

    `RuntimeError` outside of `jax.jit` and the like.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        @jax.jit
        def f(x):
            a, b = eqx.debug.store_dce((jnp.sin(x), jnp.cos(x)))
            return a

        f(jnp.ones(3)).block_until_ready()
        eqx.debug.inspect_dce()
        # Found 1 call to `equinox_like.debug.store_dce`.
        # Entry 0:
        # (f32[3], <DCE'd>)
        ```
    """
    if not within_program():
        raise RuntimeError(
            "`equinox_like.debug.store_dce` should be used inside of JIT: no dead "
            "code is eliminated from code that is not compiled."
        )
    arrays, rest = take_apart(x, may_depend)
    call = _Call(rest, [*map(struct_of, arrays)])
    with _lock:
        _calls.setdefault(name, []).append(call)
    return rest.fill([call.noting(i, x) for i, x in enumerate(arrays)])


def inspect_dce(name: Hashable = None) -> None:
    """Prints which arrays of [`equinox_like.debug.store_dce`][] dead code elimination
    kept.

    For each call of `store_dce` that was traced, it prints the tree with its shapes and
    dtypes, and `<DCE'd>` for each array that has not been computed so far. Before
    calling it, wait for the results of the compiled function with
    `jax.block_until_ready`.

    **Arguments:**

    - `name`: the name of the record, as passed to `store_dce`.

    **Raises:**

    `RuntimeError` inside of a function that is being transformed.

    !!! example

        See [`equinox_like.debug.store_dce`][].
    """
    if not at_top_level():
        raise RuntimeError(
            "`equinox_like.debug.inspect_dce` should be used outside of JIT, after "
            "the compiled function has run."
        )
    with _lock:
        calls = list(_calls.get(name, ()))
    plural = "" if len(calls) == 1 else "s"
    print(f"Found {len(calls)} call{plural} to `equinox_like.debug.store_dce`.")
    for i, call in enumerate(calls):
        print(f"Entry {i}:\n{call.describe()}")


class _Call:
    """One traced call of `store_dce`, and which of its arrays have been computed."""

    def __init__(self, rest: Rest, structs: list[jax.ShapeDtypeStruct]):
        self._rest = rest
        self._structs = structs
        self._is_computed = [False] * len(structs)

    def noting(self, index: int, x: Any) -> Any:
        """The array, with a callback that records when it is computed."""

        def note():
            self._is_computed[index] = True
            return np.asarray(True)

        @jax.custom_jvp
        def identity(x):
            is_noted = jax.pure_callback(note, jax.ShapeDtypeStruct((), bool))
            return lax.cond(is_noted, lambda x: x, spoilt, x)

        identity.defjvp(lambda primals, tangents: (identity(*primals), *tangents))
        return identity(x)

    def describe(self) -> str:
        shown = [
            struct if computed else _Removed()
            for struct, computed in zip(self._structs, self._is_computed, strict=True)
        ]
        return tree_pformat(self._rest.fill(shown), struct_as_array=True)


class _Removed:
    def __repr__(self) -> str:
        return "<DCE'd>"


_calls: dict[Hashable, list[_Call]] = {}
on_clear(_calls.clear)
_lock = threading.Lock()
