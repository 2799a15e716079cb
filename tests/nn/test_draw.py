import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import equinox_like as eqx
from equinox_like.nn._base.init import draw

SAMPLES = {
    "uniform": lambda *args: jax.random.uniform(*args, -0.3, 0.3),
    "normal": jax.random.normal,
}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 2, 3, 3), (4096,), (3, 1367)])
@pytest.mark.parametrize("name", SAMPLES)
def test_numbers_are_those_that_jax_draws_for_the_shape(
    name, shape, dtype, impl
) -> None:
    key = jax.random.key(0, impl=impl)
    drawn = draw(SAMPLES[name], key, shape, dtype)
    expected = SAMPLES[name](key, shape, dtype)
    assert drawn.dtype == expected.dtype and drawn.shape == shape
    assert (drawn == expected).all()


@pytest.mark.parametrize(
    "call, number_of_devices, expected",
    [
        (lambda f: f, 4, (4096,)),
        (lambda f: lambda key: jax.vmap(f)(jax.random.split(key, 2)), 4, (72,)),
        (jax.jit, 1, (72,)),
        # XLA shall be able to give each device its own part.
        (jax.jit, 4, (4, 2, 3, 3)),
    ],
    ids=["eager", "vmap", "jit for one device", "jit"],
)
def test_numbers_are_drawn_along_one_axis_where_nothing_can_be_split(
    call, number_of_devices, expected, key, monkeypatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: number_of_devices)
    shapes = []

    def sample(key, shape, dtype):
        shapes.append(shape)
        return jax.random.uniform(key, shape, dtype)

    call(lambda key: draw(sample, key, (4, 2, 3, 3), jnp.float32))(key)
    assert shapes == [expected]


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.sampled_from(list(SAMPLES)),
)
def test_numbers_are_those_of_jax(shape, seed, is_double, name) -> None:
    with jax.enable_x64(is_double):
        dtype = jnp.result_type(float)
        key = jax.random.key(seed)
        drawn = draw(SAMPLES[name], key, shape, dtype)
        expected = SAMPLES[name](key, shape, dtype)
        assert drawn.dtype == expected.dtype
        assert np.array_equal(drawn, expected)


def test_numbers_stay_where_the_key_is(key) -> None:
    device = jax.devices()[1]
    layer = eqx.nn.Linear(3, 4, key=jax.device_put(key, device))
    assert layer.weight.devices() == {device} and layer.weight.committed
    with jax.default_device(device):
        assert eqx.nn.Linear(3, 4, key=key).weight.devices() == {device}
    mesh = jax.make_mesh((4,), ("x",))
    with jax.set_mesh(mesh):
        assert eqx.nn.Linear(3, 4, key=key).weight.sharding.mesh == mesh
    assert not eqx.nn.Linear(3, 4, key=key).weight.committed


def test_memory_of_drawn_numbers_can_be_donated(key) -> None:
    layer = eqx.nn.Linear(64, 64, use_bias=False, key=key)
    before = layer.weight.unsafe_buffer_pointer()
    out = eqx.filter_jit(lambda m: jax.tree.map(lambda w: w + 1, m), donate="all")(
        layer
    )
    assert out.weight.unsafe_buffer_pointer() == before


@pytest.mark.parametrize("p", [0.3, jnp.asarray(0.3), jnp.asarray(0.3, jnp.bfloat16)])
@pytest.mark.parametrize("number_of_devices", [1, 4])
def test_dropout_drops_what_bernoulli_says(
    p, number_of_devices, key, monkeypatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: number_of_devices)
    keep = 1 - jnp.asarray(p, jnp.float32)
    kept = jax.random.bernoulli(key, keep, (5, 7))
    dropout = eqx.nn.Dropout(p)
    for call in dropout, eqx.filter_jit(dropout):
        assert ((call(jnp.ones((5, 7)), key=key) != 0) == kept).all()
