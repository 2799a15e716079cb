"""Ahead of time: lowering, compiling, and calling what was compiled."""

import gc
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import trees

import equinox_like as eqx

FLOAT = jax.ShapeDtypeStruct((3,), jnp.float32)


class Model(eqx.Module):
    weight: Any
    bias: Any = None
    activation: Any = jnp.tanh
    size: Any = eqx.field(static=True, default=3)

    def __call__(self, x):
        return self.activation(self.weight * x)

    @eqx.filter_jit
    def jitted(self, x, by=1):
        return self(x) * by


@eqx.filter_jit
def scaled(tree, by, *, name="first"):
    return {k: v * by for k, v in tree.items()}, name


TREE = {"x": jnp.ones(3)}


def test_compiled_function_returns_what_the_function_does():
    compiled = scaled.lower(TREE, 2, name="n").compile()
    out, name = compiled(TREE, 2, name="n")
    assert out["x"].tolist() == [2, 2, 2] and name == "n"
    assert compiled(name="n", by=2, tree=TREE)[1] == "n"


def test_stages_tell_of_themselves():
    lowered = scaled.lower(TREE, 2.0)
    assert "stablehlo" in lowered.as_text() and "flops" in lowered.cost_analysis()
    assert "test_stages.py" not in lowered.as_text()
    assert "test_stages.py" in lowered.as_text(debug_info=True)
    compiled = lowered.compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 12
    assert "flops" in compiled.cost_analysis() and "HloModule" in compiled.as_text()
    assert "scaled" in repr(lowered) and "scaled" in repr(compiled)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_stages_take_arrays_that_are_traced(transform):
    stages = []

    def cost(x):
        stages.append(scaled.lower({"x": x}, 2.0))
        scaled.donation_report({"x": x}, 2.0)
        return x

    with jax.checking_leaks():  # the stages keep no tracer
        transform(cost)(jnp.ones(3) if transform is not jax.grad else 1.0)
    assert stages[0].compile().cost_analysis()["flops"]


def test_shapes_may_stand_for_arrays():
    shapes = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    compiled = scaled.lower(shapes, 2).compile()
    assert compiled(TREE, 2)[0]["x"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("by", [3, 2.0, jnp.asarray(2)], ids=repr)
def test_other_static_argument_is_refused_by_name(by):
    compiled = scaled.lower(TREE, 2).compile()
    with pytest.raises(TypeError, match="`by`"):
        compiled(TREE, by)


def test_other_static_argument_shows_both_values():
    compiled = scaled.lower(TREE, 2).compile()
    with pytest.raises(TypeError, match="`by` was the static value 2, and is now True"):
        compiled(TREE, True)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"y": jnp.ones(3)}, r"`tree` was a dict with the keys \['x'\], and is now a"),
        ({"x": [jnp.ones(3)]}, r"`tree\['x'\]` was an array, and is now a list of"),
        ({"x": None}, r"`tree\['x'\]` was an array, and is now None"),
    ],
    ids=["key", "list", "None"],
)
def test_other_structure_is_refused(tree, message):
    with pytest.raises(TypeError, match=message):
        scaled.lower(TREE, 2).compile()(tree, 2)


def test_other_shape_is_refused():
    with pytest.raises(TypeError, match=r"float32\[4\]"):
        scaled.lower(TREE, 2).compile()({"x": jnp.ones(4)}, 2)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="missing"):
        scaled.lower(TREE, 2).compile()(TREE)


@pytest.mark.parametrize("stage", ["trace", "lower", "eval_shape"])
@pytest.mark.parametrize("donate", ["none", "arrays"])
def test_arguments_that_jax_refuses_leave_the_function_usable(stage, donate):
    f = eqx.filter_jit(lambda x: x + 1, donate=donate)
    with pytest.raises(TypeError):
        getattr(f, stage)(np.array(["text"]))
    gc.collect()  # the error keeps the frames of the call alive
    assert f(jnp.ones(3)).tolist() == [2, 2, 2]


def test_compiled_function_cannot_be_transformed():
    compiled = scaled.lower(TREE, 2).compile()
    with pytest.raises(TypeError):
        jax.jit(lambda t: compiled(t, 2))(TREE)


def test_call_after_lowering_does_not_trace_again():
    traces = []

    @eqx.filter_jit
    def f(x):
        traces.append(1)
        return x

    f.lower(jnp.ones(2)).compile()
    f(jnp.ones(2))
    assert traces == [1]


