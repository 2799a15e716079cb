"""The carry of a loop, any pytree, and its buffers: arrays read and written by index.

The arrays of a carry may change from step to step, and static leaves stay. JAX gets a flat
list of arrays. Its errors name leaves by number; errors here name their paths. A Python
number that a step changes becomes an array from the start, as in JAX.

A loop saves each array of its carry, selects between the old and the new array, and
adds up its cotangents. For a buffer, all of these touch only the elements that the body
reads and writes. This is why a buffer has no other operations. A buffer records, in
Python, what it became by being read. So its cotangent passes through the reads one after
the other, each of which adds to it in place; JAX would add arrays of zeros. XLA writes in
place only if it knows that a read comes first, which `optimization_barrier` expresses.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._compat.axes import varying_alike
from .._compat.primitives import Zero, instantiate, is_undefined_primal
from .._compat.tracing import current_trace
from .._core.base import name_of
from .._core.difference import tree_differences
from .._core.flat_call import Template, take_apart, take_apart_like
from .._runtime.finalise import register_impl_finalisation
from .._runtime.primitives import create_vprim
from .._tree.arrays import is_typed_key
from .._tree.filters import is_array, is_number
from .._tree.nodes import describe_node, path_str
from .._tree.partitioning import map_nodes
from .._tree.strict import strictly_same
from .staging import is_boolean_scalar, select_if_vmap

_T = TypeVar("_T")


# Buffers


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
        nodes = (_Slice.of(x) if isinstance(x, slice) else x for x in items)
        arrays, template = take_apart(tuple(nodes))
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

    @classmethod
    def of(cls, x: slice) -> "_Slice":
        return cls(x.start, x.stop, x.step)


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

    def _write(self, place, arrays, value, chosen, pred) -> "Buffer":
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


def _as_written(array, place, arrays, value, chosen) -> Any:
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


# The carry


def with_carry(loop: str, fun: Any, init: Any, run: Callable[["Carry"], Any]) -> Any:
    """`run(carry)`; runs again with arrays for the numbers that a step changes."""
    while True:
        carry, out = Carry(init, loop, fun), None
        try:
            out = run(carry)
        except Exception as e:
            if not carry.numbers_change:
                if isinstance(e, TypeError):
                    carry.raise_changed_type(e)
                raise
        if not carry.numbers_change:
            return out
        # The arrays are made outside the trace of a step. An array made within it may
        # become an argument of the compiled program, which the second call lacks.
        init = carry.with_arrays()


class Carry:
    """The initial carry of a loop, split into arrays and the rest."""

    def __init__(self, init: Any, loop: str, fun: Any):
        self.init = init
        # For each leaf, whether it is a Python number that a step has changed.
        self._number_changes: list[bool] = []
        self._where = f"`{loop}` of `{name_of(fun)}`"
        self._changed: str | None = None
        self.data, self._template = take_apart(init)
        self.is_buffer = [False] * len(self.data)

    def fill(self, data: Sequence[Any], pred: Any = None) -> Any:
        """The carry for the user's functions."""
        # A new step is traced, so drop what the last one has changed.
        self._changed = None
        return self._template.fill(data)

    whole = fill

    def step(self, before: Sequence[Any], carry: Any) -> Any:
        """The arrays of the carry that a step returned; `before` are its input arrays.

        `None` if the step has changed a Python number. JAX refuses that after the trace
        of the step. An exception within the trace would leak: JAX keeps a trace that
        was not completed, and all arrays that the step closes over.

        **Raises:**

        `TypeError` if the structure or another static leaf has changed.
        """
        data, template = take_apart_like(carry, self._template)
        if template != self._template:
            self._number_changes = self._changed_numbers(carry)
            if self.numbers_change:
                return None
            numbers = {
                path_str(path, "carry")
                for path, x in jtu.tree_leaves_with_path(self.init)
                if is_number(x)
            }
            found = tree_differences("carry", self.init, carry)
            # The first that is not of a number: these may change with a step.
            difference = min(found, key=lambda d: d.path in numbers, default=None)
            raise TypeError(
                f"{self._where}: only the arrays of the carry may change from step to "
                f"step. {difference or 'Its structure changed.'} Each step must return "
                "the structure of the initial carry, and a value that it computes must "
                "be an array from the start."
            )
        self._changed = self._change(before, data)
        return data

    @property
    def numbers_change(self) -> bool:
        """Whether a step has changed a Python number. The loop must then not run."""
        return any(self._number_changes)

    def with_arrays(self) -> Any:
        """The initial carry with arrays for the numbers that a step has changed."""
        leaves, treedef = jtu.tree_flatten(self.init)
        return treedef.unflatten(
            jnp.asarray(x) if changes else x
            for x, changes in zip(leaves, self._number_changes, strict=True)
        )

    def _changed_numbers(self, carry: Any) -> list[bool]:
        """For each leaf, whether it is a number that differs in `carry`."""
        before, treedef = jtu.tree_flatten(self.init)
        after, other = jtu.tree_flatten(carry)
        if treedef != other:
            return []
        return [
            is_number(x) and (is_array(y) or is_number(y)) and not strictly_same(x, y)
            for x, y in zip(before, after, strict=True)
        ]

    def raise_changed_type(self, error: TypeError) -> None:
        """Raises an error with the path, if JAX's `error` is for a changed array type.

        The check is left to JAX, because it converts arrays of a weak type.
        """
        if self._changed is not None:
            raise TypeError(
                f"{self._where}: each array of the carry must keep its shape and dtype. "
                f"{self._changed}"
            ) from error

    def _change(self, before: Sequence[Any], after: Sequence[Any]) -> str | None:
        types = [*zip(map(jax_type, before), map(jax_type, after), strict=True)]
        if all(old == new for old, new in types):
            return None
        paths = [
            path for path, x in jtu.tree_leaves_with_path(self.init) if is_array(x)
        ]
        text = " ".join(
            f"`{path_str(path, 'carry')}` was {old}, and is now {new}."
            for path, (old, new) in zip(paths, types, strict=True)
            if old != new
        )
        return text + of_mesh(text)


