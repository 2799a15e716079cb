"""`left_broadcast_to`: axes are aligned on the left."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from equinox_like.internal import left_broadcast_to

shapes = st.lists(st.integers(0, 3), max_size=3)


@given(shapes, shapes, st.data())
def test_it_is_broadcasting_of_the_transposed(head, tail, data):
    shape = [data.draw(st.sampled_from([1, n])) for n in head]
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    out = left_broadcast_to(x, [*head, *tail])
    expected = np.broadcast_to(x.T, [*tail[::-1], *head[::-1]]).T
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "to"), [((3,), (2, 3)), ((3, 1), (3,)), ((2,), (1,)), ((1,), ())]
)
def test_shapes_that_do_not_fit_are_an_error(shape, to):
    with pytest.raises(ValueError, match="aligned on the left"):
        left_broadcast_to(jnp.ones(shape), to)


def test_numbers_and_dtypes():
    assert left_broadcast_to(2, (2,)).tolist() == [2, 2]
    assert left_broadcast_to(np.ones(1, bool), (1, 2)).dtype == bool
