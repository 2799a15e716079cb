"""`Context`: a value set by a `with`, read by the code within, part of JAX's cache key.

JAX keeps the value of `jax.make_user_context` for each thread, and compares it with
`==` when it looks up a compiled function. We store a `_Values` there, which maps contexts
to what they were entered with. Maps of values that are strictly the same share one
`_Values`, which is compared by identity. So `1` and `True` do not share a trace, and a
comparison costs no Python call.

`inference` and `training` are such a context. A layer whose own flag is `None` obeys it.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, Final, Generic, ParamSpec, TypeVar

import jax

from .._module import Module
from .._tree.nodes import describe_node
from .._tree.strict import Interned, InternTable, strict_key

_V = TypeVar("_V")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Values(Interned):
    """What the contexts were entered with, without those at their default."""

    __slots__ = ("entered",)

    def __init__(self, entered: dict["Context[Any]", "Entering"]):
        self.entered = entered

    def __repr__(self) -> str:
        return repr({context.name: x.value for context, x in self.entered.items()})


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

        A context manager that sets the value, and a decorator of functions that are to
        run within it. It can be entered again, even within itself.

        **Raises:**

        `TypeError` if `value` has no hash, or if a generator or an `async` function is
        decorated. `RuntimeError` at the end of a `with` if another context was entered
        last, or the `with` began in another thread.
        """
        key = self._key(value)
        return Entering(self, value, None if key == self._default_key else key)

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


class Entering(ContextDecorator):
    """A [`equinox_like.Context`][] with a value to set: for `with`, or as decorator."""

    def __init__(self, context: Context[Any], value: Any, key: Any):
        """`key` is the `strict_key` of the value, `None` for the default."""
        self._context = context
        self.value = value
        self.key = key

    def __enter__(self) -> None:
        # A new JAX context manager each time. One that is entered twice loses the value
        # to restore.
        setting = within(_with(_current.value, self))
        setting.__enter__()
        _thread.entered.append((self, setting))

    def __exit__(self, *exception: object) -> None:
        entered, inner = _thread.entered, []
        if all(each is not self for each, _ in entered):
            raise RuntimeError(
                f"The context `{self._context.name}` was entered in another thread. "
                "Leave it there: a `with` block must begin and end in one thread."
            )
        while True:
            last, setting = entered.pop()
            setting.__exit__(None, None, None)
            if last is self:
                break
            inner.append(last)
        for each in reversed(inner):
            each.__enter__()
        if inner and exception[0] is None:
            raise RuntimeError(
                f"The context `{self._context.name}` was left before one that was "
                "entered later, so code that ran in the meantime saw its value. Do not "
                "enter a context around an `await`, or around the `yield` of a generator."
            )

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Decorates a function, so that each call of it runs within the context."""
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"The context `{self._context.name}` cannot decorate a generator or an "
                "`async` function: other code that runs at a `yield` or `await` would "
                "see its value. Use `with` inside the function, around code that has "
                "neither."
            )
        return super().__call__(function)


class _Thread(threading.local):
    """The `with` blocks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.entered: list[tuple[Entering, Any]] = []


_thread: Final = _Thread()


def _with(values: _Values | None, entering: Entering) -> _Values | None:
    """The values after `entering`."""
    entered = {} if values is None else dict(values.entered)
    entered.pop(entering._context, None)
    if entering.key is not None:
        entered[entering._context] = entering
    if not entered:
        return None
    key = frozenset((context, x.key) for context, x in entered.items())
    return _values.find(key, lambda: _Values(entered))


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


_Flag = TypeVar("_Flag")

_inference: Final[Context[bool]] = Context(False, name="inference")


def inference() -> Entering:
    """A context in which layers with the flag `inference=None` are in inference mode.

    Layers are constructed with the flag `False`. To have them follow the context, use
    `nn.inference_mode(model, None)`, or construct them with `inference=None`. A flag
    that is `True` or `False` takes precedence over the context, and so does the
    argument of a call.

    **Returns:**

    A context manager, which decorates functions, too. See [`equinox_like.Context`][]:
    compiled functions are retraced once, and each thread has its own.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.inference_mode(eqx.nn.Dropout(0.5), None)
        x = jnp.ones(3)
        dropped = model(x, key=jax.random.key(0))
        with eqx.inference():
            assert model(x) is x
        ```
    """
    return _inference(True)


def training() -> Entering:
    """A context in which layers with the flag `inference=None` are in training mode.

    That is the default, so this is only needed within [`equinox_like.inference`][].

    **Returns:**

    A context manager, which decorates functions, too.

    !!! example

        ```python
        import equinox_like as eqx

        with eqx.inference():
            with eqx.training():
                assert not eqx.is_inference()
            assert eqx.is_inference()
        ```
    """
    return _inference(False)


def is_inference(*flags: _Flag | None) -> _Flag | bool:
    """Whether a layer should run in inference mode. Call it in layers that you write.

    **Arguments:**

    - `*flags`: flags that take precedence over the context if they are not `None`, in
        this order. Usually the argument of the call, and then the field of the layer.

    **Returns:**

    The first flag that is not `None`; else `True` within [`equinox_like.inference`][], and
    `False` otherwise.

    **Raises:**

    `TypeError` if a flag is a Module, such as the layer in place of its field.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Noise(eqx.Module):
            scale: float
            inference: bool | None = None

            def __call__(self, x, *, key=None):
                if eqx.is_inference(self.inference):
                    return x
                return x + self.scale * jax.random.normal(key, x.shape)

        with eqx.inference():
            assert (Noise(0.1)(jnp.ones(3)) == 1).all()
        ```
    """
    for flag in flags:
        if isinstance(flag, Module):  # every Module is true
            raise TypeError(
                "`is_inference` takes flags (`True`, `False` or `None`); got "
                f"{describe_node(flag)}. Pass its field, as in "
                "`is_inference(layer.inference)`."
            )
        if flag is not None:
            return flag
    return _inference.value
