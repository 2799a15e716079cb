"""Tools to inspect what JAX does with a function. Loaded late."""

from .._public import publish as _publish
from ._in_program import (
    announce_transform as announce_transform,
    backward_nan as backward_nan,
    breakpoint_if as breakpoint_if,
    inspect_dce as inspect_dce,
    store_dce as store_dce,
)
from ._of_function import (
    assert_max_traces as assert_max_traces,
    get_num_traces as get_num_traces,
)

_publish(globals(), __name__)
