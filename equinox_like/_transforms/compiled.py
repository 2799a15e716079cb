"""The class that `filter_pmap` and `filter_shard_map` return."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .._core.base import Transformed
from .._jit.donation import check_mode
from .._jit.jit import Jitted

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Compiled(Jitted[_P, _T]):
    """`filter_jit` of a transformed function. `__wrapped__` is the user's function."""

    def __init__(self, fun: Transformed[..., Any], donate: Any, jitkwargs: Any = None):
        check_mode(donate)
        super().__init__(fun, donate, jitkwargs or {})

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._held_.__wrapped__

    def _shown_around_(self) -> tuple[str, str]:
        return self._held_._shown_around_()
