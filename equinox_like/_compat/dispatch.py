"""JAX's C++ dispatch, for calls that hold static values.

What `jax.jit` returns flattens its arguments, finds the program for that kind of call, runs
it and builds the output, all in C++ but for nodes that are registered with functions of
Python; but it takes arrays only. Here the same C++ object is made with another registry of
nodes, in which a static value is a node without children, whose structure is the value.

Serves jax 0.10 to 0.12. Private are the C++ `pjit`, what a jitted function tells of itself
for pickling, and the data with which it takes its quick path. They are tried at first use
(`works`). Without them there is no `Dispatch`, and callers do the same in Python with what
is public; so they do with `EQX_DISPATCH=public`.
"""

import contextlib
import functools
import importlib
import operator
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import jax
import jax.tree_util as jtu
import numpy as np

from .._environment import DISPATCH

# How to take apart nodes of a type, with a structure that is compared by identity.
nodes: Final[dict[type, Callable[[Any], Any]]] = {}


class _Unknown:
    """A leaf that JAX's dispatch never knows, so that it asks."""


UNKNOWN: Final = _Unknown()


class Held:
    """A call, as the sole argument of a function that is to know the arrays in it.

    They are its `leaves`, from when JAX takes it apart.
    """

    __slots__ = ("call", "leaves")

    call: Any
    leaves: list[Any]


# What `hash` and `==` raise for what has none. No more: a signal's handler may raise, too.
WITHOUT_VALUE: Final = (AttributeError, RuntimeError, TypeError, ValueError)


