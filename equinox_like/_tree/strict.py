"""The strict rule for static values: the same type and value at every depth; interning.

In Python `1 == 1.0 == True`, `0.0 == -0.0` and `nan != nan`. But a program that was
compiled for one of these values is wrong for the others. A dtype is the same in all its
forms: `np.dtype("float32")`, `np.float32` and `jnp.float32`. `strict_key` turns static
values into a key whose `==` and `hash` follow the strict rule. Most values stay as they
are, next to their types, so that a comparison costs no Python call. A container becomes
a tuple of its content. So the key does not change when the container does, and it is
hashable even if the container is not. Values whose `==` does not return a bool, such as
arrays, are wrapped. Interning makes one object of those with equal keys, so that these are
compared by identity.
"""

import contextlib
import dataclasses
import enum
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat.tracing import Tracer
from .filters import is_array

# For two values of the same one of these types, `==` follows the strict rule.
_PLAIN: Final = frozenset(
    {
        bool,
        int,
        str,
        bytes,
        type(None),
        type(...),
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        types.ModuleType,
        np.ufunc,
    }
)


def strict_key(values: Iterable[Any]) -> tuple[tuple[type, ...], tuple[Any, ...]]:
    """A pair that equals another one only if all `values` are strictly the same.

    It is hashable even if the values are not. The types come first, since values of
    different types may raise when they are compared, as a treedef and `None` do.
    """
    values = tuple(values)
    kinds = tuple(map(type, values))
    if _PLAIN.issuperset(kinds):
        return kinds, values
    values = tuple(np.dtype(x) if _is_scalar_type(x) else x for x in values)
    # cloudpickle cannot send the class of a dtype such as bfloat16, which is in the
    # treedef of a Module. The `==` of two dtypes needs no class.
    kinds = tuple(map(type, values))
    kinds = tuple(np.dtype if issubclass(kind, np.dtype) else kind for kind in kinds)
    return kinds, tuple(map(_key_of, values))


def strictly_same(a: Any, b: Any) -> bool:
    """Whether `a` and `b` have the same type and are equal, at every depth."""
    return a is b or strict_key((a,)) == strict_key((b,))


def strict_treedef(treedef: Any, nodes: Any = jtu.default_registry) -> Any:
    """A treedef of the registry `nodes` that is compared by the strict rule.

    JAX compares the keys of dictionaries, and the aux data of nodes of other libraries,
    by `==`. Where that does not follow the strict rule, a strict key replaces them. The
    result is only for comparison, and cannot be unflattened.
    """
    loose = False

    def visit(_, data):
        nonlocal loose
        if data is not None and not _compares_strictly(data):
            loose = True

    # In C++, since most trees need no marks; and no recursion, since trees may be deep.
    treedef.walk(visit, id, [None] * treedef.num_leaves)
    return _marked(treedef, nodes) if loose else treedef


def _marked(treedef: Any, nodes: Any) -> Any:
    """The treedef with a `StaticLeaf` for what is not compared strictly."""

    def whole(part):
        node = part.node_data()
        return part if node is None or node == _NONE else None

    def make(node, parts):
        kind, data = node
        if not _compares_strictly(data):
            data = list(map(StaticLeaf, data)) if kind is dict else StaticLeaf(data)
        return treedef.from_node_data_and_children(nodes, (kind, data), parts)

    return fold_treedef(treedef, whole, make)


def fold_treedef(
    treedef: Any, whole: Callable[[Any], Any], make: Callable[[Any, list[Any]], Any]
) -> Any:
    """What `make(node_data, results for the children)` returns for the root.

    `whole(part)` is the result for a part that is not taken apart, `None` for others; it
    is called in the order of the leaves. Not a recursion, since trees may be deep. Of a
    node that was taken apart the treedef is dropped: to keep those of all nodes would take
    memory by the square of the depth.
    """
    # Each node, and the number of its children; or `None` and the result for it.
    parents_first: list[tuple[Any, Any]] = []
    pending = [treedef]
    while pending:
        part = pending.pop()
        result = whole(part)
        if result is None:
            children = part.children()
            parents_first.append((part.node_data(), len(children)))
            pending += reversed(children)
        else:
            parents_first.append((None, result))
    made: list[Any] = []
    for node, result in reversed(parents_first):
        if node is not None:
            result = make(node, [made.pop() for _ in range(result)])
        made.append(result)
    return made.pop()


def has_hash(value: Any) -> bool:
    """Whether a static leaf is hashable. NumPy arrays count as hashable constants."""
    if isinstance(value, tuple | frozenset):
        return all(map(has_hash, value))
    if is_constant(value):
        return True
    try:
        hash(value)
    except Exception:
        return False
    return True


