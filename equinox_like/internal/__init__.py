"""Layer 7: names for authors of other libraries. They may change in any version.

Nothing is defined here.
"""

from .._loops.buffer_rules import maybe_set_p as maybe_set_p
from .._loops.buffers import MaybeBuffer as MaybeBuffer, buffer_at_set as buffer_at_set
from .._loops.internal_scan import scan as scan, scan_trick as scan_trick
from .._loops.select import select_if_vmap_p as select_if_vmap_p
from .._loops.while_loop import while_loop as while_loop
from .._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Static as Static,
)
from .._runtime.enumeration import Enumeration as Enumeration
from .._runtime.error_if import (
    branched_error_if as branched_error_if,
    error_if as error_if,
)
from .._runtime.filtered_primitive import (
    filter_primitive_batching as filter_primitive_batching,
    filter_primitive_bind as filter_primitive_bind,
    filter_primitive_def as filter_primitive_def,
    filter_primitive_jvp as filter_primitive_jvp,
    filter_primitive_transpose as filter_primitive_transpose,
)
from .._runtime.finalise import (
    finalise_eval_jaxpr as finalise_eval_jaxpr,
    finalise_fn as finalise_fn,
    finalise_jaxpr as finalise_jaxpr,
    finalise_jaxpr_as_fn as finalise_jaxpr_as_fn,
    finalise_make_jaxpr as finalise_make_jaxpr,
    primitive_finalisations as primitive_finalisations,
    register_impl_finalisation as register_impl_finalisation,
)
from .._runtime.vprim import create_vprim as create_vprim
from .._tree.format import TreeWLCustom as TreeWLCustom
