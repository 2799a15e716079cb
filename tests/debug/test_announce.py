"""`announce_transform`: what it tells of which transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

X = jnp.ones(3)


def told_by(use, **kwargs):
    """What is told while `use` runs with a function of one array."""
    texts = []

    def f(x):
        return eqx.debug.announce_transform(x, announce=texts.append, **kwargs)

    use(f)
    # How often JAX asks for shapes is its own affair.
    return [t for i, t in enumerate(texts) if i == 0 or t != texts[i - 1]]


def grad(f):
    return jax.grad(lambda x: f(x).sum())


USES = {
    "impl": lambda f: f(X),
    "abstract mlir": lambda f: jax.jit(f)(X),
    "vmap:impl": lambda f: jax.vmap(f)(X),
    "vmap:vmap:impl": lambda f: jax.vmap(jax.vmap(f))(jnp.ones((2, 2))),
    "vmap:abstract vmap:mlir": lambda f: jax.jit(jax.vmap(f))(X),
    "jvp_p:impl jvp_t:impl": lambda f: jax.jvp(f, (X,), (X,)),
    "jvp_p:impl jvp_t:abstract jvp_t:transpose:impl": lambda f: grad(f)(X),
}


@pytest.mark.parametrize("texts", USES)
def test_transformations_are_told_in_their_order(texts):
    assert told_by(USES[texts]) == texts.split()


def test_beginning_transformations_are_told_if_asked_for():
    texts = told_by(lambda f: jax.vmap(f)(X), intermediates=True)
    assert texts == ["vmap", "vmap:impl"]
    texts = told_by(lambda f: grad(f)(X), intermediates=True)
    assert texts[0] == "jvp" and "jvp_t:transpose" in texts


def test_name_stands_before_each_text(capsys):
    assert told_by(lambda f: f(X), name="here") == ["(here) impl"]
    eqx.debug.announce_transform(X)
    assert capsys.readouterr().out == "impl\n"


def test_tree_comes_back_and_is_told_of_once():
    tree = {"a": X, "b": np.ones(2), "c": "text", "d": 1.0, "e": jax.random.key(0)}
    texts = []
    out = eqx.debug.announce_transform(tree, announce=texts.append)
    assert eqx.tree_equal(out, tree | {"b": jnp.ones(2)}) and texts == ["impl"]
    assert eqx.debug.announce_transform("text", announce=texts.append) == "text"
    assert texts == ["impl"]


def test_derivatives_are_those_of_the_identity():
    def f(x, n):
        x, n = eqx.debug.announce_transform((x, n), announce=lambda _: None)
        return (n * x**2).sum()

    n = jnp.arange(3)
    assert jax.grad(f)(X, n).tolist() == [0, 2, 4]
    assert (jax.hessian(f)(X, n) == 2 * jnp.diag(n)).all()
