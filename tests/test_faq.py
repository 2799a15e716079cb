"""docs/faq.md quotes what JAX, Optax and this library say today."""

import dataclasses
import re
import tempfile
from pathlib import Path

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx

TEXT = (Path(__file__).parents[1] / "docs" / "faq.md").read_text()

model = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
x = jnp.ones(2)


def loss(model, x):
    return model(x).sum()


@dataclasses.dataclass
class Config:
    n: int = 2


def scan():
    return jax.lax.scan(lambda carry, x: (carry, carry(x)), model, x[None])


def cond():
    return jax.lax.cond(True, lambda: model, lambda: model)


def apply_updates():
    return optax.apply_updates(model, eqx.filter(model, eqx.is_inexact_array))


def update_without_parameters():
    optimiser = optax.adamw(1e-3)
    params = eqx.filter(model, eqx.trainable)
    optimiser.update(params, optimiser.init(params))


def update_after_freezing():
    partly = eqx.tree_at("layers[0]", model, replace_fn=eqx.frozen)
    params = eqx.filter(partly, eqx.is_inexact_array)
    optimiser = optax.adamw(1e-3)
    grads = eqx.filter_grad(loss)(partly, x)
    optimiser.update(grads, optimiser.init(params), params)


def update_after_a_second_definition():
    def define():
        class Net(eqx.Module):
            w: jax.Array

        return Net

    optimiser = optax.adam(1e-3)
    optimiser.update(define()(x), optimiser.init(define()(x)))


def unpack_key():
    _k1, _k2 = jax.random.key(0)


def unpack_make_with_state():
    _model, _state = eqx.nn.make_with_state(eqx.nn.BatchNorm)


def tree_of_labels():
    params = eqx.filter(model, eqx.trainable)
    labels = jax.tree.map(lambda _: "body", params)
    optax.multi_transform({"body": optax.sgd(0.1)}, lambda _: labels).init(params)
    optax.multi_transform({"body": optax.sgd(0.1)}, labels).init(params)


def split_batch():
    rows = jax.NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))
    xs = jax.device_put(jnp.ones((4, 2)), rows)
    keys = jax.random.split(jax.random.key(0), 4)
    jax.vmap(lambda x, key: model(x))(xs, keys)


def split_weights_like_the_batch():
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        weight = eqx.filter_shard(model.layers[0].weight, P("data"))
        split = eqx.tree_at("layers[0].weight", eqx.filter_shard(model, P()), weight)
        xs = eqx.filter_shard(jnp.ones((4, 2)), P("data"))
        jax.vmap(eqx.filter_shard(split, P()))(xs)
        jax.vmap(split)(xs)


def different_devices():
    first, second = jax.devices()[:2]
    on_second = eqx.filter_device_put(model, second)
    eqx.filter_jit(on_second)(x)  # not committed
    eqx.filter_jit(on_second)(jax.device_put(x, first))


def different_meshes():
    meshes = [jax.make_mesh((2,), (name,)) for name in ("data", "model")]
    on = [jax.NamedSharding(mesh, P()) for mesh in meshes]
    xs = eqx.filter_shard(jnp.ones((4, 2)), on[0])
    on_first = eqx.filter_shard(model, on[0])
    jax.vmap(on_first)(xs)
    with jax.set_mesh(meshes[1]):
        with pytest.raises(
            ValueError, match=r"context mesh .* should match the aval m"
        ):
            jax.vmap(on_first)(xs)
        # Outside of compiled functions.
        moved = eqx.filter_shard(on_first, P())
        jax.vmap(moved)(eqx.filter_shard(xs, P()))
    jax.vmap(eqx.filter_shard(model, on[1]))(xs)


def loss_of_split_classes():
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    labels = jnp.zeros(2, jnp.int32)
    with jax.set_mesh(jax.make_mesh((2,), ("model",))):
        logits = eqx.filter_shard(jnp.ones((2, 4)), P(None, "model"))
        automatic = jax.sharding.auto_axes(cross_entropy, out_sharding=P())
        automatic(logits, labels)
        cross_entropy(jax.sharding.reshard(logits, P()), labels)
        cross_entropy(logits, labels)


def promote():
    with jax.numpy_dtype_promotion("strict"):
        jnp.ones(2, jnp.bfloat16) * jnp.ones(2)


def changing_carry():
    eqx.filter_scan(lambda c, _: (c.astype(jnp.bfloat16), None), jnp.ones(2), length=2)


def pair(model):
    return loss(model, x), x


def gradient_of_a_loop():
    eqx.filter_grad(
        lambda x: eqx.filter_while_loop(lambda x: x < 3, lambda x: 2 * x, x)
    )(x[0])