class TestTraced:
    def test_jaxpr_is_that_of_the_function(self):
        traced = scaled.trace(TREE, 2.0)
        assert "mul" in str(traced.jaxpr) and "scaled" in repr(traced)
        assert traced.lower().compile()(TREE, 2.0)[0]["x"].tolist() == [2, 2, 2]

    def test_stages_have_the_trees_of_the_user(self):
        f = eqx.filter_jit(lambda model, x, *, name: (model, name, x.sum()))
        model = Model(jnp.ones(3))
        traced = f.trace(model, FLOAT, name="n")
        for stage in (traced, traced.lower(), traced.lower().compile()):
            (model_info, x_info), rest = stage.args_info
            assert isinstance(model_info, Model) and model_info.activation is jnp.tanh
            assert model_info.weight.shape == x_info.shape == (3,)
            assert x_info.dtype == jnp.float32 and rest == {"name": "n"}
            model_info, name, total = stage.out_info
            assert isinstance(model_info, Model) and model_info.weight.shape == (3,)
            assert name == "n" and total.shape == ()

    def test_info_says_what_is_donated(self):
        f = eqx.filter_jit(lambda x, y: (x, y), donate="all-except-first")
        (x, y), _ = f.trace(FLOAT, FLOAT).args_info
        assert not x.donated and y.donated

    def test_arrays_of_the_callable_are_no_arguments(self):
        (x,), rest = eqx.filter_jit(Model(jnp.ones(3))).trace(FLOAT).args_info
        assert x.shape == (3,) and rest == {}

    def test_lowering_again_warns_of_donation_as_little_as_the_first_time(self):
        traced = eqx.filter_jit(lambda x: x.sum(), donate="all").trace(FLOAT)
        filters = list(warnings.filters)
        for _ in range(2):
            traced.lower()
        assert warnings.filters == filters

    def test_errors_name_the_argument_and_no_frame_of_ours(self):
        def f(model, x):
            return x if model.weight else -x

        with pytest.raises(
            jax.errors.TracerBoolConversionError, match=r"model\.weight"
        ):
            eqx.filter_jit(f).trace(Model(jnp.ones(())), FLOAT)


@settings(max_examples=20)
@given(trees())
def test_eval_shape_has_the_shapes_of_the_output_and_runs_nothing(tree):
    shapes = eqx.filter_jit(lambda t: t).eval_shape(tree)
    assert jtu.tree_structure(shapes) == jtu.tree_structure(tree)
    for shape, x in zip(jtu.tree_leaves(shapes), jtu.tree_leaves(tree), strict=True):
        if eqx.is_array(x):
            assert isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == x.shape
        else:
            assert shape is x


def test_stages_cannot_be_pickled_and_say_what_can():
    traced = scaled.trace(TREE, 2)
    for stage in (traced, traced.lower(), traced.lower().compile()):
        with pytest.raises(TypeError, match="filter_export"):
            pickle.dumps(stage)


def test_decorated_functions_and_methods_can_be_pickled():
    for f in (scaled, Model.jitted):
        assert pickle.loads(pickle.dumps(f)) is f
    bound = pickle.loads(pickle.dumps(Model(jnp.ones(3), activation=abs).jitted))
    assert bound(jnp.zeros(3)).tolist() == [0, 0, 0]


class TestPlatforms:
    @pytest.mark.parametrize(
        "platforms", [("tpu",), ("cuda",), ("tpu", "cuda"), ("cpu", "tpu")], ids=str
    )
    def test_foreign_platform_is_lowered_but_not_compiled(self, platforms):
        lowered = scaled.trace(TREE, 2).lower(lowering_platforms=platforms)
        assert "stablehlo" in lowered.as_text()
        with pytest.raises(ValueError, match=f"'{platforms[-1]}', but this .* 'cpu'"):
            lowered.compile()

    @pytest.mark.parametrize(
        "platforms", [("tpu",), ("cuda",), ("cpu", "tpu")], ids=str
    )
    def test_check_is_lowered_for_this_host_only(self, platforms):
        f = eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, "negative"))
        traced = f.trace(FLOAT)
        message = "f.*calls Python.* not for " + ", ".join(map(repr, platforms))
        with pytest.raises(NotImplementedError, match=message):
            traced.lower(lowering_platforms=platforms)
        assert "stablehlo" in traced.lower(lowering_platforms=("cpu",)).as_text()

    def test_platform_of_the_host_may_be_named(self):
        compiled = scaled.trace(TREE, 2).lower(lowering_platforms=("cpu",)).compile()
        assert compiled(TREE, 2)[0]["x"].tolist() == [2, 2, 2]

    def test_platform_decides_what_is_lowered(self):
        def f(x):
            return jax.lax.platform_dependent(
                x, cpu=lambda x: x + 1, default=lambda x: x * jnp.pi
            )

        traced = eqx.filter_jit(f).trace(FLOAT)
        assert "3.14" in traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "3.14" not in traced.lower().as_text()


