"""Control flow within compiled programs, for any pytrees."""

from .branch import filter_cond as filter_cond, filter_switch as filter_switch
from .loop import (
    filter_fori_loop as filter_fori_loop,
    filter_while_loop as filter_while_loop,
)
from .scan import filter_map as filter_map, filter_scan as filter_scan
