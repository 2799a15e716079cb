"""Ahead of time: what `filter_jit(f).lower(...)` returns, and its `.compile()`.

JAX's own stages, and beside them the skeleton they were made for: a compiled program has
the static arguments baked in, so it is called with the same ones or not at all.
"""

from collections.abc import Sequence
from typing import Any

from .._tree.split import STATIC, Skeleton
from .._tree.strict import strictly_same
from .donation import explain_failure, warn_of_unusable
from .pack import unpack


class Lowered:
    """A function lowered for certain arguments; from `filter_jit(f).lower(...)`.

    `lowered` is JAX's own object.
    """

    def __init__(
        self,
        lowered: Any,
        jitted: Any,
        skeleton: Skeleton,
        warn_of: Sequence[tuple[str, Any, bool]] | None,
    ):
        self.lowered = lowered
        # The leaves of which to warn if they are donated in vain.
        self._warn_of = warn_of
        self._jitted = jitted
        self._skeleton = skeleton

    def as_text(self, dialect: str | None = None) -> str:
        """The program as text, in StableHLO if no other dialect is named."""
        return self.lowered.as_text(dialect)

    def cost_analysis(self) -> Any:
        """XLA's estimate of the operations and bytes of one call."""
        return self.lowered.cost_analysis()

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles for the current backend."""
        compiled = self.lowered.compile(compiler_options)
        if self._warn_of is not None:
            warn_of_unusable(self._warn_of, self.lowered, compiled)
        return Compiled(compiled, self._jitted, self._skeleton)

    def __repr__(self) -> str:
        return f"<lowered {self._jitted!r}>"


class Compiled:
    """A compiled function; called like the original, with the same static arguments.

    `compiled` is JAX's own object.

    **Raises:**

    When called: `TypeError` if static arguments, structure, shapes or dtypes are not those
    that it was compiled for, naming the first that differs.
    """

    def __init__(self, compiled: Any, jitted: Any, skeleton: Skeleton):
        self.compiled = compiled
        self._jitted = jitted
        self._skeleton = skeleton

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        plan, leaves = self._jitted.arrange(args, kwargs)
        skeleton = plan.skeleton(leaves)
        if skeleton is not self._skeleton:
            raise TypeError(
                f"{self!r} was called with other arguments than it was compiled for: "
                f"{_difference(self._skeleton, skeleton, plan.names)} Compile again for "
                "these, or call the function itself, which does."
            )
        try:
            return unpack(self.compiled(*plan.groups(leaves)))
        except Exception as e:
            explain_failure(e, plan.named_leaves, leaves)
            raise

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
        return f"<compiled {self._jitted!r}>"


def _difference(compiled: Skeleton, given: Skeleton, names: list[str]) -> str:
    """The first difference, as a sentence; `names` are of the leaves of `given`."""
    if compiled.treedef != given.treedef:
        return (
            f"the structure was\n    {compiled.treedef}\nand is now\n    "
            f"{given.treedef}."
        )
    old, new = iter(compiled.statics), iter(given.statics)
    for name, before, now in zip(names, compiled.labels, given.labels, strict=True):
        if (before is STATIC) != (now is STATIC):
            was, is_now = (
                "a static value" if label is STATIC else "an array"
                for label in (before, now)
            )
            return f"`{name}` was {was}, and is now {is_now}."
        if before is STATIC:
            was, is_now = next(old), next(new)
            if not strictly_same(was, is_now):
                return f"the static `{name}` was {was!r}, and is now {is_now!r}."
    return "other arguments are donated."
