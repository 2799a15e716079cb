"""Ahead of time: `filter_jit(f).trace(...)`, `.lower(...)` and `.compile()`.

JAX's own stages, and beside them the call they were made for: its arguments give what
JAX tells of flat arrays the user's structure again, and a compiled program, which has the
static ones baked in, is called with the same ones or not at all.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from .._compat.lowered import Buffer, buffers_of
from .._compat.trace_state import at_top_level
from .._core.base import hide_frames
from .._core.difference import differences
from .._core.pack import unpack
from .._errors import DonationError
from .._tree.split import STATIC, Skeleton
from .checks import explained, wait_for
from .donation import (
    Donation,
    Record,
    are_all_deleted,
    are_any_deleted,
    in_vain,
    is_deleted,
    muted,
    refuse_gone,
    still_alive,
)
from .plan import Plan
from .quick import IN_PYTHON, MANY, MANY_DONATING, Miss, make_quick

_P = ParamSpec("_P")
_T = TypeVar("_T")

Trees = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass
class Call:
    """The call that stages are made for."""

    # The `Jitted`, and how its arguments become a call: `(args, kwargs) -> plan, leaves`.
    jitted: Any
    arrange: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Plan, list[Any]]]
    plan: Plan
    skeleton: Skeleton
    # What to say of leaves that are donated in vain, where to tell of those that are gone,
    # and the leaves: see `Plan.named_leaves`.
    donation: Donation
    record: Record
    named: Sequence[tuple[str, Any, bool]]
    # Of the first argument that is bound to a device, else of JAX's default.
    platform: str
    # Whether a call waits, as the program holds a check.
    waits: bool = False

    def arguments(self, info: Trees, static: Callable[[Any], Any]) -> Trees:
        """`args` and `kwargs` with what JAX tells of each array in its place."""
        groups, _ = info
        skeleton = self.skeleton
        data = itertools.chain.from_iterable(groups)
        statics = map(static, skeleton.statics)
        leaves = [next(statics if x is STATIC else data) for x in skeleton.labels]
        _, args, kwargs = skeleton.treedef.unflatten(leaves)
        return args, kwargs


class _Stage(Generic[_P, _T]):
    _call: Call

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} belongs to this process and cannot be pickled. `filter_export` "
            "makes bytes of a function; what `filter_jit` returns can itself be pickled."
        )


class Traced(_Stage[_P, _T]):
    """A function traced for certain arguments; from `filter_jit(f).trace(...)`.

    `traced` is JAX's own object.
    """

    def __init__(self, traced: Any, call: Call):
        self.traced = traced
        self._call = call

    @property
    def jaxpr(self) -> Any:
        """The traced program, a closed jaxpr of flat arrays."""
        return self.traced.jaxpr

    @property
    def args_info(self) -> Trees:
        """`(args, kwargs)` with shape, dtype and donation in place of each array."""
        return self._call.arguments(self.traced.args_info, _itself)

    @property
    def out_info(self) -> Any:
        """The output, with a `jax.ShapeDtypeStruct` in place of each array."""
        return unpack(self.traced.out_info)

    def lower(
        self, lowering_platforms: tuple[str, ...] | None = None
    ) -> "Lowered[_P, _T]":
        """Lowers to StableHLO: for this host, or for the platforms that are named.

        Those may be others than the host has, `("tpu",)` for example. What was lowered for
        others can be looked at, but not compiled.
        """
        # JAX warns of donated buffers while it lowers, see `donation.py`.
        muted.begin()
        try:
            lowered = self.traced.lower(lowering_platforms=lowering_platforms)
        finally:
            muted.end()
        return Lowered(lowered, self._call, lowering_platforms)

    def __repr__(self) -> str:
        return f"<traced {self._call.jitted!r}>"


class Lowered(_Stage[_P, _T]):
    """A function lowered for certain arguments; from `filter_jit(f).lower(...)`.

    `lowered` is JAX's own object.
    """

    def __init__(self, lowered: Any, call: Call, platforms: tuple[str, ...] | None):
        self.lowered = lowered
        self._call = call
        self._platforms = platforms

    @property
    def args_info(self) -> Trees:
        """`(args, kwargs)` with shape, dtype and donation in place of each array."""
        return self._call.arguments(self.lowered.args_info, _itself)

    @property
    def out_info(self) -> Any:
        """The output, with a `jax.ShapeDtypeStruct` in place of each array."""
        return unpack(self.lowered.out_info)

    def as_text(self, dialect: str | None = None) -> str:
        """The program as text, in StableHLO if no other dialect is named."""
        return self.lowered.as_text(dialect)

    def cost_analysis(self) -> Any:
        """XLA's estimate of the operations and bytes of one call."""
        return self.lowered.cost_analysis()

    def compile(
        self, compiler_options: dict[str, Any] | None = None
    ) -> "Compiled[_P, _T]":
        """Compiles for the platform of this host.

        **Raises:**

        `ValueError` if it was lowered for another platform, or for more than one.
        """
        platform = self._call.platform
        if self._platforms is not None and set(self._platforms) != {platform}:
            raise ValueError(
                f"{self!r} was lowered for {', '.join(map(repr, self._platforms))}, and "
                f"this host compiles for {platform!r}. Lower without `lowering_platforms` "
                "to compile here; or use `filter_export` to carry the program to another "
                "host."
            )
        compiled = self.lowered.compile(compiler_options)
        call, buffers = self._call, None
        if call.plan.donates:
            buffers = buffers_of(self.lowered, compiled)
        if call.donation.looks_first:
            call.donation.object_to(in_vain(call.named, buffers))
        return Compiled(compiled, call, buffers)

    def __repr__(self) -> str:
        return f"<lowered {self._call.jitted!r}>"