def reuse_key():
    with jax.debug_key_reuse(True):
        f = jax.jit(lambda k: (jax.random.normal(k), jax.random.normal(k)))
        f(jax.random.key(0))


def leak():
    seen = []
    eqx.filter_jit(lambda x: seen.append(x))(x)
    return seen[0] + 1


@eqx.filter_jit(donate=("model",))
def step(model):
    return eqx.apply_updates(model, eqx.filter(model, eqx.is_array))


def donate_twice():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    step(linear)
    step(linear)


def read_donated():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    step(linear)
    return linear.weight + 1


def import_relu():
    from equinox_like.nn import ReLU  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue] -- that is the mistake


class Net(eqx.Module):
    def forward(self, x):
        return x


def forget_state():
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2)
    norm(jnp.ones((4, 2)))  # pyright: ignore[reportCallIssue] -- that is the mistake


class OnGrid(eqx.Module):
    grid: np.ndarray = eqx.field(static=True)


def write_into_a_grid():
    OnGrid(np.zeros(2)).grid[0] = 1.0


class Unset(eqx.Module):
    a: jax.Array

    def __init__(self):
        pass


def default_in_the_base_class():
    class Layer(eqx.Module):
        size: int = 2

    class KeywordOnly(Layer, kw_only=True):
        rate: float

    KeywordOnly(3, rate=0.1)

    class Positional(Layer):
        rate: float


def array_as_default():
    class Scaled(eqx.Module):
        scale: jax.Array = jnp.ones(2)


def use_old_state():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2)
    norm(jnp.ones((4, 2)), state)
    norm(jnp.ones((4, 2)), state)


def load_another_dtype():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        eqx.save(path, model)
        eqx.load(path, eqx.nn.mixed(model, "params=bf16").layer)


def load_from_pytorch():
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, _ = make(8, "batch", mode="batch")
    net = {"conv": eqx.nn.Conv2d(1, 8, 3, key=jax.random.key(0)), "norm": norm}
    theirs = eqx.state_dict(net) | {
        "conv.bias": np.ones(8, "f4"),
        "norm.running_mean": np.zeros(8, "f4"),
        "norm.running_var": np.ones(8, "f4"),
    }
    eqx.load_state_dict(net, theirs)