# Types that other files add here, whose `==` follows the strict rule.
strict_types: Final[set[type]] = set()
# Types of nodes whose `==` compares the tree, or that have none of their own.
compared_as_trees: Final[set[type]] = {jtu.Partial}
_NONE: Final = type(None), None  # the data of the node `None`


def _compares_strictly(data: Any) -> bool:
    kind = type(data)
    if kind is tuple or kind is list:
        return all(map(_compares_strictly, data))
    if kind in (int, bool):  # `1 == True`
        return False
    return (
        kind in _PLAIN
        or kind in strict_types
        or (isinstance(data, type) and not _is_scalar_type(data))
        or is_compared_by_identity(kind)
    )


def _is_scalar_type(x: Any) -> bool:
    """Whether `x` is a class of NumPy or JAX that stands for a dtype."""
    return type(x) is type(jnp.float32) or (type(x) is type and x in _NUMPY_SCALARS)


# With those of `ml_dtypes`, and without abstract ones such as `np.floating`.
_NUMPY_SCALARS: Final = frozenset(np.sctypeDict.values())


class StaticLeaf:
    """Wraps a static value, and equals what is strictly the same. In our registry it is a
    node without children, and its own aux data."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any):
        self.value = value
        self._key = strict_key((value,))

    def __eq__(self, other: object) -> bool:
        if type(other) is StaticLeaf:
            return self._key == other._key
        return other is self.value or strict_key((other,)) == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.value)


strict_types.add(StaticLeaf)


def _key_of(value: Any) -> Any:
    """The key of a value, to compare with values of the same type."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    key_of = _KEYS.get(kind)
    return _key_of_other(value) if key_of is None else key_of(value)


def _key_of_other(value: Any) -> Any:
    """As `_key_of`, for values that are neither plain nor containers of Python."""
    kind = type(value)
    if isinstance(value, type | np.dtype):
        return value
    if isinstance(value, jtu.PyTreeDef):
        return strict_treedef(value)
    if is_constant(value):
        return ByBytes(value)
    if kind is np.ndarray:  # with Python objects as elements
        return value.dtype, value.shape, strict_key(value.ravel().tolist())
    if is_array(value) or isinstance(value, Tracer):
        return ByIdentity(value)
    if isinstance(value, enum.Enum):
        name = value._name_
        return strict_key((value._value_,)) if name is None else name
    if is_compared_as_tree(kind):
        return _key_of_tree(value)
    if is_compared_by_identity(kind):
        return value
    return _key_by_class(value)


def is_compared_as_tree(kind: type) -> bool:
    """Whether the first class with an `==`, from `kind` up, compares nodes as trees."""
    for base in kind.__mro__:
        if base in compared_as_trees:
            return True
        if "__eq__" in base.__dict__:
            break
    return False


def _key_of_tree(value: Any) -> Any:
    children, treedef = jtu.tree_flatten(value, lambda x: x is not value)
    return strict_treedef(treedef), strict_key(children)


def _key_by_class(value: Any) -> Any:
    """As `_key_of`, for values with a custom `==`; depends on the class defining it."""
    kind = type(value)
    base = next(b for b in kind.__mro__ if b in _KEYS or "__eq__" in b.__dict__)
    if base in _KEYS:
        # Its content, and its attributes.
        return _KEYS[base](value), strict_key([object.__getstate__(value)])
    names = compared_names(kind, base)
    if names is not None and has_generated_equality(base):
        return strict_key(getattr(value, name, dataclasses.MISSING) for name in names)
    if isinstance(value, Mapping):  # of a library, such as `frozendict`
        with contextlib.suppress(Exception):
            return _key_of_mapping(value), ByOwnEquality(value)
    return ByOwnEquality(value)


def is_compared_by_identity(kind: type) -> bool:
    return kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


def compared_names(kind: Any, base: Any) -> list[str] | None:
    """The fields to compare, if `base`, which defines `==`, is a dataclass or of attrs."""
    if dataclasses.is_dataclass(base):
        return [f.name for f in dataclasses.fields(kind) if f.compare]
    if "__attrs_attrs__" in base.__dict__:
        return [f.name for f in kind.__attrs_attrs__ if f.eq]
    return None


def has_generated_equality(cls: Any) -> bool:
    """Whether `==` was generated, and so compares the fields of a dataclass."""
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename.startswith(_GENERATED)


# The file names of methods that `dataclasses` and attrs generate.
_GENERATED: Final = ("<string>", "<attrs generated")


def _key_of_dict(value: Any) -> Any:
    return frozenset(map(strict_key, value.items()))


