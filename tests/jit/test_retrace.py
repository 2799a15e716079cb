"""Why a call is retraced: told beforehand."""

import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import Registered

import equinox_like as eqx


class Model(eqx.Module):
    weight: jax.Array
    rate: float
    size: int = eqx.field(static=True)


def model(rate=0.5, size=3, weight=None):
    return Model(jnp.ones(3) if weight is None else weight, rate, size)


@pytest.fixture
def f():
    traces = []

    @eqx.filter_jit
    def f(model, x, options=None):
        traces.append(x)
        return model.rate * model.weight.sum() + x.sum()

    return f, traces


def kinds(retrace):
    return {d.path: d.kind for d in retrace.differences}


def test_call_that_was_made_before_is_not_traced_anew(f):
    f, traces = f
    f(model(), jnp.ones(2))
    assert f.explain(model(), jnp.zeros(2)) is None
    assert f.explain(model(), x=np.zeros(2, np.float32)) is None
    assert f.explain(model(), jax.ShapeDtypeStruct((2,), jnp.float32)) is None
    f(model(), jnp.zeros(2))
    assert len(traces) == 1


def test_function_that_was_not_called_has_nothing_to_compare_with(f):
    f, traces = f
    retrace = f.explain(model(), jnp.ones(2))
    assert retrace is not None and retrace.differences == () and not traces
    assert "`f` has not been traced yet" in str(retrace)


@pytest.mark.parametrize(
    ("args", "path", "kind", "text"),
    [
        ((model(), jnp.ones(4)), "x", "shape", "float32[2], and is now float32[4]."),
        ((model(), jnp.ones(2, int)), "x", "dtype", "is now int32[2]."),
        ((model(), jnp.full(2, 1.0)), "x", "weak type", "Give it a dtype"),
        ((model(0.6), jnp.ones(2)), "model.rate", "static value", "a Python float"),
        ((model(1), jnp.ones(2)), "model.rate", "static type", "a Python int"),
        ((model(size=4), jnp.ones(2)), "model.size", "static value", "a static field"),
        ((None, jnp.ones(2)), "model", "tree structure", "was a Model, and is now None"),
        ((model(), jnp.ones(2), "o"), "options", "argument count", "was left out"),
    ],
)  # fmt: skip
def test_difference_is_told_by_path_and_kind(f, args, path, kind, text):
    f, traces = f
    f(model(), jnp.ones(2))
    retrace = f.explain(*args)
    assert kinds(retrace) == {path: kind}
    assert f"`{path}`" in str(retrace) and text in str(retrace)
    assert len(traces) == 1
    if args[0] is not None:
        f(*args)
        assert len(traces) == 2 and f.explain(*args) is None


def test_arguments_that_are_left_out_or_new_are_told():
    f = eqx.filter_jit(lambda x, y=1, **options: x)
    f(jnp.ones(2), 2, a=3)
    text = str(f.explain(jnp.ones(2), b=3))
    for name, told in (
        ("y", "given, and is now left out."),
        ("options['a']", "given, and is now left out."),
        ("options['b']", "left out, and is now given."),
    ):
        assert f"`{name}` was {told}" in text


@pytest.mark.parametrize("make", [Registered, lambda x: {x: "a"}])
def test_structure_that_differs_in_the_type_of_a_value_alone_is_told(f, make):
    f, _ = f
    f(model(), jnp.ones(2), make(1))
    retrace = f.explain(model(), jnp.ones(2), make(1.0))
    assert kinds(retrace) == {"options": "tree structure"}
    assert f.explain(model(), jnp.ones(2), make(1)) is None


