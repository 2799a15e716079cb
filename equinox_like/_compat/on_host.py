"""Values that Python computes while a compiled program runs.

`jax.pure_callback` first puts each argument on a device, in Python, which takes some
100 us. Serves jax 0.10 to 0.12: `emit_python_callback` of `jax.interpreters.mlir`, which
passes arrays of NumPy. It is used for programs on one device of the CPU where no mesh is
in use; others, and versions of JAX without it, use `jax.pure_callback`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from .primitive import find_emit
from .rules import as_aval, new_primitive


def compute_on_host(
    function: Callable[..., Sequence[Any]],
    structs: Sequence[jax.ShapeDtypeStruct],
    *args: Any,
) -> Sequence[Any]:
    """`function(*args)` of arrays, called when the program runs.

    Use it only in the lowering of a primitive: it has no rules of its own. Its results,
    and arrays among its arguments, are not typed PRNG keys.
    """
    return _on_host_p.bind(*args, function=function, structs=tuple(structs))


_on_host_p = new_primitive("compute_on_host")


@_on_host_p.def_abstract_eval
def _(*_: Any, structs: Any, function: Any) -> Any:
    return list(map(as_aval, structs))


def lower(context: Any, *args: Any, function: Any, structs: Any, emit: Any) -> Any:
    if emit is None or not _is_on_one_cpu(context.module_context):
        return mlir.lower_fun(_by_jax, multiple_results=True)(
            context, *args, function=function, structs=structs
        )
    (device, *_) = jax.local_devices(backend="cpu")

    def call(*args: Any) -> tuple[Any, ...]:
        with jax.default_device(device):  # it may be a GPU
            return tuple(map(np.asarray, function(*args)))

    out, _, _ = emit(
        context,
        call,
        None,
        list(args),
        context.avals_in,
        context.avals_out,
        has_side_effect=False,
        returns_token=False,
    )
    return out


def _is_on_one_cpu(module_context: Any) -> bool:
    number = getattr(module_context.axis_context, "num_devices", None)
    no_mesh = jax.sharding.get_abstract_mesh().empty
    return tuple(module_context.platforms) == ("cpu",) and number == 1 and no_mesh


def _by_jax(*args: Any, function: Any, structs: Any) -> Any:
    return jax.pure_callback(function, structs, *args)


_emit = find_emit(mlir)
mlir.register_lowering(
    _on_host_p, lambda *args, **params: lower(*args, **params, emit=_emit)
)
