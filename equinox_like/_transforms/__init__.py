"""Layer 3: JAX's transformations, for functions of any pytrees."""

from .caches import clear_caches as clear_caches
from .callback import (
    filter_io_callback as filter_io_callback,
    filter_pure_callback as filter_pure_callback,
)
from .checkpoint import filter_checkpoint as filter_checkpoint
from .closure import filter_closure_convert as filter_closure_convert
from .custom_rules import (
    filter_custom_jvp as filter_custom_jvp,
    filter_custom_vjp as filter_custom_vjp,
)
from .custom_vmap import filter_custom_vmap as filter_custom_vmap
from .export import (
    deserialize_export as deserialize_export,
    filter_export as filter_export,
)
from .grad import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
)
from .jacobian import (
    filter_hessian as filter_hessian,
    filter_jacfwd as filter_jacfwd,
    filter_jacrev as filter_jacrev,
)
from .jit import filter_jit as filter_jit
from .jvp import filter_jvp as filter_jvp, filter_linearize as filter_linearize
from .pmap import filter_pmap as filter_pmap
from .shard import (
    filter_device_put as filter_device_put,
    filter_shard as filter_shard,
)
from .shard_map import filter_shard_map as filter_shard_map
from .trace import (
    filter_eval_shape as filter_eval_shape,
    filter_make_jaxpr as filter_make_jaxpr,
)
from .vjp import filter_vjp as filter_vjp
from .vmap import filter_vmap as filter_vmap, if_array as if_array
