"""Names that only code for Equinox uses."""

import warnings
from typing import Any

from equinox_like import field


class StrictConfig:
    """Accepted as `strict=` of a Module class. With `force_abstract`, or `force_abstact`,
    the spelling in Equinox, the class cannot be instantiated; the rest is ignored."""

    def __init__(
        self, force_abstact: bool = False, *, force_abstract: bool = False, **_: Any
    ):
        self.force_abstract = force_abstact or force_abstract


def static_field(**kwargs: Any) -> Any:
    """The same as `field(static=True, ...)`. Deprecated: it issues a warning."""
    text = "`static_field(...)` is deprecated: write `field(static=True, ...)`."
    warnings.warn(text, stacklevel=2)
    return field(static=True, **kwargs)