# What fails under each heading, in the order of the quotations.
CALLS = {
    "`jax.jit(loss, static_argnums=0)(model, x)`": [
        lambda: jax.jit(loss, static_argnums=0)(model, x),
        lambda: hash(model),
    ],
    "`jax.jit(loss)(model, x)`": [lambda: jax.jit(loss)(model, x)],
    "a configuration as an argument": [
        lambda: eqx.filter_jit(lambda config, x: x * config.n)(Config(), x)
    ],
    "`jax.jit(lambda: model)()`": [lambda: jax.jit(lambda: model)()],
    "`jax.grad(loss)(model, x)`": [lambda: jax.grad(loss)(model, x)],
    "`jax.vmap(loss)(model, x)`": [lambda: jax.vmap(loss)(model, x)],
    "`jax.lax.scan` with a model as the carry": [scan],
    "`jax.lax.cond` that returns a model": [cond],
    "`jax.checkpoint(loss)(model, x)`": [lambda: jax.checkpoint(loss)(model, x)],
    "`jax.tree.map(lambda p: 0.9 * p, model)`": [
        lambda: jax.tree.map(lambda p: 0.9 * p, model)
    ],
    "`jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)`": [
        lambda: jax.tree.map(
            lambda p, g: p - 0.1 * g, model, eqx.filter_grad(loss)(model, x)
        )
    ],
    "`eqx.filter(model, eqx.trainable)(x)`": [
        lambda: eqx.filter(model, eqx.trainable)(x)
    ],
    "`[p.size for p in jax.tree.leaves(model)]`": [
        lambda: [p.size for p in jax.tree.leaves(model)]
    ],
    "`jax.lax.stop_gradient(model)`": [lambda: jax.lax.stop_gradient(model)],
    "`jnp.add(model, 1)`": [lambda: jnp.add(model, 1)],
    "`x + model`": [lambda: x + model],
    "`optimiser.init(model)`": [lambda: optax.adamw(1e-3).init(model)],
    "`optax.apply_updates(model, updates)`": [apply_updates],
    "`optimiser.update(grads, state)`": [update_without_parameters],
    "`optimiser.update` after freezing": [update_after_freezing],
    "`optimiser.update`, after the cell of a class was run again": [
        update_after_a_second_definition
    ],
    "`optax.multi_transform(optimisers, labels)` with a tree of labels": [
        tree_of_labels
    ],
    "`eqx.filter_grad(lambda x: x**2)(3)`": [
        lambda: eqx.filter_grad(lambda x: x**2)(3)
    ],
    "`eqx.filter_grad(model)(x)`, of a vector": [lambda: eqx.filter_grad(model)(x)],
    "`eqx.filter_grad(loss)(model)`, where the loss returns a pair": [
        lambda: eqx.filter_grad(pair)(model)
    ],
    "the gradient of a while loop": [gradient_of_a_loop],
    "`model(batch)`": [lambda: model(jnp.ones((4, 2)))],
    "`jax.vmap(model)(x)` of one example": [lambda: jax.vmap(model)(x)],
    "`jax.vmap(model)(xs, key)` with a key in place of keys": [
        lambda: jax.vmap(lambda x, key: model(x))(x[None], jax.random.key(0))
    ],
    "`jax.vmap(model)(xs, keys)`, where `xs` is split over devices": [split_batch],
    "`jax.vmap(model)(xs)`, where the weights are split over the axis of the batch": [
        split_weights_like_the_batch
    ],
    "`jax.vmap(f)(a, b)` with different sizes": [
        lambda: jax.vmap(lambda a, b: a + b)(jnp.ones(2), jnp.ones(3))
    ],
    "`eqx.filter_vmap(f)(model, batch)`": [
        lambda: eqx.filter_vmap(lambda m, x: m(x))(model, jnp.ones((4, 2)))
    ],
    "`eqx.filter_scan` with a carry that changes": [changing_carry],
    "a model and data on different devices": [different_devices],
    "arrays of two meshes": [different_meshes],
    "the loss of logits that are split by class": [loss_of_split_classes],
    "bfloat16 times float32": [promote],
    "`eqx.nn.Linear(2, 2, key=0)`": [lambda: eqx.nn.Linear(2, 2, key=0)],  # pyright: ignore[reportArgumentType] -- that is the mistake
    "`k1, k2 = key`": [unpack_key],
    "`dropout(x)` without a key": [lambda: eqx.nn.Dropout()(x)],
    "`jax.random.split(key)` in a block that was called without a key": [
        lambda: jax.random.split(None)  # pyright: ignore[reportArgumentType] -- that is the mistake
    ],
    "the same key used twice": [reuse_key],
    "a leaked array": [leak],
    "`if x > 0:`": [lambda: eqx.filter_jit(lambda x: 1 if x > 0 else 0)(x[0])],
    "`loss.item()` in a compiled function": [
        lambda: eqx.filter_jit(lambda loss: loss.item())(x[0])
    ],
    "`np.sin(x)` in a compiled function": [
        lambda: eqx.filter_jit(lambda x: np.sin(x))(x[0])
    ],
    "`range(n)`": [lambda: eqx.filter_jit(lambda n: len(range(n)))(jnp.asarray(3))],
    "`x[x > 0]`": [lambda: eqx.filter_jit(lambda x: x[x > 0])(x)],
    "`step(model)`, called twice": [donate_twice],
    "`model.weight + 1`, after donating the model": [read_donated],
    "`model.depth = 3`": [lambda: setattr(model, "depth", 3)],
    "`model.grid[0] = 1.0`": [write_into_a_grid],
    "`model.parameters()`, `model.eval()`": [
        lambda: model.parameters()  # pyright: ignore[reportAttributeAccessIssue] -- that is the mistake
    ],
    "`eqx.nn.ReLU()`, `from equinox_like.nn import ReLU`": [
        lambda: eqx.nn.ReLU(),  # pyright: ignore[reportAttributeAccessIssue] -- that is the mistake
        import_relu,
    ],
    "`eqx.nn.Sequential(layer, layer)`": [
        lambda: eqx.nn.Sequential(model, model)  # pyright: ignore[reportCallIssue] -- that is the mistake
    ],
    "`net(x)`, where the method is called `forward`": [
        lambda: Net()(x)  # pyright: ignore[reportCallIssue] -- that is the mistake
    ],
    "`norm(x)`": [forget_state],
    "`dropout(x, key)`": [
        lambda: eqx.nn.Dropout()(x, jax.random.key(0))  # pyright: ignore[reportCallIssue] -- that is the mistake
    ],
    "a field that is not set": [Unset],
    "a field without a default, after one with a default": [default_in_the_base_class],
    "`scale: jax.Array = jnp.ones(2)`": [array_as_default],
    "`@jaxtyped` above a compiled function": [
        lambda: jaxtyping.jaxtyped(eqx.filter_jit(loss), typechecker=beartype.beartype)
    ],
    "`model, state = eqx.nn.make_with_state(Net)`": [unpack_make_with_state],
    "`norm(x, state)`, with a state that was used": [use_old_state],
    "`eqx.load(path, model)`, where the dtype or the structure differs": [
        load_another_dtype
    ],
    "`eqx.load_state_dict(model, weights)`, with the weights of a PyTorch model": [
        load_from_pytorch
    ],
}


