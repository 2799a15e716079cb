"""Names that only code for Equinox uses, and its way to save the leaves of a tree.

A file of Equinox has the records of the leaves alone. The library appends a record of names
and checksums to a file that it opens itself, and refuses one with more records than the
template has leaves. But equimo reads the records on its own, and refuses the one that was
appended. jinns loads a part of what it saved. And libraries share files with their users
who have Equinox.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox_like
from equinox_like import Module, field
from equinox_like._compat.tracing import within_program
from equinox_like._io.files import is_path, opened, replacing, with_suffix
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


def _opening(function: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """`function`, which gets the file that `context` opens in place of a path."""

    @functools.wraps(function)
    def on_file(path_or_file: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_path(path_or_file):
            return function(path_or_file, *args, **kwargs)
        with context(with_suffix(path_or_file, ".eqx")) as file:
            return function(file, *args, **kwargs)

    return on_file


tree_serialise_leaves = _opening(equinox_like.tree_serialise_leaves, replacing)
tree_deserialise_leaves = _opening(equinox_like.tree_deserialise_leaves, opened)