def _key_of_mapping(value: Any) -> Any:
    # A table may make its items anew in each access, and these are equal to no others.
    items = _key_of_dict(value)
    return items if items == _key_of_dict(value) else ByOwnEquality(value)


def _key_of_set(value: Any) -> Any:
    return frozenset(strict_key((x,)) for x in value)


# For types of the standard library, and types derived from them.
_KEYS: Final[dict[type, Callable[[Any], Any]]] = {
    int: int.__int__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    float: float.hex,
    complex: complex.__repr__,
    bytearray: bytes,
    slice: lambda x: strict_key((x.start, x.stop, x.step)),
    range: lambda x: (x.start, x.stop, x.step),
    tuple: lambda x: strict_key(tuple.__iter__(x)),
    list: lambda x: strict_key(list.__iter__(x)),
    deque: lambda x: (x.maxlen, strict_key(deque.__iter__(x))),
    set: _key_of_set,
    frozenset: _key_of_set,
    dict: _key_of_dict,
    OrderedDict: lambda x: strict_key(x.items()),
    defaultdict: lambda x: (strict_key((x.default_factory,)), _key_of_dict(x)),
    types.MappingProxyType: _key_of_dict,
    types.SimpleNamespace: lambda x: _key_of_dict(vars(x)),
    Mapping: _key_of_mapping,
}


class ByOwnEquality:
    """Compares a value by its own `==`; unequal if that raises or is not a bool."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        if type(other) is not ByOwnEquality:
            return False
        a, b = self._value, other._value
        try:
            same = a is b or a == b
        except Exception:
            return False
        return isinstance(same, bool | np.bool_) and bool(same)

    def __hash__(self) -> int:
        try:
            return hash(self._value)
        except Exception:
            return hash(type(self._value))


class ByIdentity:
    """Compares a value by identity."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is ByIdentity and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class ByBytes:
    """Compares a NumPy array by dtype, shape and bytes, with all NaN equal."""

    __slots__ = ("_array", "_hash")

    def __init__(self, array: Any):
        # A copy, unless the array cannot be written to.
        is_fixed = not isinstance(array, np.ndarray) or (
            array.base is None and not array.flags.writeable
        )
        self._array = array if is_fixed else array.copy()
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if type(other) is not ByBytes:
            return False
        a, b = self._array, other._array
        return a is b or (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (a.tobytes() == b.tobytes() or _bytes_of(a) == _bytes_of(b))
        )

    def __hash__(self) -> int:
        if self._hash is None:
            array = self._array
            # A part of a large array is enough.
            part = np.ravel(array)[:: max(1, array.size // _HASHED)]
            self._hash = hash((array.dtype, array.shape, _bytes_of(part)))
        return self._hash


_HASHED: Final = 1024


def _bytes_of(array: Any) -> bytes:
    # NaN has many bit patterns, which must compare as equal.
    if array.dtype.kind in "fc" and np.isnan(array).any():
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return array.tobytes()


def is_constant(value: Any) -> bool:
    """Whether `value` is a NumPy value that is fully described by its bytes."""
    # A subclass may hold more than bytes, for example a mask.
    is_numpy = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_numpy and not value.dtype.hasobject


class HashedKey:
    """A key with its hash, which is computed once.

    Keys whose comparison raises, or returns something other than a truth value, differ.
    """

    __slots__ = ("__weakref__", "_hash", "key")

    def __init__(self, key: Any, hash_: int):
        self.key = key
        self._hash = hash_

    def __eq__(self, other: object) -> bool:
        if type(other) is not HashedKey:
            return False
        try:
            return bool(self.key == other.key)
        except Exception:
            return False

    def __hash__(self) -> int:
        return self._hash


class Interned:
    """The base of what tables hold. Nothing else holds its `HashedKey`, so both die
    together."""

    __slots__ = ("__weakref__", "contents")

    contents: HashedKey


_T = TypeVar("_T", bound=Interned)


class InternTable(Generic[_T]):
    """Maps keys to objects, and holds them weakly."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[HashedKey, weakref.ref[_T]]
        self._known = weakref.WeakKeyDictionary()
        # Reentrant: comparing keys may run user code that interns another object.
        self._lock = threading.RLock()

    def find(
        self, key: Hashable, make: Callable[[], _T], hash_: int | None = None
    ) -> _T:
        """The object of an equal key, or a new one: `make()`.

        `hash_` is for keys that cannot be hashed.

        **Raises:**

        `TypeError` if the key has no hash, and none is given.
        """
        contents = HashedKey(key, hash(key) if hash_ is None else hash_)
        with self._lock:
            known = self._known.get(contents)
            found = known and known()
            if found is None:
                found = make()
                found.contents = contents
                self._known[contents] = weakref.ref(found)
            return found
