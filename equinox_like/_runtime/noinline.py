"""`noinline`: a computation that is compiled separately and called by other programs.

The surrounding program calls Python, which calls a compiled function. The callee is a
hashable value, a `_Callee`, so that all uses of a function share one compiled program.
Each JAX transformation wraps it in a `_Variant`.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat.axes import types_varying_over, varying_alike, varying_axes
from .._compat.host import compute_on_host
from .._compat.primitives import (
    Zero,
    as_aval,
    as_struct,
    batch_size,
    finalisations,
    instantiate,
    is_undefined_primal,
    jvp_rules,
    lower_as,
    new_primitive,
    register_batching,
    transposition_rules,
    zero_like,
)
from .._compat.tracing import Tracer, trace_context
from .._core.base import Transformed, frames_hidden, on_clear
from .._core.context import entered_here, within
from .._core.flat_call import take_apart
from .._module.fields import field
from .._transforms.trace import merge_data, split_data
from .._tree import filter, is_array
from .._tree.arrays import jax_struct_of, struct_of, with_key, without_key
from .._tree.partitioning import Skeleton
from .._tree.strict import Interned, InternTable

_P = ParamSpec("_P")
_T = TypeVar("_T")


def noinline(
    fn: Callable[_P, _T], abstract_fn: Callable[..., Any] | None = None
) -> Callable[_P, _T]:
    """A function that is compiled separately and called by other programs, for the CPU.

    A program that uses a large function many times then compiles it only once. Each
    call passes through Python, which costs about 20 us in a program on one device of the
    CPU, and 100 us or more in others. The function, and what was compiled for it, are
    kept until [`equinox_like.clear_caches`][] is called.

    **Arguments:**

    - `fn`: any callable of pytrees. If it is a Module, its arrays are inputs; all other
        leaves must be hashable. A function may not close over tracers.
    - `abstract_fn`: `abstract_fn(arrays_of_fn, *args, **kwargs)` is traced in place of
        `fn`. It must return the same structure, shapes and dtypes. Its first argument
        is `fn`, with `None` for all leaves that are not arrays. Functions with the same
        `abstract_fn` can be exchanged in the arguments of a compiled function without a
        retrace. A program calls `fn` by its number, so keep the result as long as a
        program that takes it as an argument runs.

    **Returns:**

    A function of the same arguments. Called without tracers it calls `fn` directly. It can
    be differentiated in both modes and batched; each variant is compiled once.

    **Raises:**

    `TypeError` if `fn` cannot be hashed, `ValueError` if it closes over a tracer. When the
    program runs, an error if the output does not match that of `abstract_fn`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        traces = []

        def layer(x):
            traces.append(1)
            return jnp.tanh(x)

        @jax.jit
        def deep(x):
            for _ in range(100):
                x = eqxi.noinline(layer)(x)
            return x

        deep(jnp.ones(3))
        assert len(traces) == 2  # for the shapes, and to compile it
        ```
    """
    return NotInlined(fn, abstract_fn)


class NotInlined(Transformed[_P, _T]):
    """The result of [`equinox_like.internal.noinline`][]."""

    _transformation_ = "noinline"

    # If there is an `abstract_fn`: `fn`, and its number.
    _function: Any = field(static=True)
    _number: Any
    _abstract_fn: Any = field(static=True)

    def __init__(self, fn: Callable[_P, _T], abstract_fn: Callable[..., Any] | None):
        self._function = self._number = None
        self._abstract_fn = abstract_fn
        if abstract_fn is None:
            super().__init__(fn)
            return
        super().__init__(abstract_fn)
        _, skeleton = split_data(fn)
        self._tree = filter(fn, is_array)
        self._opaque = abstract_fn
        self._function = _functions.find(skeleton, lambda: _Function(skeleton))
        self._number = self._function.number

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return super().__wrapped__ if self._abstract_fn is None else self._abstract_fn

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fun = self.__wrapped__ if self._number is None else self._tree
        call = self._number, fun, args, kwargs
        if not any(isinstance(x, Tracer) for x in jtu.tree_leaves(call)):
            if self._number is not None:
                fun = _filled(_found(self._number), fun)
            return fun(*args, **kwargs)
        arrays, skeleton = split_data(call)
        data = [*map(jnp.asarray, arrays)]
        target = _Callee(skeleton, self._abstract_fn, entered_here(), self._function)
        _, rest = _trace(target, tuple(map(as_aval, data)))
        return rest.fill(_bind(*data, call=target))


class _Function(Interned):
    """A function that has an `abstract_fn`, without its arrays.

    It is equal to all others, as functions that take each other's place have one structure.
    """

    __slots__ = ("number", "skeleton")

    def __init__(self, skeleton: Skeleton):
        self.skeleton = skeleton
        self.number = np.int32(next(_numbers))
        _by_number[int(self.number)] = self

    def __eq__(self, other: object) -> bool:
        return type(other) is _Function

    def __hash__(self) -> int:
        return hash(_Function)

    def __deepcopy__(self, memo: Any) -> "_Function":
        return self


# They live as long as what wraps them, and as the programs that were traced with them.
_functions: Final[InternTable[_Function]] = InternTable()
_by_number: Final[weakref.WeakValueDictionary[int, _Function]] = (
    weakref.WeakValueDictionary()
)
_numbers: Final = itertools.count()


def _found(number: Any) -> Skeleton:
    try:
        return _by_number[int(number)].skeleton
    except KeyError:
        raise RuntimeError(
            "A program calls a `noinline` function that was freed before it ran: keep "
            "what `noinline` returned until the program has run."
        ) from None


def _filled(function: Skeleton, arrays: Any) -> Any:
    return merge_data(jtu.tree_leaves(arrays), function)


@dataclass(frozen=True)
class _Callee:
    """The user's function, as a function from arrays to a list of arrays."""

    skeleton: Skeleton
    abstract_fn: Callable[..., Any] | None
    # The values of all contexts. It is traced again later, outside of the `with` blocks.
    entered: Any
    # A function that a program is traced with lives as long as the program.
    kept: _Function | None = dataclasses.field(compare=False)
    # That with the number which the program was given, once it is known at run time.
    function: Skeleton | None = None

    def __call__(self, *data: Any) -> list[Any]:
        arrays, rest = take_apart(self.output(data))
        if self.function is not None:
            types = tuple(map(as_aval, data))
            _, announced = _trace(dataclasses.replace(self, function=None), types)
            if not rest.has_places_of(announced):
                raise ValueError(
                    "A `noinline` function must return a tree of the structure that its "
                    f"`abstract_fn` returns, {announced.treedef}; it returned "
                    f"{rest.treedef}."
                )
        return arrays

    def output(self, data: Sequence[Any]) -> Any:
        _, fun, args, kwargs = merge_data(data, self.skeleton)
        with within(self.entered):
            if self.function is not None:
                return _filled(self.function, fun)(*args, **kwargs)
            if self.abstract_fn is not None:
                return self.abstract_fn(fun, *args, **kwargs)
            return fun(*args, **kwargs)

    def found(self, data: Sequence[Any]) -> "_Callee":
        """This call, with the function that the first array is the number of."""
        if self.abstract_fn is None:
            return self
        return dataclasses.replace(self, function=_found(data[0]))


@dataclass(frozen=True)
class _Variant:
    """A transformed call. The number of its function remains the first array."""

    call: Any

    def found(self, data: Sequence[Any]) -> Any:
        return dataclasses.replace(self, call=self.call.found(data))


@dataclass(frozen=True)
class _Tangent(_Variant):
    """From all inputs, and the tangents of some, to the tangents of inexact outputs."""

    perturbed: tuple[int, ...]

    def __call__(self, *data: Any) -> list[Any]:
        count = len(data) - len(self.perturbed)
        primals, tangents = data[:count], data[count:]

        def function(*chosen):
            perturbed = dict(zip(self.perturbed, chosen, strict=True))
            inputs = [perturbed.get(i, x) for i, x in enumerate(primals)]
            return [x for x in self.call(*inputs) if _is_inexact(x)]

        chosen = [primals[i] for i in self.perturbed]
        return jax.jvp(function, chosen, list(tangents))[1]


@dataclass(frozen=True)
class _Transpose(_Variant):
    """From the known inputs, and the cotangents of the outputs, to the cotangents of
    the wanted inputs, in which the call is linear."""

    wanted: tuple[int, ...]
    types: tuple[Any, ...]  # of the wanted inputs
    known: int  # the number of known inputs

    def __call__(self, *data: Any) -> list[Any]:
        total = self.known + len(self.wanted)
        known, cotangents = data[: self.known], data[self.known :]

        def function(*chosen):
            others, wanted = iter(known), iter(chosen)
            which = (wanted if i in self.wanted else others for i in range(total))
            return self.call(*map(next, which))

        structs = map(struct_of, self.types)
        return list(jax.linear_transpose(function, *structs)(list(cotangents)))


@dataclass(frozen=True)
class _Map(_Variant):
    """The call under `jax.vmap`."""

    axes: tuple[int | None, ...]
    size: int
    name: Any

    def __call__(self, *data: Any) -> list[Any]:
        options = {"axis_size": self.size, "axis_name": self.name}
        return jax.vmap(self.call, self.axes, **options)(*data)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)


def _trace(call: Any, types: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """The types of a call's outputs; and the rest of the output if it is a `_Callee`."""
    # The types depend on settings, such as `jax_enable_x64`. No mesh is in use if an empty
    # one is; jax 0.10 lowers with that.
    mesh = jax.sharding.AbstractMesh
    context = [None if isinstance(x, mesh) and x.empty else x for x in trace_context()]
    return _trace_in_context(call, types, tuple(context))


@functools.lru_cache(maxsize=1024)
def _trace_in_context(call, types, context) -> tuple[tuple[Any, ...], Any]:
    rest: Any = None

    def flat(*data):
        nonlocal rest
        if not isinstance(call, _Callee):
            return call(*data)
        arrays, rest = take_apart(call.output(data))
        return arrays

    structs = map(as_struct, types)
    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*structs)
    if any(isinstance(x, Tracer) for x in jaxpr.consts):
        raise ValueError(
            "A `noinline` function closes over a tracer, an array of the surrounding "
            "program. Pass that array as an argument."
        )
    return tuple(map(as_aval, out)), rest


@functools.lru_cache(maxsize=1024)
def _compiled(call: Any) -> Callable[..., list[Any]]:
    return jax.jit(lambda *data: call(*data))


on_clear(_trace_in_context.cache_clear)
on_clear(_compiled.cache_clear)

noinline_p = new_primitive("noinline")
"""The primitive of [`equinox_like.internal.noinline`][]."""


@noinline_p.def_impl
def _(*data: Any, call: Any) -> list[Any]:
    return _compiled(call.found(data))(*data)


@noinline_p.def_abstract_eval
def _(*types: Any, call: Any) -> Sequence[Any]:
    axes = frozenset().union(*map(varying_axes, types))
    return types_varying_over(axes, _trace(call, types)[0])


def _bind(*data: Any, call: Any) -> list[Any]:
    # An output depends on every input, so all vary over the same axes of a mesh. To
    # mark each input makes JAX sum its cotangent over the others.
    return noinline_p.bind(*varying_alike(*data), call=call)


def _lowered(*data: Any, call: Any) -> Sequence[Any]:
    types, _ = _trace(call, tuple(map(as_aval, data)))
    structs = [*map(struct_of, types)]
    # Python takes and returns the data of typed PRNG keys.
    inputs = [*map(jax_struct_of, data)]
    given = jax.eval_shape(lambda xs: [*map(without_key, xs)], structs)

    def on_host(*data):
        data = list(map(with_key, data, inputs))
        out = _compiled(call.found(data))(*data)
        return [*map(without_key, out)]

    out = compute_on_host(on_host, given, *map(without_key, data))
    return list(map(with_key, out, structs))


def _push_forward(primals, tangents, *, call) -> tuple[Sequence[Any], Sequence[Any]]:
    out = _bind(*primals, call=call)
    perturbed = tuple(i for i, t in enumerate(tangents) if type(t) is not Zero)
    given = [tangents[i] for i in perturbed]
    found = iter(_bind(*primals, *given, call=_Tangent(call, perturbed)))
    return out, [next(found) if _is_inexact(x) else zero_like(x) for x in out]


def _pull_back(cotangents: Sequence[Any], *inputs: Any, call: Any) -> Sequence[Any]:
    wanted = tuple(i for i, x in enumerate(inputs) if is_undefined_primal(x))
    types = tuple(inputs[i].aval for i in wanted)
    known = [x for x in inputs if not is_undefined_primal(x)]
    given = [instantiate(ct) for ct in cotangents]
    transpose = _Transpose(call, wanted, types, len(known))
    found = iter(_bind(*known, *given, call=transpose))
    return [next(found) if is_undefined_primal(x) else None for x in inputs]


def _batch(name, data, axes, *, call) -> tuple[Sequence[Any], Sequence[int]]:
    mapped = _Map(call, tuple(axes), batch_size(data, axes), name)
    out = _bind(*data, call=mapped)
    return out, [0] * len(out)


lower_as(noinline_p, _lowered)
jvp_rules[noinline_p] = _push_forward
transposition_rules[noinline_p] = _pull_back
register_batching(noinline_p, _batch)
finalisations[noinline_p] = lambda *data, call: call(*data)