class TestCalls:
    def compiled(self, **kwargs: Any) -> Any:
        model = Model(FLOAT, **kwargs)
        return eqx.filter_jit(lambda model, x: model(x)).lower(model, FLOAT).compile()

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (
                Model(jnp.ones(3), size=4),
                "`model.size` was the static value 3, and is now 4",
            ),
            (Model(jnp.ones(3), size=3.0), "`model.size` was .* 3, and is now 3.0"),
            (Model(jnp.ones(3), activation=abs), "`model.activation` was .*tanh.* abs"),
            (Model(jnp.ones(3), bias=1), "`model.bias` was None, and is now 1"),
            (jnp.ones(3), "`model` was a Model, and is now an array"),
        ],
        ids=["value", "type", "leaf", "None", "node"],
    )
    def test_what_differs_is_named_with_both_values(self, model, message):
        with pytest.raises(TypeError, match=message):
            self.compiled()(model, jnp.ones(3))

    def test_other_number_of_arguments_is_refused(self):
        compiled = Model.jitted.lower(Model(FLOAT), FLOAT).compile()
        with pytest.raises(TypeError, match="`by` was left out, and is now given"):
            compiled(Model(jnp.ones(3)), jnp.ones(3), 1)

    def test_other_shape_is_refused_by_its_path(self):
        with pytest.raises(
            TypeError, match=r"model\.weight.*float32\[3\].*float32\[4\]"
        ):
            self.compiled()(Model(jnp.ones(4)), jnp.ones(3))

    def test_refused_call_leaves_the_function_usable(self):
        compiled = self.compiled()
        model, x = Model(jnp.ones(3)), jnp.ones(3)
        expected = model(x).tolist()
        for _ in range(2):
            with pytest.raises(TypeError, match=r"model\.size"):
                compiled(Model(jnp.ones(3), size=True), x)
            assert compiled(model, x).tolist() == expected
            assert compiled(model, np.ones(3, np.float32)).tolist() == expected

    def test_nan_is_the_same_and_the_sign_of_zero_is_not(self):
        compiled = scaled.lower(TREE, float("nan")).compile()
        compiled(TREE, float("nan"))
        compiled = scaled.lower(TREE, 0.0).compile()
        compiled(TREE, 0.0)
        with pytest.raises(
            TypeError, match=r"`by` was the static value 0.0, and is now -0.0"
        ):
            compiled(TREE, -0.0)

    def test_order_of_keywords_makes_no_difference(self):
        f = eqx.filter_jit(lambda b, a: b - a)
        x, y = jnp.full(3, 3.0), jnp.ones(3)
        compiled = f.lower(FLOAT, FLOAT).compile()
        for call in (compiled, f):
            for out in (call(x, y), call(a=y, b=x), call(x, a=y)):
                assert out.tolist() == [2, 2, 2]

    def test_parameter_may_have_the_name_of_the_function(self):
        def x(x, k):
            return x * k

        compiled = eqx.filter_jit(x).lower(FLOAT, 2).compile()
        assert compiled(jnp.ones(3), 2).tolist() == [2, 2, 2]
        with pytest.raises(TypeError, match="`k` was the static value 2, and is now 3"):
            compiled(jnp.ones(3), 3)
        with pytest.raises(TypeError, match="`x` was an array, and is now"):
            compiled(1, 2)

    def test_methods_are_compiled_through_their_class(self):
        model = Model(jnp.ones(3))
        compiled = Model.jitted.lower(model, FLOAT, by=2).compile()
        assert compiled(model, jnp.zeros(3), by=2).tolist() == [0, 0, 0]

    def test_callable_pytree_is_called_with_its_own_arrays(self):
        compiled = eqx.filter_jit(Model(jnp.full(3, 2.0), activation=abs)).lower(FLOAT)
        assert compiled.compile()(jnp.ones(3)).tolist() == [2, 2, 2]

    @pytest.mark.parametrize("donate", ["arrays", "warn", ("model", "x")])
    def test_what_it_takes_is_gone_unless_numpy_holds_it(self, donate):
        @eqx.filter_jit(donate=donate)
        def update(model, x, n):
            return {"w": model["w"] + x.sum()}, n

        def arguments():
            return {"w": jnp.ones(3)}, jnp.ones(2), 1

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eqx.DonationWarning)
            compiled = update.lower(*arguments()).compile()
        for is_looked_at in (True, False, True, False, True):
            model, x, n = arguments()
            view = np.asarray(model["w"]) if is_looked_at else None
            out, _ = compiled(model, x, n=n) if is_looked_at else compiled(model, x, n)
            assert out["w"].tolist() == [3, 3, 3]
            assert model["w"].is_deleted() != is_looked_at
            assert x.is_deleted() == ("x" in donate)
            if view is not None:
                assert view.tolist() == [1, 1, 1]
                del view
                compiled(model, jnp.ones(2), n)
            with pytest.raises(eqx.DonationError, match=r"`model\['w'\]`.*to `update`"):
                compiled(model, x, n)

    @pytest.mark.parametrize("donate", ["none", "arrays"])
    @pytest.mark.parametrize(
        ("other", "now"),
        [
            (jnp.ones(4), "float32[4]"),
            (jnp.ones((3, 1)), "float32[3,1]"),
            (jnp.array(1.0), "float32[]"),
            (np.ones(3, np.int8), "int8[3]"),
            (jnp.ones(3, jnp.bfloat16), "bfloat16[3]"),
        ],
    )
    def test_array_of_another_type_is_named(self, other, now, donate):
        def f(model, x):
            return model["layers"][0] + 1, 2 * x

        jitted = eqx.filter_jit(f, donate=donate)
        compiled = jitted.lower({"layers": [FLOAT]}, FLOAT).compile()
        x = jnp.ones(3)
        with pytest.raises(TypeError) as caught:
            compiled({"layers": [other]}, x)
        text = str(caught.value)
        assert (
            f"`model['layers'][0]` was an array float32[3], and is now {now}." in text
        )
        assert (
            "other than those it was compiled for" in text and "Compile again" in text
        )
        assert "enable_x64" not in text and caught.value.__suppress_context__
        out = compiled({"layers": [np.ones(3)]}, x)  # of 64 bits: converted
        assert out[0].tolist() == [2, 2, 2]

    def test_is_refused_under_a_transformation(self):
        x = jnp.ones(3)
        compiled = eqx.filter_jit(lambda x: x + 1, donate="arrays").lower(x).compile()
        for _ in range(3):
            with pytest.raises(eqx.DonationError, match="Call the function that"):
                jax.vmap(lambda i: compiled(x) * i)(x)
            assert compiled(x + 0).tolist() == [2, 2, 2]
        assert not x.is_deleted()

    def test_sharded_array_passed_again_is_an_error(self):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("d")))
        compiled = eqx.filter_jit(lambda x: x + 1, donate="arrays").lower(x).compile()
        y = compiled(x)
        assert x.is_deleted() and y.tolist() == [2, 2, 2, 2]
        for _ in range(2):  # a process of jax 0.10 would end here
            with pytest.raises(eqx.DonationError, match=r"`x`.*has been deleted"):
                compiled(x)
        assert compiled(y).tolist() == [3, 3, 3, 3]

    @pytest.mark.parametrize("spec", [jax.P("d"), jax.P()])
    def test_sharded_array_in_two_places_is_an_error(self, spec):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, spec)
        f = eqx.filter_jit(lambda x, y: (x + 1, 2 * y["b"]), donate="arrays")
        x, y, z = (jax.device_put(jnp.ones(4) + i, sharding) for i in range(3))
        compiled = f.lower(x, {"b": y}).compile()
        for _ in range(2):  # a process of jax 0.10 would end here
            with pytest.raises(eqx.DonationError, match=r"`x` and `y\['b'\]` are the"):
                compiled(x, {"b": x})
            assert not x.is_deleted()
        assert compiled(x, {"b": y})[1].tolist() == [4, 4, 4, 4]
        with pytest.raises(eqx.DonationError, match=r"`y\['b'\]`.*has been deleted"):
            compiled(z, {"b": y})

    def test_donation_carries_over(self):
        f = eqx.filter_jit(lambda x, name: (x + 1, name), donate="arrays")
        compiled = f.lower(FLOAT, "n").compile()
        x = jnp.ones(3)
        assert compiled(x, "n")[0].tolist() == [2, 2, 2] and x.is_deleted()
        with pytest.raises(eqx.DonationError, match="`x`"):
            compiled(x, "n")

    def test_typed_keys_and_several_groups_work(self):
        f = eqx.filter_jit(
            lambda key, x: (jax.random.split(key), x), donate="all-except-first"
        )
        compiled = f.lower(jax.random.key(0), FLOAT).compile()
        keys, _ = compiled(jax.random.key(1), jnp.ones(3))
        assert (keys == jax.random.split(jax.random.key(1))).all()