def test_class_that_was_defined_again_is_told_apart():
    def define():
        class Cell(eqx.Module):
            weight: jax.Array

        class Kind(enum.Enum):
            A = 1

        return Cell(jnp.ones(2)), Kind.A

    f = eqx.filter_jit(lambda cell, kind: cell.weight)
    (cell, kind), (other, other_kind) = define(), define()
    f(cell, kind)
    assert "`cell` was a Cell, and is now a Cell of another class called Cell." in str(
        f.explain(other, kind)
    )
    assert "is now <Kind.A: 1> of another class called Kind." in str(
        f.explain(cell, other_kind)
    )
    for wrong in (
        lambda: eqx.apply_updates(cell, other),
        lambda: eqx.filter_jvp(f, (cell, kind), (other, None)),
    ):
        with pytest.raises(ValueError, match="a Cell of another class called Cell"):
            wrong()


def test_nearest_trace_is_compared_with(f):
    f, _ = f
    f(model(0.1, 1), jnp.ones(2))
    f(model(0.2, 2), jnp.ones(5))
    retrace = f.explain(model(0.2, 3), jnp.ones(5))
    assert kinds(retrace) == {"model.size": "static value"}
    assert retrace.differences[0].before == "the static value 2"


def test_only_the_latest_traces_are_compared_with(f, monkeypatch):
    monkeypatch.setattr("equinox_like._jit.retrace._SEARCHED", 2)
    f, _ = f
    for size in (3, 4, 5):
        f(model(size=size), jnp.ones(2))
    retrace = f.explain(model(size=3), jnp.ones(7))
    assert kinds(retrace) == {"model.size": "static value", "x": "shape"}
    assert retrace.differences[0].before == "the static value 5"


@pytest.mark.parametrize("options", [{}, {"donate": "all"}])
def test_trace_that_failed_is_not_one_to_reuse(options):
    @eqx.filter_jit(**options)
    def f(x):
        if x.shape != (2,):
            raise ValueError("wrong shape")
        return x + 1

    with pytest.raises(ValueError, match="wrong shape"):
        f(jnp.ones(3))
    assert f.explain(jnp.ones(3)).differences == ()
    f(jnp.ones(2))
    assert f.explain(jnp.ones(2)) is None
    with pytest.raises(ValueError, match="wrong shape"):
        f(jnp.ones(3))
    assert kinds(f.explain(jnp.ones(3))) == {"x": "shape"}


def test_setting_of_jax_is_told_by_its_name(f):
    f, traces = f
    f(model(), jnp.ones(2))
    with jax.default_matmul_precision("float32"):
        retrace = f.explain(model(), jnp.ones(2))
        f(model(), jnp.ones(2))
        assert f.explain(model(), jnp.ones(2)) is None
    assert kinds(retrace) == {"jax_default_matmul_precision": "JAX configuration"}
    assert len(traces) == 2


def test_context_without_a_name_is_told_too(f):
    f, _ = f
    f(model(), jnp.ones(2))
    found = []

    def inner(x):
        found.append(f.explain(model(), jnp.ones(2)))
        return x

    jax.vmap(inner, axis_name="batch")(jnp.ones(3))
    assert kinds(found[0]) == {"the context": "user context"}
    assert "call the function within the same `jax.set_mesh`" in str(found[0])


def test_model_that_comes_back_on_a_mesh_is_to_be_sharded_first():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("d"), jax.P()))
    step = eqx.filter_jit(lambda model, x: jax.tree.map(lambda w: w + x.sum(), model))
    model, x = {"w": jnp.ones(3)}, jax.device_put(jnp.ones(4), rows)
    retrace = step.explain(step(model, x), x)
    assert retrace is not None and kinds(retrace) == {"model['w']": "sharding"}
    assert "by `filter_shard`" in str(retrace)
    step.clear_cache()
    model = step(eqx.filter_shard(model, whole), x)
    assert step.explain(model, x) is None


def test_explicit_sharding_is_a_difference(f):
    f, _ = f
    axis_types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("d",), axis_types=axis_types)
    with jax.set_mesh(mesh):
        whole, split = (
            jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P(*axes)))
            for axes in ((), ("d",))
        )
        f(model(), whole)
        assert f.explain(model(), whole) is None
        retrace = f.explain(model(), split)
    assert kinds(retrace) == {"x": "sharding"}
    assert "sharded by P('d',)" in str(retrace).replace("PartitionSpec", "P")
    assert str(retrace).endswith("by `filter_shard`.")


