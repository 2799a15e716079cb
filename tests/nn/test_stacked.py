import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like import nn


class Block(eqx.Module):
    linear: nn.Linear
    dropout: nn.Dropout
    activation: object

    def __init__(self, key, size=3, p=0.0):
        self.linear = nn.Linear(size, size, key=key)
        self.dropout = nn.Dropout(p)
        self.activation = jnp.tanh

    def __call__(self, x, *, key=None, scale=1.0):
        return x + scale * self.dropout(self.activation(self.linear(x)), key=key)


def loop(layers, x, keys=None, **kwargs):
    for i, layer in enumerate(layers):
        x = layer(x, key=None if keys is None else keys[i], **kwargs)
    return x


def test_layer_i_is_made_with_key_i(key) -> None:
    stacked = nn.Stacked(Block, 4, key=key)
    layers = [Block(k) for k in jax.random.split(key, 4)]
    assert len(stacked) == 4
    for mine, layer in zip(stacked.unstack(), layers, strict=True):
        assert eqx.tree_equal(mine, layer)
    assert eqx.tree_equal(stacked[-1], layers[3])
    assert eqx.tree_equal(nn.Stacked.from_layers(layers), stacked)
    with pytest.raises(IndexError, match="no layer 4: the depth is 4"):
        stacked[4]


def test_layers_with_a_state_are_made_without_jit_too(key) -> None:
    def make(key):
        return nn.BatchNorm(3, "batch", mode="batch")

    with jax.disable_jit():
        plain = nn.Stacked(make, 2, key=key)
    assert eqx.tree_equal(plain.layers.weight, jnp.ones((2, 3)))
    assert plain.layers.batch_state_index.init[0].shape == (2, 3)


