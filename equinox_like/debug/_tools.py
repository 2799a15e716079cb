"""Tools that show, stop or record what happens to a value, and that count traces."""

import copy
import threading
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from .._annotations import signature_of
from .._compat.errors import is_forward_mode
from .._compat.primitives import Tangents, identity
from .._compat.tracing import at_top_level, within_program
from .._core.base import Transformed, name_of, on_clear
from .._core.flat_call import Template, take_apart
from .._jit.layout import LayoutTable
from .._jit.retrace import Trace, explain, trace_to_be
from .._module import field
from .._runtime.error_if import error_if, may_depend, spoilt
from .._runtime.primitives import unvmap_all, unvmap_any
from .._transforms.callback import filter_pure_callback
from .._transforms.custom_rules import filter_custom_vjp
from .._tree import is_array
from .._tree.arrays import is_typed_key, struct_of
from .._tree.format import tree_pformat
from .._tree.partitioning import map_arrays
from .._tree.require import integer_or_none
from .._typing import NOT_GIVEN, ArrayLike

_T = TypeVar("_T")


def announce_transform(
    x: _T,
    name: Hashable = None,
    intermediates: bool = False,
    announce: Callable[[str], Any] = print,
) -> _T:
    """Returns `x`, and announces each JAX transformation that is applied to it.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are returned unchanged.
    - `name`: if given, printed in parentheses before each text.
    - `intermediates`: whether to announce also the beginning of each transformation.
    - `announce`: called with each text, while the program is traced or lowered.

    A text lists the transformations so far, joined by colons: `jvp_p` and `jvp_t` for
    the primal and the tangent of a derivative, `transpose`, `vmap`. The last word is
    the stage: `impl` (evaluated eagerly), `abstract` (abstractly evaluated), `mlir`
    (lowered). JAX decides how often `abstract` occurs.

    **Returns:**

    `x`, with NumPy arrays as JAX arrays.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        texts = []

        @jax.jit
        @jax.vmap
        def f(x):
            return eqx.debug.announce_transform(x, announce=texts.append)

        f(jnp.ones(3))
        assert texts == ["vmap:abstract", "vmap:mlir"]
        ```
    """
    arrays, rest = take_apart(x, may_depend)
    if not arrays:
        return x
    out = announce_jaxpr_p.bind(
        *map(jnp.asarray, arrays),
        stack=(),
        name=name,
        intermediates=intermediates,
        announce=announce,
    )
    return rest.fill(out)


def _tell(stage, stack, name, intermediates, announce) -> None:
    prefix = "" if name is None else f"({name}) "
    announce(prefix + ":".join(stack if stage is None else (*stack, stage)))


def _entering(entered: str, stack: tuple[str, ...], **params: Any) -> tuple[str, ...]:
    """The stack with one more transformation; announces it under `intermediates`."""
    stack = (*stack, entered)
    if params["intermediates"]:
        _tell(None, stack, **params)
    return stack


def _jvp(primals: Any, tangents: Tangents, stack: Any, **params: Any) -> Any:
    _entering("jvp", stack, **params)
    bind = announce_jaxpr_p.bind
    out = bind(*primals, stack=(*stack, "jvp_p"), **params)
    found = bind(*tangents.values(), stack=(*stack, "jvp_t"), **params)
    return out, dict(zip(tangents, found, strict=True))


def _transpose(cotangents: Tangents, stack: Any, **params: Any) -> Tangents:
    stack = _entering("transpose", stack, **params)
    found = announce_jaxpr_p.bind(*cotangents.values(), stack=stack, **params)
    return dict(zip(cotangents, found, strict=True))


def _batch(arrays: Any, axes: Any, stack: Any, **params: Any) -> Any:
    stack = _entering("vmap", stack, **params)
    return announce_jaxpr_p.bind(*arrays, stack=stack, **params), axes