@pytest.mark.parametrize(
    "act",
    [lambda: lambda x: x, lambda: functools.partial(jax.nn.gelu, approximate=True)],
)
def test_function_that_is_made_anew_is_recognised(act):
    class Layer(eqx.Module):
        act: Callable = eqx.field(static=True)

    f = eqx.filter_jit(lambda x, act, layer: layer.act(act(x)))
    f(jnp.ones(2), act(), Layer(act()))
    retrace = f.explain(jnp.ones(2), act(), Layer(act()))
    assert kinds(retrace) == {"act": "static value", "layer.act": "static value"}
    fix = "It is a new function object: create it once, and pass the same one."
    assert [x.fix for x in retrace.differences] == [fix, f"It is a static field. {fix}"]


def test_what_was_forgotten_is_traced_anew(f):
    f, _ = f
    f(model(), jnp.ones(2))
    f.clear_cache()
    assert f.explain(model(), jnp.ones(2)).differences == ()


def test_what_jax_has_forgotten_is_traced_anew(f):
    f, traces = f
    f(model(), jnp.ones(2))
    jax.clear_caches()
    assert f.explain(model(), jnp.ones(2)).differences == ()
    f(model(), jnp.ones(2))
    assert len(traces) == 2 and f.explain(model(), jnp.ones(2)) is None
    assert kinds(f.explain(model(), jnp.ones(3))) == {"x": "shape"}


def test_all_that_changes_of_an_array_is_told():
    f = eqx.filter_jit(lambda x: x)
    f(jnp.ones(2))
    found = f.explain(jnp.ones(3, int)).differences
    assert [d.kind for d in found] == ["shape", "dtype"]
    assert "was an array float32[2], and is now int32[3]" in str(found[1])
    f(jnp.asarray(1.0))
    found = f.explain(jnp.asarray(1, jnp.int32)).differences
    assert [d.kind for d in found] == ["dtype", "weak type"]


def test_other_methods_and_instances_as_arguments_are_told():
    class Scale(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True, default=1)

        def times(self, x):
            return self.weight * x

        def plus(self, x):
            return self.weight + x

    f = eqx.filter_jit(lambda fun, x: fun(x))
    scale, x = Scale(jnp.ones(2)), jnp.ones(2)
    f(scale.times, x)
    assert f.explain(scale.times, x) is None
    method = f.explain(scale.plus, x)
    assert kinds(method) == {"fun.__func__": "static value"} and "plus" in str(method)
    instance = f.explain(Scale(jnp.ones(2), 2).times, x)
    assert kinds(instance) == {"fun.__self__.size": "static value"}
    assert kinds(f.explain(scale, x)) == {"fun": "tree structure"}
    with pytest.raises(TypeError, match=r"`fun\.__func__` was .*times.*plus"):
        f.lower(scale.times, x).compile()(scale.plus, x)
    f(eqx.frozen(scale.times), x)
    frozen = f.explain(eqx.frozen(scale.plus), x)
    assert kinds(frozen) == {"fun.__func__": "static value"}


def test_donating_functions_and_methods_are_explained():
    class Step(eqx.Module):
        rate: jax.Array

        @eqx.filter_jit(donate="all-except-first")
        def __call__(self, x):
            return self.rate * x

    step = Step(jnp.array(0.1))
    step(jnp.ones(2))
    assert kinds(Step.__call__.explain(step, jnp.ones(3))) == {"x": "shape"}
    assert Step.__call__.explain(step, jnp.ones(2)) is None


def test_many_differences_are_cut_and_the_fix_is_told_once():
    f = eqx.filter_jit(lambda xs: xs)
    f([jnp.ones(2)] * 9)
    text = str(f.explain([jnp.ones(3)] * 9))
    assert text.count("`xs[") == 5 and text.endswith("And 4 more differences.")
    assert text.count("pad to a few sizes") == 1
