"""Both ways to run a jaxpr."""

import jax
import jax.numpy as jnp
import pytest

from equinox_like._compat import jaxpr as compat

WAYS = [compat.find("jax.core"), compat.find("jax._src.core"), compat.by_extension]


@pytest.mark.parametrize("evaluate", WAYS, ids=["public", "private", "extension"])
def test_jaxpr_runs_with_other_constants(evaluate):
    y = jnp.arange(2.0)
    closed = jax.make_jaxpr(lambda x: (x + y, x))(jnp.ones(2))
    out, x = evaluate(closed.jaxpr, [2 * y], jnp.ones(2))
    assert out.tolist() == [1, 3] and x.tolist() == [1, 1]
    gradient = jax.grad(lambda c: evaluate(closed.jaxpr, [c], y)[0].sum())(y)
    assert gradient.tolist() == [1, 1]


def test_missing_names_are_passed_over():
    assert compat.find("jax.no_such_module", "jax.typing") is compat.by_extension
    assert compat.find("jax.typing", "jax._src.core") is WAYS[1]
