"""What may differ on a GPU: `TESTS_ON=cuda pytest -m gpu`. Elsewhere they are skipped."""

import importlib.util
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equinox_like as eqx
from equinox_like import nn

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent


def on_cpu():
    return jax.default_device(jax.devices("cpu")[0])


def platforms(tree):
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return {x.devices().pop().platform for x in arrays}


# Donation


def test_table_of_donation_holds_on_a_gpu():
    spec = importlib.util.spec_from_file_location(
        "donation_table", ROOT / "docs" / "scripts" / "donation_table.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "donation.md").read_text()
    kinds = [kind for kind in script.KINDS if "4 devices" not in kind[0]]
    assert len(kinds) > 10
    for name, make, fun, call in kinds:
        cells = [
            script.what_happens(mode, make, fun, call, "view" in name)
            for mode in script.MODES
        ]
        if "view" in name:  # NumPy gets a copy, so that it does not keep the array
            cells = [cell.replace("aliased", "deleted") for cell in cells]
        assert "| " + " | ".join([name, *cells]) + " |" in page


def train_step(model, opt_state, x, y):
    optimiser = optax.adam(1e-2)

    def loss_fn(model):
        logits = jax.vmap(model)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = optimiser.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def training():
    keys = jax.random.split(jax.random.key(0), 3)
    model = nn.MLP(8, 4, 32, 2, key=keys[0])
    opt_state = optax.adam(1e-2).init(eqx.filter(model, eqx.trainable))
    x = jax.random.normal(keys[1], (64, 8))
    return model, opt_state, x, jax.random.randint(keys[2], 64, 0, 4)


def test_donated_step_needs_the_memory_of_jax():
    args = training()
    arrays, static = eqx.partition(args, eqx.is_array)

    def plain(params, rest):
        stepped = train_step(*eqx.combine((*params, *rest), static))
        return eqx.filter(stepped, eqx.is_array)

    jitted = jax.jit(plain, donate_argnums=0)
    expected = jitted.lower(arrays[:2], arrays[2:]).compile().memory_analysis()
    ours = eqx.filter_jit(train_step, donate=("model", "opt_state"))
    found = ours.lower(*args).compile().memory_analysis()
    assert found.alias_size_in_bytes == expected.alias_size_in_bytes > 0
    assert found.temp_size_in_bytes == expected.temp_size_in_bytes
    assert found.argument_size_in_bytes == expected.argument_size_in_bytes


def test_training_gives_the_losses_of_the_cpu():
    def losses():
        model, opt_state, x, y = training()
        step = eqx.filter_jit(train_step, donate=("model", "opt_state"))
        found = []
        for _ in range(20):
            model, opt_state, loss = step(model, opt_state, x, y)
            found.append(float(loss))
        return found, platforms(model)

    on_gpu, where = losses()
    assert where == {"gpu"}
    with on_cpu():
        expected, where = losses()
    assert where == {"cpu"}
    assert expected[-1] < expected[0] / 1.5
    np.testing.assert_allclose(on_gpu, expected, rtol=1e-4)


# Attention


def heads(dtype, lengths, key_heads=4, batch=(3,), size=16):
    keys = jax.random.split(jax.random.key(0), 3)
    of_queries = (*batch, lengths[0], 4, size)
    of_keys = (*batch, lengths[1], key_heads, size)
    shapes = of_queries, of_keys, of_keys
    return [
        jax.random.normal(k, shape, dtype)
        for k, shape in zip(keys, shapes, strict=True)
    ]


def mask_of(lengths, batch=()):
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, (*batch, *lengths))
    return mask.at[..., 0].set(True)  # each query attends to some key


KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "window": 3},
    "window": {"window": 3},
    "mask": {"mask": True},
    "mask of each": {"mask": "of each", "is_causal": True},
    "bias": {"bias": (1, 8)},
    "bias of heads": {"bias": (4, 8, 8), "mask": True},
    "scale": {"scale": 0.5, "is_causal": True},
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_cudnn_computes_attention(kind, dtype, key_heads):
    options = dict(KINDS[kind])
    lengths = 8, 8
    each = options.pop("mask", None)
    mask = mask_of(lengths, (3,) if each == "of each" else ()) if each else None
    shape = options.pop("bias", None)
    if shape is not None:
        options["bias"] = jax.random.normal(jax.random.key(2), shape)

    def loss(q, k, v, implementation):
        def one(q, k, v, mask):
            return nn.dot_product_attention(
                q, k, v, mask, implementation=implementation, **options
            )

        axes = 0, 0, 0, 0 if each == "of each" else None
        out = jax.vmap(one, axes)(q, k, v, mask).astype(jnp.float32)
        return (out * jnp.arange(16)).mean(), out

    compiled = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    given = heads(dtype, lengths, key_heads)
    exact = [x.astype(jnp.float32) for x in given]
    expected, expected_out = compiled(*exact, None)
    for implementation in "cudnn", "auto":
        found, out = compiled(*given, implementation)
        np.testing.assert_allclose(out, expected_out, atol=3e-2)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a.astype(jnp.float32), b, atol=3e-2)
    assert "fmha" in compiled.lower(*given, "auto").as_text()