class TestCaches:
    def counted(self):
        traces = []

        def f(x, k=None):
            traces.append(k)
            return x, k

        return f, traces

    def test_wrapping_in_a_loop_compiles_once(self):
        f, traces = self.counted()
        for _ in range(5):
            eqx.filter_jit(f)(jnp.ones(2), 1)
        assert traces == [1]

    def test_clear_cache_forgets_for_all_wraps_of_a_function(self):
        f, traces = self.counted()
        first, second = eqx.filter_jit(f), eqx.filter_jit(f)
        first(jnp.ones(2))
        first.clear_cache()
        program = first._program
        assert not program.layouts.by_structure and not program._specializations
        for jitted in (first, second, first):
            jitted(jnp.ones(2))
        assert len(traces) == 2

    def test_clear_cache_of_a_pytree_spares_those_of_other_structure(self):
        traces = []

        class Counting(eqx.Module):
            weight: Any
            size: int = eqx.field(static=True)

            def __call__(self, x):
                traces.append(self.size)
                return self.weight * x

        first, second = (eqx.filter_jit(Counting(jnp.ones(2), n)) for n in (1, 2))
        for jitted in (first, second):
            jitted(jnp.ones(2))
        first.clear_cache()
        for jitted in (first, second):
            jitted(jnp.ones(2))
        assert traces == [1, 2, 1]

    def test_clear_cache_covers_donation_and_what_replaces_it_in_a_trace(self):
        f, traces = self.counted()
        jitted = eqx.filter_jit(f, donate="arrays")
        jitted(jnp.ones(2))
        jax.jit(jitted)(jnp.ones(2))
        jitted.clear_cache()
        jax.clear_caches()
        jitted(jnp.ones(2))
        jax.jit(jitted)(jnp.ones(2))
        assert len(traces) == 4

    def test_clear_caches_spares_wrappers_that_exist(self):
        f, traces = self.counted()
        jitted = eqx.filter_jit(f)
        jitted(jnp.ones(2))
        eqx.clear_caches()
        jitted(jnp.ones(2))
        assert len(traces) == 1
        eqx.filter_jit(f)(jnp.ones(2))
        assert len(traces) == 2
        eqx.clear_caches()
        jax.clear_caches()
        assert jitted(jnp.ones(2))[0].tolist() == [1, 1]

    def test_compiled_functions_outlive_the_caches(self):
        f, _ = self.counted()
        jitted = eqx.filter_jit(f)
        compiled = jitted.lower(FLOAT).compile()
        jitted.clear_cache()
        eqx.clear_caches()
        assert compiled(jnp.ones(3))[0].tolist() == [1, 1, 1]

    @pytest.mark.filterwarnings("ignore::equinox_like.RetraceWarning")
    def test_number_of_programs_is_bounded_in_every_table(self, monkeypatch):
        from equinox_like._jit import layout

        monkeypatch.setattr(layout, "MAX_KEPT", 8)
        f, traces = self.counted()
        jitted = eqx.filter_jit(f)
        x = jnp.ones(())
        for k in range(8):
            jitted(x, k)
        for k in range(8, 30):
            jitted(x=x, k=k)  # another layout, for the same programs
        program = jitted._program
        assert len(traces) == 30 and len(program._specializations) == 8
        specializations = set(program._specializations.values())
        layouts = [
            x
            for form in program.layouts.by_structure.values()
            for x in form.layouts.values()
        ]
        assert all(specializations.issuperset(x._known.values()) for x in layouts)
        assert jitted(x, 0)[1] == 0 and len(traces) == 31
