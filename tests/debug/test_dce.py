"""`store_dce` and `inspect_dce`: which arrays are left once dead code is removed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import equinox_like as eqx

X = jnp.ones(3)


class Model(eqx.Module):
    a: jax.Array
    b: jax.Array
    name: str


@pytest.fixture
def shown(request, capsys):
    """What is shown of the calls with this test's name."""

    def show():
        capsys.readouterr()
        eqx.debug.inspect_dce(request.node.name)
        head, *entries = capsys.readouterr().out.splitlines()
        number = sum(line.startswith("Entry") for line in entries)
        plural = "" if number == 1 else "s"
        assert head == f"Found {number} call{plural} to `equinox_like.debug.store_dce`."
        return entries

    return show


@pytest.fixture
def store(request):
    return lambda x: eqx.debug.store_dce(x, name=request.node.name)


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_arrays_that_are_not_used_are_shown_as_removed(jit, store, shown):
    @jit
    def f(x):
        model = store(Model(jnp.sin(x), jnp.cos(x), "text"))
        return model.b

    assert (f(X) == jnp.cos(X)).all()
    assert shown() == ["Entry 0:", "Model(a=<DCE'd>, b=f32[3], name='text')"]


def test_every_trace_is_an_entry(store, shown):
    @jax.jit
    def f(x):
        return store((x, 2 * x))[0]

    assert shown() == []
    for x in (X, X, jnp.ones(2)):
        f(x).block_until_ready()
    removed = "(f32[{}], <DCE'd>)"
    assert shown() == ["Entry 0:", removed.format(3), "Entry 1:", removed.format(2)]


def test_what_only_xla_finds_to_be_unused_is_shown_as_removed(store, shown):
    def f(x):
        def body(carry, _):
            return (carry[0] + 1, store(carry[1])), None

        return lax.scan(body, (x, x), None, 2)[0][0]

    jax.jit(f)(X).block_until_ready()
    assert "<DCE'd>" in shown()[1]


@pytest.mark.parametrize(
    "transform",
    [jax.vmap, lambda f: jax.grad(lambda x: f(x).sum()), jax.checkpoint],
    ids=["vmap", "grad", "checkpoint"],
)
def test_transformations_change_nothing(transform, store, shown):
    def f(x, mark=lambda x: x):
        return mark((jnp.sin(x), 2.0 * x))[0] ** 2

    out = jax.jit(transform(lambda x: f(x, store)))(X)
    assert jnp.allclose(out, jax.jit(transform(f))(X))
    assert "<DCE'd>)" in shown()[1] and "(f32[" in shown()[1]


def test_value_that_only_the_primal_needs_is_not_kept_by_the_tangent(store, shown):
    jax.jit(jax.grad(lambda x: store(x).sum()))(X).block_until_ready()
    assert shown() == ["Entry 0:", "<DCE'd>"]


def test_keys_and_integers_are_noted(store, shown):
    @jax.jit
    def f(key, n):
        return store((key, n))

    key = jax.random.key(3)
    new_key, n = f(key, 2)
    assert (jax.random.key_data(new_key) == jax.random.key_data(key)).all() and n == 2
    assert "DCE'd" not in shown()[1]


def test_clear_caches_deletes_the_records_and_their_leaves(store, shown):
    class Leaf:
        pass

    leaf = Leaf()
    jax.jit(lambda x: store((x, (leaf,)))[0])(X).block_until_ready()
    assert "Entry 0:" in shown()
    alive = weakref.ref(leaf)
    del leaf
    eqx.clear_caches()
    assert shown() == []
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("use", [lambda f: f, jax.vmap], ids=["eager", "vmap"])
def test_outside_of_jit_there_is_nothing_to_store(use):
    with pytest.raises(RuntimeError, match="should be used inside of JIT"):
        use(eqx.debug.store_dce)(X)


@pytest.mark.parametrize("use", [jax.jit, jax.vmap])
def test_inside_of_a_transformation_nothing_can_be_inspected(use):
    with pytest.raises(RuntimeError, match="should be used outside of JIT"):
        use(lambda x: eqx.debug.inspect_dce())(X)
