"""`filter_jit`: `jax.jit` for any pytrees, at the speed of `jax.jit`.

This file holds the public interface. How a call works is in `program.py`.
"""

import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast

import jax

from .._annotations import signature_of
from .._call_path import outer_call
from .._compat.tracing import at_top_level
from .._core.base import (
    DEPRECATED,
    Transformed,
    check_not_deprecated,
    frames_hidden,
    hide_frames,
    name_of,
)
from .._core.show_as import name_unconverted
from .._module.fields import field
from .._module.instance import show_function
from .._module.wrappers import Partial
from .._tree.arrays import is_concrete
from .._tree.cycles import name_cycle
from .._tree.require import check_options
from .._typing import NOT_GIVEN, JitOptions, MayTakeState
from .checks import holds_check
from .donation import Donate, Donation, check_mode
from .program import Program, Settings, is_opaque, owner_of_programs, program_of
from .report import DonationReport, report_on
from .retrace import Retrace, explain, trace_to_be
from .shardings import OPTIONS, Shardings
from .stages import AheadOfTime, Lowered, Traced, platform_of_call

_P = ParamSpec("_P")
_T = TypeVar("_T")
# The implementations of decorators say that they return the function that they are given,
# for jedi, which completes in editors. It does not know `ParamSpec`: from the overloads it
# would show `step(` as `Jitted(*args: _P.args, **kwargs: _P.kwargs)`. It overlooks these
# where they are marked by `typing.overload`, and not by `overload`.
_F = TypeVar("_F")
_Y = TypeVar("_Y", covariant=True)


@typing.overload
def filter_jit(
    fun: "MayTakeState[_T]", *, donate: Donate = "none", **jitkwargs: Unpack[JitOptions]
) -> "_JittedLayer[_T]": ...
@typing.overload
def filter_jit(
    fun: Callable[_P, _T], *, donate: Donate = "none", **jitkwargs: Unpack[JitOptions]
) -> "Jitted[_P, _T]": ...
@typing.overload
def filter_jit(
    *, donate: Donate = "none", **jitkwargs: Unpack[JitOptions]
) -> "Callable[[Callable[_P, _T]], Jitted[_P, _T]]": ...
def filter_jit(fun: _F = NOT_GIVEN, *, donate: Any = "none", **jitkwargs: Any) -> _F:
    """`jax.jit` for any pytrees: arrays are traced, everything else is static.

    Traced are the arrays of JAX and NumPy in the arguments and in `fun`, at any depth. A
    call with other values in them runs the same program. Static are Python numbers,
    strings, functions, `None`, static fields, and so on. The program is compiled for their
    values: with another one, it is compiled again.

    **Arguments:**

    - `fun`: the function to compile, or a Module, a method, a partial, ... The arrays of a
        callable pytree are traced, too. Without `fun` a decorator is returned, as in
        `@filter_jit(donate="arrays")`.
    - `donate`: which arrays are donated, so that outputs may reuse their buffers. The
        call deletes a donated array if its buffer could be reused. An array whose memory
        NumPy holds is copied and stays alive, in each mode, as with `jax.jit`.
        - `"none"`: no array.
        - `"arrays"`, alias `"all"`: every JAX array in the arguments. An array whose
            buffer no output can reuse stays alive.
        - `"all-except-first"`: the same, except for arrays in the first parameter of the
            signature, however it is passed; of `*args`, in the first one.
        - `"warn"`, `"warn-except-first"`: likewise, and a
            [`equinox_like.DonationWarning`][] names the arrays that no output can take,
            once for each compilation, before execution.
        - `"strict"`: as `"arrays"`, but an array that no output can reuse raises an
            error before execution.
        - a tuple of names of parameters, `("model", "opt_state")`: the arrays in these.
            An array that no output can reuse causes a warning, and is deleted, too.

        The arrays of `fun` itself are never donated, nor is anything under another
        transformation. For a method decorated in a class, `self` is the first argument.

    - `**jitkwargs`: as for `jax.jit`, for example `inline` or `compiler_options`.
        `in_shardings` and `out_shardings` are prefix trees of the tuple of positional
        arguments and of the output; their leaves are shardings, `PartitionSpec`s or
        `None`. Leaves without a matching array are skipped.

    **Returns:**

    A callable like `fun`. It compiles once for each combination of shapes, dtypes,
    structure and static values, where values of different type differ (`1`, `1.0`,
    `True`). The output may hold anything: each value that is not an array is the object
    that `fun` returned when it was traced. Like `jax.jit` it does not wait for the
    result, unless the program contains an [`equinox_like.error_if`][].

    Its methods `.trace`, `.lower`, `.eval_shape`, `.donation_report` and `.explain` take
    the arguments of a call, with `jax.ShapeDtypeStruct`s in place of arrays if you like,
    and do not run it. `.clear_cache()` drops the compiled programs.

    **Raises:**

    When wrapping: `TypeError` if `fun` cannot be called, `ValueError` for another
    `donate`, for `static_argnums`, `donate_argnums` and the like, and for
    `in_shardings` that do not fit the parameters. When called: `ValueError` naming the
    path of a static leaf that cannot be hashed; [`equinox_like.DonationError`][] naming
    the path of an array that has been donated before, or the paths of two arrays that
    share a buffer and would both be donated.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_jit(donate="arrays")
        def update(params, rate, name):
            return {k: (1 - rate) * v for k, v in params.items()}, name

        params = {"w": jnp.ones(3)}
        new_params, name = update(params, 0.1, "first")
        assert params["w"].is_deleted() and name == "first"
        ```
    """
    check_mode(donate)
    _check_jitkwargs(jitkwargs)
    if fun is NOT_GIVEN:
        return cast(Any, lambda fun: filter_jit(fun, donate=donate, **jitkwargs))
    return cast(Any, Jitted(fun, donate, jitkwargs))


