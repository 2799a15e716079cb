"""Layer 6: tools to find out what JAX does with a function. Loaded when first used."""

from .._jit.retrace import explain_retraces as explain_retraces
from ._max_traces import (
    assert_max_traces as assert_max_traces,
    get_num_traces as get_num_traces,
)
