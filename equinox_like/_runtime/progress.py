"""Progress meters: show the progress of a loop from within a compiled program.

Python is called by pure callbacks. Each takes the number of the meter, which is part of
the state, from the one before, and returns it. This data dependency makes them run in
the order of the loop, on any number of devices. They can be transformed like any other
computation.
"""

import abc
import importlib
import itertools
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._module import Module, field
from .._typing import ArrayLike
from .primitives import unvmap_all, unvmap_max

_State = TypeVar("_State")


class AbstractProgressMeter(Module, Generic[_State]):
    """Abstract base class of meters that show the progress of a loop.

    The state that `init` and `step` return is a pytree of arrays, for the carry of a
    loop. It must be passed on to `close`, because steps that nothing depends on are
    removed as dead code. A batch of loops under `jax.vmap` has one meter, which shows
    the slowest loop.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        @jax.jit
        def sum_of_roots(xs, meter):
            def body(i, carry):
                total, state = carry
                return total + jnp.sqrt(xs[i]), meter.step(state, (i + 1) / xs.size)

            init = jnp.asarray(0.0), meter.init()
            total, state = jax.lax.fori_loop(0, xs.size, body, init)
            meter.close(state)
            return total

        meter = eqx.internal.TextProgressMeter(minimum_increase=0.25)
        assert sum_of_roots(jnp.ones(10), meter) == 10
        jax.effects_barrier()  # until all lines are printed
        ```
    """

    @abc.abstractmethod
    def init(self) -> _State:
        """Starts the meter, at 0 %.

        **Returns:**

        The state for the first `step`.
        """

    @abc.abstractmethod
    def step(self, state: _State, progress: ArrayLike) -> _State:
        """Shows the progress, unless too little has changed.

        **Arguments:**

        - `state`: from `init` or the last `step`.
        - `progress`: between 0 and 1, a Python number or an array of shape `()`. It is not
            differentiated.

        **Returns:**

        The state for the next `step` or for `close`, of the same structure.

        **Raises:**

        `ValueError` by the meters here, if `progress` has another shape.
        """

    @abc.abstractmethod
    def close(self, state: _State) -> None:
        """Ends the meter, at 100 %.

        Later steps are ignored, such as those of a loop that is recomputed in a
        backward pass.

        **Arguments:**

        - `state`: from the last `step`, or from `init`.
        """


class NoProgressMeter(AbstractProgressMeter[None]):
    """Shows nothing."""

    def init(self) -> None:
        return None

    def step(self, state: None, progress: ArrayLike) -> None:
        return None

    def close(self, state: None) -> None:
        pass


class _TextState(NamedTuple):
    number: jax.Array
    # The progress when the last line was printed, for each element of a batch.
    printed: jax.Array


class TextProgressMeter(AbstractProgressMeter[_TextState]):
    """Prints the progress to standard output, as lines such as `20.00%`.

    **Arguments:**

    - `minimum_increase`: the least increase of the progress since the last line, for
        another line to be printed. In a batch, each element that has not reached 1 must
        have increased by this much.
    """

    minimum_increase: float = field(default=0.02, static=True)

    def init(self) -> _TextState:
        return _TextState(_open(_Lines), jnp.zeros((), jnp.float32))

    def step(self, state: _TextState, progress: ArrayLike) -> _TextState:
        number, printed = state
        progress = _without_tangent(progress)
        has_grown = progress - printed > self.minimum_increase
        is_due = unvmap_all(has_grown | (progress == 1))
        number = _show_if(is_due, number, progress)
        return _TextState(number, jnp.where(is_due, progress, printed))

    def close(self, state: _TextState) -> None:
        _close(state.number)


class _TqdmState(NamedTuple):
    number: jax.Array
    steps: jax.Array


class TqdmProgressMeter(AbstractProgressMeter[_TqdmState]):
    """Shows the progress as a bar of [tqdm](https://tqdm.github.io), on standard error.

    **Arguments:**

    - `refresh_steps`: the number of steps between updates of the bar.

    **Raises:**

    `ValueError` if tqdm is not installed.
    """

    refresh_steps: int = field(default=20, static=True)

    def __check_init__(self) -> None:
        _tqdm()

    def init(self) -> _TqdmState:
        return _TqdmState(_open(_Bar), jnp.zeros((), jnp.int32))

    def step(self, state: _TqdmState, progress: ArrayLike) -> _TqdmState:
        number, steps = state
        is_due = unvmap_max(steps) % self.refresh_steps == 0
        number = _show_if(is_due, number, _without_tangent(progress))
        return _TqdmState(number, steps + 1)

    def close(self, state: _TqdmState) -> None:
        _close(state.number)


def _tqdm() -> Any:
    try:
        return importlib.import_module("tqdm")
    except ImportError:
        raise ValueError(
            "`TqdmProgressMeter` needs tqdm: `pip install tqdm`, or use "
            "`TextProgressMeter`."
        ) from None


class _Lines:
    """The host side of a meter that prints lines of text."""

    def __init__(self) -> None:
        self._last = ""
        self.show(0.0)

    def show(self, percent: float) -> None:
        line = f"{percent:.2f}%"
        if line != self._last:
            print(line)
            self._last = line

    def close(self) -> None:
        self.show(100.0)


class _Bar:
    """The host side of a meter that shows a tqdm bar."""

    def __init__(self) -> None:
        form = "{percentage:.2f}%|{bar}| [{elapsed}<{remaining}, {rate_fmt}]"
        self._bar = _tqdm().tqdm(total=100, unit="%", bar_format=form)

    def show(self, percent: float) -> None:
        self._bar.n = percent
        self._bar.refresh()

    def close(self) -> None:
        self._bar.n = 100
        self._bar.close()


# The open meters, by their numbers. The lock is held while they print.
_meters: dict[int, Any] = {}
_numbers = itertools.count()
_lock = threading.RLock()
_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def _open(meter: Callable[[], Any]) -> jax.Array:
    def on_host(_):
        with _lock:
            number = next(_numbers)
            _meters[number] = meter()
        return np.asarray(number, np.int32)

    # The compiler would start the meter of a loop in a loop only once, as it moves what is
    # the same in each step out of the loop. It does not move a random number.
    return jax.pure_callback(on_host, _NUMBER, lax.rng_uniform(0.0, 1.0, shape=()))


def _show_if(is_due: jax.Array, number: jax.Array, progress: jax.Array) -> jax.Array:
    def on_host(number, progress):
        with _lock:
            if meter := _meters.get(int(number)):
                meter.show(100 * float(progress))
        return np.asarray(number, np.int32)

    def show(number, progress):
        return jax.pure_callback(on_host, _NUMBER, number, progress)

    # Under `vmap` of a `while_loop`, the number is batched, with equal elements.
    number, slowest = unvmap_max(number), -unvmap_max(-progress)
    return lax.cond(is_due, show, lambda number, _: number, number, slowest)


def _close(number: jax.Array) -> None:
    def on_host(number):
        with _lock:
            if meter := _meters.pop(int(number), None):
                meter.close()

    jax.debug.callback(on_host, unvmap_max(number))


def _without_tangent(progress: ArrayLike) -> jax.Array:
    if jnp.shape(progress) != ():
        raise ValueError(
            "`progress` must be a number, or an array of shape (); got one of shape "
            f"{jnp.shape(progress)}."
        )
    return lax.stop_gradient(jnp.asarray(progress, jnp.float32))
