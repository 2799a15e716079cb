"""`Context`: a value set by a `with`, read by the code within, part of JAX's cache key.

JAX keeps the value of `jax.make_user_context` for each thread, and compares it with
`==` when it looks up a compiled function. We store a `_Values` there, which maps contexts
to an `_Entered`. Values that are strictly the same share one `_Entered`, and equal maps
one `_Values`; both are compared by identity. So `1` and `True` do not share a trace, and
a comparison costs no Python call.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, ParamSpec, TypeVar

import jax

from .._tree.intern import Interned, InternTable
from .._tree.strict import strict_key

_V = TypeVar("_V")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Entered(Interned):
    """A value that a context was entered with."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


class _Values(Interned):
    """What the contexts were entered with, without those at their default."""

    __slots__ = ("entered",)

    def __init__(self, entered: dict["Context[Any]", _Entered]):
        self.entered = entered

    def __repr__(self) -> str:
        return repr({context.name: x for context, x in self.entered.items()})


_entered: Final[InternTable[_Entered]] = InternTable()
_values: Final[InternTable[_Values]] = InternTable()
# One for all contexts, because JAX compiles everything again once there is a new one. Its
# value is a `_Values`, or `None` if all contexts have their defaults.
_current: Final[Any] = jax.make_user_context(None)


class Context(Generic[_V]):
    """A value that any function can read, and that a `with` statement changes.

    The value is part of the cache key of every compiled function, filtered or not: a
    function is traced once for each value with which it is called. So it may read the
    value while it is traced, and branch on it.

    Each thread has its own value, and starts with the default. Make a context once, at the
    top level of a module.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        use_approximation = eqx.Context(False, name="use_approximation")

        @jax.jit
        def act(x):
            return jax.nn.gelu(x, approximate=use_approximation.value)

        exact = act(jnp.ones(3))
        with use_approximation(True):
            approximate = act(jnp.ones(3))
        assert not jnp.array_equal(exact, approximate)
        assert use_approximation.value is False
        ```
    """

    def __init__(self, default: _V, *, name: str = "context"):
        """**Arguments:**

        - `default`: the value outside of any `with`. It needs a hash.
        - `name`: what `explain` calls the context.

        **Raises:**

        `TypeError` if `default` has no hash.
        """
        self.name = name
        self.default = default
        self._default_key = self._key(default)

    @property
    def value(self) -> _V:
        """The value of the innermost `with` of this thread, or the default."""
        values = _current.value
        entered = None if values is None else values.entered.get(self)
        return self.default if entered is None else entered.value

    def __call__(self, value: _V) -> "Entering":
        """**Arguments:**

        - `value`: what to set. It needs a hash and an `==`, and must not change.

        **Returns:**

        A context manager that sets the value, and a decorator of functions, `async` ones
        too, that are to run within it. It can be entered again, even within itself.

        **Raises:**

        `TypeError` if `value` has no hash, or a generator is decorated. `RuntimeError` at
        the end of a `with` that was around an `await`, or began in another thread.
        """
        key = self._key(value)
        if key == self._default_key:
            return Entering(self, None)
        return Entering(self, _entered.find(key, lambda: _Entered(value)))

    def _key(self, value: Any) -> Any:
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"A value of the context `{self.name}` must be hashable, since it is "
                f"part of JAX's cache key; got {value!r} of type "
                f"{type(value).__name__}. Use a tuple instead of a list, a frozen "
                "dataclass instead of a dictionary, and pass arrays as arguments."
            ) from error
        return strict_key([value])

    def __repr__(self) -> str:
        return f"Context({self.default!r}, name={self.name!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"The context `{self.name}` cannot be copied or pickled: there is one for "
            "the whole process. Import it from the module that defines it."
        )


