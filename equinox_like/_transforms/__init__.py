"""JAX's other transformations, for functions of any pytrees."""

from .grad import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
)
from .vmap import filter_vmap as filter_vmap, if_array as if_array
