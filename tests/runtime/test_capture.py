"""`capture`: values are those of Modules called by hand, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

K = jax.random.key(0)
X = jnp.linspace(-1, 1, 3)
MLP = drawn(lambda: nn.MLP(3, 3, 4, 2, key=K))
FIRST = jax.nn.relu(MLP.layers[0](X))


class Wrap(eqx.Module):
    """Calls a layer by a function of the layer and the input."""

    layer: nn.Linear
    how: object = eqx.field(static=True)

    def __call__(self, x):
        return self.how(self.layer, x)  # pyright: ignore[reportCallIssue]


LINEAR = drawn(lambda: nn.Linear(3, 3, key=K))


def wrap(how) -> Wrap:
    return Wrap(LINEAR, how)


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("wrapper", [eqx.filter_jit, eqx.filter_checkpoint])
def test_no_tracer_outlives_its_trace(wrapper) -> None:
    stacked = nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 2, key=K)
    with jax.checking_leaks():
        values = eqx.capture(wrapper(stacked), nn.Linear)(X)[1]
    assert [x.shape for x in values.values()] == [(2, 3)]


# What is chosen


def test_outputs_come_by_path_beside_the_plain_output() -> None:
    out, values = eqx.capture(MLP, "layers[*]")(X)
    same(out, MLP(X))
    assert list(values) == ["layers[0]", "layers[1]", "layers[2]"]
    same(values["layers[0]"], MLP.layers[0](X))
    same(values["layers[1]"], MLP.layers[1](FIRST))
    same(values["layers[2]"], out)


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("layers[1]", ["layers[1]"]),
        ("", [""]),
        ("**", ["layers[0]", "layers[1]", "layers[2]", ""]),
        (nn.Linear, ["layers[0]", "layers[1]", "layers[2]"]),
        (lambda m: getattr(m, "out_features", 0) == 4, ["layers[0]", "layers[1]"]),
        (["layers[2]", nn.MLP], ["layers[2]", ""]),
    ],
)
def test_modules_are_chosen_by_pattern_class_predicate_or_several(where, paths) -> None:
    assert list(eqx.capture(MLP, where)(X)[1]) == paths


def test_paths_within_a_transformed_member_are_those_of_what_it_wraps() -> None:
    model = nn.Sequential([eqx.filter_jit(LINEAR), eqx.filter_checkpoint(LINEAR)])
    paths = [f"layers[{i}].__wrapped__" for i in range(2)]
    _, values = eqx.capture(model, nn.Linear)(X)
    assert list(values) == paths
    assert [row.path for row in nn.summary(model).rows][::2] == [
        f"{path}.weight" for path in paths
    ]
    moved = eqx.tree_at(f"{paths[0]}.bias", model, X)
    same(eqx.capture(moved, paths[0])(X)[1], {paths[0]: LINEAR.weight @ X + X})


def test_inputs_are_what_the_module_is_called_with() -> None:
    _, values = eqx.capture(MLP, "layers[1]", of="inputs")(X)
    args, kwargs = values["layers[1]"]
    same(args, (FIRST,))
    assert kwargs == {}
    model = wrap(lambda layer, x: layer(x, key=K))
    assert eqx.capture(model, "layer", of="inputs")(X)[1]["layer"].kwargs == {"key": K}


def test_several_calls_give_a_tuple_in_their_order() -> None:
    _, values = eqx.capture(wrap(lambda layer, x: layer(layer(x))), "layer")(X)
    same(values["layer"], (LINEAR(X), LINEAR(LINEAR(X))))


def test_model_is_left_as_it_is_and_watched_modules_are_what_they_were() -> None:
    def how(layer, x):
        assert isinstance(layer, nn.Linear) and type(layer).__name__ == "Linear"
        assert layer.weight.shape == (3, 3) and layer.in_features == 3
        return layer(x)

    model = wrap(how)
    before = jax.tree.structure(model)
    eqx.capture(model, "**")(X)
    assert jax.tree.structure(model) == before and type(model.layer) is nn.Linear


class Odd(eqx.Module):
    def __call__(self, x):
        return {"x": x, "name": "odd", "none": None, "f": jnp.tanh}


class Silent(eqx.Module):
    def __call__(self, x):
        return "nothing"


def test_outputs_may_be_any_tree_with_static_leaves_and_without_arrays() -> None:
    class Model(eqx.Module):
        odd: Odd
        silent: Silent

        def __call__(self, x):
            self.silent(x)
            return self.odd(x)["x"]

    capture = eqx.capture(Model(Odd(), Silent()), ["odd", "silent"])
    for call in (capture, eqx.filter_jit(capture)):
        _, values = call(X)
        assert values["silent"] == "nothing"
        assert {**values["odd"], "x": 0} == {
            "x": 0,
            "name": "odd",
            "none": None,
            "f": jnp.tanh,
        }
        same(values["odd"]["x"], X)


# Transformations


@pytest.mark.parametrize("transform", [eqx.filter_jit, lambda f: f])
def test_compiled_and_mapped(transform) -> None:
    capture = transform(eqx.capture(MLP, "layers[0]"))
    same(capture(X)[1]["layers[0]"], MLP.layers[0](X))
    xs = jnp.stack([X, 2 * X])
    out, values = transform(eqx.filter_vmap(eqx.capture(MLP, "layers[0]")))(xs)
    same(out, jax.vmap(MLP)(xs))
    same(values["layers[0]"], jax.vmap(MLP.layers[0])(xs))


def test_beside_a_gradient_and_differentiated_itself() -> None:
    def loss(model, x):
        out, values = eqx.capture(model, "layers[0]")(x)
        return out.sum(), values

    grads, values = eqx.filter_grad(loss, has_aux=True)(MLP, X)
    same(grads, eqx.filter_grad(lambda m, x: m(x).sum())(MLP, X))
    same(values["layers[0]"], MLP.layers[0](X))
    seen = jax.grad(lambda x: eqx.capture(MLP, "layers[0]")(x)[1]["layers[0]"].sum())(X)
    np.testing.assert_allclose(seen, MLP.layers[0].weight.sum(0), rtol=1e-6)


@pytest.mark.parametrize("checkpoint", [None, True])
def test_stacked_layers_give_stacked_values(checkpoint) -> None:
    stacked = nn.Stacked(
        lambda k: nn.MLP(3, 3, 4, 1, key=k), 2, key=K, checkpoint=checkpoint
    )
    expected = []
    x = X
    for layer in stacked.unstack():
        expected.append(layer.layers[0](x))
        x = layer(x)
    capture = eqx.filter_jit(eqx.capture(stacked, "layers.layers[0]"))
    out, values = capture(X)
    same(out, eqx.filter_jit(stacked)(X))
    np.testing.assert_allclose(
        values["layers.layers[0]"], jnp.stack(expected), rtol=1e-6
    )

    def loss(model, x):
        out, values = eqx.capture(model, "layers.layers[0]")(x)
        return out.sum() + values["layers.layers[0]"].sum()

    by_hand = eqx.filter_grad(loss)(nn.Stacked.from_layers(stacked.unstack()), X)
    for a, b in zip(
        jax.tree.leaves(eqx.filter_grad(loss)(stacked, X)),
        jax.tree.leaves(by_hand),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def custom_jvp(layer, x):
    f = jax.custom_jvp(lambda x: layer(x))
    f.defjvp(lambda primals, tangents: (f(*primals), 5 * tangents[0]))
    return f(x)


def custom_vjp(layer, x):
    f = jax.custom_vjp(lambda x: layer(x))
    f.defvjp(lambda x: (layer(x), None), lambda _, ct: (5 * ct,))
    return f(x)


def custom_batching(layer, x):
    f = custom_vmap(lambda x: layer(x))
    f.def_vmap(lambda n, batched, x: (jax.vmap(layer)(x), True))
    return f(x)


WAYS = {
    "jit": lambda layer, x: jax.jit(lambda x: layer(x))(x),
    "filter_jit": lambda layer, x: eqx.filter_jit(layer)(x),
    "nested jit": lambda layer, x: jax.jit(lambda x: jax.jit(lambda x: layer(x))(x))(x),
    "checkpoint": lambda layer, x: jax.checkpoint(lambda x: layer(x))(x),
    "filter_checkpoint": lambda layer, x: eqx.filter_checkpoint(layer)(x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "custom_vmap": custom_batching,
}


@pytest.mark.parametrize("way", WAYS)
def test_within_functions_of_every_kind(way) -> None:
    model = wrap(WAYS[way])
    capture = eqx.capture(model, "layer")
    for x, f, plain in [
        (X, capture, LINEAR),
        (X, eqx.filter_jit(capture), LINEAR),
        (jnp.stack([X, -X]), eqx.filter_vmap(capture), jax.vmap(LINEAR)),
    ]:
        out, values = f(x)
        np.testing.assert_allclose(out, plain(x), rtol=1e-6)
        np.testing.assert_allclose(values["layer"], plain(x), rtol=1e-6)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "custom_vmap"])
def test_output_keeps_its_rules_and_values_have_derivatives_of_their_own(way) -> None:
    model = wrap(WAYS[way])
    out = jax.grad(lambda x: eqx.capture(model, "layer")(x)[0].sum())(X)
    same(out, jax.grad(lambda x: model(x).sum())(X))
    values = jax.grad(lambda x: eqx.capture(model, "layer")(x)[1]["layer"].sum())(X)
    np.testing.assert_allclose(values, LINEAR.weight.sum(0), rtol=1e-6)


@pytest.mark.parametrize("scanned", [False, True])
def test_model_that_takes_a_gradient_gives_each_value_once(scanned) -> None:
    def gradient(layer, x):
        def energy(x):
            return jnp.sum(jnp.tanh(layer(x)) ** 2)

        def scan(x):
            return jax.lax.scan(lambda x, _: (x, energy(x)), x, length=1)[1][0]

        return jax.grad(jax.checkpoint(scan if scanned else energy))(x)

    model = wrap(gradient)
    for call in (
        eqx.capture(model, "layer"),
        eqx.filter_jit(eqx.capture(model, "layer")),
    ):
        out, values = call(X)
        np.testing.assert_allclose(out, model(X), rtol=1e-6)
        np.testing.assert_allclose(values["layer"].ravel(), LINEAR(X), rtol=1e-6)


def test_model_may_transpose_what_has_a_tag() -> None:
    def f(x):
        (y,) = jax.linear_transpose(lambda x: eqx.tag(2 * x, "double"), x)(x)
        return eqx.tag(y, "result")

    out, values = eqx.capture(f, "result")(X)
    same(out, 2 * X)
    same(values, {"result": 2 * X})


def test_maps_within_the_model_put_their_axes_first() -> None:
    xs = jnp.arange(24.0).reshape(2, 4, 3)
    model = wrap(lambda layer, x: jax.vmap(jax.vmap(layer), in_axes=1, out_axes=1)(x))
    out, values = eqx.capture(model, "layer")(xs)
    same(out, model(xs))
    same(values["layer"], jnp.moveaxis(out, 1, 0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_checked", [True, False])
def test_shard_map_gives_a_row_for_each_of_its_devices(kind, is_checked) -> None:
    def call(layer, xs):
        ys = jax.vmap(layer)(xs)
        return ys * eqx.tag(lax.psum(ys.sum(), "a"), "sum")

    def mapped(layer, xs):
        specs = {
            "in_specs": (P(), P("a")),
            "out_specs": P("a"),
            "check_vma": is_checked,
        }
        return jax.shard_map(call, mesh=mesh, axis_names={"a"}, **specs)(layer, xs)

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        xs = jax.device_put(jnp.arange(12.0).reshape(4, 3), P("a"))
        model = wrap(mapped)
        out, values = eqx.filter_jit(eqx.capture(model, ("layer", "sum")))(xs)
        same(out, eqx.filter_jit(model)(xs))
        ys = jax.vmap(LINEAR)(np.asarray(xs))
    assert values["layer"].shape == (2, 2, 3)
    np.testing.assert_allclose(values["layer"].reshape(4, 3), ys, rtol=1e-6)
    np.testing.assert_allclose(values["sum"], [ys.sum()] * 2, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_compiled_function_within_keeps_its_shardings(kind) -> None:
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,))
    rows = jax.NamedSharding(mesh, P("rows"))

    def how(layer, x):
        def shard(x):
            return jax.vmap(layer)(x)

        return jax.jit(shard, in_shardings=rows, out_shardings=rows)(x)

    model = eqx.filter_shard(wrap(how), jax.NamedSharding(mesh, P()))
    xs = jax.device_put(jnp.stack([X, -X, 2 * X, X]), rows)
    for call in (lambda f: f, eqx.filter_jit):
        out, values = call(eqx.capture(model, "layer"))(xs)
        same(out, model(xs))
        same(values["layer"], out)
        assert out.sharding.is_equivalent_to(rows, 2)


def test_named_axes_and_state_pass_through() -> None:
    norm, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode="batch")
    model = nn.Sequential([LINEAR, norm])
    axes = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    copies = jax.tree.flatten(state)
    xs = jax.random.normal(K, (4, 3))
    expected, _ = jax.vmap(model, **axes)(xs, jax.tree.unflatten(*copies[::-1]))
    capture = eqx.capture(model, "layers[0]")

    def call(x, state):
        (out, state), values = capture(x, state)
        return (out, values), state

    (out, values), _ = jax.vmap(call, **axes)(xs, state)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(values["layers[0]"], jax.vmap(LINEAR)(xs), rtol=1e-6)


def test_layers_that_take_keys_and_states_are_known_as_such() -> None:
    model = nn.Sequential([LINEAR, nn.Dropout(0.5)])
    out, values = eqx.capture(model, "**")(X, key=K)
    same(out, model(X, key=K))
    same(values["layers[1]"], out)


def test_frozen_parts_and_attention_are_captured_under_their_paths() -> None:
    model = nn.Sequential([eqx.frozen(LINEAR)])
    assert list(eqx.capture(model, nn.Linear)(X)[1]) == ["layers[0]"]
    assert list(eqx.capture(eqx.frozen(model), "")(X)[1]) == [""]
    attention = nn.MultiheadAttention(1, 3, key=K)
    xs = jnp.stack([X, -X])
    out, values = eqx.capture(attention, "query_proj")(xs, xs, xs)
    np.testing.assert_allclose(out, attention(xs, xs, xs), rtol=1e-6)
    np.testing.assert_allclose(
        values["query_proj"], jax.vmap(attention.query_proj)(xs), rtol=1e-6
    )


@pytest.mark.parametrize(
    "wrapper",
    [
        eqx.tree_at(
            "b",
            nn.LoRA(nn.Linear(3, 64, key=K), rank=2, key=K),
            jax.random.normal(K, (64, 2)),
        ),
        nn.WeightNorm(LINEAR),
        nn.mixed(LINEAR, nn.Policy(compute_dtype=jnp.bfloat16)),
    ],
    ids=lambda wrapper: type(wrapper).__name__,
)
def test_a_wrapper_is_captured_beside_the_layer_whose_attributes_it_shows(
    wrapper,
) -> None:
    model = nn.Sequential([wrapper])
    out, values = eqx.capture(model, "layers[0]**")(X)
    assert values.keys() == {"layers[0]", "layers[0].layer"}
    same(values["layers[0]"], out)
    same(out, model(X))  # also if the wrapper looks at the class of the layer


def test_captures_within_each_other_each_get_their_own() -> None:
    def how(layer, x):
        out, values = eqx.capture(layer, "")(x)
        same(list(values), [""])
        return out + values[""]

    model = wrap(how)
    out, values = eqx.capture(model, "layer")(X)
    same(values, {"layer": LINEAR(X)})
    same(out, 2 * LINEAR(X))


class Compiled(eqx.Module):
    linear: nn.Linear

    @eqx.filter_jit
    def __call__(self, x):
        return self.linear(x)


class Strict(eqx.Module, strict=True):
    linear: nn.Linear

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("cls", [Compiled, Strict])
def test_classes_with_a_compiled_call_and_strict_ones(cls) -> None:
    out, values = eqx.capture(cls(LINEAR), ["", "linear"])(X)
    same(values, {"linear": out, "": out})


# Costs


def test_a_watched_class_is_no_subclass_for_the_code_of_the_user() -> None:
    """Such as a registry of classes by name."""
    known = {}

    class Named(eqx.Module):
        def __init_subclass__(cls, *, name, **kwargs):
            super().__init_subclass__(**kwargs)
            known[name] = cls

    class Double(Named, name="double"):
        def __call__(self, x):
            return 2 * x

    _, values = eqx.capture(nn.Sequential([Double()]), Named)(X)
    same(values["layers[0]"], 2 * X)
    assert known == {"double": Double}


def test_compiled_program_has_the_operations_of_the_plain_one() -> None:
    def flops(f):
        cost = jax.jit(f).lower(X).compile().cost_analysis()
        return cost["flops"]  # pyright: ignore[reportOptionalSubscript]

    for model in (MLP, wrap(custom_jvp), wrap(custom_vjp), wrap(WAYS["checkpoint"])):
        capture = eqx.capture(model, nn.Linear)
        assert flops(lambda x, f=capture: f(x)) == flops(lambda x, f=model: f(x))


def test_tag_is_nothing_without_a_capture() -> None:
    assert eqx.tag(X, "x") is X

    def lowered(f):
        return jax.jit(f).lower(X).as_text()

    def f(x):
        return jnp.sin(eqx.tag(jnp.cos(x), "cos"))

    tagged = lowered(f)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eqx, "tag", lambda x, name: x)
        assert lowered(f) == tagged


def test_marks_compile_to_nothing() -> None:
    def f(x):
        return eqx.capture(MLP, "layers[0]")(x)[0]

    assert jax.jit(f).lower(X).as_text() == (
        jax.jit(lambda x: MLP(x)).lower(X).as_text().replace("jit__lambda", "jit_f")
    )


@settings(max_examples=10)  # each compiles
@given(
    st.lists(st.sampled_from(["linear", "norm", "stacked", "twice"]), max_size=3),
    st.integers(0, 3),
)
def test_output_is_that_of_the_plain_model_bit_for_bit(kinds, seed) -> None:
    key = jax.random.key(seed)
    make = {
        "linear": lambda: LINEAR,
        "norm": lambda: nn.LayerNorm(3),
        "stacked": lambda: STACKED,
        "twice": lambda: wrap(lambda layer, x: jnp.tanh(layer(layer(x)))),
    }
    model = nn.Sequential([make[kind]() for kind in kinds])
    x = jax.random.normal(key, (3,))
    capture = eqx.capture(model, "**")
    same(eqx.filter_jit(capture)(x)[0], eqx.filter_jit(model)(x))
    # Uncompiled, JAX fuses other operations in the two.
    np.testing.assert_allclose(capture(x)[0], model(x), rtol=1e-5, atol=1e-6)


STACKED = nn.Stacked(lambda k: nn.Linear(3, 3, key=k), 2, key=K)


# Names


def test_values_with_a_name_are_captured_by_patterns() -> None:
    def f(x):
        y = eqx.tag({"y": x + 1, "kind": "a"}, "part.first")
        return eqx.tag(y["y"], "part.second")

    _, values = eqx.capture(f, "part.*")(X)
    assert list(values) == ["part.first", "part.second"]
    assert values["part.first"]["kind"] == "a"
    same(values["part.second"], X + 1)


def test_function_compiled_before_is_captured_too() -> None:
    f = jax.jit(lambda x: eqx.tag(x + 1, "y") * 2)
    f(X)
    for _ in range(2):
        same(eqx.capture(f, "y")(X)[1], {"y": X + 1})
    same(f(X), (X + 1) * 2)


# Errors


def scan_with_checkpoints(f, x):
    return eqx.filter_scan(lambda x, _: (f(x), None), x, length=3, checkpoint=2)[0]


@pytest.mark.parametrize(
    ("how", "place"),
    [
        (lambda f, x: lax.cond(x[0] > 0, lambda x: f(x), lambda x: x, x), "cond"),
        (lambda f, x: lax.while_loop(lambda x: x[0] < -5, lambda x: f(x), x), "while"),
        (lambda f, x: scan_with_checkpoints(f, x), "while"),
    ],
)
def test_value_in_a_branch_or_a_while_loop_is_refused_by_path(how, place) -> None:
    match = rf"cannot return `layer`: it is computed within `{place}`.*checkpoint=True"
    with pytest.raises(RuntimeError, match=match):
        eqx.capture(wrap(lambda layer, x: how(layer, x)), "layer")(X)
    model = wrap(lambda layer, x: jax.jit(lambda x: how(layer, x))(x))
    with pytest.raises(RuntimeError, match=match):
        eqx.capture(model, "layer")(X)
    eqx.capture(model, "")(X)  # another one can be chosen


def test_value_in_an_unknown_primitive_is_refused_by_path() -> None:
    def solve(layer, x):
        return lax.custom_linear_solve(layer, x, lambda matvec, b: matvec(b))

    match = "cannot return `layer`.*linear_solve`. Leave it out"
    with pytest.raises(RuntimeError, match=match):
        eqx.capture(wrap(solve), "layer")(X)


def test_pattern_that_chooses_nothing_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'nope' chooses no Module.*`layers\[0\]`"):
        eqx.capture(MLP, ["layers[0]", "nope"])(X)
    with pytest.raises(ValueError, match="Conv1d chooses no Module"):
        eqx.capture(MLP, nn.Conv1d)(X)


def test_module_that_is_not_called_is_named() -> None:
    model = wrap(lambda layer, x: layer.weight @ x)
    with pytest.raises(ValueError, match="are not called: `layer`"):
        eqx.capture(model, "layer")(X)


def test_name_that_is_a_path_is_refused() -> None:
    model = wrap(lambda layer, x: eqx.tag(layer(x), "layer"))
    with pytest.raises(
        ValueError, match="`layer` is both the name of a `tag` and the path"
    ):
        eqx.capture(model, "layer")(X)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="got 3"):
        eqx.capture(MLP, 3)
    with pytest.raises(ValueError, match="a non-empty string"):
        eqx.tag(X, "")
