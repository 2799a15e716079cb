"""Ahead of time: `filter_jit(f).trace(...)`, `.lower(...)` and `.compile()`.

Each stage wraps JAX's own stage and the call it was made for. The call restores the
user's structure in what JAX reports about flat arrays. Static leaves are baked into a
compiled program, so it raises if it is called with other static leaves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from .._compat.arrays import default_device, platform_of
from .._compat.compiled import Buffer, buffers_of
from .._compat.errors import is_callback_error
from .._compat.tracing import Tracer, at_top_level
from .._core.base import hide_frames
from .._core.difference import differences
from .._errors import DonationError, did_you_mean
from .._tree.arrays import describe_array, jax_struct_of
from .._tree.partitioning import STATIC
from .checks import check_not_fatal, check_unused, raise_explained, wait_for
from .donation import Deletion, lower_silently
from .layout import CallLayout, Leaves, NamedLeaf
from .specialization import Specialization

_P = ParamSpec("_P")
_T = TypeVar("_T")

Trees = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass
class AheadOfTime:
    """The call that stages are made for."""

    # The `Jitted`, and the compiled function that serves the call.
    jitted: Any
    specialization: Specialization
    # How the arguments were passed, and the leaves: see `CallLayout.named_leaves`.
    layout: CallLayout
    named: Sequence[NamedLeaf]
    # The platform of the first array committed to a device, else JAX's default.
    platform: str
    # Whether a call waits for the program, because it holds a check.
    waits: bool

    def arguments(
        self, info: Trees, static: Callable[[Any], Any] = lambda leaf: leaf
    ) -> Trees:
        """`args` and `kwargs`, with JAX's `info` about each array in its place."""
        groups, _ = info
        skeleton = self.specialization.skeleton
        data = itertools.chain.from_iterable(groups)
        statics = map(static, skeleton.statics)
        leaves = [next(statics if x is STATIC else data) for x in skeleton.labels]
        _, args, kwargs = skeleton.treedef.unflatten(leaves)
        return args, kwargs


class _Stage(Generic[_P, _T]):
    def __init__(self, stage: Any, call: AheadOfTime):
        """`stage` is JAX's own."""
        self._stage = stage
        self._call = call

    @property
    def args_info(self) -> Trees:
        """`(args, kwargs)` with shape, dtype and donation in place of each array."""
        return self._call.arguments(self._stage.args_info)

    @property
    def out_info(self) -> Any:
        """The output, with a `jax.ShapeDtypeStruct` in place of each array."""
        return self._call.specialization.fill(self._stage.out_info)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} belongs to this process and cannot be pickled. `filter_export` "
            "converts a function to bytes; what `filter_jit` returns can be pickled."
        )


class Traced(_Stage[_P, _T]):
    """A function traced for certain arguments; from `filter_jit(f).trace(...)`.

    `traced` is JAX's own object.
    """

    def __init__(self, traced: Any, call: AheadOfTime):
        super().__init__(traced, call)
        self.traced = traced

    @property
    def jaxpr(self) -> Any:
        """The traced program, a closed jaxpr of flat arrays."""
        return self.traced.jaxpr

    def lower(
        self, lowering_platforms: Sequence[str] | str | None = None
    ) -> "Lowered[_P, _T]":
        """Lowers to StableHLO: for this host, or for the platforms that are named.

        These may be platforms that this host lacks, `("tpu",)` for example. What was
        lowered for them can be inspected, but not compiled here.

        **Raises:**

        `NotImplementedError` if the function calls Python while it runs, as a check by
        `error_if` does, and these are not the platform of this host alone.
        """
        lowering_platforms = as_platforms(lowering_platforms, "lowering_platforms")
        # JAX warns of donated buffers while it lowers, see `donation.py`.
        try:
            lowered = lower_silently(
                lambda: self.traced.lower(lowering_platforms=lowering_platforms)
            )
        except (NotImplementedError, ValueError) as e:
            if lowering_platforms is None or not is_callback_error(e):
                raise
            others = ", ".join(map(repr, lowering_platforms))
            raise python_is_called(
                f"{self!r}",
                f"JAX lowers that for the platform of this host only, not for {others}",
            ) from e
        return Lowered(lowered, self._call, lowering_platforms)

    def __repr__(self) -> str:
        return f"<traced {self._call.jitted!r}>"


def python_is_called(what: str, problem: str) -> NotImplementedError:
    """The error for a program that calls Python, where that is a problem."""
    return NotImplementedError(
        f"{what} calls Python while it runs, by a check such as `error_if` or by a "
        f"callback, and {problem}. Leave it out; or let the check set NaNs instead, with "
        '`on_error="nan"` or the environment variable `EQX_ON_ERROR=nan`.'
    )


# Those that JAX lowers for without a plugin. A plugin may have any name.
_PLATFORMS: Final = ("cpu", "cuda", "gpu", "rocm", "tpu")


def as_platforms(given: Any, argument: str) -> tuple[str, ...] | None:
    """One platform or several as a tuple. JAX would take `"tpu"` for three platforms,
    and lower for one that does not exist."""
    if given is None:
        return None
    platforms = (given,) if isinstance(given, str) else tuple(given)
    for name in platforms:
        near = did_you_mean(name, _PLATFORMS, "{!r}", cutoff=0.7)
        if near and name not in _PLATFORMS:
            raise ValueError(f"`{argument}` names the platform {name!r}.{near}")
    return platforms


