"""`backward_nan`: prints cotangents, and stops at the first NaN in them."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat.messages import is_forward_mode
from .._runtime.error_if import error_if
from .._runtime.unvmap import unvmap_all
from .._transforms.callback import filter_pure_callback
from .._transforms.custom_vjp import filter_custom_vjp
from .._tree import is_array
from .._tree.arrays import is_typed_key
from .._tree.format import tree_pformat
from .._tree.partitioning import map_arrays

_T = TypeVar("_T")


def backward_nan(x: _T, name: str | None = None, terminate: bool = True) -> _T:
    """Returns `x`, and prints its gradient (the cotangent) in the backward pass.

    **Arguments:**

    - `x`: any pytree. It is printed whole, next to its cotangent.
    - `name`: if given, printed above the values.
    - `terminate`: whether a NaN in the cotangent is an error.

    It prints when the program runs, once for each element of a batch. Only reverse mode
    is supported; the gradient can be differentiated again in both modes.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    **Raises:**

    With `terminate`, what [`equinox_like.error_if`][] raises. `TypeError` in forward mode.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.filter_grad
        def gradient(x):
            x = eqx.debug.backward_nan(x, name="before the root")
            return jnp.sqrt(x) * 0

        assert gradient(jnp.asarray(1.0)) == 0
        try:
            gradient(jnp.asarray(0.0))  # zero times infinity
        except eqx.EquinoxRuntimeError as e:
            assert "Encountered NaN in the cotangent of before the root" in str(e)
        ```
    """
    try:
        return _backward_nan(map_arrays(jnp.asarray, x), name, terminate)
    except TypeError as error:
        if not is_forward_mode(error):
            raise
        raise TypeError(
            "`debug.backward_nan` prints cotangents, which forward-mode autodiff "
            "(`jax.jvp`, `jax.jacfwd`) does not have. Leave it out there."
        ) from None


@filter_custom_vjp
def _backward_nan(x: Any, name: str | None, terminate: bool) -> Any:
    return x


@_backward_nan.def_fwd
def _(perturbed: Any, x: Any, name: str | None, terminate: bool) -> tuple[Any, None]:
    return x, None


@_backward_nan.def_bwd
def _(
    residuals: None,
    cotangent: Any,
    perturbed: Any,
    x: Any,
    name: str | None,
    terminate: bool,
) -> Any:
    is_printed = filter_pure_callback(
        _print_each,
        name,
        *jtu.tree_map(_printable, (np.zeros(()), x, cotangent)),
        result_shape_dtypes=jax.ShapeDtypeStruct((), bool),
        vmap_method="expand_dims",
    )
    # The cotangent depends on the callback's result. So cotangents are printed in
    # order, even on several devices, where JAX has no ordered callbacks. The other branch
    # is not a constant: XLA would remove the choice, and the callback with it, if the
    # cotangent were the same constant.
    is_printed = unvmap_all(is_printed)
    cotangent = jtu.tree_map(
        lambda x: jnp.where(is_printed, x, is_printed.astype(x.dtype)), cotangent
    )
    if not terminate:
        return cotangent
    where = "" if name is None else f" in the cotangent of {name}"
    is_bad = [jnp.isnan(x).any() for x in jtu.tree_leaves(cotangent)]
    return error_if(cotangent, jnp.asarray(is_bad), f"Encountered NaN{where}")


def _printable(x: Any) -> Any:
    # Callbacks do not accept typed PRNG keys, and have no derivative.
    if is_typed_key(x):
        return jax.random.key_data(x)
    return jax.lax.stop_gradient(x) if is_array(x) else x


def _print_each(name: str | None, probe: Any, x: Any, cotangent: Any) -> Any:
    """Prints each element of a batch. `probe`, a scalar, has only the batch axes, and
    what all elements share has batch axes of size 1."""
    arrays = filter(is_array, jtu.tree_leaves((x, cotangent)))
    shape = np.broadcast_shapes(*(x.shape[: probe.ndim] for x in arrays))
    for index in np.ndindex(shape):
        of_x, of_cotangent = (_format(_element(tree, index)) for tree in (x, cotangent))
        text = f"   primals={of_x}\ncotangents={of_cotangent}"
        print(text if name is None else f"{name}:\n{text}")
    return np.ones(shape, bool)


def _element(tree: Any, index: tuple[int, ...]) -> Any:
    def take(x: Any) -> Any:
        return x[tuple(i if size > 1 else 0 for i, size in zip(index, x.shape))]  # noqa: B905

    return map_arrays(take, tree)


def _format(tree: Any) -> str:
    return tree_pformat(tree, short_arrays=False)