@pytest.mark.parametrize("lengths", [(6, 8), (8, 6), (7, 7), (5, 9)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": True}])
def test_auto_serves_all_lengths(lengths, options):
    given = heads(jnp.bfloat16, lengths, batch=())
    mask = mask_of(lengths) if "mask" in options else None
    is_causal = options.get("is_causal", False)

    def loss(q, k, v, implementation):
        out = nn.dot_product_attention(
            q, k, v, mask, is_causal=is_causal, implementation=implementation
        )
        return (out.astype(jnp.float32) * jnp.arange(16)).mean()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    expected = compiled(*(x.astype(jnp.float32) for x in given), None)
    for a, b in zip(compiled(*given, "auto"), expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=3e-2)


def test_causal_attention_of_cudnn_stores_no_mask():
    given = heads(jnp.bfloat16, (1024, 1024), batch=(2,), size=64)

    def loss(q, k, v, implementation):
        attend = eqx.Partial(
            nn.dot_product_attention, is_causal=True, implementation=implementation
        )
        return jax.vmap(attend)(q, k, v).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)

    def temporary(name):
        analysis = compiled.lower(*given, name).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    weights = 2 * 4 * 1024 * 1024 * 2  # bytes in bfloat16
    assert temporary("auto") < weights < temporary("xla")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("size", [12, 16])
def test_auto_decodes_with_a_cache(dtype, size):
    width = 4 * size
    layer = nn.MultiheadAttention(
        4, width, dtype=dtype, key=jax.random.key(0), implementation="auto"
    )
    x = jax.random.normal(jax.random.key(1), (6, width), dtype)
    expected = layer(x, x, x, is_causal=True).astype(jnp.float32)
    cache = layer.init_cache(8)
    call = eqx.filter_jit(lambda x, cache: layer(x, x, x, is_causal=True, cache=cache))
    outs = []
    for part in (x[:4], x[4:5], x[5:]):
        out, cache = call(part, cache)
        outs.append(out)
    found = jnp.concatenate(outs).astype(jnp.float32)
    np.testing.assert_allclose(found, expected, atol=3e-2)


def test_auto_serves_arrays_on_the_cpu():
    given = heads(jnp.bfloat16, (8, 8))
    attend = jax.vmap(eqx.Partial(nn.dot_product_attention, implementation="auto"))
    expected = attend(*given).astype(jnp.float32)
    moved = jax.device_put(given, jax.devices("cpu")[0])
    for call in (lambda: jax.jit(attend)(*moved), lambda: attend(*moved)):
        out = call()
        assert platforms(out) == {"cpu"}
        np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=3e-2)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_auto_is_exported_for_each_platform(platform):
    given = heads(jnp.bfloat16, (8, 8), batch=())
    attend = eqx.Partial(nn.dot_product_attention, implementation="auto")
    with pytest.raises(
        ValueError, match=r"calls cuDNN.*'__cudnn\$fmhaSoftmax'"
    ) as info:
        eqx.filter_export(attend)(*given)
    assert isinstance(info.value.__cause__, ValueError)
    check = jax.export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax")
    exported = eqx.filter_export(attend, platforms=(platform,), disabled_checks=[check])
    exported = exported(*given)
    expected = attend(*given).astype(jnp.float32)
    out = exported(*jax.device_put(given, jax.devices(platform)[0]))
    assert platforms(out) == {"gpu" if platform == "cuda" else "cpu"}
    out = jax.device_get(out.astype(jnp.float32))
    np.testing.assert_allclose(out, expected, atol=3e-2)


# Checks and callbacks


def test_error_if_raises_and_the_next_call_works():
    @eqx.filter_jit
    def root(x):
        return jnp.sqrt(eqx.error_if(x, x < 0, "x must not be negative"))

    assert root(jnp.array(4.0)) == 2
    with pytest.raises(eqx.EquinoxRuntimeError, match="x must not be negative"):
        root(jnp.array(-4.0))
    assert root(jnp.array(9.0)) == 3

    @eqx.filter_jit
    def loop(xs):
        return jax.lax.scan(lambda c, x: (c + root(x), None), 0.0, xs)[0]

    assert loop(jnp.array([1.0, 4.0])) == 3
    with pytest.raises(eqx.EquinoxRuntimeError, match="x must not be negative"):
        loop(jnp.array([1.0, -4.0]))
    for eager in (jax.vmap(root), jax.vmap(jax.grad(root))):
        with pytest.raises(eqx.EquinoxRuntimeError, match="x must not be negative"):
            eager(jnp.array([1.0, -4.0]))


