"""What a compiled function keeps alive, and for how long: no longer than itself."""

import copy
import dataclasses
import functools
import gc
import pickle
import sys
import threading
import time
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx
from equinox_like._jit import program as programs
from equinox_like._tree.registry import OwnRegistry, registry

MODES = ["none", "arrays", "warn", "all-except-first", ("x",)]
own_registry = pytest.mark.skipif(
    not isinstance(registry, OwnRegistry), reason="structures do not own programs"
)


class Static:
    """A static value that can be watched, and may hold anything."""

    def __init__(self):
        self.held = None

    def __call__(self, x):
        return x


@pytest.fixture(autouse=True, scope="module")
def earlier_tests_are_not_looked_at():
    # As in `conftest.py`, for what earlier tests have left in JAX's caches.
    gc.collect()
    gc.freeze()


def is_freed(make) -> bool:
    """Whether what `make()` returns weak references to dies."""
    references = make()
    jax.clear_caches()
    gc.collect()
    return all(reference() is None for reference in references)


class Model(eqx.Module):
    weight: Any
    static: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.weight * x


@pytest.mark.parametrize("mode", MODES)
def test_function_is_freed_with_the_array_that_it_captured(mode):
    def make():
        captured = jnp.ones(1000)

        def f(x):
            return x + captured[0]

        jitted = eqx.filter_jit(f, donate=mode)
        out = jitted(jnp.ones(()))
        return [weakref.ref(x) for x in (captured, f, jitted, out)]

    # Without clearing the caches of JAX: `jax.jit` keeps nothing either.
    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def compiled_call(jitted, x):
    return jitted.lower(x).compile()(x)


STAGES = {
    "compile": compiled_call,
    "trace": lambda jitted, x: jitted.trace(x).out_info,
    "lower": lambda jitted, x: jitted.lower(x).as_text(),
    "eval_shape": lambda jitted, x: jitted.eval_shape(x),
    "explain": lambda jitted, x: (jitted(jnp.zeros(())), jitted.explain(x)),
    "donation_report": lambda jitted, x: str(jitted.donation_report(x)),
    "export": lambda jitted, x: eqx.filter_export(jitted)(x),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["none", "arrays", "warn"])
def test_all_is_freed_after_each_stage(stage, mode):
    def make():
        captured, x = jnp.ones(1000), jnp.ones(())

        def f(x):
            return x + captured[0]

        jitted = eqx.filter_jit(f, donate=mode)
        out = STAGES[stage](jitted, x)
        arrays = [y for y in jax.tree.leaves(out) if isinstance(y, jax.Array)]
        return [weakref.ref(y) for y in (captured, f, jitted, x, *arrays)]

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def custom_jvp(f, x):
    function = eqx.filter_custom_jvp(lambda x: f(x))

    @function.def_jvp
    def rule(primals, tangents):
        return f(*primals), tangents[0]

    return jax.grad(lambda x: function(x).sum())(x)


def custom_vjp(f, x):
    function = eqx.filter_custom_vjp(lambda x: f(x))
    function.def_fwd(lambda perturbed, x: (f(x), x))
    function.def_bwd(lambda residuals, grad, perturbed, x: grad)
    return jax.grad(lambda x: function(x).sum())(x)


def custom_vmap(f, x):
    function = eqx.filter_custom_vmap(lambda x: f(x))
    function.def_vmap(lambda size, batched, x: (f(x), batched[0]))
    return jax.vmap(function)(x)


def invertible(f, x):
    def block(_, both):
        return both[0] + f(both[1]), both[1]

    chain = eqx.filter_invertible(block)
    return jax.grad(lambda x: chain([None, None], (x, x))[0].sum())(x)


