"""Pytrees: the names that most other folders use.

Nothing here depends on Modules.
"""

from .at import tree_at as tree_at
from .copies import apply_updates as apply_updates, tree_inference as tree_inference
from .equal import tree_equal as tree_equal
from .filters import (
    is_array as is_array,
    is_array_like as is_array_like,
    is_inexact_array as is_inexact_array,
    is_inexact_array_like as is_inexact_array_like,
)
from .format import tree_pformat as tree_pformat, tree_pprint as tree_pprint
from .partitioning import combine as combine, filter as filter, partition as partition
