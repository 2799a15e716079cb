"""Names that only code for Equinox uses."""

import functools
import warnings
from typing import Any

from equinox_like import Module, field
from equinox_like._compat.tracing import within_program
from equinox_like._module.flatten import ASSIGNABLE
from equinox_like._typing import NOT_GIVEN
from equinox_like.internal import while_loop, ω
from equinox_like.nn._attention.dot_product import (
    dot_product_attention_weights as dot_product_attention_weights,
)
from equinox_like.nn._base.init import default_dtype, uniform

sentinel = NOT_GIVEN
currently_jitting = within_program
default_floating_dtype = functools.partial(default_dtype, None)
bounded_while_loop = functools.partial(while_loop, kind="bounded")
checkpointed_while_loop = functools.partial(while_loop, kind="checkpointed")
_ModuleMeta: type = type(Module)
_Metaω: type = type(ω)


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


def default_init(key: Any, shape: Any, dtype: Any, lim: float) -> Any:
    """The initial values of `nn.Linear` and others."""
    return uniform(key, shape, lim, dtype)


# The metaclass of quax constructs instances itself, and needs `_currently_initialising`
# and `is_abstract_module` for that. The one of galax wraps an `__init__` that was
# generated, and asks `_has_dataclass_init` for it.
class _CurrentlyInitialising:
    """The instances whose fields can be assigned. In Equinox it is a set."""

    def add(self, instance: Any) -> None:
        object.__setattr__(instance, ASSIGNABLE, type(instance)._assignable_names_)

    def remove(self, instance: Any) -> None:
        object.__delattr__(instance, ASSIGNABLE)


class _HasDataclassInit:
    """Whether a class has a generated `__init__`. In Equinox it is a dict."""

    def __getitem__(self, cls: Any) -> bool:
        return cls._module_spec_.init is not None


_currently_initialising = _CurrentlyInitialising()
_has_dataclass_init = _HasDataclassInit()


def is_abstract_module(cls: Any) -> bool:
    """Whether a class has abstract methods, or abstract variables without a value."""
    spec = cls._module_spec_
    return bool(
        spec.is_abstract or spec.abstract_variables or spec.abstract_class_variables
    )
