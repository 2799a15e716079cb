"""Tools to inspect what JAX does with a function. Loaded late."""

from .._jit.retrace import explain_retraces as explain_retraces
from .._public import publish as _publish
from ._announce import announce_transform as announce_transform
from ._backward_nan import backward_nan as backward_nan
from ._breakpoint import breakpoint_if as breakpoint_if
from ._dce import inspect_dce as inspect_dce, store_dce as store_dce
from ._max_traces import (
    assert_max_traces as assert_max_traces,
    get_num_traces as get_num_traces,
)
from ._memory_report import MemoryReport as MemoryReport, memory_report as memory_report

_publish(globals(), __name__)