# What the function has, and a method of an instance does not: a compiled stage would take
# the instance again.
_OF_THE_FUNCTION = ("trace", "lower", "eval_shape", "explain", "donation_report")


class JittedMethod(Partial[Any]):
    """A compiled method of an instance. Calls skip `Partial.__call__`, for speed."""

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_THE_FUNCTION:
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")
        method = f"{type(self.args[0]).__name__}.{name_of(self.func)}"
        raise AttributeError(
            f"A compiled method of an instance has no `{name}`: write "
            f"`{method}.{name}(instance, ...)`."
        )

    @outer_call
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted: Any = self.func
        if type(jitted) is not Jitted or self.keywords:  # not made by attribute access
            return super().__call__(*args, **kwargs)
        try:
            return jitted._program.call((jitted._tree, (*self.args, *args), kwargs))
        except Exception as e:
            hide_frames(e)
            name_unconverted(e, None, (jitted, *self.args, *args), kwargs)
            name_cycle(e, jitted.__wrapped__, (*self.args, *args), kwargs)
            raise


show_function(JittedMethod)


class Jitted(Transformed[_P, _T]):
    """The result of [`equinox_like.filter_jit`][]: a compiled function that is a pytree."""

    _transformation_ = "filter_jit"
    _binds_as_ = JittedMethod

    _program: Program = field(static=True)
    # Keeps the program where other wrappers of an equal callable find it, so that these
    # have the same treedef.
    _owner: Any = field(static=True)

    def __init__(self, fun: Any, donate: Donate, jitkwargs: dict[str, Any]):
        super().__init__(fun)
        if self._tree is not None and is_opaque(self._tree):
            self._tree, self._opaque = None, self._tree
        name = name_of(fun)
        signature = signature_of(fun)
        Donation(donate).check_names(signature, name)
        shardings = None
        if any(option in jitkwargs for option in OPTIONS):
            shardings = Shardings(jitkwargs, name, signature)
        settings = Settings(name, signature, donate, jitkwargs, shardings)
        self._owner = owner_of_programs(self._tree)
        self._program = program_of(self._held_, self._tree, settings)

    @outer_call
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return self._program.call((self._tree, args, kwargs))
        except Exception as e:
            hide_frames(e)
            name_unconverted(e, None, (self, *args), kwargs)
            name_cycle(e, self.__wrapped__, args, kwargs)
            raise

    @frames_hidden
    def trace(self, /, *args: Any, **kwargs: Any) -> Traced[_P, _T]:
        """Traces for these arguments, without compiling or running.

        Arguments are as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        """
        call = self._program.prepare((self._tree, args, kwargs))
        # Not the leaves themselves: a stage may live long and would keep their memory.
        named = call.layout.named_leaves(list(map(_struct_of, call.leaves)))
        traced = call.stage("trace")
        waits, platform = holds_check(traced.jaxpr), platform_of_call(call.leaves)
        stage = AheadOfTime(
            self, call.specialization, call.layout, named, platform, waits
        )
        return Traced(traced, stage)

    @frames_hidden
    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered[_P, _T]:
        """Traces and lowers for these arguments, without compiling or running.

        Arguments are as for a call; a `jax.ShapeDtypeStruct` may stand for an array.
        """
        return self.trace(*args, **kwargs).lower()

    @frames_hidden
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The output with a `jax.ShapeDtypeStruct` in place of each array.

        Nothing is compiled or run. A `jax.ShapeDtypeStruct` may stand for an array.
        """
        call = self._program.prepare((self._tree, args, kwargs))
        return call.specialization.fill(call.stage("eval_shape"))

    @frames_hidden
    def explain(self, /, *args: Any, **kwargs: Any) -> Retrace | None:
        """Why a call would be retraced, or `None` if it would not be.

        Compares with the traces that this function has, and names the differences to the
        nearest one. Nothing is traced or run. Arguments are as for a call; a
        `jax.ShapeDtypeStruct` may stand for an array. An array that differs only in how
        `Auto` axes of a mesh shard it is recompiled without a retrace, which this does not
        report.
        """
        program = self._program
        if program.donation.is_any and not at_top_level():
            program = program.without_donation
        trace = trace_to_be(*program.layout_of((self._tree, args, kwargs)))
        before = program.traces()
        if any(old.serves(trace) for old in before):
            return None
        return explain(name_of(self.__wrapped__), trace, before)

    @frames_hidden
    def donation_report(self, /, *args: Any, **kwargs: Any) -> DonationReport:
        """What a call would donate, leaf by leaf, and what XLA makes of it.

        Compiles for these arguments, but runs and deletes nothing. Arguments are as for a
        call; a `jax.ShapeDtypeStruct` may stand for an array.
        """
        return report_on(self.lower(*args, **kwargs), repr(self))

    def clear_cache(self) -> None:
        """Drops what was compiled for this function, also by other wrappers of it.

        For a callable pytree, drops what was compiled for all pytrees of its structure.
        """
        self._program.clear()
        if self._program.donation.is_any:
            self._program.without_donation.clear()

    def _shown_around_(self) -> tuple[str, str]:
        start, end = super()._shown_around_()
        return start, f", donate={self._program.donate!r}{end}"

    def _made_by_(self) -> tuple[Any, tuple[Any, ...]]:
        # Not `__wrapped__`, which for `filter_pmap` is the function before that.
        program = self._program
        return type(self), (self._held_, program.donate, program.jitkwargs)

    __reduce__ = _made_by_


if TYPE_CHECKING:

    class _JittedLayer(MayTakeState[_Y], Jitted[..., Any]): ...


def _struct_of(x: Any) -> Any:
    """A `jax.ShapeDtypeStruct` in place of a JAX array."""
    if not isinstance(x, jax.Array):
        return x
    sharding = x.sharding if is_concrete(x) and x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


_REFUSED = {
    "static_argnums": "whatever is not an array is static already",
    "static_argnames": "whatever is not an array is static already",
    "donate_argnums": "use `donate=`",
    "donate_argnames": "use `donate=`",
}


def _check_jitkwargs(jitkwargs: dict[str, Any]) -> None:
    for name, fix in _REFUSED.items():
        if name in jitkwargs:
            raise ValueError(f"`filter_jit` does not take `{name}`: {fix}.")
    check_not_deprecated("filter_jit", DEPRECATED, jitkwargs, "")
    options = {k: v for k, v in jitkwargs.items() if k not in OPTIONS}
    check_options(options, "filter_jit", jax.jit, ["donate"])
    if options:
        jax.jit(lambda: None, **options)  # raises for invalid values