class Compiled(_Stage[_P, _T]):
    """A compiled function; called like the original, with the same static arguments.

    `compiled` is JAX's own object.

    **Raises:**

    When called: `TypeError` if static arguments, structure, shapes or dtypes are not those
    that it was compiled for, naming the first that differs.
    """

    def __init__(
        self, compiled: Any, call: Call, buffers: Sequence[int | Buffer] | None
    ):
        self.compiled = compiled
        self._call = call
        self._tree = call.jitted._tree
        self._waits = call.waits
        # The last call that was found to fit: its plan, and what was static in it.
        self._fitting: tuple[Plan, Any] = call.plan, _NOTHING
        # How it is called, and how often JAX's dispatch was told of a call.
        self.quick: Any = None
        self._times_quick = 0
        # Where it donates: what becomes of the buffer of each datum, `None` if JAX does not
        # tell; which of the donated ones are right to be alive after a call; and whether
        # they are on several devices (see `Program.before`).
        self._buffers = buffers or [None] * len(call.named)
        self._alive: tuple[int, ...] = ()
        self._is_watched = call.plan.donates and any(
            len(s.device_set) > 1 for s in jtu.tree_leaves(compiled.input_shardings)
        )

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        quick = self.quick
        if quick is None:
            if self._waits or self._is_watched:  # in Python
                quick = IN_PYTHON
            else:
                quick = make_quick(self, repr(self), self._call.plan.donates)
            self.quick = quick
        run = self.call if quick is None or quick is IN_PYTHON else quick
        try:
            return run(self._tree, args, kwargs)
        except Exception as e:
            hide_frames(e)
            raise

    def call(self, tree: Any, args: Any, kwargs: Any, miss: Miss | None = None) -> Any:
        """What JAX's dispatch does in C++, in Python."""
        leaves, treedef = jtu.tree_flatten((tree, args, kwargs))
        plan, statics = self._fitting
        if (
            tuple(map(type, leaves)) != plan.leaf_types
            or treedef != plan.call_treedef
            or plan.static_key(leaves) != statics
        ):
            plan = self._fit(args, kwargs)
        if plan.donates and not at_top_level():
            raise DonationError(
                f"{self!r} donates, and was called under a transformation, which may "
                "still need the arrays. Nothing has run, and nothing was deleted. Call the "
                "function itself, which donates nothing there."
            )
        if self._is_watched and are_any_deleted(leaves):
            refuse_gone(plan.named_leaves(leaves))
        run = self.compiled
        if miss is not None and plan.is_in_order:
            function = miss.dispatch.function_of(run)
            run = run if function is None else miss.way(function)
        try:
            out: Any = run(*plan.groups(leaves))
            if self._waits:
                wait_for(out)
        except Exception as e:
            error = explained(e, plan.named_leaves, leaves)
            if error is e:
                raise
            raise error from None
        if plan.donates:
            self.settle(plan, leaves)
        if miss is None:
            return unpack(out)
        if plan.donates:
            miss.give(plan, leaves, None, self._call.record)
        out = miss.unpack(out)
        self._times_quick += miss.quick is not None
        many = MANY_DONATING if plan.donates else MANY
        if miss.is_settled and (miss.quick is None or self._times_quick > many):
            self.quick = IN_PYTHON
        return out

    def settle(self, plan: Plan, leaves: list[Any], entry: Any = None) -> None:
        """After a call: sees to what it was given."""
        call = self._call
        donated = plan.take_donated(leaves)
        if are_all_deleted(donated):
            call.record.arrays = donated
        else:
            alive = still_alive(donated)
            if alive != self._alive:
                self._alive = call.donation.delete_rest(
                    donated, alive, lambda: plan.take_donated_data(self._buffers)
                )
            call.record.arrays = list(filter(is_deleted, donated))
        call.record.tree_type = type(self._tree)

    def explained(self, error: Exception, call: Any) -> Exception:
        """What to raise for an error of running the program."""
        plan, leaves = self._call.arrange(*call[1:])
        return explained(error, plan.named_leaves, leaves)

    def _fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan for a call of another form, if its static side is the same."""
        call = self._call
        plan, leaves = call.arrange(args, kwargs)
        skeleton = plan.skeleton(leaves)
        if skeleton is not call.skeleton:
            found = differences(
                (call.plan.arguments, call.skeleton), (plan.arguments, skeleton)
            )
            first = next(found, "Other arguments are donated.")
            raise TypeError(
                f"{self!r} was called with other arguments than it was compiled for: "
                f"{first} Compile again for these, or call the function itself, which "
                "does."
            )
        self._fitting = plan, plan.static_key(leaves)
        return plan

    @property
    def args_info(self) -> Trees:
        """`(args, kwargs)` with shape, dtype and donation in place of each array."""
        return self._call.arguments(self.compiled.args_info, _itself)

    @property
    def out_info(self) -> Any:
        """The output, with a `jax.ShapeDtypeStruct` in place of each array."""
        return unpack(self.compiled.out_info)

    @property
    def input_shardings(self) -> Trees:
        """`(args, kwargs)` with a sharding in place of each array, else `None`.

        Arrays that the program does not use have `None`, too.
        """
        return self._call.arguments(self.compiled.input_shardings, _nothing)

    @property
    def output_shardings(self) -> Any:
        """The output, with a sharding in place of each array, else `None`."""
        return unpack(self.compiled.output_shardings, _nothing)

    def as_text(self) -> str:
        """The compiled program as text."""
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        """XLA's count of bytes: arguments, outputs, aliased and temporary."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's estimate of the operations and bytes of one call."""
        return self.compiled.cost_analysis()

    def __repr__(self) -> str:
        return f"<compiled {self._call.jitted!r}>"


# Equal to the static values of no call.
_NOTHING = object()


def platform_of(leaves: Sequence[Any]) -> str:
    """The platform that a call with these leaves is compiled for, as lowering names it."""
    for x in leaves:
        sharding = getattr(x, "sharding", None)
        # Of tracers and of abstract meshes there are no devices to ask.
        if getattr(x, "committed", True) and isinstance(
            sharding, jax.sharding.Sharding
        ):
            try:
                device = next(iter(sharding.device_set))
            except Exception:
                continue
            break
    else:
        (device, *_) = jax.devices()
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _itself(static: Any) -> Any:
    return static


def _nothing(static: Any) -> None:
    return None