@pytest.mark.parametrize("checkpoint", [None, True, "full", "dots_saveable"])
@pytest.mark.parametrize("unroll", [1, 2])
def test_values_and_gradients_are_those_of_the_loop(checkpoint, unroll, key) -> None:
    make = functools.partial(Block, p=0.5)
    options = {"checkpoint": checkpoint, "unroll": unroll}
    stacked = nn.Stacked(make, 3, key=key, **options)
    x = jnp.array([1.0, -2.0, 3.0])
    keys = jax.random.split(key, 3)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def mine(stacked):
        return stacked(x, key=key, scale=0.5).sum()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def plain(layers):
        return loop(layers, x, keys, scale=0.5).sum()

    value, grads = mine(stacked)
    expected, expected_grads = plain(stacked.unstack())
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    rows = jax.tree.map(lambda *xs: jnp.stack(xs), *expected_grads)
    pairs = zip(jax.tree.leaves(grads.layers), jax.tree.leaves(rows), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_checkpoint_keeps_less_for_the_backward_pass(key) -> None:
    def kept(checkpoint):
        stacked = nn.Stacked(Block, 3, key=key, checkpoint=checkpoint)
        often = lambda x: jnp.sin(jnp.sin(jnp.sin(x)))  # noqa: E731
        stacked = eqx.tree_at("layers.activation", stacked, often)
        _, vjp = jax.vjp(lambda x: stacked(x), jnp.ones(3))
        return sum(x.size for x in jax.tree.leaves(vjp))

    assert kept(True) < kept(None)


def test_program_does_not_grow_with_the_depth(key) -> None:
    def equations(depth):
        stacked = nn.Stacked(Block, depth, key=key)
        return str(jax.make_jaxpr(stacked)(jnp.ones(3))).count("\n")

    assert equations(2) == equations(200)


@pytest.mark.parametrize("x", [jnp.ones(3), (jnp.ones(3), {"a": jnp.arange(2)})])
def test_depth_zero_is_the_identity(x, key) -> None:
    stacked = nn.Stacked(Block, 0, key=key)
    assert stacked.layers.linear.weight.shape == (0, 3, 3)
    assert eqx.tree_equal(stacked(x), x) and stacked.unstack() == ()
    with pytest.raises(ValueError, match="an int >= 0 as `depth`; got -1"):
        nn.Stacked(Block, -1, key=key)


def test_functions_without_a_key_are_layers(key) -> None:
    class Add(eqx.Module):
        number: jax.Array

        def __call__(self, x):
            return x + self.number

    stacked = nn.Stacked.from_layers([Add(jnp.array(i)) for i in (1, 2, 3)])
    assert stacked(10, key=key) == 16


def test_layers_without_a_key_use_their_default() -> None:
    class Add(eqx.Module):
        number: jax.Array

        def __call__(self, x, *, key=7):
            return x + self.number + key

    assert nn.Stacked.from_layers([Add(jnp.array(1)), Add(jnp.array(2))])(0) == 17


def test_xs_goes_row_by_row_and_ys_come_back(key) -> None:
    class Step(eqx.Module):
        weight: jax.Array

        def __call__(self, x, each, *, key=None):
            return x * self.weight, x + each["a"]

    stacked = nn.Stacked.from_layers([Step(jnp.array(2.0)), Step(jnp.array(3.0))])
    out, ys = stacked(jnp.array(1.0), xs={"a": jnp.array([10.0, 20.0])})
    assert out == 6 and ys.tolist() == [11, 22]
    with pytest.raises(eqx.ShapeError, match=r"depth, 2; `xs\['a'\]` has shape \(3,\)"):
        stacked(jnp.array(1.0), xs={"a": jnp.ones(3)})


@pytest.mark.parametrize("returned", [lambda x: x, lambda x: jnp.stack([x, x])])
def test_with_xs_a_layer_returns_a_pair(returned) -> None:
    class Step(eqx.Module):
        weight: jax.Array

        def __call__(self, x, each):
            return returned(x * self.weight)

    stacked = nn.Stacked.from_layers([Step(jnp.array(2.0))] * 2)
    message = r"a layer of Stacked must return a pair `\(x, y\)`; it returned"
    with pytest.raises(TypeError, match=message):
        stacked(jnp.ones(3), xs=jnp.ones(2))


class Attend(eqx.Module):
    attention: nn.MultiheadAttention

    def __init__(self, key):
        self.attention = nn.MultiheadAttention(2, 4, key=key)

    def __call__(self, x, cache=None):
        if cache is None:
            return x + self.attention(x, x, x, is_causal=True)
        out, cache = self.attention(x, x, x, is_causal=True, cache=cache)
        return x + out, cache


def stacked_caches(stacked, length, **options):
    make = jax.vmap(lambda _: stacked.layers.attention.init_cache(length, **options))
    return make(jnp.arange(stacked.depth))


@pytest.mark.parametrize("is_double", [False, True])
def test_kv_caches_are_rows(is_double, key, strict) -> None:
    with jax.enable_x64(is_double):
        stacked = nn.Stacked(Attend, 3, key=key)
        caches = stacked_caches(stacked, 5)
        tokens = jax.random.normal(key, (5, 4))

        def step(caches, token):
            out, caches = stacked(token[None], xs=caches)
            return caches, out[0]

        _, outs = jax.lax.scan(step, caches, tokens)
        assert outs.dtype == ("float64" if is_double else "float32")
        np.testing.assert_allclose(outs, stacked(tokens), atol=1e-5)


@pytest.mark.parametrize("overflow", ["error", "ring"])
def test_kv_caches_are_written_and_read_in_place(overflow, key) -> None:
    stacked = nn.Stacked(Attend, 8, key=key)
    options = {"overflow": overflow}

    def one_by_one(layers, x, caches):
        for i, layer in enumerate(layers):
            x, caches[i] = layer(x, caches[i])
        return x, caches

    def temporary(call, model, caches):
        step = eqx.filter_jit(call, donate=("caches",))
        compiled = step.lower(model, jnp.ones((1, 4)), caches).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    call = lambda model, x, caches: model(x, xs=caches)  # noqa: E731
    rows = stacked_caches(stacked, 1000, **options)
    found = temporary(call, stacked, rows)
    each = [x.attention.init_cache(1000, **options) for x in stacked.unstack()]
    expected = temporary(one_by_one, stacked.unstack(), each)
    of_a_layer = sum(x.nbytes for x in jax.tree.leaves(each[0]))
    assert found - expected < of_a_layer / 8


class Several(eqx.Module):
    """A layer that does with its caches what `how` says; `x` has the shape `(2, n, 4)`."""

    attention: nn.MultiheadAttention
    how: str = eqx.field(static=True)

    def __call__(self, x, caches):
        def attend(x, cache):
            return self.attention(x, x, x, is_causal=True, cache=cache)

        one, other = caches
        if self.how == "vmap":  # the caches have the axis of the batch
            out, one = jax.vmap(attend)(x, one)
            return x + out, (one, other)
        row, _ = x
        if self.how == "jit":
            out, one = eqx.filter_jit(attend)(row, one)
        elif self.how == "closure":
            out, kept = jax.vmap(lambda x: attend(x, one))(x)
            return x + out, (jax.tree.map(lambda a: a[1], kept), other)
        else:
            out, one = attend(row, one)
        if self.how == "swapped":
            one, other = other, one
        elif self.how == "twice":
            more, one = attend(out, one)
            out = out + more
        elif self.how == "forgotten":
            one = caches[0]
        elif self.how == "truncated":
            one = one.truncate(1)
        elif self.how == "both":
            more, other = attend(out, other)
            out = out + more
        elif self.how == "shared":
            other = one
        return x + out, (one, other)


@pytest.mark.parametrize(
    "how",
    [
        *("vmap", "jit", "closure", "swapped", "twice", "forgotten"),
        *("truncated", "both", "shared", "ring"),
    ],
)
def test_layers_may_do_with_their_caches_what_they_like(how, key) -> None:
    def make(key):
        return Several(nn.MultiheadAttention(2, 4, key=key), how)

    stacked = nn.Stacked(make, 3, key=key)

    def empty(layer):
        overflow = "ring" if how == "ring" else "error"
        cache = layer.attention.init_cache(6, overflow=overflow)
        if how == "vmap":
            cache = jax.tree.map(lambda a: jnp.stack([a, a]), cache)
        return cache, cache

    layers = stacked.unstack()
    each = [empty(layer) for layer in layers]
    rows = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    tokens = jax.random.normal(key, (2, 3, 4))
    for part in tokens[:, :2], tokens[:, 2:]:
        x, rows = eqx.filter_jit(stacked)(part, xs=rows)
        expected = part
        for i, layer in enumerate(layers):
            expected, each[i] = layer(expected, each[i])
        np.testing.assert_allclose(x, expected, atol=1e-5)
        stack = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
        assert eqx.tree_equal(rows, stack, rtol=1e-5, atol=1e-5)


def test_caches_of_a_stacked_within_a_stacked(key) -> None:
    class Inner(eqx.Module):
        layers: nn.Stacked

        def __call__(self, x, caches):
            return self.layers(x, xs=caches)

    outer = nn.Stacked(lambda k: Inner(nn.Stacked(Attend, 2, key=k)), 3, key=key)
    layers = [x for inner in outer.unstack() for x in inner.layers.unstack()]
    each = [layer.attention.init_cache(4) for layer in layers]
    rows = jax.tree.map(lambda *xs: jnp.stack(xs).reshape(3, 2, *xs[0].shape), *each)
    x = expected = jax.random.normal(key, (2, 4))
    x, rows = outer(x, xs=rows)
    for i, layer in enumerate(layers):
        expected, each[i] = layer(expected, each[i])
    np.testing.assert_allclose(x, expected, atol=1e-5)
    found = rows.key.reshape(6, *rows.key.shape[2:])
    np.testing.assert_allclose(found, jnp.stack([c.key for c in each]), atol=1e-5)


@pytest.mark.parametrize("checkpoint", [None, True])
@pytest.mark.parametrize("unroll", [1, True])
def test_gradient_through_caches_is_that_of_layers_one_by_one(
    checkpoint, unroll, key
) -> None:
    stacked = nn.Stacked(Attend, 3, key=key, checkpoint=checkpoint, unroll=unroll)
    tokens = jax.random.normal(key, (4, 4))

    def loss(stacked):
        x, caches = stacked(tokens[:2], xs=stacked_caches(stacked, 5))
        y, caches = stacked(tokens[2:], xs=caches)
        return (x**2).sum() + (y**2).sum() + (caches.key**2).sum()

    def loss_of_each(stacked):
        layers = stacked.unstack()
        caches = [layer.attention.init_cache(5) for layer in layers]
        total = 0
        for part in tokens[:2], tokens[2:]:
            for i, layer in enumerate(layers):
                part, caches[i] = layer(part, caches[i])
            total += (part**2).sum()
        return total + sum((cache.key**2).sum() for cache in caches)

    value, grads = eqx.filter_value_and_grad(loss)(stacked)
    expected, expected_grads = eqx.filter_value_and_grad(loss_of_each)(stacked)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert eqx.tree_equal(grads, expected_grads, rtol=1e-4, atol=1e-5)


def test_layer_with_a_cache_returns_that_cache(key) -> None:
    class Other(Attend):
        def __call__(self, x, cache=None):
            x, cache = super().__call__(x, cache)
            return x, (cache, x)

    stacked = nn.Stacked(Other, 3, key=key)
    message = "With caches as `xs`, a layer of Stacked must return"
    with pytest.raises(eqx.ShapeError, match=message):
        stacked(jnp.ones((1, 4)), xs=stacked_caches(stacked, 5))


def stateful(key):
    return nn.Sequential([nn.Linear(3, 3, key=key), nn.BatchNorm(3, "b", mode="batch")])


@pytest.mark.parametrize("from_layers", [False, True])
@pytest.mark.parametrize("checkpoint", [None, True])
def test_state_has_a_row_for_each_layer(from_layers, checkpoint, key) -> None:
    keys = jax.random.split(key, 3)

    def make():
        if from_layers:
            layers = [stateful(k) for k in keys]
            return nn.Stacked.from_layers(layers, checkpoint=checkpoint)
        return nn.Stacked(stateful, 3, key=key, checkpoint=checkpoint)

    model, state = nn.make_with_state(make)()
    assert model.is_stateful()
    xs = jax.random.normal(key, (6, 3))
    apply = jax.vmap(model, axis_name="b", in_axes=(0, None), out_axes=(0, None))
    plain, plain_state = nn.make_with_state(
        lambda: nn.Sequential([stateful(k) for k in keys])
    )()
    plain_apply = jax.vmap(plain, axis_name="b", in_axes=(0, None), out_axes=(0, None))
    for _ in range(2):
        out, state = eqx.filter_jit(apply)(xs, state)
        expected, plain_state = plain_apply(xs, plain_state)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    index = model.layers[1].batch_state_index
    assert model.layers[1].weight.shape == (3, 3)
    for i in range(3):
        one = plain_state.get(plain[i][1].batch_state_index)[0]
        np.testing.assert_allclose(state.get(index)[0][i], one, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="Stacked are stateful"):
        model(xs[0])
    resting = nn.inference_mode(model)
    assert resting(xs[0], state)[0].shape == (3,)


def test_layers_that_need_a_state_must_be_stateful_layers(key) -> None:
    class Block(eqx.Module):
        norm: nn.BatchNorm

        def __init__(self, key):
            self.norm = nn.BatchNorm(3)

        def __call__(self, x, state):
            return self.norm(x, state)

    model, state = nn.make_with_state(lambda: nn.Stacked(Block, 2, key=key))()
    with pytest.raises(TypeError, match=r"Stacked is a Block.*StatefulLayer"):
        model(jnp.ones((4, 3)), state)


def test_error_of_a_layer_whose_xs_are_called_state_is_its_own(key) -> None:
    class Block(eqx.Module):
        linear: nn.Linear

        def __init__(self, key):
            self.linear = nn.Linear(3, 3, key=key)

        def __call__(self, x, state):
            return self.linear(jnp.ones(4)), state

    model = nn.Stacked(Block, 2, key=key)
    with pytest.raises(eqx.ShapeError, match=r"Linear takes `x` of shape \(3,\)"):
        model(jnp.ones(3), xs=jnp.ones((2, 3)))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_two_stacks_of_one_function_have_states_of_their_own(impl) -> None:
    make, key = lambda key: nn.BatchNorm(2), jax.random.key(0, impl=impl)
    one, other = (nn.Stacked(make, 2, key=key).layers for _ in range(2))
    assert one.batch_counter.marker is not other.batch_counter.marker


@pytest.mark.parametrize("depth", [0, 2])
def test_state_stays_valid_at_inference(depth, key) -> None:
    model, state = nn.make_with_state(lambda: nn.Stacked(stateful, depth, key=key))()
    resting = nn.inference_mode(model)
    for layer in (resting, eqx.frozen(resting), nn.mixed(resting, "compute=bf16")):
        _, after = layer(jnp.ones(3), state)
        assert after is state


def test_layer_that_returns_an_old_state_is_an_error(key) -> None:
    class Forgetful(nn.StatefulLayer):
        norm: nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(x, state)[0], state

    def make(key):
        return Forgetful(nn.BatchNorm(3))

    model, state = nn.make_with_state(lambda: nn.Stacked(make, 2, key=key))()
    with pytest.raises(ValueError, match="out of date"):
        model(jnp.ones((4, 3)), state)


def test_state_does_not_fit_layers_that_are_taken_out(key) -> None:
    model, state = nn.make_with_state(lambda: nn.Stacked(stateful, 3, key=key))()
    x = jnp.ones((4, 3))
    layers = model.unstack()
    others = [model[-1], model[:2], model[1:], model[::-1]]
    others += [nn.Stacked.from_layers(some) for some in (layers[:2], layers[::-1])]
    for part in (*layers, *others):
        for inference in (False, True):
            part = nn.inference_mode(part, inference)
            with pytest.raises(KeyError):
                jax.vmap(part, (0, None), (0, None), axis_name="b")(x, state)
    message = (
        r"no value for Stacked\.layers\.layers\[1\]\.batch_counter of layer 0; it has"
    )
    with pytest.raises(KeyError, match=message):
        state.substate(layers[0])
    assert eqx.tree_equal(model[1], layers[1], typematch=True)


def test_state_fits_all_layers_as_a_slice(key) -> None:
    model, _ = nn.make_with_state(lambda: nn.Stacked(stateful, 3, key=key))()
    assert eqx.tree_equal(model[:], model)


def test_layers_that_are_taken_out_first_get_states_of_their_own(key) -> None:
    stacked = nn.Stacked(stateful, 3, key=key)
    layers = stacked.unstack()
    named = nn.make_with_state(lambda: nn.Sequential(layers))()
    unnamed = nn.Sequential(layers), nn.State(layers)
    part = stacked[1:], nn.State(stacked[1:])
    for model, state in (named, unnamed, part):
        assert nn.inference_mode(model)(jnp.ones(3), state)[0].shape == (3,)
    assert len(jax.tree.leaves(unnamed[1])) == 9


@pytest.mark.parametrize("members", [2, 3])
def test_ensemble_called_without_vmap_is_an_error_with_the_fix(members, key) -> None:
    def make(key):
        return nn.Stacked(lambda key: nn.Linear(4, 4, key=key), 3, key=key)

    ensemble = eqx.filter_vmap(make)(jax.random.split(key, members))
    message = r"weight` (of|has) shape \(.*filter_vmap.*\(ensemble, x\)"
    with pytest.raises(eqx.ShapeError, match=message):
        ensemble(jnp.ones(4))
    call = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
    assert call(ensemble, jnp.ones(4)).shape == (members, 4)


def test_layers_of_one_device_are_scanned(key) -> None:
    stacked = nn.Stacked(lambda key: nn.Linear(4, 4, key=key), 4, key=key)
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("stage")

    @eqx.filter_shard_map(mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
    def call(stacked, x):
        return stacked(x)[None]

    with pytest.raises(eqx.ShapeError, match="filter_scan"):
        call(stacked, jnp.ones(4))

    @eqx.filter_shard_map(mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
    def scan(stacked, x):
        x = jax.lax.pcast(x, "stage", to="varying")
        return eqx.filter_scan(lambda x, layer: (layer(x), None), x, stacked.layers)[0][
            None
        ]

    ends = scan(stacked, jnp.ones(4))
    np.testing.assert_allclose(ends[1], stacked[2:](jnp.ones(4)), atol=1e-6)


def test_two_of_one_kind_have_states_of_their_own(key) -> None:
    pair = [nn.Stacked(stateful, 2, key=key) for _ in range(2)]
    assert len(jax.tree.leaves(nn.State(pair))) == 2 * len(
        jax.tree.leaves(nn.State(pair[0]))
    )


def test_state_is_returned_if_it_was_passed(key) -> None:
    stacked = nn.Stacked(Block, 2, key=key)
    assert not stacked.is_stateful()
    out, state = stacked(jnp.ones(3), "any")
    assert state == "any" and (out == stacked(jnp.ones(3))).all()


def test_it_stands_in_a_sequential(key) -> None:
    model = nn.Sequential([jnp.negative, nn.Stacked(Block, 2, key=key)])
    assert model(jnp.ones(3), key=key).shape == (3,)
    model, state = nn.make_with_state(
        lambda: nn.Sequential([nn.Stacked(stateful, 2, key=key)])
    )()
    assert nn.inference_mode(model)(jnp.ones(3), state)[0].shape == (3,)


def test_layer_that_changes_its_input_is_an_error(key) -> None:
    stacked = nn.Stacked.from_layers([nn.Linear(3, 2, key=key)] * 2)
    message = r"given shape \(3,\) and dtype float32, and returned shape \(2,\)"
    with pytest.raises(eqx.ShapeError, match=message):
        stacked(jnp.ones(3))
    halving = nn.Stacked.from_layers([nn.Lambda(lambda x: x.astype(jnp.float16))])
    with pytest.raises(eqx.ShapeError, match=r"returned shape .* dtype float16"):
        halving(jnp.ones(3))
    with pytest.raises(eqx.ShapeError, match=r"^At `layers`: Linear takes `x`"):
        stacked(jnp.ones(4))


def test_construction_compiles_nothing_anew(key) -> None:
    """A loop over the keys would be compiled for each new function."""
    events: list[str] = []
    listen = lambda event, _, **__: events.append(event)  # noqa: E731

    def build() -> nn.Stacked:
        return nn.Stacked(lambda key: nn.Linear(3, 3, key=key), 4, key=key)

    build()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        build()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not any("backend_compile" in event for event in events)


def test_unlike_layers_are_named_by_path(key) -> None:
    def refused(*layers):
        with pytest.raises(ValueError, match=r"Stacked\.from_layers") as info:
            nn.Stacked.from_layers(layers)
        return str(info.value)

    linear = nn.Linear(3, 3, key=key)
    assert "at least one layer" in refused()
    other = nn.Linear(3, 3, use_bias=False, key=key)
    assert "`layer.use_bias` is the static value True in layer 0, and False" in refused(
        linear, other
    )
    half = nn.Linear(3, 3, dtype=jnp.float16, key=key)
    assert "`layer.weight` has shape (3, 3) and dtype float32" in refused(
        linear, linear, half
    )
    one, two = nn.Lambda(jnp.sin), nn.Lambda(jnp.cos)
    assert "`layer.fn` is" in refused(one, two)
    one, two = nn.Dropout(0.1), nn.Dropout(0.2)
    assert (
        "`layer.p` is the static value 0.1 in layer 0, and 0.2 in layer 1"
        in refused(one, two)
    )


def test_unknown_policy_is_an_error(key) -> None:
    with pytest.raises(ValueError, match="no policy 'everything'"):
        nn.Stacked(Block, 2, key=key, checkpoint="everything")


def test_layers_can_be_changed_in_place(key) -> None:
    stacked = nn.Stacked(Block, 2, key=key)
    stacked = eqx.tree_at("layers.linear.weight", stacked, replace_fn=jnp.zeros_like)
    assert not stacked[1].linear.weight.any()


@pytest.mark.parametrize(
    "name", ["save_only_these_names", "save_from_both_policies", "every one"]
)
def test_function_that_makes_policies_is_not_one(name, key) -> None:
    policies = jax.checkpoint_policies
    if name == "every one":
        for policy in ("dots_saveable", "nothing_saveable", "checkpoint_dots"):
            nn.Stacked(Block, 0, key=key, checkpoint=policy)
        nn.Stacked(Block, 0, key=key, checkpoint=policies.save_only_these_names("a"))
        return
    message = rf"`jax.checkpoint_policies.{name}` makes a policy.*{name}\(\.\.\.\)`"
    for checkpoint in (name, getattr(policies, name)):
        with pytest.raises(ValueError, match=message):
            nn.Stacked(Block, 2, key=key, checkpoint=checkpoint)


def test_slice_is_stacked(key) -> None:
    stacked = nn.Stacked(Block, 4, key=key, checkpoint=True, unroll=2)
    part = stacked[1:3]
    assert type(part) is nn.Stacked and len(part) == 2
    assert part.checkpoint is True and part.unroll == 2
    x = jnp.ones(3)
    np.testing.assert_allclose(part(x), stacked[2](stacked[1](x)), rtol=1e-6)
    assert eqx.tree_equal(stacked[::-2][0], stacked[3]) and len(stacked[4:]) == 0


def test_frozen_parts_are_stacked(key) -> None:
    layers = [Block(k) for k in jax.random.split(key, 2)]
    layers = [eqx.tree_at("linear.weight", m, replace_fn=eqx.frozen) for m in layers]
    stacked = nn.Stacked.from_layers(layers)
    assert stacked.layers.linear.weight.value.shape == (2, 3, 3)
    longer = eqx.tree_at("linear.weight", layers[1], eqx.frozen(jnp.ones((4, 3))))
    with pytest.raises(ValueError, match=r"`layer.linear.weight` has shape \(3, 3\)"):
        nn.Stacked.from_layers([layers[0], longer])
