"""`tree_equal`: compares whole trees.

Structure, type, shape and dtype are compared first, in Python. So a difference in these
gives a Python `False`, even under a trace. The values of JAX arrays are compared last.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat.tracing import Tracer
from .arrays import is_concrete, is_weak
from .deleted import deleted_named
from .filters import is_array, is_inexact_array
from .strict import strict_treedef


@deleted_named
def tree_equal(
    *pytrees: Any,
    typematch: bool = False,
    rtol: Any = 0.0,
    atol: Any = 0.0,
    check_dtype: bool = True,
    check_weak_type: bool = False,
) -> bool | jax.Array:
    """Whether all trees have the same structure and equal leaves.

    Two arrays are equal if their shape, dtype and values are. Weak types are ignored, and
    a NumPy array can equal a JAX array. Other leaves are compared by `==`. An array never
    equals something that is not an array, and NaN does not equal NaN.

    Static fields, and keys of dictionaries, are compared by the strict rule of
    [`equinox_like.filter_jit`][], by type and value at every depth: `1`, `1.0` and `True`
    differ, a NaN equals itself, and a JAX array equals only itself. So trees that are
    equal have the same structure for a compiled function. `a == b` for two Modules is
    this function, if they hold arrays. Without arrays they have a hash, and their leaves
    are compared by the strict rule, too.

    **Arguments:**

    - `*pytrees`: one tree or more.
    - `typematch`: if `True`, leaves must also have the same type, so `1` and `1.0`
        differ, and so do a NumPy and a JAX array.
    - `rtol`, `atol`: tolerances for arrays of inexact dtype, as in
        `jax.numpy.allclose`. Everything else is compared exactly.
    - `check_dtype`: if `False`, arrays of different dtypes can be equal: their values are
        compared in the dtype to which JAX promotes the two. Typed PRNG keys equal only
        keys of the same kind.
    - `check_weak_type`: whether arrays must also agree in weak type. NumPy arrays are
        not weakly typed.

    **Returns:**

    A `bool` if Python can decide; a JAX array of shape `()` and dtype `bool` if it depends
    on the values of JAX arrays, which may be traced.

    **Raises:**

    `TypeError` without a tree.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        assert eqx.tree_equal([jnp.ones(2), "a"], [jnp.ones(2), "a"])
        assert eqx.tree_equal([jnp.ones(2)], [jnp.ones(3)]) is False
        ```
    """
    if not pytrees:
        raise TypeError("`tree_equal` takes at least one tree.")
    leaves, treedef = jtu.tree_flatten(pytrees[0])
    structure = strict_treedef(treedef) if len(pytrees) > 1 else None
    is_exact, is_known = _is_zero(rtol) and _is_zero(atol), not _is_traced(rtol, atol)
    quick = _NUMBERS if is_exact else _PYTHON
    arrays = []
    for pytree in pytrees[1:]:
        others, other_treedef = jtu.tree_flatten(pytree)
        # JAX compares some parts by `==`; in ours, `1` and `True` differ.
        if treedef != other_treedef or structure != strict_treedef(other_treedef):
            return False
        for a, b in zip(leaves, others, strict=True):
            if type(a) is type(b) and type(a) in quick:
                if a == b:
                    continue
                return False
            if typematch and not _same_type(a, b):
                return False
            if not (is_array(a) and is_array(b)):
                if is_array(a) or is_array(b) or not a == b:
                    return False
            elif a.shape != b.shape:
                return False
            elif a.dtype != b.dtype and (check_dtype or not _are_numbers(a, b)):
                return False
            elif check_weak_type and is_weak(a) != is_weak(b):
                return False
            elif is_known and _is_numpy(a) and _is_numpy(b):
                if not _numpy_equal(a, b, None if is_exact else (rtol, atol)):
                    return False
            else:
                arrays.append((a, b))
    if not arrays:
        return True
    return functools.reduce(
        lambda so_far, answer: so_far & _moved_to(so_far, answer),
        [_jax_equal(a, b, rtol, atol) for a, b in arrays],
    )


# For two values of the same one of these types, `==` is enough; for NumPy's, if there are
# no tolerances.
_PYTHON: Final = frozenset({bool, complex, float, int, str})
_NUMBERS: Final = _PYTHON.union(np.dtype(code).type for code in "?bhilqBHILQefdgFDG")


def _same_type(a: Any, b: Any) -> bool:
    # A tracer counts as a JAX array.
    return type(a) is type(b) or (isinstance(a, jax.Array) and isinstance(b, jax.Array))


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def _is_traced(*xs: Any) -> bool:
    return any(isinstance(x, Tracer) for x in xs)


def _are_numbers(*arrays: Any) -> bool:
    return all(x.dtype == bool or jnp.issubdtype(x.dtype, np.number) for x in arrays)


def _numpy_equal(a: Any, b: Any, tolerances: tuple[Any, Any] | None) -> bool:
    a, b = _promoted(a, b)
    if tolerances is not None and is_inexact_array(a):
        a, b = _widen(np.asarray(a)), _widen(np.asarray(b))
        rtol, atol = map(np.asarray, tolerances)
        return np.allclose(a, b, rtol, atol)
    return bool((a == b).all())


def _jax_equal(a: Any, b: Any, rtol: Any, atol: Any) -> jax.Array:
    a, b = _promoted(a, _moved_to(a, b))
    if is_inexact_array(a) and not (_is_zero(rtol) and _is_zero(atol)):
        a, b = _widen(jnp.asarray(a)), _widen(jnp.asarray(b))
        # Strict dtype promotion would refuse tolerances of another dtype.
        real = jnp.finfo(a.dtype).dtype
        return jnp.allclose(a, b, jnp.asarray(rtol, real), jnp.asarray(atol, real))
    return jnp.all(a == b)


def _promoted(a: Any, b: Any) -> tuple[Any, Any]:
    if a.dtype == b.dtype:
        return a, b
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(a.dtype, b.dtype)
    if not (_is_numpy(a) and _is_numpy(b)):
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # JAX would warn of 64 bits
    return a.astype(dtype), b.astype(dtype)


def _moved_to(target: Any, x: Any) -> Any:
    """`x` with the sharding of `target`, if both are committed to their devices.

    JAX cannot combine arrays that are committed to different devices.
    """
    may_clash = _is_committed(target) and _is_committed(x)
    if may_clash and target.sharding != x.sharding:
        return jax.device_put(x, target.sharding)
    return x


def _is_committed(x: Any) -> bool:
    return is_concrete(x) and x.committed


def _is_zero(tolerance: Any) -> bool:
    return isinstance(tolerance, int | float) and not tolerance


def _widen(x: Any) -> Any:
    # A difference of small floats may overflow, and some of them lack the operations.
    is_small = x.dtype.itemsize < 4
    return x.astype(np.float32) if is_small else x