class Lowered(_Stage[_P, _T]):
    """A function lowered for certain arguments; from `filter_jit(f).lower(...)`.

    `lowered` is JAX's own object.
    """

    def __init__(
        self, lowered: Any, call: AheadOfTime, platforms: tuple[str, ...] | None
    ):
        super().__init__(lowered, call)
        self.lowered = lowered
        self._platforms = platforms

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text, in StableHLO if no other dialect is named.

        With `debug_info`, each operation tells its scopes and its line in the source.
        """
        return self.lowered.as_text(dialect, debug_info=debug_info)

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
                f"{self!r} was lowered for {', '.join(map(repr, self._platforms))}, "
                f"but this host compiles for {platform!r}. Lower without "
                "`lowering_platforms`; or carry it to another host by `filter_export`."
            )
        compiled = self.lowered.compile(compiler_options)
        call, buffers = self._call, None
        donation = call.jitted._program.donation
        if call.layout.donates:
            buffers = buffers_of(self.lowered, compiled)
        if donation.inspects_first:
            donation.report_unusable(call.named, buffers)
        return Compiled(compiled, call, buffers)

    def __repr__(self) -> str:
        return f"<lowered {self._call.jitted!r}>"


class Compiled(_Stage[_P, _T]):
    """A compiled function; called like the original, with the same static arguments.

    `compiled` is JAX's own object.

    **Raises:**

    When called: `TypeError` if static arguments, structure, shapes or dtypes are not those
    that it was compiled for, naming the first that differs. An array must come in place of
    each `jax.ShapeDtypeStruct` that stood for one.
    """

    def __init__(
        self, compiled: Any, call: AheadOfTime, buffers: Sequence[int | Buffer] | None
    ):
        super().__init__(compiled, call)
        self.compiled = compiled
        self._program = program = call.jitted._program
        self._tree = call.jitted._tree
        # The layout and the static key of the last call that was validated.
        self._fitting: tuple[CallLayout | None, Any] = None, None
        # For each data leaf: what happens to its buffer, `None` if JAX does not say.
        self._outcomes = buffers or [None] * len(call.named)
        # If it donates: the indices of data leaves that it does not use, which JAX does
        # not check.
        outcomes = enumerate(self._outcomes if call.layout.donates else ())
        self._unused = [i for i, outcome in outcomes if outcome is Buffer.PRUNED]
        self._deletion = Deletion(program.donation, program.record)
        self._inspects_every_call = any(
            len(s.device_set) > 1 for s in jtu.tree_leaves(compiled.input_shardings)
        )

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return self._run((self._tree, args, kwargs))
        except Exception as e:
            hide_frames(e)
            raise

    def _run(self, call: Any) -> Any:
        layout, leaves = self._program.layouts.fit(call)
        if self._fitting != (layout, layout.static_key(leaves)):
            self._require_fit(layout, leaves)
        if layout.donates and not at_top_level():
            raise DonationError(
                f"{self!r} donates, and was called under a transformation, which may "
                "still need the arrays. Nothing was deleted. Call the function that it "
                "was compiled from, which donates nothing there."
            )
        try:
            if self._inspects_every_call:
                check_not_fatal(layout, leaves)
            if self._unused:
                check_unused(layout, leaves, self._unused)
            out: Any = self.compiled(*layout.groups(leaves))
            if self._call.waits:
                wait_for(out)
        except Exception as e:
            if isinstance(e, TypeError):
                self._require_types(layout, leaves)
            self._deletion.fail(layout, leaves, e)
            raise_explained(e, layout, leaves)
        if layout.donates:
            self._deletion.finish(layout, leaves, None, lambda *_: self._outcomes)
        return self._call.specialization.output(out)

    def _require_fit(self, layout: CallLayout, leaves: Leaves) -> None:
        """Raises unless the structure and static leaves are those compiled for."""
        call = self._call
        skeleton = layout.skeleton(leaves)
        if skeleton != call.specialization.skeleton:
            found = differences(
                (call.layout.arguments, call.specialization.skeleton),
                (layout.arguments, skeleton),
            )
            raise self._unfit(next(found, "Other arguments are donated."))
        self._fitting = layout, layout.static_key(leaves)

    def _require_types(self, layout: CallLayout, leaves: Leaves) -> None:
        """Raises unless shapes and dtypes are those compiled for. JAX's error asks for
        another reason, and does not say what to do."""
        given = layout.take_data(leaves)
        for (name, was, _), now in zip(self._call.named, given, strict=True):
            before, after = (describe_array(jax_struct_of(x)) for x in (was, now))
            if before != after:
                text = f"`{name}` was an array {before}, and is now {after}."
                raise self._unfit(text) from None

    def _unfit(self, difference: Any) -> TypeError:
        return TypeError(
            f"{self!r} was called with arguments other than those it was compiled for: "
            f"{difference} Compile again for these, or call the function that it was "
            "compiled from, which does."
        )

    @property
    def input_shardings(self) -> Trees:
        """`(args, kwargs)` with a sharding in place of each array, `None` elsewhere.

        Arrays that the program does not use have `None`, too.
        """
        return self._call.arguments(self.compiled.input_shardings, lambda _: None)

    @property
    def output_shardings(self) -> Any:
        """The output, with a sharding in place of each array, `None` elsewhere."""
        fill = self._call.specialization.fill
        return fill(self.compiled.output_shardings, lambda _: None)

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


def platform_of_call(leaves: Sequence[Any]) -> str:
    """The platform that a call with these leaves is compiled for, as JAX names it."""
    for x in leaves:
        # Tracers and abstract meshes have no devices.
        if isinstance(x, Tracer) or not getattr(x, "committed", True):
            continue
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            try:
                device = next(iter(sharding.device_set))
            except Exception:
                continue
            return platform_of(device)
    return platform_of(default_device())