def test_donated_arrays_survive_a_check_of_the_next_call():
    @eqx.filter_jit(donate="arrays")
    def step(x):
        return eqx.error_if(x + 1, jnp.any(x > 2), "too large")

    x = jnp.ones(4)
    x = step(step(x))
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        step(x)


def test_callbacks_take_and_return_arrays():
    @eqx.filter_jit
    def call(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return eqx.filter_pure_callback(
            lambda x: np.sin(x), x, result_shape_dtypes=like
        )

    x = jnp.linspace(0, 1, 5)
    np.testing.assert_allclose(call(x), np.sin(x), rtol=1e-6)


# Placement and files


def test_files_move_between_platforms(tmp_path):
    model, *_ = training()
    eqx.save(tmp_path / "model.eqx", model)
    loaded = eqx.load(tmp_path / "model.eqx", model)
    assert platforms(eqx.filter(loaded, eqx.is_array)) == {"gpu"}
    moved = jax.tree.map(
        lambda x: jax.device_put(x, jax.devices("cpu")[0]) if eqx.is_array(x) else x,
        model,
    )
    on_cpu = eqx.load(tmp_path / "model.eqx", moved)
    assert platforms(eqx.filter(on_cpu, eqx.is_array)) == {"cpu"}
    same = eqx.tree_equal(jax.device_get(loaded), jax.device_get(on_cpu))
    assert same

    eqx.tree_serialise_leaves(tmp_path / "leaves.eqx", model)
    again = eqx.tree_deserialise_leaves(tmp_path / "leaves.eqx", model)
    assert eqx.tree_equal(again, model)


def test_arrays_on_the_cpu_are_computed_there():
    call = eqx.filter_jit(lambda model, x: model(x), donate="arrays")
    with on_cpu():
        model = nn.Linear(3, 2, key=jax.random.key(0))
        x = jnp.ones(3)
    moved = jax.device_put(eqx.filter(model, eqx.is_array), jax.devices("cpu")[0])
    for _ in range(3):
        kept = jax.tree.map(jnp.copy, moved)
        assert platforms(call(kept, jax.device_put(x, jax.devices("cpu")[0]))) == {
            "cpu"
        }
    lowered = eqx.filter_jit(lambda x: x + 1).lower(jnp.ones(3))
    assert platforms(lowered.compile()(jnp.ones(3))) == {"gpu"}


def test_lowering_names_the_platform():
    traced = eqx.filter_jit(lambda x: x + 1).trace(jnp.ones(3))
    assert traced.lower(lowering_platforms=("cuda",)).compile()(jnp.ones(3))[0] == 2
    with pytest.raises(ValueError, match="this host compiles for 'cuda'"):
        traced.lower(lowering_platforms=("cpu",)).compile()


# Other layers


def test_layers_give_the_numbers_of_the_cpu():
    key = jax.random.key(0)
    image = jax.random.normal(key, (3, 8, 8))
    sequence = jax.random.normal(key, (8, 16))
    cases = {
        "conv": (nn.Conv2d(3, 4, 3, padding=1, key=key), image),
        "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2, key=key), image),
        "group norm": (nn.GroupNorm(3, 3), image),
        "pool": (nn.MaxPool2d(2, 2), image),
        "lstm": (nn.RNN(nn.LSTMCell(16, 4, key=key)), sequence),
        "gru": (nn.RNN(nn.GRUCell(16, 4, key=key)), sequence),
    }
    for name, (layer, x) in cases.items():
        loss = eqx.filter_jit(
            eqx.filter_value_and_grad(
                lambda args: sum(
                    jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(args[0](args[1]))
                )
            )
        )
        found = jax.device_get(loss((layer, x)))
        cpu = jax.devices("cpu")[0]
        arrays, static = eqx.partition((layer, x), eqx.is_array)
        expected = loss(eqx.combine(jax.device_put(arrays, cpu), static))
        pairs = zip(
            jax.tree.leaves(found),
            jax.tree.leaves(jax.device_get(expected)),
            strict=True,
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("implementation", [None, "auto"])
def test_mixed_precision_trains(implementation):
    class Block(eqx.Module):
        attention: nn.MultiheadAttention
        head: nn.Linear

        def __call__(self, x):
            x = self.attention(x, x, x, is_causal=True)
            return jax.vmap(self.head)(x)

    keys = jax.random.split(jax.random.key(0), 3)
    attention = nn.MultiheadAttention(2, 16, key=keys[0], implementation=implementation)
    block = Block(attention, nn.Linear(16, 1, key=keys[1]))
    model = nn.mixed(block, "params=f32,compute=f16,output=f32")
    x = jax.random.normal(keys[2], (4, 8, 16))

    @eqx.filter_jit
    def step(model):
        def loss_fn(model):
            return (jax.vmap(model)(x) ** 2).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    losses = []
    for _ in range(10):
        model, loss = step(model)
        losses.append(float(loss))
    assert all(b < a for a, b in itertools.pairwise(losses))
