"""Names for authors of other libraries, which may change in any version.

This file only imports them.
"""

from .._core.show_as import doc_remove_args as doc_remove_args, doc_repr as doc_repr
from .._loops.carry import (
    MaybeBuffer as MaybeBuffer,
    buffer_at_set as buffer_at_set,
    maybe_set_p as maybe_set_p,
)
from .._loops.loop import while_loop as while_loop
from .._loops.scan import scan as scan, scan_trick as scan_trick
from .._loops.staging import select_if_vmap_p as select_if_vmap_p
from .._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Static as Static,
)
from .._module.wrappers import (
    closure_to_pytree as closure_to_pytree,
    str2jax as str2jax,
)
from .._runtime.enumeration import (
    ContainerMeta as ContainerMeta,
    Enumeration as Enumeration,
)
from .._runtime.error_if import (
    assert_dce as assert_dce,
    branched_error_if as branched_error_if,
    error_if as error_if,
)
from .._runtime.finalise import (
    finalise_eval_jaxpr as finalise_eval_jaxpr,
    finalise_fn as finalise_fn,
    finalise_jaxpr as finalise_jaxpr,
    finalise_jaxpr_as_fn as finalise_jaxpr_as_fn,
    finalise_make_jaxpr as finalise_make_jaxpr,
    onnx_converter as to_onnx,  # noqa: F401
    primitive_finalisations as primitive_finalisations,
    register_impl_finalisation as register_impl_finalisation,
)
from .._runtime.guards import (
    materialise_zeros as materialise_zeros,
    nonbatchable as nonbatchable,
    nonbatchable_p as nonbatchable_p,
    nondifferentiable as nondifferentiable,
    nondifferentiable_backward as nondifferentiable_backward,
    nondifferentiable_backward_p as nondifferentiable_backward_p,
    nontraceable as nontraceable,
    nontraceable_p as nontraceable_p,
)
from .._runtime.noinline import noinline as noinline, noinline_p as noinline_p
from .._runtime.primitives import (
    create_vprim as create_vprim,
    filter_primitive_batching as filter_primitive_batching,
    filter_primitive_bind as filter_primitive_bind,
    filter_primitive_def as filter_primitive_def,
    filter_primitive_jvp as filter_primitive_jvp,
    filter_primitive_transpose as filter_primitive_transpose,
    unvmap_all as unvmap_all,
    unvmap_all_p as unvmap_all_p,
    unvmap_any as unvmap_any,
    unvmap_any_p as unvmap_any_p,
    unvmap_max as unvmap_max,
    unvmap_max_p as unvmap_max_p,
)
from .._runtime.progress import (
    AbstractProgressMeter as AbstractProgressMeter,
    NoProgressMeter as NoProgressMeter,
    TextProgressMeter as TextProgressMeter,
    TqdmProgressMeter as TqdmProgressMeter,
)
from .._transforms.trace import (
    cached_filter_eval_shape as cached_filter_eval_shape,
    eval_empty as eval_empty,
    eval_zero as eval_zero,
)
from .._tree.arrays import (
    GetKey as GetKey,
    left_broadcast_to as left_broadcast_to,
    nextafter as nextafter,
    prevbefore as prevbefore,
)
from .._tree.format import TreeWLCustom as TreeWLCustom
from .._tree.omega import ω as ω
from .._tree.partitioning import (
    STATIC as STATIC,
    Skeleton as Skeleton,
    hashable_combine as hashable_combine,
    hashable_partition as hashable_partition,
    merge as merge,
    split as split,
)
from ..debug import (
    announce_transform as announce_transform,
    backward_nan as debug_backward_nan,  # noqa: F401 (public by its other name)
    breakpoint_if as breakpoint_if,
    inspect_dce as inspect_dce,
    store_dce as store_dce,
)
from ..debug._tools import announce_jaxpr_p as announce_jaxpr_p