class Dispatch:
    """Makes functions that JAX calls in C++, and knows the nodes that they take apart."""

    def __init__(self, state: dict[str, Any], pjit: Any):
        """Of what `jax.jit(...).__getstate__()` returned, and `jaxlib._jax.pjit`."""
        self._pjit = pjit
        self._key = state["global_cache_key"]
        self._put = state["shard_arg_fallback"]
        self._nodes_of_jax = state["pytree_registry"]
        # Children and structure of a node; `None` for a leaf.
        self._level = self._nodes_of_jax.flatten_one_level
        self._new_cache = type(state["cache"])
        self._registry = type(self._nodes_of_jax)(
            enable_none=True,
            enable_tuple=True,
            # One may be registered, as another node than JAX makes of it unasked.
            enable_namedtuple=False,
            enable_list=False,
            enable_dict=True,
        )
        # A copy of each list, as static values are taken apart in Python, where another
        # thread may come in between and shorten a list under the eyes of C++.
        copy = operator.itemgetter(slice(None), slice(0, 0))
        self._registry.register_node(list, copy, _not_to_be_built)
        take_apart = self._registry.flatten

        def flatten_held(held):
            held.leaves, treedef = take_apart(held.call)
            return held.leaves, treedef

        self._registry.register_node(Held, flatten_held, _not_to_be_built)
        self._registered: set[type] = set()
        self._lock = threading.RLock()

    def function(
        self,
        name: str,
        slow: Callable[..., Any],
        miss: Callable[..., tuple[Any, Any, bool]],
        capacity: int,
    ) -> Any:
        """Like `slow`, which is called where `jax.disable_jit` says so.

        For a call of a new kind `miss` is called, and returns the output, what makes
        further calls quick (see `run`) or `None`, and whether to forget of the call. Else,
        where the second is `None` or it raises, such calls are never quick. No more than
        `capacity` kinds are known at once.
        """
        cache = self._new_cache(capacity=capacity)
        function = self._pjit(
            name, slow, miss, (), (), self._key, self._registry, self._put, cache
        )
        # What JAX runs again to tell where a NaN comes from.
        function._fun = slow
        return function

    def learn(
        self,
        tree: Any,
        is_data: Callable[[Any], bool],
        key_of: Callable[[type, bool], Callable[[Any], Any] | None],
    ) -> bool | None:
        """Whether all types in a tree were known; now they are. `None` if they cannot be.

        `key_of(type, is_node)` says by what static values of a type are compared, or the
        structures of such nodes, if not by themselves: where that ran Python, the table of
        C++ in which JAX looks could change meanwhile.
        """
        was_known = True
        while new := self._unknown_in(tree, is_data):
            was_known = False
            flattens = {k: self._flatten_for(x, key_of) for k, x in new.items()}
            if None in flattens.values():
                return None
            with self._lock:
                for kind, flatten in flattens.items():
                    if kind not in self._registered:  # by another thread, just now
                        self._registry.register_node(kind, flatten, _not_to_be_built)
                        self._registered.add(kind)
        return was_known

    def _unknown_in(self, tree: Any, is_data: Callable[[Any], bool]) -> dict[type, Any]:
        """An example of each type that is to be learned of."""
        leaves, _ = self._registry.flatten(tree)
        examples = {type(x): x for x in leaves}
        return {k: x for k, x in examples.items() if self._level(x) or not is_data(x)}

    def agrees(self, tree: Any, is_data: Callable[[Any], bool]) -> bool:
        """Whether JAX finds the same data in the same order: then its programs fit."""
        data = [x for x in self._nodes_of_jax.flatten(tree)[0] if is_data(x)]
        leaves, _ = self._registry.flatten(tree)
        return len(leaves) == len(data) and all(map(operator.is_, leaves, data))

    def _flatten_for(self, x: Any, key_of: Any) -> Callable[[Any], Any] | None:
        """How to take apart what is of the type of `x`.

        `None` for types of users that are no nodes: they may become nodes some day, and
        would never be let go of.
        """
        kind = type(x)
        if kind in nodes:
            return nodes[kind]
        level = self._level(x)
        if level is None:
            return _flatten_static(key_of(kind, False)) if _is_lasting(kind) else None
        if issubclass(kind, tuple) and level[1] is kind:  # a NamedTuple, to JAX too
            return self._level
        return _flatten_by(self._level, key_of(kind, True))

    def run(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, Any, bool]:
        """A call of what `jax.jit` returned, as `miss` of `function` is to return it.

        JAX asks to forget what it will compile again.
        """
        return function.__getstate__()["cache_miss"](*args)

    def function_of(self, compiled: Any) -> Any:
        """What to give to `run` for what `.compile()` returned, or `None`."""
        try:
            return compiled._executable.create_cpp_call(compiled._params)
        except Exception:
            return None

    def returning(self, quick: Any, tree: Any, is_data: Callable[[Any], bool]) -> Any:
        """The same with the structure of `tree`, of as many data, for the output."""
        try:  # Some nodes are not built as they were taken apart, or not twice.
            leaves, before = self._nodes_of_jax.flatten(tree)
            treedef = self._with_fixed(before, iter(leaves), is_data)
            if treedef.num_leaves != quick.out_pytree_def.num_leaves:
                return None
            built = treedef.unflatten(list(filter(is_data, leaves)))
            others, after = self._nodes_of_jax.flatten(built)
            fits = after == before and all(map(operator.is_, others, leaves))
        except Exception:
            return None
        return quick._replace(out_pytree_def=treedef) if fits else None

    def _with_fixed(self, treedef: Any, leaves: Iterator[Any], is_data: Any) -> Any:
        """With a node for each leaf that is no datum. No node of a user is built for it."""
        node = treedef.node_data()
        if node is None:  # a leaf, or `None`
            leaf = next(leaves) if treedef.num_leaves else None
            if leaf is None or is_data(leaf):
                return treedef
            return self._nodes_of_jax.flatten(Fixed(leaf))[1]
        return treedef.from_node_data_and_children(
            self._nodes_of_jax,
            node,
            [self._with_fixed(c, leaves, is_data) for c in treedef.children()],
        )


