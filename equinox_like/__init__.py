"""Models as pytrees in JAX: modules, filtered transformations, visible donation."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from ._errors import (
    DonationError as DonationError,
    DonationWarning as DonationWarning,
    LeafError as LeafError,
    ShapeError as ShapeError,
)
from ._module import Module as Module, Partial as Partial, field as field
from ._transforms import (
    clear_caches as clear_caches,
    deserialize_export as deserialize_export,
    filter_export as filter_export,
    filter_grad as filter_grad,
    filter_jit as filter_jit,
    filter_value_and_grad as filter_value_and_grad,
    filter_vmap as filter_vmap,
    if_array as if_array,
)
from ._tree import (
    STATIC as STATIC,
    Skeleton as Skeleton,
    apply_updates as apply_updates,
    combine as combine,
    default_deserialise_filter_spec as default_deserialise_filter_spec,
    default_serialise_filter_spec as default_serialise_filter_spec,
    filter as filter,
    is_array as is_array,
    is_array_like as is_array_like,
    is_inexact_array as is_inexact_array,
    is_inexact_array_like as is_inexact_array_like,
    merge as merge,
    partition as partition,
    split as split,
    tree_at as tree_at,
    tree_deserialise_leaves as tree_deserialise_leaves,
    tree_equal as tree_equal,
    tree_pformat as tree_pformat,
    tree_pprint as tree_pprint,
    tree_serialise_leaves as tree_serialise_leaves,
)
from ._version import __version__ as __version__

if _TYPE_CHECKING:
    from . import nn as nn


def __getattr__(name: str) -> _Any:
    # The layers take a third of the time that everything takes to import.
    if name == "nn":
        return _importlib.import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "nn"})
