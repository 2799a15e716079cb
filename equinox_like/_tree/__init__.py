"""Layer 1: pytrees. Nothing here knows of Modules."""

from .at import tree_at as tree_at
from .check import (
    tree_check as tree_check,
    tree_flatten_one_level as tree_flatten_one_level,
)
from .checkpoint import (
    load as load,
    load_metadata as load_metadata,
    save as save,
)
from .copy import tree_copy as tree_copy
from .equal import tree_equal as tree_equal
from .filters import (
    is_array as is_array,
    is_array_like as is_array_like,
    is_inexact_array as is_inexact_array,
    is_inexact_array_like as is_inexact_array_like,
)
from .format import tree_pformat as tree_pformat, tree_pprint as tree_pprint
from .inference import tree_inference as tree_inference
from .partition import combine as combine, filter as filter, partition as partition
from .serialise import (
    default_deserialise_filter_spec as default_deserialise_filter_spec,
    default_serialise_filter_spec as default_serialise_filter_spec,
    tree_deserialise_leaves as tree_deserialise_leaves,
    tree_serialise_leaves as tree_serialise_leaves,
)
from .split import (
    STATIC as STATIC,
    Skeleton as Skeleton,
    merge as merge,
    split as split,
)
from .state_dict import load_state_dict as load_state_dict, state_dict as state_dict
from .update import apply_updates as apply_updates
