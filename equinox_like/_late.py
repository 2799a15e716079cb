"""Public names that many programs never use, loaded when one of them is first accessed.

Importing them with the others would double the library's import time.
"""

from ._io.checkpoint import load as load, load_metadata as load_metadata, save as save
from ._io.serialise import (
    default_deserialise_filter_spec as default_deserialise_filter_spec,
    default_serialise_filter_spec as default_serialise_filter_spec,
    tree_deserialise_leaves as tree_deserialise_leaves,
    tree_serialise_leaves as tree_serialise_leaves,
)
from ._io.state_dict import load_state_dict as load_state_dict, state_dict as state_dict
from ._jit.export import (
    deserialize_export as deserialize_export,
    filter_export as filter_export,
)
from ._loops import (
    filter_cond as filter_cond,
    filter_fori_loop as filter_fori_loop,
    filter_map as filter_map,
    filter_scan as filter_scan,
    filter_switch as filter_switch,
    filter_while_loop as filter_while_loop,
)
from ._runtime.capture import capture as capture, intervene as intervene, tag as tag
from ._runtime.enumeration import Enumeration as Enumeration
from ._runtime.error_if import (
    branched_error_if as branched_error_if,
    error_if as error_if,
)
from ._runtime.finalise import to_onnx as to_onnx
from ._transforms.buckets import bucketed as bucketed
from ._transforms.callback import (
    filter_io_callback as filter_io_callback,
    filter_pure_callback as filter_pure_callback,
)
from ._transforms.checkpoint import filter_checkpoint as filter_checkpoint
from ._transforms.custom_rules import (
    filter_custom_jvp as filter_custom_jvp,
    filter_custom_vjp as filter_custom_vjp,
    filter_custom_vmap as filter_custom_vmap,
)
from ._transforms.grad import (
    filter_hessian as filter_hessian,
    filter_jacfwd as filter_jacfwd,
    filter_jacrev as filter_jacrev,
)
from ._transforms.invertible import filter_invertible as filter_invertible
from ._transforms.jvp_vjp import (
    filter_jvp as filter_jvp,
    filter_linearize as filter_linearize,
    filter_vjp as filter_vjp,
)
from ._transforms.mesh_layout import (
    Layout as Layout,
    LayoutReport as LayoutReport,
    constrain as constrain,
    gather as gather,
)
from ._transforms.shard import (
    filter_device_put as filter_device_put,
    filter_shard as filter_shard,
)
from ._transforms.shard_map import (
    filter_pmap as filter_pmap,
    filter_shard_map as filter_shard_map,
)
from ._transforms.trace import (
    filter_closure_convert as filter_closure_convert,
    filter_eval_shape as filter_eval_shape,
    filter_make_jaxpr as filter_make_jaxpr,
)
from ._tree.copies import tree_copy as tree_copy
from ._tree.cycles import (
    tree_check as tree_check,
    tree_flatten_one_level as tree_flatten_one_level,
)
from ._tree.selection import Selection as Selection, select as select
