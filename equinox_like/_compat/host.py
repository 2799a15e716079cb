"""Python that a compiled program calls: for its effect, or to compute values.

Serves jax 0.10 to 0.12.

- JAX's own callbacks have three problems. They log each exception before they raise it. On
  several devices they run on one device alone, and if they fail there, the others wait for
  ever. A pure callback may be moved out of a loop, and run although the loop takes no
  step. `emit_python_callback` of `jax.interpreters.mlir` avoids all three. On TPU, and if
  it no longer exists, `jax.pure_callback` is used. On a backend where neither works, we
  warn, and Python is not called.
- One callback serves all checks of a program, which are in JAX's list of what the program
  keeps alive. If there is no such list, one for all programs is used.
- `jax.pure_callback` first puts each argument on a device, in Python, which takes some
  100 us. `emit_python_callback` passes arrays of NumPy. `compute_on_host` uses it for
  programs on one device of the CPU where no mesh is in use; others, and versions of JAX
  without it, use `jax.pure_callback`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from .._errors import warn
from .errors import is_callback_error
from .primitives import Primitive, as_aval, finalisations, new_primitive


def call_host(
    *args: Any,
    function: Callable[..., None],
    on_tpu: Callable[..., None],
    is_removable: bool = False,
) -> Any:
    """Calls Python when a compiled program runs: `function(items, *args)`. Returns `True`.

    If it raises, the program ends, without a log entry. A program on TPU cannot be
    ended, so `on_tpu` is called there instead. With `is_removable`, XLA omits the call
    if its result is not used. Use it only in a `function` of `for_whole_batch`: the
    primitive has no rules of its own.

    If the number of an item, by `number_p`, is among `args`, it is `items[number]`.
    """
    return _host_p.bind(
        *args, function=function, on_tpu=on_tpu, is_removable=is_removable
    )


number_p: Any = Primitive("number_of")
"""`number_p.bind(item=item)` is the number of an item in the compiled program, which keeps
the item alive. Outside of compiled programs it is 0."""
finalisations[number_p] = lambda item: np.int32(0)
number_p.def_impl(finalisations[number_p])
number_p.def_abstract_eval(lambda item: jax.typeof(np.int32(0)))

_host_p = Primitive("call_host")


@_host_p.def_abstract_eval
def _(*args: Any, **_: Any) -> Any:
    return jax.make_jaxpr(lambda: np.asarray(True))().out_avals[0]


finalisations[_host_p] = lambda *args, function, **_: _by_jax(
    *args, function=functools.partial(function, ())
)


def find_emit(interpreter: Any) -> Callable[..., Any] | None:
    return getattr(interpreter, "emit_python_callback", None)


def lower_host_call(
    context: Any, *args: Any, function: Any, on_tpu: Any, is_removable: bool, emit: Any
) -> Any:
    """Lowers a host call: by `emit`, or by `jax.pure_callback`, which is removable."""
    try:
        if emit is None or is_removable:
            by_jax = functools.partial(_by_jax, function=function)
            return mlir.lower_fun(by_jax, multiple_results=False)(context, *args)
        _emit_on_every_device(context, args, function, emit)
    except (NotImplementedError, ValueError) as e:
        if is_callback_error(e):
            raise
        _warn_of_backend(context.module_context.platforms[0], str(e))
    return [mlir.ir_constant(np.asarray(True))]


def _emit_on_every_device(context: Any, args: Any, function: Any, emit: Any) -> None:
    def call(*args: Any) -> tuple[()]:
        function(*map(np.asarray, args))
        return ()

    # Every device makes the call, so that all of them fail. Arrays are replicated
    # first, or each device would pass its own shard.
    whole = functools.partial(_whole, number=number_of_devices(context.module_context))
    args = mlir.lower_fun(whole, multiple_results=True)(
        context.replace(avals_out=context.avals_in), *args
    )
    emit(
        context.replace(avals_out=[]),
        call,
        None,
        [*args],
        context.avals_in,
        [],
        has_side_effect=True,
        returns_token=False,
        partitioned=True,
    )


@functools.cache
def _warn_of_backend(platform: str, reason: str) -> None:
    warn(
        f"Programs on the backend {platform!r} cannot call Python. So a check of "
        "values that fails there does not raise an error: the values that it checks "
        f"become NaN, as with `EQX_ON_ERROR=nan`. JAX says: {reason}"
    )


def number_of_devices(module_context: Any) -> int:
    """The number of devices among which JAX shards arrays; 1 within a `shard_map`."""
    axis_context = getattr(module_context, "axis_context", None)
    return getattr(axis_context, "num_devices", 1)


def _whole(*args: Any, number: int) -> list[Any]:
    return [_replicated(x, number) if x.ndim and number > 1 else x for x in args]


def _replicated(x: Any, number: int) -> Any:
    nothing = jax.sharding.PartitionSpec()
    explicit = jax.typeof(x).sharding
    if any(explicit.spec):
        replicated = jax.sharding.NamedSharding(explicit.mesh, nothing)
        return jax.sharding.reshard(x, replicated)
    mesh = jax.sharding.AbstractMesh((number,), ("all",))
    replicated = jax.sharding.NamedSharding(mesh, nothing)
    return jax.lax.with_sharding_constraint(x, replicated)


def _by_jax(*args: Any, function: Any) -> Any:
    def call(*args: Any) -> Any:
        function(*map(np.asarray, args))
        return np.asarray(True)

    return jax.pure_callback(call, jax.ShapeDtypeStruct((), bool), *args)


def _lower_on_tpu(context: Any, *args: Any, on_tpu: Any, **_: Any) -> Any:
    by_jax = functools.partial(_by_jax, function=on_tpu)
    return mlir.lower_fun(by_jax, multiple_results=False)(context, *args)


_emit = find_emit(mlir)
_ITEMS: list[Any] = []  # of all programs, if JAX has no list for each


def _items_of(context: Any) -> list[Any]:
    return getattr(context.module_context, "keepalives", _ITEMS)


def _lower_number(context: Any, *, item: Any) -> Any:
    items = _items_of(context)
    items.append(item)
    return [mlir.ir_constant(np.int32(len(items) - 1))]


def _lower(context: Any, *args: Any, **params: Any) -> Any:
    for key in ("function", "on_tpu"):
        params[key] = functools.partial(params[key], _items_of(context))
    # JAX's own text, which `is_callback_error` knows. With rules for single platforms, JAX
    # would fail with another before it calls one.
    platforms = context.module_context.platforms
    if len(platforms) > 1:
        raise NotImplementedError("multi-platform lowering for python_callback")
    if platforms[0] == "tpu":
        return _lower_on_tpu(context, *args, **params)
    return lower_host_call(context, *args, **params, emit=_emit)


mlir.register_lowering(number_p, _lower_number, cacheable=False)
mlir.register_lowering(_host_p, _lower, cacheable=False)


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


def lower_values(
    context: Any, *args: Any, function: Any, structs: Any, emit: Any
) -> Any:
    if emit is None or not _is_on_one_cpu(context.module_context):
        by_jax = functools.partial(jax.pure_callback, function, structs)
        return mlir.lower_fun(by_jax, multiple_results=True)(context, *args)
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


mlir.register_lowering(
    _on_host_p, lambda *args, **params: lower_values(*args, **params, emit=_emit)
)