# The packages whose types are what they are for good.
_LASTING = ("builtins", "types", "functools", "jax", "jaxlib", "numpy", "ml_dtypes")
# But for those that hold whatever they are given: somebody may make nodes of them, and what
# they hold may lead to the function, whose table the garbage collector does not look into.
_HOLDERS = (
    functools.partial,
    slice,
    frozenset,
    types.MethodType,
    types.SimpleNamespace,
)
_IS_HEAP_TYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`


def _is_lasting(kind: type) -> bool:
    module = kind.__module__
    if not isinstance(module, str) or module.split(".")[0] not in _LASTING:
        return False
    if issubclass(kind, _HOLDERS):
        return False
    # A class can have the name of a package in which it is not.
    is_in_module = getattr(sys.modules.get(module), kind.__qualname__, None) is kind
    return is_in_module or not kind.__flags__ & _IS_HEAP_TYPE


def _flatten_static(key: Any) -> Callable[[Any], tuple[Any, Any]]:
    if key is None:
        return lambda value: ((), value)
    return _flatten_by(lambda value: ((), value), key)


def _flatten_by(level_of: Any, key: Any) -> Callable[[Any], tuple[Any, Any]]:
    def flatten(x):
        children, structure = level_of(x)
        try:
            return children, key(structure)
        except WITHOUT_VALUE:  # what may change does not stand for itself
            return (UNKNOWN,), None

    return flatten


class Fixed:
    """A node that unflattens to a value, whatever the data are."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


jtu.register_pytree_node(Fixed, lambda fixed: ((), fixed.value), lambda value, _: value)


def _not_to_be_built(structure: Hashable, children: Any) -> Any:
    raise TypeError("The arguments of a call are taken apart, not built.")


def find(pjit: Any) -> Dispatch | None:
    """What `jax` and this `pjit` allow; `None` if they have changed."""
    try:
        state: Any = jax.jit(self_test_of_equinox_like).__getstate__()
        return Dispatch(state, pjit) if works(Dispatch(state, pjit)) else None
    except Exception:
        return None


def self_test_of_equinox_like(x: jax.Array) -> jax.Array:
    return x + x


def works(dispatch: Dispatch) -> bool:
    """Whether kinds of call become quick, are told apart, and return what they should.

    Also whether what is known is asked for again in a trace, where it would be wrong to
    donate.
    """
    jitted, asked = jax.jit(self_test_of_equinox_like), []

    def miss(x, name):
        asked.append(name)
        out, quick, again = dispatch.run(jitted, (x,))
        out = {"out": out, "name": name}
        return out, dispatch.returning(quick, out, is_data), again

    def is_data(x):
        return isinstance(x, jax.Array)

    x = jax.device_put(np.ones(3))  # transfers may have to be explicit
    dispatch.learn((x, "name", 1, True), is_data, lambda kind, is_node: None)
    function = dispatch.function("equinox_like", self_test_of_equinox_like, miss, 8)
    names = ["a", "a", "b", 1, True, "a", "b", 1, True]
    outs = [function(x, name) for name in names]
    jax.eval_shape(lambda: function(x, "b")["out"])
    return (
        asked == ["a", "b", 1, True, "b"]
        and [type(n) for n in asked] == [str, str, int, bool, str]
        and all(out["name"] is name for out, name in zip(outs, names, strict=True))
        and all(jax.device_get(out["out"]).tolist() == [2, 2, 2] for out in outs)
    )


def dispatch() -> Dispatch | None:
    """That of the JAX that is installed, unless the environment asks for public names.

    **Raises:**

    `NotYet` while it is looked for, and where no thread can be started to look.
    """
    if DISPATCH != "jax":
        return None
    if not _found:
        # Who waits may be who is waited for: in a signal's handler.
        if not _lock.acquire(blocking=False):
            raise NotYet
        try:
            if not _found:
                # In a thread of its own, which is under no trace and in no context.
                thread = threading.Thread(target=_look)
                try:
                    thread.start()
                except RuntimeError:  # as the interpreter shuts down, say
                    raise NotYet from None
                thread.join()
        finally:
            _lock.release()
    return _found[0]


class NotYet(Exception):
    """Of asking for the dispatch while it is looked for."""


def _look() -> None:
    found = None
    try:
        with contextlib.ExitStack() as stack:
            # These may be set for the whole process.
            for name in (
                "log_compiles",
                "disable_jit",
                "no_tracing",
                "no_execution",
                "debug_key_reuse",
            ):
                stack.enter_context(getattr(jax, name)(False))
            found = find(importlib.import_module("jaxlib._jax").pjit)
    except (ImportError, AttributeError):
        pass
    finally:
        _found.append(found)


_found: list[Dispatch | None] = []
_lock = threading.Lock()