def quotations():
    for section in TEXT.split("\n### ")[1:]:
        heading, _, body = section.partition("\n")
        heading = heading.partition(", from ")[2]  # the message comes before
        body = body.partition("\n## ")[0]
        yield heading, re.findall(r"^```text\n(.*?)\n```$", body, re.DOTALL | re.M)


def test_every_quotation_is_checked():
    assert {h: len(q) for h, q in quotations()} == {h: len(c) for h, c in CALLS.items()}


@pytest.mark.parametrize("heading", CALLS)
def test_the_message_is_what_is_quoted(heading, without_type_checks):
    quoted = dict(quotations())[heading]
    for quotation, call in zip(quoted, CALLS[heading], strict=True):
        with pytest.raises(Exception) as caught:
            call()
        said = f"{caught.type.__name__}: {caught.value}"
        pattern = re.escape(quotation).replace(re.escape("..."), ".*")
        assert re.match(pattern, said, re.DOTALL), f"{said!r} is not {quotation!r}"


def test_errors_that_are_said_to_be_the_same_are():
    quoted = dict(quotations())
    for heading, call in (
        ("`jax.jit(loss)(model, x)`", lambda: jax.eval_shape(loss, model, x)),
        ("`jax.jit(loss)(model, x)`", lambda: jax.make_jaxpr(loss)(model, x)),
        ("`jax.checkpoint(loss)(model, x)`", lambda: jax.device_put(model)),
    ):
        pattern = re.escape(quoted[heading][0]).replace(re.escape("..."), ".*")
        with pytest.raises(TypeError) as caught:
            call()
        assert re.match(pattern, f"TypeError: {caught.value}", re.DOTALL)
    adam = optax.adam(1e-3)
    old = adam.init(eqx.filter(model, eqx.trainable))
    new = eqx.tree_at("layers[1]", model, eqx.nn.Linear(2, 3, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="different pytree metadata at key path"):
        adam.update(eqx.filter(new, eqx.trainable), old)
    wider = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    arrays = [jax.tree.leaves(eqx.filter(m, eqx.trainable)) for m in (model, wider)]
    with pytest.raises(TypeError, match="add got incompatible shapes for broadcasting"):
        adam.update(arrays[1], adam.init(arrays[0]))
    with pytest.raises(TypeError, match="Output from batched function"):
        jax.vmap(lambda key: eqx.nn.MLP(2, 1, 2, 1, key=key))(
            jax.random.split(jax.random.key(0))
        )
    pattern = re.escape(
        quoted["`jax.vmap(model)(xs, key)` with a key in place of keys"][0]
    )
    with pytest.raises(ValueError) as of_list:
        jax.vmap(model)([[1.0, 2.0]])
    assert re.match(pattern, f"ValueError: {of_list.value}")
    for convert in (float, int):
        pattern = re.escape(quoted["`loss.item()` in a compiled function"][0])
        with pytest.raises(jax.errors.ConcretizationTypeError) as concrete:
            eqx.filter_jit(lambda loss, to: to(loss))(x[0], convert)
        assert re.match(pattern, f"ConcretizationTypeError: {concrete.value}")
    with pytest.raises(jax.errors.TracerArrayConversionError):
        eqx.filter_jit(lambda loss: np.asarray(loss))(x[0])
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        eqx.filter_jit(lambda n: len(range(n)))(np.int64(3))
    layers = [model, model]
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        eqx.filter_jit(lambda i: layers[i](x))(jnp.asarray(1))
    chosen = eqx.filter_jit(lambda i: eqx.filter_switch(i, layers, x))(jnp.asarray(1))
    assert chosen == model(x)
    with pytest.raises(TypeError, match="Shapes must be 1D sequences of concrete"):
        eqx.filter_jit(lambda n: jnp.zeros(n))(np.int64(3))
    with pytest.raises(TypeError, match="__format__"):
        eqx.filter_jit(lambda loss: f"{loss:.3f}")(x[0])
    with pytest.raises(TypeError, match="stack requires ndarray or scalar arguments"):
        jnp.stack([model, model])
    with pytest.raises(ValueError, match=r"leaf `layers\[0\]\.weight`.*`filter_jit`"):
        jax.jit(loss, static_argnums=0)(model, x)


def test_a_changed_class_is_read_after_the_caches_are_cleared():
    class Net(eqx.Module):
        scale = 1

        def __call__(self, x):
            return self.scale * x

    f = eqx.filter_jit(Net())
    assert f(x[0]) == 1
    Net.scale = 2
    assert f(x[0]) == 1
    jax.clear_caches()
    assert f(x[0]) == 2