class Entering:
    """A [`equinox_like.Context`][] with a value to set: for `with`, or as decorator."""

    def __init__(self, context: Context[Any], entered: _Entered | None):
        self._context = context
        self._entered = entered

    def __enter__(self) -> None:
        _stack.push(self, _Suspension())

    def __exit__(self, *exception: object) -> None:
        context = self._context
        was_alone = _stack.pop(self)
        if exception[0] is None and not was_alone:
            raise RuntimeError(
                f"The context `{context.name}` was entered around an `await`, or around "
                "the `yield` of a generator. JAX keeps its value per thread, so other "
                "code that ran in the meantime saw it too. Enter it between two "
                "`await`s or `yield`s, or decorate an `async` function with it, which "
                "sets it for that task alone."
            )

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Decorates a function, so that each call of it runs within the context."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args, **kwargs):
                return await _Steps(self, function(*args, **kwargs))

            return call_async  # pyright: ignore[reportReturnType]
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(
            function
        ):
            raise TypeError(
                f"The context `{self._context.name}` cannot decorate a generator, "
                "which runs in the context of the code that asks for its next value. "
                "Use `with` inside the generator, around code that does not `yield`."
            )

        @functools.wraps(function)
        def call(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return call


class _Stack(threading.local):
    """The `with` blocks of one thread, innermost last."""

    def __init__(self) -> None:
        self._stack: list[tuple[Entering, Any, _Suspension]] = []

    def push(self, entering: Entering, suspension: "_Suspension") -> None:
        # A new JAX context manager each time. One that is entered twice loses the value
        # to restore.
        setting = within(_with(_current.value, entering))
        setting.__enter__()
        self._stack.append((entering, setting, suspension))

    def pop(self, entering: Entering) -> bool:
        """Leaves `entering`; returns whether no other task can have seen its value."""
        if all(each is not entering for each, _, _ in self._stack):
            raise RuntimeError(
                f"The context `{entering._context.name}` was entered in another thread. "
                "Leave it there: a `with` block must begin and end in one thread."
            )
        inner = []
        while True:
            found, setting, suspension = self._stack.pop()
            setting.__exit__(None, None, None)
            if found is entering:
                break
            inner.append((found, suspension))
        for each in reversed(inner):
            self.push(*each)
        return suspension.is_absent() and all(
            each._context is not entering._context for each, _ in inner
        )


_stack: Final = _Stack()


def _with(values: _Values | None, entering: Entering) -> _Values | None:
    """The values after `entering`."""
    entered = {} if values is None else dict(values.entered)
    if entering._entered is None:
        entered.pop(entering._context, None)
    else:
        entered[entering._context] = entering._entered
    if not entered:
        return None
    return _values.find(frozenset(entered.items()), lambda: _Values(entered))


class _Suspension:
    """Records whether the current `asyncio` task has been suspended since it was made."""

    __slots__ = ("_handle", "_happened")

    def __init__(self) -> None:
        self._happened = False
        loop = asyncio._get_running_loop()
        # If the task suspends, the event loop calls this before resuming it.
        self._handle = None if loop is None else loop.call_soon(self._note)

    def _note(self) -> None:
        self._happened = True

    def is_absent(self) -> bool:
        if self._handle is not None:
            self._handle.cancel()
        return not self._happened


class _Steps:
    """Awaits a coroutine, and enters a context around each of its steps."""

    def __init__(self, entering: Entering, coroutine: Any):
        self._entering = entering
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, step, value = self._coroutine, self._coroutine.send, None
        while True:
            try:
                with self._entering:
                    out = step(value)
            except StopIteration as stop:
                return stop.value
            try:
                step, value = coroutine.send, (yield out)
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                step, value = coroutine.throw, error


def values_here() -> dict[Context[Any], Any]:
    """The value of each context that is not at its default in this thread."""
    values = _current.value
    if values is None:
        return {}
    return {context: x.value for context, x in values.entered.items()}


def entered_here() -> _Values | None:
    """What `within` takes to set all contexts to the values that they have now.

    It has a hash, and is the same object for the same values.
    """
    return _current.value


def within(values: _Values | None) -> AbstractContextManager[Any]:
    """Sets all contexts to the values that they had at `entered_here()`."""
    return _current(values)


def in_context_of_now(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, which will run with the values that all contexts have now.

    For derivative rules, which JAX calls later.
    """
    entered = entered_here()

    @functools.wraps(function)
    def call(*args, **kwargs):
        with within(entered):
            return function(*args, **kwargs)

    return call
