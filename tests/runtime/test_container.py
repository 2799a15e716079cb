"""`ContainerMeta`: attributes become integers."""

import jax.numpy as jnp
import numpy as np
import pytest

from equinox_like.internal import ContainerMeta


class Results(metaclass=ContainerMeta):
    """Documentation."""

    successful = "It worked."
    failed = ("a", 1)


def test_attributes_are_integers_in_their_order():
    assert (Results.successful, Results.failed) == (0, 1)
    assert Results.__doc__ == "Documentation."


def test_values_come_back_by_their_integer():
    assert Results[0] == "It worked." and Results[jnp.asarray(1)] == ("a", 1)
    assert Results.reverse_lookup == ["It worked.", ("a", 1)] and len(Results) == 2
    with pytest.raises(IndexError):
        Results[2]


def test_integers_are_instances():
    for x in (0, 1, True, 5, jnp.asarray(1), np.asarray(1), np.int8(1)):
        assert isinstance(x, Results)
    for x in (1.0, "a", None, jnp.arange(2), jnp.asarray(1.0), np.float32(1)):
        assert not isinstance(x, Results)
