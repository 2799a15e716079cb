"""Tools to inspect what JAX does with a function, loaded when first used."""

from .._public import publish as _publish
from ._tools import (
    announce_transform as announce_transform,
    assert_max_traces as assert_max_traces,
    backward_nan as backward_nan,
    breakpoint_if as breakpoint_if,
    get_num_traces as get_num_traces,
    inspect_dce as inspect_dce,
    store_dce as store_dce,
)

_publish(globals(), __name__)