def jax_type(x: Any) -> str:
    """JAX's type of an array as text, without `~` for a weak type, which may change."""
    return str(jax.typeof(x)).lstrip("~")


def of_mesh(types: str) -> str:
    """How to change what types such as `float32[8@x]{V:d}` say of the mesh, if they do."""
    if "@" not in types and "{V:" not in types:
        return ""
    return (
        " In a type, `@x` means that the axis `x` of the mesh splits a dimension: "
        "`jax.sharding.reshard` changes that. `{V:x}` means that the array varies over the "
        "axis: `jax.lax.pcast(array, 'x', to='varying')` marks another one so."
    )


def arrays_of(tree: Any, name: str) -> Any:
    """The tree, with numbers and NumPy arrays converted to JAX arrays.

    **Raises:**

    `TypeError` for any other leaf, naming its path, which starts with `name`.
    """

    def as_array(path, x):
        if is_array(x) or is_number(x):
            return jnp.asarray(x)
        raise TypeError(
            f"`{path_str(path, name)}` is {describe_node(x)}: the carry of this loop must "
            "hold only arrays and numbers. `filter_while_loop` and `filter_scan` take any "
            "tree."
        )

    return jtu.tree_map_with_path(as_array, tree)


class BufferCarry:
    """A carry of arrays only, some of which are buffers for the user's functions.

    The loop sees the arrays of each leaf. A leaf that is a buffer of an outer loop has
    more than one: its array and its bools.
    """

    numbers_change = False

    def __init__(self, init: Any, buffers: Callable[[Any], Any] | None, where: str):
        self.init = init
        self._where = where
        self._leaves, self._treedef = jtu.tree_flatten(init, is_buffer)
        self._named = self._find(buffers)
        # Also of the buffers of outer loops.
        self.data, whole = jtu.tree_flatten(init)
        self.whole: Callable[[Any], Any] = whole.unflatten
        """The carry with arrays in place of this loop's buffers."""
        self.is_buffer: list[bool] = []
        for i, leaf in enumerate(self._leaves):
            self.is_buffer += [i in self._named]
            self.is_buffer += [False] * (len(jtu.tree_leaves(leaf)) - 1)

    def _find(self, buffers: Callable[[Any], Any] | None) -> set[int]:
        """The indices of the leaves that `buffers` selects."""
        if buffers is None:
            return set()
        placeholders = [_Placeholder(i) for i in range(len(self._leaves))]
        named = jtu.tree_leaves(buffers(self._treedef.unflatten(placeholders)))
        if not all(isinstance(x, _Placeholder) for x in named):
            raise ValueError(
                f"{self._where}: Only arrays can be buffers. `buffers` must return a node "
                "of the carry, or a sequence of them."
            )
        return {x.place for x in named}

    def fill(self, data: Sequence[Any], pred: Any = None) -> Any:
        """The carry for the user's functions, with buffers."""
        leaves = jtu.tree_leaves(self.whole(data), is_buffer)
        return self._treedef.unflatten(
            Buffer(x, pred) if i in self._named else x for i, x in enumerate(leaves)
        )

    def step(self, before: Sequence[Any], out: Any) -> list[Any]:
        """The arrays of the carry that a step returned.

        **Raises:**

        `ValueError` if the structure or the type of an array has changed.
        """
        leaves, treedef = jtu.tree_flatten(out, is_buffer)
        leaves = [jnp.asarray(x) if is_number(x) else x for x in leaves]
        unwrapped = [
            _unwrapped(x) if i in self._named else x for i, x in enumerate(leaves)
        ]
        if treedef == self._treedef and all(
            _same_type(x, y) for x, y in zip(self._leaves, unwrapped, strict=True)
        ):
            return jtu.tree_leaves(unwrapped)
        after = treedef.unflatten(leaves)
        after = map_nodes(lambda x: Buffer(x._array, None), after, is_buffer)
        old = self.fill(self.data)
        found = tree_differences("carry", old, after, is_array, jax_type)
        lines = "".join(f"\n- {difference}" for difference in found)
        raise ValueError(
            f"{self._where} must have the same input and output structure, except for "
            f"the values of arrays:{lines}"
        )


class _Placeholder:
    """A placeholder for a leaf, for `buffers` to select."""

    def __init__(self, place: int):
        self.place = place


def _unwrapped(x: Any) -> Any:
    return x._array if isinstance(x, Buffer) else None


def _same_type(before: Any, after: Any) -> bool:
    if isinstance(before, Buffer):
        return isinstance(after, Buffer) and jtu.tree_all(
            jtu.tree_map(_same_type, before._array, after._array)
        )
    return is_array(after) and _comparable(before) == _comparable(after)


def _comparable(x: Any) -> str:
    # Without the axes over which it varies: `stage` adds those of a step to the carry.
    return jax_type(x).partition("{V:")[0]