def over_a_mesh(f, x):
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    return eqx.filter_shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def called_back(transformation):
    def call(f, x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return transformation(lambda x: np.asarray(f(x)), x, result_shape_dtypes=like)

    return call


# Each calls `f` in one way of the library, on an array of shape (3,).
TRANSFORMATIONS = {
    "grad": lambda f, x: eqx.filter_grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: eqx.filter_vmap(f)(x),
    "jvp": lambda f, x: eqx.filter_jvp(f, (x,), (x,)),
    "vjp": lambda f, x: eqx.filter_vjp(f, x)[1](x),
    "linearize": lambda f, x: eqx.filter_linearize(f, x)[1](x),
    "jacfwd": lambda f, x: eqx.filter_jacfwd(f)(x),
    "jacrev": lambda f, x: eqx.filter_jacrev(f)(x),
    "hessian": lambda f, x: eqx.filter_hessian(lambda x: f(x).sum())(x),
    "checkpoint": lambda f, x: eqx.filter_vjp(eqx.filter_checkpoint(f), x)[1](x),
    "closure_convert": lambda f, x: eqx.filter_closure_convert(f, x)(x),
    "eval_shape": lambda f, x: (eqx.filter_eval_shape(f, x), x)[1],
    "make_jaxpr": lambda f, x: (eqx.filter_make_jaxpr(f)(x), x)[1],
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "custom_vmap": custom_vmap,
    "invertible": invertible,
    "pure_callback": called_back(eqx.filter_pure_callback),
    "io_callback": called_back(eqx.filter_io_callback),
    "scan": lambda f, x: eqx.filter_scan(lambda c, y: (f(c), y), x, x),
    "map": lambda f, x: eqx.filter_map(f, x),
    "cond": lambda f, x: eqx.filter_cond(x[0] > 0, f, lambda y: -y, x),
    "switch": lambda f, x: eqx.filter_switch(jnp.array(0), [f, lambda y: -y], x),
    "while_loop": lambda f, x: eqx.filter_while_loop(lambda c: c[0] < 0, f, x),
    "fori_loop": lambda f, x: eqx.filter_fori_loop(0, 2, lambda i, c: f(c), x),
    "shard_map": over_a_mesh,
    "pmap": lambda f, x: eqx.filter_pmap(f)(x[None]),
    "error_if": lambda f, x: eqx.error_if(f(x), x[0] < 0, "negative"),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_all_is_freed_after_each_transformation(name, wrap):
    def make():
        captured, x = jnp.ones(1000), jnp.arange(3.0) + 1

        def f(x):
            return x * captured[0]

        out = wrap(lambda x: TRANSFORMATIONS[name](f, x))(x)
        return [weakref.ref(y) for y in (captured, f, x, *jax.tree.leaves(out))]

    references = make()
    jax.effects_barrier()
    gc.collect()
    if name.endswith("callback"):
        # JAX's thread may hold the arguments of a callback for a moment longer.
        deadline = time.monotonic() + 5
        while any(x() is not None for x in references) and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


class Scale(eqx.Module):
    weight: Any

    def __call__(self, x):
        return x * self.weight[0]


class Plain:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x * self.weight[0]

    def method(self, x):
        return x * self.weight[0]


def closure_over(array):
    return lambda x: x * array[0]


def times(array, x):
    return x * array[0]


CALLABLES = {
    "closure": closure_over,
    "partial": lambda array: functools.partial(times, array),
    "partial of closure": lambda array: functools.partial(closure_over(array)),
    "Partial": lambda array: eqx.Partial(times, array),
    "Module": Scale,
    "method of Module": lambda array: Scale(array).__call__,
    "object": Plain,
    "method": lambda array: Plain(array).method,
}
WAYS = {
    **{
        str(mode): lambda f, x, mode=mode: eqx.filter_jit(f, donate=mode)(x)
        for mode in [*MODES, "arrays", "strict"]
    },
    **{
        name: lambda f, x, stage=stage: stage(eqx.filter_jit(f), x)
        for name, stage in STAGES.items()
    },
    "jit of grad": lambda f, x: eqx.filter_jit(eqx.filter_grad(f))(x[0]),
    "jit of value_and_grad": lambda f, x: eqx.filter_jit(eqx.filter_value_and_grad(f))(
        x[0]
    ),
    "jit of vmap": lambda f, x: eqx.filter_jit(eqx.filter_vmap(f))(x),
    "jit of checkpoint": lambda f, x: eqx.filter_jit(eqx.filter_checkpoint(f))(x),
    "lower of vmap": lambda f, x: (
        eqx.filter_jit(eqx.filter_vmap(f)).lower(x).compile()(x)
    ),
    **TRANSFORMATIONS,
}


def is_freed_at_once(make, call):
    """Without the cyclic garbage collector, and JAX's caches as they are."""

    def once():
        array, x = jnp.ones(1000), jnp.arange(3.0) + 1
        call(make(array), x)
        return weakref.ref(array)

    once()  # what is imported or compiled the first time
    gc.collect()
    gc.disable()
    try:
        references = [once() for _ in range(3)]
        jax.effects_barrier()
        # JAX's thread holds the last function that it called back.
        return [x() for x in references[:2]] == [None, None]
    finally:
        gc.enable()


@own_registry
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["closure", "partial of closure", "object"])
def test_dead_function_frees_its_arrays_without_the_collector(way, kind):
    assert is_freed_at_once(CALLABLES[kind], WAYS[way])


@own_registry
@pytest.mark.parametrize("kind", CALLABLES)
@pytest.mark.parametrize("way", ["none", "compile", "jit of grad", "pmap", "scan"])
def test_dead_callable_of_each_kind_frees_its_arrays(way, kind):
    assert is_freed_at_once(CALLABLES[kind], WAYS[way])


@pytest.mark.parametrize("kind", ["closure", "partial of closure", "object", "method"])
@pytest.mark.parametrize(
    "wrap",
    [eqx.filter_grad, eqx.filter_vmap, lambda f: eqx.filter_vmap(eqx.filter_grad(f))],
)
def test_transformed_function_that_is_wrapped_again_is_not_traced_again(kind, wrap):
    traces, x = [], jnp.arange(3.0)

    class Traced:
        def __getitem__(self, index):
            traces.append(index)
            return 2.0

    fun = CALLABLES[kind](Traced())
    x = x if wrap is not eqx.filter_grad else x[1]
    expected = wrap(fun)(x)
    traces.clear()
    for _ in range(3):
        f = eqx.filter_jit(wrap(fun))
        assert jnp.array_equal(f(x), expected)
    assert traces == [0] and repr(f).startswith("<filter_jit of ")


@pytest.mark.parametrize("how", ["value", "leaf", "output", "argument"])
def test_static_value_that_leads_back_to_the_function_is_freed(how):
    def make():
        static = Static()

        def f(x, s):
            return x, static if how == "output" else 1

        jitted = eqx.filter_jit(f)
        static.held = jitted, f
        if how == "value":
            jitted(Model(jnp.ones(2), static), None)
        elif how == "leaf":
            jitted(Model(static, 1), None)
        else:
            jitted(jnp.ones(2), static if how == "argument" else None)
        return [weakref.ref(static), weakref.ref(f), weakref.ref(jitted)]

    assert is_freed(make)


@own_registry
@pytest.mark.parametrize("how", ["call", "bound"])
def test_static_fields_of_a_compiled_model_are_freed(how):
    def make():
        static = Static()
        model = Model(jnp.ones(1000), static)
        jitted = eqx.filter_jit(model if how == "call" else model.__call__)
        static.held = jitted
        out = jitted(jnp.ones(()))
        return [weakref.ref(x) for x in (static, model, model.weight, out)]

    assert is_freed(make)


@pytest.mark.parametrize(("traced", "called"), [(250, 30)])
def test_live_arrays_stay_level_over_many_closures(traced, called):
    def run(count, use):
        for _ in range(count):
            captured = jnp.ones(10)
            use(eqx.filter_jit(lambda x: x + captured.sum()))  # noqa: B023

    for count, use in (
        (traced, lambda f: f.eval_shape(1.0)),
        (called, lambda f: f(jnp.ones(()))),
    ):
        run(3, use)
        gc.collect()
        before = len(jax.live_arrays())
        run(count, use)
        gc.collect()
        assert len(jax.live_arrays()) <= before + 2


def traces_of(wrap, count=4, call=lambda f: f(jnp.ones(2))) -> int:
    """How often a function is traced that is wrapped anew at each call."""
    before = Traced.count
    for _ in range(count):
        call(wrap())
    return Traced.count - before


class Traced:
    count = 0

    def step(self, x):
        Traced.count += 1
        return x + 1

    @classmethod
    def of_class(cls, x):
        Traced.count += 1
        return x + 1

    @staticmethod
    def static(x):
        Traced.count += 1
        return x + 1

    __call__ = step


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float

    def __call__(self, x):
        Traced.count += 1
        return x * self.rate


class TracedModule(eqx.Module):
    layers: Any

    def __call__(self, x):
        Traced.count += 1
        return self.layers[0] * x

    def other(self, x):
        return self(x)


def test_wrapping_the_same_callable_again_compiles_nothing():
    t, config = Traced(), Config(2.0)
    partial = functools.partial(Traced.static)
    for fun in (t, Traced.static, partial, config):
        assert traces_of(lambda fun=fun: eqx.filter_jit(fun)) == 1
    assert traces_of(lambda: eqx.filter_jit(t.step)) == 1
    assert traces_of(lambda: eqx.filter_jit(Traced().of_class)) == 1
    assert traces_of(lambda: eqx.filter_jit(types.MethodType(Traced.step, t))) == 0


def test_equal_callables_with_values_of_other_types_are_told_apart():
    one = jnp.ones((), int)
    assert jnp.issubdtype(eqx.filter_jit(Config(2))(one).dtype, jnp.integer)
    assert jnp.issubdtype(eqx.filter_jit(Config(2.0))(one).dtype, jnp.floating)
    assert eqx.filter_jit(lambda x, c: c.rate)(one, Config(2)) == 2
    f = eqx.filter_jit(lambda x, config: config)
    assert [type(f(one, Config(rate)).rate) for rate in (2, 2.0, True)] == [
        int,
        float,
        bool,
    ]


def test_number_of_callables_that_a_table_keeps_is_bounded(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_SHARED", 2)
    functions = []
    for _ in range(5):
        f = lambda x: x + 1  # noqa: E731
        eqx.filter_jit(jax.tree_util.Partial(f))(jnp.ones(()))
        functions.append(weakref.ref(f))
    del f
    gc.collect()
    assert [function() is None for function in functions] == [True] * 3 + [False] * 2
    assert traces_of(lambda: eqx.filter_jit(jax.tree_util.Partial(doubled))) == 1


def doubled(x):
    Traced.count += 1
    return 2 * x


def scale_of_any_class(*, frozen, slots=False):
    @dataclasses.dataclass(frozen=frozen, slots=slots)
    class Scale:
        rate: Any

        def __call__(self, x):
            return x * (self.rate[0] if isinstance(self.rate, list) else self.rate)

    return Scale


class TestEqualDataclassesShareNothingThatCanChange:
    @pytest.mark.parametrize("slots", [False, True])
    def test_fields_that_are_assigned(self, slots):
        kind = scale_of_any_class(frozen=False, slots=slots)
        one, other = kind(2.0), kind(2.0)
        f, g = eqx.filter_jit(one), eqx.filter_jit(other)
        one.rate = 3.0
        assert f(jnp.ones(())) == 3 and g(jnp.ones(())) == 2

    @pytest.mark.parametrize("slots", [False, True])
    def test_field_that_can_be_changed_in_place(self, slots):
        kind = scale_of_any_class(frozen=True, slots=slots)
        one, other = kind([2.0]), kind([2.0])
        f, g = eqx.filter_jit(one), eqx.filter_jit(other)
        one.rate[0] = 3.0
        assert f(jnp.ones(())) == 3 and g(jnp.ones(())) == 2

    def test_attributes_that_are_not_fields(self):
        @dataclasses.dataclass(frozen=True)
        class Table:
            name: str

            def load(self, rate):
                object.__setattr__(self, "rate", rate)
                return self

            def __call__(self, x):
                return x * self.rate

        one, other = Table("a").load(2.0), Table("a").load(3.0)
        assert eqx.filter_jit(one)(jnp.ones(())) == 2
        assert eqx.filter_jit(other)(jnp.ones(())) == 3

    def test_they_are_freed(self):
        one = scale_of_any_class(frozen=False)(2.0)
        eqx.filter_jit(one)(jnp.ones(()))
        alive = weakref.ref(one)
        del one
        gc.collect()
        assert alive() is None


def test_methods_of_two_instances_are_told_apart():
    class Scale:
        def __init__(self, rate):
            self.rate = rate

        def __eq__(self, other):
            return type(other) is Scale

        __hash__ = None

        def apply(self, x):
            return self.rate * x

    assert [float(eqx.filter_jit(Scale(r).apply)(jnp.ones(()))) for r in (1, 2)] == [
        1,
        2,
    ]


def test_callables_without_weak_references_and_hashes_are_compiled():
    class Scale:
        __slots__ = ("rate",)

        def __init__(self, rate):
            self.rate = rate

        def apply(self, x):
            return self.rate * x

        def __call__(self, x):
            return self.rate + x

    @dataclasses.dataclass(frozen=True)
    class Factors:
        values: list

        def __call__(self, x):
            return self.values[0] * x

    scale, factors = Scale(2), Factors([3])
    with pytest.raises(TypeError, match="weak reference"):
        weakref.ref(scale)
    one = jnp.ones(())
    calls = (eqx.filter_jit(f) for f in (scale.apply, scale, factors))
    assert [float(f(one)) for f in calls] == [2, 3, 3]


def test_wrapping_a_callable_without_weak_references_again_compiles_nothing():
    class Slots:
        __slots__ = ()

        def __call__(self, x):
            Traced.count += 1
            return x

        def apply(self, x):
            return self(x)

    one, other = Slots(), Slots()
    for f, g in (one, other), (one.apply, other.apply):
        assert eqx.filter_jit(f) == eqx.filter_jit(f) != eqx.filter_jit(g)
        assert traces_of(lambda f=f: eqx.filter_jit(f)) == 1


def test_wrapping_a_model_or_its_method_again_compiles_nothing():
    model = TracedModule([jnp.ones(2)])
    update = eqx.filter_jit(lambda m: m)
    assert traces_of(lambda: eqx.filter_jit(model)) == 1
    assert traces_of(lambda: eqx.filter_jit(TracedModule([jnp.ones(2)]))) == 0
    assert traces_of(lambda: eqx.filter_jit(update(model))) == 0
    assert traces_of(lambda: eqx.filter_jit(model.other)) == 1
    assert traces_of(lambda: eqx.filter_jit(update(model).other)) == 0


class Holder(eqx.Module):
    part: Any

    def __init__(self):
        self.part = eqx.filter_jit(TracedModule([jnp.ones(2)]))


def test_models_that_hold_a_compiled_part_have_equal_structures():
    model = Holder()
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), Holder()]
    for other in others:
        assert jax.tree.structure(other) == jax.tree.structure(model)
        assert eqx.tree_equal(other, model)


