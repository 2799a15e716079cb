import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from strategies import Node, trees

import equinox_like as eqx


def buffers(x):
    data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {s.data.unsafe_buffer_pointer() for s in data.addressable_shards}


@given(trees())
def test_copy_has_equal_arrays_of_their_own_and_the_identical_rest(tree):
    copy = eqx.tree_copy(tree)
    assert jtu.tree_structure(copy) == jtu.tree_structure(tree)
    for a, b in zip(jtu.tree_leaves(tree), jtu.tree_leaves(copy), strict=True):
        if not eqx.is_array(a):
            assert a is b
            continue
        assert a is not b and type(a) is type(b)
        assert eqx.tree_equal(a, b, typematch=True, check_weak_type=True)
        if isinstance(a, jax.Array):
            assert not (a.size and buffers(a) & buffers(b))
        else:
            assert not np.shares_memory(a, b)


@pytest.mark.parametrize(
    "place",
    [
        lambda: None,
        lambda: jax.devices()[2],
        lambda: jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P()),
        lambda: jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P("x")),
        lambda: jax.NamedSharding(
            jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,)), jax.P("x")
        ),
        lambda: jax.sharding.SingleDeviceSharding(
            jax.devices()[0], memory_kind="unpinned_host"
        ),
    ],
    ids=["uncommitted", "device", "replicated", "explicit", "auto", "host memory"],
)
@pytest.mark.parametrize("kind", ["floats", "weak", "keys"])
def test_copy_stays_where_the_array_is(place, kind):
    make = {
        "floats": lambda: jnp.arange(8.0),
        "weak": lambda: jnp.broadcast_to(jnp.asarray(2.0), (8,)),
        "keys": lambda: jax.random.split(jax.random.key(0), 8),
    }
    x, where = make[kind](), place()
    x = x if where is None else jax.device_put(x, where)
    copy = eqx.tree_copy([x])[0]
    assert copy.sharding == x.sharding and copy.committed == x.committed
    assert getattr(copy, "weak_type", None) == getattr(x, "weak_type", None)
    assert not buffers(copy) & buffers(x)


def test_copy_survives_the_deletion_of_the_tree():
    tree = {"w": jnp.ones(2), "key": jax.random.key(1)}
    copy = eqx.tree_copy(tree)
    jtu.tree_map(lambda x: x.delete(), tree)
    assert copy["w"].sum() == 2 and jax.random.uniform(copy["key"]) >= 0


def test_deleted_array_is_refused_by_its_path():
    tree = Node([jnp.ones(2)])
    tree.child[0].delete()
    with pytest.raises(eqx.DonationError, match=r"`pytree\.child\[0\]`, float32\[2\]"):
        eqx.tree_copy(tree)


def test_tied_arrays_come_apart():
    x = jnp.ones(2)
    eqx.tree_check(eqx.tree_copy([x, x]))


def test_copy_under_jit_vmap_and_grad_is_the_identity_in_value():
    x = jnp.arange(3.0)
    copy = jax.jit(eqx.tree_copy)({"x": x, "y": 2.0})
    assert (copy["x"] == x).all() and not buffers(copy["x"]) & buffers(x)
    assert (jax.vmap(eqx.tree_copy)(x) == x).all()
    assert jax.grad(lambda x: 3 * eqx.tree_copy(x))(1.0) == 3.0
    key = jax.random.key(0)
    assert jax.jit(eqx.tree_copy)(key) == key


@pytest.mark.parametrize("make", [lambda: jnp.arange(3.0), lambda: jax.random.key(0)])
def test_copy_of_an_array_that_a_compiled_function_captures(make):
    x = make()
    copy = jax.jit(lambda: eqx.tree_copy({"x": x}))()["x"]
    assert (copy == x).all() and not buffers(copy) & buffers(x)