announce_jaxpr_p = identity(
    "announce_jaxpr", jvp=_jvp, transpose=_transpose, batch=_batch, on_stage=_tell
)
"""The primitive of [`equinox_like.debug.announce_transform`][], of any number of arrays."""


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
def _(residuals, cotangent, perturbed, x, name, terminate) -> Any:
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
        of_x, of_cotangent = (
            tree_pformat(_element(tree, index), short_arrays=False)
            for tree in (x, cotangent)
        )
        text = f"   primals={of_x}\ncotangents={of_cotangent}"
        print(text if name is None else f"{name}:\n{text}")
    return np.ones(shape, bool)


def _element(tree: Any, index: tuple[int, ...]) -> Any:
    def take(x: Any) -> Any:
        return x[tuple(i if size > 1 else 0 for i, size in zip(index, x.shape))]  # noqa: B905

    return map_arrays(take, tree)


def breakpoint_if(pred: ArrayLike, **kwargs: Any) -> Any:
    """Opens JAX's debugger if a predicate is true when the program runs.

    **Arguments:**

    - `pred`: a bool, or an array of any shape. The debugger opens if any element is
        true; under `jax.vmap`, if any element of the batch is.
    - `**kwargs`: as for `jax.debug.breakpoint`. By default the debugger has the variables
        of all calling functions. Some may not be used within a rule of a custom
        derivative or an `internal.noinline` function: pass `num_frames=1` there.

    **Returns:**

    The keyword argument `token`, or `None`. A `token` that is used afterwards orders the
    breakpoint among other computations.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        @jax.jit
        def f(x):
            y = jnp.sqrt(x)
            eqx.debug.breakpoint_if(jnp.isnan(y))
            return y

        assert f(jnp.asarray(4.0)) == 2
        ```
    """
    token = kwargs.pop("token", None)

    # A new function, so that JAX does not reuse the trace of another breakpoint.
    def stop(token):
        jax.debug.breakpoint(token=token, **kwargs)
        return token

    return lax.cond(unvmap_any(pred), stop, lambda token: token, token)


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
    call = _Record(rest, [*map(struct_of, arrays)])
    with _lock:
        _records.setdefault(name, []).append(call)
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
        calls = list(_records.get(name, ()))
    plural = "" if len(calls) == 1 else "s"
    print(f"Found {len(calls)} call{plural} to `equinox_like.debug.store_dce`.")
    for i, call in enumerate(calls):
        print(f"Entry {i}:\n{call.describe()}")


class _Record:
    """One traced call of `store_dce`, and which of its arrays have been computed."""

    def __init__(self, rest: Template, structs: list[jax.ShapeDtypeStruct]):
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


_records: dict[Hashable, list[_Record]] = {}
on_clear(_records.clear)
_lock = threading.Lock()


_P = ParamSpec("_P")


@overload
def assert_max_traces(
    fn: Callable[_P, _T], *, max_traces: int | None
) -> "Counted[_P, _T]": ...
@overload
def assert_max_traces(
    *, max_traces: int | None
) -> "Callable[[Callable[_P, _T]], Counted[_P, _T]]": ...
def assert_max_traces(fn: Any = NOT_GIVEN, *, max_traces: int | None) -> Any:
    """Raises an error when `fn` is called more than `max_traces` times.

    Python runs a function under `filter_jit`, `jax.jit` and the like only to trace it.
    So there it limits the number of traces, each of which costs a compilation.

    **Arguments:**

    - `fn`: any callable, also a method in the body of a class. Without it, a decorator
        is returned. Apply it before the transformation:
        `filter_jit(assert_max_traces(...))`.
    - `max_traces`: the largest number of calls; `None` only counts them, for
        [`equinox_like.debug.get_num_traces`][].

    **Returns:**

    A callable like `fn`. It shares its count with the copies that flattening and
    unflattening make; the count of a copy by `copy.deepcopy` starts at zero.

    **Raises:**

    `RuntimeError` on a call beyond `max_traces`, which says what differs from the
    earlier calls. Refused calls are counted.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.debug.assert_max_traces(max_traces=1)
        def f(x, rate):
            return rate * x

        f(jnp.ones(3), 0.1)
        f(jnp.zeros(3), 0.1)
        try:
            f(jnp.ones(3), 0.2)
        except RuntimeError as error:
            assert "`rate` was the static value 0.1, and is now 0.2." in str(error)
        assert eqx.debug.get_num_traces(f) == 2
        ```
    """
    if fn is NOT_GIVEN:
        return lambda fn: Counted(fn, max_traces)
    return Counted(fn, max_traces)