def test_function_that_wraps_another_has_programs_of_its_own():
    def inner(x):
        return x + 1

    eqx.filter_jit(inner)(jnp.ones(2))

    @functools.wraps(inner)
    def outer(x):
        return inner(x) * 2

    assert eqx.filter_jit(outer)(jnp.ones(2)).tolist() == [4, 4]
    assert eqx.filter_jit(inner)(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("first", [True, False])
def test_keywords_are_found_in_any_order(first):
    traces = []

    @eqx.filter_jit
    def f(x, *, a, b):
        traces.append(1)
        return x + a - b

    x = jnp.ones(())
    orders = [{"a": x, "b": 2 * x}, {"b": 2 * x, "a": x}]
    for kwargs in orders if first else orders[::-1]:
        assert f(x, **kwargs) == 0
    assert len(traces) == 1


def test_list_within_itself_does_not_harm_the_interpreter():
    f = eqx.filter_jit(lambda x: x)
    itself: list[Any] = []
    itself.append(itself)
    for _ in range(2):  # before the first call, and after it
        for _ in range(300):
            with pytest.raises(
                ValueError, match=r"at `x` contains itself, at `x\[0\]`"
            ):
                f(itself)
        assert f([jnp.ones(())])[0] == 1

    def depth(n):
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(sys.getrecursionlimit() // 2) > 0


def test_wrapping_in_a_finaliser_does_not_hang():
    done = []

    class Finalised:
        def __del__(self):
            done.append(eqx.filter_jit(lambda x: x, donate="arrays"))

    def work():
        for _ in range(50):
            cycle: list[Any] = [Finalised()]
            cycle.append(cycle)
            eqx.filter_jit(lambda x: x, donate="arrays")
        gc.collect()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and done


@pytest.mark.parametrize("devices", [1, 4])
def test_record_of_donated_arrays_keeps_none_of_them(devices):
    mesh = jax.make_mesh((devices,), ("x",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.ones(8), sharding)
    np.asarray(x)  # from now on it may have a copy on the host
    f = eqx.filter_jit(lambda x: x + 1, donate="arrays")
    compiled = f.lower(x).compile()
    for call in (f, f, compiled):
        x = jax.device_put(jnp.ones(8), sharding)
        np.asarray(x)
        call(x)
        with pytest.raises(eqx.DonationError, match="donated to `<lambda>`"):
            call(x)
        seen = weakref.ref(x)
        del x
        gc.collect()
        assert seen() is None
