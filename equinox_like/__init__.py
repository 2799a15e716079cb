"""Models as pytrees in JAX: modules, filtered transformations, visible donation."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from ._errors import (
    DonationError as DonationError,
    DonationWarning as DonationWarning,
    LeafError as LeafError,
    ShapeError as ShapeError,
)
from ._loops import (
    filter_cond as filter_cond,
    filter_fori_loop as filter_fori_loop,
    filter_map as filter_map,
    filter_scan as filter_scan,
    filter_switch as filter_switch,
    filter_while_loop as filter_while_loop,
)
from ._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Module as Module,
    Partial as Partial,
    StrictConfig as StrictConfig,
    field as field,
    module_update_wrapper as module_update_wrapper,
    static_field as static_field,
)
from ._runtime import Enumeration as Enumeration
from ._transforms import (
    clear_caches as clear_caches,
    deserialize_export as deserialize_export,
    filter_checkpoint as filter_checkpoint,
    filter_closure_convert as filter_closure_convert,
    filter_custom_jvp as filter_custom_jvp,
    filter_custom_vjp as filter_custom_vjp,
    filter_custom_vmap as filter_custom_vmap,
    filter_device_put as filter_device_put,
    filter_eval_shape as filter_eval_shape,
    filter_export as filter_export,
    filter_grad as filter_grad,
    filter_hessian as filter_hessian,
    filter_io_callback as filter_io_callback,
    filter_jacfwd as filter_jacfwd,
    filter_jacrev as filter_jacrev,
    filter_jit as filter_jit,
    filter_jvp as filter_jvp,
    filter_linearize as filter_linearize,
    filter_make_jaxpr as filter_make_jaxpr,
    filter_pmap as filter_pmap,
    filter_pure_callback as filter_pure_callback,
    filter_shard as filter_shard,
    filter_shard_map as filter_shard_map,
    filter_value_and_grad as filter_value_and_grad,
    filter_vjp as filter_vjp,
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
    load as load,
    load_metadata as load_metadata,
    load_state_dict as load_state_dict,
    merge as merge,
    partition as partition,
    save as save,
    split as split,
    state_dict as state_dict,
    tree_at as tree_at,
    tree_check as tree_check,
    tree_copy as tree_copy,
    tree_deserialise_leaves as tree_deserialise_leaves,
    tree_equal as tree_equal,
    tree_flatten_one_level as tree_flatten_one_level,
    tree_inference as tree_inference,
    tree_pformat as tree_pformat,
    tree_pprint as tree_pprint,
    tree_serialise_leaves as tree_serialise_leaves,
)
from ._version import __version__ as __version__

if _TYPE_CHECKING:
    from . import internal as internal, nn as nn


_LOADED_LATE = "internal", "nn"


def __getattr__(name: str) -> _Any:
    # The layers take a third of the time that everything takes to import.
    if name in _LOADED_LATE:
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_LATE})
