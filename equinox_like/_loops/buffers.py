"""Buffers: arrays of a loop's carry that are read and written index by index.

A loop saves each array of its carry, selects between the old and the new array, and
adds up its cotangents. For a buffer, all of these touch only the elements that the body
reads and writes. This is why a buffer has no other operations.

A buffer records, in Python, what it became by being read. So its cotangent passes through
the reads one after the other, each of which adds to it in place; JAX would add arrays of
zeros. XLA writes in place only if it knows that a read comes first, which
`optimization_barrier` expresses.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._compat.axes import varying_alike
from .._compat.primitives import Zero, instantiate, is_undefined_primal
from .._compat.tracing import current_trace
from .._core.flat_call import Template, take_apart
from .._runtime.finalise import register_impl_finalisation
from .._runtime.vprim import create_vprim
from .._tree.arrays import is_typed_key
from .._tree.nodes import describe_node
from .staging import is_boolean_scalar, select_if_vmap

_T = TypeVar("_T")


class Place(NamedTuple):
    """The static part of an index, which is hashable, of `x.at[index]`.

    The arrays of the index are passed to each method, in order.
    """

    # Of a tree, because a `jax.ds` is a node with arrays below it.
    template: Template
    # Keyword arguments of `x.at[index].get` or `.set`.
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, index: Any, options: dict[str, Any]) -> tuple["Place", list[Any]]:
        items = index if isinstance(index, tuple) else (index,)
        arrays, template = take_apart(tuple(map(_as_node, items)))
        return cls(template, tuple(sorted(options.items()))), arrays

    def read(self, x: Any, *arrays: Any) -> Any:
        return x.at[self._index(arrays)].get(**dict(self.options))

    def add_read(self, x: Any, value: Any, *arrays: Any) -> Any:
        """The transpose of `read`: adds the cotangent `value` where `read` reads."""
        options = {"mode": "clip"} | self._without("fill_value")
        return x.at[self._index(arrays)].add(value, **options)

    def write(self, x: Any, value: Any, *arrays: Any) -> Any:
        return x.at[self._index(arrays)].set(value, **dict(self.options))

    def written(self, x: Any, *arrays: Any) -> Any:
        """The old values where `write` writes, with zeros for indices out of bounds."""
        options = {"mode": "fill", "fill_value": 0} | self._without()
        return x.at[self._index(arrays)].get(**options)

    def _without(self, *names: str) -> dict[str, Any]:
        return {k: v for k, v in self.options if k not in names and v is not None}

    def _index(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        items = self.template.fill(arrays)
        return tuple(slice(*x) if isinstance(x, _Slice) else x for x in items)


class _Slice(NamedTuple):
    """A slice as a node. JAX says why its bounds may not be arrays."""

    start: Any
    stop: Any
    step: Any


def _as_node(item: Any) -> Any:
    if isinstance(item, slice):
        return _Slice(item.start, item.stop, item.step)
    return item


def read(x: Any, place: Any, arrays: Any) -> tuple[Any, Any]:
    """The value at a place, and `x` again, to be used in place of `x` from now on.

    In the backward pass, the cotangent of `x` then passes through all reads one by one,
    and each read adds to it in place.
    """
    value, x = read_p.bind(x, *arrays, place=place)
    return value, x


def write(pred: Any, x: Any, value: Any, place: Any, arrays: Any) -> Any:
    args = varying_alike(pred, x, value, *arrays)
    (out,) = maybe_set_p.bind(*args, place=place)
    return out


def _then(value: Any, x: Any) -> Any:
    """`value`, which was read from `x`, and `x`, available only after the read.

    XLA copies an array before a write unless it knows that all reads come earlier.
    """
    return lax.optimization_barrier((value, x))


def _read(x, *arrays, place):
    return list(_then(place.read(x, *arrays), x))


def _read_types(x, *arrays, place):
    (value,) = jax.make_jaxpr(place.read)(x, *arrays).out_avals
    return [value, x]


def _read_jvp(primals, tangents, *, place):
    out = read_p.bind(*primals, place=place)
    return out, read_p.bind(tangents[0], *primals[1:], place=place)


def _read_transpose(cotangents, x, *arrays, place):
    value, rest = cotangents
    none = [None] * len(arrays)
    if type(value) is Zero:
        return [rest, *none]
    return [place.add_read(instantiate(rest), value, *arrays), *none]


def _set(pred, x, value, *arrays, place):
    old = place.written(x, *arrays)
    return [place.write(x, select_if_vmap(pred, value, old), *arrays)]


def _set_jvp(primals, tangents, *, place):
    pred, _, _, *arrays = primals
    _, dx, dvalue, *_ = tangents
    out = maybe_set_p.bind(*primals, place=place)
    dx, dvalue = instantiate(dx), instantiate(dvalue)
    return out, maybe_set_p.bind(pred, dx, dvalue, *arrays, place=place)


def _set_transpose(cotangents, pred, x, value, *arrays, place):
    (ct,) = cotangents
    none = [None] * len(arrays)
    if type(ct) is Zero:
        return [None, None, None, *none]
    here, ct = _then(place.written(ct, *arrays), ct)
    zeros = jnp.zeros_like(here)
    ct_value = select_if_vmap(pred, here, zeros) if is_undefined_primal(value) else None
    ct_x = write(pred, ct, zeros, place, arrays) if is_undefined_primal(x) else None
    return [None, ct_x, ct_value, *none]


read_p: Any = create_vprim(
    "read_buffer", _read, _read_types, _read_jvp, _read_transpose
)
"""From an array and the arrays of an index to the value there, and the same array."""
maybe_set_p: Any = create_vprim(
    "maybe_set", _set, lambda _, x, *rest, place: [x], _set_jvp, _set_transpose
)
"""`maybe_set_p.bind(pred, x, value, *arrays, place=place)` returns `[x]` with `value`
at the index that `place` and `arrays` describe. The bool `pred` is assumed to be true.
Under a `jax.vmap` that maps `pred`, only elements where it is true are written."""

register_impl_finalisation(read_p)
register_impl_finalisation(maybe_set_p)


class Buffer:
    """An array that can be read at an index, and written by `.at[index].set(value)`."""

    __slots__ = ("_array", "_pred", "_trace")
    __iter__ = None  # Python would read one index after the other, without an end.

    def __init__(self, array: Any, pred: Any):
        # An array, or the buffer of an outer loop.
        self._array = array
        # Writes have an effect only where this is true. See `stage`. It is an array, so
        # that a buffer is a `jaxtyping.PyTree[jax.Array]`, as diffrax expects.
        self._pred = pred
        self._trace = current_trace()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def size(self) -> int:
        return self._array.size

    def __getitem__(self, index: Any) -> Any:
        return self._read(*Place.of(index, {}))

    @property
    def at(self) -> "_At":
        return _At(self)

    def _read(self, place: Place, arrays: list[Any]) -> Any:
        if isinstance(self._array, Buffer):
            return self._array._read(place, arrays)
        if self._trace is not current_trace():
            # In an inner trace, such as a branch, whose tracers must not be stored
            # here.
            return place.read(self._array, *arrays)
        value, self._array = read(self._array, place, arrays)
        return value

    def _write(
        self, place: Place, arrays: list[Any], value: Any, chosen: Any, pred: Any
    ) -> "Buffer":
        pred = self._pred if pred is None else pred & self._pred
        if isinstance(self._array, Buffer):
            array = self._array._write(place, arrays, value, chosen, pred)
        else:
            value = _as_written(self._array, place, arrays, value, chosen)
            array = write(pred, self._array, value, place, arrays)
        return Buffer(array, self._pred)

    def __repr__(self) -> str:
        return f"<buffer of a loop, {self.dtype}{list(self.shape)}>"


jtu.register_pytree_with_keys(
    Buffer,
    lambda b: (
        ((jtu.GetAttrKey("_array"), b._array), (jtu.GetAttrKey("_pred"), b._pred)),
        None,
    ),
    lambda _, children: Buffer(*children),
)


def is_buffer(x: Any) -> bool:
    return isinstance(x, Buffer)


class _At:
    """`buffer.at`"""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer):
        self._buffer = buffer

    def __getitem__(self, index: Any) -> "_AtIndex":
        return _AtIndex(self._buffer, index)


class _AtIndex:
    """`buffer.at[index]`"""

    __slots__ = ("_buffer", "_index")

    def __init__(self, buffer: Buffer, index: Any):
        self._buffer = buffer
        self._index = index

    def set(self, value: Any, *, pred: Any = True, **kwargs: Any) -> Buffer:
        place, arrays = Place.of(self._index, kwargs)
        if not is_boolean_scalar(pred):
            raise ValueError(
                "The `pred` of a write to a buffer must be a boolean scalar; got "
                f"{describe_node(pred)}."
            )
        return self._buffer._write(place, arrays, value, pred, None)


def buffer_at_set(
    buffer: _T, item: Any, x: Any, *, pred: Any = True, **kwargs: Any
) -> _T:
    """`buffer.at[item].set(x)`, for buffers of a loop and for arrays.

    **Arguments:**

    - `buffer`: a buffer in the body of [`equinox_like.internal.while_loop`][], or a JAX
        array.
    - `item`: the index: integers, arrays of them, slices, an ellipsis, or a tuple of
        these.
    - `x`: the value to write, which is broadcast.
    - `pred`: a bool scalar: whether to write at all.
    - `**kwargs`: keyword arguments of `jax.Array.at[...].set`, such as `mode`.

    **Returns:**

    The buffer or array with the value written.

    **Raises:**

    For a buffer, `ValueError` if the dtype of `x` does not promote to that of the buffer,
    or if `pred` is not a boolean scalar. For a JAX array, what its `.at[...].set` raises:
    another dtype is converted with a warning. `AttributeError` for a NumPy array.

    !!! example

        ```python
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        x = eqxi.buffer_at_set(jnp.zeros(3), 1, 5.0, pred=jnp.asarray(True))
        assert x.tolist() == [0, 5, 0]
        ```
    """
    at: Any = buffer.at  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(buffer, Buffer):
        return at[item].set(x, pred=pred, **kwargs)
    if pred is True:
        return at[item].set(x, **kwargs)
    place, arrays = Place.of(item, kwargs)
    value = _as_written(buffer, place, arrays, x, pred)
    return place.write(buffer, value, *arrays)


def _as_written(
    array: Any, place: Place, arrays: list[Any], value: Any, chosen: Any
) -> Any:
    """The value, in the shape and dtype at `place`; the old value if not `chosen`."""
    there = jax.eval_shape(place.written, array, *arrays)
    is_key = is_typed_key(value)
    dtype = value.dtype if is_key else jnp.result_type(value)
    # JAX does not promote the dtypes of typed keys.
    is_exact = is_key or is_typed_key(there)
    promoted = dtype if is_exact else jnp.result_type(value, there.dtype)
    if promoted != there.dtype:
        raise ValueError(
            f"A value of dtype {dtype} cannot be written to a buffer of dtype "
            f"{there.dtype}: convert it first."
        )
    value = value if is_key else jnp.asarray(value, there.dtype)
    value = jnp.broadcast_to(value, there.shape)
    if chosen is True:
        return value
    return jnp.where(chosen, value, place.written(array, *arrays))


class _MaybeBufferMeta(type):
    kind: Any = object

    def __instancecheck__(cls, instance: Any) -> bool:
        while isinstance(instance, Buffer):
            instance = instance._array
        return isinstance(instance, cls.kind)

    def __getitem__(cls, kind: Any) -> Any:
        return _MaybeBufferMeta(cls.__name__, (cls,), {"kind": kind})


class MaybeBuffer(metaclass=_MaybeBufferMeta):
    """`MaybeBuffer[T]`, for annotations: a `T`, or a buffer of a loop that holds one.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi
        from jaxtyping import Array, Float

        def write(x: eqxi.MaybeBuffer[Float[Array, " steps"]]):
            return eqxi.buffer_at_set(x, 0, 1.0)

        assert isinstance(jnp.ones(3), eqxi.MaybeBuffer[jax.Array])
        assert not isinstance(1, eqxi.MaybeBuffer[jax.Array])
        ```
    """