def get_num_traces(fn: Any) -> int:
    """How often a function has been traced, if it is wrapped in
    [`equinox_like.debug.assert_max_traces`][].

    **Arguments:**

    - `fn`: what `assert_max_traces` returned, or a function whose `__wrapped__` leads to
        it, as `filter_jit` and `jax.jit` return; also a bound method, or a partial.

    **Raises:**

    `ValueError` if `fn` does not wrap such a function.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit
        @eqx.debug.assert_max_traces(max_traces=2)
        def f(x):
            return 2 * x

        for size in (3, 4, 3):
            f(jnp.ones(size))
        assert eqx.debug.get_num_traces(f) == 2
        ```
    """
    seen = set()
    inner = fn
    while not isinstance(inner, Counted):
        seen.add(id(inner))
        # A bound method, or another partial, has `func`.
        inner = getattr(inner, "func", None) or getattr(inner, "__wrapped__", None)
        if inner is None or id(inner) in seen:
            raise ValueError(
                f"{fn!r} does not count its traces. Wrap the function in "
                "`eqx.debug.assert_max_traces(max_traces=None)` first."
            )
    return inner._counter.count


class Counted(Transformed[_P, _T]):
    """The result of [`equinox_like.debug.assert_max_traces`][]."""

    _transformation_ = "assert_max_traces"

    _max_traces: int | None = field(static=True)
    _counter: "_Counter" = field(static=True)

    def __init__(self, fn: Any, max_traces: int | None):
        super().__init__(fn)
        integer_or_none(max_traces, "assert_max_traces", "max_traces", least=0)
        self._max_traces = max_traces
        self._counter = _Counter()

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fn, most, counter = self.__wrapped__, self._max_traces, self._counter
        with counter.lock:
            counter.count += 1
            is_allowed = most is None or counter.count <= most
        if most is not None:
            trace = _trace_of((self._tree, args, kwargs), fn)
            if not is_allowed:
                raise RuntimeError(_message(fn, most, trace, counter.traces))
            if trace is not None:
                counter.traces.append(trace)
        return fn(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "Counted[_P, _T]":
        return Counted(copy.deepcopy(self.__wrapped__, memo), self._max_traces)


class _Counter:
    """The number of calls, and the traces of those that were allowed."""

    def __init__(self) -> None:
        self.count = 0
        self.traces: list[Trace] = []
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _Counter, ()  # what is unpickled counts for itself


def _trace_of(call: tuple[Any, Any, Any], fn: Any) -> Trace | None:
    try:
        signature = signature_of(fn)
        layout = LayoutTable(signature, name_of(fn)).make(call)
        return trace_to_be(layout, jtu.tree_leaves(call))
    except Exception:
        # There is nothing to compare: most such calls raise an error of their own.
        return None


def _message(fn: Any, most: int, trace: Trace | None, before: list[Trace]) -> str:
    name = name_of(fn)
    head = f"`{name}` can only be traced {most} times."
    if trace is None or not before:
        return f"{head} What differs in this call is not known."
    if any(old.serves(trace) for old in before):
        return (
            f"{head} The arguments of this call do not differ from earlier ones. Compile "
            "the function once, and count the traces within: "
            f"`filter_jit(assert_max_traces({name}, max_traces={most}))`."
        )
    return f"{head} {explain(name, trace, before)}"
