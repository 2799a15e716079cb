"""Layer 3: JAX's transformations, for functions of any pytrees."""

from .caches import clear_caches as clear_caches
from .grad import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
)
from .jit import filter_jit as filter_jit
from .report import DonationReport as DonationReport, DonationRow as DonationRow
from .retrace import Retrace as Retrace
from .vmap import filter_vmap as filter_vmap, if_array as if_array
