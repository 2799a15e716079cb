"""Types of arguments, which signatures show by their names; options of JAX; `NOT_GIVEN`.

`jax.typing` and jaxtyping define them as plain unions, of which `help` and
`inspect.signature` print every member, with private paths of JAX. Runtime type checkers
read these aliases as they read the unions.
"""

import os
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict, TypeVar, overload

import jax.typing
import jaxtyping

if sys.version_info >= (3, 12):
    from typing import TypeAliasType
else:  # jaxtyping imports it there, too
    from typing_extensions import TypeAliasType

_S = TypeVar("_S")
_Y = TypeVar("_Y", covariant=True)

ArrayLike = TypeAliasType("ArrayLike", jax.typing.ArrayLike)
DTypeLike = TypeAliasType("DTypeLike", jax.typing.DTypeLike)
PRNGKeyArray = TypeAliasType("PRNGKeyArray", jaxtyping.PRNGKeyArray)


class JitOptions(TypedDict, total=False):
    """What `filter_jit` passes on to `jax.jit`, for type checkers."""

    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool
    compiler_options: dict[str, Any] | None


class VmapOptions(TypedDict, total=False):
    """What `filter_vmap` passes on to `jax.vmap`."""

    spmd_axis_name: Any
    sum_match: bool


class GradOptions(TypedDict, total=False):
    """What `filter_grad` passes on to `jax.grad`; not all of it to each Jacobian."""

    holomorphic: bool
    allow_int: bool
    reduce_axes: Any


# For static type checkers alone: at run time, functions explain a wrong argument.
if TYPE_CHECKING:
    FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

    class Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...

    class Writable(Protocol):
        def write(self, data: bytes, /) -> Any: ...

    # A type checker gives a transformed function the first overload only, unless one of
    # the transformation asks for both.
    class MayTakeState(Protocol[_Y]):
        """A layer that may be called with a state, such as a `Sequential` or a norm."""

        @overload
        def __call__(self, x: Any, *, key: Any = ...) -> _Y: ...
        @overload
        def __call__(self, x: Any, state: _S, *, key: Any = ...) -> tuple[_Y, _S]: ...
else:
    FilePath = Readable = Writable = MayTakeState = Any


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


# Stands for an argument that is not given: in `@filter_jit(option=...)`, the function.
NOT_GIVEN: Final[Any] = _NotGiven()
